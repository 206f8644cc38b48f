"""Where reuse wins and where it loses: the controller's cost model applied to other machines.

`--check` validates it on this machine: it fits one set of shapes and predicts another, which is then measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvrag.cli.common import at_least, checked
from kvrag.config import DEFAULT_POLICY, BlendConfig, check_option
from kvrag.control.cost import CostModel, Speed
from kvrag.types import BlendReport

if TYPE_CHECKING:  # the options of the command need the tables only
    from torch import Tensor

    from kvrag.backend.transformers import Model
    from kvrag.engine import BlendEngine


@dataclass(frozen=True)
class Device:
    """A compute device. Speeds are those of transformers' dense bf16 kernels, not of data sheets.

    Attributes:
        flops: FLOP/s in matrix products; attention is assumed to reach `attention` of that.
        memory: Bytes per second when reading weights.
        launch_s: Fixed seconds per layer of a pass: Python and kernel launches.
        into: Bytes per second from RAM to the device, rotation included.
        room: Bytes available for weights.
        source: Source of the numbers.
    """

    flops: float
    attention: float
    memory: float
    launch_s: float
    into: float
    room: float
    source: str


@dataclass(frozen=True)
class Shape:
    """A model shape. Numbers are from its published configuration; `params` excludes embeddings."""

    params: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        """KV bytes per token in bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


DEVICES = {
    "this CPU, 2 cores": Device(1.3e12, 0.5, 1.5e10, 2e-4, 1.2e9, 20e9, "fitted to docs/results.md"),
    "laptop CPU, 8 cores": Device(0.8e12, 0.35, 6e10, 1e-4, 4e9, 28e9, "assumed: AVX2/bf16, dual-channel DDR5"),
    "RTX 4090": Device(1.1e14, 0.5, 8e11, 7e-4, 1.2e10, 22e9, "assumed: 2/3 of 165 TFLOP/s, PCIe 4, pageable copies"),
    "H100": Device(4.5e14, 0.5, 2.4e12, 7e-4, 2e10, 74e9, "assumed: 45 % of 989 TFLOP/s, PCIe 5, pageable copies"),
    "4 H100, device_map": Device(4.5e14, 0.5, 2.4e12, 7e-4, 2e10, 300e9, "assumed: as H100, one at work at a time"),
    "H200": Device(4.5e14, 0.5, 3.4e12, 7e-4, 2e10, 135e9, "assumed: as H100 with faster memory"),
}
MODELS = {
    "Qwen2.5-0.5B": Shape(0.36e9, 24, 896, 14, 2, 64),
    "Qwen2.5-1.5B": Shape(1.31e9, 28, 1536, 12, 2, 128),
    "Llama-3.2-3B": Shape(2.82e9, 28, 3072, 24, 8, 128),
    "Llama-3.1-8B": Shape(6.98e9, 32, 4096, 32, 8, 128),
    "Qwen2.5-14B": Shape(13.1e9, 48, 5120, 40, 8, 128),
    "Qwen2.5-32B": Shape(31.0e9, 64, 5120, 40, 8, 128),
    "Llama-3.1-70B": Shape(68.5e9, 80, 8192, 64, 8, 128),
}
LOADS = {
    "HDD": 0.15e9,
    "SATA SSD": 0.5e9,
    "10 Gbit/s": 1.25e9,
    "NVMe, 3 GB/s": 3e9,
    "NVMe, 7 GB/s": 7e9,
    "RAM": 1e12,
}
CONTEXTS = (500, 1000, 2000, 4000, 8000, 16_000, 32_000)
_QUESTION = 64


@dataclass(frozen=True)
class Cell:
    """One case. `blend_s` is None if the model does not fit."""

    device: str
    model: str
    load: str
    context: int
    full_s: float | None = None
    blend_s: float | None = None
    ratio: float | None = None

    @property
    def text(self) -> str:
        """The speed-up, or the reason for none."""
        if self.full_s is None or self.blend_s is None or self.ratio is None:
            return "-"
        if self.ratio == 1.0:
            return f"full ({self.full_s / self.blend_s:.1f}x)"
        return f"{self.full_s / self.blend_s:.1f}x" + (f" at {self.ratio:g}" if self.ratio > 0.15 else "")


def speed_of(device: Device, shape: Shape, load: float) -> Speed:
    """Return the speeds that the controller would measure there."""
    row = 2 * shape.params / device.flops
    pair = 4 * shape.heads * shape.head_dim * shape.layers / (device.flops * device.attention)
    launch = 2 * shape.params / device.memory + shape.layers * device.launch_s
    return Speed(launch, row, pair, shape.bytes_per_token / device.into, load)


def simulate(
    devices: Sequence[str] = tuple(DEVICES),
    models: Sequence[str] = tuple(MODELS),
    loads: Sequence[str] = tuple(LOADS),
    contexts: Sequence[int] = CONTEXTS,
    ratio: float = 0.15,
    policy: str = DEFAULT_POLICY,
) -> Iterator[Cell]:
    """Return all combinations: chunks in bf16 fill the context, the first one, after the preamble, is not counted."""
    from kvrag.control.cost import Workload, blend_seconds, full_seconds
    from kvrag.control.plan import decide
    from kvrag.reuse.blend import selecting

    for device, model, load, context in itertools.product(devices, models, loads, contexts):
        shape = MODELS[model]
        cell = Cell(device, model, load, context)
        if 2 * shape.params <= DEVICES[device].room:
            selects = selecting(BlendConfig(policy=policy), shape.layers)
            size = 0 if load == "RAM" else context * shape.bytes_per_token
            request = Workload(context + _QUESTION, context, context, size, selects)
            speed = speed_of(DEVICES[device], shape, LOADS[load])
            full_s, blend_s = full_seconds(speed, request.prompt), blend_seconds(speed, request, ratio)
            is_full, _ = decide(speed, request, ratio)
            cell = replace(cell, full_s=full_s, blend_s=blend_s, ratio=1.0 if is_full else ratio)
        yield cell


def table(cells: Sequence[Cell], rows: str, columns: str) -> str:
    """Return a Markdown table; `rows` and `columns` are fields of Cell, all others must be equal in all cells."""
    names = list(dict.fromkeys(getattr(cell, columns) for cell in cells))
    lines = ["| | " + " | ".join(map(str, names)) + " |", "|---" * (len(names) + 1) + "|"]
    for row in dict.fromkeys(getattr(cell, rows) for cell in cells):
        cells_by_name = {getattr(cell, columns): cell.text for cell in cells if getattr(cell, rows) == row}
        lines.append(f"| {row} | " + " | ".join(cells_by_name[name] for name in names) + " |")
    return "\n".join(lines)


# -------------------------------------------------------------------- validation on this machine


@dataclass(frozen=True)
class Point:
    """A prediction and its measurement: seconds of the engine's prefill, medians."""

    name: str
    prompt_tokens: int
    predicted_full_s: float
    full_s: float
    predicted_blend_s: float
    blend_s: float
    decision: str


_LEARNED = ((3, 128), (4, 256), (4, 512))  # chunks, tokens of each
_PREDICTED = (  # name, chunks, tokens of each, policy, ratio, bytes per second at most
    ("long", 6, 512, DEFAULT_POLICY, 0.15, None),
    ("long, first_k", 6, 512, "first_k", 0.05, None),
    ("many short chunks", 16, 96, DEFAULT_POLICY, 0.3, None),
    ("short", 2, 96, DEFAULT_POLICY, 0.15, None),
    ("slow disk", 6, 512, DEFAULT_POLICY, 0.15, 20e6),
    ("very slow disk", 6, 512, DEFAULT_POLICY, 0.15, 5e6),
)


def check(net: Model, repeats: int, progress: Callable[[str], None]) -> list[Point]:
    """Fit some shapes with the engine's own cost model, predict others and measure them; the RAM tier is off."""
    from benchmarks.shapes import one_token_words
    from kvrag.control.cost import Workload, blend_seconds, full_seconds
    from kvrag.control.plan import decide
    from kvrag.engine import BlendEngine
    from kvrag.reuse.blend import selecting

    words, rng = one_token_words(net), random.Random(0)

    def corpus(count: int, tokens: int) -> list[str]:
        return ["".join(rng.choices(words, k=tokens)) for _ in range(count)]

    def ids(chunks: list[str]) -> list[int]:
        rng.shuffle(chunks)
        question = "".join(rng.choices(words, k=_QUESTION))
        return net.tokenizer.render([{"role": "user", "content": "\n\n".join([*chunks, question])}])

    def once(engine: BlendEngine, prompt: list[int], policy: str, ratio: float) -> tuple[float, BlendReport]:
        started = time.perf_counter()
        done = engine.prefill(prompt, BlendConfig(policy=policy, ratio=ratio))
        int(done.logits.argmax())  # waits for a GPU
        return time.perf_counter() - started, done.report

    points = []
    with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder, ram_bytes=0) as engine:
        for count, tokens in _LEARNED:
            progress(f"measuring {count} chunks of {tokens} tokens")
            chunks = corpus(count, tokens)
            engine.warm(chunks)
            for _ in range(repeats):
                once(engine, ids(chunks), "full", 1.0)
                once(engine, ids(chunks), DEFAULT_POLICY, 0.15)
        meter: CostModel = engine._planner._costs
        learned = meter.speed()
        if learned is None:
            raise SystemExit("the machine was too busy to measure its speed: run again when it is idle")
        size = meter.bytes_per_token(net.bytes_per_token)
        for name, count, tokens, policy, ratio, limit in _PREDICTED:
            progress(f"measuring: {name}")
            chunks = corpus(count, tokens)
            engine.warm(chunks)
            times: dict[str, list[float]] = {policy: [], "full": []}
            with _throttled(engine, limit):
                for repeat in range(repeats + 1):
                    prompt = ids(chunks)
                    full_s, _ = once(engine, prompt, "full", 1.0)
                    blend_s, report = once(engine, prompt, policy, ratio)
                    if repeat:
                        times["full"].append(full_s)
                        times[policy].append(blend_s)
            selects = selecting(BlendConfig(policy=policy), net.num_layers)
            stored = report.stored_tokens
            inexact = stored - len(report.runs[0])
            request = Workload(report.prompt_tokens, stored, inexact, stored * size, selects)
            speed = replace(learned, load=min(limit or learned.load, learned.load))
            medians = {name: statistics.median(values) for name, values in times.items()}
            points.append(
                Point(
                    name,
                    report.prompt_tokens,
                    full_seconds(speed, request.prompt),
                    medians["full"],
                    blend_seconds(speed, request, ratio),
                    medians[policy],
                    decide(speed, request, ratio)[1],
                )
            )
    return points


@contextmanager
def _throttled(engine: BlendEngine, bytes_per_s: float | None) -> Iterator[None]:
    """Limit the read rate of all chunk readers together."""
    if bytes_per_s is None:
        yield
        return
    store: Any = engine.store
    opening, free_at = store.open, [0.0]

    class Slow:
        def __init__(self, reader: Any) -> None:
            self._reader, self.tier, self.num_layers = reader, reader.tier, reader.num_layers
            self.key, self.namespace = reader.key, reader.namespace
            self.ids, self.context_tokens = reader.ids, reader.context_tokens

        @property
        def bytes_read(self) -> int:
            return int(self._reader.bytes_read)

        def layer(self, number: int) -> tuple[Tensor, Tensor]:
            keys, values = self._reader.layer(number)
            # one queue for all readers, like a disk
            free_at[0] = max(free_at[0], time.perf_counter()) + (keys.nbytes + values.nbytes) / bytes_per_s
            time.sleep(max(0.0, free_at[0] - time.perf_counter()))
            return keys, values

        def close(self) -> None:
            self._reader.close()

    store.open = lambda key: Slow(opening(key))
    try:
        yield
    finally:
        store.open = opening


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--devices",
        nargs="+",
        default=list(DEVICES),
        choices=DEVICES,
        metavar="DEVICE",
        help=f"devices of the tables: {'; '.join(DEVICES)} (default: all)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS),
        choices=MODELS,
        metavar="MODEL",
        help=f"models of the first table: {', '.join(MODELS)} (default: all)",
    )
    parser.add_argument(
        "--context", type=int, default=4000, metavar="N", help="context length of the first table (default: 4000)"
    )
    parser.add_argument("--length-model", default="Llama-3.1-8B", choices=MODELS, help="model of the second table")
    parser.add_argument("--length-load", default="NVMe, 3 GB/s", choices=LOADS, help="bandwidth of the second table")
    parser.add_argument(
        "--ratio",
        type=checked(float, partial(check_option, "ratio")),
        default=0.15,
        metavar="R",
        help="recompute ratio (default: 0.15)",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare predictions with measurements on this machine; takes minutes"
    )
    parser.add_argument("--model", default="qwen2.5-0.5b", help="with --check: shape of the random model")
    parser.add_argument("--layers", type=at_least(1), help="with --check: use only the first N layers")
    parser.add_argument("--repeats", type=int, default=3, help="with --check: number of repeats")


def run(args: argparse.Namespace) -> int:
    """Print the tables, or the comparison."""
    if args.check:
        return _run_check(args)
    if args.json:
        every = simulate(args.devices, args.models, ratio=args.ratio)
        devices = {name: asdict(DEVICES[name]) for name in args.devices}
        print(json.dumps({"devices": devices, "cells": [asdict(cell) for cell in every]}))
        return 0
    for device in args.devices:
        cells = list(simulate([device], args.models, contexts=[args.context], ratio=args.ratio))
        print(f"### {device}, {args.context} tokens of context\n\n{table(cells, 'model', 'load')}\n")
    cells = list(simulate(args.devices, [args.length_model], [args.length_load], ratio=args.ratio))
    print(f"### {args.length_model} from {args.length_load}\n\n{table(cells, 'device', 'context')}")
    return 0


def _run_check(args: argparse.Namespace) -> int:
    from benchmarks.settings import run_settings
    from benchmarks.shapes import random_model

    print(f"building a random model of {args.model}'s shape", file=sys.stderr, flush=True)
    net = random_model(args.model, args.layers)
    points = check(net, args.repeats, lambda line: print(line, file=sys.stderr, flush=True))
    settings = run_settings(net) | {"repeats": args.repeats}
    if args.json:
        print(json.dumps({"settings": settings, "points": [asdict(point) for point in points]}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in settings.items()) + "\n")
    print("| | prompt | full, predicted | measured | blending, predicted | measured | decision |\n|" + "---|" * 7)
    for point in points:
        times = point.predicted_full_s, point.full_s, point.predicted_blend_s, point.blend_s
        line = " | ".join(f"{seconds:.2f} s" for seconds in times)
        print(f"| {point.name} | {point.prompt_tokens} | {line} | {point.decision.split(':')[0]} |")
    return 0
