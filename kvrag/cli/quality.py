"""`kvrag bench quality`: measure answer quality per policy and ratio."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.bench import grid
from kvrag.bench.datasets import Row, document_rows, file_rows
from kvrag.cli.bench import USUAL
from kvrag.cli.common import encoded_behind, forecast, progress, require_extra, say
from kvrag.config import CODECS, DEFAULT_CONTEXT, DEFAULT_POLICY, POLICIES
from kvrag.control.prompts import CLOZE, make_prompts
from kvrag.errors import SettingError
from kvrag.retrieval import documents
from kvrag.retrieval.index import ChunkIndex

if TYPE_CHECKING:
    from kvrag.backend.transformers import Model
    from kvrag.bench import quality

_INFORMED = [policy for policy in POLICIES if policy not in ("full", "none", "random")]
_DEFAULTS: dict[str, Any] = {"samples": 200, "policies": _INFORMED, "chunk_tokens": ["0"], "max_tokens": 16}
_DEFAULTS_DOCS: dict[str, Any] = {
    "samples": 100,
    "policies": [DEFAULT_POLICY],
    "chunk_tokens": ["256"],
    "max_tokens": 8,
    "top_k": 4,
}
_NOT_DOCS = ("data", "missing", "instruction", "skip_long")
_DOCS_TOKENS = 32768  # of the folder at most: minutes of encoding and gigabytes of disk for a model of 7B
_DOCS_STOP = ("\n", ". ")  # nothing is asked after the sentence's end
_KEEPS = 0.95  # share of the answers that must be full prefill's
_ABLE = 0.3  # share of the sentences that a model must complete as they go on, for the result to mean much


def run(args: argparse.Namespace) -> int:
    """Measure, print and store the results."""
    fill(args)
    if args.docs is not None:
        return evaluate(args, [], {})
    if args.data is None:
        raise SettingError("nothing to ask: pass --docs FOLDER, or --data FILE with questions")
    if args.top_k is not None:
        raise SettingError("--data is asked as it is: leave out --top-k")
    rows = file_rows(args.data, args.samples)
    digest = blake2b(args.data.read_bytes(), digest_size=8).hexdigest()
    return evaluate(args, rows, {"file": args.data.name, "digest": digest})


def evaluate(args: argparse.Namespace, rows: Sequence[Row], data: dict[str, Any]) -> int:
    """Measure, print and store the results of these rows, or of prompts made of --docs.

    Args:
        data: Description of the rows' source that does not depend on their number.
    """
    started = time.perf_counter()
    documents_given = args.docs is not None
    asking, cells = _asking(args), _cells(args, rows)
    from kvrag.backend.transformers import Model  # slow to import: mistakes are reported before
    from kvrag.bench import quality

    model = Model.from_pretrained(args.model, dtype=args.dtype, device=args.device)
    corpus: dict[str, list[str]] = {}
    if documents_given:
        corpus, data = _read_documents(args, model)
        rows = _document_rows(args, model, corpus)
    lengths = list(dict.fromkeys(cell.setup.chunk_tokens for cell in cells))
    if not args.json:
        say(f"{len(rows)} rows, {len(cells)} cells")
        if not model.tokenizer.has_chat_template:
            say("the model has no chat template: prompts are plain text")
    tasks, skipped = quality.make_tasks(model, rows, lengths, asking, args.skip_long)
    identity = quality.identity(model, cells, asking, data, args.ram_bytes)
    journal = quality.Journal(args.out, identity)
    is_interrupted = False
    try:
        if documents_given:
            _measure_documents(args, model, corpus, tasks, cells, asking, journal)
        else:
            with progress("answering", quiet=args.json) as update:
                quality.measure(model, tasks, cells, asking, journal, args.ram_bytes, update)
    except KeyboardInterrupt:
        hint = "run it again to resume" if args.out else "use --out to be able to resume"
        num_asked, tasks = len(tasks), quality.finished(tasks, cells, journal)
        if not tasks:
            raise KeyboardInterrupt(f"interrupted: {hint}") from None
        say(f"interrupted after {len(tasks)} of {num_asked} prompts, which follow: {hint}")
        is_interrupted = True
    finally:
        journal.close()
    result = {
        "settings": {
            **identity,
            "samples": len(tasks),
            "contexts": int(quality.contexts(tasks).max()) + 1,
            "skipped": skipped,
            "seed": args.seed,
            "against": args.against,
        },
        "environment": {
            **quality.environment(model),
            "command": f"{args.program} {shlex.join(sys.argv[1:])}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": time.perf_counter() - started,
        },
        "cells": quality.summarise(tasks, cells, journal, args.seed, args.against),
    }
    if documents_given:
        result["verdict"] = verdict(result)
    if args.out:
        _keep(args.out / "results.json", result)
    if args.json:
        print(json.dumps(result))
    else:
        print("\n".join((documents_table if documents_given else table)(result)))
    return 130 if is_interrupted else 0


def fill(args: argparse.Namespace) -> None:
    """Fill in the defaults, and reject options that --docs does not have."""
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


def _read_documents(args: argparse.Namespace, model: Model) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return chunks by document, from random files of the folder up to a number of tokens, and what they are."""
    encode = model.tokenizer.encode
    (chunk_tokens,) = _numbers(args.chunk_tokens, int, "--chunk-tokens")
    split = documents.splitter(lambda text: len(encode(text)), chunk_tokens, 0)
    paths, problems = documents.find([args.docs])
    random.Random(args.seed).shuffle(paths)
    corpus: dict[str, list[str]] = {}
    num_tokens = num_read = 0
    with progress("reading", args.json) as update:
        for path in paths:
            if num_tokens >= _DOCS_TOKENS:
                break
            num_read += 1
            content = documents.read(path)
            problems += content.problems
            for chunk in split(content.texts):
                if num_tokens < _DOCS_TOKENS:
                    corpus.setdefault(str(path), []).append(chunk)
                    num_tokens += len(encode(chunk))
            update(min(num_tokens, _DOCS_TOKENS), _DOCS_TOKENS)
    for problem in problems:
        say(str(problem))
    digest = blake2b(json.dumps(sorted(corpus.values())).encode(), digest_size=8).hexdigest()
    data = {
        "folder": args.docs.resolve().name,
        "digest": digest,
        "seed": args.seed,
        "top_k": args.top_k,
        "chunk_tokens": chunk_tokens,
        "files": len(paths),
        "files_read": num_read,
        "chunks": sum(map(len, corpus.values())),
        "tokens": num_tokens,
    }
    return corpus, data


def _document_rows(args: argparse.Namespace, model: Model, corpus: dict[str, list[str]]) -> list[Row]:
    """Make prompts about the corpus, of what retrieval finds."""

    chunks = list(dict.fromkeys(chunk for inside in corpus.values() for chunk in inside))
    with ChunkIndex(":memory:") as index:
        with progress("indexing", args.json) as update:
            if len(chunks) > 1:
                index.add(chunks, progress=update)

        def search(query: str, k: int) -> list[str]:
            return [hit.text for hit in index.search(query, k)]

        return document_rows(make_prompts(model, chunks, search, args.samples, args.top_k, args.seed, args.max_tokens))


def _measure_documents(
    args: argparse.Namespace,
    model: Model,
    corpus: dict[str, list[str]],
    tasks: Sequence[quality.Task],
    cells: Sequence[grid.Cell],
    asking: grid.Asking,
    journal: quality.Journal,
) -> None:
    from kvrag.bench import quality

    if len(quality.finished(tasks, cells, journal)) == len(tasks):
        return
    with quality.open_engines(quality.Models(model), cells, args.ram_bytes) as engines:
        with progress("encoding", args.json) as update:
            quality.encode(engines, corpus, update)
        with progress("answering", args.json) as update:
            if not args.json:
                update = forecast(update, 1, "fewer with --samples; Ctrl-C reports those that are done")
            quality.answer(engines, tasks, cells, asking, journal, update)


def _cells(args: argparse.Namespace, rows: Sequence[Row]) -> list[grid.Cell]:
    """Return the grid."""
    cells = grid.make_cells(
        [policy for text in args.policies for policy in grid.split_policies(text)],
        _numbers(args.ratios, float, "--ratios"),
        _setups(args, rows),
        grid.parse_settings(args.settings),
    )
    if args.docs is not None and not any(text.startswith("random") for text in args.policies):
        cells = [cell for cell in cells if cell.label != "random"]
    if args.against != USUAL and args.against not in {cell.label for cell in cells}:
        raise SettingError(f"--against {args.against!r} is not among the measured policies")
    return cells


def _setups(args: argparse.Namespace, rows: Sequence[Row]) -> list[grid.Setup]:
    lengths = _numbers(args.chunk_tokens, int, "--chunk-tokens")
    if args.docs is not None:
        if len(lengths) != 1 or lengths[0] < 16:
            raise SettingError("--chunk-tokens with --docs must be one number of at least 16")
        lengths = [grid.AS_THEY_ARE]  # the documents are split before
    if any(0 != length < 16 for length in lengths):
        raise SettingError("--chunk-tokens must be 0 or at least 16: shorter chunks are not reused")
    have_documents, have_titles = (
        all(texts) for texts in ([row.documents for row in rows], [row.library for row in rows])
    )
    usual = DEFAULT_CONTEXT if have_documents and not any(lengths) else 0
    words = _words(args.context_tokens or [str(usual)])
    contexts = [encoded_behind(word) for word in words]
    is_behind = any(context["context_tokens"] for context in contexts)
    if is_behind and not have_documents:
        raise SettingError("--context-tokens needs rows with `documents`")
    if "headings" in words and not have_titles:
        raise SettingError("--context-tokens headings needs documents with titles: --docs, or rows with `library`")
    if is_behind and any(lengths):
        raise SettingError("--context-tokens and --chunk-tokens exclude each other: leave out one of them")
    preambles, codecs = _words(args.preamble), _words(args.codec)
    for name, words, known in (("--preamble", preambles, ("on", "off")), ("--codec", codecs, CODECS)):
        if unknown := [word for word in words if word not in known]:
            raise SettingError(f"{name} must be one of {', '.join(known)}, got {unknown[0]!r}")
    return [
        grid.Setup(length, preamble == "on", codec, **context)
        for length in lengths
        for preamble in preambles
        for codec in codecs
        for context in contexts
    ]


def _words(texts: Sequence[str]) -> list[str]:
    """Split texts at spaces and commas."""
    return [word for text in texts for word in text.split(",") if word]


def _numbers(texts: Sequence[str], kind: type, name: str) -> list[Any]:
    try:
        return [kind(word) for word in _words(texts)]
    except ValueError as error:
        raise SettingError(f"{name}: {error}") from None


def _asking(args: argparse.Namespace) -> grid.Asking:
    if not 0 <= args.missing < 1:
        raise SettingError(f"--missing must be a share from 0 to less than 1, got {args.missing}")
    stop = grid.default_stop(args.model) if args.docs is None else _DOCS_STOP
    if args.stop:
        stop = tuple(text.replace("\\n", "\n") for text in args.stop)
    return grid.Asking(args.max_tokens, stop, args.instruction, args.missing)


def _keep(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(result, indent=1))
    os.replace(half, path)


# ------------------------------------------------------------------------------------------------------ output


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the report: metrics, then differences between policies, then kinds of question."""
    settings, environment = result["settings"], result["environment"]
    skipped = f", {settings['skipped']} skipped" if settings["skipped"] else ""
    shared = f" over contexts ({settings['contexts']})" if settings["contexts"] < settings["samples"] else ""
    lines = [
        ", ".join(f"{name} {environment[name]}" for name in ("model", "dtype", "device", "threads", "torch", "kvrag")),
        f"{settings['samples']} rows of {settings['data']['file']}{skipped}; 95 % intervals{shared}; "
        "KL in nats to full prefill's first token; TTFT: median, "
        + ("KV in RAM" if settings["ram_bytes"] else "KV from disk"),
    ]
    for setup, cells in grid.by_setup(result).items():
        lines += ["", f"{setup}: {cells[1]['reused']:.0%} of the prompt reused", ""]
        lines += [
            f"{'':26}{'ratio':>6}{'recomp.':>8}  {'EM':22}{'EM kept':22}{'F1':22}{'ROUGE-L':>8}{'top-1':>7}"
            f"  {'KL':25}{'TTFT':>9}  speed-up"
        ]
        lines += [_line(cell) for cell in cells]
        rivals = [cell for cell in cells if "against" in cell]
        if rivals:
            lines += ["", f"minus {settings['against']} at the same ratio, paired", ""]
            lines += [f"{'':26}{'ratio':>6}  {'EM':25}{'F1':25}KL"]
            for cell in rivals:
                differences = "".join(f"{_interval(cell['against'][name], '+.3f'):25}" for name in ("em", "f1", "kl"))
                lines.append(f"{cell['policy']:26}{_ratio(cell)}  {differences.rstrip()}")
        lines += _by_retrieval(cells)
        groups = [name for name in cells[0]["groups"] if name not in _RETRIEVAL]
        if groups:
            heads = [name.removeprefix("kind: ").replace("hangs on ", "") for name in groups]
            widths = [max(len(head), 5) + 2 for head in heads]
            lines += ["", "EM by kind of question", ""]
            lines.append(" " * 32 + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
            counts = [cells[0]["groups"][name]["samples"] for name in groups]
            lines.append(
                f"{'questions':32}" + "".join(f"{n:>{width}}" for n, width in zip(counts, widths, strict=True))
            )
            for cell in cells:
                values = [cell["groups"][name]["em"]["value"] for name in groups]
                cut = "".join(f"{value:>{width}.3f}" for value, width in zip(values, widths, strict=True))
                lines.append(f"{cell['policy']:26}{_ratio(cell)}{cut}")
    return lines


_RETRIEVAL = (grid.RETRIEVED, grid.NOT_RETRIEVED, grid.HIDDEN)


def _by_retrieval(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines about what was retrieved; none if that is unknown or does not differ."""
    groups = [name for name in _RETRIEVAL if name in cells[0]["groups"]]
    if not groups:
        return []
    heads, columns = "", ""
    for name in groups:
        if name == grid.HIDDEN:
            continue
        title = f"{name} ({cells[0]['groups'][name]['samples']})"
        heads += f"{title:78}"
        columns += f"{'EM':22}{'EM kept':22}{'top-1':>7}  {'KL':25}"
    if grid.HIDDEN in groups:
        heads += f"answers from what was not retrieved ({cells[0]['groups'][grid.HIDDEN]['samples']})"
    lines = ["", "By what was retrieved", "", f"{'':34}{heads}".rstrip(), f"{'':26}{'ratio':>6}  {columns}".rstrip()]
    for cell in cells:
        text = f"{cell['policy']:26}{_ratio(cell)}  "
        for name in groups:
            group = cell["groups"][name]
            if name == grid.HIDDEN:
                text += _interval(group["leaked"])
            else:
                text += f"{_interval(group['em']):22}{_interval(group['em_kept']):22}{group['agree']['value']:>7.3f}  "
                text += f"{_interval(group['kl'], '.4f'):25}"
        lines.append(text.rstrip())
    return lines


def documents_table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the report on prompts made of documents; the last one is the verdict."""
    settings, environment, data = result["settings"], result["environment"], result["settings"]["data"]
    full = next(cell for cell in result["cells"] if cell["policy"] == "full")
    num_cloze = full["groups"].get(f"kind: {CLOZE}", {"samples": 0})["samples"]
    lines = [
        ", ".join(f"{name} {environment[name]}" for name in ("model", "dtype", "device", "threads", "torch", "kvrag")),
        f"{data['folder']}: {data['chunks']} chunks, {data['tokens']} tokens, from {data['files_read']} of "
        f"{data['files']} files; {settings['samples']} prompts of {data['top_k']} chunks, {num_cloze} of them cloze; "
        "95 % intervals",
        f"{grid.RIGHT} in {full['em']['value']:.1%} of the prompts",
    ]
    for setup, cells in grid.by_setup(result).items():
        lines += ["", str(setup), ""]
        lines.append(
            f"{'':20}{'ratio':>6}  {'answers kept':36}{'right words kept':>17}{'cloze words kept':>18}"
            f"{'top-1':>8}{'KL':>9}"
        )
        for cell in cells[1:]:
            right, cloze = (
                cell["groups"][name]["word"]["value"] if name in cell["groups"] else None
                for name in (grid.RIGHT, f"kind: {CLOZE}")
            )
            bar = "#" * round(10 * cell["same"]["value"])
            lines.append(
                f"{cell['policy']:20}{_ratio(cell)}  {bar:11}{_percent(cell['same']):25}"
                f"{_share(right):>17}{_share(cloze):>18}{cell['agree']['value']:>8.1%}{cell['kl']['value']:>9.4f}"
            )
    return [*lines, "", result["verdict"]]


def verdict(result: dict[str, Any]) -> str:
    """Return whether blending keeps full prefill's answers, and at which ratio, in one sentence."""
    full, _, *others = next(iter(grid.by_setup(result).values()))  # the first setup and policy of several
    line = sorted((cell for cell in others if cell["policy"] == others[0]["policy"]), key=lambda cell: cell["ratio"])
    fails = [number for number, cell in enumerate(line) if cell["same"]["value"] < _KEEPS]
    keeps = not fails or fails[-1] < len(line) - 1
    cell = line[fails[-1] + 1 if fails and keeps else 0 if keeps else -1]
    shares = f"{_percent(cell['same'])} of {cell['samples']} short answers are full prefill's"
    if grid.RIGHT in cell["groups"]:
        right = cell["groups"][grid.RIGHT]
        shares += f", and {_share(right['word']['value'])} of the {right['samples']} words that it gets right"
    if full["em"]["value"] < _ABLE:
        return (
            f"Undecided: full prefill itself gets only {_share(full['em']['value'])} of these sentences right, so most "
            f"answers are guesses (use --data with questions); at ratio {cell['ratio']:g}, {shares}."
        )
    if keeps:
        return f"Yes: blending keeps your answers from ratio {cell['ratio']:g} on; there, {shares}."
    return f"No: blending keeps less than {_KEEPS:.0%} of your answers up to ratio {cell['ratio']:g}; there, {shares}."


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _percent(interval: dict[str, float]) -> str:
    return f"{interval['value']:.1%} [{interval['low']:.1%}, {interval['high']:.1%}]"


def _line(cell: dict[str, Any]) -> str:
    speed = _interval(cell["speedup"], ".2f")
    return (
        f"{cell['policy']:26}{_ratio(cell)}{cell['recomputed']:>8.3f}  {_interval(cell['em']):22}"
        f"{_interval(cell['em_kept']):22}{_interval(cell['f1']):22}{cell['rouge_l']['value']:>8.3f}"
        f"{cell['agree']['value']:>7.3f}  {_interval(cell['kl'], '.4f'):25}{cell['ttft_s'] * 1000:>6.0f} ms  {speed}"
    )


def _ratio(cell: dict[str, Any]) -> str:
    return f"{'' if cell['ratio'] is None else format(cell['ratio'], 'g'):>6}"


def _interval(interval: dict[str, float | None], form: str = ".3f") -> str:
    if interval["value"] is None:
        return "-"
    return f"{interval['value']:{form}} [{interval['low']:{form}}, {interval['high']:{form}}]"
