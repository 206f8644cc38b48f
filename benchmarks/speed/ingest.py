"""Encoding speed; measured by `kvrag.bench.ingest`."""

from __future__ import annotations

import argparse
import json
import sys

from kvrag.backend.transformers.shapes import random_model
from kvrag.bench.ingest import measure
from kvrag.cli.bench import add_number, add_shape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    add_number(parser, "--chunks", 16, "to encode")
    add_number(parser, "--chunk-tokens", 256, "tokens per chunk")
    add_number(parser, "--document-chunks", 1, "chunks per document, each the context of the next", least=1)
    add_number(parser, "--overlap", 0.0, "share of a chunk that repeats the end of the one before")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    print("measuring", file=sys.stderr, flush=True)
    net = random_model(args.model, args.layers)
    result = measure(net, args.chunks, args.chunk_tokens, args.document_chunks, args.repeats, args.overlap)
    if args.json:
        print(json.dumps(result))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result["settings"].items()))
    for name, rate in result["tokens_per_s"].items():
        print(f"{name:14}{rate:10.0f} tokens/s")
    print(f"share of the model's own forward pass: {result['share']:.2f}, of CPU time {result['cpu_share']:.2f}")
    return 0
