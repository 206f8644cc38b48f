"""The file that names the model whose KV a store holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvrag.errors import FingerprintMismatchError, StoreError
from kvrag.fingerprint import FORMAT, Fingerprint

OWNER = "fingerprint.json"


def read_owner(folder: Path) -> dict[str, str]:
    """Return the parts of the fingerprint that a store folder is claimed for, {} if unclaimed; see `Fingerprint.parts`.

    Raises:
        StoreError: The file cannot be read.
    """
    try:
        return parse_owner((folder / OWNER).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise StoreError(f"cannot read {folder / OWNER} ({error.strerror})") from error
    except ValueError as error:
        raise StoreError(f"{folder / OWNER} is damaged ({error}): delete the store folder and warm again") from error


def owner_file(parts: dict[str, str]) -> bytes:
    """Return the content of the file; see `parse_owner`."""
    return json.dumps(parts, indent=1).encode()


def parse_owner(content: bytes) -> dict[str, str]:
    """Return the parts of the fingerprint in the content of such a file; raises ValueError."""
    try:
        parts = json.loads(content)
        read = {name: json.loads(part) for name, part in parts.items() if name != "digest"}
        if read.get("format", FORMAT) == FORMAT:
            Fingerprint.of(parts)
        is_sound = "model" in read and re.fullmatch(r"[0-9a-f]{32}", parts["digest"])  # it becomes a folder's name
    except (KeyError, TypeError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise ValueError("it contains no fingerprint")
    return dict(parts)


def check_owner(theirs: dict[str, str], mine: dict[str, str], name: str, kind: str) -> None:
    """Raise FingerprintMismatchError unless a store is claimed for this model and codec.

    Args:
        theirs, mine: Parts of the store's fingerprint and of the model's, both with `digest`.
        name, kind: What to call the store, and stores of its kind.
    """
    if theirs["digest"] == mine["digest"]:
        return
    different = [name for name in mine if name not in ("digest", "model") and mine[name] != theirs.get(name)]
    held, loaded = json.loads(theirs["model"]), json.loads(mine["model"])
    way_out = f"load the model with the same settings, use another {kind}, or delete this one"
    if different == ["codec"]:
        way_out = f"use codec {codec_of(theirs)} instead of {codec_of(mine)}, or {way_out}"
    raise FingerprintMismatchError(
        f"{name} holds KV of {held}, not of {loaded} as it is loaded now (different: {', '.join(different)}): {way_out}"
    )


def check_layout(folder: Path) -> None:
    """Raise StoreError, with the command that encodes it again, if another version wrote the folder."""
    try:
        written = json.loads(read_owner(folder).get("format", str(FORMAT)))
    except (StoreError, ValueError):  # a damaged file is reported by `bind`
        return
    if written != FORMAT:
        raise old_format(folder, written)


def codec_of(parts: dict[str, str]) -> str:
    """Return the name of the codec in the settings."""
    return str(json.loads(parts.get("codec", '"none"'))).replace("none", "native")


def old_format(folder: Path, written: object) -> StoreError:
    """Return the error for a store in another version's format."""
    return StoreError(
        f"the store {folder} has format {written}, which this version cannot read: "
        "encode it again with `kvrag warm --store NEW_FOLDER DOCS`"
    )
