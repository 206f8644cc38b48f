"""Answers behind an edit of the history: KV of an earlier prompt that is moved and blended (`history="blend"`).

A prompt with documents and another question is prefilled in full. The edited prompt has the same documents, which are
not in the store, and the row's question:

- removed: the earlier prompt had one more document, before the others (a trimmed tool result)
- system: the earlier prompt had a system message with the date
- order: two documents were swapped
- replaced: the document with the answer began with another passage, on which the KV of its rest depends
- turns: half of the documents follow in the second turn, and the answer of the first turn was shortened

All but `turns` end in the same prompt, which is in the format that the readers were trained on. For comparison, the
same documents come from the store, encoded alone. One question is asked about each context.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.quality import grid
from benchmarks.quality.answers import share
from benchmarks.quality.grid import FULL, NONE, Cell, Journal, Task
from benchmarks.quality.metrics import Bootstrap
from benchmarks.quality.results import interval
from benchmarks.quality.rows import QuestionRow, file_rows
from benchmarks.quality.worlds import world_of, world_rows
from benchmarks.settings import run_settings
from kvrag.backend.transformers import Model
from kvrag.cli.common import DTYPES, at_least, existing_path, progress, say
from kvrag.config import BlendConfig, Sampling
from kvrag.control.agreement import Record, compare, wilson
from kvrag.engine import BlendEngine
from kvrag.errors import KvragError, SettingError
from kvrag.reuse.request_state import RequestState
from kvrag.types import Messages

KINDS = ("removed", "system", "order", "replaced", "turns")
_STORED = "stored"  # namespace
_DATE = "Today is Monday, 23 November 2026."
_LONG = "I have read all of the documents above, one after the other. The answer to your question is: {}"


def _cells(history: str, *settings: tuple[str, float]) -> list[Cell]:
    label = "stored" if history == "exact" else "moved"
    return [
        Cell(f"{label}, {policy}", BlendConfig(policy=policy, ratio=ratio, controller="off", history=history))
        for policy, ratio in settings
    ]


MOVED = _cells("blend", (NONE, 0.0), ("query", 0.15), ("query", 0.3), ("first_k", 0.15))
STORED = _cells("exact", (NONE, 0.0), ("query", 0.15))
CELLS = [Cell(FULL, BlendConfig(policy=FULL, ratio=0.0, controller="off")), *MOVED, *STORED]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", default="reader", help="model id, folder, smollm2 or reader (default)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: as stored")
    parser.add_argument(
        "--data", type=existing_path, metavar="FILE", help="questions, as for `python -m benchmarks answers`"
    )
    parser.add_argument("--samples", type=at_least(1), default=100, metavar="N", help="contexts (default: 100)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of edit (default: all)")
    parser.add_argument("--max-tokens", type=at_least(1), default=16, metavar="N", help="of an answer (default: 16)")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="store finished rows; a second run resumes")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results; after an interrupt, those of the finished rows."""
    world = world_of(args.model)
    rows = file_rows(args.data, 1 << 30) if args.data else world_rows(args.samples + 1, args.seed, world)
    contexts = by_context(rows)
    if len(contexts) < 2:
        raise KvragError("edits need questions about at least two contexts")
    model = Model.from_pretrained(args.model, dtype=args.dtype)
    if not model.tokenizer.has_chat_template:
        raise SettingError(f"{args.model} has no chat template: edits are edits of messages")
    asked = [group[number % len(group)] for number, group in enumerate(contexts)][: args.samples]
    settings = {"fingerprint": model.fingerprint.digest, "tokens": args.max_tokens}
    settings |= {"cells": [asdict(cell) for cell in CELLS], "kvrag": version("kvrag")}
    journals = {kind: Journal(args.out and args.out / f"{kind}.jsonl", settings, Record) for kind in args.kinds}
    sampling = Sampling(args.max_tokens, temperature=0, stop=("\n\n",) if args.model == "reader" else ())
    config = BlendConfig(context_tokens=0)
    with TemporaryDirectory() as folder, BlendEngine(model, folder, config, conversation_bytes=1 << 28) as engine:
        try:
            with progress("measuring", args.json) as update:
                for number, row in enumerate(asked):
                    update(number, len(asked))
                    if any(row.key not in journal.rows for journal in journals.values()):
                        group, following = contexts[number], contexts[(number + 1) % len(contexts)]
                        other = group[(group.index(row) + 1) % len(group)] if len(group) > 1 else following[0]
                        prompts = {kind: edit(kind, row, other, following[0].passages[0]) for kind in args.kinds}
                        for kind, records in measure(engine, row, prompts, sampling).items():
                            journals[kind].add(row.key, records)
        except KeyboardInterrupt:
            say("interrupted: results of the finished rows follow")
    tasks = [Task(row, []) for row in asked if all(row.key in journal.rows for journal in journals.values())]
    if not tasks:
        raise KvragError("no row was finished")
    result = {
        "environment": {**run_settings(model), "command": " ".join(sys.argv)},
        "samples": len(tasks),
        "kinds": {kind: summarise(tasks, journal, args.seed) for kind, journal in journals.items()},
    }
    print(json.dumps(result) if args.json else "\n".join(_lines(result)))
    return 0


def by_context(rows: Sequence[QuestionRow]) -> list[list[QuestionRow]]:
    """Group the rows by their passages."""
    groups: dict[tuple[str, ...], list[QuestionRow]] = {}
    for row in rows:
        groups.setdefault(row.passages, []).append(row)
    return list(groups.values())


# --------------------------------------------------------------------------------------------------- the prompts


def edit(kind: str, row: QuestionRow, other: QuestionRow, passage: str) -> tuple[Messages, Messages]:
    """Return an earlier prompt, with another question, and the edited one.

    Args:
        passage: Of another context.
    """
    passages, edited = list(row.passages), [_user(row.passages, row)]
    if kind == "turns":
        half = len(passages) // 2
        first, last = _user(passages[:half], other), passages[half:]
        answer = other.answers[0]
        return (
            [first, _assistant(_LONG.format(answer)), _user(last, other)],
            [first, _assistant(answer), _user(last, row)],
        )
    if kind == "system":
        return [{"role": "system", "content": _DATE}, _user(passages, other)], edited
    if kind == "removed":
        return [_user([passage, *passages], other)], edited
    if kind == "replaced":
        passages[_beginning(row)] = passage
        return [_user(passages, other)], edited
    one, two = random.Random(row.key).sample(range(len(passages)), 2) if len(passages) > 1 else (0, 0)
    passages[one], passages[two] = passages[two], passages[one]
    return [_user(passages, other)], edited


def _beginning(row: QuestionRow) -> int:
    """Return the number of the first passage of the document that states the answer first."""
    stating = next((number for number, text in enumerate(row.passages) if row.answers[0] in text), 0)
    return row.documents.index(row.documents[stating]) if row.documents else stating


def _user(passages: Sequence[str], row: QuestionRow) -> dict[str, Any]:
    return {"role": "user", "content": "\n\n".join([*passages, f"Question: {row.question}"])}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# ------------------------------------------------------------------------------------------------- the measurement


def measure(
    engine: BlendEngine, row: QuestionRow, prompts: dict[str, tuple[Messages, Messages]], sampling: Sampling
) -> dict[str, list[Record]]:
    """Return a record for each of `CELLS` by kind of edit; kinds with the same edited prompt share the references."""
    engine.warm(row.passages, document=row.key, namespace=_STORED)
    kinds_of: dict[tuple[int, ...], list[str]] = {}
    for kind, (earlier, edited) in prompts.items():
        engine.generate(earlier, namespace=_namespace(row, kind), max_new_tokens=1, temperature=0)
        kinds_of.setdefault(tuple(engine.tokenize(edited)), []).append(kind)
    measured: dict[str, list[Record]] = {}
    for ids, kinds in kinds_of.items():
        configs = [cell.config for cell in [*STORED, *MOVED * len(kinds)]]
        moved = [_namespace(row, kind) for kind in kinds for _ in MOVED]
        namespaces = iter([_STORED] * (1 + len(STORED)) + moved)  # full prefill comes first

        def prefill(ids: list[int], config: BlendConfig, namespaces: Any = namespaces) -> RequestState:
            return engine.prefill(ids, config, namespace=next(namespaces), goes_on=config.history == "blend")

        full, *records = compare(engine.model, prefill, list(ids), configs, sampling, own_answers=True)
        stored, records = records[: len(STORED)], records[len(STORED) :]
        for number, kind in enumerate(kinds):
            measured[kind] = [full, *records[number * len(MOVED) :][: len(MOVED)], *stored]
    engine.forget(row.key, namespace=_STORED)
    return measured


def _namespace(row: QuestionRow, kind: str) -> str:
    return f"{kind} {row.key}"  # so that a prompt finds the KV of one earlier prompt only


# ----------------------------------------------------------------------------------------------------- the results


def summarise(tasks: Sequence[Task], journal: Journal[Record], seed: int) -> list[dict[str, Any]]:
    """Return the results of a kind of edit, per cell.

    `kl_share` is the KL as a share of that of plain reuse of stored chunks; `moved` counts stored KV, too.
    """
    tables = grid.tables(tasks, CELLS, journal)
    contexts = grid.contexts(tasks)
    bootstrap = Bootstrap(contexts, seed)
    right, plain = tables[0]["em"] == 1, tables[1 + len(MOVED)]["kl"]
    cells = grid.summarise(CELLS, tables, contexts)
    for at, (cell, table) in enumerate(zip(cells, tables, strict=True)):
        records = [journal.rows[task.row.key][at] for task in tasks]
        cell["moved"] = float(np.mean([record.inexact_tokens / record.prompt_tokens for record in records]))
        cell["kl_share"] = bootstrap.of(lambda ours, theirs: ours / theirs, table["kl"], plain)
        if right.any():
            kept, count = int(table["em"][right].sum()), int(right.sum())
            low, high = wilson(kept, count)
            cell["right_kept"] = {"value": kept / count, "low": low, "high": high}
            cell["right"] = [kept, count]
    return cells


def _lines(result: dict[str, Any]) -> list[str]:
    environment = result["environment"]
    lines = [", ".join(f"{name} {environment[name]}" for name in ("model", "dtype", "device", "threads", "torch"))]
    lines.append(f"{result['samples']} contexts; 95 % intervals over them; KL of the first token, in nats; median TTFT")
    for kind, cells in result["kinds"].items():
        heads = f"{'EM':24}{'right answers kept':34}{'KL':>8}  {'of stored plain reuse':24}{'TTFT':>9}"
        lines += ["", kind, "", f"{'':16}{'ratio':>6}{'moved':>7}{'recomp.':>9}  {heads}"]
        for cell in cells:
            counts = "{} of {}".format(*cell["right"]) if "right" in cell else ""
            kept = f"{counts:10} {share(cell.get('right_kept'))}"
            ratio = "" if cell["ratio"] is None else format(cell["ratio"], "g")
            lines.append(
                f"{cell['policy']:16}{ratio:>6}{cell['moved']:>7.0%}{cell['recomputed']:>9.3f}  {share(cell['em']):24}"
                f"{kept:34}{cell['kl']:>8.4f}  "
                f"{interval(cell['kl_share'], '.0%'):24}{cell['ttft_s'] * 1000:>6.0f} ms"
            )
    return lines
