"""The grid of `kvrag bench quality`: what is compared with full prefill. Needs no torch."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvrag.config import BlendConfig, check_policy, check_ratio
from kvrag.errors import SettingError

AS_THEY_ARE = 0
"""Chunk length that leaves passages unchanged."""

FULL, NONE, _RANDOM = "full", "none", "random"
_FIXED = ("policy", "ratio", "controller", "context_tokens", "context")  # fields of BlendConfig that the grid sets

ACROSS, WITHIN = "hangs on another passage", "hangs on one passage"
RETRIEVED, NOT_RETRIEVED = "answer retrieved", "answer not retrieved"
HIDDEN = "answer only in a neighbour"
"""Questions with `Task.hidden`; their metric `leaked` is the share of answers from what was not retrieved."""
RIGHT = "full prefill goes on as the documents do"


@dataclass(frozen=True)
class Setup:
    """Chunk length and storage format."""

    chunk_tokens: int = AS_THEY_ARE
    preamble: bool = True
    codec: str = "native"
    context_tokens: int = 0
    context: str = "text"

    def __str__(self) -> str:
        length = f"chunks of {self.chunk_tokens} tokens" if self.chunk_tokens else "passages as they are"
        behind = "title and headings" if self.context == "headings" else f"{self.context_tokens} tokens of context"
        context = f", behind {behind}" if self.context_tokens else ""
        return f"{length}, preamble {'on' if self.preamble else 'off'}, codec {self.codec}{context}"


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


def split_policies(text: str) -> list[str]:
    """Split `hkvd,query:band=0.2:0.6,smoothing=9,seam` into three policies, the second with two settings."""
    return [part for part in re.split(r",(?=[a-z_]+(?:[:,]|$))", text) if part]


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse `name=value` for fields of BlendConfig that the grid leaves open; `a:b` is a pair of numbers.

    Raises:
        SettingError: Unknown name, or malformed value.
    """
    open_fields = [one.name for one in fields(BlendConfig) if one.name not in _FIXED]
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or name not in open_fields:
            raise SettingError(
                f"{assignment!r} is not a setting: write NAME=VALUE with one of {', '.join(open_fields)}"
            )
        settings[name] = _value(value)
    return settings


def _value(text: str) -> Any:
    try:
        parts = [json.loads(part) for part in text.split(":")]
    except ValueError:
        return text
    return parts[0] if len(parts) == 1 else tuple(parts)


def make_cells(
    policies: Sequence[str],
    ratios: Sequence[float],
    setups: Sequence[Setup],
    settings: dict[str, Any] | None = None,
) -> list[Cell]:
    """Return the grid without duplicates. `full`, `none` and `random` are always included.

    Args:
        policies: Names, optionally with their own settings: `hkvd:check_layer=3,metric=cosine`.
        settings: Settings of all policies.

    Raises:
        SettingError: Invalid name or value.
    """
    if not ratios:
        raise SettingError("no ratios: pass at least one")
    variants = {label: _config(label, settings or {}) for label in dict.fromkeys((*policies, _RANDOM))}
    cells: dict[str, Cell] = {}
    for setup in setups:
        plain = Setup(setup.chunk_tokens)  # full prefill stores nothing
        wanted = [
            Cell(FULL, _config(FULL, settings or {}), plain),
            Cell(NONE, _config(NONE, settings or {}), setup),
        ]
        for (label, config), ratio in itertools.product(variants.items(), ratios):
            if config.policy not in (FULL, NONE):
                wanted.append(Cell(label, replace(config, ratio=check_ratio(ratio)), setup))
        cells.update((cell.key, cell) for cell in wanted)
    return list(cells.values())


def _config(label: str, settings: dict[str, Any]) -> BlendConfig:
    policy, _, own = label.partition(":")
    check_policy(policy)
    if own and policy in (FULL, NONE):
        raise SettingError(f"policy {policy!r} has no settings, got {label!r}")
    more = parse_settings(own.split(",")) if own else {}
    try:
        return BlendConfig(policy=policy, ratio=0.0, controller="off", **{**settings, **more})
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, SettingError) else SettingError(f"{label}: {error}") from None


@dataclass(frozen=True)
class Asking:
    """Settings of prompts and answers.

    Attributes:
        max_tokens: Maximum length of an answer.
        stop: The answer ends before the first of these strings.
        instruction: Text between passages and question.
        missing: Share of the warmed passages left out of the prompt, as if they had not been retrieved.
    """

    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    instruction: str = ""
    missing: float = 0.0


def default_stop(model_name: str) -> tuple[str, ...]:
    """Return the reader's stop string, a blank line; nothing for other models."""
    return ("\n\n",) if model_name == "reader" else ()


def by_setup(result: dict[str, Any]) -> dict[Setup, list[dict[str, Any]]]:
    """Group the cells of a result by how chunks are stored; each group starts with `full`, then `none`."""
    cells = result["cells"]
    full = {cell["chunk_tokens"]: cell for cell in cells if cell["policy"] == FULL}
    groups: dict[Setup, list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["policy"] != FULL:
            setup = Setup(**{field.name: cell[field.name] for field in fields(Setup)})
            groups.setdefault(setup, [full[setup.chunk_tokens]]).append(cell)
    return groups
