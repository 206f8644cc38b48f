"""`kvrag calibrate`: measure at once how much recompute a model needs on a corpus, which its answers tell in time."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrag.cli.common import (
    add_engine_arguments,
    add_number,
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
from kvrag.types import Messages

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag calibrate`."""
    add_engine_arguments(parser)
    questions = "one question per line; chunks are retrieved as in `kvrag ask` (default: prompts made from the chunks)"
    parser.add_argument("--questions", type=existing_path, metavar="FILE", help=questions)
    add_number(parser, "--prompts", 20, "maximum number of prompts", least=1)
    minutes = "measure no further prompt after N minutes (default: no limit)"
    parser.add_argument("--minutes", type=at_least(0, float), default=math.inf, metavar="N", help=minutes)
    add_number(parser, "--seed", 0, "seed of the prompts made without --questions")
    add_number(parser, "--top-k", 4, "chunks per prompt", least=2, most=100)
    add_number(parser, "--around", 0, "with --questions: neighbours to retrieve with each chunk")
    parser.add_argument("--reset", action="store_true", help="delete what is known, and measure nothing")


def run(args: argparse.Namespace) -> int:
    """Measure, store the counts beside the chunks, and print what follows; or delete them."""
    with open_engine(args, is_warmed=True) as engine, open_index(engine.store, args.namespace) as index:
        store = engine.store.stats().path
        if args.reset:
            engine.reset_calibration()
            said = f"nothing is known of the model's answers in {store} any more: the defaults hold again"
            print(json.dumps({"store": store}) if args.json else said)
            return 0
        if not args.questions and not args.json:
            say("making prompts from the chunks: pass your own questions with --questions FILE")
        with progress("calibrating", args.json) as report:
            found = engine.calibrate(
                _retrieve(engine, index, args) if args.questions else None,
                namespace=args.namespace,
                count=args.prompts,
                chunks=args.top_k,
                search=text_search(index) if len(index) else None,
                seed=args.seed,
                limit_s=60 * args.minutes,
                progress=report,
            )
    print(json.dumps({"store": store, **found.to_dict()}) if args.json else found)
    return 0


def _retrieve(engine: BlendEngine, index: ChunkIndex, args: argparse.Namespace) -> Sequence[str | Messages]:
    questions = read_questions(args.questions)[: args.prompts]
    require_chunks(index)
    return [as_prompt(engine, [retrieve(engine, index, question, args)[1]]) for question in questions]
