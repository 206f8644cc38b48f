"""One chunk as one safetensors file: token ids, anchors, and per layer keys and values.

Tensors are named `000.k, 000.v, 001.k, ...`: safetensors writes by name, so a layer is one contiguous range that one
`preadv` fetches. Each layer carries its own digest, and the file everything that the manifest says of the chunk.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from kvrag.errors import DamagedChunkError
from kvrag.store.protocol import ChunkRecord

SUFFIX = ".safetensors"
_MAX_HEADER = 16 << 20
_DTYPES = {"U8": torch.uint8, "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def pack(record: ChunkRecord, fingerprint: str) -> bytes:
    """The file's content."""
    tensors: dict[str, Tensor] = {
        "ids": torch.from_numpy(record.ids.astype(np.int32)),
        "anchors": torch.frombuffer(bytearray(record.anchors or b"\0"), dtype=torch.uint8),
    }
    digests = []
    for number, (keys, values) in enumerate(record.layers):
        keys, values = keys.contiguous(), values.contiguous()
        tensors[f"{number:03d}.k"], tensors[f"{number:03d}.v"] = keys, values
        digests.append(_digest(_bytes(keys), _bytes(values)))
    described = _digest(_bytes(tensors["ids"]), _bytes(tensors["anchors"]))
    metadata = {
        "key": record.key,
        "fingerprint": fingerprint,
        "described": described,
        "digests": ",".join(digests),
        "context": str(record.context),
        "source": record.source,
    }
    return safetensors.torch.save(tensors, metadata)


def write(path: Path, content: bytes, tmp_name: str) -> None:
    """Write durably: the file is either absent or whole. Raises OSError and leaves nothing behind then."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    tmp = path.with_name(tmp_name)
    try:
        descriptor = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
            os.fsync(descriptor)
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


class ChunkFile:
    """An open chunk file; stays readable when the file is deleted.

    Attributes:
        key, fingerprint, context, source: As written.
    """

    tier = "disk"

    def __init__(self, path: Path) -> None:
        """Open and read the header.

        Raises:
            FileNotFoundError: There is none.
            DamagedChunkError: It is no chunk file, or truncated.
        """
        self.bytes_read = 0
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by close()
        try:
            self._read_header(path.name.removesuffix(SUFFIX))
        except BaseException:
            self._file.close()
            raise

    def _read_header(self, key: str) -> None:
        self.key = key
        size = os.fstat(self._file.fileno()).st_size
        try:
            (length,) = struct.unpack("<Q", self._file.read(8))
            if length > min(_MAX_HEADER, size):
                raise ValueError("the header is longer than the file")
            header = json.loads(self._file.read(length))
            metadata = header.pop("__metadata__")
            self._start, self._tensors = 8 + length, header
            self._digests, self._described = metadata["digests"].split(","), metadata["described"]
            self.fingerprint: str = metadata["fingerprint"]
            self.context = int(metadata.get("context", "0"))  # which the first files do not have
            self.source = str(metadata.get("source", ""))
            if metadata["key"] != key:
                raise ValueError(f"the file says it is chunk {metadata['key']}")
            if len(header) != 2 * len(self._digests) + 2:
                raise ValueError("tensors and digests do not agree")
            end = self._start + max(tensor["data_offsets"][1] for tensor in header.values())
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
            raise DamagedChunkError(key, f"its header cannot be read ({error})") from error
        if size != end:
            raise DamagedChunkError(key, f"it is {size} bytes long instead of {end}")
        self.num_layers = len(self._digests)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, as they were put.

        Raises:
            DamagedChunkError: The bytes are not those that were written.
        """
        with self._noticing_damage():
            keys, values = self._tensors[f"{number:03d}.k"], self._tensors[f"{number:03d}.v"]
            start, stop = keys["data_offsets"][0], values["data_offsets"][1]
            content = self._read(start, stop)
            border = keys["data_offsets"][1] - start
            if _digest(content[:border].numpy(), content[border:].numpy()) != self._digests[number]:
                raise DamagedChunkError(self.key, f"layer {number} does not match its digest")
            return _tensor(content[:border], keys), _tensor(content[border:], values)

    def ids_and_anchors(self) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint32]], bytes]:
        """What the manifest keeps beside the key.

        Raises:
            DamagedChunkError: The bytes are not those that were written.
        """
        with self._noticing_damage():
            ids, anchors = (self._read(*self._tensors[name]["data_offsets"]) for name in ("ids", "anchors"))
            if _digest(ids.numpy(), anchors.numpy()) != self._described:
                raise DamagedChunkError(self.key, "its token ids do not match their digest")
            return ids.numpy().view(np.uint32), anchors.numpy().tobytes()

    @property
    def ids(self):
        return self.ids_and_anchors()[0]

    @property
    def context_tokens(self):
        return self.context

    @contextlib.contextmanager
    def _noticing_damage(self) -> Iterator[None]:
        """A header that is JSON can still say what makes no sense."""
        try:
            yield
        except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
            raise DamagedChunkError(self.key, f"its header makes no sense ({error!r:.80})") from error
        except OSError as error:
            raise DamagedChunkError(self.key, f"it cannot be read ({error.strerror})") from error

    def _read(self, start: int, stop: int) -> Tensor:
        content = torch.empty(stop - start, dtype=torch.uint8)
        view, position = content.numpy().data, self._start + start
        while view:
            count = os.preadv(self._file.fileno(), [view], position)
            if count == 0:
                raise DamagedChunkError(self.key, "it ends too early")
            view, position = view[count:], position + count
        self.bytes_read += stop - start
        return content

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _tensor(content: Tensor, entry: dict[str, Sequence[int]]) -> Tensor:
    return content.view(_DTYPES[str(entry["dtype"])]).view(*entry["shape"])


def _digest(
    keys: np.ndarray[tuple[int], np.dtype[np.uint8]], values: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> str:
    digest = xxhash.xxh3_64(keys.data)
    digest.update(values.data)
    return digest.hexdigest()
