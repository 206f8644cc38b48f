"""Calibration: tune adaptive recompute for this model and corpus.

Fixed ratios are measured, see `kvrag.control.agreement`. What adaptive recompute would have done on the same prompts
follows from these records, see `kvrag.control.trial`. Chosen is the fastest setting that keeps enough answers: a start
and a margin, or a fixed ratio.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from kvrag.backend.transformers import Model
from kvrag.config import (
    ANSWER_SETTINGS,
    DEFAULT_RATIO,
    BlendConfig,
    Sampling,
    check_list,
    check_number,
    check_option,
)
from kvrag.control import cost
from kvrag.control.agreement import TARGET, TOKENS, Prefill, Record, choose, compare, wilson
from kvrag.control.trial import Outcome, Trial
from kvrag.errors import SettingError, StoreError
from kvrag.reuse.select import Passes, selecting
from kvrag.store import KVStore
from kvrag.types import Messages

FILE = "calibration.json"
TRIALS = "measured.json"
"""The measured prompts, so that a calibration which was interrupted goes on."""
GRID = (0.0, 0.05, 0.15, 0.3, 0.5)
MARGIN = 3.0
"""Default of `BlendConfig.margin`."""
MARGINS = (1.0, 1.5, 2.0, MARGIN, 4.5, 6.0)
"""Margins to choose from."""
PROMPTS = 40
"""Prompts that a default takes, and generated ones by default."""
LIMIT_S = {"cuda": 120.0}
"""Time limit by device; 10 minutes on others."""
_CHUNKS = 1000  # stored chunks that prompts are generated from
_SETUPS = 4  # measured sets of prompts and settings that are kept
_WRITE_S = 2.0  # between writes of what was measured


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement with full prefill at one ratio, or of adaptive recompute from this ratio on, with a margin.

    Attributes:
        margin: None = the ratio is fixed.
        kept: Number of the `prompts` whose answer is kept, with Wilson's 95 % interval `low` to `high` of their share.
        identical: Number of answers without any difference, near ties included.
        rows: Mean number of rows computed before the first token, relative to full prefill's.
        kl: Mean KL of the first token's distribution to full prefill's, in nats; None for adaptive recompute.
    """

    ratio: float
    margin: float | None
    kept: int
    prompts: int
    low: float
    high: float
    identical: int
    rows: float
    kl: float | None = None

    @property
    def share(self) -> float:
        """Share of the answers that are kept; the target applies to it."""
        return self.kept / self.prompts

    def line(self, mark: str = "") -> str:
        """Return the line of the table."""
        name = f"{self.ratio:g}, margin {self.margin:g}" if self.margin is not None else f"{self.ratio:g}"
        kept, interval = f"{self.kept} of {self.prompts}", f"{self.low:.0%} - {self.high:.0%}"
        kl = "" if self.kl is None else f"{self.kl:.3f}"
        return f"  {name:<18}{kept:>11}   {interval:<15}{self.identical:>9}{kl:>8}{self.rows:>7.2f}{mark}"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of a calibration.

    Attributes:
        fingerprint: Digest of the model's fingerprint.
        settings: The other fields of the BlendConfig that it is valid for, as JSON types.
        sure: The lower end of the interval had to reach the target, not just the share.
        curve: One entry per fixed ratio, ascending from plain reuse.
        ratio: The smallest fixed ratio that reaches the target, for those who complete nothing; None = none does.
        notes: Caveats.
        longest: Tokens of the longest prompt; 0 = not recorded.
        start, margin: Of adaptive recompute, margin 0 = the start is a fixed ratio; None = the defaults.
        adaptive: Simulated: with the default start and margin, if they were among those measured, and with the best;
            the last one is the chosen.
        tokens, near_ties: Number of full prefill's tokens, and of those that are not decided.
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
    start: float | None = None
    margin: float | None = None
    adaptive: tuple[Agreement, ...] = ()
    tokens: int = 0
    near_ties: int = 0

    @property
    def is_usable(self) -> bool:
        """False if it has too few prompts to become the default."""
        return self.curve[0].prompts >= PROMPTS

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        chosen = self.adaptive[-1]
        share = chosen.low if self.sure else chosen.share
        kept = (
            f"keeps {chosen.kept} of {chosen.prompts} answers ({chosen.low:.0%} to {chosen.high:.0%}), "
            f"with {chosen.rows:.2f} of full prefill's rows before the first token"
        )
        target = f"{self.target:g}{' with 95 % confidence' if self.sure else ''}"
        setting = f"start {chosen.ratio:g}, margin {chosen.margin:g}"
        if share >= self.target:
            name = f"adaptive recompute ({setting})" if chosen.margin else f"a fixed ratio of {chosen.ratio:g}"
            return f"{name} {kept}, and reaches the target of {target}"
        command = f"kvrag calibrate --target {math.floor(share * 1000) / 1000:g}{' --sure' if self.sure else ''}"
        accepted = f"; `{command}` accepts the fastest that keeps as many" if chosen.kept else ""
        return f"no setting reaches the target of {target}: the most careful one ({setting}) {kept}{accepted}"

    def __str__(self) -> str:
        """Return a table, the caveats and the verdict."""
        ties = f"{self.near_ties} of {self.tokens} are near ties"
        heads = f"  {'':<18}{'kept':>11}   {'95 % interval':<15}{'identical':>9}{'KL':>8}{'rows':>7}"
        chosen, default = (self.adaptive[-1].ratio, self.adaptive[-1].margin or None), (0.0, MARGIN)
        fixed, adaptive = (
            [point.line("  <-" * (setting == chosen) + "  default" * (setting == default)) for setting, point in points]
            for points in (
                [((point.ratio, point.margin), point) for point in self.curve],
                [((point.ratio, point.margin), point) for point in self.adaptive if point.margin],
            )
        )
        lines = [
            f"{self.curve[0].prompts} prompts, policy {self.policy}",
            f"kept: no token of which full prefill is sure changed ({ties})",
            "rows: computed before the first token, relative to full prefill",
            "",
            heads,
            *("fixed ratio", *fixed),
            *("adaptive, simulated", *adaptive, ""),
            *self.notes,
            self.verdict,
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return JSON for the store."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Parse the JSON of `to_json`; raises ValueError if it is invalid."""
        try:
            fields = json.loads(text)
            for name in ("curve", "adaptive"):
                fields[name] = tuple(Agreement(**point) for point in fields[name])
                if not fields[name]:
                    raise ValueError(f"{name} is empty")
            fields["notes"] = tuple(fields["notes"])
            calibration = cls(**fields)
            for ratio in (calibration.ratio, calibration.start):
                check_option("ratio", DEFAULT_RATIO if ratio is None else ratio)
            check_number("margin", calibration.margin or 0.0)
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
        different = [name for name, value in settings.items() if value != self.settings.get(name)]
        return f"other settings ({', '.join(different)})" if different else ""


def calibrate(
    model: Model,
    prefill: Prefill,
    store: KVStore,
    namespace: str,
    prompts: Sequence[list[int]],
    config: BlendConfig,
    target: float = TARGET,
    sure: bool = False,
    ratios: Sequence[float] = GRID,
    tokens: int = TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
    limit_s: float | None = None,
) -> Calibration:
    """Compare blending with full prefill on the same ids, at every ratio; see `BlendEngine.calibrate`.

    Args:
        prefill: Blends chunks of this store and namespace.
        prompts: Token ids; prompts without anything to recompute are left out.
        config: Policy and its settings; its ratio is ignored.
        limit_s: Seconds after which no further prompt is measured; None = `LIMIT_S`.
    """
    if config.policy in ("none", "full"):
        raise SettingError(f"policy {config.policy!r} has no ratio to calibrate")
    if not check_number("target", target) or target > 1.0:
        raise SettingError(f"target must be in (0, 1], got {target}: it is a share of answers")
    tokens = check_number("tokens", tokens, least=1, whole=True)
    starts = sorted({check_option("ratio", ratio) for ratio in check_list("ratios", ratios)})
    if not starts or starts[-1] >= 1.0:
        raise SettingError("ratios must be one or more numbers from 0 to below 1 (1 is full prefill)")
    limit_s = LIMIT_S.get(model.device.type, 600.0) if limit_s is None else check_number("limit_s", limit_s)
    ratios = sorted({0.0, *starts})
    configs = [replace(config, ratio=ratio, controller="off") for ratio in ratios]
    measured = _Measured(store, namespace, [model.fingerprint.digest, tokens, [asdict(config) for config in configs]])
    is_interrupted = False
    try:
        records = partial(compare, model, prefill, configs=configs, sampling=Sampling(tokens, temperature=0))
        measured.measure(prompts, records, 1 + len(configs), limit_s, progress)
    except KeyboardInterrupt:
        if not measured.trials:
            raise
        is_interrupted = True
    finally:
        measured.write()
    trials = measured.trials
    if not trials:
        raise StoreError(
            "no prompt contains two stored chunks, so there is nothing to recompute: "
            "warm the corpus that the prompts are about"
        )
    passes = selecting(config, model.num_layers)
    curve = [_fixed(trials, at, ratio, passes) for at, ratio in enumerate(ratios)]
    settings = [
        _agreement(start, margin, [trial.adaptive(ratios.index(start), margin, passes) for trial in trials])
        for start in starts
        for margin in MARGINS
    ]
    fixed = [replace(point, margin=0.0, kl=None) for point in curve if point.ratio in starts]
    adaptive, chosen = (choose_setting(points, target, sure) for points in (settings, [*settings, *fixed]))
    default = [point for point in settings if (point.ratio, point.margin) == (0.0, MARGIN)]
    shares = [point.low if sure else point.share for point in curve]
    return Calibration(
        fingerprint=model.fingerprint.digest,
        policy=config.policy,
        settings=settings_of(config),
        target=target,
        sure=sure,
        curve=tuple(curve),
        ratio=choose(ratios, shares, target),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=measured.notes(is_interrupted),
        interrupted=is_interrupted,
        longest=max(trial.prompt for trial in trials),
        start=chosen.ratio,
        margin=chosen.margin,
        adaptive=tuple(dict.fromkeys([*default, adaptive, chosen])),
        tokens=sum(len(trial.margins) for trial in trials),
        near_ties=sum(trial.near_ties for trial in trials),
    )


def choose_setting(settings: Sequence[Agreement], target: float, sure: bool = False) -> Agreement:
    """Return the setting with the fewest rows that reaches the target; if none does, the most careful one.

    Of settings that are about as fast, it is the one with the largest margin.
    """
    reached = [point for point in settings if (point.low if sure else point.share) >= target]
    if reached:
        return min(reached, key=lambda point: (round(point.rows, 2), -(point.margin or 0.0)))
    return max(settings, key=lambda point: (point.kept, point.margin, point.ratio))


class _Measured:
    """Prompts measured by now, with these settings, on these chunks; those of earlier attempts too.

    Attributes:
        trials: Those with something to recompute.
    """

    def __init__(self, store: KVStore, namespace: str, settings: list[Any]) -> None:
        self._store, self._namespace, self._settings = store, namespace, settings
        self._setup = self._digest_setup()
        self._kept: dict[str, Any] = {}  # by digest of the prompt; None = nothing to recompute
        self.trials: list[Trial] = []
        with contextlib.suppress(StoreError, ValueError, KeyError, TypeError, AttributeError):  # damaged
            kept = cost.read(store.read_text(TRIALS)).get(self._setup, {})
            self._kept = {prompt: trial and Trial.from_dict(trial) for prompt, trial in kept.items()}
        self._is_changed, self._written = False, time.monotonic()
        self._left_out = self._missing = self._limit_s = 0.0

    def measure(
        self,
        prompts: Sequence[list[int]],
        compare: Callable[[list[int]], Iterator[Record]],
        steps: int,
        limit_s: float,
        progress: Callable[[int, int], None],
    ) -> None:
        """Measure the prompts that were not measured before, each in `steps` prefills, by `compare`."""
        started, self._number, self._limit_s = time.monotonic(), len(prompts), limit_s
        progress(0, self._number * steps)
        for number, ids in enumerate(prompts):
            digest = _digest(np.asarray(ids, dtype="<u4").tobytes())
            if digest not in self._kept:
                if self._kept and time.monotonic() - started > limit_s:
                    self._missing += 1
                    continue
                records = []
                for record in compare(ids):
                    records.append(record)
                    progress(number * steps + len(records), self._number * steps)
                full, *others = records
                trial = Trial.of(full, others) if others[-1].inexact_tokens else None
                if trial or self._digest_setup() == self._setup:  # else documents may have been deleted meanwhile
                    self._kept[digest] = trial
                    self._is_changed = True
                if time.monotonic() - self._written > _WRITE_S:
                    self.write()
            progress((number + 1) * steps, self._number * steps)
            if trial := self._kept.get(digest):
                self.trials.append(trial)
            else:
                self._left_out += 1

    def _digest_setup(self) -> str:
        texts = sorted(entry.text_key for entry in self._store.entries(0) if entry.namespace == self._namespace)
        return _digest(json.dumps([self._settings, self._namespace, texts]).encode())

    def write(self) -> None:
        """Keep what was measured beside the chunks."""
        if self._is_changed:
            kept = {prompt: trial and asdict(trial) for prompt, trial in self._kept.items()}
            with contextlib.suppress(StoreError):  # only to be able to go on later
                self._store.change_text(TRIALS, lambda text: cost.write(text, {self._setup: kept}, _SETUPS))
            self._is_changed, self._written = False, time.monotonic()

    def notes(self, is_interrupted: bool) -> tuple[str, ...]:
        """Return caveats."""
        done = len(self.trials)
        limit = f"the time limit of {self._limit_s / 60:g} minutes ended it"
        notes = {
            f"{self._left_out:g} prompts had nothing to recompute and were left out": self._left_out,
            f"interrupted after {done} of {self._number} prompts: run it again to go on": is_interrupted,
            f"{limit} after {done} of {self._number} prompts: run it again to go on": self._missing,
            f"only {done} prompts, and a default takes {PROMPTS}: nothing is saved. Pass {PROMPTS} or more questions "
            "(--questions FILE), or warm more documents": done < PROMPTS and not (is_interrupted or self._missing),
        }
        return tuple(note for note, applies in notes.items() if applies)


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def _fixed(trials: Sequence[Trial], at: int, ratio: float, passes: Passes) -> Agreement:
    kl = sum(trial.cells[at].kl for trial in trials) / len(trials)
    return _agreement(ratio, None, [trial.at(at, passes) for trial in trials], kl)


def _agreement(ratio: float, margin: float | None, outcomes: Sequence[Outcome], kl: float | None = None) -> Agreement:
    num, kept = len(outcomes), sum(outcome.kept for outcome in outcomes)
    identical, rows = sum(outcome.identical for outcome in outcomes), sum(outcome.rows for outcome in outcomes) / num
    return Agreement(ratio, margin, kept, num, *wilson(kept, num), identical, rows, kl)


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
