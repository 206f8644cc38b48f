"""`kvrag.ext`: what integrations import from inside kvrag, and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvrag
from kvrag import ext

ROOT = Path(kvrag.__file__).parents[1]
SOURCES = [path for path in (ROOT / "integrations").rglob("*.py") if "tests" not in path.parts]

LIGHT = """
import sys
import kvrag.ext
heavy = {"torch", "transformers", "faiss", "sentence_transformers", "pydantic", "fastapi"} & set(sys.modules)
assert not heavy, heavy
kvrag.ext.say, kvrag.ext.check_option
heavy = {"torch", "transformers", "faiss", "sentence_transformers", "fastapi"} & set(sys.modules)
assert not heavy, heavy
"""


def _imported(source: str) -> set[tuple[str, str]]:
    """Return the (module, name) of everything that is imported from kvrag; the name of a module is ""."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.partition(".")[0] == "kvrag"}


def _forbidden(source: str) -> list[str]:
    allowed = {"kvrag": set(kvrag.__all__), "kvrag.ext": set(ext._MODULES)}
    found = sorted(_imported(source))
    return [f"{module} {name}" for module, name in found if name not in allowed.get(module, set())]


def test_integrations_import_public_names_and_those_of_ext_alone() -> None:
    assert len(SOURCES) > 35
    assert {str(path): wrong for path in SOURCES if (wrong := _forbidden(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from kvrag.engine import BlendEngine",
        "def f():\n    import kvrag.engine",
        "import kvrag",
        "from kvrag import config",
        "from kvrag.ext import import_module",
        "from kvrag.server.app import create_app",
    ],
)
def test_another_import_is_found(source: str) -> None:
    assert len(_forbidden(source)) == 1


def test_ext_has_no_name_that_no_integration_imports() -> None:
    used = {name for path in SOURCES for module, name in _imported(path.read_text()) if module == "kvrag.ext"}
    assert set(ext._MODULES) == used
    assert not used & set(kvrag.__all__)


def test_every_name_of_ext_is_where_it_is_imported_from() -> None:
    assert len(ext._MODULES) == len(_imported(Path(ext.__file__).read_text())), "a name is listed twice"
    for name in ext._MODULES:
        assert getattr(ext, name) is not None, name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ext.no_such_name


@pytest.mark.slow
def test_importing_it_costs_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
