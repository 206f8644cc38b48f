"""Rotation against the models' own, and against complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, build

from kvrag import Model
from kvrag.backend.positions import rotate, unrotate
from kvrag.backend.transformers.rows import cache_argument

ROTARIES = [
    "llama",
    "llama-yarn",
    "llama-longrope",
    "cohere",
    "glm4",
    "phi",
    "gpt_oss",
    "gemma3",
    "smollm3",
    "stablelm",
]


def _tables(positions: torch.Tensor, pairs: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    return angles.cos() * scale, angles.sin() * scale


@pytest.mark.parametrize("pairs", ["half_split", "interleaved"])
def test_rotation_is_multiplication_by_a_complex_number(pairs: Any) -> None:
    keys = torch.randn(2, 3, 300, 20)
    cos, sin = _tables(torch.arange(300) + 40, 8)
    turned = rotate(keys, cos, sin, pairs)
    if pairs == "half_split":
        first, second, got = keys[..., :8], keys[..., 8:16], torch.complex(turned[..., :8], turned[..., 8:16])
    else:
        first, second = keys[..., 0:16:2], keys[..., 1:16:2]
        got = torch.complex(turned[..., 0:16:2], turned[..., 1:16:2])
    torch.testing.assert_close(got, torch.complex(first, second) * torch.complex(cos, sin), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(turned[..., 16:], keys[..., 16:], atol=0, rtol=0)


@pytest.mark.parametrize("pairs", ["half_split", "interleaved"])
@pytest.mark.parametrize("scale", [1.0, 1.139])
def test_unrotate_undoes_rotate_also_for_scaled_tables(pairs: Any, scale: float) -> None:
    keys = torch.randn(1, 2, 700, 16)
    tables = _tables(torch.arange(700) * 100.0, 8, scale)
    torch.testing.assert_close(unrotate(rotate(keys, *tables, pairs), *tables, pairs), keys, atol=1e-5, rtol=1e-5)


def test_rotate_leaves_its_argument_alone_and_writes_to_out() -> None:
    keys = torch.randn(1, 2, 10, 16)
    before, out = keys.clone(), torch.empty(1, 2, 10, 16)
    cos, sin = _tables(torch.arange(10) + 5, 8)
    assert rotate(keys, cos, sin, out=out) is out
    assert torch.equal(keys, before)
    assert torch.equal(out, rotate(keys, cos, sin))
    assert not torch.equal(out, keys)


@pytest.mark.parametrize("pairs", ["half_split", "interleaved"])
def test_rotation_in_place_gives_the_same(pairs: Any) -> None:
    keys = torch.randn(1, 2, 700, 20)  # more than one block, and dimensions that do not rotate
    cos, sin = _tables(torch.arange(700) + 5, 8)
    wanted = rotate(keys, cos, sin, pairs)
    assert rotate(keys, cos, sin, pairs, out=keys) is keys
    assert torch.equal(keys, wanted)


def test_half_precision_keys_are_turned_in_float32() -> None:
    keys = torch.randn(1, 1, 64, 16).bfloat16()
    cos, sin = _tables(torch.arange(64) + 30000.0, 8)
    turned = rotate(keys, cos, sin)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned, rotate(keys.float(), cos, sin).bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize("family", ROTARIES)
@pytest.mark.parametrize("shift", [0, 1, 37])
def test_rotated_keys_equal_the_models_own_keys_at_the_new_position(family: str, shift: int, tokenizer: Any) -> None:
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    ids = torch.arange(40)[None] * 5 % 1000
    here, there = model.new_cache(40), model.new_cache(40)
    model.forward(ids, here)
    with model.lock, torch.inference_mode():
        model.hf(
            input_ids=ids,
            position_ids=torch.arange(shift, shift + 40)[None],
            **{cache_argument(type(model.hf).forward): there},
        )
    for layer in range(model.num_layers):
        keys, own = here.layer(layer)[0], there.layer(layer)[0]
        free = model.rotations(torch.arange(40))[layer].unrotate(keys)
        moved = free.clone()
        model.rotations(torch.arange(shift + 40))[layer].rotate(moved, slice(shift, shift + 40))
        torch.testing.assert_close(moved, own, atol=2e-4, rtol=1e-3)
