"""The command `kvrag`: run a subcommand and report errors in one line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from kvrag import __version__
from kvrag.errors import KvragError, out_of_memory

_COMMANDS = {  # modules of kvrag.cli, with their help
    "warm": "encode files and folders into a store",
    "ask": "answer a question about the warmed documents",
    "explain": "explain what was reused of a prompt, and why not more",
    "serve": "serve a model and a corpus with OpenAI's API",
    "store": "show, check or clean up stores",
    "verify": "test that blending is exact on your model, most strictly in float32",
}
_EPILOG = """\
with your own files:    kvrag warm docs/ --model Qwen/Qwen2.5-1.5B-Instruct
                        kvrag ask "Who founded the company?" --model Qwen/Qwen2.5-1.5B-Instruct
options of a command:   kvrag COMMAND --help
"""


class Parser(argparse.ArgumentParser):
    """Parser that reports wrong arguments in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with an error."""
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _parser(argv: Sequence[str]) -> Parser:
    """Return a parser with all commands, but only the options of the one in `argv`: importing all takes seconds."""
    parser = Parser(
        prog="kvrag",
        description="Faster RAG: chunks are encoded once and blended at query time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"kvrag {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in argv if not word.startswith("-")), "")
    for name, help_text in _COMMANDS.items():
        add_command(subparsers, name, f"kvrag.cli.{name}", help_text, name == wanted)
    return parser


def add_command(subparsers: Any, name: str, module: str, help_text: str, is_wanted: bool) -> None:
    """Add a command that a module runs, with its options only if it `is_wanted`."""
    leaf = subparsers.add_parser(name, help=help_text, description=help_text)
    leaf.set_defaults(module=module, parser=leaf)
    if is_wanted:
        leaf.add_argument("--json", action="store_true", help="print only JSON on stdout: the result")
        import_module(module).add_arguments(leaf)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 on success, 1 on failure, 130 on interruption. Wrong usage exits with 2, like argparse.
    """
    return execute(_parser, argv)


def execute(make_parser: Callable[[Sequence[str]], Parser], argv: Sequence[str] | None) -> int:
    """Run the command that the arguments name, and report errors in one line. Returns as `main`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        parser = make_parser(argv)
        if not argv:
            parser.print_help()
            return 0
        args = parser.parse_args(argv)
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # bars of transformers, too: they would disturb ours
        return int(import_module(args.module).run(args))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # closed pipe, for example by `head`
        return 1
    except (KvragError, OSError) as error:
        return _fail(str(error), 1)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _fail("out of memory: use a smaller model, --dtype bfloat16 or --device cpu", 1)
    except KeyboardInterrupt as error:
        return _fail(str(error) or "interrupted", 128 + signal.SIGINT)


def _fail(message: str, code: int) -> int:
    print("kvrag: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
