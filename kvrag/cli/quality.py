"""`kvrag bench quality`: measure how many of full prefill's answers are kept, per policy and ratio."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.bench.datasets import QuestionRow, document_rows, file_rows
from kvrag.bench.grid import FULL, NONE, RIGHT, Cell, Setup, by_setup, make_cells
from kvrag.cli.common import context_settings, progress, require_extra, say
from kvrag.cli.prompt import text_search
from kvrag.config import DEFAULT_CONTEXT, DEFAULT_POLICY, POLICIES, BlendConfig, Sampling
from kvrag.control.prompts import CLOZE, make_prompts
from kvrag.errors import SettingError
from kvrag.retrieval import documents
from kvrag.retrieval.index import ChunkIndex

if TYPE_CHECKING:
    from kvrag.backend.transformers import Model
    from kvrag.bench.quality import Journal, Task

_SELECTING = [policy for policy in POLICIES if policy not in (FULL, NONE, "random")]
_DEFAULTS: dict[str, Any] = {"samples": 200, "policies": [_SELECTING], "max_tokens": 16}
_DEFAULTS_DOCS: dict[str, Any] = {
    "samples": 100,
    "policies": [[DEFAULT_POLICY]],
    "chunk_tokens": 256,
    "max_tokens": 8,
    "top_k": 4,
}
_NOT_DOCS = ("data", "instruction", "skip_long")
_MAX_DOCS_TOKENS = 32768  # encoded from --docs: minutes of encoding and gigabytes of disk for a model of 7B
_DOCS_STOP = ("\n", ". ")  # the question is the rest of one sentence
_MIN_KEPT = 0.95  # share of full prefill's answers that must be kept
_MIN_RIGHT = 0.3  # share of the sentences that a model must complete as the documents do, for a verdict


def run(args: argparse.Namespace) -> int:
    """Measure, print and store the results."""
    fill(args)
    rows, data = read_rows(args)
    setups = make_setups(args, rows, [args.codec])
    cells = make_cells({name: BlendConfig(policy=name) for name in args.policies}, args.ratios, setups)
    started = time.perf_counter()
    model = load_model(args)
    evaluation = evaluate(args, model, rows, data, cells, args.out)
    return report(args, evaluation, summarise(evaluation, args.seed), started)


def summarise(evaluation: Evaluation, seed: int) -> list[dict[str, Any]]:
    """Return the metrics of every cell with intervals."""
    from kvrag.bench import quality

    tasks = evaluation.tasks
    tables = quality.tables(tasks, evaluation.cells, evaluation.journal)
    return quality.summarise(tables, quality.groups(tasks, tables[evaluation.cells[0]]), quality.contexts(tasks), seed)


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
    if args.docs is not None and not set(args.policies) - {FULL, NONE}:
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


def make_setups(args: argparse.Namespace, rows: Sequence[QuestionRow], codecs: Sequence[str]) -> list[Setup]:
    """Return how chunks are stored: every codec with every context in --context-tokens."""
    has_documents = all(row.documents for row in rows)
    texts = [text for values in args.context_tokens or () for text in values]
    contexts = [context_settings(text) for text in texts or [str(DEFAULT_CONTEXT if has_documents else 0)]]
    if any(context["context_tokens"] for context in contexts) and not has_documents:
        raise SettingError("--context-tokens needs rows with `documents`")
    if "headings" in texts and not all(row.library for row in rows):
        raise SettingError("--context-tokens headings needs documents with titles: --docs, or rows with `library`")
    return [Setup(codec, **context) for codec in codecs for context in contexts]


def load_model(args: argparse.Namespace) -> Model:
    """Load the model that the options name."""
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
    cells: Sequence[Cell]
    journal: Journal
    settings: dict[str, Any]
    is_interrupted: bool


def evaluate(
    args: argparse.Namespace,
    model: Model,
    rows: Sequence[QuestionRow],
    data: dict[str, Any],
    cells: Sequence[Cell],
    folder: Path | None,
) -> Evaluation:
    """Measure these rows, or prompts made from --docs.

    Args:
        data: Description of the rows' source that does not depend on their number.
        folder: Records are kept there.
    """
    from kvrag.bench import quality

    corpus: dict[str, list[str]] = {}
    if args.docs is not None:
        corpus, data = _read_documents(args, model)
        rows = _document_rows(args, model, corpus)
    sampling = Sampling(args.max_tokens, temperature=0, stop=_stop(args))
    if not args.json:
        say(f"{len(rows)} rows, {len(cells)} cells")
    tasks, skipped = quality.make_tasks(model, rows, args.max_tokens, args.instruction, args.skip_long)
    settings = quality.identity(model, cells, sampling, args.instruction, data, args.ram_bytes)
    journal = quality.Journal(folder, settings)
    is_interrupted = False
    try:
        if len(journal.finished(tasks, cells)) < len(tasks):
            with quality.open_engines(model, cells, args.ram_bytes) as engines:
                if corpus:
                    with progress("encoding", args.json) as update:
                        quality.encode(engines, corpus, update)
                with progress("answering", args.json) as update:
                    quality.answer(engines, tasks, cells, sampling, journal, update)
    except KeyboardInterrupt:
        hint = "run it again to resume" if args.out else "use --out to be able to resume"
        num_tasks, tasks = len(tasks), journal.finished(tasks, cells)
        if not tasks:
            raise KeyboardInterrupt(f"interrupted: {hint}") from None
        say(f"interrupted after {len(tasks)} of {num_tasks} prompts, which follow: {hint}")
        is_interrupted = True
    finally:
        journal.close()
    settings |= {
        "samples": len(tasks),
        "contexts": int(quality.contexts(tasks).max()) + 1,
        "skipped": skipped,
        "seed": args.seed,
    }
    return Evaluation(model, tasks, cells, journal, settings, is_interrupted)


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
    random.Random(args.seed).shuffle(paths)
    corpus: dict[str, list[str]] = {}
    num_tokens = num_read = 0
    with progress("reading", args.json) as update:
        for path in paths:
            if num_tokens >= _MAX_DOCS_TOKENS:
                break
            num_read += 1
            content = documents.read(path)
            problems += content.problems
            for chunk in split(content.texts):
                if num_tokens < _MAX_DOCS_TOKENS:
                    corpus.setdefault(str(path), []).append(chunk)
                    num_tokens += len(encode(chunk))
            update(min(num_tokens, _MAX_DOCS_TOKENS), _MAX_DOCS_TOKENS)
    for problem in problems:
        say(str(problem))
    description = {
        "folder": args.docs.resolve().name,
        "digest": blake2b(json.dumps(sorted(corpus.values())).encode(), digest_size=8).hexdigest(),
        "seed": args.seed,
        "top_k": args.top_k,
        "chunk_tokens": args.chunk_tokens,
        "files": len(paths),
        "files_read": num_read,
        "chunks": sum(map(len, corpus.values())),
        "tokens": num_tokens,
    }
    return corpus, description


def _document_rows(args: argparse.Namespace, model: Model, corpus: dict[str, list[str]]) -> list[QuestionRow]:
    """Make prompts about the corpus, of what retrieval finds."""
    chunks = list(dict.fromkeys(chunk for texts in corpus.values() for chunk in texts))
    with ChunkIndex(":memory:") as index:
        with progress("indexing", args.json) as update:
            if len(chunks) > 1:
                index.add(chunks, progress=update)
        search = text_search(index)
        return document_rows(make_prompts(model, chunks, search, args.samples, args.top_k, args.seed, args.max_tokens))


# ------------------------------------------------------------------------------------------------------ output


def report(
    args: argparse.Namespace,
    evaluation: Evaluation,
    cells: list[dict[str, Any]],
    started: float,
    lines: Callable[[dict[str, Any]], list[str]] | None = None,
) -> int:
    """Store the result in --out and print it; return the exit code.

    Args:
        started: Time of `time.perf_counter` when the command started.
        lines: Function that formats a result (default: as `kvrag bench quality` does).
    """
    from kvrag.bench.quality import environment

    result: dict[str, Any] = {
        "settings": evaluation.settings,
        "environment": {
            **environment(evaluation.model),
            "command": f"{args.program} {shlex.join(sys.argv[1:])}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": time.perf_counter() - started,
        },
        "cells": cells,
    }
    if args.docs is not None:
        result["verdict"], lines = verdict(result), documents_table
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        partial = args.out / "results.tmp"
        partial.write_text(json.dumps(result, indent=1))
        os.replace(partial, args.out / "results.json")
    print(json.dumps(result) if args.json else "\n".join((lines or table)(result)))
    return 130 if evaluation.is_interrupted else 0


def heading(result: dict[str, Any], source: str) -> list[str]:
    """Return the lines about the machine and the source of the prompts."""
    environment = result["environment"]
    names = ("model", "dtype", "device", "threads", "torch", "kvrag")
    return [", ".join(f"{name} {environment[name]}" for name in names), source]


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the report on questions."""
    settings = result["settings"]
    skipped = f", {settings['skipped']} skipped" if settings["skipped"] else ""
    shared = f" over contexts ({settings['contexts']})" if settings["contexts"] < settings["samples"] else ""
    lines = heading(
        result,
        f"{settings['samples']} rows of {settings['data']['file']}{skipped}; 95 % intervals{shared}; "
        "KL in nats to full prefill's first token; TTFT: median, "
        + ("KV in RAM" if settings["ram_bytes"] else "KV from disk"),
    )
    for setup, cells in by_setup(result["cells"]).items():
        lines += ["", f"{setup}: {cells[1]['reused']:.0%} of the prompt reused", ""]
        lines.append(
            f"{'':26}{'ratio':>6}{'recomp.':>8}  {'EM':22}{'EM kept':22}{'F1':22}{'top-1':>7}  {'KL':25}{'TTFT':>9}"
            "  speed-up"
        )
        for cell in cells:
            lines.append(
                f"{cell['policy']:26}{ratio(cell)}{cell['recomputed']:>8.3f}  {interval(cell['em']):22}"
                f"{interval(cell['em_kept']):22}{interval(cell['f1']):22}{cell['agree']['value']:>7.3f}  "
                f"{interval(cell['kl'], '.4f'):25}{cell['ttft_s'] * 1000:>6.0f} ms  {interval(cell['speedup'], '.2f')}"
            )
    return lines


def documents_table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the report on prompts made from documents; the last one is the verdict."""
    settings, data = result["settings"], result["settings"]["data"]
    full = result["cells"][0]
    num_cloze = full["groups"].get(f"kind: {CLOZE}", {"samples": 0})["samples"]
    lines = heading(
        result,
        f"{data['folder']}: {data['chunks']} chunks, {data['tokens']} tokens, from {data['files_read']} of "
        f"{data['files']} files; {settings['samples']} prompts of {data['top_k']} chunks, {num_cloze} of them cloze; "
        "95 % intervals",
    )
    lines.append(f"{RIGHT} in {full['em']['value']:.1%} of the prompts")
    for setup, cells in by_setup(result["cells"]).items():
        lines += ["", setup, ""]
        lines.append(
            f"{'':20}{'ratio':>6}  {'answers kept':36}{'right words kept':>17}{'cloze words kept':>18}"
            f"{'top-1':>8}{'KL':>9}"
        )
        for cell in cells[1:]:
            bar = "#" * round(10 * cell["same"]["value"])
            lines.append(
                f"{cell['policy']:20}{ratio(cell)}  {bar:11}{_percent(cell['same']):25}"
                f"{_words_kept(cell, RIGHT):>17}{_words_kept(cell, f'kind: {CLOZE}'):>18}"
                f"{cell['agree']['value']:>8.1%}{cell['kl']['value']:>9.4f}"
            )
    return [*lines, "", result["verdict"]]


def verdict(result: dict[str, Any]) -> str:
    """Return whether blending keeps full prefill's answers, and at which ratio, in one sentence."""
    full, _, *blended = next(iter(by_setup(result["cells"]).values()))  # the first setup and policy of several
    cells = sorted((cell for cell in blended if cell["policy"] == blended[0]["policy"]), key=lambda cell: cell["ratio"])
    failing = [number for number, cell in enumerate(cells) if cell["same"]["value"] < _MIN_KEPT]
    keeps = not failing or failing[-1] < len(cells) - 1
    cell = cells[failing[-1] + 1 if failing and keeps else 0 if keeps else -1]
    shares = f"{_percent(cell['same'])} of {cell['samples']} short answers are full prefill's"
    if RIGHT in cell["groups"]:
        shares += f", and {_words_kept(cell, RIGHT)} of the {cell['groups'][RIGHT]['samples']} words that it gets right"
    at = f"ratio {cell['ratio']:g}"
    if full["em"]["value"] < _MIN_RIGHT:
        return (
            f"Undecided: full prefill itself gets only {full['em']['value']:.1%} of these sentences right, so most "
            f"answers are guesses (use --data with questions); at {at}, {shares}."
        )
    if keeps:
        return f"Yes: blending keeps your answers from ratio {cell['ratio']:g} on; there, {shares}."
    return (
        f"No: blending keeps less than {_MIN_KEPT:.0%} of your answers up to ratio {cell['ratio']:g}; there, {shares}."
    )


def _words_kept(cell: dict[str, Any], group: str) -> str:
    return f"{cell['groups'][group]['word']['value']:.1%}" if group in cell["groups"] else "-"


def _percent(bounds: dict[str, float]) -> str:
    return f"{bounds['value']:.1%} [{bounds['low']:.1%}, {bounds['high']:.1%}]"


def ratio(cell: dict[str, Any]) -> str:
    """Return the column with the cell's ratio."""
    return f"{'' if cell['ratio'] is None else format(cell['ratio'], 'g'):>6}"


def interval(bounds: dict[str, float | None], form: str = ".3f") -> str:
    """Return a value with its interval."""
    if bounds["value"] is None:
        return "-"
    return f"{bounds['value']:{form}} [{bounds['low']:{form}}, {bounds['high']:{form}}]"
