"""Weights of linear layers in 8 bits, for CPUs, where a decode step takes as long as reading the weights.

Every row of a weight is rounded to 255 steps of its own size. The model is the rounded one from then on. Passes of a
few rows read the 8-bit weights, larger ones the same values in the model's dtype, which is faster for them; memory
grows by half. The kernel is torch's own, `aten::_weight_int8pack_mm`.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear

from kvrag.config import check_option
from kvrag.errors import SettingError

logger = logging.getLogger("kvrag")

_MOST_ROWS = 8  # of a pass that reads the 8-bit weights; beyond, the matrix product takes longer than reading
_MULTIPLE = 32  # of columns, for the kernel
_FUSED = 0.02  # share of the weights in 3 dimensions; convolutions have less


class Int8Linear(Linear):
    """A linear layer with a rounded `weight` (N, K), and the same as int8 `steps` (N, K) and their `sizes` (N,)."""

    steps: Tensor
    sizes: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., N) for (..., K)."""
        num_rows = input.numel() // input.shape[-1]
        if num_rows > _MOST_ROWS:
            return linear(input, self.weight, self.bias)
        rows = input.reshape(num_rows, -1).contiguous()
        result = torch._weight_int8pack_mm(rows, self.steps, self.sizes).reshape(*input.shape[:-1], -1)
        return result if self.bias is None else result + self.bias


@torch.no_grad()
def quantize(hf: Any, quantization: str | None) -> Any:
    """Round the weights of a model's linear layers in place, and return it.

    Raises:
        SettingError: Unknown quantization, a device other than the CPU, or weights that are quantised already.
    """
    if quantization is None:
        return hf
    check_option("quantization", quantization)
    if getattr(hf, "is_quantized", False):
        raise SettingError("the model's weights are quantised already: leave out quantization")
    if devices := {str(weight.device) for weight in hf.parameters() if weight.device.type != "cpu"}:
        raise SettingError(f"quantization is for CPUs, and the model is on {min(devices)}: leave it out")
    done: dict[int, tuple[Tensor, Tensor]] = {}  # by address: embeddings may share a weight with the last layer
    for layer in hf.modules():
        if type(layer) is not Linear or layer.in_features % _MULTIPLE:
            continue
        weight = layer.weight.data
        if weight.data_ptr() not in done:
            sizes = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(weight.dtype).tiny)
            steps = (weight.float() / sizes.float()[:, None]).round_().clamp_(-127, 127)
            weight.copy_(steps * sizes.float()[:, None])
            done[weight.data_ptr()] = steps.to(torch.int8), sizes
        layer.__class__ = Int8Linear
        quantised = cast(Int8Linear, layer)
        for name, value in zip(("steps", "sizes"), done[weight.data_ptr()], strict=True):
            quantised.register_buffer(name, value, persistent=False)
    sizes_of = [(weight.ndim, weight.numel()) for weight in hf.parameters()]
    share = sum(size for ndim, size in sizes_of if ndim == 3) / max(1, sum(size for _, size in sizes_of))
    if share > _FUSED:
        logger.warning("int8 leaves %.0f %% of the weights as they are: those of its fused experts", 100 * share)
    return hf
