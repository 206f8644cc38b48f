"""The fingerprint of a checkpoint, read from its files, against that of the loaded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from vllm_kvrag.fingerprint import checkpoint_fingerprint

import kvrag
from kvrag import Model
from kvrag.backend.transformers.loading import auto_class
from kvrag.errors import ModelLoadError, UnsupportedModelError
from kvrag.fingerprint import hash_weights

COMMON = ["llama", "llama-llama3", "qwen2", "qwen3", "gemma3", "mistral-window"]

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a tiny random model and the reader's tokenizer to a folder."""

    tokenizer = AutoTokenizer.from_pretrained(Path(kvrag.__file__).parent / "reader")

    def save(family: str, dtype: torch.dtype = torch.float32, shard_size: str = "50GB", **changes: Any) -> Path:
        model_type, settings = FAMILIES[family]
        build(model_type, **settings | changes).to(dtype).save_pretrained(tmp_path, max_shard_size=shard_size)
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize(
    ("stored", "loaded", "is_tied"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float32, torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize("family", COMMON)
def test_equals_the_loaded_models(
    save: Save, family: str, stored: torch.dtype, loaded: torch.dtype, is_tied: bool
) -> None:
    folder = save(family, stored, tie_word_embeddings=is_tied)
    assert checkpoint_fingerprint(folder, loaded) == Model.from_pretrained(folder, dtype=loaded).fingerprint


@pytest.mark.parametrize("loaded", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_the_loaded_models_where_the_configuration_names_another_dtype(save: Save, loaded: torch.dtype) -> None:
    folder = save("llama", torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert checkpoint_fingerprint(folder, loaded) == Model.from_pretrained(folder, dtype=loaded).fingerprint


@pytest.mark.parametrize("is_tied", [False, True])
def test_equals_the_loaded_models_in_shards(save: Save, is_tied: bool) -> None:
    folder = save("llama", shard_size="200KB", tie_word_embeddings=is_tied)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert checkpoint_fingerprint(folder, torch.float32) == Model.from_pretrained(folder).fingerprint


def test_equals_that_of_the_bundled_reader() -> None:
    theirs = Model.from_pretrained("reader", dtype=torch.bfloat16).fingerprint
    assert checkpoint_fingerprint("reader", torch.bfloat16) == theirs


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(COMMON)))
def test_the_weights_of_every_family_are_equal_or_refused(save: Save, family: str) -> None:
    if FAMILIES[family][0] not in CONFIG_MAPPING:
        pytest.skip("newer than this transformers")
    folder = save(family)
    try:
        ours = checkpoint_fingerprint(folder, torch.bfloat16).weights
    except UnsupportedModelError as error:
        reason = str(error).partition("from its files: ")[2]  # experts, per-layer embeddings and the like
    else:
        hf = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.bfloat16)
        assert ours == hash_weights(hf.state_dict().items())
        return
    assert reason.startswith(("transformers merges or splits", "transformers keeps some of its weights in float32"))


@pytest.mark.parametrize("name", ["embed_tokens", "layers.3.mlp.down_proj", "norm"])
def test_a_changed_weight_changes_it(save: Save, name: str) -> None:
    folder = save("llama")
    base = checkpoint_fingerprint(folder, torch.float32)
    hf = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        hf.get_parameter(f"model.{name}.weight").view(-1)[0] += 1
    hf.save_pretrained(folder)
    changed = checkpoint_fingerprint(folder, torch.float32)
    assert changed.weights != base.weights
    assert changed == Model.from_pretrained(folder).fingerprint


def test_dtypes_differ(save: Save) -> None:
    folder = save("llama")
    assert checkpoint_fingerprint(folder, torch.float16).digest != checkpoint_fingerprint(folder, torch.float32).digest


@pytest.mark.parametrize("rename", [lambda key: key.removeprefix("model."), lambda key: f"model.{key}"])
def test_a_missing_or_extra_prefix_is_found(save: Save, rename: Callable[[str], str]) -> None:
    """Like transformers, which accepts checkpoints with and without the base model's prefix."""
    folder = save("llama", tie_word_embeddings=True)
    _edit_header(folder, lambda header: {key if key == "__metadata__" else rename(key): header[key] for key in header})
    assert checkpoint_fingerprint(folder, torch.float32) == Model.from_pretrained(folder).fingerprint


def test_both_of_two_tied_tensors_may_be_stored(save: Save) -> None:
    """Transformers ties them only if they are equal."""
    folder = save("llama", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert checkpoint_fingerprint(folder, torch.float32) == Model.from_pretrained(folder).fingerprint


# ---------------------------------------------------------------- refused


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        checkpoint_fingerprint(tmp_path / "nothing", torch.float32)


@pytest.mark.parametrize("length", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_refused(save: Save, length: int) -> None:
    file = save("llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelLoadError, match="check the files in that folder"):
        checkpoint_fingerprint(file.parent, torch.float32)


def test_a_missing_shard_is_refused(save: Save) -> None:
    folder = save("llama", shard_size="200KB")
    min(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ModelLoadError, match="check the files in that folder"):
        checkpoint_fingerprint(folder, torch.float32)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 1}'])
def test_a_damaged_index_is_refused(save: Save, content: str) -> None:
    folder = save("llama", shard_size="200KB")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match="check the files in that folder"):
        checkpoint_fingerprint(folder, torch.float32)


def test_missing_and_misshapen_tensors_are_refused(save: Save) -> None:
    folder = save("llama")
    _edit_header(folder, lambda header: {key.replace("layers.1.mlp.up", "other"): header[key] for key in header})
    with pytest.raises(ModelLoadError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        Model.from_pretrained(folder)
    with pytest.raises(ModelLoadError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        checkpoint_fingerprint(folder, torch.float32)
    save("llama")
    _edit_header(folder, lambda header: header | {"model.norm.weight": header["model.norm.weight"] | {"shape": [32]}})
    with pytest.raises(ModelLoadError):
        checkpoint_fingerprint(folder, torch.float32)


def test_merged_experts_are_refused(save: Save) -> None:
    folder = save("mixtral")
    with pytest.raises(UnsupportedModelError, match="merges or splits"):
        checkpoint_fingerprint(folder, torch.float32)


def test_weights_that_stay_in_float32_are_refused(save: Save) -> None:
    folder = save("gpt_oss")
    with pytest.raises(UnsupportedModelError, match="in float32"):
        checkpoint_fingerprint(folder, torch.float16)


def _edit_header(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the header of a safetensors file, not the data."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(edit(json.loads(content[8:data]))).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[data:])
