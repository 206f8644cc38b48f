"""Compiled decode steps, for GPUs, where launching a step's kernels one by one takes longer than running them.

`torch.compile` creates one graph for a step of one row, and another for any number of rows. Attention, which reads the
rows' caches, is a custom operator, so the graphs do not depend on lengths. The parts between two such operators are
captured as CUDA graphs, like vLLM's piecewise CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvrag.backend.transformers.rows import NoCache, as_argument
from kvrag.errors import SettingError
from kvrag.process import OfProcess

P = ParamSpec("P")
R = TypeVar("R")

_BACKEND = "inductor"
_CUDA_GRAPHS = {"triton.cudagraphs": True, "graph_partition": True}


class CompiledForward(OfProcess):
    """The forward pass of a transformers model for decode steps, compiled by the first ones.

    On a GPU it has its own thread: CUDA graphs can be replayed only by the thread that captured them, but any consumer
    of an answer may run a step.
    """

    def __init__(self, hf: Any, device: torch.device) -> None:
        """Raise SettingError if this version of torch cannot keep operators out of CUDA graphs."""
        if not hasattr(torch.Tag, "cudagraph_unsafe"):
            raise SettingError(f"compile_decode needs torch 2.9 or newer, this is {torch.__version__}")
        options: Any = _CUDA_GRAPHS if device.type == "cuda" else None

        def forward(**arguments: Any) -> Any:
            return hf(**arguments)

        forward.__code__ = forward.__code__.replace()  # torch keeps a limited number of graphs per code object
        self._forward = torch.compile(forward, backend=_BACKEND, fullgraph=True, options=options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvrag-compiled") if _own_thread(device) else None
        if self._thread:
            self._thread.submit(int).result()  # a thread whose start is interrupted would never end
        self._cache = as_argument(hf, NoCache())

    def run(self, step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a step, which calls this object, in the right thread."""
        if self._thread is None:
            return step(*args, **kwargs)
        try:
            return self._thread.submit(step, *args, **kwargs).result()
        except BaseException:
            self._thread.submit(int).result()  # after Ctrl-C, wait: the step still writes to the caches
            raise

    def __call__(self, **arguments: Any) -> Tensor:
        """Return the model's (B, 1, V) logits."""
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        logits: Tensor = self._forward(**arguments, **self._cache).logits
        return logits.clone()  # CUDA graphs write every step's logits to the same memory


def _own_thread(device: torch.device) -> bool:
    return device.type == "cuda"
