"""The public names are few and guarded: a new one needs a reason."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvrag

PUBLIC = [
    "POLICIES",
    "Answer",
    "AnswerTimeoutError",
    "BlendConfig",
    "BlendEngine",
    "BlendReport",
    "ChunkUnreadableError",
    "ContextWindowError",
    "DamagedChunkError",
    "Delta",
    "Explanation",
    "FileStore",
    "FingerprintMismatchError",
    "Grammar",
    "InvalidCall",
    "KVStore",
    "KvragError",
    "LLMBase",
    "LLMSettings",
    "LazyEngine",
    "Model",
    "ModelError",
    "ModelLoadError",
    "OutOfMemoryError",
    "PromptError",
    "RemoteEngine",
    "Run",
    "Sampling",
    "ServerError",
    "SettingError",
    "SharedStore",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
    "ToolCall",
    "UnsupportedModelError",
    "WarmReport",
]

CLASSES = [name for name in PUBLIC if name != "POLICIES"]

METHODS = {
    "BlendEngine": [
        *("warm", "awarm", "generate", "agenerate", "stream", "astream", "generate_batch", "stream_batch"),
        *("forget", "documents", "explain", "verify", "close", "from_pretrained", "shared"),
    ],
    "Model": ["from_pretrained"],
    "FileStore": ["stats", "check", "gc", "remove", "close"],
}

LIGHT = """
import sys
import kvrag
heavy = {"torch", "transformers", "sentence_transformers", "langchain_core", "llama_index", "rich"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import transformers.generation.utils, transformers.modeling_utils
heavy -= set(sys.modules)  # before 5.20, transformers itself imports rich, also through sklearn
kvrag.BlendEngine, kvrag.FileStore, kvrag.LazyEngine
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in kvrag.__all__:
    assert getattr(kvrag, name) is not None, name
try:
    kvrag.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError
"""


def test_the_public_names() -> None:
    assert kvrag.__all__ == PUBLIC


def test_every_public_class_and_method_says_what_it_is_for() -> None:
    for name in CLASSES:
        public = getattr(kvrag, name)
        assert inspect.isclass(public), name
        assert vars(public).get("__doc__"), name
        # a dataclass without one is given its signature
        assert not public.__doc__.startswith(f"{name}("), name
        for attribute, value in vars(public).items():
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if not attribute.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
                assert inspect.getdoc(function), f"{name}.{attribute}"  # its own, or inherited


def test_the_methods_people_call() -> None:
    for name, methods in METHODS.items():
        for method in methods:
            assert callable(getattr(getattr(kvrag, name), method)), f"{name}.{method}"


def test_windows_is_refused_in_one_line() -> None:
    command = "import sys; sys.platform = 'win32'; import kvrag"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ImportError: kvrag runs on Linux and macOS: on Windows, use WSL"


def test_all_errors_have_one_base() -> None:
    errors = [getattr(kvrag, name) for name in PUBLIC if name.endswith("Error")]
    assert len(errors) == 16
    assert all(issubclass(error, kvrag.KvragError) for error in errors)
    assert issubclass(kvrag.SettingError, ValueError)
    assert not issubclass(kvrag.PromptError, ValueError)  # pydantic and parsers would catch it as their own error
    assert issubclass(kvrag.ContextWindowError, kvrag.PromptError)
    assert issubclass(kvrag.UnsupportedModelError, kvrag.ModelError)
    assert issubclass(kvrag.StoreFullError, kvrag.StoreError)


@pytest.mark.slow
def test_importing_is_quiet_and_light() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", "import kvrag"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert kvrag.__version__ == project["version"]


def test_the_package_is_typed() -> None:
    assert (Path(kvrag.__file__).parent / "py.typed").exists()
