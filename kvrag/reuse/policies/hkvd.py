"""The tokens with the highest KV deviation (CacheBlend, arXiv:2405.16444, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend, prefill_blocks
from kvrag.request import Request
from kvrag.reuse.policies import Passes, Policy


@dataclass(frozen=True)
class Hkvd(Policy):
    """The tokens with the highest KV deviation at the check layer. Measuring it costs that many full layers."""

    check_layer: int = 1  # layer 0 cannot deviate

    def score(self, backend: Backend, request: Request, budget: int) -> Tensor:
        """Score by the deviation at the check layer.

        The layers before it run in full. Their results and the check layer's fresh keys and values are kept.
        """
        check = min(self.check_layer, backend.num_layers - 1)
        keys, values = request.cache.layer(check)
        scores = torch.full((len(request.ids),), -torch.inf)

        def run(block: Tensor, positions: Tensor | None) -> None:
            total = torch.zeros(len(block), device=keys.device)

            def observe(number: int, fresh_keys: Tensor, fresh_values: Tensor) -> None:
                if number == check:
                    at = block.to(keys.device)
                    total.add_(_distances(fresh_keys, keys[:, :, at]) + _distances(fresh_values, values[:, :, at]))
                    request.cache.write(check, at, fresh_keys, fresh_values)

            backend.forward_until(check, request.ids[block][None], request.cache, positions, observe=observe)
            scores[block] = backend.sum_over_processes(total).cpu()

        rows = torch.arange(request.kept, len(scores))
        if not request.kept and backend.rows_per_pass is None:  # plain prefill of the prefix: no mask needed
            request.cache.set_length(0)
            run(rows, None)
        else:
            for block in prefill_blocks(backend, rows):
                run(block, block)
        return scores

    def passes(self, num_layers: int) -> Passes:
        """Return the layers before the check layer, on all tokens."""
        return Passes(detection=min(self.check_layer, num_layers - 1) / num_layers)


def _distances(fresh: Tensor, cached: Tensor) -> Tensor:
    """Return the (T,) squared distances of two (1, H, T, D) tensors."""
    return (fresh.float() - cached.float()).square().sum(dim=(0, 1, 3))
