"""How much has to be recomputed on this model and this corpus: the smallest ratio that answers as full prefill does.

Every prompt is prefilled in full once; the tokens that full prefill would answer with are then fed to each blended
cache (teacher forcing), and at each of them the two likeliest next tokens are compared. The first token decides. The
others follow a prefix that full prefill wrote, so they are easier and not independent; they are reported beside it.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

import torch
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig, check_ratio
from kvrag.errors import ModelError, SettingError, StoreError
from kvrag.reuse.stitch import Stitched

FILE = "calibration.json"
GRID = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
_FEW = 30  # prompts; below this the interval is wider than any difference that matters
_Z = 1.96  # 95 %


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often the likeliest token was full prefill's at one ratio.

    `first` of `prompts` first tokens, `low` to `high` is Wilson's 95 % interval of their share; `following` of
    `tokens` later ones.
    """

    ratio: float
    first: int
    prompts: int
    low: float
    high: float
    following: int
    tokens: int

    @property
    def share(self) -> float:
        """Of first tokens that agree: what the target is about."""
        return self.first / self.prompts


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a calibration found.

    Attributes:
        fingerprint: Digest of the model's fingerprint.
        policy, settings: What it holds for; `settings` are the other fields of BlendConfig, as JSON has them.
        target: Share of first tokens that must agree.
        sure: The interval's lower end had to hold it, not the share itself.
        curve: One entry per ratio, ascending.
        ratio: The smallest that holds the target together with the next larger one; None = only full prefill does.
        made: Date and time, UTC.
        notes: What a reader of the number should know.
    """

    fingerprint: str
    policy: str
    settings: dict[str, Any]
    target: float
    sure: bool
    curve: tuple[Agreement, ...]
    ratio: float | None
    made: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Raises ValueError if it is none."""
        try:
            fields = json.loads(text)
            fields["curve"] = tuple(Agreement(**point) for point in fields["curve"])
            fields["notes"] = tuple(fields["notes"])
            calibration = cls(**fields)
            if calibration.ratio is not None:
                check_ratio(calibration.ratio)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return calibration

    def mismatch(self, fingerprint: str, config: BlendConfig) -> str:
        """Why it does not hold for this model and these settings, "" if it does."""
        if self.fingerprint != fingerprint:
            return "another model or another way of loading it"
        if self.policy != config.policy:
            return f"policy {self.policy}, not {config.policy}"
        settings = settings_of(config)
        different = [name for name in settings if settings[name] != self.settings.get(name)]
        return f"other settings ({', '.join(different)})" if different else ""


class _Prefilled(Protocol):
    @property
    def stitched(self) -> Stitched: ...
    @property
    def logits(self) -> Tensor: ...


Prefill = Callable[[list[int], BlendConfig], _Prefilled]
"""From prompt ids to a complete cache, as `BlendEngine.prefill`."""


def calibrate(
    model: Model,
    prefill: Prefill,
    prompts: Sequence[list[int]],
    config: BlendConfig,
    *,
    target: float = 0.99,
    sure: bool = False,
    ratios: Sequence[float] = GRID,
    tokens: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Compare blending with full prefill on the same ids, at every ratio.

    Args:
        prompts: Token ids; those without anything to recompute are left out.
        config: Policy and its settings; its ratio does not matter.
        target: Share of first tokens that must agree.
        sure: Hold the target by the lower end of the 95 % interval, which takes several hundred prompts for 99 %.
        ratios: To try, each below 1.
        tokens: How many of full prefill's tokens to compare.
        progress: Called with (prefills done, prefills to do).

    Raises:
        SettingError: An argument is out of range, or the policy has no ratio.
        StoreError: None of the prompts contains stored chunks that could be recomputed.
        ModelError: Logits are NaN.
    """
    grid = _checked(config, target, ratios, tokens)
    hits = {ratio: [0, 0] for ratio in grid}
    used = num_tokens = done = 0
    progress(0, total := len(prompts) * (len(grid) + 1))
    for ids in prompts:
        first = prefill(ids, _at(config, grid[0]))
        if not len(first.stitched.inexact):
            progress(done := done + len(grid) + 1, total)
            continue
        answer = _greedy(model, prefill(ids, replace(config, policy="full", controller="off")), tokens)
        used, num_tokens = used + 1, num_tokens + len(answer) - 1
        progress(done := done + 1, total)
        for ratio in grid:
            blended = first if ratio == grid[0] else prefill(ids, _at(config, ratio))
            same = _same(model, blended, answer)
            hits[ratio][0] += same[0]
            hits[ratio][1] += sum(same[1:])
            progress(done := done + 1, total)
    if not used:
        raise StoreError(
            "none of the prompts contains two stored chunks, so there is nothing to recompute: "
            "warm the corpus that they are about"
        )
    curve = tuple(
        Agreement(ratio, first, used, *wilson(first, used), following, num_tokens)
        for ratio, (first, following) in hits.items()
    )
    notes = [f"{len(prompts) - used} prompts had nothing to recompute and were left out"] if used < len(prompts) else []
    if used < _FEW:
        notes.append(f"only {used} prompts: the interval is wide, give more")
    return Calibration(
        fingerprint=model.fingerprint.digest,
        policy=config.policy,
        settings=settings_of(config),
        target=target,
        sure=sure,
        curve=curve,
        ratio=choose(curve, target, sure),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=tuple(notes),
    )


def choose(curve: Sequence[Agreement], target: float, sure: bool = False) -> float | None:
    """The smallest ratio that holds the target and whose larger neighbour does too: one lucky ratio is no result."""
    holds = [(point.low if sure else point.share) >= target for point in curve]
    pairs = zip(curve, holds, [*holds[1:], True], strict=True)
    return next((point.ratio for point, itself, larger in pairs if itself and larger), None)


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927): honest for few samples and for shares near 1."""
    share, z2 = hits / total, _Z * _Z
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def settings_of(config: BlendConfig) -> dict[str, Any]:
    """What a calibration depends on besides the policy, as JSON has it."""
    own = {name: value for name, value in asdict(config).items() if name not in ("policy", "ratio", "controller")}
    settings: dict[str, Any] = json.loads(json.dumps(own))
    return settings


def make_prompts(model: Model, chunks: Sequence[str], count: int, size: int = 4, seed: int = 0) -> list[list[int]]:
    """Prompts about chunks, for those who have no questions yet; the same ones every time.

    Each takes a chunk and `size` - 1 others in random order and asks to go on with one of its sentences, which is cut
    before its last third. Whoever has real questions should use them: these ask for what one chunk says, not for what
    several say together.

    Raises:
        StoreError: Too few chunks, or none with a sentence of four words that fits into the model's window.
    """
    if len(chunks) < 2:
        raise StoreError(
            f"calibration needs at least two stored chunks, there {'is one' if chunks else 'are none'}: "
            "warm the corpus first"
        )
    rng = random.Random(seed)
    beginnings = [(number, cut) for number, text in enumerate(chunks) for cut in _beginnings(text)]
    rng.shuffle(beginnings)
    prompts: list[list[int]] = []
    for number, beginning in beginnings:
        if len(prompts) == count:
            break
        others = [other for other in range(len(chunks)) if other != number]
        chosen = [number, *rng.sample(others, min(size, len(chunks)) - 1)]
        rng.shuffle(chosen)
        question = f"Question: How does this sentence of the text go on? {beginning}"
        text = "\n\n".join([*(chunks[i] for i in chosen), question])
        ids = model.tokenizer.render(model.tokenizer.as_prompt(text))
        if len(ids) < model.context_window:
            prompts.append(ids)
    if not prompts:
        raise StoreError(
            "the stored chunks have no sentences to ask about that fit into the model's window: "
            "give questions or prompts of your own"
        )
    return prompts


def _beginnings(text: str) -> list[str]:
    sentences = [sentence.split() for sentence in re.split(r"(?<=[.!?])\s+|\n+", text)]
    return [" ".join(words[: len(words) - max(1, len(words) // 3)]) for words in sentences if len(words) >= 4]


def _checked(config: BlendConfig, target: float, ratios: Sequence[float], tokens: int) -> list[float]:
    """Raise SettingError or return the grid, ascending."""
    if config.policy in ("none", "full"):
        raise SettingError(f"policy {config.policy!r} has no ratio to calibrate")
    if not 0.0 < target <= 1.0:
        raise SettingError(f"target must be in (0, 1], got {target}: it is a share of first tokens")
    if tokens < 1:
        raise SettingError(f"tokens must be at least 1, got {tokens}")
    grid = sorted({check_ratio(ratio) for ratio in ratios})
    if not grid or grid[-1] >= 1.0:
        raise SettingError("ratios must be one or more numbers below 1, which is full prefill")
    return grid


def _at(config: BlendConfig, ratio: float) -> BlendConfig:
    return replace(config, ratio=ratio, controller="off")


def _greedy(model: Model, full: _Prefilled, count: int) -> list[int]:
    """The likeliest tokens after a prompt, one after the other; the last may be an end token."""
    answer, logits = [], full.logits
    while True:
        answer.append(int(_sound(logits).argmax()))
        if len(answer) == count or answer[-1] in model.eos_ids:
            return answer
        logits = model.forward(torch.tensor([answer[-1:]]), full.stitched.cache)


def _same(model: Model, blended: _Prefilled, answer: Sequence[int]) -> list[bool]:
    """Whether this cache's likeliest token is the answer's, at each of them, those before being given."""
    logits = blended.logits
    if len(answer) > 1:
        following = model.forward_all(torch.tensor([answer[:-1]]), blended.stitched.cache)[0]
        logits = torch.cat([logits, following])  # (S, V)
    best = _sound(logits).argmax(dim=-1).tolist()
    return [ours == theirs for ours, theirs in zip(best, answer, strict=True)]


def _sound(logits: Tensor) -> Tensor:
    if torch.isnan(logits).any():
        raise ModelError("the model's logits are NaN: a value overflowed; load it with dtype='bfloat16' or 'float32'")
    return logits
