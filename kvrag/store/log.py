"""The log of a shared store: numbered operations, which every machine applies to a manifest of its own.

Operation N is the object `log/N`. Creating it is atomic and fails if it exists, so all machines agree on one order, and
the manifest is a function of it. An operation names the one before it: a log that was deleted or restored from a backup
is noticed, and the manifest is rebuilt. A snapshot is the state after all operations up to a number. New machines start
from it, and operations before it are cut to their first line (`trim`), which erases the token ids in them.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import re
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import xxhash

from kvrag.errors import StoreError
from kvrag.store.manifest import OPERATIONS, Manifest, ManifestRow, Removed, called
from kvrag.store.remote import Remote
from kvrag.store.schema import CLOCK

logger = logging.getLogger("kvrag")

_TRIMMED = "trimmed"  # object with the number up to which operations have been cut
_POSITION, _LAST = "log position", "log last"  # counters of the manifest
_BATCH = 64  # operations read at once
_ROUNDS = 1000  # of creating the next operation before other machines do
_UNREAD = 5  # times that an operation which exists may not be found by the next `pull`
_REPLACED = 5  # times that a snapshot may be replaced while it is read
_CHECK_EVERY_S = 30.0

_EMPTY: Mapping[str, Any] = {"last": 0, "damaged": 0, "clock": 0, "budgets": {}, "rows": 0, "holders": 0, "scores": 0}
"""Index of a snapshot; of rows, holders and scores it has the number of parts."""

Operation = Mapping[str, Any]
"""JSON: the name of one of `OPERATIONS` as `op`, and its arguments."""


class _Entry(NamedTuple):
    """An operation as stored; None if it was cut."""

    id: int
    before: int
    operation: Operation | None


class _Replaced(StoreError):
    """A snapshot is incomplete: a newer one has replaced it."""


class _TakenError(Exception):
    """Another machine has appended an operation meanwhile."""


class Log:
    """The log of one remote, applied to a manifest. Thread-safe; the processes of a machine share the manifest."""

    def __init__(
        self,
        remote: Remote,
        manifest: Manifest,
        removed: Callable[[Sequence[str]], None],
        rebuilding: Callable[[], None],
        appended: Callable[[int, float], None],
    ) -> None:
        """Read nothing yet.

        Args:
            removed: Called with the keys of chunks that operations have removed.
            rebuilding: Called before the manifest is rebuilt; may raise StoreError to prevent it.
            appended: Called with the number of an operation that this machine has appended, and a time at which the
                manifest included all operations before it.
        """
        self._remote, self._manifest = remote, manifest
        self._removed, self._rebuilding, self._appended = removed, rebuilding, appended
        self._pulling = threading.Lock()
        self._checked = float("-inf")
        self.rebuilt = 0
        """Number of times that the manifest did not match the log and was rebuilt."""

    @property
    def position(self) -> int:
        """Number of the last operation in the manifest."""
        return self._manifest.counter(_POSITION)

    # ---------------------------------------------------------------- reading

    def pull(self) -> None:
        """Apply the operations that the manifest lacks; raises StoreError."""
        with self._pulling:
            batch, rebuilt = 1, self.rebuilt
            while True:
                if self.rebuilt > rebuilt + 3:  # snapshot and operations contradict each other
                    raise _damaged(f"the log of {self._remote.url}")
                position = self.position
                if time.monotonic() - self._checked > _CHECK_EVERY_S and not self._fits():
                    self._rebuild_from_newest()
                    continue
                entries = self._entries(range(position + 1, position + 1 + batch))
                if entries and not self._apply_all(position, entries):
                    self._rebuild_from_newest()
                elif len(entries) < batch:
                    return
                batch = min(2 * batch, _BATCH)

    def _entries(self, numbers: range) -> list[_Entry]:
        """Read the operations with these numbers, as far as they exist."""
        names = list(map(_name, numbers))
        found = takewhile(lambda pair: pair[1] is not None, zip(names, self._remote.read(names), strict=True))
        return [_decode(content, f"{self._remote.url}/{name}") for name, content in found if content is not None]

    def _apply_all(self, position: int, entries: Sequence[_Entry]) -> bool:
        """Apply operations that follow `position`; return False if they do not match the manifest or were cut."""
        removed: list[Removed] = []
        with self._manifest.transaction():
            if self.position != position:
                return True  # another process has applied them
            last, fits = self._manifest.counter(_LAST), True
            for entry in entries:
                fits = entry.before == last and entry.operation is not None
                if entry.operation is None or not fits:
                    break
                with _noticing_damage(f"{self._remote.url}/{_name(position + 1)}"):
                    removed += self._apply(entry.operation)[1]
                position, last = position + 1, entry.id
            self._manifest.set_counters({_POSITION: position, _LAST: last})
        self._note(removed)
        return fits

    def _note(self, removed: Sequence[Removed]) -> None:
        self._removed([key for key, _ in removed])

    def _apply(self, operation: Operation) -> tuple[Any, Sequence[Removed]]:
        """Apply one operation within the current transaction; return its result and the chunks that it removed."""
        fields = dict(operation)
        op = fields.pop("op")
        if op == "published":
            return None, ()  # of a retrieval index, which earlier versions shared
        if op not in OPERATIONS:
            raise StoreError(f"{self._remote.url} was written by a newer version ({op}): update kvrag")
        if op == "put":
            fields["rows"] = list(map(_row, fields["rows"]))
        result = self._manifest.change(op, **fields)
        return result, result if op in ("hold", "remove") else ()

    def _fits(self) -> bool:
        """Return whether the log has the manifest's last operation; of an empty one, whether it has no snapshot."""
        position = self.position
        self._checked = time.monotonic()
        if position == 0:
            return not self._snapshots()
        return self._is_stored(_name(position), self._manifest.counter(_LAST))

    def _is_stored(self, name: str, number: int) -> bool:
        """Return whether the operation of this name has this id."""
        (content,) = self._remote.read([name])
        return content is not None and content[:16] == b"%016x" % number

    # ---------------------------------------------------------------- writing

    def change(self, op: str, **fields: Any) -> Any:
        """Append an operation, applied as by Manifest.change, after all that any machine appended before it.

        After a StoreError, the operation may or may not have been appended.
        """
        if op == "put":
            fields["rows"] = _listed(fields["rows"])
        mine, taken = secrets.randbits(62), Counter[str]()
        for attempt in range(_ROUNDS):
            if attempt:
                time.sleep(random.random() * min(0.05 * attempt, 1.0))
            self.pull()
            try:
                # other processes of this machine must not apply it first: its result would be lost
                with self._manifest.transaction():
                    number, last = self.position + 1, self._manifest.counter(_LAST)
                    if not self._fits():
                        self._checked = float("-inf")
                        continue
                    name, operation = _name(number), {"op": op, **called(fields)}
                    # before it is appended: one that cannot be applied would stop all machines
                    result, removed = self._apply(operation)
                    self._manifest.set_counters({_POSITION: number, _LAST: mine})
                    started = time.monotonic()
                    is_mine = self._remote.create(name, _encode(mine, last, operation))
                    # it is there already if the answer to a first attempt was lost
                    if not is_mine and not self._is_stored(name, mine):
                        raise _TakenError
            except _TakenError:
                taken[name] += 1
                if taken[name] > _UNREAD:
                    raise _damaged(f"{self._remote.url}/{name}") from None
                continue
            self._note(removed)
            self._appended(number, started)
            return result
        raise StoreError(f"{self._remote.url} has too many writers at the moment: try again")

    # ---------------------------------------------------------------- snapshots

    def _snapshots(self) -> list[int]:
        """Return the numbers of complete snapshots, ascending."""
        names = self._remote.names("snapshots/")
        matches = (re.fullmatch(r"snapshots/([0-9]{12})/index", name) for name in names)
        return sorted(int(match[1]) for match in matches if match)

    def _rebuild_from_newest(self) -> None:
        """Rebuild the manifest from the newest snapshot, even if that is replaced meanwhile."""
        self._rebuilding()
        for _ in range(_REPLACED):
            try:
                return self._rebuild()
            except _Replaced:
                time.sleep(random.random())
        self._rebuild()

    def _rebuild(self) -> None:
        number = max(self._snapshots(), default=0)
        position = self.position
        logger.info("%s: starting from snapshot %d", self._remote.url, number)
        with _noticing_damage(f"{self._remote.url}/snapshots/{number:012d}"), self._manifest.transaction():
            if self.position != position:
                return  # another process has rebuilt it
            index = self._part(number, "index") if number else _EMPTY
            rows, holders, scores = (self._parts(number, kind, index) for kind in ("rows", "holders", "scores"))
            removed = self._manifest.replace(map(_row, rows), holders, scores)
            budgets = index["budgets"]
            for namespace in {*self._manifest.budgets(), *budgets}:
                self._manifest.set_budget(namespace, budgets.get(namespace))
            counters = {_POSITION: number, _LAST: index["last"], "damaged": index["damaged"], CLOCK: index["clock"]}
            self._manifest.set_counters(counters)
        self.rebuilt += 1
        self._checked = time.monotonic()
        self._note(removed)

    def _part(self, number: int, name: str) -> Any:
        path = _path(number, name)
        (content,) = self._remote.read([path])
        if content is None:
            raise _Replaced(f"{self._remote.url}/{path} is missing: try again")
        return _unpack(content, f"{self._remote.url}/{path}")

    def _parts(self, number: int, kind: str, index: Mapping[str, Any]) -> Iterator[Any]:
        for part in range(index[kind]):
            yield from self._part(number, f"{kind}-{part:06d}")

    def write_snapshot(self) -> tuple[int, int]:
        """Write a snapshot of the manifest as it is; return its number and the id of its last operation."""
        counters, parts = dict[str, int](), dict.fromkeys(("rows", "holders", "scores"), 0)
        for kind, page in self._manifest.contents():
            if kind == "counters":  # the first
                counters.update(page)
                continue
            name = f"{kind}-{parts[kind]:06d}"
            self._remote.write(
                _path(counters.get(_POSITION, 0), name), _pack(_listed(page) if kind == "rows" else page)
            )
            parts[kind] += 1
        number, last = (counters.get(name, 0) for name in (_POSITION, _LAST))
        index = {"last": last, "budgets": self._manifest.budgets(), **parts}
        index |= {name: counters.get(name, 0) for name in ("damaged", CLOCK)}
        if number:
            self._remote.write(_path(number, "index"), _pack(index))
        return number, last

    def trim(self) -> None:
        """Write a snapshot, erase the operations before it, and delete older snapshots."""
        self.pull()
        number, last = self.write_snapshot()
        (trimmed,) = self._remote.read([_TRIMMED])
        first = int(trimmed) + 1 if trimmed and re.fullmatch(rb"[0-9]{1,12}", trimmed) else 1
        for n in range(first if first <= number + 1 else 1, number + 1):
            self._remote.write(_name(n), _encode(last if n == number else 0, 0, number))
        self._remote.write(_TRIMMED, str(number).encode())
        matches = (re.match(r"snapshots/([0-9]{12})/", name) for name in self._remote.names("snapshots/"))
        older = [match.string for match in matches if match and int(match[1]) < number]
        self._remote.delete([name for name in older if name.endswith("index")])  # first: its presence means complete
        self._remote.delete(older)


def _name(number: int) -> str:
    return f"log/{number:012d}"


def _path(snapshot: int, name: str) -> str:
    return f"snapshots/{snapshot:012d}/{name}"


def _listed(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Return rows as JSON; see `_row`."""
    return [[*row[:3], base64.b64encode(row[3]).decode(), *row[4:]] for row in rows]


def _row(listed: Sequence[Any]) -> ManifestRow:
    return ManifestRow._make([*listed[:3], base64.b64decode(listed[3]), *listed[4:]])


def _encode(number: int, before: int, operation: Operation | int) -> bytes:
    """Return an operation as stored: its id, the previous one's, a digest, and JSON; of a cut one, its snapshot."""
    return b"%016x %016x %s" % (number, before, _pack(operation))


def _decode(content: bytes, where: str) -> _Entry:
    match, read = re.match(rb"([0-3][0-9a-f]{15}) ([0-3][0-9a-f]{15}) ", content), _unpack(content[34:], where)
    if not match or not isinstance(read, int | dict):
        raise _damaged(where)
    return _Entry(int(match[1], 16), int(match[2], 16), read if isinstance(read, dict) else None)


def _pack(content: Any) -> bytes:
    packed = zlib.compress(json.dumps(content).encode(), 1)
    return xxhash.xxh3_64_hexdigest(packed).encode() + packed


def _unpack(content: bytes, where: str) -> Any:
    if xxhash.xxh3_64_hexdigest(content[16:]).encode() != content[:16]:
        raise _damaged(where)
    with _noticing_damage(where):
        return json.loads(zlib.decompress(content[16:]))


@contextmanager
def _noticing_damage(where: str) -> Iterator[None]:
    """Raise StoreError for content in another form: a digest does not prove who wrote it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, zlib.error) as error:
        raise _damaged(where) from error


def _damaged(where: str) -> StoreError:
    return StoreError(f"{where} is damaged: run `kvrag store gc` on a machine that used the store before, or delete it")
