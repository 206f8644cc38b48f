"""Answers to one prompt with several settings of `engine.generate`, each compared with full prefill's.

A token of full prefill's answer is *decided* if its two likeliest tokens there differ by at least `DECIDED` nats. An
answer is *kept* if it is full prefill's, or if full prefill was undecided at the first token that differs, a near tie:
from there on the two answers follow different texts, and only what is right can be compared. For fixed settings,
*forced* is measured as well: full prefill's answer is fed to the arm's cache, and no decided token changes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.questions import is_right
from benchmarks.quality.rows import QuestionRow
from kvrag.config import BlendConfig
from kvrag.engine import BlendEngine
from kvrag.listen.check import END
from kvrag.types import Answer, Delta, join

FULL, ADAPTIVE, FIRST = "full", "adaptive", "first_k"
ARMS = (FULL, ADAPTIVE, "0.05", "0.15", "0.3", "0.5", "none", FIRST)
DECIDED = 1.0
INSTRUCTION = "Answer the question from the context below, briefly."
_FIRST_TOKENS = 4  # that `first_k` recomputes of each chunk


@dataclass(frozen=True)
class Measured:
    """One arm's answer to a prompt.

    Attributes:
        tokens: With `END` for an end token.
        rows, all_rows: Rows computed before the first token, and with those computed later.
        times: Seconds to each token.
        completed, deepened: Of the report: token, rows and seconds.
        margin: Full prefill's, in nats, at the first token that differs; None = none differs.
        forced: Whether no decided token changes under teacher forcing; None = the KV changes during the answer.
    """

    arm: str
    text: str
    tokens: list[int]
    is_right: bool
    ttft_s: float
    total_s: float
    prompt_tokens: int
    rows: int
    all_rows: int
    times: list[float]
    completed: dict[str, Any] | None
    deepened: dict[str, Any] | None
    notes: list[str]
    margin: float | None = None
    forced: bool | None = None

    @property
    def kept(self) -> bool:
        """True if no decided token changed, as far as the two answers can be compared."""
        return self.margin is None or self.margin < DECIDED


def margin_of(full: Sequence[int], ours: Sequence[int], margins: Sequence[float]) -> float | None:
    """Return full prefill's margin at the first token that differs; None = none does."""
    return next((margin for one, other, margin in zip(full, ours, margins, strict=False) if one != other), None)


def measure(
    engine: BlendEngine,
    row: QuestionRow,
    arms: Sequence[str],
    tokens: int,
    rng: random.Random,
    instruction: str = INSTRUCTION,
) -> list[Measured]:
    """Answer a row's prompt with all arms in random order, of which full prefill is the first of the result."""
    before = [] if row.kind else [instruction]  # readers were trained without one
    prompt = engine.as_prompt("\n\n".join([*before, *row.passages, f"Question: {row.question}"]))
    ids = engine.tokenize(prompt)
    for name, chunks in row.all_documents().items():
        engine.warm(chunks, document=name)
    engine.prefill(ids, engine.config.overridden({"policy": "none"}))  # reads the KV into RAM, for all arms
    settings = {arm: settings_of_arm(arm, engine, row) for arm in arms}
    measured, configs = {}, {arm: engine.config.overridden(settings[arm]) for arm in arms}
    for arm in rng.sample(arms, len(arms)):
        started, times, deltas = time.perf_counter(), list[float](), list[Delta]()
        for delta in engine.stream(  # a penalty of the model's own would change what is decided
            prompt, temperature=0, repetition_penalty=1.0, max_new_tokens=tokens, **settings[arm]
        ):
            times += [time.perf_counter() - started] * len(delta.token_ids)
            deltas.append(delta)
        measured[arm] = _measured(arm, join(deltas), time.perf_counter() - started, times, row.answers)
        engine.wait_until_idle()  # answers are checked meanwhile
    full = measured[FULL].tokens
    if all(one.tokens == full for one in measured.values()):
        return [replace(measured[arm], forced=None if arm == ADAPTIVE else True) for arm in arms]
    top = _forced(engine, ids, full, configs[FULL]).topk(2).values
    margins = (top[:, 0] - top[:, 1]).tolist()
    results = []
    for arm in arms:
        one = replace(measured[arm], margin=margin_of(full, measured[arm].tokens, margins))
        forced: bool | None = one.kept  # up to the first difference, both measures see the same
        if arm == ADAPTIVE:
            forced = None
        elif one.margin is not None and one.kept:
            best = _forced(engine, ids, full, configs[arm]).argmax(-1).tolist()
            likeliest = [END if token in engine.model.eos_ids else token for token in best]
            decided = zip(full, likeliest, margins, strict=True)
            forced = all(theirs == ours for theirs, ours, margin in decided if margin >= DECIDED)
        results.append(replace(one, forced=forced))
    return results


def settings_of_arm(arm: str, engine: BlendEngine, row: QuestionRow) -> dict[str, Any]:
    """Return an arm's options of `engine.generate` for a row's prompt."""
    if arm in (FULL, "none"):
        return {"policy": arm}
    if arm == FIRST:
        tokens = sum(len(engine.encode(text)) for text in row.passages)
        return {"policy": arm, "ratio": min(1.0, _FIRST_TOKENS * len(row.passages) / tokens)}
    return {} if arm == ADAPTIVE else {"ratio": float(arm)}


def _measured(arm: str, answer: Answer, total_s: float, times: list[float], accepted: Sequence[str]) -> Measured:
    report = answer.report
    later = [done for done in (report.deepened, report.completed) if done]
    # `recomputed_tokens` includes those that were recomputed later
    rows = report.fresh_tokens + min(report.recomputed_tokens, round(report.ratio * report.stored_tokens))
    return Measured(
        arm=arm,
        text=answer.text,
        tokens=[*answer.token_ids, *([END] if answer.finish_reason == "stop" else [])],
        is_right=is_right(answer.text, accepted),
        ttft_s=report.ttft_s,
        total_s=total_s,
        prompt_tokens=report.prompt_tokens,
        rows=rows + sum(done.rows for done in later if done.token == 0),
        all_rows=rows + sum(done.rows for done in later),
        times=times,
        completed=asdict(report.completed) if report.completed else None,
        deepened=asdict(report.deepened) if report.deepened else None,
        notes=list(report.notes),
    )


def _forced(engine: BlendEngine, ids: list[int], answer: Sequence[int], config: BlendConfig) -> Tensor:
    """Return the (S, V) logits for each token of the answer, fed to the cache of these settings."""
    prefilled = engine.prefill(ids, config)
    if len(answer) == 1:
        return prefilled.logits
    following = engine.model.forward_all(torch.tensor([answer[:-1]]), prefilled.cache)[0]
    return torch.cat([prefilled.logits, following])
