"""Stores by name: a folder, or the URL of a remote, see `kvrag.store.remote`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvrag.config import without_password
from kvrag.errors import SettingError
from kvrag.store.remote import Remote

_OBJECTS = ("s3", "gs", "az")
_SERVERS = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
_SCHEMES = ", ".join(f"{scheme}://" for scheme in (*_OBJECTS, *_SERVERS))


PASSWORD_VARIABLE = "KVRAG_STORE_PASSWORD"
"""Environment variable with the password of a Valkey server whose URL has none."""


def is_shared(store: str | Path) -> bool:
    """Return whether this is the URL of a remote, and not a folder.

    Raises:
        SettingError: It is neither.
    """
    text = str(store)
    if re.match(r"\w[\w+.-]+://", text):
        return True
    if re.match(rf"({'|'.join((*_OBJECTS, *_SERVERS))}):", text):
        raise SettingError(f"{text} is not a URL: write {text.partition(':')[0]}://, and pass it as a string")
    return False


def connect(url: str) -> Remote:
    """Return the remote that a URL names; sends nothing.

    Raises:
        SettingError: The URL is wrong, or a package is missing.
    """
    parts = urlsplit(url)
    scheme, options = parts.scheme.lower(), dict(parse_qsl(parts.query, keep_blank_values=True))
    if scheme not in (*_OBJECTS, *_SERVERS):
        raise SettingError(f"{without_password(url)} has an unknown scheme: use a folder, or one of {_SCHEMES}")
    path = unquote(parts.path).strip("/")
    try:
        if scheme in _OBJECTS:
            from kvrag.store.objects import ObjectStore

            return ObjectStore(without_password(url), scheme, parts.netloc, path, options)
        from kvrag.store.valkey import ValkeyStore
    except ImportError as error:
        raise SettingError(f"{scheme}:// needs the package {error.name}: pip install 'kvrag[shared]'") from error
    first, _, prefix = path.partition("/")
    if first and not first.isdigit():
        first, prefix = "0", path
    try:
        port = parts.port or 6379
    except ValueError:
        raise SettingError(f"{without_password(url)} has no valid port: use {scheme}://HOST:PORT/DATABASE") from None
    if not parts.hostname:
        raise SettingError(f"{without_password(url)} names no host: use {scheme}://HOST:PORT/DATABASE")
    return ValkeyStore(
        without_password(url),
        prefix,
        options,
        host=parts.hostname,
        port=port,
        db=int(first or 0),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else os.environ.get(PASSWORD_VARIABLE),
        ssl=_SERVERS[scheme],
    )
