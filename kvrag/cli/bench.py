"""`kvrag bench`: time to the first token on this machine, in full and blended."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from kvrag.cli.common import say
from kvrag.cli.demo import busy_note, cpu, speed_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench`."""
    from kvrag.backend.transformers.shapes import SHAPES

    about = "shape of the model, whose weights are random (default: qwen2.5-0.5b)"
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=list(SHAPES), help=about)


def run(args: argparse.Namespace) -> int:
    """Print the speed-up on a model of that shape."""
    from kvrag.cli.speed import measure

    say("measuring; takes about a minute")
    started = cpu()
    result = measure(args.model)
    print(json.dumps(asdict(result)) if args.json else "\n".join(speed_lines(result, busy_note(started, cpu()))))
    return 0
