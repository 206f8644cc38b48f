"""Reading vLLM's pages, whatever their layout.

vLLM writes its pages through a layer's `do_kv_cache_update` and reads them in its kernels; where a value lies differs
between attention backends, and has changed between versions. So the layout is learned: numbers are written into a free
page, and found again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BASE = 128  # digits 0 to 127 plus one are exact in bfloat16


class PageMap:
    """Where keys and values lie within a page of one layer.

    Attributes:
        page: Tokens per page.
    """

    def __init__(self, layer: Any, num_slots: int) -> None:
        """Learn the layout. Overwrites the second page, so no request may use it.

        Args:
            layer: An attention layer with its KV cache.
            num_slots: Number of tokens that the cache has room for.

        Raises:
            ValueError: The layout is not one of pages.
        """
        cache: Tensor = layer.kv_cache
        self._dim, pages = _page_dimension(cache, layer, num_slots)
        self.page = num_slots // pages
        shape = (self.page, layer.num_kv_heads, layer.head_size)
        numbers = torch.arange(2 * shape[0] * shape[1] * shape[2]).view(2, *shape)
        slots = torch.arange(self.page, 2 * self.page, device=cache.device)
        found = None
        scale = 1
        while scale < numbers.numel():
            digits = (numbers // scale % _BASE + 1).to(cache.device, cache.dtype)
            write(layer, digits[0], digits[1], slots)
            seen = cache.select(self._dim, 1).flatten().cpu().long() - 1
            found = seen if found is None else found + scale * seen
            scale *= _BASE
        assert found is not None
        places = torch.full((numbers.numel(),), -1)
        valid = (found >= 0) & (found < numbers.numel())
        places[found[valid]] = valid.nonzero().squeeze(1)
        if (places < 0).any():
            raise ValueError(f"the layout of its pages, {tuple(cache.shape)}, cannot be read")
        self._places = places.view(2, *shape).to(cache.device)
        self._strides = [_strides(part) for part in self._places.cpu()]

    def read(self, layer: Any, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of (T,) slots, each (1, H, T, D)."""
        pages = self._pages(layer, slots)
        return self._take(0, *pages), self._take(1, *pages)

    def read_keys(self, layer: Any, slots: Tensor) -> Tensor:
        """Return the keys of (T,) slots, (1, H, T, D)."""
        return self._take(0, *self._pages(layer, slots))

    def _pages(self, layer: Any, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the (P, X) content of the slots' pages, and page and position therein of each slot."""
        pages, which = torch.unique(slots // self.page, return_inverse=True)
        content = layer.kv_cache.index_select(self._dim, pages).movedim(self._dim, 0).flatten(1)
        return content, which, slots % self.page

    def _take(self, part: int, content: Tensor, which: Tensor, position: Tensor) -> Tensor:
        """Return the (1, H, T, D) keys (0) or values (1) of positions in pages."""
        strides, places = self._strides[part], self._places[part]
        if strides is None:
            return content[which[:, None, None], places[position]].transpose(0, 1)[None]
        first = content.storage_offset() + int(places[0, 0, 0])
        view = content.as_strided(
            (len(content), *places.shape), (content.stride(0), *strides), first
        )  # (P, page, H, D)
        rows = view.movedim(2, 0).flatten(1, 2)  # (H, P x page, D): whole pages are copied faster than single numbers
        return rows.index_select(1, which * self.page + position)[None]


def write(layer: Any, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write keys and values, each (T, H, D), at (T,) slots of a layer."""
    layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), layer.kv_cache, slots)


def _strides(places: Tensor) -> tuple[int, ...] | None:
    """Return the strides of (page, H, D) places; None if they have none."""
    steps = [
        int(places.select(dim, 1)[0, 0] - places[0, 0, 0]) if size > 1 else 0 for dim, size in enumerate(places.shape)
    ]
    grid = [torch.arange(size) * step for size, step in zip(places.shape, steps, strict=True)]
    regular = places[0, 0, 0] + grid[0][:, None, None] + grid[1][:, None] + grid[2]
    return tuple(steps) if torch.equal(places, regular) else None


def _page_dimension(cache: Tensor, layer: Any, num_slots: int) -> tuple[int, int]:
    """Return the dimension of the pages and their number."""
    values_per_slot = 2 * layer.num_kv_heads * layer.head_size
    for dim, size in enumerate(cache.shape):
        if size > 1 and num_slots % size == 0 and cache.numel() // size == num_slots // size * values_per_slot:
            return dim, size
    raise ValueError(f"the layout of its pages, {tuple(cache.shape)}, is unknown")
