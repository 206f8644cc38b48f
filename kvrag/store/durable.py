"""Durable file writes: a file is either absent or complete."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

TEMPORARY = ".*.tmp"
"""Glob pattern of the files that a killed writer leaves behind."""


def write_file(path: Path, *parts: bytes | memoryview, replace: bool = True, beside: Path | None = None) -> None:
    """Write the parts under a temporary name, flush them to disk and rename. After an OSError, no file is left.

    Args:
        replace: False = the first writer of a name wins, others get FileExistsError.
        beside: Folder of the temporary file, on the same disk; None = that of `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    tmp = (beside or path.parent) / f".{uuid.uuid4().hex}.tmp"
    try:
        with open(tmp, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        if replace:
            os.replace(tmp, path)
        else:
            os.link(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
