"""Exception types of kvrag.

KvragError
 ├─ SettingError (also a ValueError)
 ├─ PromptError (no ValueError, which LlamaIndex turns into an empty answer)
 │   └─ ContextWindowError
 ├─ ModelError
 │   ├─ ModelLoadError
 │   ├─ OutOfMemoryError
 │   └─ UnsupportedModelError
 ├─ AbandonedError
 ├─ AnswerTimeoutError (also a TimeoutError)
 ├─ ServerError
 └─ StoreError
     ├─ FingerprintMismatchError
     ├─ StoreFullError
     ├─ StoreReadOnlyError
     ├─ ChunkUnreadableError
     └─ DamagedChunkError
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class KvragError(Exception):
    """Base of all errors of this package."""


def first_line(message: object) -> str:
    """Return the first line of an error or its message."""
    return str(message).strip().split("\n")[0]


def reason_of(error: Exception) -> str:
    """Return type and first line of an error of another library."""
    return f"{type(error).__name__}: {first_line(error):.160}"


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Raise KvragError with the way to install `extra` if an import within fails."""
    try:
        yield
    except ImportError as error:
        raise KvragError(f"{error.name or error} is not installed: pip install '{extra}'") from None


def out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: torch raises a plain RuntimeError for some kinds of memory."""
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


class SettingError(KvragError, ValueError):
    """A setting is out of range or has an unknown name."""


class AbandonedError(KvragError):
    """Nobody waits for an answer any more; only the task that was cancelled sees it."""


class AnswerTimeoutError(KvragError, TimeoutError):
    """An answer took longer than its `timeout`. The engine stays usable."""


class PromptError(KvragError):
    """The prompt cannot be answered as it is, or a chunk cannot be encoded; `chunk` is its number among the texts."""

    chunk: int | None = None


class ContextWindowError(PromptError):
    """The prompt or chunk does not fit into the model's context window."""


class ModelError(KvragError):
    """Base of errors about the model."""


class ModelLoadError(ModelError):
    """The model could not be loaded."""


class UnsupportedModelError(ModelError):
    """The model's architecture cannot be blended exactly; the message gives the reason."""


class ServerError(KvragError):
    """A server cannot be reached, refuses a request, or fails; `status` is its HTTP status, None without a response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class OutOfMemoryError(ModelError):
    """There is not enough memory to compute a prompt or a chunk. The engine stays usable."""


class StoreError(KvragError):
    """Base of errors about the store."""


class FingerprintMismatchError(StoreError):
    """The store holds KV of another model, tokenizer, dtype, RoPE setting or preamble."""


class StoreFullError(StoreError):
    """There is no room for more chunks."""


class StoreReadOnlyError(StoreError):
    """The store is not writable."""


class _ChunkError(StoreError):
    """Base of errors about one chunk. Can be pickled, for other processes."""

    _what = ""

    def __init__(self, key: str, reason: object) -> None:
        super().__init__(f"chunk {key} {self._what}: {reason}")
        self.key, self.reason = key, str(reason)

    def __reduce__(self) -> tuple[type[_ChunkError], tuple[str, str]]:
        return type(self), (self.key, self.reason)


class ChunkUnreadableError(_ChunkError):
    """A stored chunk, `key`, cannot be read at the moment: an I/O error, no memory, too many open files. It is kept."""

    _what = "cannot be read at the moment"


class DamagedChunkError(_ChunkError):
    """A stored chunk, `key`, is truncated, or does not match its digest or its key."""

    _what = "is damaged"
