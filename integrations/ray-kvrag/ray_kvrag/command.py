"""The command `ray-kvrag`: `warm` and `serve` of `kvrag` on a Ray cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvrag.cli.main import Parser, add_command, execute
from ray_kvrag.cluster import ADDRESS, HERE

_COMMANDS = {
    "warm": "encode files and folders with workers on a Ray cluster",
    "serve": "serve a model and a corpus with Ray Serve",
}


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add `--address`."""
    about = (
        "HOST:PORT of the cluster that this machine belongs to, or ray://HOST:PORT of another (default: the one in "
        "RAY_ADDRESS, the one running here, or a new one on this machine)"
    )
    parser.add_argument("--address", type=_address, default=HERE, metavar="ADDRESS", help=about)


def _address(text: str) -> str:
    if text not in (HERE, "auto") and not ADDRESS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be an address HOST:PORT or ray://HOST:PORT, got {text!r}")
    return text


def _parser(argv: Sequence[str]) -> Parser:
    parser = Parser(prog="ray-kvrag", description="kvrag on a Ray cluster.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in _COMMANDS.items():
        add_command(subparsers, name, f"ray_kvrag.{name}", help_text, name in argv[:1])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns as `kvrag.cli.main.main`."""
    return execute(_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
