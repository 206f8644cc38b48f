"""Command line reference, generated from the commands' parsers when the site is built."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kvrag.cli.main import _COMMANDS, _parser

_HEAD = """\
# Command line

Every command takes `--json`, which prints only the result, as JSON, on stdout. Progress and notes go to stderr. Exit
codes: 0 = success; 1 = failure, with one line on stderr that gives the reason and the remedy; 2 = wrong arguments;
130 = interrupted.
"""


def reference() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *(_section(name, command_parser(name)) for name in _COMMANDS)])


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    return next(a for a in _parser([name])._actions if isinstance(a, argparse._SubParsersAction)).choices[name]


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    about = parser.description or ""
    actions = [action for action in parser._actions if action.dest not in ("help", "json")]
    table = ["| option | meaning |", "|---|---|", *(f"| `{_call(action)}` | {_help(action)} |" for action in actions)]
    return "\n".join([f"## kvrag {name}", "", f"{about[:1].upper()}{about[1:]}.", "", *table * bool(actions), ""])


def _call(action: argparse.Action) -> str:
    return _cell(" ".join([", ".join(action.option_strings), _value(action)]).strip())


def _value(action: argparse.Action) -> str:
    """Return the placeholder of an argument; empty for a switch."""
    if action.nargs == 0:
        return ""
    name = str(action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""))
    return (name or action.dest.upper()) + ("..." if action.nargs in ("+", "*") else "")


def _help(action: argparse.Action) -> str:
    return _cell(" ".join(_meaning(action)))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")  # ends a cell of a table, in code, too


def _meaning(action: argparse.Action) -> Iterator[str]:
    about = (action.help or "") % {**vars(action), "prog": "kvrag"}
    if about:
        yield about
    default = action.default
    shown = default is not None and default != argparse.SUPPRESS and default is not False and default not in ([], "")
    if action.option_strings and shown and "default" not in about:
        values = default if isinstance(default, (list, tuple)) else [default]
        yield f"(default: {' '.join(map(str, values))})"
