"""`kvrag.ext`: what integrations import from inside kvrag, and nothing else."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import kvrag
from kvrag import ext

ROOT = Path(kvrag.__file__).parents[1]
SOURCES = [path for path in (ROOT / "integrations").rglob("*.py") if "tests" not in path.parts]

EXT = {path.stem: path.read_text() for path in Path(ext.__file__).parent.glob("[!_]*.py")}


def _imported(source: str) -> set[tuple[str, str]]:
    """Return the (module, name) of everything that is imported from kvrag; the name of a module is ""."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.partition(".")[0] == "kvrag"}


def _offered(name: str) -> set[str]:
    return {imported for _, imported in _imported(EXT[name])}


def _forbidden(source: str) -> list[str]:
    allowed = {"kvrag": set(kvrag.__all__), **{f"kvrag.ext.{name}": _offered(name) for name in EXT}}
    found = sorted(_imported(source))
    return [f"{module} {name}" for module, name in found if name not in allowed.get(module, set())]


def test_integrations_import_public_names_and_those_of_ext_alone() -> None:
    assert len(SOURCES) > 25
    assert {str(path): wrong for path in SOURCES if (wrong := _forbidden(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from kvrag.engine import BlendEngine",
        "def f():\n    import kvrag.engine",
        "import kvrag",
        "from kvrag import config",
        "from kvrag.ext import models",
        "from kvrag.ext.models import annotations",
        "from kvrag.server.app import create_app",
    ],
)
def test_another_import_is_found(source: str) -> None:
    assert len(_forbidden(source)) == 1


@pytest.mark.parametrize("module", EXT)
def test_a_module_has_the_names_that_integrations_import_from_it_alone(module: str) -> None:
    imported = {found for path in SOURCES for found in _imported(path.read_text())}
    assert _offered(module) == {name for place, name in imported if place == f"kvrag.ext.{module}"}
    assert not _offered(module) & set(kvrag.__all__)
    for name in _offered(module):
        assert getattr(import_module(f"kvrag.ext.{module}"), name) is not None, name
