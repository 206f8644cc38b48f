"""`kvrag verify`: run the correctness gate on the user's own model."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial

from kvrag.backend.hub import check_model
from kvrag.cli.common import add_model_arguments, add_setting, at_least, load_model, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag verify`."""
    add_model_arguments(parser)
    add_setting(parser, "codec", "codec of stored chunks, to see its error")
    parser.add_argument("--chunk-tokens", type=at_least(1), metavar="N", help="length of the four test chunks")
    parser.add_argument("--allow-unverified", action="store_true", help="allow an untested model family")


def run(args: argparse.Namespace) -> int:
    """Print the checks; return 1 if one failed."""
    check_model(args.model)
    from kvrag.engine import BlendEngine
    from kvrag.inspect.gate import Check, verify

    model = load_model(args, allow_unverified=args.allow_unverified)
    facts = f"{model.fingerprint.dtype}, {model.num_layers} layers, window {model.context_window}, codec {args.codec}"
    show, checks = say if args.json else partial(print, flush=True), list[Check]()
    show(f"{model.name} ({facts})\n")
    for check in verify(partial(BlendEngine, model, codec=args.codec), args.chunk_tokens):
        sign = ">=" if check.detail else "<="
        line = f"{check.value:9.3g} {check.detail:6} {sign} {check.limit:.3g}"
        show(f"{'ok  ' if check.passed else 'FAIL'} {check.name:52} {line}")
        checks.append(check)
    passed = all(check.passed for check in checks)
    if args.json:
        print(json.dumps({"model": model.name, "passed": passed, "checks": [asdict(check) for check in checks]}))
    elif passed:
        print("\nall checks passed")
    elif args.codec == "native":
        print("\ndo not blend this model: please report it with this table")
    else:
        print(f"\ncodec {args.codec} failed: try another one, and --codec native to test the model alone")
    return 0 if passed else 1
