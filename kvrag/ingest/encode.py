"""Ingestion: run the model once over every chunk and keep its KV, keys without their position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvrag.backend.transformers import Model

BATCH_TOKENS = 4096
"""Tokens per forward pass, padding included: enough to keep the cores busy, little enough for the memory."""

BATCH_BYTES = 256 << 20
"""Bytes of KV per forward pass, which bounds the tokens of large models."""

LayerKV = tuple[Tensor, Tensor]
"""Keys (position-free) and values of one chunk on one layer, each (H, T, D), on the CPU."""


def encode(
    model: Model,
    chunks: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]] | None = None,
    most_tokens: int | None = None,
) -> Iterator[tuple[int, list[LayerKV]]]:
    """Encode chunks behind the model's preamble and what stands before them, whose own KV is dropped.

    A chunk that is among what stands before another one is not computed twice.

    Args:
        chunks: Token ids of each, not empty, preamble not included.
        contexts: Token ids between the preamble and each chunk; None = nothing.
        most_tokens: Of one forward pass, but at least one chunk; None = `batch_tokens(model)`.

    Yields:
        (number of the chunk in `chunks`, per layer keys and values), those of the shortest rows first.
    """
    rows = _rows(model, chunks, contexts)
    served = _served(rows, model.stable_length)
    most_tokens = most_tokens or batch_tokens(model)
    for batch in _batches({host: len(rows[host]) for host in served}, most_tokens, model.stable_length):
        longest = max(len(rows[host]) for host in batch)
        ids = torch.tensor([rows[host] + rows[host][-1:] * (longest - len(rows[host])) for host in batch])  # (B, T)
        cache = model.new_cache(longest)
        # padding stands behind the chunk, where no token of it looks: causal attention needs no mask for that
        model.forward(ids, cache)
        tables = model.tables(torch.arange(longest))
        layers = []
        for layer in range(model.num_layers):
            keys, values = cache.layer(layer)  # (B, H, T, D)
            with torch.inference_mode():
                layers.append((model.unrotate(layer, keys, tables[layer]).cpu(), values.cpu()))
        for index, host in enumerate(batch):
            for number in served[host]:
                kept = slice(len(rows[number]) - len(chunks[number]), len(rows[number]))
                # copies, since a view would keep what stands before the chunk
                yield (
                    number,
                    [(keys[index, :, kept].clone(), values[index, :, kept].clone()) for keys, values in layers],
                )


def batch_tokens(model: Model) -> int:
    """Return how many tokens of this model one forward pass encodes."""
    return max(1, min(BATCH_TOKENS, BATCH_BYTES // model.bytes_per_token))


def row_lengths(
    model: Model, chunks: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """How long the rows are that `encode` computes for these chunks."""
    rows = _rows(model, chunks, contexts)
    return [len(rows[host]) for host in _served(rows, model.stable_length)]


def _rows(model: Model, chunks: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Each chunk behind everything that stands before it."""
    preamble = list(model.tokenizer.preamble)
    return [
        [*preamble, *context, *chunk] for context, chunk in zip(contexts or [()] * len(chunks), chunks, strict=True)
    ]


def _served(rows: Sequence[list[int]], stable_length: int) -> dict[int, list[int]]:
    """The rows to compute, each with the numbers of those that it begins with, itself among them.

    Tokens do not see what follows them, so a row that another one begins with is there when that one is, unless RoPE
    follows the length.
    """
    served: dict[int, list[int]] = {}
    host = -1
    for number in sorted(range(len(rows)), key=rows.__getitem__, reverse=True):  # what begins so comes just before
        row = rows[number]
        if host >= 0 and len(rows[host]) <= stable_length and rows[host][: len(row)] == row:
            served[host].append(number)
        else:
            host = number
            served[host] = [number]
    return served


def _batches(lengths: Mapping[int, int], most_tokens: int, stable_length: int) -> Iterator[list[int]]:
    """Row numbers in batches of similar length. Where RoPE follows the length, it must not follow another row's."""
    batch: list[int] = []
    for number in sorted(lengths, key=lengths.__getitem__):
        length = lengths[number]
        other = length > stable_length and lengths[number] != lengths[batch[0] if batch else number]
        if batch and (length * (len(batch) + 1) > most_tokens or other):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
