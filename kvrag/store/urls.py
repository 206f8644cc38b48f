"""Stores by name: a folder, or the URL of a remote, see `kvrag.store.remote`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvrag.config import check_type, without_password
from kvrag.errors import SettingError
from kvrag.store.remote import Remote

_OBJECTS = {"s3": ["endpoint", "region"], "gs": [], "az": ["account", "endpoint"]}
_SERVER = ["expire", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"]
_OPTIONS = {**_OBJECTS, "redis": _SERVER, "rediss": _SERVER, "valkey": _SERVER, "valkeys": _SERVER}  # by scheme

PASSWORD_VARIABLE = "KVRAG_STORE_PASSWORD"
"""Environment variable with the password of a Valkey server whose URL has none."""


def is_shared(store: str | Path) -> bool:
    """Return whether this is the URL of a remote, and not a folder; raises SettingError if it is neither."""
    text = str(store)
    if re.match(r"\w[\w+.-]+://", text):
        return True
    if re.match(rf"({'|'.join(_OPTIONS)}):", text):
        raise SettingError(f"{text} is not a URL: write {text.partition(':')[0]}://, and pass it as a string")
    return False


def connect(url: str) -> Remote:
    """Return the remote that a URL names; sends nothing. Raises SettingError if it is wrong or a package is missing."""
    try:
        parts, public = urlsplit(check_type("url", url, str, "a string")), without_password(url)
    except ValueError as error:
        raise SettingError(f"{url!r:.80} is not a URL: {error}") from None
    scheme, options = parts.scheme.lower(), dict(parse_qsl(parts.query, keep_blank_values=True))
    if scheme not in _OPTIONS:
        schemes = ", ".join(f"{name}://" for name in _OPTIONS)
        raise SettingError(f"{public} has an unknown scheme: use a folder, or one of {schemes}")
    kind, form = ("bucket", "BUCKET/PREFIX") if scheme in _OBJECTS else ("host", "HOST:PORT/DATABASE")
    if not parts.hostname:
        raise SettingError(f"{public} names no {kind}: use {scheme}://{form}")
    if unknown := ", ".join(sorted(options.keys() - set(_OPTIONS[scheme]))):
        known = ", ".join(_OPTIONS[scheme])
        raise SettingError(
            f"{public} has an unknown option {unknown} ({f'known: {known}' if known else 'there are none'})"
        )
    path = unquote(parts.path).strip("/")
    try:
        if scheme in _OBJECTS:
            from kvrag.store.objects import ObjectStore

            return ObjectStore(public, scheme, parts.netloc, path, options)
        from kvrag.store.valkey import ValkeyStore
    except ImportError as error:
        raise SettingError(f"{scheme}:// needs the package {error.name}: pip install 'kvrag[shared]'") from error
    first, _, prefix = path.partition("/")
    if first and not first.isdigit():
        first, prefix = "0", path
    try:
        port = parts.port or 6379
    except ValueError:
        raise SettingError(f"{public} has no valid port: use {scheme}://{form}") from None
    return ValkeyStore(
        public,
        prefix,
        options,
        host=parts.hostname,
        port=port,
        db=int(first or 0),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else os.environ.get(PASSWORD_VARIABLE),
        ssl=scheme in ("rediss", "valkeys"),
    )
