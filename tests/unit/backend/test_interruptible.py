"""Passes that end within a layer: the same results, and little work between two checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from kvrag import Model
from kvrag.backend.transformers import interruptible
from kvrag.backend.transformers.interruptible import Interruptible


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> int:
    """A bound at which the products of tiny models are split."""
    most = 1 << 19
    for module in ("interruptible", "model"):
        monkeypatch.setattr(f"kvrag.backend.transformers.{module}.MOST", most)
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_products_give_the_same_results(dtype: torch.dtype, most: int) -> None:
    x = torch.randn(1, 1201, 64, dtype=dtype)
    weight, bias = (torch.nn.Parameter(torch.randn(*shape, dtype=dtype), False) for shape in ((96, 64), (96,)))
    query, key = torch.randn(2, 1, 6, 301, 16, dtype=dtype)
    mask = torch.randn(1, 1, 301, 301, dtype=dtype)
    calls: list[Any] = [
        lambda: linear(x, weight),
        lambda: linear(input=x, weight=weight, bias=bias),
        lambda: scaled_dot_product_attention(query, key, key, is_causal=True, scale=0.3),
        lambda: scaled_dot_product_attention(query, key[:, :3], key[:, :3], mask, enable_gqa=True),
    ]
    for call in calls:
        checks: list[int] = []
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(interruptible, "check_left", lambda checks=checks: checks.append(1))
            wanted = call()
            with Interruptible():
                torch.testing.assert_close(call(), wanted)
        assert len(checks) >= 3
    wanted = scaled_dot_product_attention(query[0], key[0], key[0])
    with Interruptible():  # without a dimension of batches, it is not split
        torch.testing.assert_close(scaled_dot_product_attention(query[0], key[0], key[0]), wanted)


class Operations(TorchFunctionMode):
    """Counts the floating point operations of products since the last check."""

    def __init__(self) -> None:
        super().__init__()
        self.num_checks = self.now = self.largest = self.total = 0

    def check(self) -> None:
        self.num_checks, self.now = self.num_checks + 1, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (linear, torch.mm, torch.matmul, torch.Tensor.__matmul__):
            width = len(args[1]) if func is linear else args[1].shape[-1]
            self._add(2 * args[0].numel() * width)
        elif func is scaled_dot_product_attention:
            query, key = args[:2]
            self._add(4 * query.numel() * key.shape[2] / query.shape[1])  # per head: it is the smallest part
        return func(*args, **(kwargs or {}))

    def _add(self, operations: float) -> None:
        self.now += int(operations)
        self.total += int(operations)
        self.largest = max(self.largest, self.now)


@pytest.mark.parametrize("step", [1, 2])
def test_little_work_is_done_between_two_checks(
    step: int, model: Model, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: of a plain pass, and of one over scattered rows."""
    rows = torch.arange(0, 800, step)
    with Operations() as operations:
        monkeypatch.setattr(interruptible, "check_left", operations.check)
        model.forward(rows[None] + 5, model.new_cache(800), None if step == 1 else rows)
    head = 4 * 800 * 800 * 16
    assert operations.largest <= max(most / 2, head) * 1.1
    assert operations.num_checks >= operations.total / max(most / 2, head)
    assert operations.num_checks >= 20 * model.num_layers


def test_short_passes_have_no_checks_within_layers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptible, "check_left", lambda: pytest.fail("a check"))
    model.forward(torch.arange(5, 105)[None], model.new_cache(100))
