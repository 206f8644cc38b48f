"""Writes docs/commands.md, the command line reference, from the commands' own parsers: `python docs/commands.py`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from kvrag.cli.main import _COMMANDS, _parser

_HEAD = """\
# Command line

Written by `python docs/commands.py` from what the commands say of themselves. `kvrag COMMAND --help` prints the same.

Every command takes `--json`: the result as JSON on stdout, and nothing else there. Progress and remarks go to stderr.
A command ends with 0; with 1 if it failed, and one line on stderr says why and what to do; with 2 if it was called
wrongly; with 130 if it was interrupted.
"""


def reference() -> str:
    """The whole page."""
    words = [word for command in _COMMANDS for word in command.split()]
    parser = _parser(words)  # imports what all of them need
    return "\n".join([_HEAD, *(_section(name, _leaf(parser, name.split())) for name in _COMMANDS)])


def _leaf(parser: argparse.ArgumentParser, path: list[str]) -> argparse.ArgumentParser:
    for word in path:
        subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = subparsers.choices[word]
    return parser


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    actions = [action for action in parser._actions if action.dest not in ("help", "json")]
    positional = [_value(action) for action in actions if not action.option_strings]
    usage = " ".join(["kvrag", name, *positional, "[OPTIONS]"])
    lines = [f"## kvrag {name}", "", f"{_sentence(parser.description or '')}", "", "```text", usage, "```", ""]
    if actions:
        lines += ["| | |", "|---|---|", *(f"| `{_call(action)}` | {_help(action)} |" for action in actions), ""]
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _call(action: argparse.Action) -> str:
    return " ".join([", ".join(action.option_strings), _value(action)]).strip()


def _value(action: argparse.Action) -> str:
    """What is to be typed for it; nothing for a switch."""
    if action.nargs == 0:
        return ""
    # no | in a table
    name = str(action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""))
    return (name or action.dest.upper()) + ("..." if action.nargs in ("+", "*") else "")


def _help(action: argparse.Action) -> str:
    return " ".join(_said(action)).replace("|", "\\|")


def _said(action: argparse.Action) -> Iterator[str]:
    said = (action.help or "") % {**vars(action), "prog": "kvrag"}
    if said:
        yield said
    default = action.default
    shown = default is not None and default != argparse.SUPPRESS and default is not False and default != []
    if action.option_strings and shown and "default" not in said:
        values = default if isinstance(default, (list, tuple)) else [default]
        yield f"(default: {' '.join(map(str, values))})"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(reference())
