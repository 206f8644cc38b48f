"""Matching alone, without a model: adversarial prompts and texts, and a given number of stored chunks.

The second part fills a store's manifest with synthetic chunks (their KV is not needed to find them), builds the
catalog, opens it in another process and measures prompts there. Then a third process serves such prompts too, and a
chunk is removed and added here until the second process sees it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrag.cli.common import add_number
from kvrag.errors import SettingError
from kvrag.index.catalog import Catalog
from kvrag.index.match import match
from kvrag.index.segment import Segment
from kvrag.store import FileStore
from kvrag.store.base import MANIFEST
from kvrag.store.manifest import Manifest, ManifestRow
from kvrag.store.values import Entry
from kvrag.types import Run

MIN_RUN = 16
_VOCABULARY = 50_000
_PIECES = 40  # of stored chunks, in a prompt
_SEPARATOR = 7  # tokens of the prompt's own before each
_BATCH = 5000  # chunks created at once

Corpus = tuple[list[list[int]], list[int], int, int]  # texts, prompt, min_run, segments


@dataclass(frozen=True)
class CaseRow:
    """One prompt. `ms` is CPU time, the best of several."""

    name: str
    texts: int
    text_tokens: int
    min_run: int
    ms: float
    runs: int
    covered: float


@dataclass(frozen=True)
class ScaleRow:
    """Many chunks in one catalog.

    Memory is what opening the catalog and matching all prompts added to a process, in bytes per chunk: anonymous
    memory, which can be neither shared nor dropped, and memory that no other process has mapped (USS), pages of files
    included.

    Attributes:
        build_cpu_s: CPU time of indexing everything and writing the files.
        build_peak: Anonymous memory at the worst moment of that, in bytes.
        open_s: Until the first prompt has been matched.
        match_ms, match_p95_ms: Wall-clock time of a prompt, polling the store included.
        match_cpu_ms: Median CPU time.
        poll_us: CPU time of polling the store, part of it.
        lone_anonymous, lone_uss: Memory of the only process.
        anonymous, uss: Memory of one of two processes that serve such prompts.
        removal_s, addition_s: Until another process matches accordingly.
    """

    chunks: int
    chunk_tokens: int
    prompt_tokens: int
    build_s: float
    build_cpu_s: float
    build_peak: int
    files: int
    disk: float
    open_s: float
    match_ms: float
    match_p95_ms: float
    match_cpu_ms: float
    poll_us: float
    covered: float
    lone_anonymous: float
    lone_uss: float
    anonymous: float
    uss: float
    removal_s: float
    addition_s: float


def corpora(num_tokens: int, seed: int = 0) -> Iterator[tuple[str, Callable[[], Corpus]]]:
    """Names of the adversarial cases and what makes each."""
    rng = random.Random(seed)

    def words(count: int, vocabulary: int = _VOCABULARY) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    def pasted(texts: Sequence[list[int]]) -> list[int]:
        prompt: list[int] = []
        while len(prompt) < num_tokens:
            prompt += rng.choice(texts)
        return prompt[:num_tokens]

    def changed(text: Sequence[int], low: int, high: int) -> list[int]:
        """One token in `low` to `high` replaced."""
        copy, step = list(text), rng.randrange(low, high + 1)
        for i in range(rng.randrange(step), len(copy), step):
            copy[i] = rng.randrange(_VOCABULARY)
        return copy

    def of(
        texts: list[list[int]], prompt: Sequence[int] | None = None, min_run: int = MIN_RUN, segments: int = 1
    ) -> Corpus:
        return texts, list(pasted(texts) if prompt is None else prompt)[:num_tokens], min_run, segments

    def near(low: int = 17, high: int = 20) -> list[list[int]]:
        base = words(512)
        return [changed(base, low, high) for _ in range(10_000)]

    def combinations() -> list[list[int]]:
        base, texts = words(512), []
        for number in range(10_000):
            text = list(base)
            for bit in range(14):
                text[30 + 34 * bit] = _VOCABULARY + (number >> bit & 1)
            texts.append(text)
        return texts

    def period(length: int, tokens: int) -> list[int]:
        return [i % length for i in range(tokens)]

    def boilerplate() -> tuple[list[list[int]], list[int]]:
        shared = words(492)
        return [shared + words(20) for _ in range(10_000)], shared

    def gaps(kept: int, gap: int, head: int = 20) -> Corpus:
        """A long text of which the prompt has `kept` tokens, then `gap` others, and so on."""
        text, prompt = words(num_tokens), []
        for i in range(head, len(text), kept + 1):
            prompt += [*text[i : i + kept], *([_VOCABULARY] * gap)]
        return of([text], text[:head] + prompt)

    def thue_morse(count: int) -> list[int]:
        return [i.bit_count() & 1 for i in range(count)]

    ordinary = [words(512) for _ in range(2000)]
    yield "ordinary text, 60 chunks pasted", lambda: of(ordinary)
    yield "1,000 chunks of one repeated token", lambda: of([[7] * 512] * 1000)
    yield "10,000 near-identical, one token in 17-20 changed", lambda: of(near())
    yield "10,000 near-identical, one token in 512 changed", lambda: of(near(512, 512))
    yield "10,000 near-identical, in 200 segments", lambda: of(near(), segments=200)
    yield "10,000 combinations of 14 binary choices", lambda: of(combinations())
    yield "random binary ids, 1,000 chunks", lambda: of([words(512, 2) for _ in range(1000)], words(num_tokens, 2))
    yield "random binary ids, runs of 8", lambda: of([words(512, 2) for _ in range(1000)], words(num_tokens, 2), 8)
    yield "random ids of 4, 10,000 chunks", lambda: of([words(512, 4) for _ in range(10_000)], words(num_tokens, 4))
    yield "one 20-token chunk 1,500 times", lambda: of([words(20)])
    yield "one 20-token chunk 1,500 times, runs of 8", lambda: of([words(20)], None, 8)
    yield "periods of 2 to 8 tokens", lambda: of([period(2 + i % 7, 512) for i in range(1000)])
    yield (
        "Thue-Morse sequence, shifted 4,000 times",
        lambda: of([thue_morse(99_999)[11 * i :][:512] for i in range(4000)]),
    )
    yield "10,000 with 492 tokens in common", lambda: of(boilerplate()[0])
    yield "only what 10,000 have in common", lambda: of((pair := boilerplate())[0], pair[1] * num_tokens)
    yield "every near-duplicate changed again", lambda: of(texts := near(), changed(pasted(texts), 9, 9))
    yield "a gap after every 4 tokens", lambda: gaps(4, 1)
    yield "gaps of 12 after every 4 tokens", lambda: gaps(4, 12)
    yield "gaps of 12 after every 16 tokens", lambda: gaps(16, 12)
    yield "gaps of 13, never crossed, after every 17 tokens", lambda: gaps(17, 13)
    yield "pieces of 16 tokens", lambda: of(ordinary, [t for _ in range(num_tokens) for t in _piece(rng, ordinary, 16)])
    yield (
        "pieces of 15 tokens, none a run",
        lambda: of(ordinary, [t for _ in range(num_tokens) for t in _piece(rng, ordinary, 15)]),
    )


def _piece(rng: random.Random, texts: Sequence[list[int]], length: int) -> list[int]:
    text = rng.choice(texts)
    start = rng.randrange(len(text) - length)
    return text[start : start + length]


def measure_cases(num_tokens: int, repeats: int, progress: Callable[[str], None]) -> list[CaseRow]:
    """Match every adversarial prompt, everything in memory."""
    rows = []
    for name, make in corpora(num_tokens):
        progress(name)
        texts, prompt, min_run, count = make()
        entries = [Entry(i + 1, f"{i}", "", np.array(text, np.uint32)) for i, text in enumerate(texts)]
        size = -(-len(entries) // count)
        segments, times = [Segment.of(entries[at : at + size]) for at in range(0, len(entries), size)], []
        for _ in range(repeats):
            started = time.process_time()
            runs = match(segments, prompt, min_run)
            times.append(time.process_time() - started)
        for run in runs:
            assert prompt[run.start : run.stop] == texts[int(run.key)][run.offset :][: len(run)]
        tokens = sum(map(len, texts))
        covered = sum(map(len, runs)) / len(prompt)
        rows.append(CaseRow(name, len(texts), tokens, min_run, 1000 * min(times), len(runs), covered))
    return rows


@dataclass(frozen=True)
class Shape:
    """A synthetic store and the prompts matched against it."""

    chunks: int
    chunk_tokens: int
    prompt_tokens: int
    prompts: int


def measure_scale(folder: Path, shape: Shape, progress: Callable[[str], None]) -> ScaleRow:
    """Build the catalog of a store created by `fill`, open it in other processes and measure there."""
    progress("building the catalog")
    shutil.rmtree(folder / "catalog", ignore_errors=True)
    started, working = time.perf_counter(), time.process_time()
    with closing(FileStore(folder, min_free_bytes=0)) as store, closing(Catalog(store)) as catalog, _peak() as peak:
        catalog.refresh()
        catalog.settle()
        build_s, build_cpu_s = time.perf_counter() - started, time.process_time() - working
        assert len(catalog) == shape.chunks
    del catalog  # pages that it had mapped
    files = [*(folder / "catalog").glob("*.segment")]
    disk = sum(file.stat().st_size for file in files) / shape.chunks
    progress("matching in another process")
    with _serving(folder, shape) as watcher:
        times: Mapping[str, float] = watcher.recv()
        lone_anonymous, lone_uss = watcher.recv()
        progress("matching in two processes")
        with _serving(folder, shape) as other:
            other.recv()
            watcher.send("measure again")
            anonymous, uss = watcher.recv()
        watcher.send("look for the last chunk")
        progress("removing and adding a chunk")
        (row,) = _rows([shape.chunks - 1], shape.chunk_tokens)
        with closing(Manifest(folder / MANIFEST)) as manifest:
            manifest.remove([row.key])
            removed = time.time()
            removal_s = watcher.recv() - removed
            manifest.add([row])
            added = time.time()
            addition_s = watcher.recv() - added
    return ScaleRow(
        shape.chunks, shape.chunk_tokens, shape.prompt_tokens, build_s, build_cpu_s, peak[0], len(files), disk, **times,
        lone_anonymous=lone_anonymous, lone_uss=lone_uss, anonymous=anonymous, uss=uss,
        removal_s=removal_s, addition_s=addition_s,
    )  # fmt: skip


def fill(folder: Path, shape: Shape, progress: Callable[[str], None]) -> None:
    """Create the synthetic store, unless the folder has it already.

    Raises:
        SettingError: The folder has something else.
    """
    mark, content = folder / "synthetic.json", json.dumps([shape.chunks, shape.chunk_tokens])
    if mark.exists() and mark.read_text() == content:
        return
    if folder.exists() and any(folder.iterdir()):
        raise SettingError(f"{folder} is not empty: give a folder for this synthetic store alone")
    progress(f"filling a manifest with {shape.chunks:,} chunks of {shape.chunk_tokens} tokens")
    folder.mkdir(parents=True, exist_ok=True)
    with closing(Manifest(folder / MANIFEST)) as manifest:
        for begin in range(0, shape.chunks, _BATCH):
            manifest.add(_rows(range(begin, min(begin + _BATCH, shape.chunks)), shape.chunk_tokens))
    mark.write_text(content)


@contextlib.contextmanager
def _serving(folder: Path, shape: Shape) -> Iterator[Connection]:
    """A process that runs `_serve`, and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, folder, shape), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.close()
    process.join()


def _match(catalog: Catalog, prompt: Sequence[int]) -> list[Run]:
    """Match a prompt as a request does."""
    catalog.update()
    return catalog.match(prompt, MIN_RUN)


def _serve(pipe: Connection, folder: Path, shape: Shape) -> None:
    """Open the catalog and match, then send the time at which a removal and an addition are seen."""
    prompts = [*_prompts(shape)]
    with closing(FileStore(folder, min_free_bytes=0)) as store:
        store.removals()
        before = _memory()
        started = time.perf_counter()
        catalog = Catalog(store)
        _match(catalog, prompts[0])
        open_s = time.perf_counter() - started
        wall, cpu, polls, covered = [], [], [], 0
        for prompt in prompts:
            started, working = time.perf_counter(), time.thread_time()
            runs = _match(catalog, prompt)
            wall.append(time.perf_counter() - started)
            cpu.append(time.thread_time() - working)
            covered += sum(map(len, runs))
            working = time.thread_time()
            catalog.update()
            polls.append(time.thread_time() - working)
        pipe.send(
            {
                "open_s": open_s,
                "match_ms": 1000 * statistics.median(wall),
                "match_p95_ms": 1000 * sorted(wall)[int(0.95 * len(wall))],
                "match_cpu_ms": 1000 * statistics.median(cpu),
                "poll_us": 1e6 * statistics.median(polls),
                "covered": covered / sum(map(len, prompts)),
            }
        )
        (last,) = _ids([shape.chunks - 1], shape.chunk_tokens)
        with contextlib.suppress(EOFError, OSError):  # the second of two skips all this
            for _ in range(2):
                pipe.send([(now - then) / shape.chunks for then, now in zip(before, _memory(), strict=True)])
                pipe.recv()
            for is_there in (False, True):
                while bool(_match(catalog, last)) != is_there:
                    time.sleep(0.01)
                pipe.send(time.time())
        catalog.close()


def _ids(numbers: Sequence[int], chunk_tokens: int) -> NDArray[np.uint32]:
    """(N, T) tokens of chunks, a function of their numbers; some tokens are far more frequent than others."""
    begins = np.asarray(numbers, np.uint64) * np.uint64(chunk_tokens)
    x: Any = begins[:, None] + np.arange(chunk_tokens, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (_VOCABULARY * ((x >> np.uint64(11)) / 2**53) ** 3).astype("<u4")


def _rows(numbers: Sequence[int], chunk_tokens: int) -> Iterator[ManifestRow]:
    for number, ids in zip(numbers, _ids(numbers, chunk_tokens), strict=True):
        key = f"{number:032x}"
        yield ManifestRow(key, key, "", ids.tobytes(), 0, f"{key}.chunk", 1)


def _prompts(shape: Shape) -> Iterator[list[int]]:
    """Pieces of stored chunks, a few tokens of the prompt's own before each."""
    rng = random.Random(1)
    length = min(shape.prompt_tokens // _PIECES - _SEPARATOR, shape.chunk_tokens)
    for _ in range(shape.prompts):
        prompt: list[int] = []
        for ids in _ids([rng.randrange(shape.chunks) for _ in range(_PIECES)], shape.chunk_tokens):
            start = rng.randrange(shape.chunk_tokens - length + 1)
            prompt += [_VOCABULARY + rng.randrange(1000) for _ in range(_SEPARATOR)]
            prompt += ids[start : start + length].tolist()
        yield prompt


def _memory() -> tuple[int, int]:
    """Anonymous memory of this process, and memory that no other process has mapped; 0 on other systems than Linux."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
    return sizes["Anonymous"], sizes["Private_Clean"] + sizes["Private_Dirty"]


@contextlib.contextmanager
def _peak() -> Iterator[list[int]]:
    """The most anonymous memory seen while the body runs, as an item."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            peak[0] = max(peak[0], _memory()[0])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for name, default, what in (
        ("--chunks", 20_000, "in the catalog of the second part"),
        ("--chunk-tokens", 512, "tokens in each of them"),
        ("--prompt-tokens", 5_400, "tokens of the prompts matched against it"),
        ("--prompts", 200, "such prompts; the median counts"),
        ("--case-tokens", 30_000, "tokens of the adversarial prompts; 0 leaves the first part out"),
        ("--repeats", 5, "of each of these; the best counts"),
    ):
        add_number(parser, name, default, what)
    parser.add_argument(
        "--folder", type=Path, help="where the synthetic store is created and kept (default: a temporary folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    progress: Callable[[str], None] = lambda what: print(what, file=sys.stderr, flush=True)  # noqa: E731
    shape = Shape(args.chunks, args.chunk_tokens, args.prompt_tokens, args.prompts)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kvrag-bench-"))
    try:
        fill(folder, shape, progress)
        cases = measure_cases(args.case_tokens, args.repeats, progress) if args.case_tokens else []
        scale = measure_scale(folder, shape, progress)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    settings: dict[str, Any] = {
        "case_tokens": args.case_tokens,
        "min_run": MIN_RUN,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    if args.json:
        print(json.dumps({"cases": [asdict(row) for row in cases], "scale": asdict(scale), "settings": settings}))
        return 0
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items()))
    if cases:
        print(f"\n{'prompt and texts':52}{'texts':>8}{'CPU ms':>8}{'runs':>7}{'covered':>9}")
        for case in cases:
            print(f"{case.name:52}{case.texts:>8,}{case.ms:>8.1f}{case.runs:>7,}{case.covered:>9.1%}")
    print(f"\n{shape.chunks:,} chunks of {shape.chunk_tokens} tokens, {shape.prompts} prompts of {shape.prompt_tokens}")
    for name, value in (
        ("catalog", f"{scale.files} files, {scale.disk:,.0f} bytes per chunk"),
        ("built", f"{scale.build_cpu_s:.1f} s of CPU time, {scale.build_s:.1f} s"),
        ("memory while building", f"{scale.build_peak / 1e6:,.0f} MB anonymous at most"),
        ("opened by another process", f"{scale.open_s:.2f} s, first prompt included"),
        (
            "prompt matched, CPU time",
            f"{scale.match_cpu_ms:.2f} ms median, {scale.poll_us:.0f} us of it polling the store",
        ),
        ("prompt matched, wall-clock", f"{scale.match_ms:.2f} ms median, {scale.match_p95_ms:.2f} ms 95th percentile"),
        ("covered", f"{scale.covered:.1%}"),
        ("memory, the only process", _per_chunk(scale.lone_anonymous, scale.lone_uss)),
        ("memory, one of two", _per_chunk(scale.anonymous, scale.uss)),
        ("removal seen", f"{scale.removal_s:.3f} s"),
        ("addition seen", f"{scale.addition_s:.3f} s"),
    ):
        print(f"{name:28}{value}")
    return 0


def _per_chunk(anonymous: float, uss: float) -> str:
    return f"{anonymous:,.0f} bytes per chunk anonymous, {uss:,.0f} with pages of files that no other process maps"
