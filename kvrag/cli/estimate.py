"""`kvrag estimate`: estimate disk usage without loading weights."""

from __future__ import annotations

import argparse
import json

from kvrag.backend.hub import check_model
from kvrag.cli.common import DTYPES, add_number, add_setting, say_if_reader
from kvrag.config import CODECS
from kvrag.words import human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag estimate`."""
    names = "hub name, folder, GGUF file, 'ollama:NAME' or 'reader'; no weights are loaded"
    add_setting(parser, "model", names, default="reader")
    add_number(parser, "--chunk-tokens", 256, "length of a typical chunk", least=1)
    add_setting(parser, "dtype", "dtype of the model; default: as stored", choices=DTYPES[1:], default=None)


def run(args: argparse.Namespace) -> int:
    """Print the bytes of a token and of a million tokens, by codec."""
    check_model(args.model)
    say_if_reader(args)
    import torch

    from kvrag.backend.transformers.gguf import read_header
    from kvrag.backend.transformers.loading import bytes_per_token, head_dim, kv_dtype, load_config
    from kvrag.store.values import share

    if header := read_header(args.model):
        dtype, dim = torch.float16, header.dims[0]
        native = header.numbers_per_token * dtype.itemsize
    else:
        config = load_config(args.model)
        dtype, dim = getattr(torch, args.dtype) if args.dtype else kv_dtype(config), head_dim(config)
        native = bytes_per_token(config, dtype)
    codecs = {codec: native * share(codec, args.chunk_tokens, dim, dtype) for codec in CODECS}
    if args.json:
        print(json.dumps({"model": args.model, "chunk_tokens": args.chunk_tokens, "bytes_per_token": codecs}))
        return 0
    print(f"KV of {args.model} on disk, by codec, in chunks of {args.chunk_tokens} tokens:")
    for codec, size in codecs.items():
        print(f"{codec:8} {human_bytes(size):>10} per token, {human_bytes(size * 1_000_000):>10} per million tokens")
    return 0
