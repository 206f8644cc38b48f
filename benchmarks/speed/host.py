"""Host work before the first launch: from the call with messages to the first pass of the model.

A CPU shows what a GPU would wait for. The model is tiny and random, and all chunks are in RAM. Times are processor time
of the thread that answers, which a busy machine changes little. Where other threads tokenise, it waits for their time
divided by the number of free processors.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pkgutil
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.settings import run_settings
from benchmarks.shapes import SHAPES, one_token_words, random_model
from benchmarks.speed.first_token import messages_of
from kvrag.backend.transformers import Model
from kvrag.cli.common import add_number, at_least
from kvrag.engine import BlendEngine

_CHUNK_TOKENS = 512  # with what separates it from the next one
_STEPS = {
    "render": "kvrag.backend.transformers.tokenizer:Tokenizer.render",
    "tokenise": "transformers:PreTrainedTokenizerFast._encode_plus",
    "conversation": "kvrag.memory.forgetting:Forgetting.find_prefix",
    "match": "kvrag.index.catalog:Catalog.find",
    "open": "kvrag.prefill:Recovery.open",
    "plan": "kvrag.control.plan:Planner.plan",
    "rotations": "kvrag.backend.transformers:Model.rotations",
    "stitch": "kvrag.prefill:stitch",
}
"""Function that does each step, timed without the steps that it calls; the rest is "other"."""
_BESIDE = "other threads"  # is in no sum


class Clock:
    """Seconds of each step, until `stop`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys([*_STEPS, "other", _BESIDE], 0.0)
        self._step, self._since = "other", (time.thread_time(), time.process_time())

    @property
    def in_all(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values()) - self.seconds[_BESIDE]

    def enter(self, step: str) -> str:
        """Begin a step; return the one before. "" stops the clock."""
        now, before = (time.thread_time(), time.process_time()), self._step
        if before:
            own, of_all = (later - earlier for later, earlier in zip(now, self._since, strict=True))
            self.seconds[before] += own
            self.seconds[_BESIDE] += of_all - own
            self._step, self._since = step, now
        return before


@contextmanager
def _timed(model: Model) -> Iterator[Clock]:
    """Time the steps of the block up to the model's first pass."""
    clock = Clock()

    def timed(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            before = clock.enter(step)
            try:
                return function(*arguments, **options)
            finally:
                clock.enter(before)

        return call

    with ExitStack() as stack:
        for step, target in _STEPS.items():
            owner, _, name = target.replace(":", ".").rpartition(".")
            function = pkgutil.resolve_name(target)
            stack.enter_context(patch.object(pkgutil.resolve_name(owner), name, timed(step, function)))
        hook = model.hf.get_input_embeddings().register_forward_pre_hook(lambda *_: clock.enter("") and None)
        stack.callback(hook.remove)
        clock.enter("other")
        yield clock


def measure(
    net: Model, tokens: int, repeats: int, progress: Callable[[str], None] = lambda line: None, profile: str = ""
) -> dict[str, Any]:
    """Return the least milliseconds of each step over the rounds, after a warm-up round, and `settings`.

    Args:
        profile: File for a profile of the last round; "" = none.
    """
    words, rng = one_token_words(net), random.Random(0)
    chunks = ["".join(rng.choices(words, k=_CHUNK_TOKENS - 2)).strip() for _ in range(tokens // _CHUNK_TOKENS)]
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder, ram_bytes=8 << 30) as engine:
        progress(f"warming {len(chunks)} chunks")
        engine.warm(chunks)
        ask = partial(engine.generate, max_new_tokens=1, policy="none", controller="off")
        for repeat in range(repeats + 1):
            rng.shuffle(chunks)
            prompt = messages_of(chunks, "".join(rng.choices(words, k=_CHUNK_TOKENS // 8)))
            with _timed(net) as clock:
                report = ask(prompt).report
            progress(f"round {repeat}: {clock.in_all * 1000:.1f} ms")
            rounds += [{**clock.seconds, "in all": clock.in_all}] if repeat else []
        if profile:
            cProfile.runctx("ask(prompt)", {}, {"ask": ask, "prompt": prompt}, profile)
    sizes = {"prompt_tokens": report.prompt_tokens, "chunks": len(report.runs), "repeats": repeats}
    least = {step: min(found[step] for found in rounds) * 1000 for step in rounds[0]}
    return {"milliseconds": least, "settings": run_settings(net) | sizes}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--tokens", type=at_least(1024), default=32768, metavar="N", help="prompt (default: 32768)")
    parser.add_argument("--tokenizer", metavar="MODEL", help="model whose tokenizer is used (default: the reader)")
    parser.add_argument("--profile", default="", metavar="FILE", help="write a profile of one prompt there")
    add_number(parser, "--repeats", 5, "number of repeats")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    SHAPES["wide"] = SHAPES["tiny"] | {"vocab_size": 160_000, "max_position_embeddings": 2 * args.tokens}
    net = random_model("wide", tokenizer_of=args.tokenizer)
    result = measure(
        net, args.tokens, args.repeats, lambda line: print(line, file=sys.stderr, flush=True), args.profile
    )
    if args.json:
        print(json.dumps(result))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result["settings"].items()))
    for step, milliseconds in result["milliseconds"].items():
        print(f"{step:14}{milliseconds:>8.1f} ms")
    return 0
