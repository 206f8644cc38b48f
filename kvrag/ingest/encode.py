"""Encoding: run the model once over every chunk and keep its KV, with position-free keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend

BATCH_TOKENS = 4096
"""Tokens per forward pass, padding included: large enough to use all cores, small enough for memory."""

BATCH_BYTES = 256 << 20
"""Bytes of KV per forward pass; limits the number of tokens for large models."""

LayerKV = tuple[Tensor, Tensor]
"""Keys (position-free) and values of one chunk on one layer, each (H, T, D), on the CPU."""


def encode(
    model: Backend,
    chunks: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]] | None = None,
    most_tokens: int | None = None,
) -> Iterator[tuple[int, list[LayerKV]]]:
    """Encode chunks with the model's preamble and their contexts in front. Only the chunks' own KV is kept.

    A chunk that is part of another chunk's context is not computed twice.

    Args:
        chunks: Token ids of each chunk, not empty, without the preamble.
        contexts: Token ids between the preamble and each chunk; None = no context.
        most_tokens: Maximum per forward pass, but at least one chunk; None = `batch_tokens(model)`.

    Yields:
        (number of the chunk in `chunks`, keys and values per layer), shortest rows first.
    """
    rows = _rows(model, chunks, contexts)
    groups = _prefix_groups(rows, model.stable_length)
    most_tokens = most_tokens or batch_tokens(model)
    for batch in _batches({row: len(rows[row]) for row in groups}, most_tokens, model.stable_length):
        longest = max(len(rows[row]) for row in batch)
        ids = torch.tensor([rows[row] + rows[row][-1:] * (longest - len(rows[row])) for row in batch])  # (B, T)
        cache = model.new_cache(longest)
        # padding comes after the chunk, where causal attention cannot see it: no mask is needed
        model.forward(ids, cache)
        tables = model.tables(torch.arange(longest))
        layers = []
        for layer in range(model.num_layers):
            keys, values = cache.layer(layer)  # (B, H, T, D)
            with torch.inference_mode():
                keys = model.unrotate(layer, keys, tables[layer])
                layers.append((model.all_heads(keys).cpu(), model.all_heads(values).cpu()))
        for index, row in enumerate(batch):
            for number in groups[row]:
                kept = slice(len(rows[number]) - len(chunks[number]), len(rows[number]))
                # copies: a view would keep the context's memory alive
                yield (
                    number,
                    [(keys[index, :, kept].clone(), values[index, :, kept].clone()) for keys, values in layers],
                )


def batch_tokens(model: Backend) -> int:
    """Return the number of tokens that one forward pass of this model encodes, at least one chunk."""
    if model.rows_per_pass is not None:
        return 1  # its cache holds one row
    return max(1, min(BATCH_TOKENS, BATCH_BYTES // model.bytes_per_token))


def row_lengths(
    model: Backend, chunks: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Return the lengths of the rows that `encode` computes for these chunks."""
    rows = _rows(model, chunks, contexts)
    return [len(rows[row]) for row in _prefix_groups(rows, model.stable_length)]


def _rows(model: Backend, chunks: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Return the preamble, context and ids of each chunk as one row."""
    preamble = list(model.preamble)
    return [
        [*preamble, *context, *chunk] for context, chunk in zip(contexts or [()] * len(chunks), chunks, strict=True)
    ]


def _prefix_groups(rows: Sequence[list[int]], stable_length: int) -> dict[int, list[int]]:
    """Return the rows to compute, each with the numbers of its prefixes, itself included.

    Attention is causal, so the KV of a prefix is part of the KV of the longer row, unless RoPE depends on the length.
    """
    groups: dict[int, list[int]] = {}
    longest = -1
    for number in sorted(range(len(rows)), key=rows.__getitem__, reverse=True):  # extensions come before their prefix
        row = rows[number]
        if longest >= 0 and len(rows[longest]) <= stable_length and rows[longest][: len(row)] == row:
            groups[longest].append(number)
        else:
            longest = number
            groups[longest] = [number]
    return groups


def _batches(lengths: Mapping[int, int], most_tokens: int, stable_length: int) -> Iterator[list[int]]:
    """Yield row numbers in batches of similar length, of equal length where RoPE depends on the length."""
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
