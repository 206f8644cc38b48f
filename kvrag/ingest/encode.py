"""Encoding: run the model once over every chunk and keep its KV, with position-free keys."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend

BATCH_TOKENS = 4096
"""Tokens per forward pass, padding included: large enough to use all cores, small enough for memory."""

BATCH_BYTES = 256 << 20
"""Bytes of KV per forward pass; limits the number of tokens for large models."""

CPU_TOKENS = 512
"""Tokens per forward pass on a CPU: a pass takes seconds there, and larger ones are not faster per token."""

_ENOUGH = 1024  # tokens: a larger pass is not faster per token, so no row is padded by much to be part of one
_PADDING = 1.03

LayerKV = tuple[Tensor, Tensor]
"""Keys (position-free) and values of one chunk on one layer, each (H, T, D), on the CPU."""


@dataclass
class Tree:
    """A row to compute, and rows that begin like it: each has the row's KV up to the token where it differs.

    Attributes:
        ids: Token ids of the row.
        branches: Number of leading tokens that a branch shares with the row, and the token ids that follow there.
        chunks: By number of a chunk: the places of its tokens among those of the row and then of the branches.
    """

    ids: list[int]
    branches: list[tuple[int, list[int]]] = field(default_factory=list)
    chunks: dict[int, list[slice]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        return len(self.ids) + sum(len(ids) for _, ids in self.branches)

    @property
    def num_pairs(self) -> float:
        """Number of pairs of a token and a key that it attends to."""
        return sum(len(ids) * (start + len(ids) / 2) for start, ids in [(0, self.ids), *self.branches])


def encode(
    model: Backend,
    chunks: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]] | None = None,
    most_tokens: int | None = None,
) -> Iterator[tuple[int, list[LayerKV]]]:
    """Encode chunks with the model's preamble and their contexts in front. Only the chunks' own KV is kept.

    What rows have in common at their beginning is computed once, see `trees`. On a CPU, long rows are computed in
    blocks, and their chunks are yielded as they are complete.

    Args:
        chunks: Token ids of each chunk, not empty, without the preamble.
        contexts: Token ids between the preamble and each chunk; None = no context.
        most_tokens: Maximum per forward pass, but at least one chunk; None = `batch_tokens(model)`.

    Yields:
        (number of the chunk in `chunks`, keys and values per layer).
    """
    made = trees(model, chunks, contexts, most_tokens or BATCH_TOKENS)
    lengths = {number: len(tree.ids) for number, tree in enumerate(made) if not tree.branches}
    numbers = _batches(lengths, most_tokens or batch_tokens(model), model.stable_length)
    batches = [[made[number] for number in batch] for batch in numbers]
    for batch in batches + [[tree] for tree in made if tree.branches]:
        encoded = _encode_batch(model, batch)
        while True:
            with torch.inference_mode():  # not while this generator is suspended
                if (block := next(encoded, None)) is None:
                    break
            yield from block.items()


def batch_tokens(model: Backend) -> int:
    """Return the number of tokens that one forward pass of this model encodes, at least one chunk."""
    if model.rows_per_pass is not None:
        return 1  # its cache holds one row
    return max(1, min(CPU_TOKENS if _is_slow(model) else BATCH_TOKENS, BATCH_BYTES // model.bytes_per_token))


def _is_slow(model: Backend) -> bool:
    return model.device.type == "cpu" and model.rows_per_pass is None


def trees(
    model: Backend,
    chunks: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]] | None = None,
    most_tokens: int = BATCH_TOKENS,
) -> list[Tree]:
    """Return what `encode` computes for these chunks.

    Attention is causal, so the KV of a common beginning of two rows is the same, unless RoPE depends on the length. A
    row becomes a branch of a longer one if they have at least its first half in common.

    Args:
        most_tokens: A branch that would make a tree larger is computed elsewhere.
    """
    preamble, contexts = list(model.preamble), contexts or [()] * len(chunks)
    rows = [[*preamble, *context, *chunk] for context, chunk in zip(contexts, chunks, strict=True)]
    made: list[Tree] = []
    # neighbours in alphabetical order have the longest beginnings in common
    todo = _clusters(rows, sorted(range(len(rows)), key=rows.__getitem__), model.stable_length)
    while todo:
        cluster = todo.pop()
        longest = max(cluster, key=lambda number: len(rows[number]))
        tree, left = Tree(rows[longest]), []
        for number in cluster:
            row, first = rows[number], len(rows[number]) - len(chunks[number])
            shared = _common(tree.ids, row)
            rest = row[shared:]
            if rest and (2 * shared < len(row) or tree.num_tokens + len(rest) > most_tokens):
                left.append(number)
                continue
            tree.chunks[number] = [slice(first, shared)] if first < shared else []
            if rest:
                behind = tree.num_tokens - shared + max(first, shared)
                tree.branches.append((shared, rest))
                tree.chunks[number].append(slice(behind, tree.num_tokens))
        made.append(tree)
        todo += _clusters(rows, left, model.stable_length)
    return made


def _clusters(rows: Sequence[list[int]], order: Sequence[int], stable_length: int) -> list[list[int]]:
    """Divide numbers of rows in alphabetical order where neighbours differ in the first half of the shorter one."""
    clusters: list[list[int]] = []
    for number in order:
        row, before = rows[number], rows[clusters[-1][-1]] if clusters else []
        shortest = min(len(row), len(before))
        is_near = 0 < shortest <= 2 * _common(row, before) and max(len(row), len(before)) <= stable_length
        if is_near:
            clusters[-1].append(number)
        else:
            clusters.append([number])
    return clusters


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two rows."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing slices is faster than comparing tokens
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _encode_batch(model: Backend, batch: Sequence[Tree]) -> Iterator[dict[int, list[LayerKV]]]:
    """Compute a batch of rows or one tree; yield the KV of the chunks that are complete after each forward pass.

    The last layer's output is not needed: the passes end at its keys and values.
    """
    longest, last = max(len(tree.ids) for tree in batch), model.num_layers - 1
    # where RoPE depends on the length, the pass must include the last position
    is_divided = len(batch) == 1 and _is_slow(model) and longest <= model.stable_length
    size = CPU_TOKENS if is_divided else longest
    # padding comes after the chunk, where causal attention cannot see it: no mask is needed
    rows = [tree.ids + tree.ids[-1:] * (longest - len(tree.ids)) for tree in batch]
    cache, found = model.new_cache(max(longest, batch[0].num_tokens)), list[LayerKV]()

    def observe(number: int, keys: Tensor, values: Tensor) -> bool:
        if number == last:
            found.append((keys, values))
        return number == last

    for start in range(0, longest, size):
        stop = min(start + size, longest)
        # branches follow the row's tokens, and the next block overwrites them
        branches = [(at, ids) for at, ids in batch[0].branches if start < at <= stop]
        positions = torch.cat([torch.arange(stop), *(torch.arange(at, at + len(ids)) for at, ids in branches)])
        block = torch.tensor([row[start:stop] for row in rows])  # (B, T)
        if branches:
            ids = torch.cat([block, torch.tensor([[token for _, ids in branches for token in ids]])], dim=1)
            model.forward_branches(observe, ids, cache, [(at, len(ids)) for at, ids in branches], start)
        else:
            model.forward_until(observe, block, cache, torch.arange(start, stop) if len(batch) == 1 else None)
        complete = [_complete(tree, start, stop) for tree in batch]
        first = min((places[0].start for each in complete for places in each.values()), default=len(positions))
        encoded: dict[int, list[LayerKV]] = {number: [] for each in complete for number in each}
        tables = model.tables(positions[first:]) if encoded else []
        for number in range(model.num_layers if encoded else 0):
            parts = (
                cache.layer(number) if number < last else [torch.cat(part, dim=2) for part in zip(*found, strict=True)]
            )
            keys, values = (part[:, :, first : len(positions)] for part in parts)
            keys = model.all_heads(model.unrotate(number, keys, tables[number])).cpu()
            values = model.all_heads(values).cpu()
            for index, each in enumerate(complete):
                for chunk, places in each.items():
                    own = [slice(place.start - first, place.stop - first) for place in places]
                    # copies: a view would keep the context's memory alive
                    copies = (torch.cat([part[index, :, place] for place in own], 1) for part in (keys, values))
                    encoded[chunk].append((next(copies), next(copies)))
        keys, values = found.pop()
        found.append((keys[:, :, : stop - start], values[:, :, : stop - start]))
        yield encoded


def _complete(tree: Tree, start: int, stop: int) -> dict[int, list[slice]]:
    """Return the chunks that the pass over the row's block from `start` to `stop` completes.

    Their places are among the tokens of the row up to `stop` and of the branches that begin in this block.
    """
    begins = list(accumulate((len(ids) for _, ids in tree.branches), initial=len(tree.ids)))
    shifts, end = dict[int, int](), stop
    for number, (at, ids) in enumerate(tree.branches):
        if start < at <= stop:
            shifts[number] = end - begins[number]
            end += len(ids)
    complete: dict[int, list[slice]] = {}
    for chunk, (*before, place) in tree.chunks.items():
        if place.start < len(tree.ids):
            if start < place.stop <= stop:
                complete[chunk] = [*before, place]
        elif (shift := shifts.get(bisect(begins, place.start) - 1)) is not None:
            complete[chunk] = [*before, slice(place.start + shift, place.stop + shift)]
    return complete


def _batches(lengths: Mapping[int, int], most_tokens: int, stable_length: int) -> Iterator[list[int]]:
    """Yield row numbers in batches of similar length, of equal length where RoPE depends on the length."""
    batch: list[int] = []
    filled = 0
    for number in sorted(lengths, key=lengths.__getitem__):
        length = lengths[number]
        other = length > stable_length and lengths[number] != lengths[batch[0] if batch else number]
        is_wasteful = filled >= _ENOUGH and length * len(batch) > _PADDING * filled
        if batch and (length * (len(batch) + 1) > most_tokens or other or is_wasteful):
            yield batch
            batch, filled = [], 0
        batch.append(number)
        filled += length
    if batch:
        yield batch
