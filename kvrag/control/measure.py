"""First measurement of a GPU: a few prefills, in full and blended, short and long, before the first plan by speed.

On a CPU, blending loses by little where it loses, so that the first prompts can measure the speed.
"""

from __future__ import annotations

import math
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from kvrag.backend.protocol import PREFILL_BLOCK, Backend
from kvrag.errors import ChunkUnreadableError, OutOfMemoryError, first_line
from kvrag.process import log_once, reporting_memory
from kvrag.request import Request
from kvrag.reuse.blend import blend, stitch
from kvrag.reuse.load import LayerLoader, Trace
from kvrag.types import Run

_FEW, _VOCABULARY = 64, 256  # rows of a short pass; tokens that every model has
_CAPTURED = 4  # blended passes on few rows: from the third on, they are replayed as a CUDA graph

_lock, _measured = threading.Lock(), WeakKeyDictionary[Backend, list[tuple[Any, ...]]]()


def measured(backend: Backend) -> list[tuple[Any, ...]]:
    """Return `measure(backend)`, which runs once per process; nothing without memory for it."""
    with _lock:
        if backend not in _measured:
            _measured[backend] = []
            try:
                with reporting_memory():
                    _measured[backend] = measure(backend)
            except (OutOfMemoryError, ChunkUnreadableError) as error:
                log_once(f"the speed of the GPU is unknown before its first prompts: {first_line(error)}")
        return _measured[backend]


def measure(backend: Backend) -> list[tuple[Any, ...]]:
    """Return prefills as `CostModel.observe_pass` takes them. Chunks are in RAM."""
    most, layers, found = min(PREFILL_BLOCK, backend.context_window - 1), list[Any](), list[tuple[Any, ...]]()
    reader: Any = SimpleNamespace(layer=layers.__getitem__, tier="ram", ids=(), context_tokens=1)
    for kind, rows, reused, times in (
        *(("full", most, 0, 2), ("least", _FEW, 0, 2)),
        *(("blend", _FEW, _FEW, _CAPTURED), ("blend", most // 2, most // 2, 2)),
    ):
        length, least_s = rows + reused, math.inf
        for _ in range(times):  # the first one warms up
            request, trace = Request([position % _VOCABULARY for position in range(length)]), Trace(backend)
            request.runs, request.readers = [Run(0, reused, "", 0)] * bool(reused), {"": reader}
            with closing(LayerLoader(backend, request, "native", trace, length)) as loader, trace.step("blend"):
                stitch(backend, request, loader)
                request.selected = request.inexact[:0]
                blend(backend, request)
            least_s = min(least_s, trace.seconds["blend"])
        found.append((kind, rows, rows * length if reused else length**2 / 2, least_s, 1, reused))
        if kind == "full":
            kv = map(request.cache.layer, range(backend.num_layers))
            layers += [tuple(part[0, :, : most // 2].cpu() for part in layer) for layer in kv]
    return found
