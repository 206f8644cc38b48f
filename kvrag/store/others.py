"""The stores around one: what was warmed for another model, dtype or codec lies there. Nothing is written to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvrag.store.files import MANIFEST, OWNER, check_layout, read_owner
from kvrag.store.manifest import Manifest
from kvrag.store.protocol import Entry

_MOST = 20  # folders, the latest


@dataclass(frozen=True)
class OtherStore:
    """A store that is not ours."""

    path: Path

    @cached_property
    def parts(self) -> dict[str, str]:
        """Parts of its fingerprint; see `Fingerprint.parts`.

        Raises:
            StoreError: They cannot be read.
        """
        return read_owner(self.path)

    def entries(self) -> list[Entry]:
        """Return all its texts, of all namespaces.

        Raises:
            StoreError: It cannot be opened, or another version wrote it.
        """
        check_layout(self.path)
        with closing(Manifest(self.path / MANIFEST, read_only=True)) as manifest:
            return list(manifest.entries(0))


def other_stores(path: Path) -> Iterator[OtherStore]:
    """Yield those in the folder that holds the store `path`, and those that are used where no store is given."""
    roots = {path.parent, Path.home() / ".cache" / "kvrag"}
    owners = [owner for root in roots for owner in root.glob(f"*/{OWNER}") if owner.parent != path]
    for owner in sorted(owners, key=lambda owner: (-owner.stat().st_mtime, owner))[:_MOST]:
        yield OtherStore(owner.parent)
