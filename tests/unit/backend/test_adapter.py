"""Adapters: chunks are encoded with them, and full prefill, fresh text, other threads and stores of others are not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted_by_peft, save_adapter
from blending import CHUNKS
from families import FAMILIES, build
from safetensors.torch import load_file, save_file

from kvrag import BlendConfig, BlendEngine, FileStore, FingerprintMismatchError, Model, ModelLoadError
from kvrag.backend.transformers.adapter import CONFIG, WEIGHTS, load
from kvrag.inspect.gate import verify

PLAIN, FULL = BlendConfig(policy="none", controller="off"), BlendConfig(policy="full", controller="off")
EVERYTHING = BlendConfig(ratio=1.0, controller="off")


def _open(model: Model, adapter: Path | None, store: Path) -> BlendEngine:
    adapted = Model(model.hf, model.tokenizer.hf, model.name, adapter=adapter)
    return BlendEngine(adapted, FileStore(store, min_free_bytes=0))


def _prompt(model: Model) -> list[int]:
    return [*model.preamble, *model.tokenizer.encode("\n\n".join([*CHUNKS, "Who likes curry?"]))]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-window", "qwen3", "phi"])
def test_ratio_1_is_full_prefill(family: str, tokenizer: Any, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    folder = save_adapter(model.hf, tmp_path / "adapter")
    checks = verify(lambda store: BlendEngine(Model(model.hf, tokenizer, family, adapter=folder), store), 64)
    assert len(checks) == 4
    assert all(check.passed for check in checks), checks


def test_the_adapter_changes_stored_kv_alone_and_nothing_reused_is_exact(model: Model, tmp_path: Path) -> None:
    ids = _prompt(model)
    with _open(model, None, tmp_path / "without") as engine:
        engine.warm(CHUNKS)
        full, plain = engine.prefill(ids, FULL).logits, engine.prefill(ids, PLAIN)
        assert plain.exact.any(), "the first chunk follows the preamble"
    with _open(model, save_adapter(model.hf, tmp_path / "adapter"), tmp_path / "with") as engine:
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
    folders = {seed: save_adapter(model.hf, tmp_path / str(seed), seed) for seed in (0, 1)}
    store = tmp_path / "store"
    with _open(model, None if first is None else folders[first], store) as engine:
        engine.warm(CHUNKS)
    with pytest.raises(FingerprintMismatchError, match=rf"different: adapter\): {way_out}") as caught:
        _open(model, None if second is None else folders[second], store)
    assert "\n" not in str(caught.value)


def test_answers_during_ingestion_never_see_the_adapter(model: Model, tmp_path: Path) -> None:
    ids = _prompt(model)
    texts = [f"{text} {number}" for number in range(40) for text in CHUNKS]
    with _open(model, save_adapter(model.hf, tmp_path / "adapter"), tmp_path / "store") as engine:
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
    folder = save_adapter(model.hf, tmp_path / "adapter")
    hf.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    plain = Model.from_pretrained(tmp_path / "model", dtype="float32")
    adapted = Model.from_pretrained(tmp_path / "model", dtype="float32", adapter=folder)
    assert adapted.fingerprint.adapter
    assert plain.fingerprint.adapter == ""
    assert plain.fingerprint.digest != adapted.fingerprint.digest


def test_commands_take_an_adapter(
    hf: Any, model: Model, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvrag.cli.main import main

    hf.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    folder = save_adapter(model.hf, tmp_path / "adapter")
    base = ["verify", "--model", str(tmp_path / "model"), "--dtype", "float32", "--chunk-tokens", "64"]
    assert main([*base, "--adapter", str(folder)]) == 0
    assert main([*base, "--adapter", str(tmp_path / "missing")]) == 1
    assert "cannot load the adapter" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- threads and the format


def test_peft_computes_the_same(model: Model, tmp_path: Path) -> None:
    ids = _prompt(model)
    adapter = load(save_adapter(model.hf, tmp_path / "adapter"), model.hf, "tiny")
    with adapter.active():
        ours = model.forward(torch.tensor([ids]), model.new_cache(len(ids)))
    with torch.inference_mode():
        theirs = adapted_by_peft(model.hf)(input_ids=torch.tensor([ids])).logits[:, -1].float()
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_other_threads_never_see_the_adapter(model: Model, tmp_path: Path) -> None:
    adapter = load(save_adapter(model.hf, tmp_path / "adapter"), model.hf, "tiny")
    ids = torch.tensor([_prompt(model)])
    plain = model.forward(ids, model.new_cache(ids.shape[1]))
    results: list[torch.Tensor] = []
    hooks = [len(module._forward_hooks) for module in model.hf.modules()]

    def answer() -> None:
        results.append(model.forward(ids, model.new_cache(ids.shape[1])))

    with adapter.active():
        adapted = model.forward(ids, model.new_cache(ids.shape[1]))
        thread = threading.Thread(target=answer)
        thread.start()
        thread.join()
    assert not torch.allclose(adapted, plain, atol=1e-2)
    assert torch.equal(results[0], plain)
    assert torch.equal(model.forward(ids, model.new_cache(ids.shape[1])), plain)
    assert [len(module._forward_hooks) for module in model.hf.modules()] == hooks


def test_two_threads_encode_with_one_adapter(model: Model, tmp_path: Path) -> None:
    adapter = load(save_adapter(model.hf, tmp_path / "adapter"), model.hf, "tiny")
    ids = torch.tensor([_prompt(model)])
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with adapter.active():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(60)
    with adapter.active():
        together = model.forward(ids, model.new_cache(ids.shape[1]))
        leave.set()
        thread.join()
        alone = model.forward(ids, model.new_cache(ids.shape[1]))
    assert torch.equal(together, alone)


def _change(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return apply


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return apply


def _flip(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[3] ^= 0xFF
    (folder / WEIGHTS).write_bytes(bytes(data))


def _nan(weights: dict[str, torch.Tensor]) -> None:
    weights[next(iter(weights))][0, 0] = float("nan")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "it needs adapter_config.json"),
        (lambda folder: (folder / WEIGHTS).unlink(), "it needs adapter_config.json"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "it needs adapter_config.json"),
        (_flip, "it needs adapter_config.json"),
        (_change(r=0), "it needs adapter_config.json"),
        (_change(peft_type="IA3"), r"not a plain LoRA \(peft_type IA3\)"),
        (_change(use_dora=True), r"not a plain LoRA \(use_dora\)"),
        (_weights(lambda weights: weights.popitem()), "other weights than lora_A and lora_B"),
        (_weights(_nan), "NaN or infinite"),
    ],
)
def test_a_damaged_adapter_is_rejected_in_one_line(
    damage: Callable[[Path], None], message: str, model: Model, tmp_path: Path
) -> None:
    damage(save_adapter(model.hf, tmp_path))
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(tmp_path, model.hf, "tiny")
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_is_rejected(model: Model, tokenizer: Any, tmp_path: Path) -> None:
    save_adapter(model.hf, tmp_path)
    other = Model(build("llama", hidden_size=32), tokenizer, "other")
    with pytest.raises(ModelLoadError, match="does not fit other: no linear layer"):
        load(tmp_path, other.hf, "other")
