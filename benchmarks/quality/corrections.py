"""Two trials against recomputing 15 % of the tokens: a late start, and a predicted correction of low rank.

*Late start.* A chunk is stored with the hidden states of its tokens at the input of one layer. Selected tokens start
there, so the layers below cost nothing for them and more tokens can be selected for the same work.

*Correction.* The change of stored KV between encoding alone and full prefill lies on few directions per layer. Its
coefficients are predicted by ridge regression from what is at hand before any pass. *Shift* adds the mean change of
the recomputed rows to the others, layer by layer in the same pass (AgentKVShift, arXiv:2607.21604).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from kvrag.adapt.differentiable import GraphCache, LayerStates, decoder_layers, logits_after
from kvrag.adapt.distill import Lesson, Target, computed, places, write
from torch import Tensor

from kvrag.backend.transformers import Model

RANK = 32  # most directions that are predicted
HELD_OUT = 1 / 5  # of the prompts for fitting, to choose the strength of the ridge
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # per row, after features are scaled to unit size


KV = tuple[Tensor, Tensor]

# --------------------------------------------------------------------------------------------------------- the change


Bases = list[tuple[Tensor, Tensor]]
"""Per layer, orthonormal directions of the change of keys and of values, each (HD, HD), the largest first."""


@contextmanager
def recorded(model: Model, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the (B, T, E) hidden states at the input of `layers` in the latest pass."""
    inputs: dict[int, Tensor] = {}

    def at(number: int) -> Callable[..., None]:
        def record(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs[number] = (arguments[0] if arguments else named["hidden_states"]).clone()

        return record

    modules = decoder_layers(model)
    handles = [modules[number].register_forward_pre_hook(at(number), with_kwargs=True) for number in layers]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Prompt:
    """KV of a prompt's chunk tokens, stored and by full prefill, and both kinds of hidden states by layer, (R, E)."""

    where: Tensor  # (R,) positions
    written: LayerStates
    full: LayerStates
    stored_inputs: dict[int, Tensor]
    full_inputs: dict[int, Tensor]


def prepare(model: Model, lesson: Lesson, starts: Sequence[int] = ()) -> Prompt:
    """Encode a lesson's chunks and its first prompt, with the hidden states at the input of layers `starts`."""
    with recorded(model, starts) as inputs:
        written, where = write(model, None, lesson)
        taken = places(model, lesson)
        stored = {number: torch.cat([part[row, place] for row, place in taken]) for number, part in inputs.items()}
        ids = torch.tensor([[*lesson.beginning, *lesson.ends[0]]])
        cache = model.new_cache(ids.shape[1])
        model.forward(ids, cache)
        passed = {number: part[0, where] for number, part in inputs.items()}
    full = [
        (keys[:, :, where].clone(), values[:, :, where].clone())
        for keys, values in map(cache.layer, range(model.num_layers))
    ]
    return Prompt(where, written, full, stored, passed)


def changes(model: Model, prompt: Prompt) -> LayerStates:
    """Return how the position-free KV of full prefill differs from the written one, per layer, each (R, HD) float32."""
    tables = model.tables(prompt.where)
    deltas = []
    for number, (ours, theirs) in enumerate(zip(prompt.written, prompt.full, strict=True)):
        keys, values = (a.float() - b.float() for a, b in zip(theirs, ours, strict=True))
        deltas.append((_flat(model.unrotate(number, keys, tables[number])), _flat(values)))
    return deltas


def add(model: Model, number: int, states: KV, change: KV, where: Tensor) -> KV:
    """Return rotated KV of a layer plus a position-free change, its parts (R, HD), or (1, HD) for all rows."""
    parts = []
    for part, (old, moved) in enumerate(zip(states, change, strict=True)):
        rows = moved.expand(len(where), -1).view(len(where), old.shape[1], -1)
        rows = rows.transpose(0, 1)[None].contiguous()  # (1, H, R, D)
        if part == 0:
            rows = rows.clone()
            model.rotate(number, rows, model.tables(where)[number], slice(0, len(where)))
        parts.append((old.float() + rows).to(old.dtype))
    return parts[0], parts[1]


def corrected(
    model: Model, written: LayerStates, coefficients: LayerStates, bases: Bases, where: Tensor, rank: int
) -> LayerStates:
    """Return the written KV plus a change, given by its (R, >= rank) coefficients on the first directions."""
    states = []
    for number, (ours, amounts, basis) in enumerate(zip(written, coefficients, bases, strict=True)):
        keys, values = (a[:, :rank] @ b[:, :rank].T for a, b in zip(amounts, basis, strict=True))
        states.append(add(model, number, ours, (keys, values), where))
    return states


def on_bases(delta: LayerStates, bases: Bases) -> LayerStates:
    """Return the coefficients of a change on all directions."""
    return [(keys @ basis[0], values @ basis[1]) for (keys, values), basis in zip(delta, bases, strict=True)]


def _flat(part: Tensor) -> Tensor:
    return part[0].transpose(0, 1).flatten(1)


# ------------------------------------------------------------------------------------------------------ the prediction


def features(model: Model, lesson: Lesson, written: LayerStates, where: Tensor) -> list[Tensor]:
    """Return the (R, F) features of each layer, from what is stored and the prompt's layout.

    A token's own position-free KV; its place in the chunk (and the inverse, for the first tokens); a constant. Then
    what only the prompt decides, the last HD + HD + 2: the mean KV of all earlier chunks; the token's place in the
    prompt; whether its chunk is the first.
    """
    lengths = torch.tensor([len(run) for run in lesson.runs])
    chunk = torch.arange(len(lengths)).repeat_interleave(lengths)  # (R,)
    begins = lengths.cumsum(0) - lengths
    offset = (torch.arange(len(where)) - begins[chunk]).float()
    inside = torch.stack([offset / lengths[chunk], 1 / (1 + offset), torch.ones(len(where))], dim=1)
    around = torch.stack([where / where[-1], (chunk == 0).float()], dim=1)
    tables, columns = model.tables(where), []
    for number, (keys, values) in enumerate(written):
        own = torch.cat([_flat(model.unrotate(number, keys.float(), tables[number])), _flat(values.float())], dim=1)
        sums = torch.cat([own.new_zeros(1, own.shape[1]), own.cumsum(0)])
        before = sums[begins] / begins.clamp_min(1)[:, None]  # (chunks, 2HD)
        columns.append(torch.cat([own, inside, before[chunk], around], dim=1))
    return columns


@dataclass
class _Sums:
    """Products of the features and changes of one layer, over prompts."""

    inner: Any = 0.0  # (F, F)
    cross: Any = 0.0  # (F, 2HD)
    outer: list[Any] = field(default_factory=lambda: [0.0, 0.0])  # (HD, HD) of keys, of values

    def add(self, columns: Tensor, delta: KV) -> None:
        self.inner = self.inner + columns.T @ columns
        self.cross = self.cross + columns.T @ torch.cat(delta, dim=1)
        self.outer = [old + part.T @ part for old, part in zip(self.outer, delta, strict=True)]

    def __add__(self, other: _Sums) -> _Sums:
        outer = [a + b for a, b in zip(self.outer, other.outer, strict=True)]
        return _Sums(self.inner + other.inner, self.cross + other.cross, outer)


@dataclass(frozen=True)
class Fitted:
    """The change and its prediction, fitted on other prompts.

    Attributes:
        bases: Directions of the change.
        weights: Per layer, (F, <= `RANK`) for the coefficients of keys, and of values.
        own_weights: Likewise, with zeros for the features that the prompt decides: known when a chunk is encoded.
        explained: Share of the squared change on these directions that is predicted in held-out prompts, mean over
            layers but the first, which has no change: of keys, of values.
    """

    bases: Bases
    weights: LayerStates
    own_weights: LayerStates
    explained: tuple[float, float]

    def predict(self, columns: Sequence[Tensor], own: bool = False) -> LayerStates:
        """Return the coefficients of the change for the features of a prompt, with the own weights or all."""
        weights = self.own_weights if own else self.weights
        return [(x @ keys, x @ values) for x, (keys, values) in zip(columns, weights, strict=True)]


def fit(model: Model, lessons: Sequence[Lesson], update: Callable[[int, int], None]) -> Fitted:
    """Fit the principal directions of the changes, without centring, and their prediction."""
    held_out = round(HELD_OUT * len(lessons))
    halves = [[_Sums() for _ in range(model.num_layers)] for _ in range(2)]
    with torch.inference_mode():
        for number, lesson in enumerate(lessons):
            update(number, len(lessons))
            prompt = prepare(model, lesson)
            columns = features(model, lesson, prompt.written, prompt.where)
            for sums, x, delta in zip(halves[number < held_out], columns, changes(model, prompt), strict=True):
                sums.add(x, delta)
        bases, weights, own_weights, explained = Bases(), LayerStates(), LayerStates(), []
        for train, held in zip(*halves, strict=True):
            both = train + held if held_out else train
            basis = tuple(torch.linalg.eigh(outer)[1].flip(1) for outer in both.outer)
            num = len(both.inner)
            num_own = num - both.cross.shape[1] - 2
            for kept, size in ((weights, num), (own_weights, num_own)):
                tried = held if held_out else train
                solved = [_ridge(train, tried, both, part, basis[part], size) for part in range(2)]
                kept.append((solved[0][0], solved[1][0]))
                if size == num:
                    explained.append([share for _, share in solved])
            bases.append((basis[0], basis[1]))
    keys, values = torch.tensor(explained[1:]).mean(0).tolist()
    return Fitted(bases, weights, own_weights, (keys, values))


def _ridge(train: _Sums, held: _Sums, both: _Sums, part: int, basis: Tensor, num: int) -> tuple[Tensor, float]:
    """Return the weights of keys (part 0) or values (1) with the strength that is best on held-out prompts.

    Features from `num` on get no weight. Also returns the share of the squared change that is predicted there.
    """
    kept = basis[:, :RANK].double()

    def moments(sums: _Sums) -> tuple[Tensor, Tensor, Tensor]:
        cross = sums.cross[:num].chunk(2, dim=1)[part].double() @ kept
        return sums.inner[:num, :num].double(), cross, (kept * (sums.outer[part].double() @ kept)).sum()

    def solve(sums: _Sums, strength: float) -> Tensor:
        inner, cross, _ = moments(sums)
        size = inner.diagonal().sqrt().clamp_min(1e-6)
        scaled = inner / size / size[:, None]
        return torch.linalg.solve(scaled + strength * torch.eye(len(size)), cross / size[:, None]) / size[:, None]

    inner, cross, total = moments(held)
    shares = {}
    for strength in STRENGTHS:
        weights = solve(train, strength)
        shares[strength] = float((2 * (weights * cross).sum() - (weights * (inner @ weights)).sum()) / total)
    chosen = max(shares, key=lambda strength: shares[strength])
    weights = torch.zeros(len(both.inner), kept.shape[1])
    weights[:num] = solve(both, chosen).float()
    return weights, shares[chosen]


# --------------------------------------------------------------------------------------------------------- an answer


@dataclass(frozen=True)
class Variant:
    """KV that a prompt is answered over, and the rows that are recomputed.

    Attributes:
        states: KV of the chunk tokens.
        chosen: (S,) places among them, ascending.
        start: Layer that the chosen rows start in; below it their KV stays as it is.
        inputs: (S, E) hidden states that they start from; None = their own.
        is_shifted: Add the mean change of the chosen rows to the others.
    """

    states: LayerStates
    chosen: Tensor
    start: int = 0
    inputs: Tensor | None = None
    is_shifted: bool = False


def answer(model: Model, ids: Tensor, target: Target, variant: Variant, where: Tensor) -> Tensor:
    """Return (N, V) logits before each token of the answer."""
    chosen, states = variant.chosen, variant.states
    selected, others = where[chosen], torch.ones(len(where), dtype=torch.bool)
    others[chosen] = False
    is_row = torch.ones(len(ids) + len(target.answer) - 1, dtype=torch.bool)
    is_row[where[others]] = False
    at = torch.isin(is_row.nonzero().squeeze(1), selected).nonzero().squeeze(1)  # of the chosen among computed rows

    def edit(number: int, past: KV, own: KV) -> tuple[KV, KV]:
        if number < variant.start:
            parts = [part.clone() for part in own]
            for part, old in zip(parts, states[number], strict=True):
                part[:, :, at] = old[:, :, chosen]
            own = parts[0], parts[1]
        elif variant.is_shifted and len(chosen):
            keys, values = (
                new[:, :, at].float() - old[:, :, chosen].float() for new, old in zip(own, states[number], strict=True)
            )
            keys = model.unrotate(number, keys, model.tables(selected)[number])
            shift = _flat(keys).mean(0, keepdim=True), _flat(values).mean(0, keepdim=True)
            past = add(model, number, past, shift, where[others])
        return past, own

    inputs = variant.inputs
    with nullcontext() if inputs is None else _starting(model, variant.start, at, inputs):
        return logits_after(
            model, *computed(ids, target, states, where, selected), len(target.answer), partial(_Edited, edit)
        )


class _Edited(GraphCache):
    """Lets a function change both kinds of KV of a layer, the earlier and the pass's own, before it is attended to."""

    def __init__(self, edit: Callable[[int, KV, KV], tuple[KV, KV]], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._edit = edit

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer."""
        past, own = self._edit(layer_idx, self.past[layer_idx], (key_states, value_states))
        return torch.cat([past[0], own[0]], dim=2), torch.cat([past[1], own[1]], dim=2)


@contextmanager
def _starting(model: Model, start: int, at: Tensor, inputs: Tensor) -> Iterator[None]:
    """Give rows `at` of the next pass other hidden states at the input of a layer."""

    def replace(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = (arguments[0] if arguments else named["hidden_states"]).clone()
        hidden[:, at] = inputs
        return ((hidden, *arguments[1:]), named) if arguments else ((), {**named, "hidden_states": hidden})

    handle = decoder_layers(model)[start].register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
