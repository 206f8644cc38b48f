"""Valkey and Redis, through redis-py: a hash per chunk with a field per layer, and a string per small object."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from kvrag.errors import DamagedChunkError, SettingError, StoreError, StoreFullError, StoreReadOnlyError
from kvrag.store.chunkfile import borders, key_of
from kvrag.store.remote import CHANGES, TIMEOUT_S, Blob, DeletedError, Remote

_CONNECT_S = 5.0
_CREATED = b"created"  # field of a chunk: the server's time in seconds


class ValkeyStore(Remote):
    """A server, and a prefix of its keys."""

    def __init__(self, url: str, prefix: str, options: Mapping[str, str], **connection: Any) -> None:
        """Connect; sends nothing.

        Args:
            url: For messages, without the password.
            options: Files of TLS, and `expire`: seconds after its last use until a chunk expires.
            connection: Host, port, database and user, as redis.Redis takes them.
        """
        self.url, self._prefix = url, f"{prefix}:" if prefix else "kvrag:"
        connection |= options
        expire = connection.pop("expire", "")
        if expire and not (expire.isdigit() and int(expire)):
            raise SettingError(f"{url}: expire must be a number of seconds, got {expire}")
        self._expire = int(expire) if expire else None
        self._client: Any = redis.Redis(
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=_CONNECT_S,
            # not after timeouts: a server that stalls would be waited for again
            retry=Retry(ExponentialBackoff(cap=1, base=0.05), 1, (redis.ConnectionError,)),
            health_check_interval=30,
            **connection,
        )
        self._checked = False

    def _check(self) -> None:
        """Reject a server that may evict the record of documents."""
        if self._checked:
            return
        with self._translated():
            memory: dict[str, Any] = self._client.info("memory")
        policy = str(memory.get("maxmemory_policy", ""))
        if int(memory.get("maxmemory", 0)) and policy.startswith("allkeys"):
            raise StoreError(
                f"{self.url} evicts any key (maxmemory-policy {policy}), also the record of documents: "
                "set maxmemory-policy to volatile-lru and add ?expire=SECONDS to the URL, or to noeviction"
            )
        self._checked = True

    def _key(self, name: str) -> str:
        return self._prefix + name

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        self._check()
        with self._translated():
            return list(self._client.mget([self._key(name) for name in names]))

    def create(self, name: str, content: bytes) -> bool:
        with self._translated():
            return bool(self._client.set(self._key(name), content, nx=True))

    def write(self, name: str, content: bytes) -> None:
        with self._translated():
            self._client.set(self._key(name), content)

    def change(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        key = self._key(name)
        with self._translated(), self._client.pipeline(transaction=True) as writing:
            for _ in range(CHANGES):
                writing.watch(key)
                content = change(writing.get(key))
                writing.multi()
                writing.set(key, content)
                with suppress(redis.WatchError):  # another writer was faster
                    writing.execute()
                    return
        raise StoreError(f"{self.url} has too many writers at the moment: try again")

    def names(self, prefix: str) -> list[str]:
        with self._translated():
            return sorted(set(self._scan(prefix)))

    def _scan(self, prefix: str) -> Iterator[str]:
        literal = re.sub(r"([*?\[\]\\^-])", r"\\\1", self._key(prefix))
        for key in self._client.scan_iter(match=f"{literal}*", count=1000):
            yield key.decode("utf-8", "ignore").removeprefix(self._prefix)

    def delete(self, names: Sequence[str]) -> None:
        for i in range(0, len(names), 1000):
            with self._translated():
                self._client.unlink(*(self._key(name) for name in names[i : i + 1000]))

    def put_chunk(self, name: str, header: bytes, body: memoryview) -> None:
        key, starts, content = self._key(_path(name)), borders(header), memoryview(header + bytes(body))
        with self._translated():
            now = self._client.time()[0]
            writing = self._client.pipeline(transaction=True)
            writing.hset(key, mapping={_CREATED: now, b"size": len(content), b"starts": ",".join(map(str, starts))})
            for start, stop in pairwise([*starts, len(content)]):
                writing.hset(key, str(start), content[start:stop])
            if self._expire:
                writing.expire(key, self._expire)
            writing.execute()

    def open_chunk(self, name: str) -> Blob | None:
        key = self._key(_path(name))
        with self._noticing_damage(key):
            reading = self._client.pipeline(transaction=True)
            reading.hmget(key, ["size", "starts", "0"])
            if self._expire:
                reading.expire(key, self._expire)
            size, starts, beginning = reading.execute()[0]
            if size is None or starts is None or beginning is None:
                return None
            fields = list(map(_number, starts.split(b",")))
            return Blob(_number(size), beginning, partial(self._read_range, key, fields))

    def _read_range(self, key: str, starts: Sequence[int], start: int, stop: int) -> bytes | memoryview:
        """Read a range of a chunk whose fields begin at `starts`."""
        first = bisect_right(starts, start) - 1
        last = bisect_right(starts, stop - 1)
        with self._noticing_damage(key):
            parts = self._client.hmget(key, list(map(str, starts[first:last])))
            if None in parts:
                if self._client.exists(key):
                    raise ValueError("it lacks layers")
                raise DeletedError("it has been deleted")
        content = parts[0] if len(parts) == 1 else b"".join(parts)
        return memoryview(content)[start - starts[first] : stop - starts[first]]

    def list_chunks(self) -> Iterator[tuple[str, float]]:
        with self._translated():
            now = self._client.time()[0]
            for prefix in ("chunks/", "quarantine/"):
                for path in self._scan(prefix):
                    age = inf
                    with suppress(DamagedChunkError), self._noticing_damage(path):
                        age = now - _number(self._client.hget(self._key(path), _CREATED))
                    yield path.removeprefix("chunks/"), age

    def delete_chunks(self, names: Sequence[str]) -> None:
        self.delete([_path(name) for name in names])

    def rename_chunk(self, name: str, other: str) -> None:
        with self._translated():
            try:
                self._client.rename(self._key(_path(name)), self._key(_path(other)))
            except redis.ResponseError as error:
                if "no such key" not in str(error):
                    raise

    def close(self) -> None:
        with suppress(redis.RedisError, OSError):
            self._client.close()

    @contextmanager
    def _noticing_damage(self, key: str) -> Iterator[None]:
        """Raise DamagedChunkError for a record that differs from what was written, and StoreError as `_translated`."""
        with self._translated():
            try:
                yield
            except (ValueError, redis.ResponseError) as error:
                if isinstance(error, redis.ResponseError) and "WRONGTYPE" not in str(error):
                    raise
                raise DamagedChunkError(key_of(key), error) from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (redis.exceptions.NoPermissionError, redis.exceptions.ReadOnlyError) as error:
            raise StoreReadOnlyError(
                f"{self.url} is not writable ({error}): extend the user's ACL, or use the primary server"
            ) from error
        except (redis.AuthenticationError, redis.ResponseError) as error:
            if isinstance(error, redis.AuthenticationError) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
                raise StoreError(f"access to {self.url} was denied ({error}): check user and password") from error
            if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in str(error):
                raise StoreFullError(
                    f"{self.url} is full: raise its maxmemory, forget documents, or add ?expire=SECONDS to the URL and "
                    "set maxmemory-policy to volatile-lru"
                ) from error
            raise StoreError(f"{self.url} refuses a command: {error}") from error
        except (redis.RedisError, OSError) as error:
            reason = str(error).strip().split("\n")[0][:120]
            raise StoreError(f"cannot use {self.url} ({reason}): check the URL, the server and the network") from error


def _path(name: str) -> str:
    """Return where a chunk is, below the prefix; quarantined ones have a folder of their own."""
    return name if "/" in name else f"chunks/{name}"


def _number(field: bytes | None) -> int:
    """Return the number in a field; raises ValueError."""
    if field is None or not re.fullmatch(rb"\d{1,15}", field):
        raise ValueError(f"{field!r:.40} is not a number")
    return int(field)
