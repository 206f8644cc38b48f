"""Attention of a pass over some rows, against the formula in double precision."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, build
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvrag.backend.transformers.rows
from kvrag import Model
from kvrag.backend.transformers.rows import AttentionObserver, attention_at, implementation

ROWS = torch.tensor([3, 4, 9, *range(30, 50), 61, 90, 91, 120, 150, 199])


def _inputs(num_heads: int, num_kv_heads: int, loud: float) -> tuple[Tensor, Tensor, Tensor]:
    """(1, HG, S, D) queries and (1, H, 200, D) keys and values; `loud` is about the value added to every score."""
    random = torch.Generator().manual_seed(num_heads)

    def normal(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, 16, generator=random)

    query, key, value = normal(num_heads, len(ROWS)) * 2, normal(num_kv_heads, 200), normal(num_kv_heads, 200)
    query[..., 0], key[..., 0] = 8, loud / 2  # the model divides by sqrt(16)
    return query.bfloat16(), key.bfloat16(), value.bfloat16()


def _attended(
    model: Model, query: Tensor, key: Tensor, value: Tensor, observer: AttentionObserver | None = None
) -> Tensor:
    """(1, S, HG, D) on the model's last layer."""
    module: Any = model.hf.model.layers[-1].self_attn
    with torch.inference_mode(), attention_at(model.config, ROWS, ROWS, model.windows, observer):
        return kvrag.backend.transformers.rows._attend(
            module, query, key, value, torch.zeros(1, 1, 1, 1), scaling=0.25
        )[0]


def _weights(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """(HG, S, K) float64."""
    key = key[0].double().repeat_interleave(query.shape[1] // key.shape[1], dim=0)
    ago = ROWS[:, None] - torch.arange(200)
    hidden = (ago < 0) | (ago >= (window or 200))
    return (query[0].double() @ key.mT / 4).masked_fill(hidden, -torch.inf).softmax(dim=-1)


@pytest.fixture(params=[False, True], ids=["products", "kernel"])
def has_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AMX, torch's kernel attends; on others, plain products do."""
    monkeypatch.setattr(kvrag.backend.transformers.rows, "_HAS_TILES", request.param)


@pytest.fixture(params=["llama", "mistral-window"])
def half(request: pytest.FixtureRequest, tokenizer: Any) -> Model:
    """In bfloat16, without a window and with one."""
    model_type, changes = FAMILIES[request.param]
    return Model(build(model_type, **changes).bfloat16(), tokenizer, request.param)


@pytest.mark.usefixtures("has_tiles")
@pytest.mark.parametrize("loud", [0.0, 300.0])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (7, 1)])
def test_rows_are_nearly_as_precise_as_torchs_kernel(
    num_heads: int, num_kv_heads: int, loud: float, half: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all scores of a row are so high that bfloat16 cannot distinguish them."""
    monkeypatch.setattr(kvrag.backend.transformers.rows, "_PACKED", 21)  # several blocks
    query, key, value = _inputs(num_heads, num_kv_heads, loud)
    values = value[0].double().repeat_interleave(num_heads // num_kv_heads, dim=0)
    wanted = (_weights(query, key, half.windows[-1]) @ values).transpose(0, 1)

    def error(attended: Tensor) -> float:
        return float((attended[0].double() - wanted).square().mean().sqrt())

    mask = torch.where(_weights(query, key, half.windows[-1])[:1] > 0, 0.0, -torch.inf).bfloat16()
    kernel = scaled_dot_product_attention(query, key, value, mask, scale=0.25, enable_gqa=True).transpose(1, 2)
    assert error(_attended(half, query, key, value)) <= 3 * error(kernel)


@pytest.mark.usefixtures("has_tiles")
@pytest.mark.parametrize("num_queries", [1, 8, 29])
def test_the_observer_gets_the_sum_of_squares(num_queries: int, half: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.backend.transformers.rows, "_PACKED", 21)
    query, key, value = _inputs(6, 2, 5.0)
    last = half.num_layers - 1
    observed: dict[int, Tensor] = {}
    _attended(half, query, key, value, AttentionObserver(num_queries, range(last, last + 1), observed.__setitem__))
    wanted = _weights(query, key, half.windows[-1])[:, -num_queries:].square().mean(dim=0).sum(dim=0)
    assert (observed[last] - wanted).abs().max() <= 0.01 * wanted.max()


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gpt_oss"])
def test_no_mask_over_all_rows_and_keys_is_built(family: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a prompt of 64k tokens with 32k fresh ones needs gigabytes."""
    module = kvrag.backend.transformers.rows
    for user in (kvrag.backend.positions, module):
        monkeypatch.setattr(user, "CPU_ROWS", 8)
        monkeypatch.setattr(user, "ROWS", 8)
    built: list[int] = []
    mask = module._Pass.mask

    def spied(*args: Any) -> Tensor:
        built.append(mask(*args).shape[0])
        return mask(*args)

    monkeypatch.setattr(module._Pass, "mask", spied)
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    ids, rows = torch.arange(3, 103)[None], torch.arange(100)
    reference = model.forward(ids, model.new_cache(100))
    cache = model.new_cache(100)
    logits = model.forward(ids, cache, rows)
    received = model.attention_received(ids, cache, rows, 30, range(1, 2))
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)
    assert len(received) == 100
    assert 0 < max(built) <= 8


def test_cudnn_is_off_in_passes_on_rows_and_in_steps_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    attend = kvrag.backend.transformers.rows.scaled_dot_product_attention

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        with model.waiting():  # another thread's turn
            assert torch.backends.cuda.cudnn_sdp_enabled()
        return attend(*args, **kwargs)

    monkeypatch.setattr(kvrag.backend.transformers.rows, "scaled_dot_product_attention", noting)
    cache = model.new_cache(6)
    model.forward(torch.tensor([[5, 6, 7]]), cache, torch.arange(3))
    cache.set_length(3)
    model.forward_each([8], [cache])
    assert seen
    assert not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_stays_off_until_the_passes_of_all_models_have_ended() -> None:
    with ExitStack() as second:
        with implementation(SimpleNamespace(_attn_implementation="sdpa"), "kvrag", 1):
            second.enter_context(implementation(SimpleNamespace(_attn_implementation="sdpa"), "kvrag", 1))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("least", [1, 2])
def test_joined_rows_leave_the_step_go_on_alone_and_join_again(
    least: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvrag.backend.transformers.rows, "_GROWTH", 3)
    prompts = [torch.arange(5, 30 + 4 * row)[None] for row in range(3)]
    caches = [[model.new_cache(prompt.shape[1]) for prompt in prompts] for _ in range(2)]
    for own in caches:
        for prompt, cache in zip(prompts, own, strict=True):
            model.forward(prompt, cache)
    joined = set[int]()
    for rows in [(0, 1, 2)] * 12 + [(0, 2)] * 2 + [(1,)] * 20 + [(2, 1)] * 2 + [(2, 0, 1)] * 9:
        tokens = [7 + row for row in rows]
        expected = model.forward_each(tokens, [caches[0][row] for row in rows])
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(model, "joins_from", least)
            got = model.forward_each(tokens, [caches[1][row] for row in rows])
        joined.add(len({cache.layer(0)[0].untyped_storage().data_ptr() for cache in caches[1]}))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        if len(rows) == 1:
            keys = caches[1][rows[0]].layer(0)[0]
            assert keys.untyped_storage().nbytes() == keys.nbytes, "the other rows are not kept in memory with it"
    assert joined == {1, 2}
