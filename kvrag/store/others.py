"""Other stores nearby, written for another model, dtype or codec. They are read only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvrag.store.base import MANIFEST
from kvrag.store.manifest import Manifest
from kvrag.store.owner import OWNER, check_layout, read_owner
from kvrag.store.protocol import Entry

_MOST = 20  # folders, the most recent first


@dataclass(frozen=True)
class OtherStore:
    """A store other than the engine's own."""

    path: Path

    @cached_property
    def parts(self) -> dict[str, str]:
        """Return the parts of its fingerprint; see `Fingerprint.parts`.

        Raises:
            StoreError: The fingerprint cannot be read.
        """
        return read_owner(self.path)

    def entries(self) -> list[Entry]:
        """Return all texts of all namespaces.

        Raises:
            StoreError: The store cannot be opened, or has another version's format.
        """
        check_layout(self.path)
        with closing(Manifest(self.path / MANIFEST, read_only=True)) as manifest:
            return list(manifest.entries(0))


def other_stores(path: Path) -> Iterator[OtherStore]:
    """Yield the other stores in the parent folder of `path` and in the default store folder that can be read."""
    folders: list[tuple[float, Path]] = []
    for root in {path.parent, Path.home() / ".cache" / "kvrag"}:
        with suppress(OSError):
            for folder in root.iterdir():
                with suppress(OSError):
                    if folder != path:
                        folders.append((-(folder / OWNER).stat().st_mtime, folder))
    for _, folder in sorted(folders)[:_MOST]:
        yield OtherStore(folder)
