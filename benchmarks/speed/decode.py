"""Decoding speed: several answers together, and one; measured by `kvrag.bench.decode`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from kvrag.bench.decode import DecodeSetup, measure
from kvrag.cli.bench import add_number, add_shape
from kvrag.cli.common import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    parser.add_argument("--rows", type=at_least(1), default=8, metavar="N", help="answers together (default: 8)")
    add_number(parser, "--prompt-tokens", 96, "tokens of the shortest prompt")
    parser.add_argument(
        "--answer-tokens", type=at_least(2), default=24, metavar="N", help="tokens of an answer (default: 24)"
    )
    parser.add_argument("--compiled", action="store_true", help="also measure compiled decode steps (torch.compile)")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    given = {name: getattr(args, name) for name in DecodeSetup.__dataclass_fields__}
    result = measure(DecodeSetup(**given), progress=lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result.settings.items()))
    print(f"\nmodel.generate, one answer {result.generate:>10.1f} tokens/s")
    print(f"kvrag, one answer {result.alone:>19.1f} tokens/s   {result.alone_to_generate:.2f}x model.generate")
    together = f"kvrag, {args.rows} answers together"
    print(f"{together:<26} {result.together:>10.1f} tokens/s   {result.together_to_alone:.2f}x one answer")
    if result.compiled_alone is not None:
        print(f"compiled, one answer {result.compiled_alone:>16.1f} tokens/s   {result.compiled_alone_to_alone:.2f}x")
        together = f"compiled, {args.rows} together"
        faster = f"{result.compiled_together_to_together:.2f}x"
        print(f"{together:<26} {result.compiled_together:>10.1f} tokens/s   {faster}")
    return 0
