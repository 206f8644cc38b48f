"""Matching without a model: adversarial prompts and texts, and a catalog with any number of chunks.

The second part fills a store's manifest with synthetic chunks (matching does not need their KV), builds the catalog,
opens it in another process and measures prompts there. Then it removes and adds a chunk and waits until that process
detects the change.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrag.errors import SettingError
from kvrag.reuse.catalog import Catalog
from kvrag.reuse.match import match
from kvrag.reuse.segment import Segment
from kvrag.store import FileStore
from kvrag.store.files import MANIFEST
from kvrag.store.manifest import Manifest, Row
from kvrag.store.protocol import Entry

MIN_RUN = 16
_VOCABULARY = 50_000
_PIECES = 40  # pieces of stored chunks per prompt
_SEPARATOR = 7  # prompt tokens before each piece
_BATCH = 5000  # chunks generated at once

Corpus = tuple[list[list[int]], list[int], int]  # texts, prompt, min_run


@dataclass(frozen=True)
class CaseRow:
    """One prompt. `ms` is CPU time, the best of several runs."""

    name: str
    texts: int
    text_tokens: int
    min_run: int
    ms: float
    runs: int
    covered: float


@dataclass(frozen=True)
class ScaleRow:
    """A catalog with many chunks. Memory is measured in the process that opened it.

    Attributes:
        open_s: Time until the first prompt can be matched.
        match_ms, match_p95_ms: Wall-clock time per prompt, polling the store included.
        match_cpu_ms: Median CPU time.
        private: Bytes per chunk not shared with other processes (USS), while another process serves such prompts too.
        anonymous: Bytes per chunk without file pages, which the system can drop and read again.
        removal_s, addition_s: Time until the other process detects the change.
    """

    chunks: int
    chunk_tokens: int
    prompt_tokens: int
    fill_s: float
    build_s: float
    files: int
    disk: float
    open_s: float
    match_ms: float
    match_p95_ms: float
    match_cpu_ms: float
    covered: float
    private: float
    anonymous: float
    removal_s: float
    addition_s: float


def corpora(num_tokens: int, seed: int = 0) -> Iterator[tuple[str, Callable[[], Corpus]]]:
    """Yield the adversarial cases: name and factory."""
    rng = random.Random(seed)

    def words(count: int, vocabulary: int = _VOCABULARY) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    def pasted(texts: Sequence[list[int]]) -> list[int]:
        prompt: list[int] = []
        while len(prompt) < num_tokens:
            prompt += rng.choice(texts)
        return prompt[:num_tokens]

    def changed(text: Sequence[int], low: int, high: int) -> list[int]:
        """Return the text with one token in `low` to `high` replaced."""
        copy, step = list(text), rng.randrange(low, high + 1)
        for i in range(rng.randrange(step), len(copy), step):
            copy[i] = rng.randrange(_VOCABULARY)
        return copy

    def of(texts: list[list[int]], prompt: Sequence[int] | None = None, min_run: int = MIN_RUN) -> Corpus:
        return texts, list(pasted(texts) if prompt is None else prompt)[:num_tokens], min_run

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
        """Return a long text, and a prompt with `kept` of its tokens, then `gap` others, and so on."""
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
    """Match every adversarial prompt in memory."""
    rows = []
    for name, make in corpora(num_tokens):
        progress(name)
        texts, prompt, min_run = make()
        entries = [Entry(i + 1, f"{i}", "", np.array(text, np.uint32)) for i, text in enumerate(texts)]
        segments, times = [Segment.of(entries)], []
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


def measure_scale(
    folder: Path, chunks: int, chunk_tokens: int, prompt_tokens: int, prompts: int, progress: Callable[[str], None]
) -> ScaleRow:
    """Fill a store in the folder, build its catalog, and measure in another process."""
    progress(f"filling a manifest with {chunks:,} chunks of {chunk_tokens} tokens")
    started = time.perf_counter()
    with closing(Manifest(folder / MANIFEST)) as manifest:
        for begin in range(0, chunks, _BATCH):
            manifest.add(_rows(range(begin, min(begin + _BATCH, chunks)), chunk_tokens))
    fill_s = time.perf_counter() - started
    progress("building the catalog")
    started = time.perf_counter()
    with closing(FileStore(folder, min_free_bytes=0)) as store, closing(Catalog(store)) as catalog:
        catalog.refresh()
        catalog.settle()
        build_s = time.perf_counter() - started
        assert len(catalog) == chunks
        files = [*(folder / "catalog").glob("*.segment")]
        disk = sum(file.stat().st_size for file in files) / chunks
        for prompt in _prompts(chunks, chunk_tokens, prompt_tokens, prompts):
            catalog.match(prompt, MIN_RUN)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        other = context.Process(target=_serve, args=(theirs, folder, chunks, chunk_tokens, prompt_tokens, prompts))
        other.start()
        progress("matching in another process")
        answer: Mapping[str, float] = ours.recv()
        progress("removing and adding a chunk")
        (row,) = _rows([chunks - 1], chunk_tokens)
        store.remove([row.key])
        removed = time.time()
        removal_s = ours.recv() - removed
        with closing(Manifest(folder / MANIFEST)) as manifest:
            manifest.add([row])
        added = time.time()
        addition_s = ours.recv() - added
        other.join()
    return ScaleRow(
        chunks, chunk_tokens, prompt_tokens, fill_s, build_s, len(files), disk, **answer,
        removal_s=removal_s, addition_s=addition_s,
    )  # fmt: skip


def _serve(
    pipe: Connection, folder: Path, chunks: int, chunk_tokens: int, prompt_tokens: int, num_prompts: int
) -> None:
    """Open the catalog and measure; runs in the other process."""
    prompts = [*_prompts(chunks, chunk_tokens, prompt_tokens, num_prompts)]
    with closing(FileStore(folder, min_free_bytes=0)) as store:
        before = _memory()
        started = time.perf_counter()
        catalog = Catalog(store)
        catalog.match(prompts[0], MIN_RUN)
        open_s = time.perf_counter() - started
        wall, cpu, covered = [], [], 0
        for prompt in prompts:
            started, working = time.perf_counter(), time.thread_time()
            runs = catalog.match(prompt, MIN_RUN)
            wall.append(time.perf_counter() - started)
            cpu.append(time.thread_time() - working)
            covered += sum(map(len, runs))
        private, anonymous = ((b - a) / chunks for a, b in zip(before, _memory(), strict=True))
        pipe.send(
            {
                "open_s": open_s,
                "match_ms": 1000 * statistics.median(wall),
                "match_p95_ms": 1000 * sorted(wall)[int(0.95 * len(wall))],
                "match_cpu_ms": 1000 * statistics.median(cpu),
                "covered": covered / sum(map(len, prompts)),
                "private": private,
                "anonymous": anonymous,
            }
        )
        (last,) = _ids([chunks - 1], chunk_tokens)
        for is_there in (False, True):
            while bool(catalog.match(last, MIN_RUN)) != is_there:
                time.sleep(0.01)
            pipe.send(time.time())
        catalog.close()


def _ids(numbers: Sequence[int], chunk_tokens: int) -> NDArray[np.uint32]:
    """Return (N, T) tokens of chunks, a function of their numbers; some tokens are far more frequent than others."""
    begins = np.asarray(numbers, np.uint64) * np.uint64(chunk_tokens)
    x: Any = begins[:, None] + np.arange(chunk_tokens, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (_VOCABULARY * ((x >> np.uint64(11)) / 2**53) ** 3).astype("<u4")


def _rows(numbers: Sequence[int], chunk_tokens: int) -> Iterator[Row]:
    for number, ids in zip(numbers, _ids(numbers, chunk_tokens), strict=True):
        key = f"{number:032x}"
        yield Row(key, key, "", ids.tobytes(), 0, f"{key}.chunk", 1)


def _prompts(chunks: int, chunk_tokens: int, prompt_tokens: int, count: int) -> Iterator[list[int]]:
    """Yield prompts of pieces of stored chunks, with a few other tokens before each piece."""
    rng = random.Random(1)
    length = min(prompt_tokens // _PIECES - _SEPARATOR, chunk_tokens)
    for _ in range(count):
        prompt: list[int] = []
        for ids in _ids([rng.randrange(chunks) for _ in range(_PIECES)], chunk_tokens):
            start = rng.randrange(chunk_tokens - length + 1)
            prompt += [_VOCABULARY + rng.randrange(1000) for _ in range(_SEPARATOR)]
            prompt += ids[start : start + length].tolist()
        yield prompt


def _memory() -> tuple[int, int]:
    """Return the private bytes of this process, and those without file pages; 0 on systems other than Linux."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
    return sizes["Private_Clean"] + sizes["Private_Dirty"], sizes["Anonymous"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench match`."""
    for name, default, what in (
        ("--chunks", 20_000, "chunks in the catalog of the second part"),
        ("--chunk-tokens", 512, "tokens per chunk of the catalog"),
        ("--prompt-tokens", 5_400, "tokens per prompt matched against the catalog"),
        ("--prompts", 200, "number of these prompts; the median counts"),
        ("--case-tokens", 30_000, "tokens per adversarial prompt; 0 = skip the first part"),
        ("--repeats", 5, "repeats of each adversarial prompt; the best counts"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--folder", type=Path, help="folder for the synthetic store (default: a temporary folder)")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    if args.folder is not None and args.folder.exists() and any(args.folder.iterdir()):
        raise SettingError(f"{args.folder} is not empty: pass an empty folder")
    progress: Callable[[str], None] = lambda what: print(what, file=sys.stderr, flush=True)  # noqa: E731
    cases = measure_cases(args.case_tokens, args.repeats, progress) if args.case_tokens else []
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kvrag-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        scale = measure_scale(folder, args.chunks, args.chunk_tokens, args.prompt_tokens, args.prompts, progress)
    finally:
        shutil.rmtree(folder)
    settings: dict[str, Any] = {
        "case_tokens": args.case_tokens,
        "min_run": MIN_RUN,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    if args.json:
        print(json.dumps({"cases": [asdict(row) for row in cases], "scale": asdict(scale), "settings": settings}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    if cases:
        print(f"\n{'prompt and texts':52}{'texts':>8}{'CPU ms':>8}{'runs':>7}{'covered':>9}")
        for case in cases:
            print(f"{case.name:52}{case.texts:>8,}{case.ms:>8.1f}{case.runs:>7,}{case.covered:>9.1%}")
    print(f"\n{scale.chunks:,} chunks of {scale.chunk_tokens} tokens, prompts of {scale.prompt_tokens:,}")
    for name, value in (
        ("catalog built", f"{scale.build_s:.1f} s, {scale.files} files, {scale.disk:,.0f} bytes per chunk on disk"),
        ("opened by another process", f"{scale.open_s:.2f} s, first prompt included"),
        ("prompt matched", f"{scale.match_ms:.2f} ms median, {scale.match_p95_ms:.2f} ms 95th percentile"),
        ("CPU time of that", f"{scale.match_cpu_ms:.2f} ms median"),
        ("covered", f"{scale.covered:.1%}"),
        ("private memory", f"{scale.private:,.0f} bytes per chunk, {scale.anonymous:,.0f} without pages of files"),
        ("removal seen", f"{scale.removal_s:.3f} s"),
        ("addition seen", f"{scale.addition_s:.3f} s"),
    ):
        print(f"{name:28}{value}")
    return 0
