"""A measured prompt as numbers only, and the simulation of adaptive recompute on it.

Adaptive recompute begins like a fixed ratio, and continues like full prefill: so the records of fixed ratios tell the
outcome for every start and margin, without another prefill. See `kvrag.reuse.blend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from kvrag.control.agreement import DECIDED, Record, is_kept
from kvrag.control.cost import Workload
from kvrag.reuse.blend import FIRST
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

    def adaptive(self, number: int, margin: float, passes: Passes) -> Outcome:
        """Return the outcome of adaptive recompute that begins with one cell; mirrors `Row` and `Completion`."""
        cell, rows, agrees = self.cells[number], self._rows(self.cells[number], passes), list[bool]()
        is_complete = cell.recomputed == self.inexact
        for at, sure in enumerate(cell.margins):
            if not is_complete and sure < margin * (FIRST if at == 0 else 1):
                is_complete = True
                if at == 0:
                    rows += self.prompt - self.reused + self.inexact
            agrees.append(is_complete or cell.tokens[at] == 0)
        return self._outcome(agrees, rows)

    def _rows(self, cell: Cell, passes: Passes) -> float:
        asked = Workload(self.prompt, self.reused, self.inexact, 0, passes if cell.recomputed else Passes())
        return asked.rows + cell.recomputed

    def _outcome(self, agrees: Sequence[bool], rows: float) -> Outcome:
        return Outcome(is_kept(agrees, self.margins), all(agrees), rows / self.prompt)


def _rounded(margins: Sequence[float]) -> list[float]:
    return [round(min(margin, _LARGEST), 2) for margin in margins]
