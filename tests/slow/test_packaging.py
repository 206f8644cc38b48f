"""The packages' content, and the release workflows."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvrag

ROOT = Path(__file__).parents[2]
LARGEST = 20 << 20
REPOSITORY = "https://github.com/kvrag/kvrag"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

release = runpy.run_path(str(ROOT / "scripts" / "release.py"))
PACKAGES = {
    name: (project, "llama_index" if name.startswith("llama-index") else name.replace("-", "_"))
    for name, project in release["PACKAGES"].items()
}


@dataclass(frozen=True)
class Built:
    """A package's files as they are shipped, name -> content; the sdist's without its folder.

    `files` are those in the package's folder when it was built.
    """

    project: Path
    package: str
    files: set[str]
    wheel: dict[str, bytes]
    sdist: dict[str, bytes]
    wheel_of_sdist: dict[str, bytes]

    @property
    def metadata(self) -> Message:
        (name,) = (name for name in self.wheel if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(self.wheel[name])


@pytest.fixture(scope="module", params=PACKAGES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built here, and once more out of the sdist, as `build` and pip do it."""
    project, package = PACKAGES[request.param]
    files = {path.relative_to(project).as_posix() for path in _files(project / package)}
    out = tmp_path_factory.mktemp("built")
    (sdist,) = SdistBuilder(str(project)).build(directory=str(out), versions=["standard"])
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "unpacked", filter="data")
        members = [member for member in archive if member.isfile()]
        contents = {member.name.partition("/")[2]: archive.extractfile(member).read() for member in members}
    (unpacked,) = (out / "unpacked").iterdir()
    return Built(project, package, files, _wheel(project, out / "direct"), contents, _wheel(unpacked, out / "again"))


def _wheel(project: Path, out: Path) -> dict[str, bytes]:
    (path,) = WheelBuilder(str(project)).build(directory=str(out), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _extras(project: Path) -> tuple[str, set[str]]:
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return described["name"], set(described.get("optional-dependencies", {}))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


# ---------------------------------------------------------------- wheels and sdists


def test_a_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    code = set(built.files)
    shipped = {name for name in built.wheel if ".dist-info/" not in name}
    assert shipped == code
    typed = {name.removesuffix("py.typed") for name in shipped if name.endswith("/py.typed")}
    assert all(any(name.startswith(folder) for folder in typed) for name in shipped)
    assert len(code) >= 3


def test_benchmarks_are_not_shipped(built: Built) -> None:
    assert not [name for name in {*built.wheel, *built.sdist} if "benchmarks" in name.split("/")]


def test_the_wheel_out_of_the_sdist_is_the_wheel(built: Built) -> None:
    assert built.wheel_of_sdist == built.wheel


def test_the_reader_is_shipped(built: Built) -> None:
    if built.package != "kvrag":
        pytest.skip("has none")
    reader = {name.removeprefix("kvrag/reader/") for name in built.wheel if name.startswith("kvrag/reader/")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"} <= reader
    assert not [name for name in reader if name.endswith(".pt")], "the state of a training"
    assert len(built.wheel["kvrag/reader/model.safetensors"]) < 20e6


def test_every_package_has_its_licence_and_readme(built: Built) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    assert [content for name, content in built.wheel.items() if name.endswith("/licenses/LICENSE")] == [licence]
    assert built.sdist["LICENSE"] == licence
    assert built.metadata["License-Expression"] == "Apache-2.0"
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    assert built.metadata.get_payload(decode=True).decode().strip() == (built.project / "README.md").read_text().strip()


def test_the_metadata_for_pypi_is_complete(built: Built) -> None:
    metadata = built.metadata
    assert metadata["Author"] == "the kvrag authors"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert {*urls} == {"Documentation", "Source", "Changelog", "Issues"}
    readme = metadata.get_payload(decode=True).decode()
    links = {*re.findall(r"\]\(([^)]+)\)", readme)}
    if built.package != "kvrag":  # PyPI does not know where a relative link starts
        assert all(link.startswith("https://") for link in links)
    there = [link for link in {*links, *urls.values()} if link.startswith(REPOSITORY)]
    assert there
    for link in there:
        path = re.sub(r"^/(blob|tree)/main/", "", link.removeprefix(REPOSITORY)).partition("#")[0]
        assert path in ("", "/issues") or (ROOT / path).exists(), link


@pytest.mark.parametrize("kind", ["llms", "vector_stores"])
def test_a_llama_index_package_has_llamahubs_layout(kind: str) -> None:
    project, package = PACKAGES[f"llama-index-{kind.replace('_', '-')}-kvrag"]
    assert {path.parent for path in (project / package).rglob("*.py")} == {project / package / kind / "kvrag"}
    described = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["llamahub"]
    assert described["import_path"] == f"llama_index.{kind}.kvrag"
    assert {*described["class_authors"]} == {*import_module(described["import_path"]).__all__}


def test_the_langchain_package_has_langchains_layout() -> None:
    modules = {"ChatBlend": "chat_models", "BlendLLM": "llms", "KVWarmVectorStore": "vectorstores"}
    modules["SentenceTransformerEmbeddings"] = "embeddings"
    package = import_module("langchain_kvrag")
    assert {name: getattr(package, name).__module__ for name in modules} == {
        name: f"langchain_kvrag.{module}" for name, module in modules.items()
    }
    tests = PACKAGES["langchain-kvrag"][0] / "tests"
    assert {path.parent.name for path in tests.rglob("test_*.py")} == {"unit_tests", "integration_tests"}
    assert all((tests / kind / "test_standard.py").exists() for kind in ("unit_tests", "integration_tests"))


def test_the_values_of_langchains_listing_are_the_packages() -> None:
    form = (ROOT / ".github" / "langchain-listing.md").read_text()
    fields = dict(part.strip().split("\n\n", 1) for part in form.split("### ")[1:])
    project = tomllib.loads((PACKAGES["langchain-kvrag"][0] / "pyproject.toml").read_text())["project"]
    chat = getattr(import_module("langchain_kvrag"), fields["Display or class name"])
    assert issubclass(chat, import_module("langchain_core.language_models").BaseChatModel)
    assert (fields["Language"], fields["Component type"]) == ("Python", "chat")
    assert fields["PyPI package name"] == project["name"]
    assert fields["Docs URL"] == project["urls"]["Documentation"]
    assert fields["Source repository"] == REPOSITORY.removeprefix("https://github.com/")
    named = {"stream": "_stream", "tool_calling": "bind_tools", "structured_output": "with_structured_output"}
    flags = dict(line.split(": ") for line in fields["Capability flags (optional)"].splitlines())
    assert flags == {"multimodal": "false"} | {
        name: str(method in vars(chat)).lower() for name, method in named.items()
    }


def test_no_release_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check = release["check_readmes"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "quickstart.md").write_text("pip install kvrag")
    page = tmp_path / "README.md"
    monkeypatch.setitem(check.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(check.__globals__, "PACKAGES", {"kvrag": tmp_path})
    page.write_text("pip install kvrag")
    check()
    page.write_text("It is not on PyPI yet.")
    with pytest.raises(SystemExit, match=r"README\.md"):
        check()


def test_packages_install_from_git(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    source = f"git+file://{ROOT}"
    wanted = [f"kvrag @ {source}", f"langchain-kvrag @ {source}#subdirectory=integrations/langchain-kvrag"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *offline, "-t", tmp_path, *wanted], check=True)
    for package in ("kvrag", "langchain_kvrag"):
        assert {path.name for path in (tmp_path / package).glob("*.py")} > {"__init__.py"}
    assert (tmp_path / "kvrag" / "reader" / "model.safetensors").stat().st_size > 1e6


def test_nothing_shipped_or_kept_is_large(built: Built) -> None:
    sizes = {name: len(content) for files in (built.wheel, built.sdist) for name, content in files.items()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    sizes |= {name: (ROOT / name).stat().st_size for name in tracked.splitlines() if (ROOT / name).is_file()}
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}


# ---------------------------------------------------------------- versions and requirements


def test_one_version_everywhere() -> None:
    assert release["check_versions"]("") == release["check_versions"](f"v{kvrag.__version__}") == kvrag.__version__
    with pytest.raises(SystemExit, match=r"the tag v9\.9\.9 is not"):
        release["check_versions"]("v9.9.9")


def test_the_packages_allow_each_other(built: Built) -> None:
    assert built.metadata["Version"] == kvrag.__version__
    needed = [Requirement(text) for text in built.metadata.get_all("Requires-Dist")]
    for requirement in needed:
        if requirement.name in PACKAGES:
            assert requirement.specifier.contains(kvrag.__version__)
            assert requirement.extras <= _extras(PACKAGES[requirement.name][0])[1]
    assert (built.package == "kvrag") != ("kvrag" in [requirement.name for requirement in needed])


def test_tested_versions_are_allowed(built: Built) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for text in built.metadata.get_all("Requires-Dist"):
        requirement = Requirement(text)
        if pinned := pins.get(canonicalize_name(requirement.name)):
            assert requirement.specifier.contains(pinned), text


def test_extras_that_messages_name_exist() -> None:
    known = dict(_extras(project) for project, _ in PACKAGES.values())
    sources = [path for project, package in PACKAGES.values() for path in (project / package).rglob("*.py")]
    named = {match for path in sources for match in re.findall(r"\b([a-z-]*kvrag)\[([a-z,-]+)\]", path.read_text())}
    assert ("kvrag", "cli") in named
    for package, extras in named:
        assert set(extras.split(",")) <= known[package], f"{package}[{extras}]"


def test_every_claimed_python_version_is_tested(built: Built) -> None:
    if built.package != "kvrag":
        pytest.skip("kvrag's say it")
    claimed = [line.rpartition(" ")[2] for line in built.metadata.get_all("Classifier") if ":: Python :: 3." in line]
    matrix = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]["check"]["strategy"]["matrix"]
    assert matrix["python"] == claimed
    assert built.metadata["Requires-Python"] == f">={claimed[0]}"


# ---------------------------------------------------------------- workflows and templates


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_only_the_permissions_it_needs(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for name, job in workflow["jobs"].items():
        allowed = job.get("permissions", {})
        assert allowed in ({}, {"contents": "read"}) or (name, allowed) == ("publish", {"id-token": "write"})
        assert "uses" in job or job["timeout-minutes"] <= 60


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_existing_files(path: Path) -> None:
    goals = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    for job in jobs.values():
        assert (ROOT / job.get("uses", "")).exists()
        assert job.get("needs", next(iter(jobs))) in jobs
        for step in job.get("steps", ()):
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step["uses"])
            else:
                program, goal = step["run"].split()
                assert (program, goal) == ("make", goal)
                assert goal in goals


def test_a_release_publishes_every_package() -> None:
    projects = [ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")]
    names = {tomllib.loads(project.read_text())["project"]["name"] for project in projects}
    job = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["publish"]
    assert sorted(names) == sorted(PACKAGES) == sorted(job["strategy"]["matrix"]["package"])
    assert job["environment"] == "pypi-${{ matrix.package }}"
    download, publish = job["steps"]
    assert publish["with"] == {"packages-dir": f"{download['with']['path']}/${{{{ matrix.package }}}}"}


def test_ci_does_what_make_does() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["check"]["steps"] if "run" in step] == ["make check"]
    run = (ROOT / ".ci" / "run").read_text().splitlines()
    made = [line.split("#")[0].split()[1:] for line in run if line.startswith("make ")]
    assert made == [["-j", "2", "setup", "setup-vllm", "lint"], ["test", "test-all"]]
    assert "\ncheck: lint test-all\n" in (ROOT / "Makefile").read_text()
    assert "make test" in (ROOT / "README.md").read_text()


def test_each_week_all_tests_run_on_the_newest_and_on_the_oldest_packages() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())
    assert "schedule" in workflow[True]  # YAML's `on`
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    assert runs == {"newest": ["make test-all"], "oldest": ["make test-oldest"]}
    install = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup"],
        cwd=ROOT,
        env={**os.environ, **workflow["jobs"]["newest"]["env"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "pip install --quiet -c /dev/null -e" in install
    assert "constraints.txt" not in install


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem)
def test_an_issue_form_asks_for_what_is_needed(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in asked}) == len(asked) > 0
    for part in asked:
        assert part["attributes"]["label"]
        assert part["validations"] == {"required": True}
