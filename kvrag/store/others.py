"""Other stores nearby, written for another model, dtype or codec. They are read only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from kvrag.store.base import MANIFEST
from kvrag.store.manifest import Manifest
from kvrag.store.owner import OWNER
from kvrag.store.protocol import Entry

_MOST = 20  # folders, the most recent first


def other_stores(path: Path) -> Iterator[Path]:
    """Yield the other stores in the parent folder of `path` and in the default store folder that can be read."""
    folders: list[tuple[float, Path]] = []
    for root in {path.parent, Path.home() / ".cache" / "kvrag"}:
        with suppress(OSError):
            for folder in root.iterdir():
                with suppress(OSError):
                    if folder != path:
                        folders.append((-(folder / OWNER).stat().st_mtime, folder))
    for _, folder in sorted(folders)[:_MOST]:
        yield folder


def entries_of(folder: Path) -> list[Entry]:
    """Return all texts of all namespaces of a store; raises StoreError."""
    with closing(Manifest(folder / MANIFEST, read_only=True)) as manifest:
        return list(manifest.entries(0))
