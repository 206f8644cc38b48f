"""Decode steps as CUDA graphs: launching their operations one by one takes longer than the operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 2
"""Steps before one is captured: they load kernels, and short answers are over by then."""


class StepGraph:
    """A captured step. Its input, its output and the KV that it appends to stay where they are."""

    def __init__(self, inputs: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
        """Capture `compute`, from inputs of this shape to logits, without running it. Raises RuntimeError."""
        self._inputs, self._graph = inputs.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(inputs.device)):  # type: ignore[no-untyped-call]
            # other threads may copy chunks to the device meanwhile
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._logits = compute(self._inputs)
            finally:
                self._graph.capture_end()

    def replay(self, inputs: Tensor) -> Tensor:
        """Return the logits of a step with these inputs."""
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._logits.clone()  # the next step writes there
