"""`python -m benchmarks kept`: right and kept answers and the time to the first token, per setting of the engine.

Prompts are made of the chunks that a retriever finds for a question with known answers; `benchmarks.quality.arms`
measures. The defaults are the questions of the numbers that are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import kvrag
from benchmarks.quality.answers import share
from benchmarks.quality.arms import ARMS, FULL, INSTRUCTION, Measured, measure
from benchmarks.quality.grid import Journal
from benchmarks.quality.questions import (
    CORPUS,
    QUESTIONS,
    TUNING,
    chosen,
    has_answer,
    nq_rows,
    passage_rows,
    read_corpus,
    read_questions,
    retrieve,
    xquad_rows,
)
from benchmarks.quality.rows import QuestionRow, existing_path
from benchmarks.quality.worlds import WORLD, world_rows
from benchmarks.settings import busy_note, cpu, run_settings
from kvrag.backend.hub import check_model
from kvrag.backend.transformers import Model
from kvrag.cli.common import DTYPES, at_least, progress, require_extra, say
from kvrag.config import DEFAULT_CONTEXT, BlendConfig, check_option
from kvrag.control.plan import wilson
from kvrag.engine import BlendEngine
from kvrag.errors import KvragError, SettingError

_BOTH = ("right", "kept")
_MANY = 50  # answers after which the evidence of a model should be enough
_OF_QUESTIONS = ("questions", "docs", "k", "chunk_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    number: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
    parser.add_argument("--model", default="smollm2", help="model id, folder, reader or smollm2 (default)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--threads", **number, default=2, help="threads of torch (default: 2)")
    what = "JSON lines with q, a (accepted answers) and document (default: the 100 of this benchmark)"
    parser.add_argument("--questions", type=existing_path, default=QUESTIONS, metavar="FILE", help=what)
    parser.add_argument("--docs", type=existing_path, default=CORPUS, metavar="FOLDER", help="their documents")
    parser.add_argument("--k", **number, default=8, help="chunks to retrieve (default: 8)")
    parser.add_argument("--chunk-tokens", **number, default=128, help="maximum tokens per chunk (default: 128)")
    passages = "JSON lines with passages, question and answers, in place of --questions; each passage is a chunk"
    parser.add_argument("--musique", type=existing_path, metavar="FILE", help=passages)
    half = ", one half of its questions: 0 for choosing settings, 1 to report"
    parser.add_argument("--nq", type=existing_path, metavar="FILE", help="NQ-open's passages, --k per prompt" + half)
    parser.add_argument("--xquad", type=existing_path, metavar="FILE", help="XQuAD's articles" + half)
    parser.add_argument("--half", type=int, choices=(0, 1), default=1, help="default: 1")
    world = "questions about the reader's world, in place of --questions, see `benchmarks.quality.worlds`"
    parser.add_argument("--world", action="store_true", help=world)
    context = "tokens that chunks are encoded with; 0 = alone (default: 256)"
    parser.add_argument("--context-tokens", type=at_least(0), default=DEFAULT_CONTEXT, metavar="N", help=context)
    parser.add_argument("--instruction", default=INSTRUCTION, metavar="TEXT", help=f"default: {INSTRUCTION}")
    parser.add_argument("--tokens", **number, default=32, help="maximum length of an answer (default: 32)")
    parser.add_argument("--n", **number, help="number of questions (default: all; with --musique 50)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the choice and order of questions, and of arms")
    arms = f"settings besides full prefill (default: {' '.join(ARMS[1:])}); a number is a fixed ratio"
    parser.add_argument("--arms", type=_arm, nargs="+", default=ARMS, metavar="ARM", help=arms)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON lines of measured questions; run again to resume"
    )


def _arm(text: str) -> str:
    try:
        if text not in ARMS:
            check_option("ratio", float(text))
    except (ValueError, SettingError):
        raise argparse.ArgumentTypeError(f"must be {', '.join(ARMS)} or another ratio, got {text!r}") from None
    return text


def run(args: argparse.Namespace) -> int:
    """Measure and print the results; after an interrupt, those of the finished questions."""
    require_extra()
    if args.musique and any(getattr(args, name) != args.parser.get_default(name) for name in _OF_QUESTIONS):
        raise SettingError(f"--musique has its own chunks: leave out --{', --'.join(_OF_QUESTIONS)}".replace("_", "-"))
    check_model(args.model)
    torch.set_num_threads(args.threads)
    arms = tuple(dict.fromkeys((FULL, *args.arms)))
    model = Model.from_pretrained(args.model, dtype=args.dtype)
    if args.world:
        rows: Sequence[QuestionRow] = world_rows(args.n or 100, args.seed)
    elif args.musique:
        rows = chosen(passage_rows(args.musique), args.seed, args.n or 50)
    elif args.nq:
        rows = chosen(nq_rows(args.nq, args.half, args.k), args.seed, args.n or 50)
    elif args.xquad:
        rows = xquad_rows(args.xquad, args.half, args.seed, args.n or 50, args.k)
    else:
        corpus = read_corpus(args.docs, lambda text: len(model.tokenizer.encode(text)), args.chunk_tokens)
        rows = retrieve(chosen(read_questions(args.questions), args.seed, args.n), corpus, args.k)
    config = BlendConfig(context_tokens=args.context_tokens)
    sources = sorted(Path(kvrag.__file__).parent.rglob("*.py"))
    settings = {
        "fingerprint": model.fingerprint.digest,
        "device": str(model.device),
        "threads": args.threads,
        "tokens": args.tokens,
        "context_tokens": args.context_tokens,
        "arms": arms,
        "config": asdict(config),
        "instruction": args.instruction,
        "source": blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest(),
    }
    journal, load, busy = Journal(args.out, settings, Measured), os.getloadavg()[0], cpu()
    is_interrupted = False
    with TemporaryDirectory() as folder, BlendEngine(model, folder, config, conversation_bytes=0) as engine:
        try:
            _measure_rows(args, engine, rows, arms, journal)
        except KeyboardInterrupt:
            say(f"interrupted: {'run it again to resume' if args.out else 'use --out to be able to resume'}")
            is_interrupted = True
    done = [row for row in rows if row.key in journal.rows]
    if not done:
        raise KvragError("no question was finished")
    result = {
        "settings": {
            **settings,
            "seed": args.seed,
            "samples": len(done),
            "file": WORLD if args.world else str(args.musique or args.nq or args.xquad or args.questions),
        },
        "environment": {
            **run_settings(model),
            "kvrag": version("kvrag"),
            "command": f"python -m benchmarks {shlex.join(sys.argv[1:])}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": [round(load, 1), round(os.getloadavg()[0], 1)],
            "busy": busy_note(busy, cpu()),
        },
        "retrieved": sum(map(has_answer, done)),
        "prompt_tokens": median(journal.rows[row.key][0].prompt_tokens for row in done),
        "arms": summarise([journal.rows[row.key] for row in done]),
    }
    print(json.dumps(result) if args.json else "\n".join(_lines(result)))
    return 130 if is_interrupted else 0


def _measure_rows(
    args: argparse.Namespace,
    engine: BlendEngine,
    rows: Sequence[QuestionRow],
    arms: Sequence[str],
    journal: Journal[Measured],
) -> None:
    left = [row for row in rows if row.key not in journal.rows]
    if left:  # the first prompt of a process includes start-up costs
        warm_up = replace(left[0], question=f"{left[0].question} Why?")
        measure(engine, warm_up, arms, 2, random.Random(args.seed), args.instruction)
    with progress("measuring", args.json) as update:
        for number, row in enumerate(left, len(rows) - len(left)):
            update(number, len(rows))
            rng = random.Random(f"{args.seed} {row.key}")
            journal.add(row.key, measure(engine, row, arms, args.tokens, rng, args.instruction))
            for name in row.all_documents() if args.musique or args.world or args.nq else ():
                engine.forget(name)


def summarise(questions: Sequence[Sequence[Measured]]) -> list[dict[str, Any]]:
    """Return the numbers of each arm; the first answer to each question is full prefill's."""
    full = [answers[0] for answers in questions]
    cells = []
    for ours in zip(*questions, strict=True):
        pairs = list(zip(full, ours, strict=True))
        speed = [theirs.ttft_s / one.ttft_s for theirs, one in pairs]
        row_shares = [one.rows / one.prompt_tokens for one in ours]
        cells.append(
            {
                "arm": ours[0].arm,
                "right": _counted([one.is_right for theirs, one in pairs if theirs.is_right]),
                "kept": _counted([one.kept for one in ours]),
                "forced": _counted([one.forced for one in ours if one.forced is not None]),
                "near_ties": sum(one.margin is not None and one.kept for one in ours),
                "identical": sum(one.margin is None for one in ours),
                "speedup": sum(one.ttft_s for one in full) / sum(one.ttft_s for one in ours),
                "speedups": {"median": median(speed), "mean": mean(speed), "worst": min(speed)},
                "end": median(theirs.total_s / one.total_s for theirs, one in pairs),
                "later": {str(number): _at(pairs, number) for number in (5, 10)},
                "rows": {"median": median(row_shares), "mean": mean(row_shares)},
                "all_rows": mean(one.all_rows / one.prompt_tokens for one in ours),
                "rows_by": [
                    mean(one.all_rows / one.prompt_tokens for one in part)
                    for part in (ours[:_MANY], ours[_MANY:])
                    if part
                ],
                "deepened": sum(bool(one.deepened) for one in ours),
                "completed": sum(bool(one.completed) for one in ours),
                "paused_s": sum(one.completed["seconds"] for one in ours if one.completed and one.completed["token"]),
                "notes": sorted({note for one in ours for note in one.notes}),
            }
        )
    return cells


def _at(pairs: Sequence[tuple[Measured, Measured]], number: int) -> dict[str, float] | None:
    """Return how much sooner a token came than full prefill's, of the answers that have as many."""
    found = [
        theirs.times[number - 1] / one.times[number - 1]
        for theirs, one in pairs
        if min(len(theirs.times), len(one.times)) >= number
    ]
    return {"median": median(found), "mean": mean(found), "worst": min(found)} if found else None


def _counted(values: Sequence[bool]) -> dict[str, Any]:
    if not values:
        return {"count": 0, "total": 0}
    count, total = sum(values), len(values)
    low, high = wilson(count, total)
    return {"count": count, "total": total, "share": {"value": count / total, "low": low, "high": high}}


def _lines(result: dict[str, Any]) -> list[str]:
    environment, settings, cells = result["environment"], result["settings"], result["arms"]
    names = (
        "model",
        "dtype",
        "device",
        "threads",
        "torch",
        "transformers",
        "python",
        "kvrag",
        "processor",
        "date",
        "command",
    )
    count, right = settings["samples"], cells[0]["right"]["total"]
    lines = [
        ", ".join(f"{name} {environment[name]}" for name in names),
        f"load {environment['load'][0]} before, {environment['load'][1]} after. {environment['busy']}".rstrip(),
        f"{count} questions of {settings['file']}, seed {settings['seed']}; {result['retrieved']} prompts contain the "
        f"answer, and have {result['prompt_tokens']:.0f} tokens in the median; full prefill answers {right} right",
        "intervals of 95 %; times as ratios to full prefill's for the same prompt",
    ]
    if Path(settings["file"]).name == TUNING.name:
        lines.append("These questions are for choosing settings: report none of these numbers.")
    heads = f"{'ties':>5}{'same':>5}   {'TTFT median':>11}{'mean':>7}{'worst':>7}{'of sums':>9}{'end':>7}"
    lines += ["", f"{'':10}{'right stays':35}{'kept':35}{'forced':35}{heads}   rows median, mean, in all"]
    for cell in cells:
        shares = "".join(f"{_share(cell[name]):35}" for name in ("right", "kept", "forced"))
        speeds = "{median:>10.2f}x{mean:>6.2f}x{worst:>6.2f}x".format(**cell["speedups"])
        speeds += f"{cell['speedup']:>8.2f}x{cell['end']:>6.2f}x"
        rows = f"{cell['rows']['median']:.2f} {cell['rows']['mean']:.2f} {cell['all_rows']:.2f}"
        lines.append(f"{cell['arm']:10}{shares}{cell['near_ties']:>5}{cell['identical']:>5}   {speeds}   {rows}")
        for number, found in cell["later"].items():
            if found:
                spread = "median {median:.2f}x, mean {mean:.2f}x, worst {worst:.2f}x".format(**found)
                lines.append(f"{'':10}token {number}: {spread}")
        if cell["completed"] or cell["deepened"]:
            parts = ", ".join(f"{rows:.2f}" for rows in cell["rows_by"])
            lines.append(f"{'':10}deepened {cell['deepened']}; rows in all of the first {_MANY} and later: {parts}")
            paused = f"{cell['paused_s'] / count:.2f} s of pauses per answer"
            lines.append(f"{'':10}completed in {cell['completed']} of {count} answers, {paused} behind the first token")
        lines += [f"{'':10}{note}" for note in cell["notes"]]
    lines += ["", "By time to the first token, the shortest sum first:", ""]
    faster: list[dict[str, Any]] = []
    for cell in sorted(cells, key=lambda cell: -cell["speedup"]):
        better = [one["arm"] for one in faster if all(one[name]["count"] >= cell[name]["count"] for name in _BOTH)]
        note = f"no better than {', '.join(better)}" if better else ""
        shares = "".join(f"{_share(cell[name]):35}" for name in _BOTH)
        lines.append(f"{cell['arm']:10}{cell['speedup']:>5.2f}x   {shares}{note}".rstrip())
        faster.append(cell)
    return lines


def _share(counted: dict[str, Any]) -> str:
    return f"{counted['count']} of {counted['total']} {share(counted.get('share'))}" if counted["total"] else "-"
