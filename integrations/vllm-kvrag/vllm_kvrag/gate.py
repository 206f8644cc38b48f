"""Check at start-up that blending equals the model's own prefill, on this model and attention backend."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag import UnsupportedModelError
from vllm_kvrag import pages
from vllm_kvrag.backend import VllmBackend

_TOKENS = 96
_SHIFT = 37
# rounded activations turn the smallest difference into one of their own rounding error
_ADVICE = ": serve this quantised model with --dtype bfloat16, or one whose weights alone are quantised (GPTQ, AWQ)"


def check(backend: VllmBackend, num_blocks: int, is_quantised: bool = False) -> None:
    """Compare blending with a full pass over the same tokens. Takes well under a second on a GPU.

    Overwrites the first pages, so no request may use them. Run in all processes of a tensor-parallel group at once.

    Raises:
        UnsupportedModelError: The results differ.
    """
    advice = _ADVICE if is_quantised else ""
    needed = -(-(_TOKENS + 1) // backend.page_map.page) + 1
    if num_blocks <= needed:
        raise UnsupportedModelError("vLLM has too few pages for the check at start-up: give it more memory")
    bound = backend.on(range(1, needed), None)
    bound.with_logits = True
    ids = (torch.arange(_TOKENS) * 7 + 3) % min(1000, backend.vocab_size)
    everything = torch.arange(_TOKENS)
    reference = bound.forward(ids[None], bound.new_cache(_TOKENS), everything)
    here = [bound.page_map.read(layer, bound.slots[:_TOKENS]) for layer in bound.layers]

    bound.together(lambda: _check_pages(bound, here))
    _check_rotary(bound, ids, here, advice)

    # instead of stored chunks: the KV of the full pass, unrotated and rotated again
    rotations = bound.rotations(everything)
    free = [rotation.unrotate(keys) for rotation, (keys, _) in zip(rotations, here, strict=True)]

    def source(number: int) -> tuple[Tensor, Tensor]:
        keys = free[number].clone()
        rotations[number].rotate(keys)
        return keys, here[number][1]

    scattered = everything[(everything % 5 == 0) | (everything % 7 == 1) | (everything > _TOKENS - 9)]
    for rows in (scattered, everything):
        blended = bound.forward(ids[rows][None], bound.new_cache(_TOKENS, source, everything), rows)
        difference = (
            None if bound.rank or _same(blended, reference, bound.dtype) else float((blended - reference).abs().max())
        )
        if (difference := bound.gather(difference)[0]) is not None:  # all processes stop, or none
            raise UnsupportedModelError(
                f"blending in vLLM is not exact for this model: logits differ by {difference:.2g} after recomputing "
                f"{len(rows)} of {_TOKENS} tokens{advice}"
            )


def _check_pages(backend: VllmBackend, here: list[tuple[Tensor, Tensor]]) -> None:
    """Check that the pages of every layer return what was written to them."""
    slots = backend.slots[:_TOKENS]
    for number, layer in enumerate(backend.layers):
        keys, values = (torch.randn_like(part) for part in here[number])
        pages.write(layer, keys, values, slots)
        if not all(map(torch.equal, backend.page_map.read(layer, slots), (keys, values))):
            raise UnsupportedModelError(f"layer {number} has another page layout than the first layer")
        pages.write(layer, *here[number], slots)


def _check_rotary(backend: VllmBackend, ids: Tensor, here: list[tuple[Tensor, Tensor]], advice: str) -> None:
    """Check that shifting a text changes its keys by their rotation only."""
    cache = backend.new_cache(_TOKENS)
    there: dict[int, Tensor] = {}

    def observe(number: int, keys: Tensor, _: Tensor) -> None:
        there[number] = keys

    rows = torch.arange(_TOKENS)
    backend.forward_until(backend.num_layers, ids[None], cache, rows, observe=observe, shift=_SHIFT)
    first, second = backend.rotations(rows), backend.rotations(rows + _SHIFT)

    def compare() -> None:
        for number, (keys, _) in enumerate(here):
            a = first[number].unrotate(keys).float()
            b = second[number].unrotate(there[number]).float()
            error = ((a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-12)).median()
            if error > (1e-3 if keys.dtype == torch.float32 else 0.1):
                raise UnsupportedModelError(
                    f"the keys of layer {number} are not position-free after removing RoPE{advice}"
                )

    backend.together(compare)
    for layer, (keys, values) in zip(backend.layers, here, strict=True):  # restore what the shifted pass overwrote
        pages.write(layer, keys, values, backend.slots[:_TOKENS])


def _same(blended: Tensor, reference: Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits are equal up to the rounding of the model's dtype."""
    error = (blended - reference).norm() / reference.norm().clamp_min(1e-9)
    return bool(error <= (1e-3 if dtype == torch.float32 else 0.1))  # False for NaN
