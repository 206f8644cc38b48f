"""`kvrag calibrate`: tune adaptive recompute so that full prefill's answers are kept on this model and corpus."""

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
from kvrag.config import DEFAULT_CONTEXT
from kvrag.types import Messages

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag calibrate`."""
    add_engine_arguments(parser)
    questions = "one question per line; chunks are retrieved as in `kvrag ask` (default: prompts made from the chunks)"
    parser.add_argument("--questions", type=existing_path, metavar="FILE", help=questions)
    add_policy_argument(parser, "as in `kvrag ask`")
    add_number(parser, "--context-tokens", DEFAULT_CONTEXT, "for engines and servers with this setting")
    add_number(parser, "--target", 0.98, "share of full prefill's answers that must be kept", most=1)
    sure = "require the lower end of the confidence interval to reach the target; takes two hundred prompts"
    parser.add_argument("--sure", action="store_true", help=sure)
    ratios = "ratios to begin with that are tried (default: 0 0.05 0.15 0.3 0.5)"
    parser.add_argument("--ratios", type=at_least(0, float, 1), nargs="+", metavar="R", help=ratios)
    add_number(parser, "--prompts", 40, "maximum number of prompts; at least 40 make a default", least=1)
    minutes = "measure no further prompt after N minutes; run again to go on (default: 10, on a GPU 2)"
    parser.add_argument("--minutes", type=at_least(0, float), metavar="N", help=minutes)
    add_number(parser, "--seed", 0, "seed of the prompts made without --questions")
    add_number(parser, "--top-k", 4, "chunks per prompt", least=2, most=100)
    add_number(parser, "--around", 0, "with --questions: neighbours to retrieve with each chunk")
    parser.add_argument("--dry-run", action="store_true", help="measure, but leave the defaults as they are")
    parser.add_argument("--reset", action="store_true", help="delete what is stored, and measure nothing")


def run(args: argparse.Namespace) -> int:
    """Measure, store the result beside the chunks, and print it; or delete the stored one."""
    from kvrag.control.calibrate import GRID

    if args.reset:
        return _reset(args)
    ratios = tuple(dict.fromkeys(args.ratios or GRID))
    with open_engine(args, is_warmed=True) as engine, open_index(engine.store, args.namespace) as index:
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
                limit_s=None if args.minutes is None else 60 * args.minutes,
                progress=report,
            )
        store = engine.store.stats().path
    is_saved = calibration.is_usable and not args.dry_run
    if args.json:
        saved = {"store": store, "saved": is_saved, "verdict": calibration.verdict}
        print(json.dumps(asdict(calibration) | saved))
    else:
        print(f"{calibration}\n" + (f"this is now the default, stored in {store}" if is_saved else "nothing was saved"))
        if not args.questions:
            say("the prompts were made from the chunks: pass your own questions with --questions FILE")
    return 130 if calibration.interrupted else 0


def _reset(args: argparse.Namespace) -> int:
    with open_engine(args, is_warmed=True) as engine:
        engine.reset_calibration()
        store = engine.store.stats().path
    said = f"no calibration in {store} any more: the defaults hold again"
    print(json.dumps({"store": store}) if args.json else said)
    return 0


def _retrieve(engine: BlendEngine, index: ChunkIndex, args: argparse.Namespace) -> Sequence[str | Messages]:
    questions = read_questions(args.questions)[: args.prompts]
    require_chunks(index)
    return [as_prompt(engine, [retrieve(engine, index, question, args)[1]]) for question in questions]
