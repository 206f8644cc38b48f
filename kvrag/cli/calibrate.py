"""`kvrag calibrate`: find the smallest ratio that keeps full prefill's answers on this model and corpus."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvrag.cli.common import (
    add_engine_arguments,
    at_least,
    existing_path,
    open_engine,
    open_index,
    progress,
    require_chunks,
    say,
)
from kvrag.cli.prompt import as_prompt, stuff
from kvrag.config import POLICIES
from kvrag.errors import PromptError
from kvrag.types import Messages

if TYPE_CHECKING:
    from kvrag.control.calibrate import Calibration
    from kvrag.engine import BlendEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag calibrate`."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--questions",
        type=existing_path,
        metavar="FILE",
        help="file with one question per line; chunks are retrieved as in `kvrag ask`",
    )
    parser.add_argument("--policy", choices=POLICIES, help="which tokens to recompute (default: as in `kvrag ask`)")
    parser.add_argument(
        "--target",
        type=at_least(0, float, 1),
        default=0.99,
        metavar="SHARE",
        help="share of first tokens that must match full prefill",
    )
    parser.add_argument(
        "--sure",
        action="store_true",
        help="require the lower end of the confidence interval to reach the target; takes hundreds of prompts",
    )
    parser.add_argument(
        "--ratios", type=at_least(0, float, 1), nargs="+", metavar="R", help="ratios to try (default: 0.02 to 0.6)"
    )
    parser.add_argument(
        "--prompts", type=at_least(1), default=100, metavar="N", help="maximum number of prompts (default: 100)"
    )
    parser.add_argument("--top-k", type=at_least(2), default=4, metavar="K", help="chunks per prompt (default: 4)")
    parser.add_argument(
        "--around",
        type=at_least(0),
        default=0,
        metavar="N",
        help="with --questions: neighbours to retrieve with each chunk (default: 0)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, store the result beside the chunks, and print the curve."""
    from kvrag.control.calibrate import GRID

    with open_engine(args, is_warmed=True) as engine:
        prompts = _retrieve(engine, args) if args.questions else None
        with progress("calibrating", args.json) as report:
            found = engine.calibrate(
                prompts,
                policy=args.policy,
                target=args.target,
                sure=args.sure,
                ratios=args.ratios or GRID,
                count=args.prompts,
                chunks=args.top_k,
                progress=report,
            )
        where = engine.store.stats().path
    if args.json:
        print(json.dumps(asdict(found) | {"store": where, "verdict": _verdict(found)}))
        return 0
    _print(found, where)
    if not args.questions:
        say("the questions were generated from the chunks: pass your own with --questions FILE")
    return 0


def _retrieve(engine: BlendEngine, args: argparse.Namespace) -> Sequence[str | Messages]:
    lines = (line.strip() for line in args.questions.read_text("utf-8", "replace").splitlines())
    questions = list(dict.fromkeys(line for line in lines if line))[: args.prompts]
    if not questions:
        raise PromptError(f"{args.questions} contains no questions: write one per line")
    prompts: list[str | Messages] = []
    with open_index(engine, args.namespace) as index:
        require_chunks(index)
        for question in questions:
            hits = index.search(question, args.top_k, args.around)
            prompts.append(as_prompt(engine, [{"role": "user", "content": stuff(engine, question, hits)}]))
    return prompts


def _print(found: Calibration, where: str) -> None:
    print(f"first tokens that match full prefill, policy {found.policy}, {found.curve[0].prompts} prompts\n")
    print(f"{'ratio':>6}{'agree':>9}   95 % interval{'later tokens':>16}")
    for point in found.curve:
        later = f"{point.following / point.tokens:.1%} of {point.tokens}" if point.tokens else ""
        mark = "  <-" if point.ratio == found.ratio else ""
        interval = f"{point.low:.1%} - {point.high:.1%}"
        print(f"{point.ratio:>6g}{point.share:>9.1%}   {interval:<15}{later:>14}{mark}")
    for note in found.notes:
        say(note)
    print(f"\n{_verdict(found)}; stored in {where}")


def _verdict(found: Calibration) -> str:
    by = "with 95 % confidence" if found.sure else "by the measured share"
    if found.ratio is None:
        return f"full: no ratio reaches {found.target:.1%} {by}; full prefill is now the default"
    return f"ratio {found.ratio:g} reaches {found.target:.1%} {by} and is now the default"
