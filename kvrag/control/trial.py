"""A measured prompt as numbers only, and the simulation of adaptive recompute on it.

Stages of adaptive recompute are fixed ratios, and a token depends on the stage that it is emitted at: so the records of
fixed ratios tell the outcome for every start and margin, without another prefill. See `kvrag.reuse.deepen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from kvrag.control.agreement import DECIDED, Record, is_kept
from kvrag.control.cost import Workload
from kvrag.reuse.deepen import MOST, STAGES, Doubt
from kvrag.reuse.select import Passes

_LARGEST = 99.0  # margin in nats that is stored, also for infinite ones


class Outcome(NamedTuple):
    """An answer: is it kept, is it identical, and its rows before the first token, relative to full prefill's."""

    kept: bool
    identical: bool
    rows: float


@dataclass(frozen=True, slots=True)
class Cell:
    """The prompt at one ratio: at each position of full prefill's answer the likeliest token and its margin.

    `tokens` has 0 for full prefill's, and other numbers for others, so that it tells nothing of the text.
    """

    tokens: list[int]
    margins: list[float]
    recomputed: int
    kl: float

    def doubt(self, at: int) -> Doubt:
        """Return the likeliest token at a position, and its margin."""
        return Doubt(self.tokens[at], self.margins[at])


@dataclass(frozen=True, slots=True)
class Trial:
    """A measured prompt: its sizes, full prefill's margins, and a cell per ratio, ascending from plain reuse."""

    prompt: int
    reused: int
    inexact: int
    margins: list[float]
    cells: list[Cell]

    @classmethod
    def of(cls, full: Record, records: Sequence[Record]) -> Self:
        """Return what is kept of full prefill's record and those of the ratios."""
        names = [{token: 0} for token in full.tokens]
        cells = [
            Cell(
                [known.setdefault(token, len(known)) for known, token in zip(names, record.tokens, strict=True)],
                _rounded(record.margins),
                record.recomputed_tokens,
                record.kl,
            )
            for record in records
        ]
        last = records[-1]
        return cls(last.prompt_tokens, last.reused_tokens, last.inexact_tokens, _rounded(full.margins), cells)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """Return the trial of its fields as a dict; raises KeyError and TypeError if it is none."""
        return cls(**content | {"cells": [Cell(**cell) for cell in content["cells"]]})

    @property
    def near_ties(self) -> int:
        """Number of full prefill's tokens that are not decided."""
        return sum(margin < DECIDED for margin in self.margins)

    def at(self, number: int, passes: Passes) -> Outcome:
        """Return the outcome with the ratio of one cell."""
        cell = self.cells[number]
        return self._outcome([token == 0 for token in cell.tokens], self._rows(cell, passes))

    def adaptive(self, ratios: Sequence[float], start: float, margin: float, passes: Passes) -> Outcome:
        """Return the outcome of adaptive recompute; mirrors `Row.advance` and `Deepening`.

        Args:
            ratios: Of the cells; with `start`, and the stages above it.
        """
        cells = [self.cells[ratios.index(ratio)] for ratio in (start, *(stage for stage in STAGES if stage > start))]
        fresh, rows = self.prompt - self.reused, self._rows(cells[0], passes)
        stage, agrees = 0, list[bool]()
        first = rows
        for at in range(len(self.margins)):
            before = self.cells[0].doubt(0) if at == 0 and passes.query else None  # which the policy computes anyway
            while stage < len(cells) and (cell := cells[stage]).recomputed < self.inexact:
                doubt = cell.doubt(at)
                if doubt.margin >= margin or (before and doubt.is_confirmed_by(before)):
                    break
                before, stage, rest = doubt, stage + 1, self.inexact + fresh + at
                more = cells[stage].recomputed - cell.recomputed + fresh + at if stage < len(cells) else rest
                if at == 0 and rows + more + rest > MOST * self.prompt:
                    stage, more = len(cells), rest
                rows += more
            agrees.append(stage == len(cells) or cells[stage].tokens[at] == 0)
            first = rows if at == 0 else first
        return self._outcome(agrees, first)

    def _rows(self, cell: Cell, passes: Passes) -> float:
        asked = Workload(self.prompt, self.reused, self.inexact, 0, passes if cell.recomputed else Passes())
        return asked.rows + cell.recomputed

    def _outcome(self, agrees: Sequence[bool], rows: float) -> Outcome:
        return Outcome(is_kept(agrees, self.margins), all(agrees), rows / self.prompt)


def _rounded(margins: Sequence[float]) -> list[float]:
    return [round(min(margin, _LARGEST), 2) for margin in margins]
