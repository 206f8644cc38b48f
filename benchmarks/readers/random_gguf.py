"""Write a GGUF file of an 8B's shape with random weights in Q4_0: valid for speed and memory, useless for answers.

    python -m benchmarks.readers.random_gguf LIKE.gguf FILE.gguf    # 4.7 GB

The tokenizer and other settings are those of another file of a dense Qwen2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

_ARCHITECTURE = "qwen2"
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 4096, 14336, 32, 32, 8  # Llama 3.1 8B's
_BLOCK, _BLOCK_BYTES, _SCALE = 32, 18, 3e-3  # of Q4_0: a scale in 16 bits, and 32 numbers of 4 bits
_CHANGED = {
    "block_count": _LAYERS,
    "embedding_length": _HIDDEN,
    "feed_forward_length": _INNER,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _KV_HEADS,
}


def main() -> int:
    """Write the file; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers.random_gguf", description=__doc__)
    parser.add_argument("like", type=Path)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    like, writer = GGUFReader(args.like), GGUFWriter(args.file, _ARCHITECTURE)
    for field in like.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            value = _CHANGED.get(field.name.removeprefix(f"{_ARCHITECTURE}."), field.contents())
            kinds = field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, value, *kinds)
    num_vocab = len(like.fields["tokenizer.ggml.tokens"].data)
    for name, numbers in _tensors(num_vocab):
        writer.add_tensor(name, numbers, raw_dtype=GGMLQuantizationType.Q4_0 if numbers.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 0


def _tensors(num_vocab: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield names and numbers of all tensors; matrices as bytes."""
    ones, half = np.ones(_HIDDEN, np.float32), _HIDDEN * _KV_HEADS // _HEADS
    for name in ("token_embd", "output"):
        yield f"{name}.weight", _matrix(num_vocab, _HIDDEN)
    yield "output_norm.weight", ones
    for layer in range(_LAYERS):
        rows = {"attn_q": _HIDDEN, "attn_k": half, "attn_v": half}
        for name, count in (rows | {"attn_output": _HIDDEN, "ffn_gate": _INNER, "ffn_up": _INNER}).items():
            yield f"blk.{layer}.{name}.weight", _matrix(count, _HIDDEN)
        for name, count in rows.items():
            yield f"blk.{layer}.{name}.bias", np.zeros(count, np.float32)
        yield f"blk.{layer}.ffn_down.weight", _matrix(_HIDDEN, _INNER)
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", ones


def _matrix(rows: int, columns: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(rows)
    blocks = random.integers(0, 256, (rows, columns // _BLOCK, _BLOCK_BYTES), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(_SCALE).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


if __name__ == "__main__":
    sys.exit(main())
