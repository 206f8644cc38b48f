"""`kvrag adapt`: the command of the package adapt-kvrag, which trains an adapter for encoding."""

from __future__ import annotations

import argparse
from typing import Any

from kvrag.cli.plugin import find


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag adapt`."""
    _command().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train; raises KvragError if the package is not installed."""
    return int(_command().run(args))


def _command() -> Any:
    return find("adapt", "command", "kvrag adapt")
