"""Check of a new GPU in one run without a network: exactness, time to first token, ingestion, a profile.

All models have real shapes and random weights. A part that fails, for lack of memory for example, is reported, and the
next one runs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.shapes import SHAPES, one_token_words, random_model
from benchmarks.speed import first_token
from benchmarks.speed.first_token import TtftResult, TtftSetup
from kvrag.backend.transformers import Model
from kvrag.cli.common import add_number, at_least
from kvrag.engine import BlendEngine
from kvrag.inspect.gate import verify

_CHUNK_TOKENS = 512
_INGESTED = 32  # chunks
_RAM, _DEVICE = 64 << 30, 16 << 30
_TIERS = {"RAM": (_RAM, 0), "device tier": (_RAM, _DEVICE), "disk": (0, 0)}  # bytes in RAM, on the device
_GATE_LAYERS = 4
_OUT_OF_TIME = "out of time"


@dataclass(frozen=True)
class Part:
    """One part of the run: its result, or the reason why there is none."""

    name: str
    seconds: float
    result: Any = None
    failure: str = ""


class GpuCheck:
    """Runs the parts until the time is over."""

    def __init__(self, seconds: float, progress: Callable[[str], None]) -> None:
        self.parts: list[Part] = []
        self._started, self._seconds, self._progress = time.perf_counter(), seconds, progress

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result of a part; None if it failed or came too late."""
        started = time.perf_counter()
        if started - self._started > self._seconds:
            self.parts.append(Part(name, 0.0, failure=_OUT_OF_TIME))
            return None
        self._progress(f"{started - self._started:4.0f} s  {name}")
        try:
            result, failure = work(), ""
        except Exception as error:  # any failure of a new machine: the other parts still run
            result, failure = None, f"{type(error).__name__}: {error}".splitlines()[0]
        kept = result.name if isinstance(result, Model) else result
        self.parts.append(Part(name, time.perf_counter() - started, kept, failure))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(SHAPES),
        default=["qwen2.5-1.5b", "llama-3.1-8b"],
        help="shapes of the random models (default: qwen2.5-1.5b llama-3.1-8b)",
    )
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="use only the first N layers")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=at_least(512),
        default=[2048, 4096, 16384, 32768],
        metavar="N",
        help="lengths of the prompts (default: 2048 4096 16384 32768)",
    )
    parser.add_argument("--device", help="device: cuda, cpu, ... (default: a GPU if there is one)")
    add_number(parser, "--repeats", 3, "rounds per length; the median counts")
    add_number(parser, "--seconds", 450, "no part begins later than this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there as JSON")


def measure(args: argparse.Namespace, progress: Callable[[str], None]) -> list[Part]:
    """Run all parts, the most important first."""
    run = GpuCheck(args.seconds, progress)
    for dtype in (torch.float32, torch.bfloat16):
        run.part(f"gate, {str(dtype).removeprefix('torch.')}", partial(_gate, args, dtype))
    for shape in args.models:
        net = run.part(f"{shape}: build", partial(random_model, shape, args.layers, device=args.device))
        if net is None:
            continue
        setup = TtftSetup(chunk_tokens=_CHUNK_TOKENS - 2, policies=("none", "first_k", "query"), repeats=args.repeats)
        for tokens in (tokens for tokens in args.tokens if tokens + _CHUNK_TOKENS <= net.context_window):
            setup = replace(setup, chunks=tokens // _CHUNK_TOKENS)
            for tier, (ram_bytes, device_bytes) in _TIERS.items():
                tiered = replace(setup, ram_bytes=ram_bytes, device_bytes=device_bytes)
                run.part(f"{shape}: {tokens} tokens from {tier}", partial(first_token.measure, tiered, net=net))
        run.part(f"{shape}: profile", partial(_profile, setup, net))
        run.part(f"{shape}: ingestion", partial(_ingestion, net))
        del net
    return run.parts


def _gate(args: argparse.Namespace, dtype: torch.dtype) -> list[dict[str, Any]]:
    num_layers = min(args.layers or _GATE_LAYERS, _GATE_LAYERS)
    model = random_model(args.models[0], num_layers, dtype, args.device)
    return [asdict(check) for check in verify(partial(BlendEngine, model))]


def _profile(setup: TtftSetup, net: Model) -> str:
    """Return the operations that take most of the time of one blended prompt."""
    tables: list[str] = []

    def ask(*arguments: Any) -> Any:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (net.device.type == "cuda")
        with profile(activities=activities) as profiler:
            report = first_token.ask(*arguments)
        key = "self_cuda_time_total" if net.device.type == "cuda" else "self_cpu_time_total"
        tables.append(profiler.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=50))
        return report

    first_token.measure(replace(setup, repeats=1, policies=("query",)), ask, net=net)
    return tables[-1]


def _ingestion(net: Model) -> str:
    """Return the speed of encoding and writing chunks, the second time: the first warms up."""
    words, rng = one_token_words(net), random.Random(0)
    with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder, ram_bytes=0) as engine:
        for _ in range(2):
            report = engine.warm(["".join(rng.choices(words, k=_CHUNK_TOKENS)) for _ in range(_INGESTED)])
    return f"{report.tokens / report.seconds:.0f} tokens/s"


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and write JSON."""
    parts = measure(args, lambda line: print(line, file=sys.stderr, flush=True))
    result = json.dumps([asdict(part) for part in parts], indent=1)
    if args.out:
        args.out.write_text(result)
    print(result if args.json else "\n".join(line for part in parts for line in _lines(part)))
    checks = [check for part in parts if part.name.startswith("gate") for check in part.result or ()]
    has_failed = any(part.failure not in ("", _OUT_OF_TIME) for part in parts)
    return int(has_failed or not all(check["passed"] for check in checks))


def _lines(part: Part) -> list[str]:
    if part.failure:
        return [f"{part.name}: {part.failure}"]
    if isinstance(part.result, TtftResult):
        times = [f"{row.name} {row.ttft_s * 1000:.0f} ms {row.speedup:.2f}x" for row in part.result.rows]
        return [f"{part.name} ({part.result.prompt_tokens}): {', '.join(times)}"]
    if isinstance(part.result, list):
        marks = [f"{'ok' if check['passed'] else 'FAILED'} {check['name']}" for check in part.result]
        return [part.name, *(f"  {mark}" for mark in marks)]
    return [f"{part.name}: {part.result}"]
