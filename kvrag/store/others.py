"""The stores around one: what was warmed for another model, dtype or codec lies there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvrag.errors import StoreError
from kvrag.store.files import _OWNER, FileStore
from kvrag.store.protocol import Entry

_MOST = 20  # folders, the latest


@dataclass(frozen=True)
class OtherStore:
    """A store that is not ours."""

    path: Path

    @cached_property
    def parts(self) -> dict[str, str]:
        """Of its fingerprint; see `Fingerprint.parts`.

        Raises:
            StoreError: They cannot be read.
        """
        owner = self.path / _OWNER
        try:
            return dict(json.loads(owner.read_text()).items())
        except (OSError, ValueError, AttributeError) as error:
            raise StoreError(f"cannot read {owner}: {error}") from error

    def entries(self) -> list[Entry]:
        """All its chunks.

        Raises:
            StoreError: It cannot be opened.
        """
        with closing(FileStore(self.path)) as store:
            return list(store.entries(0))


def other_stores(path: Path) -> Iterator[OtherStore]:
    """Those in the folder that holds the store `path`, and those that are used where no store is given."""
    roots = {path.parent, Path.home() / ".cache" / "kvrag"}
    owners = [owner for root in roots for owner in root.glob(f"*/{_OWNER}") if owner.parent != path]
    for owner in sorted(owners, key=lambda owner: (-owner.stat().st_mtime, owner))[:_MOST]:
        yield OtherStore(owner.parent)
