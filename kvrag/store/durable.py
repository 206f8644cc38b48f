"""Durable file writes: a file is either absent or complete."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

TEMPORARY = ".*.tmp"
"""Glob pattern of the files that a killed writer leaves behind."""


def write_file(path: Path, *parts: bytes | memoryview, replace: bool = True, mode: int = 0o600) -> None:
    """Write the parts under a temporary name, flush them to disk and rename. After an OSError, no file is left.

    Args:
        replace: False = the first writer of a name wins, others get FileExistsError.
        mode: Permissions, before the umask. A new folder can be entered by those who may read.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=mode | (mode & 0o444) >> 2)
    tmp = path.with_name(f".{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        descriptor = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
            os.fsync(descriptor)
        if replace:
            os.replace(tmp, path)
        else:
            os.link(tmp, path)
            tmp.unlink()
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
