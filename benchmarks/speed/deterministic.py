"""Cost of `deterministic=True`: time to first token and tokens per second, with it and without, alternating in one run.

Requests have the same warmed chunks in different orders and different questions. Alone, one request is answered at a
time; at once, several are. The next turn of each conversation is measured too: without `deterministic`, it reuses the
conversation.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.settings import run_settings
from benchmarks.shapes import random_model
from benchmarks.speed.first_token import add_shape
from kvrag import BlendEngine, Model
from kvrag.cli.common import add_number
from kvrag.types import Messages


def measure(
    net: Model, rows: int = 4, chunks: int = 4, chunk_tokens: int = 128, answer_tokens: int = 24, repeats: int = 3
) -> dict[str, Any]:
    """Return medians over the rounds after one warm-up round, each with its ratio to the default, and `settings`."""
    net.__dict__["eos_ids"] = frozenset()  # every answer has its full length
    draw = random.Random(0)
    texts = [" ".join(str(draw.randrange(10**6)) for _ in range(chunk_tokens // 4)) for _ in range(chunks)]
    measured: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder) as engine:
        engine.warm(texts)
        for repeat in range(repeats + 1):
            for deterministic in (False, True) if repeat % 2 else (True, False):
                prompts = [_question(draw, texts) for _ in range(rows)]
                for name, value in _round(engine, prompts, answer_tokens, deterministic).items() if repeat else ():
                    measured[f"deterministic_{name}" if deterministic else name].append(value)
    result: dict[str, Any] = {name: statistics.median(values) for name, values in measured.items()}
    for name in [name for name in measured if not name.startswith("deterministic_")]:
        pairs = zip(measured[f"deterministic_{name}"], measured[name], strict=True)
        result[f"{name}_ratio"] = statistics.median(ours / usual for ours, usual in pairs)
    sizes = {"rows": rows, "chunks": chunks, "chunk_tokens": chunk_tokens, "answer_tokens": answer_tokens}
    return result | {"settings": run_settings(net) | sizes | {"repeats": repeats}}


def _question(draw: random.Random, texts: list[str]) -> Messages:
    number = draw.randrange(10**6)
    shuffled = "\n\n".join(draw.sample(texts, len(texts)))
    return [{"role": "user", "content": f"Request {number}.\n\n{shuffled}\n\nWhich number is next to {number}?"}]


def _round(engine: BlendEngine, prompts: list[Messages], tokens: int, deterministic: bool) -> dict[str, float]:
    def answer(prompt: Messages) -> tuple[float, str]:
        options: Any = {"deterministic": deterministic, "controller": "off", "ratio": 0.15, "temperature": 0}
        deltas = list(engine.stream(prompt, max_new_tokens=tokens, **options))
        assert deltas[-1].report is not None
        return deltas[-1].report.ttft_s, "".join(delta.text for delta in deltas)

    started = time.perf_counter()
    first, said = answer(prompts[0])
    alone_s = time.perf_counter() - started
    turn = [*prompts[0], {"role": "assistant", "content": said}, {"role": "user", "content": "And the one after it?"}]
    following, _ = answer(turn)
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        at_once = [ttft_s for ttft_s, _ in pool.map(answer, prompts)]
    seconds = time.perf_counter() - started
    return {
        "ttft_s": first,
        "tokens_per_s": tokens / alone_s,
        "next_turn_ttft_s": following,
        "at_once_ttft_s": statistics.mean(at_once),
        "at_once_tokens_per_s": tokens * len(prompts) / seconds,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    add_number(parser, "--rows", 4, "answers at once")
    add_number(parser, "--chunks", 4, "chunks per prompt")
    add_number(parser, "--chunk-tokens", 128, "tokens per chunk, about")
    add_number(parser, "--answer-tokens", 24, "tokens of an answer")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    net = random_model(args.model, args.layers)
    result = measure(net, args.rows, args.chunks, args.chunk_tokens, args.answer_tokens, args.repeats)
    if args.json:
        print(json.dumps(result))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result["settings"].items()))
    for name in [name.removesuffix("_ratio") for name in result if name.endswith("_ratio")]:
        usual, ours = result[name], result[f"deterministic_{name}"]
        print(f"{name:<22} {usual:>9.3f}   deterministic {ours:>9.3f}   {result[f'{name}_ratio']:.2f}x")
    return 0
