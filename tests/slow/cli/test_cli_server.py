"""`kvrag warm --server`: the same chunks as with the local command, encoded on the server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import fake_vllm
from serving import Served, serving

from kvrag import BlendEngine, FileStore, Model
from kvrag.cli.main import main
from kvrag.server.settings import ApiKey

CORPUS = Path(__file__).parents[3] / "examples" / "corpus"
CUT = ("--chunk-tokens", "40")


@pytest.fixture(scope="module")
def reader() -> Model:
    return Model.from_pretrained("reader", dtype="float32")


@pytest.fixture
def engine(reader: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(reader, FileStore(tmp_path / "there", min_free_bytes=0)) as engine:
        yield engine


@pytest.fixture
def served(engine: BlendEngine) -> Iterator[Served]:
    with serving(engine) as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "docs"
    inside.mkdir()
    for name in ("ingla.txt", "holra.txt"):
        shutil.copy(CORPUS / name, inside)
    return inside


def run(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> Any:
    """The result, or the error's line."""
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out) if code == 0 else captured.err.splitlines()[-1]


def keys(store: Path) -> set[str]:
    return {path.name.split("-")[0] for path in (store / "chunks").glob("*/*.safetensors")}


def test_the_same_chunks_as_locally(
    folder: Path,
    served: Served,
    engine: BlendEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Model, "from_pretrained", None)  # it is not loaded here
    first = run(capsys, "warm", folder, "--server", served.url, *CUT)
    monkeypatch.undo()
    assert (first["files"], first["server"], first["model"]) == (2, served.url, "reader")
    assert first["new"] == first["chunks"] > 2
    assert first["bytes"] > 1000
    again = run(capsys, "warm", folder, "--server", f"{served.url}/v1", "--model", "reader", *CUT)
    assert (again["new"], again["reused"]) == (0, first["new"])
    assert engine.documents() == sorted(map(str, folder.iterdir()))
    local = run(capsys, "warm", folder, "--store", tmp_path / "here", "--dtype", "float32", *CUT)
    assert {name: local[name] for name in ("chunks", "new", "tokens", "bytes")} == {
        name: first[name] for name in ("chunks", "new", "tokens", "bytes")
    }
    assert keys(tmp_path / "here") == keys(tmp_path / "there") != set()


def test_documents_whose_files_are_gone(
    folder: Path, served: Served, engine: BlendEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("warm", folder, "--server", served.url, *CUT)
    run(capsys, *command)
    gone = str(folder / "ingla.txt")
    Path(gone).unlink()
    (folder / "binary.txt").write_bytes(b"\0")
    (folder / "short.txt").write_text("Too short.")
    kept = run(capsys, *command)
    assert (kept["gone"], kept["dropped"]) == ([gone], 0)
    assert [problem["file"] for problem in kept["problems"]] == [str(folder / "binary.txt")]
    [warning] = kept["warnings"]
    assert warning.startswith("1 chunk with fewer than 16 tokens will not be reused")
    pruned = run(capsys, *command, "--prune")
    assert pruned["dropped"] > 0
    assert engine.documents() == [str(folder / name) for name in ("holra.txt", "short.txt")]
    assert main([*map(str, command)]) == 0
    assert " chunks: 0 new" in capsys.readouterr().out


def test_documents_that_cannot_be_seen_are_not_pruned(
    folder: Path,
    served: Served,
    engine: BlendEngine,
    capsys: pytest.CaptureFixture[str],
    forbid: Callable[[Path], None],
) -> None:
    (folder / "closed").mkdir()
    (folder / "ingla.txt").rename(folder / "closed" / "ingla.txt")
    command = ("warm", folder, "--server", served.url, "--prune", *CUT)
    run(capsys, *command)
    before = engine.documents()
    forbid(folder / "closed")
    assert main([*map(str, command)]) == 1
    assert f"{folder / 'closed'}: skipped: Permission denied" in capsys.readouterr().err
    assert engine.documents() == before == [str(folder / "closed" / "ingla.txt"), str(folder / "holra.txt")]


def test_vllm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_vllm() as fake:
        command = ("warm", folder, "--server", fake.url, "--namespace", "n")
        assert "no tokenizer 'fake/model'" in run(capsys, *command, code=1)
        # its tokens are words
        assert "pass --tokenizer" in run(capsys, *command, "--tokenizer", "reader", code=1)
        assert fake.documents == {}


def test_keys(folder: Path, engine: BlendEngine, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    with serving(engine, key="secret", api_keys=(ApiKey("secret", "tenant"),)) as served:
        command = ("warm", folder, "--server", served.url, *CUT)
        assert "--api-key" in run(capsys, *command, code=1)
        assert run(capsys, *command, "--api-key", "secret")["new"] > 0
        monkeypatch.setenv("KVRAG_API_KEY", "secret")
        assert run(capsys, *command)["new"] == 0
        assert len(engine.documents(namespace="tenant")) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--store", "kv"), "--store is for a local store"),
        (("--codec", "int8"), "--codec is for a local store"),
        (("--context-tokens", "0"), "--context-tokens is for a local store"),
        (("--embedder", "x"), "--embedder is for a local store"),
        (("--namespace", "n"), "takes the namespace from the API key"),
        (("--model", "gpt"), "unknown model 'gpt'"),
        (("--tokenizer", "/nowhere"), "no tokenizer '/nowhere'"),
        (("--server", "nowhere"), "must be the URL"),
        (("--server", "http://127.0.0.1:9"), "cannot reach"),
    ],
)
def test_errors_are_one_line(
    folder: Path, served: Served, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], reason: str
) -> None:
    assert reason in run(capsys, "warm", folder, "--server", served.url, *options, code=1)


def test_options_of_a_server_need_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--api-key", "--tokenizer"):
        assert "needs --server" in run(capsys, "warm", folder, option, "x", code=1)
