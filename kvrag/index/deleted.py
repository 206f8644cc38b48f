"""Deleted texts: where they stand in tokens that are kept in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrag.index.match import match
from kvrag.index.segment import Segment
from kvrag.store import Entry

Decode = Callable[[Sequence[int]], str]

_LEAST = 16  # tokens in a row by which a text is recognised: the fewest that the matcher guarantees to find
_EDGES = 4  # tokens at either end of a text that are others where it is pasted


class DeletedTexts:
    """Texts that were deleted from the store.

    A long one is recognised by a part of it. A short one may have no tokens in common with the prompt it was pasted
    into, so it is looked for as it reads.
    """

    def __init__(self, texts: Sequence[Entry], decode: Decode) -> None:
        self._decode = decode
        self._segments = [Segment.of(sorted(texts, key=lambda text: text.number))] if texts else []
        self._short: defaultdict[str, set[str]] = defaultdict(set)  # by namespace
        for text in texts:
            if len(text.ids) < _LEAST + 2 * _EDGES:
                self._short[text.namespace].add(decode(text.ids.tolist()).strip())
        self.namespaces = {text.namespace for text in texts}

    def find(self, ids: Sequence[int] | NDArray[np.integer[Any]], namespace: str) -> int | None:
        """Return the position at which the first of them begins, negative if before; None if there is none."""
        if namespace not in self.namespaces:
            return None
        prompt = np.asarray(ids, np.uint32)
        starts = [run.start - run.offset for run in match(self._segments, prompt, _LEAST, namespace)]
        if short := self._short[namespace] - {""}:
            starts += self._read(prompt.tolist(), short)
        return min(starts, default=None)

    def _read(self, ids: list[int], short: set[str]) -> Iterator[int]:
        whole = self._decode(ids)
        for text in short:
            if text in whole:
                stop = bisect_left(range(len(ids)), True, key=lambda stop: text in self._decode(ids[:stop]))
                yield next(start for start in range(stop, -1, -1) if text in self._decode(ids[start:stop]))
