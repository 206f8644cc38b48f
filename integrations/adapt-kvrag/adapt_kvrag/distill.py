"""Training of a chunk writer: an adapter for encoding, distilled from the model itself.

The teacher is full prefill, the student reads the same prompt over KV that the adapter has written, and the loss is the
divergence of their next-token distributions on the teacher's own answer, and less so on the prompt's end: a question's
or a sentence's own words depend on the chunks, too. It needs documents, no labels. In half of the steps the default
policy recomputes its share, so that the adapter learns to write for what is left. Source: SemPIC (arXiv:2607.28069),
which has the answer alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from adapt_kvrag.differentiable import LayerStates, encode_rows, logits_after
from kvrag import BlendConfig, Model, Run
from kvrag.ext import Adapter, RequestState, select

_END_WEIGHT = 0.3  # of the divergence on the prompt's end


@dataclass(frozen=True)
class Lesson:
    """Prompts of the same chunks with different ends.

    Attributes:
        beginning: Their common token ids.
        ends: The other token ids of each prompt.
        rows: Token ids in front of each chunk, and those of the chunk.
        runs: Where the chunks are in `beginning`; `key` is the number of the chunk.
    """

    beginning: list[int]
    ends: list[list[int]]
    rows: list[tuple[list[int], list[int]]]
    runs: list[Run]


@dataclass(frozen=True)
class Target:
    """The teacher's answer to one prompt.

    Attributes:
        answer: Token ids, chosen greedily.
        logits: (N, V) logits before each of them.
        before: (E, V) logits before them: after all tokens of the prompt's end but the last.
    """

    answer: list[int]
    logits: Tensor
    before: Tensor


def locate(ids: Sequence[int], chunks: Sequence[Sequence[int]]) -> list[Run]:
    """Return where chunks are in a prompt, in its order; a joint may change their first and last token."""
    text = " ".join(map(str, ids)) + " "
    runs, at = [], 0
    for number, chunk in enumerate(chunks):
        inner = " ".join(map(str, chunk[1:-1])) + " "
        found = text.find(" " + inner, max(at - 1, 0))
        if found < 0 or len(chunk) < 3:
            continue
        start, offset = text.count(" ", 0, found + 1), 1
        stop = start + len(chunk) - 2
        if ids[start - 1] == chunk[0]:
            start, offset = start - 1, 0
        if stop < len(ids) and ids[stop] == chunk[-1]:
            stop += 1
        runs.append(Run(start, stop, str(number), offset))
        at = found + len(inner)
    return runs


def teach(model: Model, lesson: Lesson, count: int) -> list[Target]:
    """Answer the prompts of a lesson by full prefill, greedily, with up to `count` tokens each."""
    length = len(lesson.beginning)
    cache = model.new_cache(length + max(map(len, lesson.ends)) + count)
    model.forward(torch.tensor([lesson.beginning]), cache)
    targets = []
    for end in lesson.ends:
        cache.set_length(length)
        read = model.forward_all(torch.tensor([end]), cache)[0]
        logits, before = [read[-1:]], read[:-1].clone()
        answer = [int(logits[0].argmax())]
        while len(answer) < count and answer[-1] not in model.eos_ids:
            logits.append(model.forward(torch.tensor([answer[-1:]]), cache))
            answer.append(int(logits[-1].argmax()))
        targets.append(Target(answer, torch.cat(logits).clone(), before))
    return targets


def write(model: Model, adapter: Adapter | None, lesson: Lesson) -> tuple[LayerStates, Tensor]:
    """Encode a lesson's chunks, with the adapter if there is one.

    Returns:
        Keys and values of its runs per layer, each (1, H, R, D), rotated to their (R,) positions; and the positions.
    """
    preamble = list(model.preamble)
    rows = [[*preamble, *context, *chunk] for context, chunk in lesson.rows]
    width = max(map(len, rows))
    ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in rows])
    lands = {int(run.key): run for run in lesson.runs}
    first = [
        lands[number].start - lands[number].offset - len(context) - len(preamble) if number in lands else 0
        for number, (context, _) in enumerate(lesson.rows)
    ]
    positions = torch.tensor(first)[:, None] + torch.arange(width)
    with adapter.active() if adapter else nullcontext():
        states = encode_rows(model, ids, positions)
    taken = places(model, lesson)
    written = [
        tuple(torch.cat([part[number, :, place] for number, place in taken], dim=1)[None] for part in layer)
        for layer in states
    ]
    return written, torch.cat([torch.arange(run.start, run.stop) for run in lesson.runs])  # type: ignore[return-value]


def places(model: Model, lesson: Lesson) -> list[tuple[int, slice]]:
    """Return the encoded row of each run, and its tokens' places in it."""
    taken = []
    for run in lesson.runs:
        number = int(run.key)
        start = len(model.preamble) + len(lesson.rows[number][0]) + run.offset
        taken.append((number, slice(start, start + len(run))))
    return taken


def stitched(ids: Tensor, lesson: Lesson, written: LayerStates, where: Tensor, model: Model) -> RequestState:
    """Return a prompt of a lesson with its written KV in place, for a policy to score. Call it in inference mode."""
    reused = torch.zeros(len(ids), dtype=torch.bool)
    reused[where] = True

    def source(number: int) -> tuple[Tensor, Tensor]:
        laid = []
        for part in written[number]:
            full = part.new_zeros(1, part.shape[1], len(ids), part.shape[3])
            full[:, :, where.to(part.device)] = part.detach()
            laid.append(full)
        return laid[0], laid[1]

    cache = model.new_cache(len(ids), source, where)
    return RequestState.laid_out(ids, lesson.runs, reused, torch.zeros_like(reused), cache)


def choose(
    model: Model, ids: Tensor, lesson: Lesson, written: LayerStates, where: Tensor, config: BlendConfig
) -> Tensor:
    """Return the (S,) positions that the policy of `config` recomputes in a prompt."""
    with torch.inference_mode():
        return select(model, stitched(ids, lesson, written, where, model), config).clone()


def answer_over(
    model: Model, ids: Tensor, target: Target, written: LayerStates, where: Tensor, selected: Tensor, before: int = 0
) -> Tensor:
    """Return (N, V) logits before each token of the answer, over written KV with `selected` positions recomputed.

    Args:
        before: Return that many logits more, those before.
    """
    return logits_after(model, *computed(ids, target, written, where, selected), before + len(target.answer))


def computed(
    ids: Tensor, target: Target, written: LayerStates, where: Tensor, selected: Tensor
) -> tuple[Tensor, Tensor, LayerStates, Tensor]:
    """Return the (S,) tokens that are computed and their positions, and the KV and positions of the (K,) others."""
    keep = ~torch.isin(where, selected)
    past = [(keys[:, :, keep.to(keys.device)], values[:, :, keep.to(values.device)]) for keys, values in written]
    rows = torch.ones(len(ids) + len(target.answer) - 1, dtype=torch.bool)
    rows[where[keep]] = False
    positions = rows.nonzero().squeeze(1)
    tokens = torch.cat([ids, torch.tensor(target.answer[:-1], dtype=torch.long)])
    return tokens[positions], positions, past, where[keep]


def divergences(full: Tensor, other: Tensor) -> Tensor:
    """Return (N,) KL(full || other) in nats of (N, V) logits."""
    p, q = full.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def loss_of(
    model: Model, adapter: Adapter | None, lesson: Lesson, targets: Sequence[Target], config: BlendConfig | None
) -> Tensor:
    """Return the mean divergence of a lesson's prompts. `config` chooses what is recomputed; None = nothing."""
    written, where = write(model, adapter, lesson)
    losses = []
    for end, target in zip(lesson.ends, targets, strict=True):
        ids = torch.tensor([*lesson.beginning, *end])
        selected = where[:0] if config is None else choose(model, ids, lesson, written, where, config)
        before = len(target.before)
        logits = answer_over(model, ids, target, written, where, selected, before)
        loss = divergences(target.logits.to(logits.device), logits[before:]).mean()
        if before:
            loss = loss + _END_WEIGHT * divergences(target.before.to(logits.device), logits[:before]).mean()
        losses.append(loss)
    return torch.stack(losses).mean()
