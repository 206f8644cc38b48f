"""`python -m benchmarks.quality.weights`: how large kvrag's change of the answers is, beside a quantisation's.

Full prefill in the model's own dtype is the reference. Beside kvrag's settings stand full prefills of the same model in
float32, with `quantization="int8"`, and with the weights of its linear layers quantised (gguf's Q8_0 and Q4_0) and
dequantised again. With `--codecs`, chunks are also stored with 8 or 4 bits, and stitched. *PGR* is the share of full
prefill's gain over no context that is left (KVShareArena, arXiv 2609.10266): of right answers, and of F1. With
`--data`, rows have passages of their own; KVShareArena's files can be read.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from benchmarks.quality.arms import DECIDED, FULL, INSTRUCTION, margin_of, settings_of_arm
from benchmarks.quality.compare import divergence
from benchmarks.quality.grid import Journal
from benchmarks.quality.metrics import token_f1
from benchmarks.quality.questions import (
    CORPUS,
    QUESTIONS,
    chosen,
    is_right,
    passage_rows,
    read_corpus,
    read_questions,
    retrieve,
)
from benchmarks.quality.rows import QuestionRow, existing_path
from benchmarks.quality.variants import code_digest
from benchmarks.quality.worlds import world_rows
from benchmarks.settings import run_settings
from kvrag import BlendConfig, BlendEngine, Model
from kvrag.cli.common import say
from kvrag.config import DEFAULT_CONTEXT, Sampling
from kvrag.control.plan import wilson
from kvrag.listen.check import END, likeliest, own_answer
from kvrag.request import Request
from kvrag.types import Messages

ARMS = ("none", "first_k", "0.15", "0.3", "adaptive")
GGUF_TYPES = {"Q8_0": GGMLQuantizationType.Q8_0, "Q4_0": GGMLQuantizationType.Q4_0}
WEIGHTS = (*GGUF_TYPES, "int8", "float32")
_STITCHED = ("none", "0.15")  # settings to which chunks of fewer bits are added
_SAMPLING = Sampling(max_new_tokens=32, temperature=0, repetition_penalty=1.0)


@dataclass(frozen=True)
class Answered:
    """A greedy answer.

    Attributes:
        tokens: With `END` for an end token.
        f1: Of its words, against the accepted answers.
        kl: Of the first token's distribution to full prefill's, in nats; None = not measured.
        margin: Full prefill's, in nats, at the first token that differs; None = none differs.
    """

    arm: str
    text: str
    tokens: list[int]
    is_right: bool
    f1: float
    kl: float | None = None
    margin: float | None = None


_SCORES: tuple[Callable[[Answered], float], ...] = (lambda one: one.is_right, lambda one: one.f1)


@dataclass(frozen=True)
class Arm:
    """An engine, the setting of `benchmarks.quality.arms`, and the weights to answer with."""

    engine: BlendEngine
    setting: str
    weights: Callable[[], AbstractContextManager[None]] = nullcontext


def main() -> None:
    """Measure, and print a line per setting; after an interrupt, of the finished questions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.weights", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--n", type=int, default=30, help="number of questions (default: 30)")
    what = "JSON lines with passages, question and answers (default: the questions of `kept`)"
    parser.add_argument("--data", type=existing_path, metavar="FILE", help=what)
    parser.add_argument("--world", action="store_true", help="questions about the reader's world")
    parser.add_argument("--k", type=int, default=8, help="chunks to retrieve (default: 8)")
    parser.add_argument("--context-tokens", type=int, default=DEFAULT_CONTEXT, help="0 = chunks encoded alone")
    parser.add_argument("--arms", nargs="*", default=ARMS, help=f"kvrag's settings (default: {' '.join(ARMS)})")
    codecs = f"measure {' and '.join(_STITCHED)} also with these"
    parser.add_argument("--codecs", nargs="*", choices=("int8", "int4"), default=(), help=codecs)
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of questions")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines; run again to resume")
    args = parser.parse_args()
    torch.set_num_threads(2)
    model = Model.from_pretrained(args.model, dtype=args.dtype)
    rows = _rows(args, model)
    print(
        run_settings(model),
        f"{len(rows)} questions, seed {args.seed}",
        f"{parser.prog} {shlex.join(sys.argv[1:])}",
        flush=True,
    )
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("n", "out")}
    settings |= {"fingerprint": model.fingerprint.digest, "code": code_digest()}
    journal = Journal(args.out, settings, Answered)
    with ExitStack() as stack:
        arms = _arms(args, model, stack)
        try:
            for number, row in enumerate(rows):
                if row.key not in journal.rows:
                    say(f"question {number + 1} of {len(rows)}")
                    journal.add(row.key, answers(row, arms))
        except KeyboardInterrupt:
            say("interrupted")
    done = [journal.rows[row.key] for row in rows if row.key in journal.rows]
    if not done:
        raise SystemExit("no question was finished")
    print("\n".join(lines(done)), flush=True)


def _rows(args: argparse.Namespace, model: Model) -> Sequence[QuestionRow]:
    if args.world:
        return world_rows(args.n, args.seed)
    if args.data:
        return chosen(passage_rows(args.data), args.seed, args.n)
    corpus = read_corpus(CORPUS, lambda text: len(model.tokenizer.encode(text)), 128)
    return retrieve(chosen(read_questions(QUESTIONS), args.seed, args.n), corpus, args.k)


def _arms(args: argparse.Namespace, model: Model, stack: ExitStack) -> dict[str, Arm]:
    """Return the arms by name, full prefill first; engines are closed with the stack."""

    def engine(model: Model, codec: str = "native") -> BlendEngine:
        config = BlendConfig(deterministic=True, context_tokens=args.context_tokens)
        folder = stack.enter_context(TemporaryDirectory())
        return stack.enter_context(BlendEngine(model, folder, config, codec=codec, conversation_bytes=0))

    own = engine(model)
    arms = {FULL: Arm(own, FULL)} | {setting: Arm(own, setting) for setting in args.arms}
    for codec in args.codecs:
        packed = engine(model, codec)
        arms |= {f"{setting} {codec}": Arm(packed, setting) for setting in _STITCHED}
    for name in args.weights:
        if name in GGUF_TYPES:
            arms[name] = Arm(own, FULL, partial(exchanged, quantised(model, GGUF_TYPES[name])))
        else:
            options = {"dtype": "float32"} if name == "float32" else {"dtype": args.dtype, "quantization": name}
            arms[name] = Arm(engine(Model.from_pretrained(args.model, **options)), FULL)
    return arms


def answers(row: QuestionRow, arms: Mapping[str, Arm]) -> list[Answered]:
    """Return full prefill's answer, the one without context, and those of the other arms."""
    stitching = {id(arm.engine): arm.engine for arm in arms.values() if arm.setting != FULL}.values()
    for engine in stitching:
        for name, chunks in row.all_documents().items():
            engine.warm(chunks, document=name)
    full = arms[FULL].engine
    reference, first, margins = _full(full, row)
    without, *_ = _full(full, replace(row, passages=()))
    results = [replace(reference, arm=FULL), replace(without, arm="no context")]
    for name, arm in arms.items():
        if name != FULL:
            with arm.weights():
                one, logits = _answer(arm, row)
            margin = margin_of(reference.tokens, one.tokens, margins)
            kl = None if logits is None else divergence(first, logits)
            results.append(replace(one, arm=name, kl=kl, margin=margin))
    for engine in stitching if not row.context else ():  # documents of a corpus are used again
        for name in row.all_documents():
            engine.forget(name)
    return results


def _prompt(engine: BlendEngine, row: QuestionRow) -> str | Messages:
    before = [] if row.kind else [INSTRUCTION]  # readers were trained without one
    return engine.as_prompt("\n\n".join([*before, *row.passages, f"Question: {row.question}"]))


def _full(engine: BlendEngine, row: QuestionRow) -> tuple[Answered, Tensor, list[float]]:
    """Return the answer, the logits (1, V) of the first token, and the margin of each token in nats."""
    answered, logits, prefilled = _fixed(engine, row, FULL)
    prefilled.cache.set_length(len(prefilled.ids))
    return answered, logits, likeliest(engine.model, prefilled, answered.tokens, _SAMPLING)[1]


def _answer(arm: Arm, row: QuestionRow) -> tuple[Answered, Tensor | None]:
    if settings_of_arm(arm.setting, arm.engine, row):
        return _fixed(arm.engine, row, arm.setting)[:2]
    answer = arm.engine.generate(_prompt(arm.engine, row), **asdict(_SAMPLING))  # adaptive: no logits until it is sure
    tokens = [*answer.token_ids, *([END] if answer.finish_reason == "stop" else [])]
    return _answered(row, tokens, answer.text), None


def _fixed(engine: BlendEngine, row: QuestionRow, setting: str) -> tuple[Answered, Tensor, Request]:
    config = engine.config.overridden(settings_of_arm(setting, engine, row))
    prefilled = engine.prefill(engine.tokenize(_prompt(engine, row)), config)
    logits = prefilled.logits.clone()
    return _answered(row, *own_answer(engine.model, prefilled, _SAMPLING)), logits, prefilled


def _answered(row: QuestionRow, tokens: list[int], text: str) -> Answered:
    return Answered("", text, tokens, is_right(text, row.answers), token_f1(text, row.answers))


def lines(rows: Sequence[Sequence[Answered]]) -> list[str]:
    """Return a line per arm; each row begins with full prefill's answer and the one without context."""
    columns = list(zip(*rows, strict=True))
    full, without = columns[0], columns[1]
    right = sum(one.is_right for one in full)
    result = [f"{len(rows)} questions, {right} right with full prefill"]
    for ours in columns:
        stays = sum(theirs.is_right and one.is_right for theirs, one in zip(full, ours, strict=True))
        kept = sum(one.margin is None or one.margin < DECIDED for one in ours)
        low, high = wilson(kept, len(ours))
        gains = (_recovered(*([score(one) for one in each] for each in (full, ours, without))) for score in _SCORES)
        numbers = [
            f"right stays {stays} of {right}",
            f"right {sum(one.is_right for one in ours)}",
            f"kept {kept} of {len(ours)} ({low:.0%} to {high:.0%})",
            f"same {sum(one.margin is None for one in ours)}",
            f"F1 {mean(one.f1 for one in ours):.3f}",
            f"PGR {', '.join(gains)}",
        ]
        if ours is without:
            del numbers[2:4]
        divergences = [one.kl for one in ours if one.kl is not None]
        numbers += [f"KL {mean(divergences):.4f}"] if divergences else []
        result.append(f"{ours[0].arm:12}{', '.join(numbers)}")
    return result


def _recovered(full: Sequence[float], ours: Sequence[float], without: Sequence[float]) -> str:
    gap = sum(full) - sum(without)
    return f"{(sum(ours) - sum(without)) / gap:.2f}" if gap > 0 else "-"


def quantised(model: Model, kind: GGMLQuantizationType) -> list[tuple[torch.nn.Linear, Tensor]]:
    """Return the linear layers, but not the last one, with their weights as a GGUF file of this type has them."""
    layers = [module for module in model.hf.modules() if isinstance(module, torch.nn.Linear)]
    layers = [layer for layer in layers if layer is not model.hf.get_output_embeddings()]
    rounded = (quants.dequantize(quants.quantize(one.weight.float().numpy(force=True), kind), kind) for one in layers)
    return [(layer, torch.from_numpy(weight).to(layer.weight)) for layer, weight in zip(layers, rounded, strict=True)]


@contextmanager
def exchanged(weights: Sequence[tuple[torch.nn.Linear, Tensor]]) -> Iterator[None]:
    """Use these weights instead of the layers' own."""
    before = [layer.weight.data for layer, _ in weights]
    for layer, weight in weights:
        layer.weight.data = weight
    try:
        yield
    finally:
        for (layer, _), weight in zip(weights, before, strict=True):
            layer.weight.data = weight


if __name__ == "__main__":
    main()
