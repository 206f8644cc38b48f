"""`kvrag bench quality`: measure answer quality per policy and ratio."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvrag.backend.transformers import Model
from kvrag.bench import plots, quality
from kvrag.bench.datasets import WORLDS, Row, file_rows, world_of, world_rows
from kvrag.bench.retrieved import ARTICLES, draw_corpus, open_index, retrieved_rows
from kvrag.cli.common import progress, require_extra, say
from kvrag.config import CODECS, DEFAULT_CONTEXT, POLICIES
from kvrag.errors import SettingError

_USUAL = "hkvd"  # the usual reference in the literature


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench quality`."""
    parser.add_argument("--model", default="reader", help="hub name, folder, or 'reader' for the bundled model")
    parser.add_argument(
        "--dtype", default="auto", help="dtype of the model: bfloat16, float16, float32 (default: as stored)"
    )
    parser.add_argument("--device", help="device: cuda, cpu, ... (default: a GPU if there is one)")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="JSON lines with passages, question, answers (default: drawn from the reader's world)",
    )
    parser.add_argument(
        "--world", type=int, choices=WORLDS, help="the world to draw from (default: the one the reader was trained on)"
    )
    parser.add_argument("--samples", type=int, default=200, metavar="N", help="number of questions (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn questions and of the intervals")
    informed = [policy for policy in POLICIES if policy not in ("full", "none", "random")]
    parser.add_argument(
        "--policies",
        nargs="+",
        default=informed,
        metavar="POLICY",
        help="policies, optionally with settings: hkvd hkvd:check_layer=3,metric=cosine query:band=0.2:0.6 "
        "(default: all; full, none and random are always included)",
    )
    parser.add_argument("--ratios", nargs="+", default=["0.05", "0.15", "0.3"], metavar="R", help="0 to 1")
    parser.add_argument(
        "--chunk-tokens",
        nargs="+",
        default=["0"],
        metavar="N",
        help="cut and join the passages into chunks of about N tokens; 0 = unchanged (default)",
    )
    parser.add_argument(
        "--preamble", nargs="+", default=["on"], metavar="on|off", help="encode chunks with or without the preamble"
    )
    parser.add_argument(
        "--codec", nargs="+", default=["native"], metavar="|".join(CODECS), help="codecs of the stored KV"
    )
    parser.add_argument(
        "--context-tokens",
        nargs="+",
        metavar="N|headings",
        help="encode passages with N tokens of their document as context, or with its title and headings; 0 = alone "
        "(default: as `kvrag warm` if rows name documents, else 0)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="draw an index of articles, and ask about the K chunks nearest to each question; their documents are "
        "warmed as a whole (default: prompts of whole articles)",
    )
    parser.add_argument(
        "--around",
        type=int,
        default=0,
        metavar="N",
        help="neighbours to retrieve with each chunk of --top-k (default: 0)",
    )
    parser.add_argument(
        "--articles",
        type=int,
        metavar="N",
        help="number of articles in the index of --top-k (default: "
        + ", ".join(f"{number} in world {world}" for world, number in ARTICLES.items())
        + ")",
    )
    parser.add_argument(
        "--missing",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the passages to leave out of the prompts at random, as if not retrieved",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", dest="settings", help="settings of all policies"
    )
    parser.add_argument(
        "--against", default=_USUAL, metavar="POLICY", help=f"policy to compare with (default: {_USUAL})"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=16, metavar="N", help="maximum length of an answer (default: 16)"
    )
    parser.add_argument(
        "--stop",
        nargs="+",
        metavar="TEXT",
        help=r"strings that end an answer; \n = line break (default: \n\n for the reader)",
    )
    parser.add_argument("--instruction", default="", metavar="TEXT", help="text between passages and question")
    parser.add_argument("--skip-long", action="store_true", help="skip rows that do not fit into the window")
    parser.add_argument(
        "--ram-bytes", type=int, default=2 << 30, help="size of the RAM tier (default: 2 GiB; 0 = read from disk)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="store rows.jsonl and results.json there; run again to resume"
    )
    parser.add_argument("--plots", action="store_true", help="write plots to --out; needs kvrag[bench]")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store the results."""
    started = time.perf_counter()
    asking = _asking(args)
    rows, data = _rows(args)
    cells = quality.make_cells(
        [policy for text in args.policies for policy in quality.split_policies(text)],
        _numbers(args.ratios, float, "--ratios"),
        _setups(args, rows),
        quality.parse_settings(args.settings),
    )
    if args.against != _USUAL and args.against not in {cell.label for cell in cells}:
        raise SettingError(f"--against {args.against!r} is not among the measured policies")
    if args.plots:
        if args.out is None:
            raise SettingError("--plots needs --out DIR")
        plots.require()
    model = Model.from_pretrained(args.model, dtype=args.dtype, device=args.device)
    lengths = list(dict.fromkeys(cell.setup.chunk_tokens for cell in cells))
    if not args.json:
        say(f"{len(rows)} rows, {len(cells)} cells")
    tasks, skipped = quality.make_tasks(model, rows, lengths, asking, args.skip_long)
    identity = quality.identity(model, cells, asking, data, args.ram_bytes)
    journal = quality.Journal(args.out, identity)
    try:
        with progress("answering", quiet=args.json) as update:
            quality.measure(model, tasks, cells, asking, journal, args.ram_bytes, update)
    except KeyboardInterrupt:
        hint = "run it again to resume" if args.out else "use --out to be able to resume"
        raise KeyboardInterrupt(f"interrupted: {hint}") from None
    finally:
        journal.close()
    result = {
        "settings": {**identity, "samples": len(tasks), "skipped": skipped, "seed": args.seed, "against": args.against},
        "environment": {
            **quality.environment(model),
            "command": shlex.join(["kvrag", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": time.perf_counter() - started,
        },
        "cells": quality.summarise(tasks, cells, journal, args.seed, args.against),
    }
    if args.out:
        _keep(args.out / "results.json", result)
        if args.plots:
            plots.draw(result, args.out)
    if args.json:
        print(json.dumps(result))
    else:
        print("\n".join(table(result)))
    return 0


def _setups(args: argparse.Namespace, rows: Sequence[Row]) -> list[quality.Setup]:
    lengths = _numbers(args.chunk_tokens, int, "--chunk-tokens")
    if any(0 != length < 16 for length in lengths):
        raise SettingError("--chunk-tokens must be 0 or at least 16: shorter chunks are not reused")
    have_documents = all(row.documents for row in rows)
    usual = DEFAULT_CONTEXT if have_documents and not any(lengths) else 0
    words = _words(args.context_tokens or [str(usual)])
    contexts = [
        (DEFAULT_CONTEXT, word) if word == "headings" else (_numbers([word], int, "--context-tokens")[0], "text")
        for word in words
    ]
    if any(tokens < 0 for tokens, _ in contexts):
        raise SettingError("--context-tokens must be at least 0")
    if any(tokens for tokens, _ in contexts) and not have_documents:
        raise SettingError("--context-tokens needs rows with `documents`")
    if "headings" in words and not all(row.library for row in rows):
        raise SettingError("--context-tokens headings needs documents with titles: --top-k, or rows with `library`")
    if any(tokens for tokens, _ in contexts) and any(lengths):
        raise SettingError("--context-tokens and --chunk-tokens exclude each other: leave out one of them")
    preambles, codecs = _words(args.preamble), _words(args.codec)
    for name, words, known in (("--preamble", preambles, ("on", "off")), ("--codec", codecs, CODECS)):
        if unknown := [word for word in words if word not in known]:
            raise SettingError(f"{name} must be one of {', '.join(known)}, got {unknown[0]!r}")
    return [
        quality.Setup(length, preamble == "on", codec, *context)
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


def _asking(args: argparse.Namespace) -> quality.Asking:
    for name, value, least in (
        ("--samples", args.samples, 1),
        ("--max-tokens", args.max_tokens, 1),
        ("--seed", args.seed, 0),
        ("--ram-bytes", args.ram_bytes, 0),
    ):
        if value < least:
            raise SettingError(f"{name} must be at least {least}, got {value}")
    if not 0 <= args.missing < 1:
        raise SettingError(f"--missing must be a share from 0 to less than 1, got {args.missing}")
    stop = quality.default_stop(args.model)
    if args.stop:
        stop = tuple(text.replace("\\n", "\n") for text in args.stop)
    return quality.Asking(args.max_tokens, stop, args.instruction, args.missing)


def _rows(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows, and a description of their source that does not depend on their number."""
    if args.top_k is None and (args.articles is not None or args.around):
        raise SettingError("--articles and --around need --top-k K")
    if args.data and (args.top_k is not None or args.world):
        raise SettingError("--data is asked as it is: leave out --world and --top-k")
    if args.data:
        rows = file_rows(args.data, args.samples)
        digest = blake2b(args.data.read_bytes(), digest_size=8).hexdigest()
        return rows, {"file": args.data.name, "digest": digest}
    world = args.world or world_of(args.model)
    if args.top_k is not None:
        return _retrieved(args, world)
    rows = world_rows(args.samples, args.seed, world)
    return rows, {"file": WORLDS[world], "seed": args.seed, "digest": rows[0].key}


def _retrieved(args: argparse.Namespace, world: int) -> tuple[list[Row], dict[str, Any]]:
    require_extra()
    articles = ARTICLES[world] if args.articles is None else args.articles
    for name, value, least in (("--top-k", args.top_k, 1), ("--articles", articles, 1), ("--around", args.around, 0)):
        if value < least:
            raise SettingError(f"{name} must be at least {least}, got {value}")
    corpus = draw_corpus(world, articles, args.seed)
    with (
        tempfile.TemporaryDirectory(prefix="kvrag-index-") as temporary,
        progress("indexing", quiet=args.json) as update,
        open_index(corpus, args.out or Path(temporary), update) as index,
    ):
        rows = retrieved_rows(corpus, index, args.samples, args.top_k, args.around)
    around = f" with {args.around} around each" if args.around else ""
    name = f"{WORLDS[world]}, top {args.top_k} of {len(corpus.chunks)} chunks{around}"
    return rows, {"file": name, "seed": args.seed, "digest": corpus.digest, "embedder": index.embedder}


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
    lines = [
        ", ".join(f"{name} {environment[name]}" for name in ("model", "dtype", "device", "threads", "torch", "kvrag")),
        f"{settings['samples']} rows of {settings['data']['file']}{skipped}; 95 % intervals; "
        "KL in nats to full prefill's first token; TTFT: median, "
        + ("KV in RAM" if settings["ram_bytes"] else "KV from disk"),
    ]
    for setup, cells in quality.by_setup(result).items():
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


_RETRIEVAL = (quality.RETRIEVED, quality.NOT_RETRIEVED, quality.HIDDEN)


def _by_retrieval(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines about what was retrieved; none if that is unknown or does not differ."""
    groups = [name for name in _RETRIEVAL if name in cells[0]["groups"]]
    if not groups:
        return []
    heads, columns = "", ""
    for name in groups:
        if name == quality.HIDDEN:
            continue
        title = f"{name} ({cells[0]['groups'][name]['samples']})"
        heads += f"{title:78}"
        columns += f"{'EM':22}{'EM kept':22}{'top-1':>7}  {'KL':25}"
    if quality.HIDDEN in groups:
        heads += f"answers from what was not retrieved ({cells[0]['groups'][quality.HIDDEN]['samples']})"
    lines = ["", "By what was retrieved", "", f"{'':34}{heads}".rstrip(), f"{'':26}{'ratio':>6}  {columns}".rstrip()]
    for cell in cells:
        text = f"{cell['policy']:26}{_ratio(cell)}  "
        for name in groups:
            group = cell["groups"][name]
            if name == quality.HIDDEN:
                text += _interval(group["leaked"])
            else:
                text += f"{_interval(group['em']):22}{_interval(group['em_kept']):22}{group['agree']['value']:>7.3f}  "
                text += f"{_interval(group['kl'], '.4f'):25}"
        lines.append(text.rstrip())
    return lines


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
