"""Check of a new GPU in one run without a network: the same answers as on a CPU, and speed beside transformers alone.

Speeds are of real shapes with random weights; answers are the bundled reader's. Each part prints its result at once. A
part that fails, for lack of memory for example, is reported, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig

from benchmarks.samples import FOLDER, QUESTIONS
from benchmarks.shapes import SHAPES, one_token_words, random_model
from benchmarks.speed import decode, first_token
from benchmarks.speed.first_token import TtftResult, TtftSetup, messages_of
from kvrag.backend.transformers import Model
from kvrag.backend.transformers.loading import default_device
from kvrag.cli.common import add_number, at_least
from kvrag.config import BlendConfig
from kvrag.engine import BlendEngine
from kvrag.inspect.gate import verify
from kvrag.types import BlendReport, Messages

_CHUNK_TOKENS = 512
_INGESTED = 32  # chunks
_RAM, _DEVICE = 64 << 30, 16 << 30
_TIERS = {"RAM": (_RAM, 0), "device tier": (_RAM, _DEVICE), "disk": (0, 0)}  # bytes in RAM, on the device
_GATE_LAYERS = 4
_OFF = {"controller": "off"}
_WAYS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "ratio 1": {"ratio": 1.0},
    "none": {"policy": "none"} | _OFF,
    "first_k": {"policy": "first_k", "ratio": 0.15} | _OFF,
    "query": {"policy": "query", "ratio": 0.15} | _OFF,
    "hkvd": {"policy": "hkvd", "ratio": 0.15} | _OFF,
    "default": {},
}
"""Ways to answer, with their options."""
_TIMED = ("none", "first_k", "query", "default")
_PROMPTS, _RETRIEVED = 24, 24
_LENGTH, _STEPS = 4096, 64  # tokens of the prompts and of the answers whose decoding is measured
_AT_ONCE, _SHORT = 16, 32  # answers at the same time, and their tokens
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
        for line in _lines(self.parts[-1]):
            print(line, flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(SHAPES),
        default=["llama-3.1-8b"],
        help="shapes of the random models (default: llama-3.1-8b)",
    )
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="use only the first N layers")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=at_least(512),
        default=[1024, 4096, 16384, 32768],
        metavar="N",
        help="lengths of the prompts (default: 1024 4096 16384 32768)",
    )
    parser.add_argument("--device", help="device: cuda, cpu, ... (default: a GPU if there is one)")
    add_number(parser, "--repeats", 3, "rounds per length; the median counts")
    add_number(parser, "--seconds", 270, "no part begins later than this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there as JSON")


def measure(args: argparse.Namespace, progress: Callable[[str], None]) -> list[Part]:
    """Run all parts, the most important first."""
    run = GpuCheck(args.seconds, progress)
    run.part("machine", partial(_machine, args.device))
    for dtype in (torch.float32, torch.bfloat16):
        run.part(f"gate, {str(dtype).removeprefix('torch.')}", partial(_gate, args, dtype))
    run.part(f"answers that equal those of a CPU, of {_PROMPTS}", partial(_answers, args.device))
    for shape in args.models:
        net = run.part(f"{shape}: build", partial(random_model, shape, args.layers, device=args.device))
        if net is None:
            continue
        length = min(_LENGTH, max(args.tokens))
        setup = TtftSetup(chunk_tokens=_CHUNK_TOKENS - 2, policies=_TIMED, repeats=args.repeats, ratio=None)
        for tokens in (tokens for tokens in args.tokens if tokens + _CHUNK_TOKENS <= net.context_window):
            setup = replace(setup, chunks=tokens // _CHUNK_TOKENS)
            for tier, (ram_bytes, device_bytes) in _TIERS.items():
                tiered = replace(setup, ram_bytes=ram_bytes, device_bytes=device_bytes)
                work = partial(first_token.measure, tiered, _ask, net=net, with_prefix=False)
                run.part(f"{shape}: {tokens} tokens from {tier}", work)
        run.part(f"{shape}: tokens/s of one answer after {length}", partial(_decoding, net, length))
        run.part(f"{shape}: seconds of {_AT_ONCE} answers at once", partial(_at_once, net, length))
        if net.device.type == "cuda":  # on a CPU, it fills the memory with its cache first
            run.part(f"{shape}: their continuous batching by transformers, s", partial(_library_at_once, net, length))
        run.part(f"{shape}: profile", partial(_profile, setup, net))
        run.part(f"{shape}: ingestion", partial(_ingestion, net))
        del net
    return run.parts


def _ask(engine: BlendEngine, way: str, chunks: list[str], question: str) -> BlendReport:
    """Answer with one token; return the report."""
    return engine.generate(messages_of(chunks, question), **_WAYS[way], max_new_tokens=1, temperature=0).report


def _machine(device: str | None) -> dict[str, Any]:
    """Return versions, and what bounds all other results: launches, and copies to the device."""
    place = torch.device(device or default_device())
    one, pages = torch.zeros(16, device=place), torch.empty(256 << 20, dtype=torch.uint8)
    pinned = pages.pin_memory() if place.type == "cuda" else pages
    there = torch.empty_like(pages, device=place)

    def seconds(work: Callable[[], object], times: int) -> float:
        for _ in range(2):  # the first warms up
            _synchronise(place)
            started = time.perf_counter()
            for _ in range(times):
                work()
            _synchronise(place)
        return (time.perf_counter() - started) / times

    return {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else str(place),
        "torch": torch.__version__,
        "microseconds of an operation": seconds(lambda: one.add_(1), 2000) * 1e6,
        "GB/s from memory": len(pages) / seconds(lambda: there.copy_(pages), 3) / 1e9,
        "GB/s from pinned memory": len(pages) / seconds(lambda: there.copy_(pinned), 3) / 1e9,
    }


def _synchronise(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _prompts() -> tuple[list[str], list[Messages]]:
    """Return chunks of the sample documents, and prompts of them in random order."""
    chunks = sorted(path.read_text().strip() for path in FOLDER.rglob("*.txt"))
    rng, questions = random.Random(5), list(QUESTIONS)
    asked = [
        messages_of(rng.sample(chunks, min(_RETRIEVED, len(chunks))), f"Question: {questions[n % len(questions)]}")
        for n in range(_PROMPTS)
    ]
    return chunks, asked


def _answers(device: str | None) -> dict[str, Any]:
    """Return how many answers of the bundled reader equal those of a CPU in float32, by dtype and way.

    By default, a device may prefill in full what a CPU blends: such an answer must be the CPU's full prefill's.
    """
    chunks, prompts = _prompts()

    @contextmanager
    def opened(place: str | None, dtype: str) -> Iterator[Callable[[int, str], tuple[str, str]]]:
        options: dict[str, Any] = {"device": place, "dtype": dtype, "conversation_bytes": 0}
        config = BlendConfig(context_tokens=0)
        with (
            tempfile.TemporaryDirectory() as folder,
            BlendEngine.from_pretrained("reader", store=folder, config=config, **options) as engine,
        ):
            engine.warm(chunks)

            def answer(number: int, way: str) -> tuple[str, str]:
                """Return the text, and the way that was taken."""
                answer = engine.generate(prompts[number], max_new_tokens=12, temperature=0, **_WAYS[way])
                return answer.text, "full" if answer.report.policy == "full" else way

            yield answer

    numbers = range(len(prompts))
    with opened("cpu", "float32") as answer:
        expected = {way: [answer(number, way)[0] for number in numbers] for way in _WAYS}
    found: dict[str, Any] = {}

    def count(answers: Iterable[tuple[str, str]]) -> int:
        return sum(text == expected[way][number] for number, (text, way) in enumerate(answers))

    for dtype in ("float32", "bfloat16"):
        with opened(device, dtype) as answer:
            for way in _WAYS:
                found[f"{dtype} {way}"] = count(answer(number, way) for number in numbers)
            if dtype == "float32":
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    found["float32 none, in threads"] = count(pool.map(answer, numbers, ["none"] * len(prompts)))
    return found


@contextmanager
def _warmed(net: Model, chunks: int) -> Iterator[tuple[BlendEngine, list[str], Callable[[], str]]]:
    """Open an engine with a device tier, and warm so many chunks; the function makes questions.

    No answer ends early any more.
    """
    net.__dict__["eos_ids"] = frozenset()
    words, rng = one_token_words(net), random.Random(0)
    corpus = ["".join(rng.choices(words, k=_CHUNK_TOKENS - 2)) for _ in range(chunks)]
    options: dict[str, Any] = {"conversation_bytes": 0, "ram_bytes": _RAM, "device_bytes": _DEVICE}
    with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder, **options) as engine:
        engine.warm(corpus)
        yield engine, corpus, lambda: "".join(rng.choices(words, k=_CHUNK_TOKENS // 8))


def _decoding(net: Model, length: int) -> dict[str, float]:
    """Return tokens per second after the first token of one answer, by way; and of `model.generate`."""
    found = {}
    with _warmed(net, length // _CHUNK_TOKENS) as (engine, chunks, question):
        for way in ("full", "none", "query", "default"):
            for _ in range(2):  # the first warms up
                arrived = []
                prompt = messages_of(chunks, question())
                for _ in engine.stream(prompt, max_new_tokens=_STEPS, temperature=0, **_WAYS[way]):
                    arrived.append(time.perf_counter())
            found[way] = (len(arrived) - 1) / (arrived[-1] - arrived[0])
        ids = torch.tensor(engine.tokenize(messages_of(chunks, question())))
    return found | {"model.generate": [decode.generate(net, ids, _STEPS) for _ in range(2)][-1]}


def _several(length: int, chunks: list[str], question: str) -> list[Messages]:
    rng = random.Random(3)
    return [messages_of(rng.sample(chunks, length // _CHUNK_TOKENS), question) for _ in range(_AT_ONCE)]


def _at_once(net: Model, length: int) -> dict[str, float]:
    """Return when all answers are done, and the median of their first tokens, by way, in seconds."""
    found = {}
    with _warmed(net, 4 * length // _CHUNK_TOKENS) as (engine, chunks, question):
        prompts = _several(length, chunks, question())
        for way in ("full", "none", "default"):
            for _ in range(2):  # the first warms up
                started = time.perf_counter()

                def answer(prompt: Messages, way: str = way, started: float = started) -> float:
                    deltas = engine.stream(prompt, max_new_tokens=_SHORT, temperature=0, **_WAYS[way])
                    next(deltas)
                    first = time.perf_counter() - started
                    for _ in deltas:
                        pass
                    return first

                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    firsts = list(pool.map(answer, prompts))
                found[way] = time.perf_counter() - started
            found[f"{way}, first tokens"] = statistics.median(firsts)
    return found


def _library_at_once(net: Model, length: int) -> dict[str, float]:
    """Return the same of transformers' continuous batching."""
    with _warmed(net, 0) as (engine, _, question):
        words = [question() for _ in range(length // (_CHUNK_TOKENS // 8))]
        ids = [engine.tokenize(messages_of(words, question())) for _ in range(_AT_ONCE)]
    settings = GenerationConfig(max_new_tokens=_SHORT, do_sample=False, eos_token_id=-1)
    for _ in range(2):  # the first warms up
        started = time.perf_counter()
        net.hf.generate_batch(inputs=ids, generation_config=settings, progress_bar=False)
        seconds = time.perf_counter() - started
    return {"generate_batch": seconds}


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
            report = _ask(*arguments)
        key = "self_cuda_time_total" if net.device.type == "cuda" else "self_cpu_time_total"
        tables.append(profiler.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=50))
        return report

    first_token.measure(replace(setup, repeats=1, policies=("query",)), ask, net=net, with_prefix=False)
    return tables[-1]


def _ingestion(net: Model) -> str:
    """Return the speed of encoding and writing chunks, the second time: the first warms up."""
    words, rng = one_token_words(net), random.Random(0)
    with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder, ram_bytes=0) as engine:
        for _ in range(2):
            report = engine.warm(["".join(rng.choices(words, k=_CHUNK_TOKENS)) for _ in range(_INGESTED)])
    return f"{report.tokens / report.seconds:.0f} tokens/s"


def run(args: argparse.Namespace) -> int:
    """Measure and print each part; write JSON at the end."""
    parts = measure(args, lambda line: print(line, file=sys.stderr, flush=True))
    result = json.dumps([asdict(part) for part in parts], indent=1)
    if args.out:
        args.out.write_text(result)
    if args.json:
        print(result)
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
    if isinstance(part.result, Mapping):
        values = [
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in part.result.items()
        ]
        return [f"{part.name}: {', '.join(values)}"]
    return [f"{part.name}: {part.result}"]
