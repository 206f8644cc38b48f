"""Calibration: find the smallest recompute ratio whose answers match full prefill on this model and corpus.

`kvrag.control.agreement` measures and has the rule.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from kvrag.backend.transformers import Model
from kvrag.config import ANSWER_SETTINGS, BlendConfig, Sampling, check_list, check_number, check_option
from kvrag.control.agreement import TARGET, Prefill, Record, choose, compare, wilson
from kvrag.control.prompts import first_word
from kvrag.errors import KvragError, PromptError, SettingError, StoreError
from kvrag.store import KVStore
from kvrag.types import Messages

FILE = "calibration.json"
GRID = (0.05, 0.15, 0.3, 0.6)
PROMPTS = 40
"""Prompts that a default takes, and generated ones by default: minutes."""
CANDIDATES = 3  # generated prompts for each that is used: full prefill guesses at some
_TRIAL = 0.25  # of the time limit, before the duration is estimated
_CHUNKS = 1000  # stored chunks that prompts are generated from


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement with full prefill at one ratio.

    `first` of `prompts` first tokens agree, with Wilson's 95 % interval `low` to `high` of their share; `following` of
    `tokens` later tokens agree.
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
        """Share of first tokens that agree; the target applies to it."""
        return self.first / self.prompts


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of a calibration.

    Attributes:
        fingerprint: Digest of the model's fingerprint.
        settings: The other fields of the BlendConfig that it is valid for, as JSON types.
        sure: The lower end of the interval had to reach the target, not just the share.
        curve: One entry per ratio, ascending.
        ratio: The smallest ratio that reaches the target together with the next larger one; None = only full prefill.
        notes: Caveats.
        longest: Tokens of the longest prompt; 0 = not recorded.
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
    interrupted: bool = False
    longest: int = 0

    @property
    def is_usable(self) -> bool:
        """False if it has too few prompts to become the default."""
        return self.curve[0].prompts >= PROMPTS

    def to_json(self) -> str:
        """Return JSON for the store."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Parse the JSON of `to_json`; raises ValueError if it is invalid."""
        try:
            fields = json.loads(text)
            fields["curve"] = tuple(Agreement(**point) for point in fields["curve"])
            fields["notes"] = tuple(fields["notes"])
            calibration = cls(**fields)
            if calibration.ratio is not None:
                check_option("ratio", calibration.ratio)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return calibration

    def mismatch(self, fingerprint: str, config: BlendConfig) -> str:
        """Return why the calibration is not valid for this model and these settings; "" if it is valid."""
        if self.fingerprint != fingerprint:
            return "another model or other load settings"
        if self.policy != config.policy:
            return f"policy {self.policy}, not {config.policy}"
        settings = settings_of(config)
        # stored ones may have settings of policies, which are part of the policy now
        different = [name for name, value in settings.items() if value != self.settings.get(name)]
        return f"other settings ({', '.join(different)})" if different else ""


def calibrate(
    model: Model,
    prefill: Prefill,
    prompts: Sequence[list[int]],
    config: BlendConfig,
    target: float = TARGET,
    sure: bool = False,
    ratios: Sequence[float] = GRID,
    tokens: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
    words: Sequence[str] | None = None,
    count: int | None = None,
    limit_s: float = math.inf,
) -> Calibration:
    """Compare blending with full prefill on the same ids, at every ratio; see `BlendEngine.calibrate`.

    Args:
        prompts: Token ids; prompts without anything to recompute are left out.
        config: Policy and its settings; its ratio is ignored.
        words: The word that each prompt's answer should begin with. Prompts that full prefill answers otherwise are
            left out: their answers are guesses, which any rounding changes.
        count: Stop after this many prompts that were not left out.
        limit_s: Stop if they would take longer than this, in seconds.
    """
    if config.policy in ("none", "full"):
        raise SettingError(f"policy {config.policy!r} has no ratio to calibrate")
    if not check_number("target", target) or target > 1.0:
        raise SettingError(f"target must be in (0, 1], got {target}: it is a share of first tokens")
    check_number("tokens", tokens, least=1, whole=True)
    ratios = sorted({check_option("ratio", ratio) for ratio in check_list("ratios", ratios)})
    if not ratios or ratios[-1] >= 1.0:
        raise SettingError("ratios must be one or more numbers below 1 (1 is full prefill)")
    count = min(count or len(prompts), len(prompts))
    asked = list(zip(prompts, words or [""] * len(prompts), strict=True))
    measured = _Measured(model, prefill, [replace(config, ratio=ratio, controller="off") for ratio in ratios], count)
    try:
        measured.measure(asked, Sampling(tokens, temperature=0), limit_s, progress)
    except KeyboardInterrupt:
        if not measured.rows:
            raise
        measured.is_interrupted = True
    rows = measured.rows
    if not rows:
        raise measured.why_none()
    curve = tuple(_agreement(ratio, rows, at) for at, ratio in enumerate(ratios, 1))
    return Calibration(
        fingerprint=model.fingerprint.digest,
        policy=config.policy,
        settings=settings_of(config),
        target=target,
        sure=sure,
        curve=curve,
        ratio=choose(ratios, [point.low if sure else point.share for point in curve], target),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=measured.notes(),
        interrupted=measured.is_interrupted,
        longest=max(row[0].prompt_tokens for row in rows),
    )


class _Measured:
    """Prompts measured so far, up to `count`.

    Attributes:
        rows: Records of each: full prefill's, then one per config.
        left_out: Number of prompts with nothing to recompute.
        guessed: Number of prompts that full prefill continues differently from the documents.
        too_long: Why the time limit ended the measurement; "" if it did not.
    """

    def __init__(self, model: Model, prefill: Prefill, configs: Sequence[BlendConfig], count: int) -> None:
        self._model, self._prefill, self._configs, self._count = model, prefill, configs, count
        self.rows: list[list[Record]] = []
        self.left_out = self.guessed = 0
        self.too_long, self.is_interrupted = "", False

    def measure(
        self,
        prompts: Sequence[tuple[list[int], str]],
        sampling: Sampling,
        limit_s: float,
        progress: Callable[[int, int], None],
    ) -> None:
        """Measure prompts, each with the word that its answer must begin with ("" = any)."""
        started, steps = time.monotonic(), 1 + len(self._configs)
        progress(0, self._count * steps)
        for number, (ids, word) in enumerate(prompts):
            if len(self.rows) == self._count or self._is_too_long(number, time.monotonic() - started, limit_s):
                return
            records = compare(self._model, self._prefill, ids, self._configs, sampling)
            row = [next(records)]
            if word and first_word(row[0].text) != word:
                self.guessed += 1
                continue
            done = steps * (len(self.rows) if word else number)
            progress(done + 1, self._count * steps)
            for record in records:
                row.append(record)
                progress(done + len(row), self._count * steps)
            if row[-1].inexact_tokens:
                self.rows.append(row)
            else:
                self.left_out += 1

    def _is_too_long(self, number: int, elapsed: float, limit_s: float) -> bool:
        """Return whether all prompts would take longer than the limit, by the duration of the first ones."""
        needed = elapsed / max(len(self.rows), 1) * self._count
        if not number or elapsed <= _TRIAL * limit_s or needed <= limit_s:
            return False
        prompts = f"{len(self.rows)} of {self._count} prompts"
        self.too_long = f"stopped after {prompts}, which would take {needed / 60:.0f} minutes"
        return True

    def why_none(self) -> KvragError:
        """Return the error that says why no prompt counts."""
        if self.too_long:
            return PromptError(self.too_long)
        if self.guessed:
            return PromptError(
                f"the model completes none of {self.guessed} sentences as the documents do, so its answers are "
                "guesses: give questions that it can answer (--questions FILE)"
            )
        return StoreError(
            "no prompt contains two stored chunks, so there is nothing to recompute: "
            "warm the corpus that the prompts are about"
        )

    def notes(self) -> tuple[str, ...]:
        """Return caveats."""
        number, guessed = len(self.rows), "full prefill continues them differently from the documents"
        notes = {
            f"{self.left_out} prompts had nothing to recompute and were left out": self.left_out,
            f"{self.guessed} prompts were left out: {guessed}": self.guessed,
            f"interrupted after {number} of {self._count} prompts": self.is_interrupted,
            self.too_long: self.too_long,
            f"only {number} prompts, and a default takes {PROMPTS}: nothing is saved. Pass {PROMPTS} or more questions "
            "(--questions FILE), or warm more documents": number < PROMPTS,
        }
        return tuple(note for note, applies in notes.items() if applies)


def _agreement(ratio: float, rows: Sequence[list[Record]], at: int) -> Agreement:
    agrees = [[ours == theirs for ours, theirs in zip(row[at].tokens, row[0].tokens, strict=True)] for row in rows]
    first = sum(row[0] for row in agrees)
    following = [agree for row in agrees for agree in row[1:]]
    return Agreement(ratio, first, len(rows), *wilson(first, len(rows)), sum(following), len(following))


def settings_of(config: BlendConfig) -> dict[str, Any]:
    """Return the settings, besides the policy, that a calibration depends on, as JSON types."""
    # behind an edit of the history, more is kept at the same ratio: decision 28
    others = {name: value for name, value in asdict(config).items() if name not in ANSWER_SETTINGS}
    settings: dict[str, Any] = json.loads(json.dumps(others))
    return settings


def chunk_texts(model: Model, store: KVStore, namespace: str) -> list[str]:
    """Return the texts of a namespace's chunks, of not too many and from the whole corpus.

    Raises:
        StoreError: Fewer than two chunks.
    """
    least = BlendConfig().min_run  # shorter ones are stored, but never reused
    entries = [entry for entry in store.entries(0) if entry.namespace == namespace and len(entry.ids) >= least]
    if len(entries) < 2:
        raise StoreError(
            f"calibration needs at least two stored chunks, there {'is one' if entries else 'are none'}: "
            "warm the corpus first"
        )
    step = -(-len(entries) // _CHUNKS)
    return [model.tokenizer.decode(entry.ids.tolist()) for entry in entries[::step]]


def render(model: Model, prompts: Sequence[str | Messages]) -> list[list[int]]:
    """Return the token ids of a user's prompts; raises SettingError for one string, ContextWindowError."""
    rendered = [model.tokenizer.render(prompt) for prompt in check_list("prompts", prompts)]
    for ids in rendered:
        model.check_window(len(ids))
    return rendered
