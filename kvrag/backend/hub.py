"""Names of models, checked before anything slow."""

from __future__ import annotations

import os
import socket
from difflib import get_close_matches
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from kvrag.backend.gguf import SMOLLM2, find
from kvrag.errors import ModelLoadError

READER = "reader"
"""Name of the small bundled model."""

BUNDLED = (READER, SMOLLM2)
"""Models that come with a package."""


def check_model(name: str) -> None:
    """Raise ModelLoadError at once if a model cannot be loaded; transformers would ask the hub for half a minute."""
    from huggingface_hub import constants  # reads the environment, which the command line changes before

    cached = os.path.join(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    if name == READER or find(name) or any(map(os.path.isdir, (name, cached))):
        return
    if name.startswith((".", "/", "~")):
        hint = "there is no such folder"
    elif "/" not in name:
        near = get_close_matches(name, BUNDLED, 1)
        known = f"pass {', '.join(BUNDLED)}, OWNER/NAME on the hub, a folder or a GGUF file"
        hint = f"did you mean {near[0]}?" if near else known
    elif is_offline():
        hint = "it is not in the local cache and HF_HUB_OFFLINE is set: unset it, or pass a folder"
    elif not _may_answer(urlsplit(constants.ENDPOINT)):
        hint = "it is not in the local cache, and the hub cannot be reached: pass a folder with the model's files"
    else:
        return
    raise ModelLoadError(f"cannot load model {name!r}: {hint}")


def is_offline() -> bool:
    """Return whether the environment forbids to ask the hub."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return HF_HUB_OFFLINE


def _may_answer(url: SplitResult) -> bool:
    """Return False if the hub has no address or refuses connections. A slow one may answer, and so may a proxy."""
    if getproxies().keys() & {"http", "https", "all"}:
        return True
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname, port), timeout=1).close()
    except TimeoutError:
        return True
    except OSError:  # the name has no address, or nobody listens there
        return False
    return True
