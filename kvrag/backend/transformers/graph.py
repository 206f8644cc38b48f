"""Steps and other small passes as CUDA graphs: launching their operations takes longer than the operations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 2
"""Passes before one is captured: they load kernels, and short answers are over by then."""

MOST_ROWS = 256
"""Rows of a pass that is captured; the GPU takes longer for more than their launches do."""

_LEAST_ROWS = 16


class PassGraph:
    """A captured pass. Its input, its output and the KV that it writes to stay where they are."""

    def __init__(self, inputs: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
        """Capture `compute`, from inputs of this shape to logits, without running it. Raises RuntimeError."""
        self._inputs = inputs.clone()
        with torch.cuda.stream(_stream(inputs.device)):
            try:
                self._graph, self._logits = _captured(self._inputs, compute)
            except RuntimeError:
                # torch's default generator waits for the end of a capture: until then, no token could be drawn
                _captured(self._inputs, torch.zeros_like)
                raise

    def replay(self, inputs: Tensor) -> Tensor:
        """Return the logits of a pass with these inputs."""
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._logits.clone()  # the next pass writes there


def _captured(inputs: Tensor, compute: Callable[[Tensor], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a function in the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")  # other threads may copy chunks to the device meanwhile
    try:
        return graph, compute(inputs)
    finally:
        graph.capture_end()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for captures: each stream has a workspace for products, which is never freed."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def padded(ids: Tensor, rows: Tensor) -> Tensor:
    """Return (2, 1, S) tokens and positions of a pass, of which few sizes exist: the last row is repeated."""
    inputs = torch.stack([ids.cpu(), rows.cpu()])[:, None]
    size = max(_LEAST_ROWS, 1 << (len(rows) - 1).bit_length())
    return torch.cat([inputs, inputs[..., -1:].expand(2, 1, size - len(rows))], dim=2)
