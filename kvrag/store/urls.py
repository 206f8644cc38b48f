"""Stores by name: a folder, or the URL of a bucket."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from kvrag.config import check_type, without_password
from kvrag.errors import SettingError

if TYPE_CHECKING:
    from kvrag.store.objects import ObjectStore

_OPTIONS = {"s3": ["endpoint", "region"], "gs": [], "az": ["account", "endpoint"]}  # by scheme


def is_shared(store: str | Path) -> bool:
    """Return whether this is the URL of a bucket, and not a folder; raises SettingError if it is neither."""
    text = str(store)
    if re.match(r"\w[\w+.-]+://", text):
        return True
    if re.match(rf"({'|'.join(_OPTIONS)}):", text):
        raise SettingError(f"{text} is not a URL: write {text.partition(':')[0]}://, and pass it as a string")
    return False


def connect(url: str) -> ObjectStore:
    """Return the bucket that a URL names; sends nothing. Raises SettingError if it is wrong or a package is missing."""
    try:
        parts, public = urlsplit(check_type("url", url, str, "a string")), without_password(url)
    except ValueError as error:
        raise SettingError(f"{url!r:.80} is not a URL: {error}") from None
    scheme, options = parts.scheme.lower(), dict(parse_qsl(parts.query, keep_blank_values=True))
    if scheme not in _OPTIONS:
        schemes = ", ".join(f"{name}://" for name in _OPTIONS)
        raise SettingError(f"{public} has an unknown scheme: use a folder, or one of {schemes}")
    if not parts.hostname:
        raise SettingError(f"{public} names no bucket: use {scheme}://BUCKET/PREFIX")
    if unknown := ", ".join(sorted(options.keys() - set(_OPTIONS[scheme]))):
        known = ", ".join(_OPTIONS[scheme])
        raise SettingError(
            f"{public} has an unknown option {unknown} ({f'known: {known}' if known else 'there are none'})"
        )
    try:
        from kvrag.store.objects import ObjectStore
    except ImportError as error:
        raise SettingError(f"{scheme}:// needs the package {error.name}: pip install 'kvrag[shared]'") from error
    return ObjectStore(public, scheme, parts.netloc, unquote(parts.path).strip("/"), options)
