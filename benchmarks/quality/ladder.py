"""Changes of stored KV that would make answers full prefill's: an experiment with full prefill's own KV.

Parts of full prefill's KV are written over the stitched KV of all chunk tokens: keys or values alone, deep layers
alone, or the change projected on a few directions per layer. Beside them, a budget of tokens is recomputed or
transplanted (overwritten with full prefill's KV), scattered or in spans. Each row of the table is an upper bound of
what a method of that kind can reach. `--trials` measures methods instead, see `corrections`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from kvrag.adapt.differentiable import LayerStates
from kvrag.adapt.distill import Lesson, divergences, locate, stitched, teach
from torch import Tensor

from benchmarks.quality.corrections import (
    Fitted,
    Prompt,
    Variant,
    answer,
    changes,
    corrected,
    features,
    fit,
    on_bases,
    prepare,
)
from benchmarks.quality.grid import exact_match
from benchmarks.quality.metrics import Bootstrap
from benchmarks.quality.rows import QuestionRow, document_rows, file_rows
from benchmarks.quality.worlds import world_rows
from kvrag.backend.transformers import Model
from kvrag.cli.common import DTYPES, at_least, existing_path, progress
from kvrag.config import BlendConfig
from kvrag.control.prompts import ask, first_word, make_prompts, render, search_by_words
from kvrag.errors import KvragError
from kvrag.retrieval import documents
from kvrag.reuse.policies.query import attention, first_tokens
from kvrag.reuse.select import Context, best

RANKS = (8, 16, 32, 64)
DEPTHS = (1 / 6, 1 / 3, 1 / 2, 2 / 3)
SPANS = (16, 32)
STARTS = (1 / 3, 1 / 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", default="reader", help="model id, folder, smollm2 or reader (default)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: as stored")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--data", type=existing_path, metavar="FILE", help="questions, as for `python -m benchmarks answers`"
    )
    source.add_argument("--docs", type=existing_path, metavar="FOLDER", help="prompts made from these documents")
    parser.add_argument("--samples", type=at_least(1), default=100, metavar="N", help="prompts (default: 100)")
    parser.add_argument("--fit", type=at_least(1), default=40, metavar="N", help="other prompts, for the directions")
    parser.add_argument(
        "--fit-docs", type=existing_path, metavar="FOLDER", help="with --docs: those are made from these"
    )
    parser.add_argument("--context-tokens", type=at_least(0), default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--chunk-tokens", type=at_least(16), default=128, metavar="N", help="with --docs (default: 128)"
    )
    parser.add_argument("--top-k", type=at_least(2), default=8, metavar="K", help="with --docs (default: 8)")
    parser.add_argument("--ratio", type=at_least(0, float, 1), default=0.15, metavar="R", help="default: 0.15")
    parser.add_argument("--max-tokens", type=at_least(1), default=8, metavar="N", help="of an answer (default: 8)")
    parser.add_argument("--trials", action="store_true", help="a late start and predicted changes, at equal work")
    parser.add_argument("--seed", type=at_least(0), default=0)


def run(args: argparse.Namespace) -> int:
    """Measure and print the ladder."""
    model = Model.from_pretrained(args.model, dtype=args.dtype)
    rows = _rows(args, model)
    lessons = [(lesson_of(model, row, args.context_tokens), row) for row in rows]
    lessons = [(lesson, row) for lesson, row in lessons if len(lesson.runs) > 1]
    others, asked = lessons[args.samples :], lessons[: args.samples]
    with progress("fitting", args.json) as update:
        fitted = fit(model, [lesson for lesson, _ in others], update)
    records: dict[str, list[Record]] = {}
    with progress("measuring", args.json) as update:
        for number, (lesson, row) in enumerate(asked):
            update(number, len(asked))
            for name, record in measure(model, lesson, row, fitted, args):
                records.setdefault(name, []).append(record)
    table = summarise(records, [row.context or repr(row.passages) for _, row in asked], args.seed)
    result = {
        "command": " ".join(sys.argv),
        "model": model.name,
        "samples": len(asked),
        "explained": fitted.explained,
        "rows": table,
    }
    print(json.dumps(result) if args.json else "\n".join(_lines(result)))
    return 0


def _rows(args: argparse.Namespace, model: Model) -> list[QuestionRow]:
    """Return the prompts to measure on, then those to fit on."""
    count = args.samples + args.fit
    if args.data is not None:
        rows = file_rows(args.data, 1 << 30)
        random.Random(args.seed).shuffle(rows)
        asked = rows[: args.samples]
        contexts = {row.context or repr(row.passages) for row in asked}
        others = [row for row in rows[args.samples :] if (row.context or repr(row.passages)) not in contexts]
        return [*asked, *others[: args.fit]]
    if args.docs is None:
        return list(world_rows(count, args.seed))
    if args.fit_docs is None:
        return _document_rows(args, model, args.docs, count)
    asked = _document_rows(args, model, args.docs, args.samples)
    if len(asked) < args.samples:
        raise KvragError(f"{args.docs} has text for {len(asked)} prompts only: use fewer --samples")
    return [*asked, *_document_rows(args, model, args.fit_docs, args.fit)]


def _document_rows(args: argparse.Namespace, model: Model, folder: Path, count: int) -> list[QuestionRow]:
    split = documents.splitter(lambda text: len(model.tokenizer.encode(text)), args.chunk_tokens, 0)
    library = {str(path): tuple(split(documents.read(path).texts)) for path in documents.find([folder])[0]}
    chunks = list(dict.fromkeys(chunk for texts in library.values() for chunk in texts))
    names = {chunk: name for name, texts in library.items() for chunk in texts}
    search = search_by_words(chunks)
    rows = document_rows(make_prompts(model, chunks, search, count, args.top_k, args.seed, args.max_tokens))
    for row in rows:
        object.__setattr__(row, "documents", tuple(names[text] for text in row.passages))
        object.__setattr__(row, "library", {name: library[name] for name in set(row.documents)})
    random.Random(args.seed).shuffle(rows)
    return rows


def lesson_of(model: Model, row: QuestionRow, context_tokens: int) -> Lesson:
    """Return the prompt of a row, with each chunk's preceding tokens in its document."""
    encode = model.tokenizer.encode
    if row.beginning:
        ids = render(model.tokenizer, row.passages, row.beginning)
    else:
        ids = ask(model.tokenizer, row.passages, row.question)
    contexts: dict[str, list[int]] = {}
    if context_tokens and row.documents:
        for texts in row.all_documents().values():
            before: list[int] = []
            for text in texts:
                contexts.setdefault(text, before[-context_tokens:])
                before = [*before, *(encode("\n\n") if before else []), *encode(text)]
    chunks = [(contexts.get(text, []), encode(text)) for text in row.passages]
    runs = locate(ids, [chunk for _, chunk in chunks])
    end = runs[-1].stop if runs else 0
    return Lesson(ids[:end], [ids[end:]], chunks, runs)


# ------------------------------------------------------------------------------------------------- the measurement


@dataclass(frozen=True)
class Record:
    """One prompt under one variant: divergence of the first token in nats, and whether all tokens are full prefill's.

    `is_right`: full prefill's answer is right.
    """

    kl: float
    first: bool
    same: bool
    is_right: bool


def measure(
    model: Model, lesson: Lesson, row: QuestionRow, fitted: Fitted, args: argparse.Namespace
) -> list[tuple[str, Record]]:
    """Return the record of every variant for one prompt."""
    with torch.inference_mode():
        (target,) = teach(model, lesson, args.max_tokens)
        text = model.tokenizer.decode([token for token in target.answer if token not in model.eos_ids]).split("\n")[0]
        text = first_word(text) if row.beginning else text
        is_right = bool(exact_match(text, row.answers))
        starts = [round(start * model.num_layers) for start in STARTS] if args.trials else []
        prompt = prepare(model, lesson, starts)
        ids = torch.tensor([*lesson.beginning, *lesson.ends[0]])
        scores = _Scores(model, ids, lesson, prompt)
        variants = (_trials if args.trials else _parts)(model, lesson, prompt, fitted, scores, args.ratio)
        records = []
        for name, variant in variants.items():
            logits = answer(model, ids, target, variant, prompt.where)
            same = logits.argmax(-1).cpu() == torch.tensor(target.answer)
            kl = float(divergences(target.logits[:1].to(logits.device), logits[:1]))
            records.append((name, Record(kl, bool(same[0]), bool(same.all()), is_right)))
        return records


class _Scores:
    """Scores of the `query` policy for a prompt."""

    def __init__(self, model: Model, ids: Tensor, lesson: Lesson, prompt: Prompt) -> None:
        self.where = prompt.where
        self._context = Context(model, stitched(ids, lesson, prompt.written, self.where, model), BlendConfig(), 0)
        self._attention = attention(self._context)

    def of(self, budget: int) -> Tensor:
        """Return the (R,) scores under a budget."""
        return (self._attention + first_tokens(replace(self._context, budget=budget)))[self.where]

    def chosen(self, budget: int) -> Tensor:
        """Return the best places under a budget."""
        return best(self.of(budget), budget)


def _default(ratio: float) -> str:
    return f"{ratio:.0%} by query, recomputed"


def _parts(
    model: Model, lesson: Lesson, prompt: Prompt, fitted: Fitted, scores: _Scores, ratio: float
) -> dict[str, Variant]:
    """Return variants that take parts of full prefill's KV, or recompute others than the default."""
    where, written, full = prompt.where, prompt.written, prompt.full
    nothing, budget = torch.arange(0), round(ratio * len(where))
    delta = changes(model, prompt)
    moved = sum(part.square().sum(1) / part.square().sum().clamp_min(1e-12) for layer in delta for part in layer)
    assert isinstance(moved, Tensor)
    states: dict[str, LayerStates] = {"plain reuse": written}
    states["keys of full prefill"] = [(f[0], w[1]) for f, w in zip(full, written, strict=True)]
    states["values of full prefill"] = [(w[0], f[1]) for f, w in zip(full, written, strict=True)]
    states["both"] = full
    for depth in DEPTHS:
        first = round(depth * model.num_layers)
        states[f"both, layers from {depth:.2f}"] = [*written[:first], *full[first:]]
        states[f"both, layers below {depth:.2f}"] = [*full[:first], *written[first:]]
    amounts = on_bases(delta, fitted.bases)
    for rank in RANKS:
        states[f"change of rank {rank}"] = corrected(model, written, amounts, fitted.bases, where, rank)
    variants = {name: Variant(kv, nothing) for name, kv in states.items()}
    by_query = scores.of(budget)
    for name, values in {"query": by_query, "largest change": moved}.items():
        chosen = best(values, budget)
        variants[f"{ratio:.0%} by {name}, recomputed"] = Variant(written, chosen)
        variants[f"{ratio:.0%} by {name}, transplanted"] = Variant(_transplanted(written, full, chosen), nothing)
    groups = {f"spans of {length}": _spans(lesson, length) for length in SPANS}
    groups["whole chunks"] = _spans(lesson, 1 << 30)
    for name, spans in groups.items():
        chosen = _best_spans(by_query, spans, budget)
        variants[f"{ratio:.0%} in {name} by query, recomputed"] = Variant(written, chosen)
    return variants


def _trials(
    model: Model, lesson: Lesson, prompt: Prompt, fitted: Fitted, scores: _Scores, ratio: float
) -> dict[str, Variant]:
    """Return the methods of `corrections`, at as many rows x layers as the default."""
    where, written = prompt.where, prompt.written
    nothing, everything, default = torch.arange(0), torch.arange(len(where)), scores.chosen(round(ratio * len(where)))
    variants = {"plain reuse": Variant(written, nothing), _default(ratio): Variant(written, default)}
    for depth in STARTS:
        start = round(depth * model.num_layers)
        share = min(ratio * model.num_layers / (model.num_layers - start), 1)
        chosen = scores.chosen(round(share * len(where)))
        inputs = {"stored": prompt.stored_inputs[start], "full prefill's": prompt.full_inputs[start]}
        for kind, hidden in inputs.items():
            name = f"{share:.0%} from {depth:.2f}, {kind} inputs"
            variants[name] = Variant(written, chosen, start, hidden[chosen])
        variants[f"all from {depth:.2f}, stored inputs"] = Variant(written, everything, start, inputs["stored"])
    true = on_bases(changes(model, prompt), fitted.bases)
    columns = features(model, lesson, written, where)
    guess, early_guess = fitted.predict(columns), fitted.predict(columns, own=True)
    for rank in (RANKS[1], RANKS[2]):
        states = corrected(model, written, true, fitted.bases, where, rank)
        variants[f"change of rank {rank}, full prefill's"] = Variant(states, nothing)
        states = corrected(model, written, guess, fitted.bases, where, rank)
        variants[f"change of rank {rank}, predicted"] = Variant(states, nothing)
        variants[f"... and {ratio:.0%} (rank {rank})"] = Variant(states, default)
    variants[f"... and {ratio:.0%}, shifted (rank {rank})"] = Variant(states, default, is_shifted=True)
    states = corrected(model, written, early_guess, fitted.bases, where, rank)
    variants[f"change of rank {rank}, predicted when encoded"] = Variant(states, nothing)
    variants[f"... and {ratio:.0%} (rank {rank}, when encoded)"] = Variant(states, default)
    variants[f"... and {ratio:.0%}, shifted (when encoded)"] = Variant(states, default, is_shifted=True)
    variants[f"{ratio:.0%}, shifted"] = Variant(written, default, is_shifted=True)
    return variants


def _transplanted(written: LayerStates, full: LayerStates, chosen: Tensor) -> LayerStates:
    states = []
    for ours, theirs in zip(written, full, strict=True):
        parts = [part.clone() for part in ours]
        for part, other in zip(parts, theirs, strict=True):
            part[:, :, chosen] = other[:, :, chosen]
        states.append((parts[0], parts[1]))
    return states


def _spans(lesson: Lesson, length: int) -> list[Tensor]:
    """Return the places of the reused tokens in spans of up to `length`, within chunks."""
    spans, at = list[Tensor](), 0
    for run in lesson.runs:
        spans += torch.split(torch.arange(at, at + len(run)), min(length, len(run)))
        at += len(run)
    return spans


def _best_spans(scores: Tensor, spans: Sequence[Tensor], budget: int) -> Tensor:
    """Return the places of the spans with the highest mean score, as many as fit, the last one cut."""
    order = sorted(spans, key=lambda span: -float(scores[span].mean()))
    return torch.cat(order)[:budget].sort().values


# ------------------------------------------------------------------------------------------------------ the table


def summarise(records: Mapping[str, Sequence[Record]], contexts: Sequence[str], seed: int) -> list[dict[str, object]]:
    """Return a row per variant, with 95 % intervals over contexts."""
    numbers = np.asarray([list(dict.fromkeys(contexts)).index(context) for context in contexts])
    bootstrap = Bootstrap(numbers, seed)
    columns = {
        name: {
            part: np.asarray([float(getattr(record, part)) for record in rows])
            for part in ("kl", "first", "same", "is_right")
        }
        for name, rows in records.items()
    }
    plain = columns["plain reuse"]["kl"]
    default = next(column["kl"] for name, column in columns.items() if name.endswith("by query, recomputed"))
    table = []
    for name, column in columns.items():
        share = bootstrap.of(lambda ours, base: ours / base, column["kl"], plain)
        against = bootstrap.of(lambda ours, base: ours / base, column["kl"] - default, plain)
        kept = bootstrap.of(lambda both, right: both / right, column["same"] * column["is_right"], column["is_right"])
        table.append(
            {
                "variant": name,
                "kl": float(column["kl"].mean()),
                "share": [share["value"], share["low"], share["high"]],
                "against": [against["value"], against["low"], against["high"]],
                "first": float(column["first"].mean()),
                "kept": [kept["value"], kept["low"], kept["high"]],
                "right": int(column["is_right"].sum()),
            }
        )
    return table


def _lines(result: Mapping[str, object]) -> list[str]:
    rows, explained = result["rows"], result["explained"]
    assert isinstance(rows, list)
    assert isinstance(explained, tuple)
    lines = [
        f"{result['model']}: {result['samples']} prompts, {rows[0]['right']} answered right by full prefill",
        "predicted of the change on 32 directions, held-out prompts: keys {:.0%}, values {:.0%}".format(*explained),
        "",
    ]
    lines.append(f"{'':44}{'KL':>8}   {'of plain reuse':22}{'less the default':24}{'first':>7}   right answers kept")
    for row in rows:
        share = "{:.0%} ({:.0%} to {:.0%})".format(*row["share"])
        against = "{:+.0%} ({:+.0%} to {:+.0%})".format(*row["against"])
        kept = "{:.1%} ({:.1%} to {:.1%})".format(*row["kept"]) if row["right"] else "-"
        lines.append(f"{row['variant']:44}{row['kl']:>8.4f}   {share:22}{against:24}{row['first']:>7.1%}   {kept}")
    return lines
