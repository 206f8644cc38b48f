"""`python -m benchmarks answers`: how many of full prefill's answers are kept, per policy and ratio."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.quality.rows import QuestionRow, document_rows, existing_path, file_rows
from kvrag.backend.hub import check_model
from kvrag.cli.common import (
    add_model_arguments,
    add_number,
    at_least,
    checked,
    progress,
    require_extra,
    say,
)
from kvrag.config import (
    CODECS,
    DEFAULT_CONTEXT,
    DEFAULT_POLICY,
    POLICIES,
    BlendConfig,
    Sampling,
    check_option,
)
from kvrag.control.prompts import make_prompts
from kvrag.errors import KvragError, SettingError
from kvrag.retrieval import documents
from kvrag.retrieval.index import ChunkIndex

if TYPE_CHECKING:
    from benchmarks.quality.compare import Record
    from benchmarks.quality.grid import Cell, Journal, Task
    from kvrag.backend.transformers import Model

T = TypeVar("T")

_REFERENCES = {"full", "none"}
_DEFAULTS: dict[str, Any] = {
    "samples": 200,
    "policies": [[policy for policy in POLICIES if policy not in {*_REFERENCES, "random"}]],
    "max_tokens": 16,
}
_DEFAULTS_DOCS: dict[str, Any] = {
    "samples": 100,
    "policies": [[DEFAULT_POLICY]],
    "chunk_tokens": 256,
    "max_tokens": 32,
    "top_k": 4,
}
_NOT_DOCS = ("data", "instruction", "skip_long")
_MAX_DOCS_TOKENS = 32768  # encoded from --docs: minutes of encoding and gigabytes of disk for a model of 7B
_DOCS_STOP = ("\n", ". ")  # the question is the rest of one sentence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, which `python -m benchmarks quality` has as well."""
    add_model_arguments(parser)
    data = "JSON lines with passages, question, answers"
    parser.add_argument("--data", type=existing_path, metavar="FILE", help=data)
    docs = "documents to make prompts from, without questions: sentences that break off, for the model to complete"
    parser.add_argument("--docs", type=existing_path, metavar="FOLDER", help=docs)
    parser.add_argument(
        "--samples", type=at_least(1), metavar="N", help="number of questions (default: 200; with --docs 100)"
    )
    seeds = "seeds of the prompts that are made, which are pooled"
    parser.add_argument("--seed", type=at_least(0), nargs="+", default=[0], help=seeds)
    parser.add_argument(
        "--policies",
        nargs="+",
        type=comma_separated(checked(str, partial(check_option, "policy"))),
        metavar="POLICY",
        help=f"policies to compare with full prefill and plain reuse (default: all; with --docs {DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=comma_separated(checked(float, partial(check_option, "ratio"))),
        default=[[0.05, 0.15, 0.3]],
        metavar="R",
        help="0 to 1 (default: 0.05 0.15 0.3)",
    )
    parser.add_argument("--codec", choices=CODECS, default="native", help="codec of stored chunks (default: native)")
    parser.add_argument(
        "--context-tokens",
        type=at_least(0),
        metavar="N",
        help="encode passages with N tokens of their document as context; 0 = alone (default: as `kvrag warm` if rows "
        "name documents, else 0)",
    )
    parser.add_argument(
        "--chunk-tokens", type=at_least(16), metavar="N", help="with --docs: maximum tokens per chunk (default: 256)"
    )
    parser.add_argument(
        "--top-k", type=at_least(1), metavar="K", help="with --docs: chunks to retrieve for a prompt (default: 4)"
    )
    parser.add_argument(
        "--max-tokens", type=at_least(1), metavar="N", help="maximum length of an answer (default: 16; with --docs 32)"
    )
    parser.add_argument(
        "--stop",
        nargs="+",
        metavar="TEXT",
        help=r"strings that end an answer; \n = line break (default: \n\n for the reader; with --docs the end of the "
        "sentence or line)",
    )
    parser.add_argument("--instruction", default="", metavar="TEXT", help="text between passages and question")
    parser.add_argument("--skip-long", action="store_true", help="skip rows that do not fit into the window")
    add_number(parser, "--ram-bytes", 2 << 30, "size of the RAM tier; 0 = read from disk")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="store rows.jsonl and results.json there; run again to resume"
    )


def comma_separated(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a type for argparse: values of a type, separated by commas."""

    def parse(text: str) -> list[T]:
        values = [kind(word) for word in text.split(",") if word]
        if not values:
            raise argparse.ArgumentTypeError("pass at least one")
        return values

    parse.__name__ = getattr(kind, "__name__", "")
    return parse


def run(args: argparse.Namespace) -> int:
    """Measure, print and store the results."""
    fill(args)
    rows, data = read_rows(args)
    config = chunk_config(rows, args.context_tokens)
    started = time.perf_counter()
    model = load_model(args)
    from benchmarks.quality import grid

    cells = grid.make_cells({name: BlendConfig(policy=name) for name in args.policies}, args.ratios)
    evaluation = evaluate(args, model, rows, data, cells, config, args.codec)
    tables = grid.tables(evaluation.tasks, cells, evaluation.journal)
    summaries = grid.summarise(cells, tables, grid.contexts(evaluation.tasks))
    return report(args, evaluation, summaries, started, table)


def fill(args: argparse.Namespace) -> None:
    """Fill in the defaults, and reject options that --docs or --data does not have."""
    if args.docs is not None:
        for name in _NOT_DOCS:
            if getattr(args, name) != args.parser.get_default(name):
                raise SettingError(f"--{name.replace('_', '-')} and --docs exclude each other: leave out one of them")
        require_extra()
        documents.find([args.docs])  # report mistakes before loading the model
        if args.top_k == 1:
            raise SettingError("--top-k with --docs must be at least 2: blending needs several chunks")
    for name, value in (_DEFAULTS if args.docs is None else _DEFAULTS_DOCS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("policies", "ratios"):
        setattr(args, name, [value for values in getattr(args, name) for value in values])
    if args.docs is not None and not set(args.policies) - _REFERENCES:
        raise SettingError("--policies with --docs needs one that recomputes tokens")


def read_rows(args: argparse.Namespace) -> tuple[list[QuestionRow], dict[str, Any]]:
    """Return the rows of --data, and a description of their source that does not depend on their number.

    Raises:
        SettingError: Neither --data nor --docs, or an option of the other one.
    """
    if args.docs is not None:
        return [], {}  # made from the documents once the model is loaded
    if args.data is None:
        raise SettingError("no questions: pass --docs FOLDER, or --data FILE with questions")
    for name in ("top_k", "chunk_tokens"):
        if getattr(args, name) is not None:
            raise SettingError(f"--data has its own passages: leave out --{name.replace('_', '-')}")
    digest = blake2b(args.data.read_bytes(), digest_size=8).hexdigest()
    return file_rows(args.data, args.samples), {"file": args.data.name, "digest": digest}


def chunk_config(rows: Sequence[QuestionRow], context_tokens: int | None) -> BlendConfig:
    """Return the settings that chunks are encoded with.

    Args:
        context_tokens: None = as `kvrag warm`, if all rows name documents.
    """
    has_documents = all(row.documents for row in rows)
    if context_tokens is None:
        context_tokens = DEFAULT_CONTEXT if has_documents else 0
    if context_tokens and not has_documents:
        raise SettingError("--context-tokens needs rows with `documents`")
    return BlendConfig(context_tokens=context_tokens)


def load_model(args: argparse.Namespace) -> Model:
    """Load the model that the options name."""
    check_model(args.model)
    from kvrag.backend.transformers import Model  # slow to import: mistakes are reported before

    model = Model.from_pretrained(args.model, dtype=args.dtype, device=args.device)
    if not args.json and not model.tokenizer.has_chat_template:
        say("the model has no chat template: prompts are plain text")
    return model


@dataclass(frozen=True)
class Evaluation:
    """Measured tasks, their records per cell, and the settings that they depend on."""

    model: Model
    tasks: Sequence[Task]
    journal: Journal[Record]
    settings: dict[str, Any]
    is_interrupted: bool


def evaluate(
    args: argparse.Namespace,
    model: Model,
    rows: Sequence[QuestionRow],
    data: dict[str, Any],
    cells: Sequence[Cell],
    config: BlendConfig,
    codec: str,
) -> Evaluation:
    """Measure these rows, or prompts made from --docs.

    Args:
        data: Description of the rows' source that does not depend on their number.
        config, codec: How chunks are encoded and stored.
    """
    from benchmarks.quality import grid
    from benchmarks.quality.compare import Record
    from kvrag.engine import BlendEngine

    corpus: dict[str, list[str]] = {}
    if args.docs is not None:
        corpus, data = _read_documents(args, model)
        rows = _document_rows(args, model, corpus)
    sampling = Sampling(args.max_tokens, temperature=0, stop=_stop(args))
    if not args.json:
        say(f"{len(rows)} rows, {len(cells)} cells")
    tasks, skipped = grid.make_tasks(model, rows, args.max_tokens, args.instruction, args.skip_long)
    settings = {  # all that affects a record, besides the row
        "model": model.name,
        "fingerprint": model.fingerprint.digest,
        "device": str(model.device),
        "codec": codec,
        "chunks": asdict(config),
        "data": data,
        "sampling": asdict(sampling),
        "instruction": args.instruction,
        "ram_bytes": args.ram_bytes,
        "cells": [asdict(cell) for cell in cells],
        "kvrag": version("kvrag"),
    }
    journal = grid.Journal(args.out and args.out / "rows.jsonl", settings, Record)
    is_interrupted = False
    try:
        if any(task.row.key not in journal.rows for task in tasks):
            with (
                TemporaryDirectory(prefix="kvrag-quality-", ignore_cleanup_errors=True) as folder,
                BlendEngine(model, folder, config, ram_bytes=args.ram_bytes, codec=codec) as engine,
            ):
                with progress("encoding", args.json) as update:
                    for done, (name, chunks) in enumerate(corpus.items()):
                        update(done, len(corpus))
                        engine.warm(chunks, document=name)
                with progress("answering", args.json) as update:
                    grid.answer(engine, tasks, cells, sampling, journal, update)
    except KeyboardInterrupt:
        hint = "run it again to resume" if args.out else "use --out to be able to resume"
        num_tasks, tasks = len(tasks), [task for task in tasks if task.row.key in journal.rows]
        if not tasks:
            raise KeyboardInterrupt(f"interrupted: {hint}") from None
        say(f"interrupted after {len(tasks)} of {num_tasks} prompts, which follow: {hint}")
        is_interrupted = True
    settings |= {
        "samples": len(tasks),
        "contexts": int(grid.contexts(tasks).max()) + 1,
        "skipped": skipped,
        "seed": args.seed,
    }
    return Evaluation(model, tasks, journal, settings, is_interrupted)


def _stop(args: argparse.Namespace) -> tuple[str, ...]:
    if args.stop:
        return tuple(text.replace("\\n", "\n") for text in args.stop)
    if args.docs is not None:
        return _DOCS_STOP
    return ("\n\n",) if args.model == "reader" else ()


def _read_documents(args: argparse.Namespace, model: Model) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return chunks by document, from random files of the folder up to a number of tokens, and a description."""
    encode = model.tokenizer.encode
    split = documents.splitter(lambda text: len(encode(text)), args.chunk_tokens, 0)
    paths, problems = documents.find([args.docs])
    random.Random(args.seed[0]).shuffle(paths)
    corpus: dict[str, list[str]] = {}
    num_tokens = 0
    with progress("reading", args.json) as update:
        for path in paths:
            content = documents.read(path)
            problems += content.problems
            for chunk in split(content.texts):
                if num_tokens < _MAX_DOCS_TOKENS:
                    corpus.setdefault(str(path), []).append(chunk)
                    num_tokens += len(encode(chunk))
            update(min(num_tokens, _MAX_DOCS_TOKENS), _MAX_DOCS_TOKENS)
            if num_tokens >= _MAX_DOCS_TOKENS:
                break
    for problem in problems:
        say(str(problem))
    digest = blake2b(json.dumps(sorted(corpus.values())).encode(), digest_size=8).hexdigest()
    name = f"{args.docs.resolve().name} ({sum(map(len, corpus.values()))} chunks, {num_tokens} tokens)"
    return corpus, {"file": name, "digest": digest, "seed": args.seed}


def _document_rows(args: argparse.Namespace, model: Model, corpus: dict[str, list[str]]) -> list[QuestionRow]:
    """Make prompts about the corpus, of what retrieval finds."""
    chunks = list(dict.fromkeys(chunk for texts in corpus.values() for chunk in texts))
    if len(chunks) < 2:
        found = "is only one" if chunks else "are none"
        hint = "give more documents, or shorter chunks"
        raise KvragError(f"blending needs prompts of several chunks, and there {found}: {hint}")
    with TemporaryDirectory() as folder, ChunkIndex(f"{folder}/index.sqlite") as index:
        with progress("indexing", args.json) as update:
            index.add(chunks, progress=update)

        def search(query: str, k: int) -> list[str]:
            return [hit.text for hit in index.search(query, k)]

        made = [
            gap
            for seed in dict.fromkeys(args.seed)
            for gap in make_prompts(model, chunks, search, args.samples, args.top_k, seed, args.max_tokens)
        ]
        return document_rows(list({(gap.kind, gap.beginning): gap for gap in made}.values()))


# ------------------------------------------------------------------------------------------------------ output


def report(
    args: argparse.Namespace,
    evaluation: Evaluation,
    cells: list[dict[str, Any]],
    started: float,
    lines: Callable[[dict[str, Any]], list[str]],
) -> int:
    """Store the result in --out and print it; return the exit code.

    Args:
        started: Time of `time.perf_counter` when the command started.
        lines: Formats a result.
    """
    from benchmarks.settings import run_settings

    result: dict[str, Any] = {
        "settings": evaluation.settings,
        "environment": {
            **run_settings(evaluation.model),
            "kvrag": version("kvrag"),
            "command": f"python -m benchmarks {shlex.join(sys.argv[1:])}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": time.perf_counter() - started,
        },
        "cells": cells,
    }
    if args.docs is not None:
        result["verdict"] = verdict(cells)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if args.json else "\n".join(lines(result)))
    return 130 if evaluation.is_interrupted else 0


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the report; the last one on prompts made from documents is the verdict."""
    lines = [*heading(result), "", *cell_lines(result["cells"])]
    return [*lines, "", result["verdict"]] if "verdict" in result else lines


def heading(result: dict[str, Any]) -> list[str]:
    """Return the lines about the machine and the source of the prompts."""
    environment, settings = result["environment"], result["settings"]
    names = ("model", "dtype", "device", "threads", "torch", "kvrag")
    skipped = f", {settings['skipped']} skipped" if settings["skipped"] else ""
    shared = f" over contexts ({settings['contexts']})" if settings["contexts"] < settings["samples"] else ""
    return [
        ", ".join(f"{name} {environment[name]}" for name in names),
        f"{settings['samples']} rows of {settings['data']['file']}{skipped}; 95 % intervals{shared}; "
        "KL in nats to full prefill's first token; TTFT: median, "
        + ("KV in RAM" if settings["ram_bytes"] else "KV from disk"),
    ]


def cell_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table: right answers, then what is kept of full prefill's."""
    heads = f"{'EM':24}{'answers kept':24}{'identical':24}{'KL':>8}{'TTFT':>9}  speed-up"
    lines = [f"{cells[1]['reused']:.0%} of the prompt reused", "", f"{'':26}{'ratio':>6}{'recomp.':>8}  {heads}"]
    for cell in cells:
        shares = "".join(f"{share(cell.get(name)):24}" for name in ("em", "kept", "same"))
        lines.append(
            f"{cell['policy']:26}{ratio(cell)}{cell['recomputed']:>8.3f}  {shares}{cell['kl']:>8.4f}"
            f"{cell['ttft_s'] * 1000:>6.0f} ms  {cell['speedup']:.2f}x"
        )
    return lines


def verdict(cells: Sequence[dict[str, Any]]) -> str:
    """Return whether blending with the first policy keeps full prefill's answers, and at which ratio, in one sentence.

    As in a calibration, changes of near ties do not count.
    """
    from benchmarks.quality.compare import choose
    from kvrag.control.plan import TARGET

    _, _, first, *_ = cells
    curve = {cell["ratio"]: cell for cell in cells if cell["policy"] == first["policy"]}
    ratios = sorted(curve)
    chosen = choose(ratios, [curve[ratio]["kept"]["value"] for ratio in ratios], TARGET)
    cell = curve[ratios[-1] if chosen is None else chosen]
    shares = f"there, {share(cell['kept'])} are kept, and {cell['same']['value']:.1%} are identical"
    if chosen is None:
        return f"No: blending keeps less than {TARGET:.0%} of your answers up to ratio {cell['ratio']:g}; {shares}."
    return f"Yes: blending keeps your answers from ratio {chosen:g} on; {shares}."


def ratio(cell: dict[str, Any]) -> str:
    """Return the column with the cell's ratio."""
    return f"{'' if cell['ratio'] is None else format(cell['ratio'], 'g'):>6}"


def share(bounds: dict[str, float] | None) -> str:
    """Return a share with its interval; "-" if there is none."""
    return "{value:.1%} [{low:.1%}, {high:.1%}]".format(**bounds) if bounds else "-"
