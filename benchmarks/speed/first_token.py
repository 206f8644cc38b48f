"""Time to first token of full prefill, an exact-prefix cache and blending, interleaved in one run.

Times run from the call with messages to the first token. Every repeat has a new order of chunks. By default the tiers
in memory are off and the chunk files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from benchmarks.settings import run_settings
from benchmarks.shapes import SHAPES, one_token_words, random_model
from kvrag.backend.transformers import Model
from kvrag.backend.transformers.rows import cache_argument
from kvrag.cli.common import add_number, at_least
from kvrag.config import DEFAULT_POLICY, BlendConfig
from kvrag.engine import BlendEngine
from kvrag.errors import SettingError
from kvrag.reuse.blend import selecting
from kvrag.store.chunkfile import SUFFIX
from kvrag.types import BlendReport, Messages

_PREFIX_BLOCK = 16  # tokens, vLLM's default on a GPU
FULL, PREFIX = "full prefill", "exact prefix"


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark on a random model."""
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=list(SHAPES), help="shape of the random model")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="use only the first N layers")
    add_number(parser, "--repeats", 3, "number of repeats; the median counts")


@dataclass(frozen=True)
class TtftRow:
    """Time to first token of one method.

    `speedup` is relative to full prefill in the same run. `bound` is the speed-up if computing the tokens, detection
    layers included, were the only cost; `share` is the fraction of it that was reached.
    `load_stall_s` is how long the forward pass waited for chunks.
    """

    name: str
    ttft_s: float
    speedup: float
    bound: float | None = None
    share: float | None = None
    computed_tokens: int | None = None
    load_stall_s: float | None = None


@dataclass(frozen=True)
class TtftResult:
    """All rows, and the settings to reproduce them."""

    rows: list[TtftRow]
    prompt_tokens: int
    settings: dict[str, Any]


Ask = Callable[[BlendEngine, str, list[str], str], BlendReport | None]


def messages_of(chunks: Sequence[str], question: str) -> Messages:
    """Return the prompt of these chunks and a question."""
    return [{"role": "user", "content": "\n\n".join([*chunks, question])}]


def ask(engine: BlendEngine, policy: str, chunks: list[str], question: str) -> BlendReport:
    """Answer with one token; return the report."""
    return engine.generate(messages_of(chunks, question), policy=policy, max_new_tokens=1, temperature=0).report


@dataclass(frozen=True)
class TtftSetup:
    """A prompt and how it is answered.

    Attributes:
        model, layers: Shape of the random model, and how many of its layers (None = all).
        chunks, chunk_tokens, question_tokens: The prompt.
        policies, ratio: See BlendConfig.
        repeats: Rounds; the medians count.
        ram_bytes, device_bytes: Sizes of the tiers in RAM and on the device; 0 = off.
        cold: Drop the chunk files from the page cache before every prompt.
    """

    model: str = "qwen2.5-0.5b"
    layers: int | None = None
    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 64
    policies: Sequence[str] = (DEFAULT_POLICY,)
    ratio: float | None = 0.15
    repeats: int = 3
    ram_bytes: int = 0
    cold: bool = False
    device_bytes: int = 0

    def __post_init__(self) -> None:
        if self.cold and (self.ram_bytes or self.device_bytes):
            raise SettingError("chunks cannot be cold in a tier: pass either --cold or --ram-bytes and --device-bytes")


def measure(
    setup: TtftSetup,
    ask: Ask = ask,
    progress: Callable[[str], None] = lambda line: None,
    net: Model | None = None,
    with_prefix: bool = True,
) -> TtftResult:
    """Measure on a random model of that shape; medians over the rounds after one warm-up round.

    Args:
        ask: Function of (engine, policy, chunks, question) that answers with one token; it may use a framework.
        net: The model, if it exists already.
        with_prefix: Measure an exact prefix cache, too; it takes about as long as full prefill.
    """
    if net is None:
        progress(f"building a random model of {setup.model}'s shape")
        net = random_model(setup.model, setup.layers)
    words = one_token_words(net)
    rng = random.Random(0)
    corpus = ["".join(rng.choices(words, k=setup.chunk_tokens)) for _ in range(setup.chunks)]
    config = BlendConfig(ratio=setup.ratio)
    times: dict[str, list[float]] = {}
    reports: dict[str, list[BlendReport]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        BlendEngine(
            net, folder, config, ram_bytes=setup.ram_bytes, conversation_bytes=0, device_bytes=setup.device_bytes
        ) as engine,
    ):
        progress(f"warming {setup.chunks} chunks of {setup.chunk_tokens} tokens")
        engine.warm(corpus)
        prefix = PrefixCache(net)
        for repeat in range(setup.repeats + 1):
            progress(f"round {repeat} of {setup.repeats}" if repeat else "warm-up round")
            rng.shuffle(corpus)
            question = "".join(rng.choices(words, k=setup.question_tokens))
            messages = messages_of(corpus, question)
            calls: dict[str, Callable[[], object]] = {FULL: partial(_generate, PrefixCache(net), net, messages)}
            if with_prefix:
                calls[PREFIX] = partial(_generate, prefix, net, messages)
            for policy in setup.policies:
                calls[policy] = partial(ask, engine, policy, list(corpus), question)
            for name, call in calls.items():
                if setup.cold:
                    _drop_page_cache(Path(folder))
                seconds, result = _timed(call)
                if repeat:
                    times.setdefault(name, []).append(seconds)
                if isinstance(result, BlendReport):
                    reports.setdefault(name, []).append(result)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [_row(name, medians, reports.get(name, []), net) for name in medians]
    names = ("chunks", "chunk_tokens", "question_tokens", "ratio", "repeats", "cold")
    settings = run_settings(net) | {name: getattr(setup, name) for name in names}
    settings |= {"ram_tier": bool(setup.ram_bytes), "device_tier": bool(setup.device_bytes)}
    return TtftResult(rows, next(iter(reports.values()))[-1].prompt_tokens, settings)


def _row(name: str, medians: dict[str, float], reports: list[BlendReport], net: Model) -> TtftRow:
    ttft_s = medians[name]
    row = TtftRow(name, ttft_s, medians[FULL] / ttft_s)
    if not reports:
        return row
    report = reports[-1]
    computed = report.fresh_tokens + report.recomputed_tokens
    passes = selecting(BlendConfig(policy=report.policy), net.num_layers)
    detection = report.prompt_tokens * passes.detection
    bound = report.prompt_tokens / (computed + detection)
    stall_s = statistics.median(report.load_stall_s for report in reports[1:])  # without the warm-up round
    return replace(row, bound=bound, share=row.speedup / bound, computed_tokens=computed, load_stall_s=stall_s)


def _drop_page_cache(folder: Path) -> None:
    for path in folder.rglob(f"*{SUFFIX}"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(call: Callable[[], object]) -> tuple[float, object]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def _generate(cache: PrefixCache, net: Model, messages: Messages) -> None:
    cache.generate(net.tokenizer.render(messages))


class PrefixCache:
    """`model.generate` with the KV of its last prompt, cropped to whole blocks of the common prefix."""

    def __init__(self, net: Model, block: int = _PREFIX_BLOCK) -> None:
        self._net, self._block = net, block
        self._ids: list[int] = []
        self._cache: Any = None

    @torch.inference_mode()
    def generate(self, ids: list[int], max_new_tokens: int = 1) -> tuple[int, list[int]]:
        """Answer greedily; return how many leading tokens of the prompt were reused, and the answer."""
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids[:-1], self._ids, strict=False)))
        common -= common % self._block
        if common:
            self._cache.crop(common - self._cache.get_seq_length())  # negative: number of tokens to remove from the end
        tensor = torch.tensor([ids], device=self._net.device)
        output = self._net.hf.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            **({cache_argument(type(self._net.hf).forward): self._cache} if common else {}),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        self._ids, self._cache = ids, output["cache" if "cache" in output else "past_key_values"]
        return common, output.sequences[0, len(ids) :].tolist()
