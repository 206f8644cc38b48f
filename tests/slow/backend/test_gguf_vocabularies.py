"""llama.cpp's own tests of tokenizers: its vocabularies, texts and ids, in the source package of llama-cpp-python."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers", minversion="5.24")

from transformers.integrations.gguf.reader import read_gguf_metadata

from kvrag.backend.transformers.gguf import Header, tokenizer_of

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SEPARATOR = "\n__ggml_vocab_test__\n"

NAMES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    """llama.cpp's folder of vocabularies, downloaded from PyPI once."""
    cache = Path(pytestconfig.cache.mkdir("llama-cpp"))  # type: ignore[union-attr]
    models = cache / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp" / "models"
    if models.is_dir():
        return models
    options = ("--no-deps", "--no-binary", PACKAGE, "--dest", str(cache), f"{PACKAGE}=={VERSION}")
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be downloaded: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
    package = next(cache.glob("*.tar.gz"))
    with tarfile.open(package) as archive:
        archive.extractall(cache, [m for m in archive.getmembers() if "/ggml-vocab-" in m.name], filter="data")
    package.unlink()
    return models


def _tokenizer(path: Path) -> Any:
    metadata, names = read_gguf_metadata(str(path))
    metadata[f"{metadata['general.architecture']}.context_length"] = 4096
    return tokenizer_of(Header(path.name, path, metadata, names))


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name: str, folder: Path) -> None:
    path = folder / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    rows = [[int(token) for token in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    assert len(texts) > 40
    hf = _tokenizer(path)
    found = [hf.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts]
    assert [hf.decode(ids) for ids in found] == texts
    wrong = {text: (ids, row) for text, ids, row in zip(texts, found, rows, strict=True) if ids != row}
    assert not wrong


def test_every_vocabulary_is_tested(folder: Path) -> None:
    names = {path.name.removeprefix("ggml-vocab-").removesuffix(".gguf.out") for path in folder.glob("*.out")}
    assert names == {*NAMES, "bert-bge"}
