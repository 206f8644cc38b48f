"""Time to first token over the prompts of agents, which edit their history.

The traces, on random tokens:

- `thoughts`: the chat template drops an answer's thought from the prompts that follow.
- `trimmed`: tool results are replaced by a few tokens after three turns.
- `compacted`: a history that exceeds a limit is replaced by a summary, except for the last two turns.
- `date`: the system prompt begins with a date that changes with every turn.
- `tools`: two agents, one after the other, with the same tools and different tasks.

The same prompts are answered, one after the other, by an engine that reuses KV behind edits (`history="blend"`), by one
that does not (`history="exact"`), and by `model.generate` with its last cache cropped to the longest common prefix, as
prefix caches do. The text of an answer is given, so that all have the same history: the prompt is sent again with the
answer's tokens, which takes the place of decoding them and is not timed.

With `--vllm PYTHON`, two engines of vLLM answer them too, both with vLLM's prefix caching: `vllm`, and `vllm_kvrag`,
which has kvrag's connector. The connector has no KV of earlier prompts besides vLLM's prefix cache: it reuses chunks of
its store. So the documents of a trace are warmed before it begins, untimed: the tool results of `trimmed` and
`compacted`, the instructions of `date` and the tools of `tools`, one chunk each; nothing of `thoughts`. Stock vLLM has
answered them too. So a tool result that comes for the first time is reused by the connector, and by no other. What was
not warmed (questions, calls, answers, summaries) is computed behind an edit. vLLM's blocks of prefixes are whole: 128
tokens on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peers
from benchmarks.settings import run_settings
from benchmarks.shapes import one_token_words, random_model
from benchmarks.speed.first_token import PrefixCache, add_shape
from kvrag.backend.transformers import Model
from kvrag.cli.common import add_number
from kvrag.config import BlendConfig
from kvrag.engine import BlendEngine

BLEND, EXACT, PREFIX = "blend", "exact", "prefix cache"
VLLM, CONNECTOR = "vllm", "vllm_kvrag"  # names of peers
PAIRS = {BLEND: PREFIX, CONNECTOR: VLLM}
"""What each way that reuses KV behind edits is compared with."""
_SYSTEM = 500  # tokens of a system prompt
_DATE, _CALL, _TRIMMED, _SUMMARY = 8, 50, 5, 200
_UNTRIMMED, _UNCOMPACTED = 3, 2  # turns
_RESULT = 2  # index in the texts of a turn: question, call, result, answer

Text = list[int]
MakeText = Callable[[int], Text]
Ask = Callable[[Text], "Cost"]


class Step(NamedTuple):
    """A prompt of a turn, and what is kept of its answer."""

    turn: int  # of its conversation, from 1 on
    prompt: Text
    answer: Text
    documents: tuple[Text, ...] = ()  # that come with this prompt, and can have been warmed


@dataclass(frozen=True)
class Cost:
    """How a prompt was prefilled. `computed` tokens are fresh or recomputed.

    `cpu_s` is the processor time of all threads, the work after the first token included: on a machine that others use,
    it varies less than the TTFT. Threads that wait for each other count, so compare it with one thread. None = not
    measured: vLLM's processes.
    """

    computed: int
    conversation: int
    moved: int
    ttft_s: float
    cpu_s: float | None = None


@dataclass(frozen=True)
class PromptRow:
    """A prompt, and its cost by way of answering. `is_edited`: it does not continue the last prompt and its answer."""

    turn: int
    is_edited: bool
    prompt_tokens: int
    costs: dict[str, Cost]


@dataclass(frozen=True)
class Sums:
    """Sums over prompts, by way of answering; the ratios are the sum of the other of `PAIRS` over that of the way."""

    prompts: int
    computed: dict[str, int]
    ttft_s: dict[str, float]
    cpu_s: dict[str, float]
    fewer: dict[str, float]
    sooner: dict[str, float]


@dataclass(frozen=True)
class Trace:
    """All prompts of a trace. `first_to_follow_up` is for `tools`: first prompt of the second agent / its next ones."""

    name: str
    rows: list[PromptRow]
    all: Sums
    edited: Sums
    first_to_follow_up: dict[str, float] | None


@dataclass(frozen=True)
class AgentsResult:
    """All traces, and the settings to reproduce them."""

    traces: list[Trace]
    settings: dict[str, Any]


@dataclass(frozen=True)
class AgentsSetup:
    """Traces on a random model of a real shape.

    Attributes:
        model, layers: The shape, and how many of its layers (None = all).
        traces: Names of the traces.
        turns: Of a trace; with `tools`, half of them are the second agent's.
        question_tokens, answer_tokens, thought_tokens, result_tokens: Of a turn. A result of `compacted` is longer: an
            eighth of its limit.
        compact_at: The limit of `compacted`, in tokens.
        instruction_tokens: Of `date`, after the date.
        tools_tokens: Of `tools`.
        ratio: See BlendConfig.
        repeats: Times that each trace is repeated, with other texts; the medians count.
        vllm: The Python of an environment with vLLM and vllm-kvrag; None = without vLLM.
    """

    model: str = "qwen2.5-0.5b"
    layers: int | None = None
    traces: tuple[str, ...] = ()
    turns: int = 12
    question_tokens: int = 50
    answer_tokens: int = 300
    thought_tokens: int = 150
    result_tokens: int = 600
    compact_at: int = 16000
    instruction_tokens: int = 2000
    tools_tokens: int = 8000
    ratio: float = 0.15
    repeats: int = 3
    vllm: str | None = None


def _thoughts(setup: AgentsSetup, text: MakeText) -> Iterator[Step]:
    history = text(_SYSTEM)
    for turn in range(1, setup.turns + 1):
        history = history + text(setup.question_tokens)
        answer = text(setup.answer_tokens)
        yield Step(turn, history, text(setup.thought_tokens) + answer)
        history = history + answer


def _trimmed(setup: AgentsSetup, text: MakeText) -> Iterator[Step]:
    system, trimmed = text(_SYSTEM), text(_TRIMMED)
    turns: list[list[Text]] = []
    for turn in range(1, setup.turns + 1):
        turns.append([text(setup.question_tokens)])
        for pieces in turns[:-_UNTRIMMED]:
            pieces[_RESULT] = trimmed
        yield from _with_a_tool(turn, system, turns, setup.result_tokens, setup.answer_tokens, text)


def _compacted(setup: AgentsSetup, text: MakeText) -> Iterator[Step]:
    system = text(_SYSTEM)
    turns: list[list[Text]] = []
    for turn in range(1, setup.turns + 1):
        turns.append([text(setup.question_tokens)])
        if len(_joined(system, turns)) > setup.compact_at:
            turns[: -1 - _UNCOMPACTED] = [[text(_SUMMARY)]]
        yield from _with_a_tool(turn, system, turns, setup.compact_at // 8, setup.answer_tokens, text)


def _with_a_tool(
    turn: int, system: Text, turns: list[list[Text]], result_tokens: int, answer_tokens: int, text: MakeText
) -> Iterator[Step]:
    """Yield the prompt that ends with a turn's question, and that with the result of a tool; adds both to the turn."""
    call, result, answer = text(_CALL), text(result_tokens), text(answer_tokens)
    yield Step(turn, _joined(system, turns), call)
    turns[-1] += [call, result]
    yield Step(turn, _joined(system, turns), answer, (result,))
    turns[-1].append(answer)


def _date(setup: AgentsSetup, text: MakeText) -> Iterator[Step]:
    instructions = text(setup.instruction_tokens)
    history = instructions
    for turn in range(1, setup.turns + 1):
        history = history + text(setup.question_tokens)
        answer = text(setup.answer_tokens)
        yield Step(turn, text(_DATE) + history, answer, (instructions,))
        history = history + answer


def _tools(setup: AgentsSetup, text: MakeText) -> Iterator[Step]:
    tools = text(setup.tools_tokens)
    for _ in range(2):
        history = tools
        for turn in range(1, setup.turns // 2 + 1):
            history = history + text(setup.question_tokens)
            answer = text(setup.answer_tokens)
            yield Step(turn, history, answer, (tools,))
            history = history + answer


def _joined(system: Text, turns: list[list[Text]]) -> Text:
    return [*system, *chain.from_iterable(chain.from_iterable(turns))]


TRACES: dict[str, Callable[[AgentsSetup, MakeText], Iterator[Step]]] = {
    "thoughts": _thoughts,
    "trimmed": _trimmed,
    "compacted": _compacted,
    "date": _date,
    "tools": _tools,
}


def _ask(engine: BlendEngine, ids: Text) -> Cost:
    report = engine.generate(ids, max_new_tokens=1, temperature=0).report
    computed = report.fresh_tokens + report.recomputed_tokens
    return Cost(computed, report.conversation_tokens, report.moved_tokens, report.ttft_s)


def _generate(cache: PrefixCache, ids: Text) -> Cost:
    started = time.perf_counter()
    kept, _ = cache.generate(ids)
    return Cost(len(ids) - kept, kept, 0, time.perf_counter() - started)


def _with_cpu(ask: Ask, ids: Text) -> Cost:
    started = time.process_time()
    cost = ask(ids)
    return replace(cost, cpu_s=time.process_time() - started)


def _ask_peer(peer: str, process: subprocess.Popen[str], ids: Text) -> Cost:
    answered = peers.ask(peer, process, ids, 1)
    assert answered.computed is not None
    assert answered.prefix is not None
    return Cost(answered.computed, answered.prefix, 0, answered.seconds)


@contextmanager
def _vllm(net: Model, setup: AgentsSetup, steps: list[Step]) -> Iterator[dict[str, Ask]]:
    """Start vLLM with and without the connector, the documents of these steps in the connector's store."""
    if setup.vllm is None:
        yield {}
        return
    documents = list(map(list, dict.fromkeys(map(tuple, chain.from_iterable(step.documents for step in steps)))))
    window = max(len(step.prompt) + len(step.answer) for step in steps) + 1
    blend = {"controller": "off", "ratio": setup.ratio}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # then OMP_NUM_THREADS is for all ways
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers.write_model(folder, net)
        # loaded from the folder, as vLLM does: the tokenizer's fingerprint is that of the files
        with BlendEngine.from_pretrained(folder, store=folder / "kv", ram_bytes=0) as engine:
            engine.warm([net.tokenizer.decode(document) for document in documents])
        pythons = dict.fromkeys((VLLM, CONNECTOR), setup.vllm)
        with peers.running(folder, documents, pythons, window, blend) as processes:
            yield {peer: partial(_ask_peer, peer, process) for peer, process in processes.items()}


def measure(setup: AgentsSetup, progress: Callable[[str], None] = lambda line: None) -> AgentsResult:
    """Measure on a random model of that shape, after a warm-up of two turns."""
    progress(f"building a random model of {setup.model}'s shape")
    net = random_model(setup.model, setup.layers)
    ids = [net.tokenizer.encode(word)[0] for word in one_token_words(net)]
    rng = random.Random(0)

    def text(tokens: int) -> Text:
        return rng.choices(ids, k=tokens)

    short = replace(setup, turns=2, question_tokens=50, answer_tokens=100, thought_tokens=20)
    warm_up = list(_thoughts(short, text))
    steps = {name: [list(TRACES[name](setup, text)) for _ in range(setup.repeats)] for name in setup.traces or TRACES}
    traces = []
    with _vllm(net, setup, [*warm_up, *chain(*chain(*steps.values()))]) as ways:
        progress("warm-up")
        _answer(net, setup.ratio, ways, warm_up, lambda line: None)
        for name, of_repeats in steps.items():
            repeats = [
                _answer(net, setup.ratio, ways, of_repeat, partial(_report, progress, name, number))
                for number, of_repeat in enumerate(of_repeats, 1)
            ]
            traces.append(_trace(name, [_median_row(rows) for rows in zip(*repeats, strict=True)]))
    names = [name for name in AgentsSetup.__dataclass_fields__ if name not in ("model", "layers", "traces")]
    return AgentsResult(traces, run_settings(net) | {name: getattr(setup, name) for name in names})


def _report(progress: Callable[[str], None], name: str, repeat: int, line: str) -> None:
    progress(f"{name}, repeat {repeat}, {line}")


def _answer(
    net: Model, ratio: float, others: dict[str, Ask], steps: list[Step], progress: Callable[[str], None]
) -> list[PromptRow]:
    """Answer the prompts of a trace in turn, each in every way, beginning without any KV of them."""
    rows = []
    before: Text = []
    with (
        tempfile.TemporaryDirectory() as folder,
        BlendEngine(net, folder, BlendConfig(ratio=ratio, history="blend"), ram_bytes=0) as blend,
        BlendEngine(net, folder, BlendConfig(ratio=ratio, history="exact"), ram_bytes=0) as exact,
    ):
        here: dict[str, Ask] = {
            BLEND: partial(_ask, blend),
            EXACT: partial(_ask, exact),
            PREFIX: partial(_generate, PrefixCache(net, block=1)),
        }
        ways = {name: partial(_with_cpu, ask) for name, ask in here.items()} | others
        for number, step in enumerate(steps, 1):
            progress(f"prompt {number} of {len(steps)}, {len(step.prompt)} tokens")
            first = number % len(ways)  # in turn: the first answer fills the processor's caches for the others
            order = [*ways, *ways][first : first + len(ways)]
            measured = {name: ways[name](step.prompt) for name in order}
            costs = {name: measured[name] for name in ways}
            is_edited = step.turn > 1 and step.prompt[: len(before)] != before
            rows.append(PromptRow(step.turn, is_edited, len(step.prompt), costs))
            before = step.prompt + step.answer
            for ask in ways.values():
                ask(before)
    return rows


def _median_row(rows: tuple[PromptRow, ...]) -> PromptRow:
    """Return one row of the same prompt in several repeats, with medians of the times."""
    costs = {}
    for name, cost in rows[-1].costs.items():
        ttft_s = statistics.median(row.costs[name].ttft_s for row in rows)
        cpu_s = [seconds for row in rows if (seconds := row.costs[name].cpu_s) is not None]
        costs[name] = replace(cost, ttft_s=ttft_s, cpu_s=statistics.median(cpu_s) if cpu_s else None)
    return replace(rows[-1], costs=costs)


def _trace(name: str, rows: list[PromptRow]) -> Trace:
    first_to_follow_up = None
    if name == "tools":
        first, *follow_ups = rows[len(rows) // 2 :]
        first_to_follow_up = {
            way: cost.ttft_s / statistics.median(row.costs[way].ttft_s for row in follow_ups)
            for way, cost in first.costs.items()
        }
    return Trace(name, rows, _sums(rows), _sums([row for row in rows if row.is_edited]), first_to_follow_up)


def _sums(rows: list[PromptRow]) -> Sums:
    ways = list(rows[0].costs) if rows else []
    computed = {way: sum(row.costs[way].computed for row in rows) for way in ways}
    ttft_s = {way: sum(row.costs[way].ttft_s for row in rows) for way in ways}
    cpu_s = {way: sum(row.costs[way].cpu_s or 0 for row in rows) for way in ways if rows[0].costs[way].cpu_s}
    fewer, sooner = (
        {way: sums[other] / sums[way] for way, other in PAIRS.items() if way in sums} for sums in (computed, ttft_s)
    )
    return Sums(len(rows), computed, ttft_s, cpu_s, fewer, sooner)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    parser.add_argument("--traces", nargs="+", default=list(TRACES), choices=TRACES, help="the traces (default: all)")
    add_number(parser, "--turns", 12, "number of turns, at least 4", least=4)  # both agents have a follow-up
    add_number(parser, "--question-tokens", 50, "tokens of a question", least=1)
    add_number(parser, "--answer-tokens", 300, "tokens of an answer, without its thought", least=1)
    add_number(parser, "--thought-tokens", 150, "tokens of a thought")
    add_number(parser, "--result-tokens", 600, "tokens of a tool's result in `trimmed`")
    add_number(parser, "--compact-at", 16000, "tokens at which `compacted` replaces its history by a summary")
    add_number(parser, "--instruction-tokens", 2000, "tokens of instructions in `date`")
    add_number(parser, "--tools-tokens", 8000, "tokens of tools in `tools`")
    add_number(parser, "--ratio", 0.15, "recompute ratio", most=1)
    about = "Python of an environment with vllm and vllm-kvrag: measure vLLM with and without the connector too"
    parser.add_argument("--vllm", metavar="PYTHON", help=about)


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    setup = AgentsSetup(**{name: getattr(args, name) for name in AgentsSetup.__dataclass_fields__})
    result = measure(setup, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result.settings.items()))
    print("cmp = tokens computed, kept = from the conversation, moved = from behind an edit; * = behind an edit")
    for trace in result.traces:
        first, *others = trace.rows[0].costs
        print(f"\n{trace.name}\n{'':15}{first:>35}" + "".join(f"{way:>28}" for way in others))
        columns = f"{'cmp':>8}{'kept':>8}"
        print(f"{'turn':>4}  {'prompt':>9}{columns}{'moved':>8}{'TTFT':>11}" + f"{columns}{'TTFT':>12}" * len(others))
        for row in trace.rows:
            print(f"{row.turn:>4}{' *' if row.is_edited else '  '}{row.prompt_tokens:>9}" + _columns(row))
        for what, sums in (("all prompts", trace.all), ("behind an edit", trace.edited)):
            if sums.prompts:
                print(f"{what} ({sums.prompts}):", ", ".join(_sum_of(sums, way) for way in sums.computed))
            for way, fewer in sums.fewer.items():
                print(f"    {way} computes {fewer:.2f}x fewer tokens than {PAIRS[way]}, {sums.sooner[way]:.2f}x sooner")
        if trace.first_to_follow_up:
            ratios = (f"{way} {ratio:.2f}" for way, ratio in trace.first_to_follow_up.items())
            print("first prompt of the second agent / its next ones:", ", ".join(ratios))
    return 0


def _columns(row: PromptRow) -> str:
    text = ""
    for way, cost in row.costs.items():
        text += f"{cost.computed:>8}{cost.conversation:>8}"
        text += f"{cost.moved:>8}{cost.ttft_s * 1000:>8.0f} ms" if way == BLEND else f"{cost.ttft_s * 1000:>9.0f} ms"
    return text


def _sum_of(sums: Sums, way: str) -> str:
    cpu = f" ({sums.cpu_s[way]:.2f} s of CPU)" if way in sums.cpu_s else ""
    return f"{way} {sums.computed[way]} tokens {sums.ttft_s[way]:.2f} s{cpu}"
