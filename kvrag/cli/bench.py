"""`kvrag bench`: time to the first token on this machine, in full and blended."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from kvrag.cli.common import progress
from kvrag.cli.demo import busy_note, cpu, speed_lines, warn_if_busy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench`."""
    about = "shape of the model, whose weights are random: qwen2.5-0.5b (default), qwen2.5-1.5b or llama-3.1-8b"
    parser.add_argument("--model", default="qwen2.5-0.5b", help=about)


def run(args: argparse.Namespace) -> int:
    """Print the speed-up on a model of that shape."""
    started = cpu()
    from kvrag.cli.speed import measure

    warn_if_busy(started)
    started = cpu()
    with progress("measuring", args.json, "tokens") as show:
        result = measure(args.model, show)
    print(json.dumps(asdict(result)) if args.json else "\n".join(speed_lines(result, busy_note(started, cpu()))))
    return 0
