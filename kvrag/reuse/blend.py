"""Stitching, selecting, blending: from the stored KV of the matched runs to a cache that is ready to decode.

`stitch` lays the KV out as one cache of full length, with keys rotated into place. `select` chooses the reused tokens
to recompute: a policy scores every position, and the best inexact ones fill the budget. Fresh positions are computed
anyway and never compete; exact ones are never selected; the same are used for keys and values and on every layer.
`blend` is CacheBlend's selective recompute (arXiv:2405.16444, section 4.2): the model's own forward pass on fresh and
selected positions. All other positions keep the stitched KV. Recomputed tokens attend to it under a mask by true
positions.

`LateRecompute` recomputes more when the model is unsure of its next token. The margin between the two likeliest tokens
is a sign of doubt. The first token with a smaller margin than asked for is not emitted: the next share of the chunks is
recomputed first, in the order of the policy, with the question and the answer so far, in the same cache. At the next
doubt, or where nothing was recomputed in the beginning, everything from the first position with inexact KV on is: the
KV then is full prefill's, and the answer continues exactly. After a start of more than a quarter it is not: in a long
answer there are near ties of style in any case. Such a doubt recomputes half as much as the start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend, last_stretch, prefill_blocks
from kvrag.config import DEFAULT_RATIO, BlendConfig
from kvrag.request import Request
from kvrag.reuse.load import LayerLoader
from kvrag.reuse.policies import NO_PASSES, Passes, Policy
from kvrag.types import Completed

FIRST = 1 / 3
"""Share of the margin that the first token needs: most answers begin with near ties of style."""

DEEPENED = 1 / 2
"""Share of the margin that tokens need once more was recomputed."""

_CHANGED = 2
"""Tokens at the end of a chunk that a prompt may lack while the states behind them are used."""

QUARTER = 1 / 4
"""Start after which no doubt completes an answer, unless the caller asked for a margin."""

MOST = 1.25
"""Rows before the first token, at most, relative to full prefill's: what was deepened there is not completed there."""


def stitch(backend: Backend, request: Request, loader: LayerLoader) -> None:
    """Give a request a cache whose layers are stitched when a forward pass first reaches them.

    The last position is never reused: its logits are needed.
    """
    runs, prefix, num_tokens = request.runs, request.prefix, len(request.ids)
    reused = torch.zeros(num_tokens, dtype=torch.bool)
    exact = torch.zeros(num_tokens, dtype=torch.bool)
    for run in runs:
        reused[run.start : run.stop] = True
    if prefix:
        reused[: prefix.length] = True
        exact[: prefix.exact] = True
    reused[-1] = False
    if begins_exactly(backend, request, loader.codec):
        exact[runs[0].start : runs[0].stop] = reused[runs[0].start : runs[0].stop]
    request.reused, request.exact = reused, exact
    if not runs and not prefix:
        request.cache = backend.new_cache(loader.capacity)
        return
    if runs:
        loader.rotations = backend.rotations(torch.arange(num_tokens))
    filled = reused.clone()
    filled[: request.kept] = False
    source, positions = loader.layer if runs else None, filled.nonzero().squeeze(1)
    request.cache = backend.new_cache(loader.capacity, source, positions, prefix)
    request.cache.alone = request.config.deterministic


def begins_exactly(backend: Backend, request: Request, codec: str) -> bool:
    """Return whether the first run's KV is full prefill's: its chunk was encoded there, alone after the preamble."""
    if not request.runs or codec != "native" or backend.keeps_states:  # the states after it are not stored, or rounded
        return False
    ids, run = request.ids, request.runs[0]
    reader = request.readers[run.key]
    after_preamble = run.offset == 0 and tuple(ids[: run.start].tolist()) == backend.preamble
    # where RoPE depends on the length, the chunk may have been encoded in a pass longer than the prompt
    encoded = len(backend.preamble) + len(reader.ids)
    return after_preamble and not reader.context_tokens and max(len(ids), encoded) <= backend.stable_length


def blend(backend: Backend, request: Request) -> Tensor:
    """Recompute fresh and selected positions in `request.cache`. The cache is then ready to decode.

    With nothing reused, this is full prefill: the model's ordinary forward pass. A backend that leaves the tail to its
    engine otherwise gets no rows of it, which can be none at all. Returns (1, V) float32 logits after the last token.
    """
    if not request.reused.any():
        for ids in request.ids.tensor_split([request.question_end] if backend.keeps_states else []):
            if len(ids):
                logits = backend.forward(ids[None], request.cache)
        return logits
    blended = blended_rows(backend, request)
    if backend.stores_states:
        _begin_from_states(backend, request, int(blended[last_stretch(blended)]))
    for rows in prefill_blocks(backend, blended, request.question_end):
        logits = backend.forward(request.ids[rows][None], request.cache, rows)
    request.cache.set_length(len(request.ids))
    return logits


def _begin_from_states(backend: Backend, request: Request, position: int) -> None:
    """Let the pass that begins at a position do so with the states that are stored for the end of the chunk before it.

    A prompt's tokenisation may change the last tokens of a chunk, which its states have seen as they were.
    """
    for run in request.runs:
        reader = request.readers[run.key]
        left = len(reader.ids) - run.offset - len(run)
        if run.stop == position and left <= _CHANGED and reader.num_layers > backend.num_layers:
            backend.begin_from(request.cache, position, reader.layer(backend.num_layers))


def blended_rows(backend: Backend, request: Request) -> Tensor:
    """Return the (N,) positions that `blend` computes, fresh and selected ones."""
    rows = (~request.reused).index_fill(0, request.selected, True).nonzero().squeeze(1)
    return rows[rows < request.tail()] if backend.leaves_tail else rows


def select(backend: Backend, request: Request, config: BlendConfig) -> tuple[Tensor, Tensor]:
    """Return two times (S,) ascending: the positions to recompute, and the next ones in the policy's order.

    The first are `config.ratio` of the inexact reused positions, or as many as the policy makes of it; the others are
    their `share_on_doubt`, or fewer where there are no more.
    """
    inexact = request.inexact
    nothing, ratio = inexact[:0], DEFAULT_RATIO if config.ratio is None else config.ratio
    budget = round(ratio * len(inexact))
    if budget == 0 or config.policy == "none":
        return nothing, nothing
    policy = _policy_of(config.policy)
    budget = policy.budget(request, budget)
    if budget == len(inexact):
        return inexact, nothing  # regardless of scores
    # choosing runs the fresh tokens through most layers: with a long question, computing all reused tokens costs less
    if len(inexact) - budget <= selecting(config, backend.num_layers).query * len(request.fresh):
        return inexact, nothing
    scores = policy.score(backend, request, budget)[inexact]
    top = scores.topk(min(budget + round(budget * share_on_doubt(ratio, config.margin)), len(inexact)))
    ranked = inexact[top.indices[top.values > -torch.inf]]
    return ranked[:budget].sort().values, ranked[budget:].sort().values


def selecting(config: BlendConfig, num_layers: int) -> Passes:
    """Return the layers that the policy of these settings runs to select."""
    if config.policy in ("none", "full"):
        return NO_PASSES
    return _policy_of(config.policy).passes(num_layers)


def _policy_of(name: str) -> Policy:
    module = import_module(f"kvrag.reuse.policies.{name}")
    policy: Policy = getattr(module, name.title().replace("_", ""))()
    return policy


def may_complete(start: float, margin: float | None) -> bool:
    """Return whether a doubt completes an answer after the start's share was deepened; `margin` was asked for."""
    return margin is not None or start <= QUARTER


def share_on_doubt(start: float, margin: float | None) -> float:
    """Return how much the first doubt recomputes, relative to the start."""
    return 1.0 if may_complete(start, margin) else 0.5


class LateRecompute:
    """The recompute that is left to one prompt, whose answer is being decoded. Changes the prompt's cache.

    Attributes:
        deepened, completed: When and how one more share, and all the rest, were recomputed; None = not yet.
        seen: Token numbers and margins that the KV gave at first, and once it was deepened.
        start: Ratio that the counts of its tokens belong to.
        may_complete: A doubt after it was deepened completes the answer.
        judged: For each doubt, whether the KV was deepened before it, the token's number and its margin, whether more
            recompute gives another token, and that one's margin.
    """

    def __init__(self, backend: Backend, request: Request, margin: float = 0.0, start: float = 0.0) -> None:
        """Begin with what is blended. For `margin`, see `BlendConfig`; for `start`, `kvrag.control.plan.Plan`."""
        self.start, self.may_complete = start, may_complete(start, request.config.margin)
        self.deepened: Completed | None = None
        self.completed: Completed | None = None
        self.seen: tuple[list[tuple[int, float]], list[tuple[int, float]]] = [], []
        self.judged: list[tuple[bool, int, float, bool, float]] = []
        self._margin, self._backend, self._cache = margin, backend, request.cache
        self._length, self._question_end = len(request.ids), request.question_end
        self._first = request.num_exact(request.selected)  # all positions before it equal full prefill's
        self._deeper, self._fresh = request.deeper, request.fresh
        if backend.keeps_states and self._first < self._length:
            self._first = request.kept  # the states there are known
            self._deeper = self._deeper[:0]  # what follows a changed token can only be computed in one stretch

    def is_unsure(self, token: int, margin: float) -> bool:
        """Return whether more is to be recomputed before this token of the answer is emitted; 0 is the first."""
        is_deepened = self.deepened is not None
        self.seen[is_deepened].append((token, margin))
        if self.deepened and (not self.may_complete or self.deepened.token == token == 0):
            return False  # see `QUARTER` and `MOST`
        return margin < self._margin * (FIRST if token == 0 else 1) * (DEEPENED if is_deepened else 1)

    @property
    def can_deepen(self) -> bool:
        """True if a share is left to recompute before all the rest."""
        return self.deepened is None and len(self._deeper) > 0

    def recompute(self, ids: Tensor, token: int) -> Tensor:
        """Recompute the next share, or the rest; return (1, V) logits after the last token.

        Args:
            ids: (T,) of the prompt and the answer so far. The cache becomes complete for all of them.
            token: Number of the answer's token that is in doubt.
        """
        if self.can_deepen:
            self.deepened, logits = self._timed(ids, self.rows_of_next_share(len(ids)), token)
        else:
            self.completed, logits = self._timed(ids, torch.arange(self._first, len(ids)), token)
        return logits

    def rows_of_next_share(self, length: int) -> Tensor:
        """Return the positions of the next share, and those after its first that depend on it and are not stored."""
        fresh = self._fresh[self._fresh > self._deeper[0]]
        return torch.cat([self._deeper, fresh, torch.arange(self._length, length)]).sort().values

    def judge(self, token: int, before: tuple[int, float], after: tuple[int, float]) -> None:
        """Note what became of a token in doubt: the likeliest one and its margin, before and after."""
        was_deepened = self.deepened is not None and self.completed is not None
        self.judged.append((was_deepened, token, before[1], before[0] != after[0], after[1]))

    def _timed(self, ids: Tensor, rows: Tensor, token: int) -> tuple[Completed, Tensor]:
        started = time.perf_counter()
        logits = self._forward(ids, rows)
        return Completed(token, len(rows), time.perf_counter() - started), logits

    def _forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        backend, cache = self._backend, self._cache
        if backend.rope_follows_length and len(ids) > backend.stable_length:
            # as when they were decoded: each token was rotated for the length at its time
            prompt, answer = rows[rows < self._length], rows[rows >= self._length]
            parts: Sequence[Tensor] = [*prefill_blocks(backend, prompt), *answer[:, None]]
        else:
            parts = list(prefill_blocks(backend, rows, self._question_end))
        for part in parts:
            logits = backend.forward(ids[part][None], cache, part)
        cache.set_length(len(ids))
        return logits
