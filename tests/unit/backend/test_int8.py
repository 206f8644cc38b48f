"""8-bit weights: the rounded model is one model in passes of any size, and all else holds for it as for others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import relative
from families import build

from kvrag import BlendEngine, Model, SettingError
from kvrag.backend.transformers import loading
from kvrag.backend.transformers.loading import Int8Linear, quantize
from kvrag.inspect.gate import verify


def _layers(hf: Any) -> list[Int8Linear]:
    return [layer for layer in hf.modules() if isinstance(layer, Int8Linear)]


def test_rows_are_rounded_by_their_own_size() -> None:
    hf = build("llama")
    before = [layer.weight.clone() for layer in hf.modules() if type(layer) is torch.nn.Linear]
    assert quantize(hf) is hf
    layers = _layers(hf)
    assert len(layers) == len(before) == 7 * hf.config.num_hidden_layers + 1
    for layer, weight in zip(layers, before, strict=True):
        off = (layer.weight - weight).abs().amax(1) / weight.abs().amax(1)
        assert 0 < off.max() <= 0.5 / 127 * 1.001
        assert torch.equal(layer.weight, layer.steps * layer.sizes[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_give_what_many_rows_give(dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 50, bias=bias).to(dtype)
    quantize(torch.nn.Sequential(layer))
    rows = torch.randn(2, 4, 96).to(dtype)
    with torch.inference_mode():
        few, one = layer(rows), layer(rows[:1, :1])
        monkeypatch.setattr(loading, "_MOST_ROWS", 0)
        many = layer(rows)
    assert few.shape == many.shape == (2, 4, 50)
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    assert relative(few.float(), many.float()) < limit
    assert relative(one.float(), many[:1, :1].float()) < limit


def test_an_empty_row_and_other_widths_are_left_as_they_are() -> None:
    zero, odd = torch.nn.Linear(32, 4, bias=False), torch.nn.Linear(33, 4)
    zero.weight.data[1] = 0
    before = odd.weight.clone()
    quantize(torch.nn.Sequential(zero, odd))
    with torch.inference_mode():
        assert zero(torch.ones(1, 32))[0, 1] == 0
    assert torch.equal(odd.weight, before)
    assert type(odd) is torch.nn.Linear


@pytest.mark.parametrize(
    ("family", "is_said"), [("mixtral", True), ("deepseek_v3", True), ("llama", False), ("lfm2", False)]
)
def test_experts_that_stay_as_they_are_are_said_in_one_line(
    family: str, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hf = quantize(build(family))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == is_said
    left = sum(weight.numel() for name, weight in hf.named_parameters() if "experts" in name and weight.ndim == 3)
    share = 100 * left / sum(weight.numel() for weight in hf.parameters())
    assert said == [f"int8 leaves {share:.0f} % of the weights as they are: those of its fused experts"] * is_said


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma3", "gpt_oss", "mixtral", "deepseek_v3", "cohere2", "lfm2", "qwen3_next"]
)
def test_families_pass_the_gate(family: str, tokenizer: Any) -> None:
    model = Model(quantize(build(family)), tokenizer, family)
    assert _layers(model.hf)
    checks = verify(partial(BlendEngine, model), 48)
    assert [check.name for check in checks if not check.passed] == []


def test_a_weight_that_two_layers_share_stays_shared(tokenizer: Any) -> None:
    hf = quantize(build("gemma3"))
    assert hf.lm_head.weight is hf.get_input_embeddings().weight
    assert isinstance(hf.lm_head, Int8Linear)


def test_stored_kv_is_not_that_of_the_weights_before(tokenizer: Any, tmp_path: Path) -> None:
    plain, rounded = Model(build("llama"), tokenizer), Model(quantize(build("llama")), tokenizer)
    assert plain.fingerprint.digest != rounded.fingerprint.digest
    assert rounded.fingerprint == Model(quantize(build("llama")), tokenizer).fingerprint


def test_rows_that_decode_together_get_the_logits_of_each_alone(tokenizer: Any) -> None:
    model = Model(quantize(build("llama")), tokenizer)
    caches = [model.new_cache(9) for _ in range(6)]
    for number, cache in enumerate(caches):
        model.forward(torch.arange(5 + number % 3, 13 + number % 3)[None], cache)
    together = model.forward_each([7, 8, 9], caches[:3])
    alone = torch.cat([model.forward_each([7 + number], [caches[3 + number]]) for number in range(3)])
    assert relative(together, alone) < 1e-6


def test_loading_by_name(reader_quantised: Model) -> None:
    assert _layers(reader_quantised.hf)
    assert Model.from_pretrained("reader", quantization="int8") is reader_quantised
    assert Model.from_pretrained("reader") is not reader_quantised


@pytest.fixture
def reader_quantised() -> Model:
    return Model.from_pretrained("reader", quantization="int8")


def test_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="unknown quantization 'int3'; choose one of int8"):
        Model.from_pretrained("reader", quantization="int3")
    with torch.device("meta"):
        hf = torch.nn.Linear(32, 32)
    with pytest.raises(SettingError, match="quantization is for CPUs, and the model is on meta"):
        quantize(hf)
    hf = build("llama")
    monkeypatch.setattr(hf, "is_quantized", True, raising=False)
    with pytest.raises(SettingError, match="are quantised already"):
        quantize(hf)
