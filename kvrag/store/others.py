"""Other stores nearby, written for another model, dtype or codec. They are read only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvrag.store.files import MANIFEST, OWNER, check_layout, read_owner
from kvrag.store.manifest import Manifest
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
    """Yield the other stores in the parent folder of `path` and in the default store folder."""
    roots = {path.parent, Path.home() / ".cache" / "kvrag"}
    owners = [owner for root in roots for owner in root.glob(f"*/{OWNER}") if owner.parent != path]
    for owner in sorted(owners, key=lambda owner: (-owner.stat().st_mtime, owner))[:_MOST]:
        yield OtherStore(owner.parent)
