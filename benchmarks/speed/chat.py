"""Time to first token over the turns of a conversation; every turn adds new chunks.

Compares an engine that reuses the conversation's KV from turn to turn with an engine that keeps none and stitches and
blends the whole history every turn. Answers in the history differ from the decoded ones, as with templates that drop
reasoning, so they are recomputed. The RAM tier is off. Then many short conversations are kept in an index of their
own, and the CPU time of keeping and of finding another one is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.settings import run_settings
from benchmarks.shapes import one_token_words, random_model
from benchmarks.speed.first_token import add_shape
from kvrag.backend.transformers import BlendCache
from kvrag.cli.common import add_number
from kvrag.config import BlendConfig
from kvrag.engine import BlendEngine
from kvrag.memory.conversation import Blended, Conversations
from kvrag.reuse.request_state import RequestState
from kvrag.types import Messages


@dataclass(frozen=True)
class TurnRow:
    """One turn, medians in seconds; `anew_s` is without the KV of earlier turns."""

    turn: int
    prompt_tokens: int
    conversation_tokens: int
    ttft_s: float
    anew_s: float


@dataclass(frozen=True)
class ChatResult:
    """All turns; `growth` is the last turn's time over the second's, with and without the conversation.

    `keep_s` and `find_s` are the CPU time of a conversation when `conversations` others are kept.
    """

    rows: list[TurnRow]
    growth: float
    growth_anew: float
    conversations: int
    keep_s: float
    find_s: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class ChatSetup:
    """Conversations on a random model of a real shape.

    Attributes:
        model, layers: The shape, and how many of its layers (None = all).
        turns: Of a conversation.
        chunks, chunk_tokens, question_tokens, answer_tokens: Of a turn.
        ratio: See BlendConfig.
        repeats: Conversations; the medians count.
        conversations: See `ChatResult`.
    """

    model: str = "qwen2.5-0.5b"
    layers: int | None = None
    turns: int = 10
    chunks: int = 4
    chunk_tokens: int = 128
    question_tokens: int = 32
    answer_tokens: int = 32
    ratio: float = 0.15
    repeats: int = 3
    conversations: int = 5000


def measure(setup: ChatSetup, progress: Callable[[str], None] = lambda line: None) -> ChatResult:
    """Measure on a random model of that shape: conversations after a warm-up of two turns."""
    progress(f"building a random model of {setup.model}'s shape")
    net = random_model(setup.model, setup.layers)
    words, rng = one_token_words(net), random.Random(0)

    def text(tokens: int) -> str:
        return "".join(rng.choices(words, k=tokens))

    corpus = [text(setup.chunk_tokens) for _ in range(setup.turns * setup.chunks)]
    times: dict[tuple[int, bool], list[float]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    config = BlendConfig(ratio=setup.ratio)
    with (
        tempfile.TemporaryDirectory() as folder,
        BlendEngine(net, folder, config, ram_bytes=0) as going_on,
        BlendEngine(net, folder, config, ram_bytes=0, conversation_bytes=0) as anew,
    ):
        progress(f"warming {len(corpus)} chunks of {setup.chunk_tokens} tokens")
        going_on.warm(corpus)
        for repeat in range(setup.repeats + 1):
            rng.shuffle(corpus)
            history: Messages = []
            for turn in range(1, setup.turns + 1 if repeat else 3):
                progress(f"conversation {repeat} of {setup.repeats}, turn {turn}" if repeat else "warm-up")
                new = corpus[(turn - 1) * setup.chunks : turn * setup.chunks]
                history.append({"role": "user", "content": "\n\n".join([*new, text(setup.question_tokens)])})
                for engine in (going_on, anew):
                    report = engine.generate(history, max_new_tokens=1, temperature=0).report
                    if repeat:
                        times.setdefault((turn, engine is going_on), []).append(report.ttft_s)
                    if engine is going_on:
                        sizes[turn] = report.prompt_tokens, report.conversation_tokens
                history.append({"role": "assistant", "content": text(setup.answer_tokens)})
    median = {key: statistics.median(values) for key, values in times.items()}
    rows = [TurnRow(turn, *sizes[turn], median[turn, True], median[turn, False]) for turn in range(1, setup.turns + 1)]
    settings = run_settings(net) | {
        "chunks": setup.chunks,
        "chunk_tokens": setup.chunk_tokens,
        "question_tokens": setup.question_tokens,
        "answer_tokens": setup.answer_tokens,
        "ratio": setup.ratio,
        "repeats": setup.repeats,
    }
    last, second = rows[-1], rows[1]
    kept = keep_and_find(net.num_layers, setup.conversations)
    return ChatResult(
        rows, last.ttft_s / second.ttft_s, last.anew_s / second.anew_s, setup.conversations, *kept, settings
    )


def keep_and_find(num_layers: int, count: int) -> tuple[float, float]:
    """Return the CPU time of keeping and of finding a conversation with `count` others, in seconds; the medians."""
    conversations, rng, tokens = Conversations(1 << 40, 1 << 20, num_layers), random.Random(0), 40
    keeping, finding, config = list[float](), list[float](), BlendConfig(ratio=1.0)
    for number in range(count + 9):
        ids = [rng.randrange(30_000) for _ in range(tokens)]
        cache = BlendCache(range(num_layers), tokens)
        for layer in range(num_layers):
            cache.update(torch.zeros(1, 1, tokens, 2), torch.zeros(1, 1, tokens, 2), layer)
        started = time.thread_time()
        request = RequestState(ids)
        conversations.begin(request)
        conversations.keep(request, np.array(ids), tokens, cache, (), Blended(config, (), {}), None)
        kept = time.thread_time()
        conversations.find([*ids, 1], config)
        if number >= count:
            keeping.append(kept - started)
            finding.append(time.thread_time() - kept)
    return statistics.median(keeping), statistics.median(finding)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    add_number(parser, "--turns", 10, "number of turns, at least 2", least=2)  # growth counts from the second
    add_number(parser, "--chunks", 4, "new chunks per turn")
    add_number(parser, "--chunk-tokens", 128, "tokens per chunk")
    add_number(parser, "--question-tokens", 32, "tokens of a question")
    add_number(parser, "--answer-tokens", 32, "tokens of an answer")
    add_number(parser, "--ratio", 0.15, "recompute ratio")
    add_number(parser, "--conversations", 5000, "kept while one more is kept and found")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    given = {name: getattr(args, name) for name in ChatSetup.__dataclass_fields__}
    result = measure(ChatSetup(**given), progress=lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result.settings.items()))
    print(f"\n{'turn':>4}{'prompt':>9}{'kept':>7}{'TTFT':>12}{'anew':>12}")
    for row in result.rows:
        tokens = f"{row.turn:>4}{row.prompt_tokens:>9}{row.conversation_tokens:>7}"
        print(f"{tokens}{row.ttft_s * 1000:>9.0f} ms{row.anew_s * 1000:>9.0f} ms")
    print(f"\nlast turn / second turn: {result.growth:.2f}, without the conversation {result.growth_anew:.2f}")
    keep, find = result.keep_s * 1000, result.find_s * 1000
    print(
        f"with {result.conversations:,} other conversations: {keep:.2f} ms of CPU time to keep one, {find:.2f} to find"
    )
    return 0
