"""One chunk as one safetensors file: token ids, the context it was encoded with, and keys and values per layer.

Tensors are named `000.k, 000.v, 001.k, ...`: safetensors writes by name, so a layer is one contiguous range that one
`preadv` fetches. Ids are 64 bits wide, the widest type: safetensors puts those first, where opening reads them.

Digests cover everything: `digest` in the metadata covers the header, lengths and padding; each layer has its own;
the ids are covered by the chunk's key, which is recomputed when the file is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from kvrag.errors import ChunkUnreadableError, DamagedChunkError, out_of_memory
from kvrag.fingerprint import FORMAT
from kvrag.store.values import ChunkRecord, chunk_key

SUFFIX = ".safetensors"
_MAX_HEADER = 16 << 20
_DTYPES = {
    "U8": torch.uint8,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_BLANK = b"0" * 32
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{32})"')


def serialise(record: ChunkRecord, fingerprint: str) -> tuple[bytes, memoryview]:
    """Return the file's content: header and body."""
    tensors: dict[str, Tensor] = {
        "context": torch.from_numpy(record.context.astype(np.int64)),
        "ids": torch.from_numpy(record.ids.astype(np.int64)),
    }
    digests = []
    for number, (keys, values) in enumerate(record.layers):
        keys, values = keys.contiguous(), values.contiguous()
        tensors[f"{number:03d}.k"], tensors[f"{number:03d}.v"] = keys, values
        digests.append(_digest(_bytes(keys), _bytes(values)))
    metadata = {
        "digest": _BLANK.decode(),
        "digests": ",".join(digests),
        "fingerprint": fingerprint,
        "format": str(FORMAT),
        "key": record.key,
        "namespace": record.namespace,
    }
    content = memoryview(safetensors.torch.save(tensors, metadata))
    start = 8 + int.from_bytes(content[:8], "little")
    header = bytes(content[:start])
    return header.replace(b'"digest":"' + _BLANK, b'"digest":"' + _digest(header).encode(), 1), content[start:]


def estimate(record: ChunkRecord) -> int:
    """Return a tight lower bound of the bytes that `serialise` returns for a record."""
    tensors = sum(keys.nbytes + values.nbytes for keys, values in record.layers)
    header = 512 + len(record.namespace.encode()) * 6 + 240 * len(record.layers)
    return tensors + header + 8 * (len(record.ids) + len(record.context))


class PackedChunk:
    """A chunk as written by `serialise`, read by byte ranges. Its content is verified against the requested key.

    `allocate` returns the memory that a layer is read into, by its number and its bytes; None = any memory.
    """

    tier = ""
    allocate: Callable[[int, int], Tensor] | None = None
    _is_open = False

    def __init__(self, key: str, fingerprint: str, size: int) -> None:
        """Read everything except the layers; raises DamagedChunkError or ChunkUnreadableError.

        Args:
            fingerprint: Digest of the fingerprint that the chunk must have.
            size: Number of bytes of the chunk.
        """
        self.key, self.size, self.bytes_read = key, size, 0
        with self._noticing_faults():
            self._read_header(size)
            self._read_tokens(fingerprint)
        self._is_open = True

    def _range(self, start: int, stop: int, into: Tensor | None = None) -> Tensor:
        """Read a range of bytes: (stop - start,) uint8, not shared with anything."""
        raise NotImplementedError

    def _read_header(self, size: int) -> None:
        length = int.from_bytes(self._range(0, min(8, size)).numpy().tobytes(), "little")
        if length > min(_MAX_HEADER, size):
            raise ValueError("the header is longer than the file")
        self._start = 8 + length
        header = self._range(0, self._start).numpy().tobytes()
        match = _DIGEST.search(header)
        if not match or _digest(header[: match.start(1)], _BLANK, header[match.end(1) :]) != match[1].decode():
            raise ValueError("it does not match its digest")
        tensors = json.loads(header[8:])
        self._metadata: Mapping[str, str] = tensors.pop("__metadata__")
        self._tensors: Mapping[str, Any] = tensors
        self._digests = self._metadata["digests"].split(",")
        self.namespace, self.num_layers = self._metadata["namespace"], len(self._digests)
        end = self._start + max(tensor["data_offsets"][1] for tensor in tensors.values())
        if size != end:
            raise DamagedChunkError(self.key, f"the file has {size} bytes instead of {end}")

    def _read_tokens(self, fingerprint: str) -> None:
        self.context, self.ids = (self._tokens(name) for name in ("context", "ids"))
        self.context_tokens = len(self.context)
        if self._metadata["fingerprint"] != fingerprint:
            raise DamagedChunkError(self.key, "it was written for another model")
        actual = chunk_key(fingerprint, self.ids.tolist(), self.context.tolist(), self.namespace)
        if actual != self.key:
            raise DamagedChunkError(self.key, f"its content belongs to chunk {actual}")

    def _tokens(self, name: str) -> NDArray[np.uint32]:
        start, stop = (self._start + offset for offset in self._tensors[name]["data_offsets"])
        wide = np.frombuffer(self._range(start, stop).numpy(), "<i8")
        ids = wide.astype(np.uint32)
        if not np.array_equal(ids, wide):  # the key covers only 32 bits of each id
            raise DamagedChunkError(self.key, f"its {name} are not token ids")
        return ids

    def close(self) -> None:
        """See ChunkReader.close."""

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """See ChunkReader.layer."""
        with self._noticing_faults():
            keys, values = self._tensors[f"{number:03d}.k"], self._tensors[f"{number:03d}.v"]
            (first, border), (_, last) = keys["data_offsets"], values["data_offsets"]
            start, stop = self._start + first, self._start + last
            content = self._range(start, stop, self.allocate(number, stop - start) if self.allocate else None)
            self.bytes_read += stop - start
            if _digest(content.numpy().data) != self._digests[number]:
                raise DamagedChunkError(self.key, f"layer {number} does not match its digest")
            return _tensor(content[: border - first], keys), _tensor(content[border - first :], values)

    def record(self) -> ChunkRecord:
        """Read the whole chunk, each layer as it was stored; raises as `layer`."""
        layers = [self.layer(number) for number in range(self.num_layers)]
        return ChunkRecord(self.key, self.namespace, self.ids, self.context, layers)

    @contextlib.contextmanager
    def _noticing_faults(self) -> Iterator[None]:
        """Raise DamagedChunkError for a damaged chunk and ChunkUnreadableError for a temporary error."""
        try:
            yield
        except FileNotFoundError as error:
            if self._is_open:
                raise ChunkUnreadableError(self.key, "its file has been deleted") from error
            raise DamagedChunkError(self.key, "its file is missing") from error
        except (OSError, MemoryError) as error:
            raise ChunkUnreadableError(self.key, getattr(error, "strerror", None) or "out of memory") from error
        except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            if out_of_memory(error):
                raise ChunkUnreadableError(self.key, "out of memory") from error
            raise DamagedChunkError(self.key, f"its header is invalid ({error!s:.80})") from error


class ChunkFile(PackedChunk):
    """A chunk's file. It is open only while it is read: a prompt may have more chunks than files may be open."""

    tier = "disk"

    def __init__(self, path: Path, key: str, fingerprint: str) -> None:
        """Read everything except the layers; raises as PackedChunk."""
        self.key, self._path = key, path
        with self._noticing_faults():
            size = path.stat().st_size
        super().__init__(key, fingerprint, size)

    def _range(self, start: int, stop: int, into: Tensor | None = None) -> Tensor:
        content = torch.empty(stop - start, dtype=torch.uint8) if into is None else into
        view, position = content.numpy().data, start
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while view:
                count = os.preadv(descriptor, [view], position)
                if count == 0:
                    raise DamagedChunkError(self.key, "the file is truncated")
                view, position = view[count:], position + count
        finally:
            os.close(descriptor)
        return content


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor(content: Tensor, entry: Mapping[str, Any]) -> Tensor:
    return content.view(_DTYPES[entry["dtype"]]).view(*entry["shape"])


def _digest(*parts: bytes | memoryview) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
