"""An engine whose chunks are encoded with an adapter: full prefill, fresh text and stores of others are untouched."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS
from families import FAMILIES, build

from kvrag import BlendConfig, BlendEngine, FileStore, FingerprintMismatchError, Model
from kvrag.backend.transformers.adapter import LowRank, new_layers, save
from kvrag.inspect.verify import verify

PLAIN, FULL = BlendConfig(policy="none", controller="off"), BlendConfig(policy="full", controller="off")
EVERYTHING = BlendConfig(ratio=1.0, controller="off")


def _save(model: Model, folder: Path, seed: int = 0) -> Path:
    """Write an adapter with an effect."""
    generator = torch.Generator().manual_seed(seed)
    layers = {
        name: LowRank(layer.down.detach(), torch.randn(layer.up.shape, generator=generator) * 0.3, 1.0)
        for name, layer in new_layers(model.hf, 4, seed).items()
    }
    save(folder, layers, model.name)
    return folder


def _open(model: Model, adapter: Path | None, store: Path) -> BlendEngine:
    adapted = Model(model.hf, model.tokenizer.hf, model.name, adapter=adapter)
    return BlendEngine(adapted, FileStore(store, min_free_bytes=0))


def _prompt(model: Model) -> list[int]:
    return [*model.preamble, *model.tokenizer.encode("\n\n".join([*CHUNKS, "Who likes curry?"]))]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-window", "qwen3_moe", "phi"])
def test_ratio_1_is_full_prefill(family: str, tokenizer: Any, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    folder = _save(model, tmp_path / "adapter")
    checks = verify(lambda store: BlendEngine(Model(model.hf, tokenizer, family, adapter=folder), store), 64)
    assert len(checks) == 4
    assert all(check.passed for check in checks), checks


def test_the_adapter_changes_stored_kv_alone_and_nothing_reused_is_exact(model: Model, tmp_path: Path) -> None:
    ids = _prompt(model)
    with _open(model, None, tmp_path / "without") as engine:
        engine.warm(CHUNKS)
        full, plain = engine.prefill(ids, FULL).logits, engine.prefill(ids, PLAIN)
        assert plain.exact.any(), "the first chunk follows the preamble"
    with _open(model, _save(model, tmp_path / "adapter"), tmp_path / "with") as engine:
        engine.warm(CHUNKS)
        assert torch.equal(engine.prefill(ids, FULL).logits, full)
        adapted, everything = engine.prefill(ids, PLAIN), engine.prefill(ids, EVERYTHING)
    assert not torch.allclose(adapted.logits, plain.logits, atol=1e-2)
    assert not adapted.exact.any()
    assert not adapted.report.exact
    torch.testing.assert_close(everything.logits, full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("first", "second", "way_out"),
    [
        (None, 0, "leave out the adapter"),
        (0, None, "pass the adapter that it was"),
        (0, 1, "pass the adapter that it was"),
    ],
)
def test_a_store_of_another_adapter_is_refused(
    first: int | None, second: int | None, way_out: str, model: Model, tmp_path: Path
) -> None:
    folders = {seed: _save(model, tmp_path / str(seed), seed) for seed in (0, 1)}
    store = tmp_path / "store"
    with _open(model, None if first is None else folders[first], store) as engine:
        engine.warm(CHUNKS)
    with pytest.raises(FingerprintMismatchError, match=rf"different: adapter\): {way_out}") as caught:
        _open(model, None if second is None else folders[second], store)
    assert "\n" not in str(caught.value)


def test_answers_during_ingestion_never_see_the_adapter(model: Model, tmp_path: Path) -> None:
    ids = _prompt(model)
    texts = [f"{text} {number}" for number in range(40) for text in CHUNKS]
    with _open(model, _save(model, tmp_path / "adapter"), tmp_path / "store") as engine:
        expected = engine.prefill(ids, FULL).logits
        answer = engine.generate(ids, policy="full", temperature=0, max_new_tokens=12).token_ids
        failures: list[object] = []
        is_done = threading.Event()

        def ask() -> None:
            while not is_done.is_set():
                if not torch.equal(engine.prefill(ids, FULL).logits, expected):
                    failures.append("prefill")
                if engine.generate(ids, policy="full", temperature=0, max_new_tokens=12).token_ids != answer:
                    failures.append("answer")

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        engine.warm(texts, document="d")
        is_done.set()
        for thread in threads:
            thread.join()
    assert not failures


def test_a_folder_or_a_name_loads_the_adapter(hf: Any, model: Model, tmp_path: Path, tokenizer: Any) -> None:
    folder = _save(model, tmp_path / "adapter")
    hf.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    plain = Model.from_pretrained(tmp_path / "model", dtype="float32")
    adapted = Model.from_pretrained(tmp_path / "model", dtype="float32", adapter=folder)
    assert adapted.fingerprint.adapter
    assert "adapter" not in plain.fingerprint.parts()
    assert plain.fingerprint.digest != adapted.fingerprint.digest


def test_commands_take_an_adapter(
    hf: Any, model: Model, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvrag.cli.main import main

    hf.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    folder = _save(model, tmp_path / "adapter")
    base = ["verify", "--model", str(tmp_path / "model"), "--dtype", "float32", "--chunk-tokens", "64"]
    assert main([*base, "--adapter", str(folder)]) == 0
    assert main([*base, "--adapter", str(tmp_path / "missing")]) == 1
    assert "cannot load the adapter" in capsys.readouterr().err
