"""`python -m benchmarks answers` with more settings, questions about the reader's world, and more results."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.quality import answers, results
from benchmarks.quality.answers import comma_separated
from benchmarks.quality.grid import make_cells
from benchmarks.quality.rows import QuestionRow
from benchmarks.quality.variants import code_digest, leave_out, make_configs, rechunk
from benchmarks.quality.worlds import WORLD, world_rows
from kvrag.backend.transformers import Model
from kvrag.cli.common import at_least, checked
from kvrag.config import CODECS, BlendConfig, check_option
from kvrag.errors import SettingError

_AGAINST = "hkvd"  # the usual reference in the literature


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    answers.add_arguments(parser)
    study = parser.add_argument_group("the study of blending", conflict_handler="resolve")  # some take more values here
    study.add_argument(
        "--codec",
        nargs="+",
        type=comma_separated(checked(str, partial(check_option, "codec"))),
        default=[["native"]],
        metavar="|".join(CODECS),
        help="codecs of the stored KV",
    )
    study.add_argument(
        "--context-tokens",
        nargs="+",
        type=comma_separated(at_least(0)),
        default=[],
        metavar="N",
        help="contexts that passages are encoded with, as in `python -m benchmarks answers`",
    )
    study.add_argument(
        "--chunk-tokens",
        nargs="+",
        type=comma_separated(checked(int, _check_chunk_tokens)),
        default=[],
        metavar="N",
        help="cut and join the passages into chunks of about N tokens; 0 = unchanged (default); with --docs the "
        "maximum length of a chunk (default: 256)",
    )
    study.add_argument(
        "--preamble",
        nargs="+",
        type=comma_separated(checked(str, _check_preamble)),
        default=[["on"]],
        metavar="on|off",
        help="encode chunks with or without the preamble",
    )
    study.add_argument(
        "--missing",
        type=checked(float, _check_missing),
        default=0.0,
        metavar="SHARE",
        help="share of the passages to leave out of the prompts at random, as if not retrieved",
    )
    study.add_argument(
        "--against", default=_AGAINST, metavar="POLICY", help=f"policy to compare with (default: {_AGAINST})"
    )


def _check_chunk_tokens(number: int) -> None:
    if number != 0 and number < 16:
        raise SettingError("must be 0 or at least 16: shorter chunks are not reused")


def _check_preamble(word: str) -> None:
    if word not in ("on", "off"):
        raise SettingError(f"must be one of on, off, got {word!r}")


def _check_missing(share: float) -> None:
    if not 0 <= share < 1:
        raise SettingError(f"must be a share from 0 to less than 1, got {share}")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store the results."""
    started = time.perf_counter()
    _check(args)
    lengths, preambles, codecs = (_flat(values) for values in (args.chunk_tokens, args.preamble, args.codec))
    contexts: list[int | None] = _flat(args.context_tokens)
    if args.docs is not None:
        if len(lengths) > 1 or 0 in lengths:
            raise SettingError("--chunk-tokens with --docs must be one number of at least 16")
        args.chunk_tokens, lengths = lengths[0] if lengths else None, []
    else:
        args.chunk_tokens = None  # applied here
    if any(lengths):
        if any(contexts):
            raise SettingError("--context-tokens and --chunk-tokens exclude each other: leave out one of them")
        contexts = [0]
    answers.fill(args)
    rows: Sequence[QuestionRow]
    rows, data = answers.read_rows(args) if args.docs or args.data else _rows(args)
    configs = [answers.chunk_config(rows, context) for context in contexts or [None]]
    policies = args.policies if args.docs is not None else [*args.policies, "random"]
    cells = make_cells(make_configs(policies), args.ratios)
    if args.against not in {_AGAINST, *(cell.label for cell in cells)}:
        raise SettingError(f"--against {args.against!r} is not among the measured policies")
    model = answers.load_model(args)
    data |= {"code": code_digest()} | ({"missing": args.missing} if args.missing else {})
    measured: list[dict[str, Any]] = []
    for length, preamble, codec, config in itertools.product(lengths or [0], preambles, codecs, configs):
        variant = model if preamble == "on" else Model(model.hf, model.tokenizer.hf, model.name, True, preamble=False)
        asked = [_variant(row, length, args.missing, model) for row in rows]
        evaluation = answers.evaluate(args, variant, asked, data, cells, config, codec)
        tables = results.tables(evaluation.tasks, cells, evaluation.journal)
        for cell in results.summarise(evaluation.tasks, cells, tables, args.seed[0], args.against):
            settings = {"chunk_tokens": length, "preamble": preamble == "on", "codec": codec}
            settings["context_tokens"] = config.context_tokens
            measured.append(cell | settings | {"setup": _setup(length, preamble, codec, config)})
        if evaluation.is_interrupted:
            break
    evaluation.settings["against"] = args.against
    return answers.report(args, evaluation, measured, started, results.full_table)


def _setup(length: int, preamble: str, codec: str, config: BlendConfig) -> str:
    passages = f"chunks of {length} tokens" if length else "passages as they are"
    encoded = f"context: {config.context_tokens} tokens" if config.context_tokens else "no context"
    return f"{passages}, preamble {preamble}, codec {codec}, {encoded}"


def _flat(values: list[list[Any]]) -> list[Any]:
    return list(dict.fromkeys(itertools.chain(*values)))


def _variant(row: QuestionRow, length: int, missing: float, model: Model) -> QuestionRow:
    if length:
        passages = rechunk(row.passages, length, lambda text: len(model.tokenizer.encode(text)))
        row = replace(row, passages=passages, documents=(), library={})
    return leave_out(row, missing) if missing else row


def _check(args: argparse.Namespace) -> None:
    if args.docs is not None and args.missing:
        raise SettingError("--missing and --docs exclude each other: leave out one of them")
    if args.docs is None and args.data is None and args.top_k is not None:
        raise SettingError("--top-k needs --docs")


def _rows(args: argparse.Namespace) -> tuple[Sequence[QuestionRow], dict[str, Any]]:
    """Return the rows, and a description of their source that does not depend on their number."""
    rows = [row for seed in dict.fromkeys(args.seed) for row in world_rows(args.samples, seed)]
    return rows, {"file": WORLD, "seed": args.seed, "digest": rows[0].key}
