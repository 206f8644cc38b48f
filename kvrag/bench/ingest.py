"""Ingestion speed in tokens per second, interleaved with the model's own batched forward pass over the same tokens.

The measured time includes tokenising, the forward pass, removing RoPE, and writing with fsync.
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

from kvrag.backend.transformers import Model
from kvrag.backend.transformers.shapes import random_model
from kvrag.bench.ttft import one_token_words, run_settings
from kvrag.config import DEFAULT_CONTEXT
from kvrag.engine import BlendEngine
from kvrag.ingest.encode import BATCH_TOKENS


def measure(net: Model, chunks: int, chunk_tokens: int, document_chunks: int, repeats: int) -> dict[str, Any]:
    """Return medians over `repeats` after one warm-up round; a document consists of `document_chunks` chunks."""
    words, rng = one_token_words(net), random.Random(0)
    rates: dict[str, list[float]] = {"engine": [], "forward": []}
    for repeat in range(repeats + 1):
        texts = ["".join(rng.choices(words, k=chunk_tokens)) for _ in range(chunks)]
        sources = [f"document {number // document_chunks}" for number in range(chunks)]
        with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder, ram_bytes=0) as engine:
            started = time.perf_counter()
            report = engine.warm(texts, sources=sources)
            engine_s = time.perf_counter() - started
        forward_s = _forward(net, texts)
        if repeat:
            rates["engine"].append(report.tokens / engine_s)
            rates["forward"].append(report.tokens / forward_s)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    settings = run_settings(net) | {
        "chunks": chunks,
        "chunk_tokens": chunk_tokens,
        "document_chunks": document_chunks,
        "context_tokens": DEFAULT_CONTEXT,
        "repeats": repeats,
    }
    return {"tokens_per_s": medians, "share": medians["engine"] / medians["forward"], "settings": settings}


@torch.inference_mode()
def _forward(net: Model, texts: list[str]) -> float:
    """Return the seconds of transformers' forward pass alone, in batches of the same size."""
    ids = torch.tensor([net.tokenizer.encode(text) for text in texts], device=net.device)
    started = time.perf_counter()
    for batch in ids.split(max(1, BATCH_TOKENS // ids.shape[1])):  # type: ignore[no-untyped-call]
        net.hf(input_ids=batch, use_cache=True, logits_to_keep=1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    print("measuring", file=sys.stderr, flush=True)
    net = random_model(args.model, args.layers)
    result = measure(net, args.chunks, args.chunk_tokens, args.document_chunks, args.repeats)
    if args.json:
        print(json.dumps(result))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result["settings"].items()))
    for name, rate in result["tokens_per_s"].items():
        print(f"{name:8}{rate:10.0f} tokens/s")
    print(f"share of the model's own forward pass: {result['share']:.2f}")
    return 0
