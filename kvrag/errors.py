"""Every error that kvrag raises on purpose.

KvragError
 ├─ SettingError            a setting out of range or an unknown name (also a ValueError)
 ├─ PromptError             a prompt that cannot be answered; no ValueError, which LlamaIndex turns into an empty answer
 │   └─ ContextWindowError  too long for the model, says by how much
 ├─ ModelError
 │   ├─ ModelLoadError         unknown name, no network, damaged files
 │   └─ UnsupportedModelError  the architecture cannot be blended, says why
 └─ StoreError
     ├─ FingerprintMismatchError  KV of another model, tokenizer, dtype or RoPE setting
     ├─ StoreFullError            no room on the disk or in the byte budget
     ├─ StoreReadOnlyError        the folder cannot be written
     ├─ ChunkUnreadableError      a stored chunk cannot be read just now; nothing is wrong with it
     └─ DamagedChunkError         a stored chunk does not match its digest or its key
"""


class KvragError(Exception):
    """Base of all errors of this package."""


def out_of_memory(error: BaseException) -> bool:
    """Whether it says so: torch raises a RuntimeError of its own for every kind of memory."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory")
    )


class SettingError(KvragError, ValueError):
    """A setting is out of range or has an unknown name."""


class PromptError(KvragError):
    """The prompt cannot be answered as it is."""


class ContextWindowError(PromptError):
    """The prompt or chunk does not fit into the model's context window."""


class ModelError(KvragError):
    """Something about the model."""


class ModelLoadError(ModelError):
    """The model could not be loaded."""


class UnsupportedModelError(ModelError):
    """The model's architecture cannot be blended exactly; the message says why."""


class StoreError(KvragError):
    """Something about the store."""


class FingerprintMismatchError(StoreError):
    """The store holds KV of another model, tokenizer, dtype, RoPE setting or preamble."""


class StoreFullError(StoreError):
    """There is no room for more chunks."""


class StoreReadOnlyError(StoreError):
    """The store cannot be written."""


class ChunkUnreadableError(StoreError):
    """A stored chunk cannot be read just now: an I/O error, no memory, too many open files. Its file stays.

    Attributes:
        key: The chunk's key.
    """

    def __init__(self, key: str, reason: object) -> None:
        super().__init__(f"chunk {key} cannot be read now: {reason}")
        self.key = key


class DamagedChunkError(StoreError):
    """A stored chunk is truncated, or does not match its digest or its key.

    Attributes:
        key: The chunk's key.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"chunk {key} is damaged: {reason}")
        self.key = key
