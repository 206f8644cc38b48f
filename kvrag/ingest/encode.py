"""Encoding: run the model once over every chunk and keep its KV, with position-free keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend, KVCache
from kvrag.backend.transformers.tokenizer import num_common
from kvrag.store.values import Layer

# per forward pass, padding included: large enough to use all cores, small enough for memory
BATCH_TOKENS = 4096
BATCH_BYTES = 256 << 20  # of KV, for large models
CPU_TOKENS = 512  # on a CPU, where a pass takes seconds: finished chunks are stored between two passes

_ENOUGH = 1024  # tokens: larger passes are not faster per token, so rows are padded little to be part of them
_PADDING = 1.03


class Branch(NamedTuple):
    """The row of one chunk, at its end. It shares its first tokens with the row of a tree, maybe all of them."""

    chunk: int
    first: int  # position of the chunk's first token
    at: int  # number of the shared tokens
    ids: list[int]  # the tokens after them


@dataclass
class Tree:
    """A row to compute, and the rows of chunks that reuse the KV of its tokens."""

    ids: list[int]
    branches: list[Branch] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        return len(self.ids) + sum(len(branch.ids) for branch in self.branches)


def encode(
    model: Backend, chunks: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]] | None = None
) -> Iterator[tuple[int, list[Layer]]]:
    """Encode chunks after the model's preamble and their contexts. Only the chunks' own KV is kept.

    Shared prefixes are computed once, see `trees`. On a CPU, long rows are computed in blocks, and a chunk is yielded
    when it is complete: its number, with position-free keys and values per layer, and the states after it where these
    are stored (`Backend.states_after`), on the CPU. A pass has at least one chunk, and otherwise at most
    `batch_tokens(model)`.
    """
    whole, branching = list[Tree](), list[Tree]()
    for tree in trees(model, chunks, contexts or [()] * len(chunks)):
        (branching if tree.num_tokens > len(tree.ids) else whole).append(tree)
    most_unequal = 0 if model.stores_states else model.stable_length  # padding would change states
    for batch in [*_batches(whole, batch_tokens(model), most_unequal), *([tree] for tree in branching)]:
        encoded = _encode_batch(model, batch)
        while True:
            with torch.inference_mode():  # not while this generator is suspended
                if (complete := next(encoded, None)) is None:
                    break
            yield from complete.items()


def batch_tokens(model: Backend) -> int:
    """Return the number of tokens that one forward pass of this model encodes, at least one chunk."""
    if model.rows_per_pass is not None:
        return 1  # its cache holds one row
    return max(1, min(CPU_TOKENS if _is_slow(model) else BATCH_TOKENS, BATCH_BYTES // model.bytes_per_token))


def _is_slow(model: Backend) -> bool:
    return model.device.type == "cpu" and model.rows_per_pass is None


def trees(model: Backend, chunks: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]]) -> list[Tree]:
    """Return the rows that `encode` computes for these chunks.

    Attention is causal, so a shared prefix has the same KV in both rows, unless RoPE depends on the length. A row
    becomes a branch of a longer one if they share at least its first half, and the tree has at most `BATCH_TOKENS`.
    """
    preamble = list(model.preamble)
    rows = [[*preamble, *context, *chunk] for context, chunk in zip(contexts, chunks, strict=True)]
    forest: list[Tree] = []
    alike: defaultdict[tuple[int, ...], list[Tree]] = defaultdict(list)  # by their first tokens
    for number in sorted(range(len(rows)), key=lambda number: len(rows[number]), reverse=True):
        row = rows[number]
        begins_alike = alike[tuple(row[: len(preamble) + 1])]
        tree = next((tree for tree in begins_alike if _can_share(model, tree, row)), None)
        if tree is None:
            tree = Tree(row)
            forest.append(tree)
            begins_alike.append(tree)
        shared = num_common(tree.ids, row)
        tree.branches.append(Branch(number, len(row) - len(chunks[number]), shared, row[shared:]))
    return forest


def _can_share(model: Backend, tree: Tree, row: list[int]) -> bool:
    """Return whether a row can be a branch of a tree, whose row is not shorter."""
    if row == tree.ids:
        return True
    half = (len(row) + 1) // 2
    if model.stores_states or len(tree.ids) > model.stable_length or row[:half] != tree.ids[:half]:
        return False  # stored states end with their row
    own = len(row) - num_common(tree.ids, row)
    return not own or not (model.keeps_states or tree.num_tokens + own > BATCH_TOKENS)


def _batches(rows: Sequence[Tree], most_tokens: int, most_unequal: int) -> Iterator[list[Tree]]:
    """Yield rows in batches of similar length, of equal length if they have more than `most_unequal` tokens."""
    batch: list[Tree] = []
    filled = 0
    for tree in sorted(rows, key=lambda tree: len(tree.ids)):
        length = len(tree.ids)
        is_unequal = bool(batch) and length > most_unequal and length != len(batch[0].ids)
        is_wasteful = filled >= _ENOUGH and length * len(batch) > _PADDING * filled
        if batch and (length * (len(batch) + 1) > most_tokens or is_unequal or is_wasteful):
            yield batch
            batch, filled = [], 0
        batch.append(tree)
        filled += length
    if batch:
        yield batch


def _encode_batch(model: Backend, batch: Sequence[Tree]) -> Iterator[dict[int, list[Layer]]]:
    """Compute a batch of rows or one tree; yield the KV of the chunks that are complete after each forward pass."""
    longest = max(len(tree.ids) for tree in batch)
    # where RoPE depends on the length, the pass must include the last position
    is_divided = len(batch) == 1 and _is_slow(model) and longest <= model.stable_length
    size = CPU_TOKENS if is_divided else longest
    # padding needs no mask: it comes after the chunk, where causal attention cannot see it
    ids = torch.tensor([tree.ids + tree.ids[-1:] * (longest - len(tree.ids)) for tree in batch])  # (B, T)
    cache = model.new_cache(max(longest, batch[0].num_tokens))
    last_layer: list[Layer] = []  # of the passes before
    for start in range(0, longest, size):
        stop = min(start + size, longest)
        ends = [(row, end) for row, tree in enumerate(batch) for end in tree.branches if start < end.at <= stop]
        keys, values = _compute(model, ids[:, start:stop], start, [branch for _, branch in ends], cache)
        yield _kv_of(model, ends, stop, cache, [*last_layer, (keys, values)])
        last_layer.append((keys[:, :, : stop - start], values[:, :, : stop - start]))


def _compute(model: Backend, ids: Tensor, start: int, branches: Sequence[Branch], cache: KVCache) -> Layer:
    """Compute the (B, T) tokens of rows from position `start` on, and then the branches' own tokens.

    The next pass overwrites the branches in `cache`. The pass ends at the keys and values of the last layer with KV,
    whose output is not needed unless states are stored: they are returned.
    """
    last, computed = model.num_layers - 1, list[Layer]()

    def observe(number: int, keys: Tensor, values: Tensor) -> None:
        if number == last:
            computed.append((keys, values))

    rows = torch.arange(start, start + ids.shape[1]) if len(ids) == 1 else None
    own = [branch for branch in branches if branch.ids]
    ids = torch.cat([ids, *(torch.tensor([branch.ids]) for branch in own)], dim=1)
    model.forward_until(
        last + model.stores_states, ids, cache, rows, [(branch.at, len(branch.ids)) for branch in own], observe
    )
    return _joined(computed, 2)


def _kv_of(
    model: Backend, complete: Sequence[tuple[int, Branch]], stop: int, cache: KVCache, last_layer: Sequence[Layer]
) -> dict[int, list[Layer]]:
    """Return the KV of chunks by number, from a cache that has their rows up to `stop`, and then the branches.

    Args:
        complete: The row and the branch of each chunk.
        last_layer: KV of the last layer, which is not in `cache`, in parts.
    """
    if not complete:
        return {}
    places: list[list[slice]] = []
    positions, end = [torch.arange(stop)], stop
    for _, (_, first, at, ids) in complete:
        begin, end = end, end + len(ids)
        own = slice(begin + max(first - at, 0), end)
        places.append([slice(first, at)] * (first < at) + [own] * bool(ids))
        positions.append(torch.arange(at, at + len(ids)))
    skipped = min(place[0].start for place in places)
    rotations = model.rotations(torch.cat(positions)[skipped:])
    encoded: dict[int, list[Layer]] = {branch.chunk: [] for _, branch in complete}
    for number in range(model.num_layers):
        layer = cache.layer(number) if number < model.num_layers - 1 else _joined(last_layer, 2)
        keys, values = (part[:, :, skipped:end] for part in layer)
        keys = model.all_heads(rotations[number].unrotate(keys)).cpu()
        values = model.all_heads(values).cpu()
        for (row, branch), place in zip(complete, places, strict=True):
            taken = (slice(part.start - skipped, part.stop - skipped) for part in place)
            # copied: a view would keep the context's memory alive
            encoded[branch.chunk].append(_joined([(keys[row, :, part], values[row, :, part]) for part in taken], 1))
    for row, branch in complete if model.stores_states else ():
        encoded[branch.chunk].append(model.states_after(cache, row))
    return encoded


def _joined(parts: Sequence[Layer], dim: int) -> Layer:
    """Return keys and values in one piece, copied."""
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, dim), torch.cat(values, dim)
