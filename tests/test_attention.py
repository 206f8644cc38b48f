"""Attention of a pass over some rows, against the formula in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, build
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvrag.backend.transformers.attention
from kvrag import Model
from kvrag.backend.transformers.attention import Ear, attention_at

ROWS = torch.tensor([3, 4, 9, *range(30, 50), 61, 90, 91, 120, 150, 199])


def _inputs(num_heads: int, num_kv_heads: int, loud: float) -> tuple[Tensor, Tensor, Tensor]:
    """(1, HG, S, D) queries and (1, H, 200, D) keys and values; `loud` adds about so much to every score."""
    random = torch.Generator().manual_seed(num_heads)

    def normal(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, 16, generator=random)

    query, key, value = normal(num_heads, len(ROWS)) * 2, normal(num_kv_heads, 200), normal(num_kv_heads, 200)
    query[..., 0], key[..., 0] = 8, loud / 2  # the model divides by sqrt(16)
    return query.bfloat16(), key.bfloat16(), value.bfloat16()


def _attended(model: Model, query: Tensor, key: Tensor, value: Tensor, ear: Ear | None = None) -> Tensor:
    """(1, S, HG, D) on the model's last layer."""
    mask: Any = model._mask(ROWS, 200)
    mask = mask["sliding_attention"] if isinstance(mask, dict) else mask
    module: Any = model.hf.model.layers[-1].self_attn
    with torch.inference_mode(), attention_at(model.config, ROWS, model.windows, ear):
        return kvrag.backend.transformers.attention._attend(module, query, key, value, mask, scaling=0.25)[0]


def _weights(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """(HG, S, K) float64."""
    key = key[0].double().repeat_interleave(query.shape[1] // key.shape[1], dim=0)
    ago = ROWS[:, None] - torch.arange(200)
    hidden = (ago < 0) | (ago >= (window or 200))
    return (query[0].double() @ key.mT / 4).masked_fill(hidden, -torch.inf).softmax(dim=-1)


@pytest.fixture(params=["llama", "mistral-window"])
def half(request: pytest.FixtureRequest, tokenizer: Any) -> Model:
    """In bfloat16, without a window and with one."""
    model_type, changes = FAMILIES[request.param]
    return Model(build(model_type, **changes).bfloat16(), tokenizer, request.param)


@pytest.mark.parametrize("loud", [0.0, 300.0])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (7, 1)])
def test_products_are_nearly_as_precise_as_torchs_kernel(
    num_heads: int, num_kv_heads: int, loud: float, half: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all scores of a row are so high that bfloat16 cannot tell one from the next."""
    monkeypatch.setattr(kvrag.backend.transformers.attention, "_PACKED", 21)  # several blocks
    query, key, value = _inputs(num_heads, num_kv_heads, loud)
    values = value[0].double().repeat_interleave(num_heads // num_kv_heads, dim=0)
    wanted = (_weights(query, key, half.windows[-1]) @ values).transpose(0, 1)

    def error(attended: Tensor) -> float:
        return float((attended[0].double() - wanted).square().mean().sqrt())

    mask = torch.where(_weights(query, key, half.windows[-1])[:1] > 0, 0.0, -torch.inf).bfloat16()
    kernel = scaled_dot_product_attention(query, key, value, mask, scale=0.25, enable_gqa=True).transpose(1, 2)
    assert error(_attended(half, query, key, value)) <= 3 * error(kernel)


@pytest.mark.parametrize("num_queries", [1, 8, 29])
def test_the_ear_hears_the_mean_square(num_queries: int, half: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.backend.transformers.attention, "_PACKED", 21)
    query, key, value = _inputs(6, 2, 5.0)
    last = half.num_layers - 1
    heard: dict[int, Tensor] = {}
    _attended(half, query, key, value, Ear(num_queries, range(last, last + 1), heard.__setitem__))
    wanted = _weights(query, key, half.windows[-1])[:, -num_queries:].square().mean(dim=(0, 1))
    assert (heard[last] - wanted).abs().max() <= 0.01 * wanted.max()
