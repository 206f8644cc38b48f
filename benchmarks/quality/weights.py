"""`python -m benchmarks.quality.weights`: how large kvrag's change of the answers is, beside a quantisation's.

Full prefill in the model's own dtype is the reference. Beside kvrag's settings stand full prefills of the same model in
float32, with `quantization="int8"`, and with the weights of its linear layers quantised (gguf's Q8_0 and Q4_0) and
dequantised again. *PGR* is the share of full prefill's gain over no context that is left (KVShareArena, arXiv
2609.10266): of right answers, and of F1. With `--data`, rows have passages of their own; KVShareArena's files can be
read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import mean
from tempfile import TemporaryDirectory

import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from benchmarks.quality.arms import DECIDED, FULL, INSTRUCTION, margin_of, settings_of_arm
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
from benchmarks.quality.rows import QuestionRow
from benchmarks.settings import run_settings
from kvrag import BlendConfig, BlendEngine, Model
from kvrag.answer import overridden
from kvrag.cli.common import existing_path
from kvrag.config import Sampling
from kvrag.control.agreement import END, divergence, likeliest, own_answer, wilson

ARMS = ("none", "first_k", "0.15", "0.3", "adaptive")
QUANTISED = {"Q8_0": GGMLQuantizationType.Q8_0, "Q4_0": GGMLQuantizationType.Q4_0}


@dataclass(frozen=True)
class Answered:
    """A greedy answer.

    Attributes:
        tokens: With `END` for an end token.
        f1: Of its words, against the accepted answers.
        first: Logits (1, V) of the first token; None = not kept.
        margins: By how many nats full prefill prefers each token; of full prefill's answer only.
    """

    tokens: list[int]
    is_right: bool
    f1: float
    first: Tensor | None = None
    margins: Sequence[float] = ()


_SCORES: tuple[Callable[[Answered], float], ...] = (lambda one: one.is_right, lambda one: one.f1)


def main() -> None:
    """Measure, and print a line per setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.weights", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--n", type=int, default=30, help="number of questions (default: 30)")
    what = "JSON lines with passages, question and answers (default: the questions of `kept`)"
    parser.add_argument("--data", type=existing_path, metavar="FILE", help=what)
    parser.add_argument("--k", type=int, default=8, help="chunks to retrieve (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of questions")
    args = parser.parse_args()
    torch.set_num_threads(2)
    model = Model.from_pretrained(args.model, dtype=args.dtype)
    if args.data:
        rows: Sequence[QuestionRow] = chosen(passage_rows(args.data), args.seed, args.n)
    else:
        corpus = read_corpus(CORPUS, lambda text: len(model.tokenizer.encode(text)), 128)
        rows = retrieve(chosen(read_questions(QUESTIONS), args.seed, args.n), corpus, args.k)
    print(run_settings(model), f"{len(rows)} questions, seed {args.seed}", flush=True)
    with _engine(model) as engine:
        for name, chunks in {name: chunks for row in rows for name, chunks in row.all_documents().items()}.items():
            engine.warm(chunks, document=name)
        full = [_answer(engine, row) for row in rows]
        without = [_answer(engine, replace(row, passages=())) for row in rows]
        for name, answers in (("full", full), ("no context", without)):
            numbers = f"right {sum(one.is_right for one in answers)} of {len(rows)}"
            print(f"{name:10} {numbers}, F1 {mean(one.f1 for one in answers):.3f}", flush=True)
        for arm in ARMS:
            print(_line(arm, full, [_answer(engine, row, arm) for row in rows], without), flush=True)
        for name, kind in QUANTISED.items():
            with _quantised(model, kind):
                print(_line(name, full, [_answer(engine, row) for row in rows], without), flush=True)
    for name, options in {
        "int8": {"dtype": args.dtype, "quantization": "int8"},
        "float32": {"dtype": "float32"},
    }.items():
        with _engine(Model.from_pretrained(args.model, **options)) as engine:
            print(_line(name, full, [_answer(engine, row) for row in rows], without), flush=True)


@contextmanager
def _engine(model: Model) -> Iterator[BlendEngine]:
    config = BlendConfig(deterministic=True)
    with TemporaryDirectory() as folder, BlendEngine(model, folder, config, conversation_bytes=0) as engine:
        yield engine


def _answer(engine: BlendEngine, row: QuestionRow, arm: str = FULL) -> Answered:
    prompt = engine.as_prompt("\n\n".join([INSTRUCTION, *row.passages, f"Question: {row.question}"]))
    settings = settings_of_arm(arm, engine, row)
    sampling = Sampling(max_new_tokens=32, temperature=0, repetition_penalty=1.0)
    if not settings:  # adaptive: there are no logits before the model is sure
        answer = engine.generate(prompt, **asdict(sampling))
        tokens = [*answer.token_ids, *([END] if answer.finish_reason == "stop" else [])]
        return Answered(tokens, is_right(answer.text, row.answers), token_f1(answer.text, row.answers))
    prefilled = engine.prefill(engine.tokenize(prompt), overridden(engine.config, **settings))
    first = prefilled.logits.clone()
    tokens, text = own_answer(engine.model, prefilled, sampling)
    scores = is_right(text, row.answers), token_f1(text, row.answers)
    if arm != FULL:
        return Answered(tokens, *scores, first)
    prefilled.cache.set_length(len(prefilled.ids))
    _, margins = likeliest(engine.model, prefilled, tokens, sampling)
    return Answered(tokens, *scores, first, margins)


def _line(name: str, full: Sequence[Answered], answers: Sequence[Answered], without: Sequence[Answered]) -> str:
    pairs = list(zip(full, answers, strict=True))
    differs = [margin_of(theirs.tokens, ours.tokens, theirs.margins) for theirs, ours in pairs]
    kept = sum(margin is None or margin < DECIDED for margin in differs)
    right, stays = sum(one.is_right for one in full), sum(theirs.is_right and ours.is_right for theirs, ours in pairs)
    low, high = wilson(kept, len(pairs))
    gains = (_recovered(*([score(one) for one in each] for each in (full, answers, without))) for score in _SCORES)
    numbers = [
        f"right stays {stays} of {right}",
        f"kept {kept} of {len(pairs)} ({low:.0%} to {high:.0%})",
        f"same {differs.count(None)}",
        f"F1 {mean(ours.f1 for ours in answers):.3f}",
        f"PGR {', '.join(gains)}",
    ]
    divergences = [
        divergence(theirs.first, ours.first)
        for theirs, ours in pairs
        if theirs.first is not None and ours.first is not None
    ]
    return f"{name:10}{', '.join(numbers)}" + (f", KL {mean(divergences):.4f}" if divergences else "")


def _recovered(full: Sequence[float], ours: Sequence[float], without: Sequence[float]) -> str:
    gap = sum(full) - sum(without)
    return f"{(sum(ours) - sum(without)) / gap:.2f}" if gap > 0 else "-"


@contextmanager
def _quantised(model: Model, kind: GGMLQuantizationType) -> Iterator[None]:
    """Round the weights of the linear layers, but not the last one, as a GGUF file of this type would hold them."""
    layers = [module for module in model.hf.modules() if isinstance(module, torch.nn.Linear)]
    layers = [layer for layer in layers if layer is not model.hf.get_output_embeddings()]
    before = [layer.weight.data for layer in layers]
    for layer in layers:
        rounded = quants.dequantize(quants.quantize(layer.weight.float().numpy(force=True), kind), kind)
        layer.weight.data = torch.from_numpy(rounded).to(layer.weight)
    try:
        yield
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.weight.data = weight


if __name__ == "__main__":
    main()
