"""The default stores of all models, under `~/.cache/kvrag`: what is there, and deleting what nothing uses."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvrag.errors import StoreError
from kvrag.store.base import MANIFEST
from kvrag.store.owner import codec_of, read_owner
from kvrag.store.schema import alone_with

_SHARED = "shared"
"""Folder of the local copies of shared stores."""


@dataclass(frozen=True, slots=True)
class Cached:
    """A folder under `~/.cache/kvrag`.

    Attributes:
        bytes: Size of all files in it.
        used: Time of the last use, in seconds since 1970.
        problem: Why it is not a store that this version can read; such folders have no model.
    """

    path: Path
    bytes: int
    used: float
    model: str = ""
    dtype: str = ""
    codec: str = ""
    problem: str = ""

    @property
    def unused_days(self) -> float:
        """Return the days since the last use."""
        return (time.time() - self.used) / 86400


def default_folder() -> Path:
    """Return the folder of the default stores."""
    return Path.home() / ".cache" / "kvrag"


def cached() -> list[Cached]:
    """Return the default stores and the local copies of shared stores, the largest first."""
    shared = default_folder() / _SHARED
    paths = [path for place in (shared.parent, shared) for path in place.glob("*/") if path != shared]
    return sorted(map(_look_at, paths), key=lambda found: -found.bytes)


def _look_at(path: Path) -> Cached:
    size, used = 0, path.stat().st_mtime
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # deleted meanwhile
                state = os.lstat(os.path.join(parent, name))
                size += state.st_size
                used = max(used, state.st_mtime)
    try:
        owner = read_owner(path) or read_owner(path / "local")
        if not owner or not (path / MANIFEST).is_file():
            raise StoreError(f"{path} is not a store")
    except StoreError as error:
        return Cached(path, size, used, problem=str(error))
    return Cached(path, size, used, json.loads(owner["model"]), json.loads(owner["dtype"]), codec_of(owner))


def delete(store: Cached) -> bool:
    """Delete a store, unless a process has it open; return whether it was deleted."""
    with alone_with(store.path / MANIFEST) as is_free:
        if is_free:  # under another name, a new process does not find half of it
            gone = store.path.rename(store.path.with_name(f".deleted-{uuid.uuid4().hex}"))
    if is_free:
        shutil.rmtree(gone)
    return is_free
