"""The log of a shared store: a base, which is a copy of the manifest, and the changes since.

Every machine applies the changes to a manifest of its own. One small object, the head, names base and changes in order.
It is only replaced by a conditional write, so machines take turns and agree on one order. Bases and changes have unique
names and are never replaced. A machine whose last change is not named starts again from the base: the store was
deleted, restored from a backup, or compacted while the machine was off. Compacting erases the token ids in changes.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from kvrag.errors import StoreError
from kvrag.store.manifest import OPERATIONS, Manifest, ManifestRow, Removed

if TYPE_CHECKING:
    from kvrag.store.objects import ObjectStore, Tag

logger = logging.getLogger("kvrag")

HEAD = "head.json"
_LAST = "log last"  # counter of the manifest: number of the last change in it
_BATCH = 64  # changes read at once
_ROUNDS = 1000  # of replacing the head before other machines do
_FAILURES = 5  # of following one head


@dataclass(frozen=True)
class _Head:
    """The content of the head: numbers of the base (0 = an empty manifest), of its last change, and of changes.

    Changes before the base are kept for machines that have not applied them yet.
    """

    base: int
    after: int
    changes: list[int]
    tag: Tag | None  # None = there is no head

    @property
    def order(self) -> list[int]:
        """The numbers that a manifest's last change can have, in order."""
        return self.changes if self.after in self.changes else [self.after, *self.changes]


class _TakenError(Exception):
    """Another machine has replaced the head meanwhile."""


class Log:
    """The log of one bucket, applied to a manifest. Thread-safe; the processes of a machine share the manifest."""

    def __init__(
        self,
        remote: ObjectStore,
        manifest: Manifest,
        removed: Callable[[Sequence[str]], None],
        restoring: Callable[[], None],
        appended: Callable[[int, float], None],
    ) -> None:
        """Read nothing yet.

        Args:
            removed: Called with the keys of chunks that changes have removed.
            restoring: Called before the manifest starts again from the base; may raise StoreError to prevent it.
            appended: Called after this machine has appended a change, with the number of changes in the head, and a
                time at which the manifest included all changes before it.
        """
        self._remote, self._manifest = remote, manifest
        self._removed, self._restoring, self._appended = removed, restoring, appended
        self._pulling = threading.Lock()

    @property
    def last(self) -> int:
        """Number of the last change in the manifest."""
        return self._manifest.counter(_LAST)

    # ---------------------------------------------------------------- reading

    def _head(self) -> _Head:
        content, tag = self._remote.look(HEAD)
        if content is None:
            return _Head(0, 0, [], None)
        read = _unpack(content, self._where(HEAD))
        with _noticing_damage(self._where(HEAD)):
            base, after, *changes = map(int, (read["base"], read["after"], *read["changes"]))
        return _Head(base, after, changes, tag)

    def pull(self) -> _Head:
        """Apply the changes that the manifest lacks; return the head that it has reached. Raises StoreError."""
        with self._pulling:
            failures, failed = 0, None
            while failures < _FAILURES:
                last = self.last  # first: a head that was read before another thread's change does not name that
                head = self._head()
                if last in head.order:
                    wanted = head.order[head.order.index(last) + 1 :]
                    if self._follow(last, wanted[:_BATCH]):
                        if len(wanted) <= _BATCH:
                            return head
                        continue
                elif self.last == last:
                    self._restore(head)
                # a part may be missing because a newer head has replaced it; or the base is not what the head says
                failures, failed = failures + 1 if head == failed else 1, head
            raise _damaged(self._where("changes"))

    def _follow(self, last: int, numbers: Sequence[int]) -> bool:
        """Apply these changes, which follow the last one; return False if one is missing."""
        if not numbers:
            return True
        names = list(map(_change, numbers))
        contents = self._remote.read(names)
        if None in contents:
            return False
        removed: list[Removed] = []
        with self._manifest.transaction():
            if self.last != last:
                return True  # another process has applied them
            for number, name, content in zip(numbers, names, contents, strict=True):
                with _noticing_damage(self._where(name)):
                    removed += self._apply(_unpack(content or b"", self._where(name)))[1]
                self._manifest.set_counter(_LAST, number)
        self._removed([key for key, _ in removed])
        return True

    def _restore(self, head: _Head) -> None:
        """Make the manifest a copy of the base, unless that is missing."""
        self._restoring()
        logger.info("%s: starting from base %d", self._remote.url, head.base)
        content, name = None, _base(head.base)
        if head.base:
            try:
                packed = b"".join(self._remote.open(name)[1])
            except FileNotFoundError:
                return
            content = _unpacked(packed, self._where(name))
        with _noticing_damage(self._where(name)):
            removed = self._manifest.restore(content)
        self._removed(removed)

    def _apply(self, operation: Mapping[str, Any]) -> tuple[Any, Sequence[Removed]]:
        """Apply one change within the current transaction; return its result and the chunks that it removed."""
        fields = dict(operation)
        op = fields.pop("op")
        if op not in OPERATIONS:
            raise StoreError(f"{self._remote.url} was written by a newer version ({op}): update kvrag")
        if op == "add":
            decode, rows = base64.b64decode, fields["rows"]
            fields["rows"] = [ManifestRow._make([*row[:3], decode(row[3]), *row[4:]]) for row in rows]
        result = self._manifest.change(op, **fields)
        return result, result if op in ("hold", "remove") else ()

    # ---------------------------------------------------------------- writing

    def change(self, op: str, **fields: Any) -> Any:
        """Append a change, applied as by Manifest.change, after all that any machine appended before it.

        After a StoreError, it may or may not have been appended.
        """
        if op == "add":
            fields["rows"] = [[*row[:3], base64.b64encode(row[3]).decode(), *row[4:]] for row in fields["rows"]]  # JSON
        for attempt in range(_ROUNDS):
            mine = 1 + secrets.randbits(62)
            if attempt:
                time.sleep(random.random() * min(0.05 * attempt, 1.0))
            head = self.pull()
            try:
                # other processes of this machine must not apply it first: its result would be lost
                with self._manifest.transaction():
                    if self.last != head.order[-1]:
                        continue
                    operation = {"op": op, **fields}
                    # before it is appended: one that cannot be applied would stop all machines
                    result, removed = self._apply(operation)
                    self._manifest.set_counter(_LAST, mine)
                    started = time.monotonic()
                    self._remote.write(_change(mine), _pack(operation))
                    longer = replace(head, changes=[*head.changes, mine])
                    # it is named already if the answer to a first attempt was lost
                    if not self._swap(longer) and mine not in self._head().changes:
                        raise _TakenError
            except _TakenError:
                continue
            self._removed([key for key, _ in removed])
            self._appended(len(longer.changes), started)
            return result
        raise StoreError(f"{self._remote.url} has too many writers at the moment: try again")

    def _swap(self, head: _Head) -> bool:
        """Replace the head with this tag by this one; return False if another machine was faster."""
        content = {"base": head.base, "after": head.after, "changes": head.changes}
        return self._remote.swap(HEAD, _pack(content), head.tag)

    def compact(self, kept: int = 0) -> None:
        """Write the manifest as a new base, and delete the one before it and the changes before it, but for the last.

        Args:
            kept: Number of changes that are kept, so that most machines need no base.
        """
        self.pull()
        content, counters = self._manifest.snapshot()
        number, last = 1 + secrets.randbits(62), counters.get(_LAST, 0)
        self._remote.write(_base(number), _packed(content))
        for _ in range(_ROUNDS):
            head = self.pull()
            if head.base == number or last not in head.order:
                return  # the answer was lost; or another machine has compacted it
            first = max(0, head.order.index(last) + len(head.changes) - len(head.order) + 1 - kept)
            if self._swap(replace(head, base=number, after=last, changes=head.changes[first:])):
                self._remote.delete([_base(head.base), *map(_change, head.changes[:first])])
                return

    def leftovers(self, age: float) -> list[str]:
        """Return the names of bases and changes of at least this age that the head does not name."""
        listed = list(self._remote.listed("bases/", "changes/"))
        head = self._head()
        named = {_base(head.base), *map(_change, head.changes)}
        return [name for name, seconds in listed if seconds > age and name not in named]

    def _where(self, name: str) -> str:
        return f"{self._remote.url}/{name}"


def _change(number: int) -> str:
    return f"changes/{number:019d}"


def _base(number: int) -> str:
    return f"bases/{number:019d}"


def _packed(content: bytes) -> bytes:
    packed = zlib.compress(content, 1)
    return xxhash.xxh3_64_hexdigest(packed).encode() + packed


def _unpacked(packed: bytes, where: str) -> bytes:
    if xxhash.xxh3_64_hexdigest(packed[16:]).encode() != packed[:16]:
        raise _damaged(where)
    with _noticing_damage(where):
        return zlib.decompress(packed[16:])


def _pack(content: Mapping[str, Any]) -> bytes:
    return _packed(json.dumps(content).encode())


def _unpack(packed: bytes, where: str) -> Mapping[str, Any]:
    with _noticing_damage(where):
        return dict(json.loads(_unpacked(packed, where)))


@contextmanager
def _noticing_damage(where: str) -> Iterator[None]:
    """Raise StoreError for content in another form: a digest does not prove who wrote it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, zlib.error) as error:
        raise _damaged(where) from error


def _damaged(where: str) -> StoreError:
    return StoreError(f"{where} is damaged: run `kvrag store gc` on a machine that used the store before, or delete it")
