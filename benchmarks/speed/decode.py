"""Decoding speed: several answers together, and one; measured by `kvrag.bench.decode`."""

from __future__ import annotations

import argparse
import json
import sys

from kvrag.backend.transformers.shapes import random_model
from kvrag.bench.decode import ROWS, measure
from kvrag.cli.bench import add_number, add_shape
from kvrag.cli.common import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    parser.add_argument("--rows", type=at_least(1), default=ROWS, metavar="N", help="answers together (default: 8)")
    add_number(parser, "--prompt-tokens", 96, "tokens of the shortest prompt")
    parser.add_argument(
        "--answer-tokens", type=at_least(2), default=24, metavar="N", help="tokens of an answer (default: 24)"
    )
    parser.add_argument("--compiled", action="store_true", help="also measure compiled decode steps (torch.compile)")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    sizes = (args.rows, args.prompt_tokens, args.answer_tokens, args.repeats)
    print(f"building a random model of {args.model}'s shape", file=sys.stderr, flush=True)
    net = random_model(args.model, args.layers)
    rates = measure(net, *sizes, args.compiled, lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(rates))
        return 0
    print(", ".join(f"{name} {value}" for name, value in rates["settings"].items()))
    print(f"\nmodel.generate, one answer {rates['generate']:>10.1f} tokens/s")
    print(f"kvrag, one answer {rates['alone']:>19.1f} tokens/s   {rates['alone_to_generate']:.2f}x model.generate")
    together = f"kvrag, {args.rows} answers together"
    print(f"{together:<26} {rates['together']:>10.1f} tokens/s   {rates['together_to_alone']:.2f}x one answer")
    if args.compiled:
        ratio = f"{rates['compiled_alone_to_alone']:.2f}x"
        print(f"compiled, one answer {rates['compiled_alone']:>16.1f} tokens/s   {ratio}")
        together, ratio = f"compiled, {args.rows} together", f"{rates['compiled_together_to_together']:.2f}x"
        print(f"{together:<26} {rates['compiled_together']:>10.1f} tokens/s   {ratio}")
    return 0
