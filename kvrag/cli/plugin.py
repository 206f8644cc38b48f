"""`--ray`: its address, and the commands of ray-kvrag, found by their entry points."""

from __future__ import annotations

import argparse
import re
from importlib.metadata import entry_points
from typing import Any

from kvrag.errors import KvragError

HERE = "here"
"""`--ray` without an address."""

ADDRESS = re.compile(r"(ray://)?(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


def find(name: str) -> Any:
    """Return the command of ray-kvrag with this name; raises KvragError if the package is not installed."""
    for entry_point in entry_points(group="kvrag.ray", name=name):
        return entry_point.load()
    raise KvragError("--ray needs ray-kvrag: pip install ray-kvrag")


def add_ray_argument(parser: argparse._ActionsContainer, about: str) -> None:
    """Add `--ray [ADDRESS]`."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const=HERE,
        type=_address,
        metavar="ADDRESS",
        help=f"{about}: HOST:PORT of the cluster that this machine belongs to, or ray://HOST:PORT of another; without "
        "ADDRESS the one in RAY_ADDRESS, the one running here, or a new one on this machine",
    )


def _address(text: str) -> str:
    if text not in (HERE, "auto") and not ADDRESS.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"must be an address HOST:PORT or ray://HOST:PORT, got {text!r}: put --ray at the end if it has none"
        )
    return text
