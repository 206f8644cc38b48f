"""The grid of `kvrag bench quality`: what is compared with full prefill. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrag.config import BlendConfig

FULL, NONE = "full", "none"
RIGHT = "full prefill continues as the documents do"
"""Group of prompts from documents that full prefill completes with the documents' own word."""


@dataclass(frozen=True)
class Setup:
    """How chunks are stored: codec and context. `context_tokens` and `context` are fields of BlendConfig."""

    codec: str = "native"
    context_tokens: int = 0
    context: str = "text"

    def __str__(self) -> str:
        if not self.context_tokens:
            return f"codec {self.codec}, no context"
        context = "title and headings" if self.context == "headings" else f"{self.context_tokens} tokens"
        return f"codec {self.codec}, context: {context}"


@dataclass(frozen=True)
class Cell:
    """One measurement: a policy with its settings, a ratio, and how chunks are stored."""

    label: str
    config: BlendConfig
    setup: Setup

    @property
    def ratio(self) -> float | None:
        """The ratio; None where it has no effect."""
        return None if self.config.policy in (FULL, NONE) else self.config.ratio

    @property
    def key(self) -> str:
        """Unique name of the cell within a run."""
        return f"{self.label} {self.ratio} {self.setup}"


def make_cells(configs: Mapping[str, BlendConfig], ratios: Sequence[float], setups: Sequence[Setup]) -> list[Cell]:
    """Return the grid without duplicates: full prefill once, then for each setup plain reuse and all policies.

    Args:
        configs: Labels and settings of the policies.
    """
    ends = {label: BlendConfig(policy=label, ratio=0.0, controller="off") for label in (FULL, NONE)}
    cells = [Cell(FULL, ends[FULL], setups[0])]
    for setup in setups:
        cells.append(Cell(NONE, ends[NONE], setup))
        for label, config in configs.items():
            if config.policy not in ends:
                cells += [Cell(label, replace(config, ratio=ratio, controller="off"), setup) for ratio in ratios]
    return list({cell.key: cell for cell in cells}.values())


def by_setup(cells: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the cells of a result by how chunks are stored; each group starts with `full`, then `none`."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["policy"] == FULL:
            full = cell  # of the groups that follow
        else:
            groups.setdefault(cell["setup"], [full]).append(cell)
    return groups
