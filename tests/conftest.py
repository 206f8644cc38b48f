"""Everything offline and on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import defaults  # noqa: F401  before imports that read the environment
import pytest
from blending import CHUNKS, LayOut, laying_out
from defaults import is_sure, learning, not_by_the_clock, pytest_collection_finish  # noqa: F401
from places import Memory
from servers import s3  # noqa: F401
from tiny import *  # noqa: F403

from kvrag import BlendEngine

ROOT = Path(__file__).parents[1]
SLOW = {ROOT / "tests" / "slow", ROOT / "benchmarks"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the tests of that folder, those that need a server, and those of the benchmarks."""
    for item in items:
        if SLOW & set(item.path.parents) or "s3" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """A bucket that needs no server."""
    memory = Memory()
    monkeypatch.setattr("kvrag.store.objects.S3Store", memory)
    return memory


@pytest.fixture
def lay_out(engine: BlendEngine) -> Iterator[LayOut]:
    """Of CHUNKS, which are warmed."""
    engine.warm(CHUNKS)
    with laying_out(engine) as lay_out:
        yield lay_out


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Deny access to a file, or to all in a folder: tests may run as root, whom permissions do not stop."""
    forbidden: dict[str, bool] = {}  # with whether it is a folder

    def denying(call: Callable[..., Any], is_listing: bool) -> Callable[..., Any]:
        def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
            itself = forbidden.get(str(path))
            if itself is False or (itself and is_listing) or any(str(path).startswith(f"{one}/") for one in forbidden):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **kwargs)

        return checked

    for name in ("scandir", "listdir", "stat", "lstat"):
        monkeypatch.setattr(os, name, denying(getattr(os, name), name in ("scandir", "listdir")))
    return lambda path: forbidden.update({str(path): path.is_dir()})
