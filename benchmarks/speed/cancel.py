"""Time from cancelling a task until the prefill of its prompt has ended, and the cost of the checks.

Each round cancels at another moment of the prefill. `checks_ratio` is the CPU time of one whole prefill, split and with
checks, relative to one without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from contextlib import nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.settings import run_settings
from benchmarks.shapes import random_model
from benchmarks.speed.first_token import add_shape
from kvrag import BlendEngine, Model
from kvrag.cli.common import add_number


def measure(net: Model, tokens: int = 2400, repeats: int = 5) -> dict[str, Any]:
    """Measure prompts of fresh tokens."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder, conversation_bytes=0) as engine:
        prompts = [[draw.randrange(300, 1000) for _ in range(tokens)] for _ in range(2 * repeats + 2)]

        def prefill() -> tuple[float, float]:
            started = time.perf_counter(), time.process_time()
            engine.generate(prompts.pop(), policy="full", max_new_tokens=1)
            return time.perf_counter() - started[0], time.process_time() - started[1]

        async def ended(after: float) -> float:
            task = asyncio.create_task(engine.agenerate(prompts.pop(), policy="full", max_new_tokens=1))
            await asyncio.sleep(after)
            task.cancel()
            started = time.perf_counter()
            await asyncio.gather(task, return_exceptions=True)
            return time.perf_counter() - started

        whole_s, checked = prefill()
        with patch.object(Model, "_interruptible", lambda *_: nullcontext()):
            unchecked = prefill()[1]
        ended_s = [asyncio.run(ended(whole_s * (number + 0.5) / repeats * 0.8)) for number in range(repeats)]
    return {
        "ended_s": ended_s,
        "median_s": median(ended_s),
        "max_s": max(ended_s),
        "prefill_s": whole_s,
        "checks_ratio": checked / unchecked,
        "settings": {**run_settings(net), "tokens": tokens, "repeats": repeats},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    add_number(parser, "--tokens", 2400, "tokens of the prompt, all fresh")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    result = measure(random_model(args.model, args.layers), args.tokens, args.repeats)
    if args.json:
        print(json.dumps(result))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result["settings"].items()))
    print(f"prefill {result['prefill_s']:.2f} s; CPU time with checks {result['checks_ratio']:.2f}x of that without")
    print(
        f"ended {result['median_s'] * 1000:.0f} ms after cancelling (median), at most {result['max_s'] * 1000:.0f} ms"
    )
    return 0
