"""Encoding: run the model once over every chunk and keep its KV, with position-free keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend

# per forward pass, padding included: large enough to use all cores, small enough for memory
BATCH_TOKENS = 4096
BATCH_BYTES = 256 << 20  # of KV, for large models
CPU_TOKENS = 512  # on a CPU, where a pass takes seconds: finished chunks are stored between two passes

_ENOUGH = 1024  # tokens: larger passes are not faster per token, so rows are padded little to be part of them
_PADDING = 1.03

LayerKV = tuple[Tensor, Tensor]
"""Keys (position-free) and values of one chunk on one layer, each (H, T, D), on the CPU."""


class Branch(NamedTuple):
    """A row that shares its first tokens with the row of a tree, and ends with a chunk."""

    at: int  # number of the shared tokens
    ids: list[int]  # the tokens after them
    chunk: int
    first: int  # position of the chunk's first token


@dataclass
class Tree:
    """A row to compute, the places of the chunks in it, and its branches, which reuse the KV of shared tokens."""

    ids: list[int]
    chunks: dict[int, slice] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        return len(self.ids) + sum(len(branch.ids) for branch in self.branches)

    @property
    def num_pairs(self) -> float:
        """Number of pairs of a token and a key that it attends to."""
        rows = [(0, self.ids), *((branch.at, branch.ids) for branch in self.branches)]
        return sum(len(ids) * (start + len(ids) / 2) for start, ids in rows)


def encode(
    model: Backend,
    chunks: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]] | None = None,
    most_tokens: int | None = None,
) -> Iterator[tuple[int, list[LayerKV]]]:
    """Encode chunks after the model's preamble and their contexts. Only the chunks' own KV is kept.

    Shared prefixes are computed once, see `trees`. On a CPU, long rows are computed in blocks, and a chunk is yielded
    when it is complete: its number, with keys and values per layer. A pass has at least one chunk, and otherwise at
    most `most_tokens` or `batch_tokens(model)`.
    """
    forest = trees(model, chunks, contexts, most_tokens or BATCH_TOKENS)
    lengths = {number: len(tree.ids) for number, tree in enumerate(forest) if not tree.branches}
    numbers = _batches(lengths, most_tokens or batch_tokens(model), model.stable_length)
    batches = [[forest[number] for number in batch] for batch in numbers]
    for batch in batches + [[tree] for tree in forest if tree.branches]:
        encoded = _encode_batch(model, batch)
        while True:
            with torch.inference_mode(), model.encoding():  # not while this generator is suspended
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
    """Return the rows that `encode` computes for these chunks.

    Attention is causal, so a shared prefix has the same KV in both rows, unless RoPE depends on the length. A row
    becomes a branch of a longer one if they share at least its first half, and the tree has at most `most_tokens`.
    """
    preamble, contexts = list(model.preamble), contexts or [()] * len(chunks)
    rows = [[*preamble, *context, *chunk] for context, chunk in zip(contexts, chunks, strict=True)]
    forest: list[Tree] = []
    # neighbours in alphabetical order share the longest prefixes
    todo = _clusters(rows, sorted(range(len(rows)), key=rows.__getitem__), model.stable_length)
    while todo:
        cluster = todo.pop()
        longest = max(cluster, key=lambda number: len(rows[number]))
        tree, left = Tree(rows[longest]), []
        for number in cluster:
            row, first = rows[number], len(rows[number]) - len(chunks[number])
            shared = _common(tree.ids, row)
            if shared == len(row):
                tree.chunks[number] = slice(first, shared)
            elif 2 * shared < len(row) or tree.num_tokens + len(row) - shared > most_tokens:
                left.append(number)
            else:
                tree.branches.append(Branch(shared, row[shared:], number, first))
        forest.append(tree)
        todo += _clusters(rows, left, model.stable_length)
    return forest


def _clusters(rows: Sequence[list[int]], order: Sequence[int], stable_length: int) -> list[list[int]]:
    """Divide numbers of rows in alphabetical order where neighbours differ in the first half of the shorter one."""
    clusters: list[list[int]] = []
    for number in order:
        row, before = rows[number], rows[clusters[-1][-1]] if clusters else []
        shortest = min(len(row), len(before))
        if 0 < shortest <= 2 * _common(row, before) and max(len(row), len(before)) <= stable_length:
            clusters[-1].append(number)
        else:
            clusters.append([number])
    return clusters


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two rows."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # comparing slices is faster than comparing tokens
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
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
    # padding needs no mask: it comes after the chunk, where causal attention cannot see it
    rows = [tree.ids + tree.ids[-1:] * (longest - len(tree.ids)) for tree in batch]
    cache, last_layer = model.new_cache(max(longest, batch[0].num_tokens)), list[LayerKV]()  # of each pass

    def observe(number: int, keys: Tensor, values: Tensor) -> None:
        if number == last:
            last_layer.append((keys, values))

    for start in range(0, longest, size):
        stop = min(start + size, longest)
        # branches follow the row's tokens, and the next block overwrites them
        branches = [branch for branch in batch[0].branches if start < branch.at <= stop]
        lengths = [(branch.at, len(branch.ids)) for branch in branches]
        positions = torch.cat([torch.arange(stop), *(torch.arange(at, at + length) for at, length in lengths)])
        block = torch.tensor([row[start:stop] for row in rows])  # (B, T)
        if branches:
            ids = torch.cat([block, torch.tensor([[token for branch in branches for token in branch.ids]])], dim=1)
            model.forward_until(last, ids, cache, torch.arange(start, stop), lengths, observe)
        else:
            positions_of_row = torch.arange(start, stop) if len(batch) == 1 else None
            model.forward_until(last, block, cache, positions_of_row, observe=observe)
        places = [(row, *place) for row, tree in enumerate(batch) for place in _complete(tree, branches, start, stop)]
        first = min((where[0].start for _, _, where in places), default=len(positions))
        encoded: dict[int, list[LayerKV]] = {chunk: [] for _, chunk, _ in places}
        tables = model.tables(positions[first:]) if encoded else []
        for number in range(model.num_layers if encoded else 0):
            layer = (
                cache.layer(number) if number < last else (torch.cat(part, 2) for part in zip(*last_layer, strict=True))
            )
            keys, values = (part[:, :, first : len(positions)] for part in layer)
            keys = model.all_heads(model.unrotate(number, keys, tables[number])).cpu()
            values = model.all_heads(values).cpu()
            for row, chunk, where in places:
                slices = [slice(part.start - first, part.stop - first) for part in where]
                # copies: a view would keep the context's memory alive
                copies = (torch.cat([part[row, :, tokens] for tokens in slices], 1) for part in (keys, values))
                encoded[chunk].append((next(copies), next(copies)))
        keys, values = last_layer.pop()
        last_layer.append((keys[:, :, : stop - start], values[:, :, : stop - start]))
        yield encoded


def _complete(tree: Tree, branches: Sequence[Branch], start: int, stop: int) -> Iterator[tuple[int, list[slice]]]:
    """Yield the chunks that a pass over the row's tokens from `start` to `stop` completes, and their places.

    Places are counted through the row up to `stop` and then the branches that begin in between.
    """
    yield from ((chunk, [place]) for chunk, place in tree.chunks.items() if start < place.stop <= stop)
    end = stop
    for at, ids, chunk, first in branches:
        begin, end = end, end + len(ids)
        shared = [slice(first, at)] if first < at else []
        yield chunk, [*shared, slice(begin + max(first - at, 0), end)]


def _batches(lengths: Mapping[int, int], most_tokens: int, stable_length: int) -> Iterator[list[int]]:
    """Yield row numbers in batches of similar length, of equal length where RoPE depends on the length."""
    batch: list[int] = []
    filled = 0
    for number in sorted(lengths, key=lengths.__getitem__):
        length = lengths[number]
        has_other_frequencies = bool(batch) and length > stable_length and length != lengths[batch[0]]
        is_wasteful = filled >= _ENOUGH and length * len(batch) > _PADDING * filled
        if batch and (length * (len(batch) + 1) > most_tokens or has_other_frequencies or is_wasteful):
            yield batch
            batch, filled = [], 0
        batch.append(number)
        filled += length
    if batch:
        yield batch
