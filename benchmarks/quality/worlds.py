"""Rows of questions drawn from the reader's world."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks.quality.rows import QuestionRow
from benchmarks.readers.first.world import KINDS, sample
from kvrag.errors import KvragError

WORLD = "the reader's world"

_ARTICLES = (4, 6)
_PASSAGES = (12, 20)
_TRIES = 2000


@dataclass(frozen=True)
class WorldRow(QuestionRow):
    """A question about a world.

    Attributes:
        across: Whether the question depends on another passage than the one with the fact; None = unknown.
    """

    across: bool | None = None


def world_rows(count: int, seed: int) -> list[WorldRow]:
    """Draw rows of held-out contexts, each kind of question equally often; a larger `count` appends rows."""
    return [_world_row(number, seed) for number in range(count)]


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
