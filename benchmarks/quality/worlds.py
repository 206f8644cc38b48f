"""Rows of questions drawn from the readers' worlds."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.quality.rows import QuestionRow
from benchmarks.readers.first.world import KINDS, sample
from benchmarks.readers.second import world as second
from kvrag.errors import KvragError

WORLDS = {1: "the reader's world", 2: "the second reader's world"}

_ARTICLES = (4, 6)
_PASSAGES = (12, 20)
_TRIES = 2000


@dataclass(frozen=True)
class WorldRow(QuestionRow):
    """A question about a world.

    Attributes:
        across: Whether the question depends on another passage than the one with the fact; None = unknown.
        supported: Whether the passages contain everything that the answer needs; None = unknown.
    """

    across: bool | None = None
    supported: bool | None = None


def world_rows(count: int, seed: int, world: int = 1) -> list[WorldRow]:
    """Draw rows of held-out contexts, each kind of question equally often; a larger `count` appends rows.

    Args:
        world: A key of `WORLDS`.
    """
    draw_row = {1: _world_row, 2: _second_world_row}[world]
    return [draw_row(number, seed) for number in range(count)]


def world_of(model: str) -> int:
    """Return the world that a reader's configuration names; 1 for other models."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return config["kvrag_world"] if config.get("kvrag_world") in WORLDS else 1
    except (OSError, ValueError, AttributeError, TypeError):
        return 1


def _world_row(number: int, seed: int) -> WorldRow:
    rng = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    for _ in range(_TRIES):
        drawn = sample(rng, "test", rng.randint(*_ARTICLES))
        questions = [question for question in drawn.questions if question.kind == kind]
        if questions and _PASSAGES[0] <= len(drawn.passages) <= _PASSAGES[1]:
            question = rng.choice(questions)
            row = WorldRow(f"world-{number}", drawn.passages, question.text, (question.answer,), kind, drawn.articles)
            return replace(row, across=question.across)
    raise KvragError(f"the world has no question of kind {kind!r} in {_TRIES} contexts")


def _second_world_row(number: int, seed: int) -> WorldRow:
    rng = random.Random(f"{seed} {number}")
    kind = second.KINDS[number % len(second.KINDS)]
    for _ in range(_TRIES):
        drawn = second.sample(rng, "test")
        if questions := [question for question in drawn.questions if question.kind == kind]:
            question = rng.choice(questions)
            row = WorldRow(f"world2-{number}", drawn.passages, question.text, (question.answer,), kind, drawn.documents)
            return replace(row, across=question.across)
    raise KvragError(f"the second world has no question of kind {kind!r} in {_TRIES} contexts")
