"""Ingestion: run the model once over every chunk and keep its KV, keys without their position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvrag.model import Model

BATCH_TOKENS = 4096
"""Tokens per forward pass, padding included: enough to keep the cores busy, little enough for the memory."""

LayerKV = tuple[Tensor, Tensor]
"""Keys (position-free) and values of one chunk on one layer, each (H, T, D), on the CPU."""


def encode(
    model: Model,
    chunks: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]] | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Iterator[tuple[int, list[LayerKV]]]:
    """Encode chunks behind the model's preamble and what stands before them, whose own KV is dropped.

    Args:
        chunks: Token ids of each, not empty, preamble not included.
        contexts: Token ids between the preamble and each chunk; None = nothing.
        batch_tokens: Most tokens of one forward pass, but at least one chunk.

    Yields:
        (number of the chunk in `chunks`, per layer keys and values), shortest chunks first.
    """
    preamble = list(model.tokenizer.preamble)
    before = [preamble + list(context) for context in contexts or [()] * len(chunks)]
    lengths = [len(prefix) + len(chunk) for prefix, chunk in zip(before, chunks, strict=True)]
    for batch in _batches(lengths, batch_tokens, model.stable_length):
        rows = [before[number] + list(chunks[number]) for number in batch]
        longest = max(map(len, rows))
        ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])  # (B, T)
        cache = model.new_cache(longest)
        # padding stands behind the chunk, where no token of it looks: causal attention needs no mask for that
        model.forward(ids, cache)
        tables = model.tables(torch.arange(longest))
        layers = []
        for layer in range(model.num_layers):
            keys, values = cache.layer(layer)  # (B, H, T, D)
            with torch.inference_mode():
                layers.append((model.unrotate(layer, keys, tables[layer]).cpu(), values.cpu()))
        for index, number in enumerate(batch):
            kept = slice(len(before[number]), len(rows[index]))
            yield number, [(keys[index, :, kept], values[index, :, kept]) for keys, values in layers]


def _batches(lengths: Sequence[int], batch_tokens: int, stable_length: int) -> Iterator[list[int]]:
    """Chunk numbers in batches of similar length. Where RoPE follows the length, it must not follow another chunk's."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[number]
        other = length > stable_length and lengths[number] != lengths[batch[0] if batch else number]
        if batch and (length * (len(batch) + 1) > batch_tokens or other):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
