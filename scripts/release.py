"""Build the packages and test them in a clean environment outside the repository.

    python scripts/release.py                 as in `make release-check`; leaves them in dist/NAME/
    python scripts/release.py --tag v0.1.0    the same, and checks that tag, versions and changelog agree

The packages are kvrag and the folders of integrations/. .github/workflows/release.yml publishes each from its folder of
dist/. Needs only Python, a package index and 3 GB for temporary files. Stops at the first error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "kvrag": ROOT,
    **{path.parent.name: path.parent for path in sorted(ROOT.glob("integrations/*/pyproject.toml"))},
}
EXTRAS = {"kvrag": "[cli,grammar,server]"}
MISSING_EXTRA = "pip install 'kvrag[cli]'"


def main() -> None:
    """Build, check, install and test."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tag", default="", help="the release's tag, such as v0.1.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for wheels and sdists (default: dist/)")
    args = parser.parse_args()
    version = check_versions(args.tag)
    if args.tag:
        check_readmes()
    out = args.out.resolve()
    with tempfile.TemporaryDirectory(prefix="kvrag-release-") as temporary:
        build(Path(temporary), out)
        wheels = {wheel.parent.name: wheel for wheel in out.glob("*/*.whl")}
        test_wheels(Path(temporary), wheels, version)
    say(f"version {version} is ready for release: {out}")


def check_versions(tag: str) -> str:
    """Return the version on which packages, module, changelog and tag agree."""
    projects = [tomllib.loads((package / "pyproject.toml").read_text())["project"] for package in PACKAGES.values()]
    versions = {project["name"]: project["version"] for project in projects}
    version = versions["kvrag"]
    if set(versions.values()) != {version}:
        fail(f"the packages' versions differ: {versions}")
    if f'__version__ = "{version}"' not in (ROOT / "kvrag" / "__init__.py").read_text():
        fail(f"kvrag.__version__ is not {version}")
    if f"\n## {version}\n" not in (ROOT / "CHANGELOG.md").read_text():
        fail(f"CHANGELOG.md has no section '## {version}'")
    if tag and tag != f"v{version}":
        fail(f"the tag {tag} is not v{version}")
    return version


def check_readmes() -> None:
    """Stop if a page, which PyPI would show, still says that there is no release."""
    pages = [*(package / "README.md" for package in PACKAGES.values()), ROOT / "docs" / "quickstart.md"]
    if early := [str(page.relative_to(ROOT)) for page in pages if "not on PyPI yet" in page.read_text()]:
        fail(f"these pages say that the packages are not on PyPI yet: {', '.join(early)}")


def build(temporary: Path, out: Path) -> None:
    """Build sdists and wheels from the sdists, and check their metadata."""
    tools = environment(temporary / "tools")
    run(tools, "-m", "pip", "install", "--quiet", "build", "twine")
    for name, package in PACKAGES.items():
        say(f"building {name}")
        shutil.rmtree(out / name, ignore_errors=True)
        run(tools, "-m", "build", "--outdir", out / name, package)
        run(tools, "-m", "twine", "check", "--strict", *(out / name).iterdir())


def test_wheels(temporary: Path, wheels: dict[str, Path], version: str) -> None:
    """Install and use the wheels: first kvrag alone, then all of them."""
    clean, elsewhere = environment(temporary / "clean"), temporary / "elsewhere"
    elsewhere.mkdir()
    install = ("-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    say("installing kvrag without extras")
    run(clean, *install, wheels["kvrag"])
    run(clean, "-m", "pip", "check")
    printed = run(clean, "-m", "kvrag.cli.main", "--version", cwd=elsewhere)
    if printed.strip() != f"kvrag {version}":
        fail(f"kvrag --version prints {printed!r}")
    (elsewhere / "note.txt").write_text("Ingla plays the leather drum.")
    error = run(clean, "-m", "kvrag.cli.main", "warm", "note.txt", "--store", "kv", cwd=elsewhere, expect=1)
    if MISSING_EXTRA not in error:
        fail(f"without its extra, `kvrag warm` must print {MISSING_EXTRA!r}, but prints {error!r}")
    say("installing everything")
    run(clean, *install, *(f"{wheel}{EXTRAS.get(name, '')}" for name, wheel in wheels.items()))
    run(clean, "-m", "pip", "check")
    say("running the smoke tests")
    smoke = shutil.copy(ROOT / "scripts" / "smoke.py", elsewhere)
    print(run(clean, smoke, version, cwd=elsewhere), end="")


def environment(folder: Path) -> Path:
    """Create a virtual environment and return its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str | Path, cwd: Path | None = None, expect: int = 0) -> str:
    """Run this Python without the user's settings and caches; return its output, exit on an unexpected exit code."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HF_HOME", "XDG_CACHE_HOME")
    settings = {name: value for name, value in os.environ.items() if name not in hidden}
    if cwd is not None:
        settings |= {"HOME": str(cwd), "HF_HUB_OFFLINE": "1"}
    command = [str(python), *map(str, arguments)]
    process = subprocess.run(
        command, cwd=cwd, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if process.returncode != expect:
        fail(f"{' '.join(command)} exited with {process.returncode} instead of {expect}:\n{process.stdout}")
    return process.stdout


def say(message: str) -> None:
    """Print a progress line."""
    print(f"release: {message}", flush=True)


def fail(message: str) -> None:
    """Exit with an error."""
    sys.exit(f"release: {message}")


if __name__ == "__main__":
    main()
