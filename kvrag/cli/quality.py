"""`kvrag bench quality`: measure answer quality per policy and ratio."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvrag.backend.transformers import Model
from kvrag.bench import plots, quality
from kvrag.bench.datasets import WORLDS, Row, file_rows, world_of, world_rows
from kvrag.cli.bench import USUAL
from kvrag.cli.common import progress, say
from kvrag.config import CODECS, DEFAULT_CONTEXT
from kvrag.errors import SettingError


def run(args: argparse.Namespace) -> int:
    """Measure, print and store the results."""
    started = time.perf_counter()
    asking = _asking(args)
    rows, data = _rows(args)
    cells = quality.make_cells(
        [policy for text in args.policies for policy in quality.split_policies(text)],
        _numbers(args.ratios, float, "--ratios"),
        _setups(args, all(row.documents for row in rows)),
        quality.parse_settings(args.settings),
    )
    if args.against != USUAL and args.against not in {cell.label for cell in cells}:
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


def _setups(args: argparse.Namespace, have_documents: bool) -> list[quality.Setup]:
    lengths = _numbers(args.chunk_tokens, int, "--chunk-tokens")
    if any(0 != length < 16 for length in lengths):
        raise SettingError("--chunk-tokens must be 0 or at least 16: shorter chunks are not reused")
    usual = DEFAULT_CONTEXT if have_documents and not any(lengths) else 0
    contexts = _numbers(args.context_tokens or [str(usual)], int, "--context-tokens")
    if any(contexts) and not have_documents:
        raise SettingError("--context-tokens needs rows with `documents`")
    if any(contexts) and any(lengths):
        raise SettingError("--context-tokens and --chunk-tokens exclude each other: leave out one of them")
    preambles, codecs = _words(args.preamble), _words(args.codec)
    for name, words, known in (("--preamble", preambles, ("on", "off")), ("--codec", codecs, CODECS)):
        if unknown := [word for word in words if word not in known]:
            raise SettingError(f"{name} must be one of {', '.join(known)}, got {unknown[0]!r}")
    return [
        quality.Setup(length, preamble == "on", codec, context)
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
    if args.data:
        rows = file_rows(args.data, args.samples)
        digest = blake2b(args.data.read_bytes(), digest_size=8).hexdigest()
        return rows, {"file": args.data.name, "digest": digest}
    world = args.world or world_of(args.model)
    rows = world_rows(args.samples, args.seed, world)
    return rows, {"file": WORLDS[world], "seed": args.seed, "digest": rows[0].key}


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
        groups = list(cells[0]["groups"])
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
