"""`kvrag estimate`: estimate disk usage without loading weights."""

from __future__ import annotations

import argparse
import json

from kvrag.backend.gguf import read_header
from kvrag.backend.hub import check_model
from kvrag.cli.common import DTYPES, add_number, add_setting, at_least, read_files, say_if_reader
from kvrag.config import CODECS
from kvrag.errors import SettingError
from kvrag.retrieval import documents
from kvrag.words import counted, human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag estimate`."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files and folders of the corpus")
    names = "hub name, folder, GGUF file, 'ollama:NAME' or 'reader'; no weights are loaded"
    add_setting(parser, "model", names, default="reader")
    parser.add_argument("--tokens", type=at_least(0), metavar="N", help="size of the corpus in tokens, instead of PATH")
    add_number(parser, "--chunk-tokens", 256, "length of a typical chunk", least=1)
    add_setting(parser, "codec")
    add_setting(parser, "dtype", "dtype of the model; default: as stored", choices=DTYPES[1:], default=None)
    parser.add_argument("--text-field", default="text", metavar="NAME", help="text field of objects in .jsonl files")


def run(args: argparse.Namespace) -> int:
    """Print the estimates."""
    if args.paths and args.tokens is not None:
        raise SettingError("PATH and --tokens exclude each other: pass one of them")
    if args.paths:
        documents.find(args.paths)  # report mistakes before the slow imports
    check_model(args.model)
    say_if_reader(args)
    import torch

    from kvrag.backend.transformers.loading import bytes_per_token, head_dim, kv_dtype, load_config
    from kvrag.store.values import share

    config = load_config(args.model)
    dtype = getattr(torch, args.dtype) if args.dtype else kv_dtype(config)
    native = bytes_per_token(config, dtype)
    codecs = {codec: native * share(codec, args.chunk_tokens, head_dim(config), dtype) for codec in CODECS}
    per_token = codecs[args.codec]
    header = read_header(args.model)
    memory = header.num_weights * dtype.itemsize if header else 0
    tokens = _count(args) if args.paths else args.tokens
    chunk = args.chunk_tokens * per_token
    if args.json:
        result = {"model": args.model, "codec": args.codec, "bytes_per_token": per_token, "codecs": codecs}
        if header:
            result["weights"] = {"kind": header.kind, "bytes": header.num_bytes, "memory_bytes": memory}
        result |= {"tokens": tokens, "bytes": None if tokens is None else tokens * per_token}
        print(json.dumps(result | {"chunk_tokens": args.chunk_tokens, "chunk_bytes": chunk}))
        return 0
    if header:
        print(
            f"{args.model}: {human_bytes(header.num_bytes)} of weights, most of them {header.kind}, need "
            f"{human_bytes(memory)} of memory, dequantised to {str(dtype).removeprefix('torch.')}"
        )
    per_chunk = f"{human_bytes(chunk)} per chunk of {args.chunk_tokens} tokens"
    print(f"{args.model}: {human_bytes(per_token)} of KV per token, {per_chunk}")
    print("by codec: " + ", ".join(f"{codec} {human_bytes(size)} per token" for codec, size in codecs.items()))
    if tokens is not None:
        print(f"corpus of {counted(tokens, 'token')}: {human_bytes(tokens * per_token)}")
    return 0


def _count(args: argparse.Namespace) -> int:
    from kvrag.backend.transformers.loading import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    texts = (text for content in read_files(args, "counting", []) for text in content.texts)
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
