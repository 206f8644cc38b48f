"""Ingestion speed in tokens per second, interleaved with the model's own batched forward pass over the same documents.

The measured time includes tokenising, the forward pass, removing RoPE, and writing with fsync. Text that several chunks
contain counts once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.settings import run_settings
from benchmarks.shapes import one_token_words, random_model
from benchmarks.speed.first_token import add_shape
from kvrag.backend.transformers import Model
from kvrag.cli.common import add_number
from kvrag.config import DEFAULT_CONTEXT
from kvrag.engine import BlendEngine
from kvrag.ingest.encode import BATCH_TOKENS

_LENGTHS = (256, 512, 1024)  # tokens per row of the model's own forward pass: the fastest counts

Rate = dict[str, float]
"""Tokens per second of wall-clock time and of CPU time."""


def measure(
    net: Model, chunks: int, chunk_tokens: int, document_chunks: int, repeats: int, overlap: float = 0.0
) -> dict[str, Any]:
    """Return medians over `repeats` after one warm-up round.

    Args:
        document_chunks: Chunks of a document.
        overlap: Share of a chunk that repeats the end of the one before.
    """
    words, rng = one_token_words(net), random.Random(0)
    step = max(1, round(chunk_tokens * (1 - overlap)))
    rates: dict[str, list[Rate]] = {"engine": [], **{f"forward {length}": [] for length in _LENGTHS}}
    for repeat in range(repeats + 1):
        text = ""
        texts: list[str] = []
        sources: list[str] = []
        for first in range(0, chunks, document_chunks):
            count = min(document_chunks, chunks - first)
            document = rng.choices(words, k=(count - 1) * step + chunk_tokens)
            text += "".join(document)
            # splitters cut without the space at the beginning
            texts += ["".join(document[i * step :][:chunk_tokens]).lstrip() for i in range(count)]
            sources += [f"document {first}"] * count
        ids = torch.tensor(net.tokenizer.encode(text), device=net.device)
        measured = {"engine": _engine(net, texts, sources, len(ids))}
        for length in _LENGTHS:
            measured[f"forward {length}"] = _forward(net, ids[:BATCH_TOKENS], min(length, len(ids)))
        for name, rate in measured.items() if repeat else ():
            rates[name].append(rate)
    medians = {
        name: {clock: statistics.median(rate[clock] for rate in values) for clock in ("wall", "cpu")}
        for name, values in rates.items()
    }
    best = {clock: max(medians[f"forward {length}"][clock] for length in _LENGTHS) for clock in ("wall", "cpu")}
    settings = run_settings(net) | {
        "chunks": chunks,
        "chunk_tokens": chunk_tokens,
        "document_chunks": document_chunks,
        "overlap": overlap,
        "context_tokens": DEFAULT_CONTEXT,
        "repeats": repeats,
    }
    wall = {name: rate["wall"] for name, rate in medians.items()} | {"forward": best["wall"]}
    share = {clock: medians["engine"][clock] / best[clock] for clock in best}
    return {"tokens_per_s": wall, "share": share["wall"], "cpu_share": share["cpu"], "settings": settings}


def _engine(net: Model, texts: list[str], sources: list[str], tokens: int) -> Rate:
    with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder, ram_bytes=0) as engine:
        wall, cpu = time.perf_counter(), time.process_time()
        engine.warm(texts, sources=sources)
        return {"wall": tokens / (time.perf_counter() - wall), "cpu": tokens / (time.process_time() - cpu)}


@torch.inference_mode()
def _forward(net: Model, ids: torch.Tensor, length: int) -> Rate:
    """Measure transformers' forward pass alone, on rows of this length in one batch."""
    rows = ids[: len(ids) // length * length].view(-1, length)
    wall, cpu = time.perf_counter(), time.process_time()
    net.hf(input_ids=rows, use_cache=True, logits_to_keep=1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    tokens = rows.numel()
    return {"wall": tokens / (time.perf_counter() - wall), "cpu": tokens / (time.process_time() - cpu)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    add_number(parser, "--chunks", 16, "to encode")
    add_number(parser, "--chunk-tokens", 256, "tokens per chunk")
    add_number(parser, "--document-chunks", 1, "chunks per document, each the context of the next", least=1)
    add_number(parser, "--overlap", 0.0, "share of a chunk that repeats the end of the one before", most=1)


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
