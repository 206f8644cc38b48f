"""The command `kvrag`: runs a subcommand's module and reports errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from kvrag import __version__
from kvrag.errors import KvragError, out_of_memory

_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("kvrag.cli.demo", "see it work offline, in about a minute"),
    "warm": ("kvrag.cli.warm", "encode files and folders into a store"),
    "ask": ("kvrag.cli.ask", "ask a question about what was warmed"),
    "chat": ("kvrag.cli.chat", "ask several questions as a conversation"),
    "explain": ("kvrag.cli.explain", "show what was reused of a prompt, and why not more"),
    "serve": ("kvrag.cli.serve", "serve a model and a corpus over OpenAI's API"),
    "calibrate": ("kvrag.cli.calibrate", "find how much to recompute on your model and corpus"),
    "estimate": ("kvrag.cli.estimate", "estimate disk usage before you ingest"),
    "store": ("kvrag.cli.store", "show what a store holds, check it, clean it up"),
    "verify": ("kvrag.cli.verify", "test that blending is exact on your model"),
    "bench ttft": ("kvrag.bench.ttft", "measure the time to the first token"),
    "bench chat": ("kvrag.bench.chat", "measure the time to the first token over the turns of a conversation"),
    "bench quality": ("kvrag.cli.quality", "measure which answers stay right, per policy and ratio"),
    "bench simulate": ("kvrag.bench.simulate", "show where reuse wins and where it loses, by a cost model"),
    "bench ingest": ("kvrag.bench.ingest", "measure how fast chunks are encoded"),
    "bench serve": ("kvrag.bench.load", "load a running server with many clients at once"),
    "bench match": ("kvrag.bench.match", "measure how fast stored chunks are found in a prompt"),
    "bench codec": ("kvrag.bench.codec", "measure what 8 and 4 bits cost and save"),
}
_GROUPS = {"bench": "measure speed on models of real shapes with random weights, and quality on real ones"}
_EPILOG = """\
first:                  kvrag demo
with your own files:    kvrag warm docs/ --model Qwen/Qwen2.5-1.5B-Instruct
                        kvrag ask "Who founded the company?" --model Qwen/Qwen2.5-1.5B-Instruct
options of a command:   kvrag COMMAND --help
"""


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")

    def unknown(self, arguments: Sequence[str]) -> NoReturn:
        """Exit with an error for arguments that the command does not know."""
        option = next((argument.partition("=")[0] for argument in arguments if argument.startswith("-")), "")
        if not option:
            self.error(f"unexpected {' '.join(arguments)!r}: put quotes around what has spaces")
        near = get_close_matches(option, [known for action in self._actions for known in action.option_strings], 1)
        self.error(f"there is no option {option}" + (f": did you mean {near[0]}?" if near else ""))


def _parser(argv: Sequence[str]) -> _Parser:
    """Return a parser with all commands, but only the options of the one given: importing the others takes seconds."""
    parser = _Parser(
        prog="kvrag",
        description="Faster RAG: chunks are encoded once and blended at query time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        leaf.set_defaults(module=module, parser=leaf)
        if wanted:
            leaf.add_argument("--json", action="store_true", help="print only JSON on stdout: the result")
            import_module(module).add_arguments(leaf)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1 if it failed; 130 if it was interrupted. Wrong usage exits with 2, as argparse does.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args, unknown = _parser(argv).parse_known_args(argv)
        if unknown:
            args.parser.unknown(unknown)
        # progress bars of other libraries would run into ours
        from kvrag.backend.transformers.loading import silence

        silence()
        return int(import_module(args.module).run(args))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the pipe is closed, as by `head`
        return 1
    except (KvragError, OSError) as error:
        return _fail(str(error), 1)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not out_of_memory(error):
            raise
        return _fail("out of memory: take a smaller model, --dtype bfloat16 or --device cpu", 1)
    except KeyboardInterrupt as error:
        return _fail(str(error) or "interrupted", 130)


def _fail(message: str, code: int) -> int:
    print("kvrag: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
