"""Object stores through obstore: S3 and compatible ones, Google Cloud Storage, Azure Blob Storage."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from kvrag.errors import SettingError, StoreError, StoreReadOnlyError
from kvrag.store.remote import TIMEOUT_S

_PIECE = 1 << 20  # bytes of a large object that are passed on at once
_LARGE_S = 300.0  # seconds for one large object
_CONNECT_S = 5.0
_RETRIES, _RETRY_S = 2, 10.0
_CLOCK = "clock"  # written to read the time of the remote

_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_REASONS = re.compile(
    r"<Code>(.+?)</Code>|status code: (\d+ [\w ]+)|(Connection refused|timed out|deadline has elapsed|dns error|"
    r"certificate[^\",)]*|Connection reset|connection closed|missing credentials)",
    re.IGNORECASE,
)

_process: int | None = None  # that uses obstore: its threads do not survive a fork, so a child would wait forever


Tag = Mapping[str, Any]
"""Identity of the content of a small object."""


class ObjectStore:
    """A prefix of a bucket. Credentials come from the environment, as in the tools of each provider. Thread-safe.

    Every method raises StoreError, with a remedy, if it fails. `url` is for messages.
    """

    def __init__(self, url: str, scheme: str, bucket: str, prefix: str, options: Mapping[str, str]) -> None:
        """Connect; sends nothing."""
        global _process
        if _process not in (None, os.getpid()):
            raise SettingError(
                f"{url} cannot be used in a process that was forked from one that has used an object store: start it "
                'with multiprocessing\'s "spawn", for vLLM VLLM_WORKER_MULTIPROC_METHOD=spawn'
            )
        _process = os.getpid()
        self.url, self._scheme, self._bucket = url, scheme, bucket
        settings: dict[str, Any] = dict(options)
        if "account" in settings:
            settings["account_name"] = settings.pop("account")
        make = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]

        def connect(seconds: float) -> Any:
            return make(
                bucket,
                prefix=prefix or None,
                client_options={
                    "allow_http": True,  # only of an endpoint that begins so
                    "timeout": timedelta(seconds=seconds),
                    "connect_timeout": timedelta(seconds=_CONNECT_S),
                },
                retry_config={
                    "max_retries": _RETRIES,
                    "retry_timeout": timedelta(seconds=_RETRY_S),
                    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
                },
                **settings,
            )

        with self._translated():
            self._quick, self._patient = connect(TIMEOUT_S), connect(_LARGE_S)

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """Return small objects; None where there is none."""
        if len(names) == 1:
            return [self.look(names[0])[0]]
        with ThreadPoolExecutor(16, "kvrag-objects") as pool:
            return [content for content, _ in pool.map(self.look, names)]

    def look(self, name: str) -> tuple[bytes | None, Tag | None]:
        """Return a small object and its tag; None if there is none."""
        with suppress(FileNotFoundError), self._translated():
            answer = obstore.get(self._quick, name)
            tag = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta[name] is not None}
            return bytes(answer.bytes()), tag
        return None, None

    def swap(self, name: str, content: bytes, tag: Tag | None) -> bool:
        """Replace a small object, and return True, if it has this tag (None = if there is none)."""
        mode: Any = "create" if tag is None else tag
        with suppress(AlreadyExistsError, PreconditionError, FileNotFoundError), self._translated(writing=True):
            obstore.put(self._quick, name, content, mode=mode, use_multipart=False)
            return True
        return False

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object atomically."""
        with self._translated(writing=True):
            obstore.put(self._patient, name, content, use_multipart=False)

    def is_conditional(self) -> bool:
        """Return whether the bucket respects the conditions of `swap`."""
        first, second, third = (secrets.token_bytes(8) for _ in range(3))  # a tag may be a digest of the content
        self.write(_CLOCK, first)
        _, tag = self.look(_CLOCK)
        self.write(_CLOCK, second)
        return not self.swap(_CLOCK, third, None) and not self.swap(_CLOCK, third, tag)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        for i in range(0, len(names), 1000):
            part = list(names[i : i + 1000])
            try:
                with self._translated(writing=True):
                    obstore.delete(self._quick, part)
            except FileNotFoundError:  # some providers report a missing one and stop
                for name in part:
                    with self._translated(writing=True), suppress(FileNotFoundError):
                        obstore.delete(self._quick, name)

    def open(self, name: str) -> tuple[int, Iterator[obstore.Bytes]]:
        """Return the size of an object, and its content in pieces, as they arrive; raises FileNotFoundError."""
        with self._translated():
            answer = obstore.get(self._patient, name)
            return answer.meta["size"], self._pieces(answer)

    def _pieces(self, answer: obstore.GetResult) -> Iterator[obstore.Bytes]:
        with self._translated():
            yield from answer.stream(min_chunk_size=_PIECE)

    def listed(self, *prefixes: str) -> Iterator[tuple[str, float]]:
        """Yield name and age in seconds, by the bucket's clock, of the objects under these prefixes."""
        with self._translated(writing=True):
            obstore.put(self._quick, _CLOCK, b"", use_multipart=False)
            now = obstore.head(self._quick, _CLOCK)["last_modified"]
            for prefix in prefixes:
                for page in obstore.list(self._quick, prefix):
                    for item in page:
                        yield item["path"], (now - item["last_modified"]).total_seconds()

    @contextmanager
    def _translated(self, writing: bool = False) -> Iterator[None]:
        """Raise StoreError; FileNotFoundError, AlreadyExistsError and PreconditionError pass."""
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except (FileNotFoundError, BaseError) as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                bucket = f"the bucket {self._bucket} does not exist"
                raise StoreError(f"{self.url}: {bucket}: create it, or correct the URL") from error
            if isinstance(error, FileNotFoundError):
                raise
            reason, names = _reason(error), _VARIABLES[self._scheme]
            if writing and isinstance(error, PermissionDeniedError) and reason == "AccessDenied":
                raise StoreReadOnlyError(f"{self.url} is not writable ({reason}): check {names}") from error
            is_denied = isinstance(error, (PermissionDeniedError, UnauthenticatedError))
            # the addresses where machines get the credentials of their roles
            if not is_denied and re.search(r"169\.254\.169\.254|metadata\.google\.internal", str(error)):
                raise StoreError(f"no credentials for {self.url} ({reason}): set {names}") from error
            if is_denied or reason.startswith(("401", "403")):
                raise StoreError(f"access to {self.url} was denied ({reason}): check {names}") from error
            raise StoreError(f"cannot use {self.url} ({reason}): check the URL and the network") from error
        except (ValueError, OverflowError) as error:  # the answer has an invalid time
            raise StoreError(f"cannot use {self.url} (damaged metadata: {error}): check the objects there") from error


def _reason(error: Exception) -> str:
    """Return the reason in a long message, in a few words."""
    reasons = [next(filter(None, groups)) for groups in _REASONS.findall(str(error))]
    return re.sub(r"[\s(]+", " ", reasons[0]).strip() if reasons else str(error).split("\n")[0][:120]
