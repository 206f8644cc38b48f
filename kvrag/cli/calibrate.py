"""`kvrag calibrate`: find the smallest ratio that keeps full prefill's answers on this model and corpus."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvrag.cli.common import (
    add_engine_arguments,
    add_number,
    add_policy_argument,
    at_least,
    existing_path,
    open_engine,
    open_index,
    progress,
    read_questions,
    require_chunks,
    say,
)
from kvrag.cli.question import as_prompt, retrieve, text_search
from kvrag.config import DEFAULT_CONTEXT, DEFAULT_RATIO
from kvrag.errors import KvragError
from kvrag.types import Messages

if TYPE_CHECKING:
    from kvrag.control.calibrate import Calibration
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex

_SHORT = (DEFAULT_RATIO, 0.3, 0.6)
_CAREFUL = "answers come by full prefill until `kvrag calibrate` finds a ratio, or with --ratio"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag calibrate`."""
    add_engine_arguments(parser)
    questions = "one question per line; chunks are retrieved as in `kvrag ask` (default: prompts made from the chunks)"
    parser.add_argument("--questions", type=existing_path, metavar="FILE", help=questions)
    add_policy_argument(parser, "as in `kvrag ask`")
    add_number(parser, "--context-tokens", DEFAULT_CONTEXT, "for engines and servers with this setting")
    add_number(parser, "--target", 0.99, "share of first tokens that must match full prefill", most=1)
    sure = "require the lower end of the confidence interval to reach the target; takes hundreds of prompts"
    parser.add_argument("--sure", action="store_true", help=sure)
    ratios = "ratios to try (default: 0.05 0.15 0.3 0.6)"
    parser.add_argument("--ratios", type=at_least(0, float, 1), nargs="+", metavar="R", help=ratios)
    add_number(parser, "--prompts", 40, "maximum number of prompts; at least 40 make a default", least=1)
    add_number(parser, "--seed", 0, "seed of the prompts made without --questions")
    add_number(parser, "--top-k", 4, "chunks per prompt", least=2, most=100)
    add_number(parser, "--around", 0, "with --questions: neighbours to retrieve with each chunk")
    parser.add_argument("--dry-run", action="store_true", help="measure, but leave the default as it is")
    parser.add_argument("--reset", action="store_true", help="delete the stored calibration, and measure nothing")


def run(args: argparse.Namespace) -> int:
    """Measure, store the result beside the chunks, and print the curve; or delete the stored one."""
    from kvrag.control.calibrate import GRID

    if args.reset:
        return _reset(args)
    ratios = tuple(dict.fromkeys(args.ratios or GRID))
    with open_engine(args, is_warmed=True) as engine, open_index(engine, args.namespace) as index:
        prompts = _retrieve(engine, index, args) if args.questions else None
        if prompts is None and not args.json:
            if not len(index):
                say("no chunk index beside this store: chunks are retrieved by the rare words that they share")
            say("making prompts from the chunks")
        with progress("calibrating", args.json) as report:
            calibration = engine.calibrate(
                prompts,
                namespace=args.namespace,
                policy=args.policy,
                target=args.target,
                sure=args.sure,
                ratios=ratios,
                count=args.prompts,
                chunks=args.top_k,
                search=text_search(index) if len(index) else None,
                seed=args.seed,
                save=not args.dry_run,
                progress=report,
            )
        store = engine.store.stats().path
    is_saved = calibration.is_usable and not args.dry_run
    verdict = _verdict(calibration, is_saved)
    if args.json:
        print(json.dumps(asdict(calibration) | {"store": store, "saved": is_saved, "verdict": verdict}))
    else:
        _print(calibration)
        print(f"\n{verdict}" + (f"; stored in {store}" if is_saved else ""))
        if not args.questions:
            say("the prompts were made from the chunks: pass your own questions with --questions FILE")
    return 130 if calibration.interrupted else 0


def calibrate_after_warming(
    engine: BlendEngine, index: ChunkIndex, args: argparse.Namespace
) -> tuple[Calibration | None, str]:
    """Calibrate a model and store without a calibration, if it does not take long, with prompts made from the chunks.

    Returns:
        The calibration, None if there is none; and the outcome in a sentence, "" without an attempt.
    """
    if engine.calibration is not None or engine.fingerprint.is_bundled:
        return engine.calibration, ""
    limit_s = (2 if engine.model.device.type == "cuda" else 10) * 60.0
    try:
        with progress("calibrating", args.json) as report:
            calibration = engine.calibrate(
                namespace=args.namespace,
                ratios=_SHORT,
                search=text_search(index) if len(index) else None,
                limit_s=limit_s,
                progress=report,
            )
    except (KvragError, KeyboardInterrupt) as error:
        return None, f"not calibrated: {str(error) or 'interrupted'}; {_CAREFUL}"
    if not calibration.is_usable:
        return None, f"not calibrated: {'; '.join(calibration.notes)}; {_CAREFUL}"
    point = next(point for point in calibration.curve if point.ratio == DEFAULT_RATIO)
    first = f"{point.first} of {point.prompts} first words of full prefill"
    return calibration, f"on these documents, {point.ratio:.0%} gives {first}; {_verdict(calibration, True)}"


def _reset(args: argparse.Namespace) -> int:
    with open_engine(args, is_warmed=True) as engine:
        engine.reset_calibration()
        store = engine.store.stats().path
    said = f"no calibration in {store} any more: full prefill is now the default"
    print(json.dumps({"store": store}) if args.json else said)
    return 0


def _retrieve(engine: BlendEngine, index: ChunkIndex, args: argparse.Namespace) -> Sequence[str | Messages]:
    questions = read_questions(args.questions)[: args.prompts]
    require_chunks(index)
    return [as_prompt(engine, [retrieve(engine, index, question, args)[1]]) for question in questions]


def _print(calibration: Calibration) -> None:
    prompts = f"policy {calibration.policy}, {calibration.curve[0].prompts} prompts"
    print(f"first tokens that match full prefill, {prompts}\n")
    print(f"{'ratio':>6}{'agree':>9}   95 % interval{'later tokens':>16}")
    for point in calibration.curve:
        later = f"{point.following / point.tokens:.1%} of {point.tokens}" if point.tokens else ""
        mark = "  <-" if point.ratio == calibration.ratio else ""
        interval = f"{point.low:.1%} - {point.high:.1%}"
        print(f"{point.ratio:>6g}{point.share:>9.1%}   {interval:<15}{later:>14}{mark}")
    for note in calibration.notes:
        say(note)


def _verdict(calibration: Calibration, is_saved: bool) -> str:
    by = f"{calibration.target:.1%} {'with 95 % confidence' if calibration.sure else 'by the measured share'}"
    best = "no ratio reaches" if calibration.ratio is None else f"ratio {calibration.ratio:g} reaches"
    if not is_saved:
        return f"{best} {by}; nothing was saved"
    if calibration.ratio is None:
        return f"full: {best} {by}; full prefill is now the default"
    return f"{best} {by} and is now the default"
