"""Durable file writes: a file is either absent or complete, and what a killed writer leaves is recognised."""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".*.tmp"
"""Glob pattern of the files that a killed writer leaves behind."""

STALE = 3600.0
"""Seconds after which an unfinished file is a leftover, where nothing tells whether its writer lives."""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii")[:8]
    except OSError:
        return uuid.uuid4().hex[:8]  # no other process is known to be on this machine


BOOT = _boot()
"""Part of file names: this machine since it started. Only among its processes does a lock prove who lives."""


def write_file(path: Path, *parts: bytes | memoryview, replace: bool = True, beside: Path | None = None) -> None:
    """Write the parts under a temporary name, flush them to disk and rename. After an OSError, no file is left.

    Args:
        replace: False = the first writer of a name wins, others get FileExistsError.
        beside: Folder of the temporary file, on the same disk; None = that of `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with temporary(beside or path.parent) as (descriptor, tmp):
        with os.fdopen(descriptor, "wb", buffering=0, closefd=False) as file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
        os.fsync(descriptor)
        if replace:
            os.replace(tmp, path)
        else:
            os.link(tmp, path)


@contextmanager
def temporary(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield a new file, as descriptor and path, locked while its writer lives; deleted unless the body renames it."""
    while True:
        path = folder / f".{BOOT}-{uuid.uuid4().hex}.tmp"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: it is a leftover when it is old
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # not so if it was taken for a leftover before it was locked
                yield descriptor, path
                return
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def delete_left(paths: Iterable[Path]) -> int:
    """Delete those temporary files whose writer is dead, and return their number; a live writer's never.

    A writer on another machine, or on this one before it was started again, counts as dead `STALE` seconds after it
    last wrote.
    """
    return sum(map(_delete_left, paths))


def _delete_left(path: Path) -> bool:
    with suppress(FileNotFoundError, PermissionError):  # complete in the meantime; another user's
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            is_free = try_lock(descriptor)
            if is_free is not False and (is_stale(path) or (is_free and path.name.startswith(f".{BOOT}-"))):
                path.unlink()  # before the lock is released: its writer may be about to lock it
                return True
        finally:
            os.close(descriptor)
    return False


def try_lock(descriptor: int) -> bool | None:
    """Lock a file, and return whether no other process has it locked; None = unknown on this file system."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_stale(path: Path) -> bool:
    """Return whether a file was not changed for `STALE` seconds; False if it does not exist."""
    try:
        return time.time() - path.stat().st_mtime > STALE
    except FileNotFoundError:
        return False
