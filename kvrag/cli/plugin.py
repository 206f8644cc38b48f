"""Commands of packages that are installed apart, found by their entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from kvrag.errors import KvragError


def find(group: str, name: str, needing: str) -> Any:
    """Return what the package GROUP-kvrag has under this name in the group `kvrag.GROUP` of its entry points.

    Raises:
        KvragError: The package is not installed. `needing` is the option or command that needs it.
    """
    for entry_point in entry_points(group=f"kvrag.{group}", name=name):
        return entry_point.load()
    raise KvragError(f"{needing} needs {group}-kvrag: pip install {group}-kvrag")
