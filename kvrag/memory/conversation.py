"""Conversations: the KV of prompts and answers, kept in memory for the prompts that follow.

KV that equals full prefill's is kept once, in a radix tree over the tokens: all prompts of a namespace that begin alike
share it (as in SGLang's RadixAttention, arXiv:2312.07104, section 3). Blended KV hangs below the exact KV before it; it
was blended for its own question, so only prompts that continue the same turns begin with it.

A conversation is recognised by its tokens alone, because frameworks send the whole history with every turn and no id.
When a history was edited, its unchanged stretches are found wherever they stand, and are reused like stored chunks.

Kept KV is never changed: the next turn copies it, so that two continuations of one conversation do not interfere.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrag.backend.protocol import Backend, KVCache
from kvrag.config import ANSWER_SETTINGS, BlendConfig
from kvrag.errors import out_of_memory
from kvrag.index.catalog import Match
from kvrag.index.match import DeletedTexts, match
from kvrag.index.segment import Segment, Tokens
from kvrag.store.values import ChunkReader, Entry, Layer
from kvrag.types import Run

_BEFORE = 64  # tokens before a stretch in which a text may begin that is recognised in the stretch
_SEARCHED = 64  # stretches used last, in which the text of an edited history is looked for
_QUESTION = 32  # tokens at the end of a prompt that are not reused from elsewhere: they select what is recomputed

States = Mapping[Any, Tensor]
"""States of layers after the tokens before a position."""
Placed = tuple[int, str]
"""Position and key of a stored chunk."""


class Turn(NamedTuple):
    """One prompt of a conversation."""

    start: int
    question_end: int  # between it and `stop` is the chat template's generation prompt
    stop: int


@dataclass(frozen=True)
class Blended:
    """How blended KV was made."""

    config: BlendConfig
    turns: tuple[Turn, ...]  # all of the conversation, each a prefix of the next
    with_context: Mapping[str, str]  # as `Request.with_context`

    def is_as_good_as(self, config: BlendConfig) -> bool:
        """Return whether it may be used for a prompt with these settings."""
        assert self.config.ratio is not None  # both are filled in by a plan
        assert config.ratio is not None
        # nothing is worse than plain reuse, whatever the policy
        others = {name: getattr(config, name) for name in ANSWER_SETTINGS if name != "policy" or not config.ratio}
        has_same_settings = replace(self.config, **others) == config
        return has_same_settings and self.config.ratio >= config.ratio


@dataclass(eq=False)
class KeptStretch:
    """KV of consecutive tokens, computed after those of its parents. Its fields are replaced, never changed."""

    namespace: str
    start: int
    ids: NDArray[np.int64]  # (T,)
    layers: Sequence[Layer]  # keys and values of each layer, each (1, H, T, D), rotated
    chunks: tuple[Placed, ...] = ()  # that begin in it, ascending
    blended: Blended | None = None  # None: equals full prefill's
    states: Mapping[int, States] = field(default_factory=dict)  # by position, in it or at its end
    parent: Callable[[], KeptStretch | None] = lambda: None  # weak: without a cycle, dropped KV is freed at once
    children: list[KeptStretch] = field(default_factory=list)  # at most one exact for each first token

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of its KV."""
        states = (state.nbytes for states in self.states.values() for state in states.values())
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers) + sum(states)

    @cached_property
    def segment(self) -> Segment:
        """Its tokens, indexed."""
        return Segment.of([Entry(1, str(id(self)), self.namespace, self.ids.astype(np.uint32))])

    def split(self, length: int) -> KeptStretch:
        """Give the first tokens to a new parent, which takes its place; return that."""
        first, rest = (  # copied before anything changes: there may be no memory
            [_copied(layer, *part) for layer in self.layers] for part in ((0, length), (length, len(self.ids)))
        )
        parent, start = self.parent(), self.start + length
        above, below = (tuple(x for x in self.chunks if (x[0] < start) == is_above) for is_above in (True, False))
        over, under = ({x: y for x, y in self.states.items() if (x <= start) == is_over} for is_over in (True, False))
        upper = replace(self, ids=self.ids[:length], layers=first, chunks=above, states=over, children=[])
        if parent is not None:
            parent.children.remove(self)
            parent.add(upper)
        self.start, self.ids, self.layers, self.chunks, self.states = start, self.ids[length:], rest, below, under
        self.__dict__.pop("segment", None)
        upper.add(self)
        return upper

    def add(self, child: KeptStretch) -> None:
        """Add a child."""
        child.parent = weakref.ref(self)
        self.children.append(child)

    def children_with(self, token: int) -> list[KeptStretch]:
        """Return the children that begin with a token."""
        return [child for child in self.children if child.ids[0] == token]

    def parents(self) -> list[KeptStretch]:
        """Return its parents, from the root on."""
        parents, below = deque[KeptStretch](), self
        while (parent := below.parent()) is not None:
            parents.appendleft(parent)
            below = parent
        return list(parents)

    def keys_before(self, length: int) -> frozenset[str]:
        """Return the keys of the chunks up to its first tokens, on which their KV depends."""
        keys = {key for position, key in self.chunks if position < self.start + length}
        return frozenset(keys.union(key for parent in self.parents() for _, key in parent.chunks))


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The first `length` positions of a prompt, from stretches."""

    length: int
    exact: int  # number of leading positions with full prefill's KV
    parts: tuple[tuple[Sequence[Layer], int], ...] = ()  # layers of each stretch, and how many of its tokens
    chunks: tuple[Placed, ...] = ()
    turns: tuple[Turn, ...] = ()  # of the blended positions
    with_context: Mapping[str, str] = field(default_factory=dict)
    states: States | None = None  # after the last position, of layers that keep some
    continued: KeptStretch | None = None  # blended, and the prompt has no further tokens in common with it

    def layer(self, number: int) -> list[Layer]:
        """Return keys and values of a layer in parts, each (1, H, t, D), in order."""
        found = [(*layers[number], length) for layers, length in self.parts]
        return [(keys[:, :, :length], values[:, :, :length]) for keys, values, length in found]


class InProgress(Protocol):
    """A request in progress, or kept for explanations."""

    namespace: str
    ids: Any  # (T,) tokens of the prompt
    is_forgotten: bool  # a chunk or a text in it was dropped: its KV is not kept

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the chunks on which its KV may depend."""


class Conversations:
    """The stretches used last, up to `max_bytes` of KV. Thread-safe.

    Beyond `longest` tokens, the model's RoPE depends on the length of the prompt: nothing of such prompts is kept, not
    even their first tokens, because KV computed at another length cannot be reused.
    """

    def __init__(self, max_bytes: int, longest: int, keeps_states: bool = False) -> None:
        self.max_bytes, self._longest = max_bytes, longest
        self.keeps_states = keeps_states  # then a prompt continues where states are kept, and only exact KV
        self._roots: dict[str, KeptStretch] = {}  # by namespace; a root has no tokens
        self._kept = OrderedDict[KeptStretch, None]()  # by their last use, children before their parents
        self._num_bytes = 0  # of their KV
        self._begun: weakref.WeakSet[InProgress] = weakref.WeakSet()
        self._lock = threading.Lock()
        # garbage collection can end an abandoned stream, which keeps its conversation, at any point, even in here
        self._pending: deque[Callable[[], None]] = deque()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            self._work_off()
            yield

    def _work_off(self) -> None:
        while self._pending:
            try:
                self._pending.popleft()()
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise  # else it is not kept: the answer is complete

    def find(self, ids: Tokens, config: BlendConfig, namespace: str = "") -> CachedPrefix | None:
        """Return the longest prefix of a prompt that can be reused; None if it is not worth it.

        Of KV that was blended from chunks, only whole turns are reused: chunks are blended for the question that
        follows them.
        """
        if len(ids) > self._longest:
            return None
        prompt = np.asarray(ids)
        with self._changing():
            path = self._walk(prompt[:-1], namespace)  # the last token is always computed: its logits are needed
            states = None
            if self.keeps_states:
                path, states = _to_states(path)
            exact = sum(length for _, length in path)
            whole = [stretch for stretch, length in path if length == len(stretch.ids)]
            below = [child for stretch in whole for child in stretch.children_with(prompt[stretch.stop])]
            usable = [child for child in below if child.blended and child.blended.is_as_good_as(config)]
            last = max(usable, key=lambda child: _turns(prompt, child)[0], default=None)
            length, turns, is_all = _turns(prompt, last) if last else (0, (), False)
            if last and length > exact:
                exact = last.start
                path = [*((parent, len(parent.ids)) for parent in last.parents()), (last, length - exact)]
            else:
                last, length = None, exact
            if length < config.min_run:
                return None
            self._touch(path[-1][0])
            parts = tuple((stretch.layers, part) for stretch, part in path if part)
            chunks = {placed for stretch, _ in path for placed in stretch.chunks if placed[0] < length}
            prefix = CachedPrefix(length, exact, parts, tuple(sorted(chunks)), states=states)
            if last is None or last.blended is None:
                return prefix
            replaced = last if is_all else None
            return replace(prefix, turns=turns, with_context=last.blended.with_context, continued=replaced)

    def find_earlier(
        self, backend: Backend, ids: Tokens, free: Sequence[slice], min_run: int, namespace: str
    ) -> list[tuple[Match, ChunkReader]]:
        """Return what else of a prompt is kept, in ascending order: runs in the `free` slices of its positions.

        They stood in another place or context before.
        """
        prompt = np.asarray(ids, np.uint32)
        found: list[tuple[Match, KeptStretch, int]] = []
        with self._changing():
            latest = (kept for kept in reversed(self._kept) if kept.namespace == namespace and len(kept.ids) >= min_run)
            stretches = [*islice(latest, _SEARCHED)][::-1]
            by_key = {str(id(stretch)): stretch for stretch in stretches}
            segments = [stretch.segment for stretch in stretches]
            for place in free:
                tokens = prompt[place.start : min(place.stop, len(ids) - _QUESTION)]
                for run in match(segments, tokens, min_run, namespace):
                    stretch = by_key[run.key]
                    keys = stretch.keys_before(run.offset + len(run))
                    key = f"{run.key} {run.offset} {len(run)}"
                    placed = Run(run.start + place.start, run.stop + place.start, key, 0)
                    found.append((Match(placed, "", 0, keys), replace(stretch), run.offset))
                    self._touch(stretch)
        # waits for the model
        return [(earlier, _PartReader(backend, earlier.run, stretch, offset)) for earlier, stretch, offset in found]

    def begin(self, request: InProgress) -> None:
        """Record that a request is in progress. As long as it lives, `drop` and `drop_texts` mark it."""
        with self._changing():
            self._begun.add(request)

    def keep(
        self,
        request: InProgress,
        ids: NDArray[np.int64],
        exact: int,
        cache: KVCache,
        chunks: Sequence[Placed],
        blended: Blended,
        continued: KeptStretch | None,
    ) -> None:
        """Keep the KV of an answer that has begun, unless a part of it was dropped since; drop what is oldest.

        Args:
            ids: (N,) tokens for which `cache` is complete.
            exact: Number of leading positions with full prefill's KV.
            blended: How the others were made. They take the place of `continued`.
        """
        # a position's KV was computed at the length of the whole prompt, or of the answer up to there
        if max(len(request.ids), len(ids)) > self._longest or cache.num_bytes > self.max_bytes:
            return

        states = cache.checkpoints  # now: it goes on changing

        def keep() -> None:
            namespace = request.namespace
            if request.is_forgotten or not len(ids):
                return
            last = self._grow(namespace, ids[:exact], cache, chunks)
            self._note(last, states)
            if exact < len(ids):
                tail = self._copy(namespace, ids, exact, cache, chunks, blended)  # first: there may be no memory
                self._add(last, tail)
                if continued is not None:
                    self._remove(continued)
            else:
                self._remove_covered(ids, namespace)
            while self._num_bytes > self.max_bytes:
                inner = next((each for each in self._kept if each.states and len(each.children) == 1), None)
                if inner is not None:  # a conversation goes on where it ended
                    self._replace_states(inner, {})
                else:
                    self._remove(next(iter(self._kept)))

        self._pending.append(keep)
        if self._lock.acquire(blocking=False):
            try:
                self._work_off()
            finally:
                self._lock.release()

    def keys(self) -> set[str]:
        """Return the keys of the chunks whose KV is kept or in an answer in progress."""
        with self._changing():
            kept = (key for stretch in self._kept for _, key in stretch.chunks)
            return {*kept, *(key for begun in self._begun if not begun.is_forgotten for key in begun.keys)}

    def drop(self, keys: Iterable[str]) -> None:
        """Drop all KV of and after these chunks, in whole stretches; that of answers in progress at their end."""
        dropped = set(keys)
        with self._changing():
            for begun in self._begun:
                begun.is_forgotten = begun.is_forgotten or not begun.keys.isdisjoint(dropped)
            for stretch in list(self._kept):
                if any(key in dropped for _, key in stretch.chunks):
                    self._remove(stretch)

    def drop_texts(self, texts: DeletedTexts) -> None:
        """Drop all KV of and after these texts, in whole stretches; that of answers in progress at their end.

        Prompts that were computed before their texts were stored depend on no chunk.
        """
        with self._changing():
            for begun in self._begun:
                begun.is_forgotten = begun.is_forgotten or texts.find(begun.ids, begun.namespace) is not None
            for stretch in [each for each in self._kept if each.namespace in texts.namespaces]:
                ids, parent = stretch.ids, stretch.parent()
                while parent is not None and len(ids) < len(stretch.ids) + _BEFORE:
                    ids, parent = np.concatenate([parent.ids[-_BEFORE:], ids]), parent.parent()
                if (start := texts.find(ids, stretch.namespace)) is not None:
                    position, above = max(stretch.stop - len(ids) + start, 0), stretch.parent()
                    while position < stretch.start and above is not None:
                        stretch, above = above, above.parent()
                    self._remove(stretch)

    def close(self) -> None:
        """Drop everything, and keep nothing from now on."""
        with self._changing():
            self.max_bytes = self._num_bytes = 0
            self._roots = {}
            self._kept.clear()

    def _walk(self, ids: NDArray[np.int64], namespace: str) -> list[tuple[KeptStretch, int]]:
        """Return the exact stretches that the tokens begin with, and how many tokens of each, from the root on."""
        stretch = self._roots.get(namespace)
        path = [(stretch, 0)] if stretch else []
        at = 0
        while stretch is not None and at < len(ids) and path[-1][1] == len(stretch.ids):
            stretch = next((child for child in stretch.children_with(ids[at]) if not child.blended), None)
            if stretch is not None:
                length = _common(ids[at:], stretch.ids)
                path.append((stretch, length))
                at += length
        return path

    def _grow(self, namespace: str, ids: NDArray[np.int64], cache: KVCache, chunks: Sequence[Placed]) -> KeptStretch:
        """Add what is missing of the exact KV of these tokens; return its last stretch."""
        if namespace not in self._roots:
            self._roots[namespace] = KeptStretch(namespace, 0, ids[:0], ())
        path = self._walk(ids, namespace)
        last, length = path[-1]
        if length < len(last.ids):
            path[-1] = last, _ = last.split(length), length
            self._kept[last] = None
        self._touch(last)
        for stretch, _ in path:  # it may have been computed before a chunk of the same text was stored
            inside = {placed for placed in chunks if stretch.start <= placed[0] < stretch.stop}
            stretch.chunks = tuple(sorted({*stretch.chunks, *inside}))
        if last.stop < len(ids):
            new = self._copy(namespace, ids, last.stop, cache, chunks)
            self._add(last, new)
            return new
        return last

    def _note(self, last: KeptStretch, states: Mapping[int, States]) -> None:
        """Add states to a stretch and its parents, which have the KV before them."""
        for stretch in (last, *last.parents()):
            own = {at: each for at, each in states.items() if stretch.start < at <= stretch.stop}
            if own:
                self._replace_states(stretch, {**own, **stretch.states})

    def _replace_states(self, stretch: KeptStretch, states: Mapping[int, States]) -> None:
        before = stretch.num_bytes
        stretch.states = states
        self._num_bytes += stretch.num_bytes - before

    def _remove_covered(self, ids: NDArray[np.int64], namespace: str) -> None:
        """Remove blended KV of tokens that have full prefill's now, too."""
        path = self._walk(ids, namespace)
        for stretch in [child for parent, _ in path for child in parent.children]:
            if stretch.blended and np.array_equal(stretch.ids, ids[stretch.start : stretch.stop]):
                self._remove(stretch)

    def _add(self, parent: KeptStretch, child: KeptStretch) -> None:
        parent.add(child)
        self._kept[child] = None
        self._num_bytes += child.num_bytes
        self._touch(child)

    def _remove(self, stretch: KeptStretch) -> None:
        """Remove a stretch, with its children, if it is kept."""
        if stretch not in self._kept:
            return
        parent, left = stretch.parent(), [stretch]
        while left:
            removed = left.pop()
            del self._kept[removed]
            self._num_bytes -= removed.num_bytes
            left += removed.children
        assert parent is not None
        parent.children.remove(stretch)
        if not parent.children and parent is self._roots.get(stretch.namespace):
            del self._roots[stretch.namespace]

    def _copy(
        self,
        namespace: str,
        ids: NDArray[np.int64],
        start: int,
        cache: KVCache,
        chunks: Sequence[Placed],
        blended: Blended | None = None,
    ) -> KeptStretch:
        """Return a copy of the KV of the positions from `start` to the end of `ids`."""
        layers = cache.copied(start, len(ids))
        first = 0 if blended else start  # blended KV is dropped with any chunk of its prompt
        placed = tuple(placed for placed in chunks if first <= placed[0] < len(ids))
        return KeptStretch(namespace, start, ids[start:], layers, placed, blended)

    def _touch(self, stretch: KeptStretch | None) -> None:
        """Note that a stretch is used, and with it its parents."""
        while stretch is not None and stretch in self._kept:
            self._kept.move_to_end(stretch)
            stretch = stretch.parent()


class _PartReader:
    """Tokens of a stretch, from `offset` on, as the chunk of a run; see ChunkReader."""

    tier, bytes_read = "ram", 0

    def __init__(self, backend: Backend, run: Run, stretch: KeptStretch, offset: int) -> None:
        at, start = slice(offset, offset + len(run)), stretch.start + offset
        self.key, self.namespace, self.ids = run.key, stretch.namespace, stretch.ids[at].astype(np.uint32)
        self.num_layers, self.context_tokens = len(stretch.layers), max(start, 1)
        self._layers = [(keys[:, :, at], values[:, :, at]) for keys, values in stretch.layers]
        self._rotations = backend.rotations(torch.arange(start, start + len(run)))

    def layer(self, number: int) -> Layer:
        keys, values = self._layers[number]
        return self._rotations[number].unrotate(keys)[0], values[0]

    def close(self) -> None:
        return


def _copied(layer: Layer, start: int, stop: int) -> Layer:
    keys, values = layer
    return keys[:, :, start:stop].clone(), values[:, :, start:stop].clone()


def _to_states(path: list[tuple[KeptStretch, int]]) -> tuple[list[tuple[KeptStretch, int]], States | None]:
    """Return a path up to the last position whose states are kept, and these."""
    while path:
        stretch, length = path.pop()
        if known := [position for position in stretch.states if position <= stretch.start + length]:
            return [*path, (stretch, max(known) - stretch.start)], stretch.states[max(known)]
    return path, None


def _turns(prompt: NDArray[np.int64], stretch: KeptStretch) -> tuple[int, tuple[Turn, ...], bool]:
    """Return the length of the whole turns that a prompt begins with, up to and in a blended stretch, and these turns.

    Also returns whether the prompt has no further tokens in common with the stretch.
    """
    assert stretch.blended is not None
    turns = stretch.blended.turns
    common = stretch.start + _common(prompt[stretch.start : -1], stretch.ids)
    if not stretch.chunks:  # no chunk was blended for a question
        return common, tuple(turn for turn in turns if turn.stop <= common), common == stretch.stop
    length, number = 0, 0
    for turn, end in zip(turns, [*(turn.start for turn in turns[1:]), stretch.stop], strict=True):
        if common < turn.question_end or len(prompt) <= turn.stop:
            break
        length, number = min(common, end), number + 1
    return length, turns[:number], length == common


def _common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length
