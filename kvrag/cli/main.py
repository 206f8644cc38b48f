"""The command `kvrag`: finds the command's module, runs it, and turns what goes wrong into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvrag import __version__
from kvrag.errors import KvragError

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("kvrag.cli.demo", "see it work, offline, in about a minute"),
    "warm": ("kvrag.cli.warm", "encode files and folders into a store"),
    "ask": ("kvrag.cli.ask", "ask a question about what was warmed"),
    "chat": ("kvrag.cli.chat", "the same as a conversation"),
    "calibrate": ("kvrag.cli.calibrate", "find how much to recompute on your model and corpus"),
    "estimate": ("kvrag.cli.estimate", "how many bytes a corpus will take, before it takes them"),
    "store": ("kvrag.cli.store", "look into a store, check it, clean it up"),
    "verify": ("kvrag.cli.verify", "test that blending is exact on your model"),
    "bench ttft": ("kvrag.bench.ttft", "measure the time to the first token"),
    "bench quality": ("kvrag.cli.quality", "measure which answers survive, per policy and ratio"),
    "bench simulate": ("kvrag.bench.simulate", "where reuse wins and where it loses, by a cost model"),
    "bench ingest": ("kvrag.bench.ingest", "measure how fast chunks are encoded"),
    "bench codec": ("kvrag.bench.codec", "measure what 8 and 4 bits cost and save"),
}
_GROUPS = {"bench": "measure speed on models of real shapes with random weights, and quality on real ones"}


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """All names, but the arguments of the wanted command only: importing the others would cost seconds."""
    parser = argparse.ArgumentParser(
        prog="kvrag", description="RAG several times sooner: chunks encoded once, blended at query time."
    )
    parser.add_argument("-V", "--version", action="version", version=f"kvrag {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups: dict[str, Any] = {}
    for command, (module, help_text) in _COMMANDS.items():
        name, _, sub = command.partition(" ")
        wanted = name in argv
        if sub:
            if name not in groups:
                group = subparsers.add_parser(name, help=_GROUPS[name], description=_GROUPS[name])
                groups[name] = group.add_subparsers(dest="subcommand", required=True, metavar="WHAT")
            wanted = wanted and sub in argv
            leaf = groups[name].add_parser(sub, help=help_text, description=help_text)
        else:
            leaf = subparsers.add_parser(name, help=help_text, description=help_text)
        leaf.set_defaults(module=module)
        if wanted:
            leaf.add_argument("--json", action="store_true", help="the result as JSON on stdout, nothing else there")
            import_module(module).add_arguments(leaf)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1 if it failed; 130 if it was interrupted. Wrong usage exits with 2, as argparse does.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser(argv).parse_args(argv)
        # bars of other libraries would run into ours, and into whatever reads stderr
        from kvrag.model.loading import silence

        silence()
        return int(import_module(args.module).run(args))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has left, as `head` does
        return 1
    except (KvragError, OSError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt as error:
        return _fail(str(error) or "interrupted", 130)


def _fail(message: str, code: int) -> int:
    print("kvrag: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
