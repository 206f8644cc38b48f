"""Long forward passes on a CPU, which end soon after their consumer has left, see `check_left`.

One matrix product of a layer can take a second. Within `Interruptible`, products are split into parts of whole
rows or heads, and every part begins with a check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from kvrag.scheduling.waiting import check_left

MOST = 1 << 35
"""Rows times bytes of weights: a larger product takes over 100 ms on two cores in bfloat16, and would be split."""

_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm, torch.addmm, torch.baddbmm}


class Interruptible(TorchFunctionMode):
    """Checks, for the code of this thread, whether its consumer has left before every part of a matrix product."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if func is linear:
            return _linear(*args, **kwargs)
        if func is scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in _PRODUCTS:
            check_left()
        return func(*args, **kwargs)


def _parts(size: int, work: float) -> Iterator[slice]:
    """Split `size` rows or heads into parts of equal work, at most `MOST` each; check before each part."""
    most = max(int(size * MOST / work), 1)
    step = math.ceil(size / math.ceil(size / most))
    for start in range(0, size, step):
        check_left()
        yield slice(start, start + step)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, rows = input, input.numel() // input.shape[-1]
    if type(weight) is not torch.nn.Parameter or rows * weight.nbytes <= MOST:  # not of a quantised type
        check_left()
        return linear(x, weight, bias)
    rows_of_x, result = x.reshape(rows, -1), x.new_empty(*x.shape[:-1], len(weight))
    for part in _parts(rows, rows * weight.nbytes):
        product = result.view(rows, -1)[part]  # written in place: copies of the parts would take several percent
        if bias is None:
            torch.mm(rows_of_x[part], weight.T, out=product)
        else:
            torch.addmm(bias, rows_of_x[part], weight.T, out=product)
    return result


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    mask = kwargs.pop("attn_mask", mask)
    heads = key.shape[-3]
    work = 4 * query.numel() * key.shape[2] * key.element_size()  # two products, each at half the speed of a linear one
    if work <= MOST or query.dim() != 4 or (mask is not None and mask.shape[-3:-2] not in ((), (1,))):
        check_left()
        return scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)
    group = query.shape[1] // heads

    def attend(part: slice) -> Tensor:
        queries = query[:, part.start * group : part.stop * group]
        return scaled_dot_product_attention(queries, key[:, part], value[:, part], mask, *args, **kwargs)

    return torch.cat([attend(part) for part in _parts(heads, work)], dim=1)
