"""Fingerprint of a checkpoint, from a few elements of each tensor in its files; equal to that of the loaded model."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import cached_file

from kvrag.backend.transformers import loading
from kvrag.backend.transformers.model import fingerprint
from kvrag.backend.transformers.tokenizer import Tokenizer
from kvrag.errors import ModelLoadError, UnsupportedModelError
from kvrag.fingerprint import Fingerprint, hash_samples, sample_step

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_WEIGHTS = {
    "quantization_config": "it is quantised",
    "transformers_weights": "its configuration names another file with weights",
}

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def checkpoint_fingerprint(
    name_or_path: str | Path,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
    preamble: bool = True,
) -> Fingerprint:
    """Return the fingerprint of `Model.from_pretrained(name_or_path, dtype=dtype)` without loading its weights.

    For engines that keep the weights in another form, such as vLLM, to share a store with transformers. Weights are
    memory-mapped and at most 511 elements of each tensor are read, so the time depends on the number of tensors, not on
    their size. Nothing is downloaded.

    Args:
        name_or_path: A folder, the name of a model in the local hub cache, or `"reader"`.
        dtype: The dtype in which the model runs; weights stored in another one are cast.
        revision, trust_remote_code, preamble: As in `Model.from_pretrained`.

    Raises:
        ModelLoadError: Files are missing or damaged, there are no safetensors files, or tensors are missing.
        UnsupportedModelError: The model cannot be blended, or the loaded weights do not follow from the files in a
            simple way: quantised checkpoints, tensors that transformers merges or splits (experts), weights kept in
            float32.
    """
    name = str(name_or_path)
    config = loading.load_config(name, revision, trust_remote_code, local_files_only=True)
    for setting, reason in _OTHER_WEIGHTS.items():
        if getattr(config, setting, None) or getattr(config.get_text_config(), setting, None):
            raise _unsupported(name, reason)
    stored = {key: tensor for file in _files(name, revision) for key, tensor in _mapped(name, file)}
    hf = _without_weights(name, config, dtype, trust_remote_code)
    tokenizer = loading.load_tokenizer(name, revision, trust_remote_code, local_files_only=True)
    weights = hash_samples(_samples(name, hf, stored))
    return fingerprint(name, hf, Tokenizer(tokenizer, name, preamble), weights)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a memory-mapped file."""

    bits: NDArray[np.unsignedinteger[Any]]
    dtype: torch.dtype
    shape: tuple[int, ...]

    def sample(self) -> Tensor:
        """Return the elements that are hashed; reads no others."""
        bits = self.bits[:: sample_step(self.bits.size)]
        return torch.from_numpy(bits.copy()).view(self.dtype)


def _files(name: str, revision: str | None) -> list[str]:
    """Return the paths of the safetensors files that transformers would read."""
    if file := _find(name, _WEIGHTS, revision):
        return [file]
    index = _find(name, _INDEX, revision)
    if index is None:
        raise _damaged(
            name, f"neither {_WEIGHTS} nor {_INDEX} is there; other formats, such as .bin, are not supported"
        )
    try:
        shards = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(name, f"{_INDEX} cannot be read ({error!r:.160})") from error
    files = {shard: _find(name, shard, revision) for shard in shards}
    if missing := [shard for shard, file in files.items() if file is None]:
        raise _damaged(name, f"{missing[0]} is missing")
    return [file for file in files.values() if file is not None]


def _find(name: str, file: str, revision: str | None) -> str | None:
    path = loading.model_path(name)
    try:
        return cached_file(path, file, revision=revision, local_files_only=True)
    except OSError:  # not there
        return None


def _mapped(name: str, file: str) -> Iterator[tuple[str, _Stored]]:
    """Yield names and tensors of a safetensors file."""
    # without MADV_RANDOM, read-ahead reads most of the file: 1200 MB instead of 6 MB (six tensors, cold)
    try:
        with open(file, "rb") as opened:
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            content.madvise(mmap.MADV_RANDOM)
        data = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:data])
        header.pop("__metadata__", None)
        for key, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise _unsupported(name, f"{Path(file).name} holds {entry['dtype']} tensors")
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            start = data + entry["data_offsets"][0]
            # raises ValueError if the file is too short
            bits = np.frombuffer(content, f"<u{dtype.itemsize}", prod(shape), start)
            yield key, _Stored(bits, dtype, shape)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(name, f"{Path(file).name} is damaged ({error!r:.160})") from error


def _without_weights(name: str, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Return the transformers model with tensors that have a shape and a dtype, but no memory."""
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # architectures fail in different ways
        raise _unsupported(name, f"its layers cannot be created without weights ({error!r:.160})") from error
    if hf._get_dtype_plan(dtype):
        raise _unsupported(name, f"transformers keeps some of its weights in float32, not in {dtype}")
    return hf


def _samples(name: str, hf: Any, stored: Mapping[str, _Stored]) -> Iterator[tuple[str, Sequence[int], Tensor]]:
    """Yield name, shape and sample of each tensor of the model's `state_dict`."""
    sources = _sources(name, hf, stored)
    for key, tensor in hf.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        source = next((stored[sources[other]] for other in (key, *_tied(hf, key)) if other in sources), None)
        if source is None:
            raise _damaged(name, f"its files have no weights for {key}")
        if source.shape != tensor.shape:
            raise _damaged(name, f"{key} has shape {source.shape}, but the configuration says {tuple(tensor.shape)}")
        yield key, tensor.shape, source.sample().to(tensor.dtype)


def _sources(name: str, hf: Any, stored: Mapping[str, _Stored]) -> dict[str, str]:
    """Return name in the `state_dict` -> name in the files, by the rules of `from_pretrained`."""
    state, prefix = hf.state_dict(), hf.base_model_prefix
    transforms = get_model_conversion_mapping(hf)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    sources: dict[str, str] = {}
    for key in stored:
        renamed, converter = rename_source_key(key, renamings, converters, prefix, state)
        if renamed not in state and key in state:
            renamed, converter = rename_source_key(key, [], [], prefix, state)
        if renamed not in state:
            continue  # transformers ignores it too
        if converter is not None:
            raise _unsupported(name, f"transformers merges or splits {key} on loading")
        if renamed in sources:
            raise _unsupported(name, f"{sources[renamed]} and {key} are both {renamed}")
        sources[renamed] = key
    return sources


def _tied(hf: Any, key: str) -> list[str]:
    """Return the names that share their weights with `key`, in the order in which transformers looks for a source."""
    tied = hf.all_tied_weights_keys
    first = tied.get(key, key)
    return [first, *(other for other, source in tied.items() if source == first)]


def _damaged(name: str, reason: str) -> ModelLoadError:
    return ModelLoadError(f"cannot read the weights of {name!r}: {reason}")


def _unsupported(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the fingerprint of {name!r} cannot be computed from its files: {reason}")
