"""Changes of stored KV that would make answers full prefill's: an experiment with full prefill's own KV.

Parts of full prefill's KV are written over the stitched KV of all chunk tokens: keys or values alone, deep layers
alone, or the change projected on a few directions per layer. Beside them, a budget of tokens is recomputed or
transplanted (overwritten with full prefill's KV), scattered or in spans. Each row of the table is an upper bound of
what a method of that kind can reach.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.quality.metrics import Bootstrap
from benchmarks.quality.worlds import world_rows
from kvrag.adapt.differentiable import LayerStates
from kvrag.adapt.distill import Lesson, answer_over, divergences, locate, stitched, teach, write
from kvrag.backend.transformers import Model
from kvrag.bench.datasets import QuestionRow, document_rows, file_rows
from kvrag.bench.quality import exact_match
from kvrag.cli.common import DTYPES, at_least, existing_path, progress
from kvrag.config import BlendConfig
from kvrag.control.prompts import first_word, make_prompts, render, search_by_words
from kvrag.retrieval import documents
from kvrag.reuse.policies import query
from kvrag.reuse.select import Context, best

RANKS = (8, 16, 32, 64)
DEPTHS = (1 / 6, 1 / 3, 1 / 2, 2 / 3)
SPANS = (16, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", default="reader", help="model id, folder, smollm2 or reader (default)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: as stored")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=existing_path, metavar="FILE", help="questions, as for `kvrag bench quality`")
    source.add_argument("--docs", type=existing_path, metavar="FOLDER", help="prompts made from these documents")
    parser.add_argument("--samples", type=at_least(1), default=100, metavar="N", help="prompts (default: 100)")
    parser.add_argument("--fit", type=at_least(1), default=40, metavar="N", help="other prompts, for the directions")
    parser.add_argument("--context-tokens", type=at_least(0), default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--chunk-tokens", type=at_least(16), default=128, metavar="N", help="with --docs (default: 128)"
    )
    parser.add_argument("--top-k", type=at_least(2), default=8, metavar="K", help="with --docs (default: 8)")
    parser.add_argument("--ratio", type=at_least(0, float, 1), default=0.15, metavar="R", help="default: 0.15")
    parser.add_argument("--max-tokens", type=at_least(1), default=8, metavar="N", help="of an answer (default: 8)")
    parser.add_argument("--seed", type=at_least(0), default=0)


def run(args: argparse.Namespace) -> int:
    """Measure and print the ladder."""
    model = Model.from_pretrained(args.model, dtype=args.dtype)
    rows = _rows(args, model, args.samples + args.fit)
    lessons = [(lesson_of(model, row, args.context_tokens), row) for row in rows]
    lessons = [(lesson, row) for lesson, row in lessons if len(lesson.runs) > 1]
    fit, asked = lessons[args.samples :], lessons[: args.samples]
    with progress("fitting", args.json) as update:
        bases = fit_bases(model, [lesson for lesson, _ in fit], update)
    records: dict[str, list[Record]] = {}
    with progress("measuring", args.json) as update:
        for number, (lesson, row) in enumerate(asked):
            update(number, len(asked))
            for name, record in measure(model, lesson, row, bases, args.ratio, args.max_tokens):
                records.setdefault(name, []).append(record)
    table = summarise(records, [row.context or repr(row.passages) for _, row in asked], args.seed)
    result = {"command": " ".join(sys.argv), "model": model.name, "samples": len(asked), "rows": table}
    print(json.dumps(result) if args.json else "\n".join(_lines(result)))
    return 0


def _rows(args: argparse.Namespace, model: Model, count: int) -> list[QuestionRow]:
    if args.data is not None:
        rows = file_rows(args.data, 1 << 30)
        random.Random(args.seed).shuffle(rows)
        return rows[:count]
    if args.docs is None:
        return list(world_rows(count, args.seed))
    split = documents.splitter(lambda text: len(model.tokenizer.encode(text)), args.chunk_tokens, 0)
    library = {str(path): tuple(split(documents.read(path).texts)) for path in documents.find([args.docs])[0]}
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
        text = "\n\n".join([*row.passages, f"Question: {row.question}"])
        ids = model.tokenizer.render(
            model.tokenizer.as_prompt(text if model.tokenizer.has_chat_template else f"{text}\n\nAnswer:")
        )
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


Bases = list[tuple[Tensor, Tensor]]
"""Per layer, orthonormal directions of the change of keys and of values, each (HD, HD), the largest first."""


def full_states(model: Model, ids: Sequence[int], where: Tensor) -> LayerStates:
    """Return full prefill's keys and values at (R,) positions, per layer, each (1, H, R, D)."""
    cache = model.new_cache(len(ids))
    model.forward(torch.tensor([list(ids)]), cache)
    return [
        (keys[:, :, where].clone(), values[:, :, where].clone())
        for keys, values in map(cache.layer, range(model.num_layers))
    ]


def changes(model: Model, written: LayerStates, full: LayerStates, where: Tensor) -> LayerStates:
    """Return how the position-free KV of full prefill differs from the written one, per layer, each (R, HD) float32."""
    tables = model.tables(where)
    deltas = []
    for number, (ours, theirs) in enumerate(zip(written, full, strict=True)):
        keys, values = (a.float() - b.float() for a, b in zip(theirs, ours, strict=True))
        deltas.append((_flat(model.unrotate(number, keys, tables[number])), _flat(values)))
    return deltas


def _flat(part: Tensor) -> Tensor:
    return part[0].transpose(0, 1).flatten(1)


def fit_bases(model: Model, lessons: Sequence[Lesson], update: Callable[[int, int], None]) -> Bases:
    """Return the principal directions of the changes in other prompts, without centring."""
    sums: list[list[Tensor]] = []
    with torch.inference_mode():
        for number, lesson in enumerate(lessons):
            update(number, len(lessons))
            written, where = write(model, None, lesson)
            ids = [*lesson.beginning, *lesson.ends[0]]
            delta = changes(model, written, full_states(model, ids, where), where)
            grams = [[part.T @ part for part in layer] for layer in delta]
            sums = (
                [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(sums, grams, strict=True)]
                if sums
                else grams
            )
    return [tuple(torch.linalg.eigh(gram)[1].flip(1) for gram in layer) for layer in sums]


def measure(
    model: Model, lesson: Lesson, row: QuestionRow, bases: Bases, ratio: float, count: int
) -> list[tuple[str, Record]]:
    """Return the record of every variant for one prompt."""
    with torch.inference_mode():
        (target,) = teach(model, lesson, count)
        text = model.tokenizer.decode([token for token in target.answer if token not in model.eos_ids]).split("\n")[0]
        text = first_word(text) if row.beginning else text
        is_right = bool(exact_match(text, row.answers))
        written, where = write(model, None, lesson)
        ids = torch.tensor([*lesson.beginning, *lesson.ends[0]])
        full = full_states(model, ids.tolist(), where)
        delta = changes(model, written, full, where)
        budget = round(ratio * len(where))
        context = Context(model, stitched(ids, lesson, written, where, model), BlendConfig(), budget)
        by_query = query.score(context)[where]
        moved = sum(part.square().sum(1) / part.square().sum().clamp_min(1e-12) for layer in delta for part in layer)
        assert isinstance(moved, Tensor)
        nothing = where[:0]
        variants: dict[str, tuple[LayerStates, Tensor]] = {"plain reuse": (written, nothing)}
        variants["keys of full prefill"] = [(f[0], w[1]) for f, w in zip(full, written, strict=True)], nothing
        variants["values of full prefill"] = [(w[0], f[1]) for f, w in zip(full, written, strict=True)], nothing
        variants["both"] = full, nothing
        for depth in DEPTHS:
            first = round(depth * model.num_layers)
            variants[f"both, layers from {depth:.2f}"] = [*written[:first], *full[first:]], nothing
            variants[f"both, layers below {depth:.2f}"] = [*full[:first], *written[first:]], nothing
        for rank in RANKS:
            variants[f"change of rank {rank}"] = _projected(model, written, delta, where, bases, rank), nothing
        for name, scores in {"query": by_query, "largest change": moved}.items():
            chosen = best(scores, budget)
            variants[f"{ratio:.0%} by {name}, recomputed"] = written, where[chosen]
            variants[f"{ratio:.0%} by {name}, transplanted"] = _transplanted(written, full, chosen), nothing
        groups = {f"spans of {length}": _spans(lesson, length) for length in SPANS}
        groups["whole chunks"] = _spans(lesson, 1 << 30)
        for name, spans in groups.items():
            variants[f"{ratio:.0%} in {name} by query, recomputed"] = (
                written,
                where[_best_spans(by_query, spans, budget)],
            )
        records = []
        for name, (states, selected) in variants.items():
            logits = answer_over(model, ids, target, states, where, selected)
            same = logits.argmax(-1).cpu() == torch.tensor(target.answer)
            kl = float(divergences(target.logits[:1].to(logits.device), logits[:1]))
            records.append((name, Record(kl, bool(same[0]), bool(same.all()), is_right)))
        return records


def _projected(
    model: Model, written: LayerStates, delta: LayerStates, where: Tensor, bases: Bases, rank: int
) -> LayerStates:
    """Return the written KV plus its change projected on the first directions."""
    tables, states = model.tables(where), []
    for number, (ours, change, basis) in enumerate(zip(written, delta, bases, strict=True)):
        parts = []
        for part, (moved, directions) in enumerate(zip(change, basis, strict=True)):
            kept = moved @ directions[:, :rank] @ directions[:, :rank].T  # (R, HD)
            kept = kept.view(len(where), ours[0].shape[1], -1).transpose(0, 1)[None].contiguous()  # (1, H, R, D)
            if part == 0:
                model.rotate(number, kept, tables[number], slice(0, len(where)))
            parts.append((ours[part].float() + kept).to(ours[part].dtype))
        states.append((parts[0], parts[1]))
    return states


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
    table = []
    for name, column in columns.items():
        share = bootstrap.of(lambda ours, base: ours / base, column["kl"], plain)
        kept = bootstrap.of(lambda both, right: both / right, column["same"] * column["is_right"], column["is_right"])
        table.append(
            {
                "variant": name,
                "kl": float(column["kl"].mean()),
                "share": [share["value"], share["low"], share["high"]],
                "first": float(column["first"].mean()),
                "kept": [kept["value"], kept["low"], kept["high"]],
                "right": int(column["is_right"].sum()),
            }
        )
    return table


def _lines(result: Mapping[str, object]) -> list[str]:
    rows = result["rows"]
    assert isinstance(rows, list)
    lines = [f"{result['model']}: {result['samples']} prompts, {rows[0]['right']} answered right by full prefill", ""]
    lines.append(f"{'':44}{'KL':>8}   {'of plain reuse':22}{'first':>7}   right answers kept")
    for row in rows:
        share = "{:.0%} ({:.0%} to {:.0%})".format(*row["share"])
        kept = "{:.1%} ({:.1%} to {:.1%})".format(*row["kept"]) if row["right"] else "-"
        lines.append(f"{row['variant']:44}{row['kl']:>8.4f}   {share:22}{row['first']:>7.1%}   {kept}")
    return lines
