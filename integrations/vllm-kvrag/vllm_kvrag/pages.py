"""Read and write vLLM's pages in any layout.

vLLM writes its pages through a layer's `do_kv_cache_update` and reads them in its kernels. The layout differs between
attention backends and has changed between versions, so it is learned: numbers are written into a free page, and their
places in it are looked up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BASE = 128  # digits 0 to 127 plus one are exact in bfloat16


class PageMap:
    """Positions of keys and values within a page of one layer.

    Attributes:
        page: Tokens per page.
    """

    def __init__(self, layer: Any, num_slots: int) -> None:
        """Learn the layout. Overwrites the second page, so no request may use it.

        Args:
            layer: An attention layer with its KV cache.
            num_slots: Capacity of the cache in tokens.

        Raises:
            ValueError: The layout is not paged.
        """
        cache: Tensor = layer.kv_cache
        self._dim, pages = _page_dimension(cache, layer, num_slots)
        self.page = num_slots // pages
        shape = (self.page, layer.num_kv_heads, layer.head_size)
        numbers = torch.arange(2 * shape[0] * shape[1] * shape[2]).view(2, *shape)  # keys and values, each (page, H, D)
        slots = torch.arange(self.page, 2 * self.page, device=cache.device)
        stored = torch.zeros(0, dtype=torch.long)
        scale = 1
        while scale < numbers.numel():
            digits = (numbers // scale % _BASE + 1).to(cache.device, cache.dtype)
            write(layer, digits[:1].transpose(1, 2), digits[1:].transpose(1, 2), slots)
            read = cache.select(self._dim, 1).flatten().cpu().long() - 1
            stored = read if scale == 1 else stored + scale * read
            scale *= _BASE
        places = torch.full((numbers.numel(),), -1)
        valid = (stored >= 0) & (stored < numbers.numel())
        places[stored[valid]] = valid.nonzero().squeeze(1)
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
        """Return the (P, X) content of the slots' pages, and each slot's index into it and position in its page."""
        pages, page_index = torch.unique(slots // self.page, return_inverse=True)
        content = layer.kv_cache.index_select(self._dim, pages).movedim(self._dim, 0).flatten(1)
        return content, page_index, slots % self.page

    def _take(self, part: int, content: Tensor, page_index: Tensor, position: Tensor) -> Tensor:
        """Return the (1, H, T, D) keys (0) or values (1) of positions in pages."""
        strides, places = self._strides[part], self._places[part]
        if strides is None:
            return content[page_index[:, None, None], places[position]].transpose(0, 1)[None]
        first = content.storage_offset() + int(places[0, 0, 0])
        view = content.as_strided(
            (len(content), *places.shape), (content.stride(0), *strides), first
        )  # (P, page, H, D)
        rows = view.movedim(2, 0).flatten(1, 2)  # (H, P x page, D): whole pages are copied faster than single numbers
        return rows.index_select(1, page_index * self.page + position)[None]


def write(layer: Any, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write keys and values, each (1, H, T, D), at (T,) slots of a layer."""
    keys, values = (part[0].transpose(0, 1).contiguous() for part in (keys, values))
    layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)


def _strides(places: Tensor) -> tuple[int, ...] | None:
    """Return the strides of (page, H, D) places; None if they are irregular."""
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
