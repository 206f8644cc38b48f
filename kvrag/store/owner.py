"""The file that names the model whose KV a store holds."""

from __future__ import annotations

import json
import re

from kvrag.errors import FingerprintMismatchError, StoreError
from kvrag.fingerprint import FORMAT, Fingerprint

OWNER = "fingerprint.json"


def owner_file(fingerprint: Fingerprint) -> bytes:
    """Return the content of the file; see `parse_owner`."""
    return json.dumps({"digest": fingerprint.digest, **fingerprint.parts()}, indent=1).encode()


def parse_owner(content: bytes, store: str) -> dict[str, str]:
    """Return the parts of the fingerprint and its `digest`. Raises StoreError, also for another version's store."""
    try:
        parts = json.loads(content)
        if json.loads(parts["format"]) != FORMAT:
            raise old_format(store)
        Fingerprint.of(parts)
        is_sound = re.fullmatch(r"[0-9a-f]{32}", parts["digest"])  # it becomes a folder's name
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        is_sound = None
    if not is_sound:
        raise StoreError(f"{store}/{OWNER} is damaged: delete the store and warm again")
    return dict(parts)


def check_owner(theirs: dict[str, str], fingerprint: Fingerprint, store: str) -> None:
    """Raise FingerprintMismatchError unless a store is claimed for this model and codec."""
    if theirs["digest"] == fingerprint.digest:
        return
    mine = fingerprint.parts()
    different = [name for name in mine if name != "model" and mine[name] != theirs[name]]
    way_out = "load the model with the same settings, use another store folder or prefix, or delete this one"
    if different == ["codec"]:
        way_out = f"use codec {codec_of(theirs)} instead of {fingerprint.codec}, or {way_out}"
    if different == ["states"]:
        way_out = f"{'leave out' if fingerprint.states else 'pass'} store_states, or use another store folder or prefix"
    raise FingerprintMismatchError(
        f"the store {store} holds KV of {json.loads(theirs['model'])}, not of {fingerprint.model} as it is loaded now "
        f"(different: {', '.join(different)}): {way_out}"
    )


def codec_of(parts: dict[str, str]) -> str:
    """Return the name of the codec in the settings."""
    return str(json.loads(parts.get("codec", '"native"')))


def old_format(store: str) -> StoreError:
    """Return the error for a store that another version has written."""
    return StoreError(
        f"the store {store} has another version's format, which this version cannot read: "
        "encode it again with `kvrag warm --store NEW_FOLDER DOCS`"
    )
