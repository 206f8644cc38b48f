"""Calibration and measured speeds of one engine, and the settings that they give for a request.

Both are stored beside the chunks. The controller, `decide`, chooses between full prefill and blending, and raises the
ratio where loading hides it. It is a pure function, so that `python -m benchmarks simulate` can evaluate it for other
machines.
"""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import time
from dataclasses import dataclass, replace

import torch

from kvrag.backend.protocol import PREFILL_BLOCK, Backend
from kvrag.config import DEFAULT_POLICY, DEFAULT_RATIO, BlendConfig
from kvrag.control import calibrate, cost
from kvrag.control.calibrate import Calibration
from kvrag.control.cost import CostModel, Speed, Workload, blend_seconds, full_seconds
from kvrag.control.counts import FIRST_TOKENS, AnswerCounts
from kvrag.errors import SettingError, StoreError
from kvrag.process import crowding
from kvrag.reuse.request_state import RequestState, Trace
from kvrag.reuse.select import selecting
from kvrag.store import ChunkReader, KVStore
from kvrag.store.values import tokens_of
from kvrag.words import human_bytes

logger = logging.getLogger("kvrag")

LEAST = 0.05
"""Ratio below which adaptive recompute does not begin."""

START = DEFAULT_RATIO
"""Ratio that adaptive recompute begins with if most chunks were encoded alone: such KV deviates much more."""

MARGIN = calibrate.MARGIN
"""Default of `BlendConfig.margin`."""

BOUNDS = (0.5, 8.0)
"""Bounds of a margin that follows checked answers, see `kvrag.control.check`."""

NOTICEABLE_S = 0.01
"""Minimum advantage of full prefill in seconds: smaller differences should not make answers depend on timing."""
STEP = 0.05
"""A ratio hidden by loading is rounded down to a multiple of this, so that it does not vary with every answer."""

CPU_SHARE = 2 / 3
"""Timings of a thread that had a processor for a smaller share of the time are not used: the machine was busy."""

_ROWS = Speed(0.0, 1.0, 0.0, 0.0, math.inf)  # counts rows, as long as no speed is known
_KEEP_S = 60.0  # seconds between writes of the measurements, and between probes of a slow disk
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How a prompt is prefilled: in full, or by blending at a ratio.

    Attributes:
        config: The settings that were asked for, with the ratio and, for full prefill, the policy filled in.
        margin: Of a token that is emitted, see `kvrag.reuse.blend`; 0 = any.
        reason: The controller's choice and its reason; "" if it made none.
        notes: Notes for the report.
    """

    config: BlendConfig
    margin: float = 0.0
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether the prompt is prefilled in full."""
        return self.config.policy == "full"

    @property
    def ratio(self) -> float:
        """Recompute ratio."""
        assert self.config.ratio is not None
        return self.config.ratio


@dataclass(frozen=True, slots=True)
class Decision:
    """The controller's choice and its reason."""

    full: bool
    ratio: float
    reason: str


def decide(speed: Speed | None, request: Workload, ratio: float, doubt: float = 0.0) -> Decision:
    """Choose between full prefill and blending, and the ratio.

    Args:
        speed: None = no measurements yet: blend, which gives some.
        ratio: Lowest allowed ratio.
        doubt: Expected share of such prompts that are completed before the first token.
    """
    known = speed or _ROWS
    full_s, blend_s = full_seconds(known, request.prompt, request.kept), blend_seconds(known, request, ratio)
    if speed and full_s + NOTICEABLE_S <= blend_s:
        load_s = request.bytes / speed.load
        slow_load = f"loading alone takes {_seconds(load_s)} at {human_bytes(speed.load)}/s"
        cause = slow_load if load_s > full_s else "the context is short"
        reason = f"full prefill: predicted {_seconds(full_s)}, blending {_seconds(blend_s)}; {cause}"
        return Decision(True, 1.0, reason)
    completion_s = full_seconds(known, request.prompt, request.kept + request.reused - request.inexact)
    if doubt and full_s + NOTICEABLE_S <= blend_s + doubt * completion_s:
        reason = f"full prefill: the model was unsure of the first token of {doubt:.0%} of the last answers"
        return Decision(True, 1.0, reason)
    if speed is None:
        why = "no measurements on this machine yet (none are taken while it is busy)"
        return Decision(False, ratio, f"{_name(ratio)}: {why}")
    hidden = _hidden(speed, request, ratio, blend_s) if ratio else 0.0  # plain reuse has no policy
    reason = f"{_name(hidden)}: predicted {_seconds(blend_s)}, full prefill {_seconds(full_s)}"
    if hidden > ratio:
        reason += f"; {hidden:g} instead of {ratio:g} because loading takes as long"
    return Decision(False, hidden, reason)


def _hidden(speed: Speed, request: Workload, ratio: float, blend_s: float) -> float:
    """Return the largest ratio that takes no longer than `ratio` because loading takes as long."""
    steps = (round(number * STEP, 10) for number in range(1, math.ceil(1 / STEP)))
    hidden = [step for step in steps if step > ratio and blend_seconds(speed, request, step) <= blend_s * 1.001]
    return max([ratio, *hidden])


def _beginning(config: BlendConfig, ratio: float) -> BlendConfig:
    """Return the settings that adaptive recompute begins with."""
    return replace(config, policy=config.policy if ratio else "none", ratio=ratio)


def _name(ratio: float) -> str:
    return f"blend at {ratio:g}" if ratio else "plain reuse to begin with"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


_UNCALIBRATED = (
    "full prefill: models with layers that keep a state are blended once they are calibrated (`kvrag calibrate`), "
    "or where a ratio or margin is given"
)  # see decision 34


class Tuning:
    """A calibration and running measurements of one engine. Thread-safe."""

    def __init__(self, backend: Backend, store: KVStore) -> None:
        self._backend = backend
        self._path, self._texts = store.stats().path, store
        self._calibration: tuple[Calibration | None, str] | None = None
        device = torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else backend.device.type
        # with the machine's name: machines that share a store read it at different speeds
        self._machine = f"{backend.fingerprint.digest} {platform.node()} {device} {torch.get_num_threads()} threads"
        self._costs, self.counts = CostModel(backend.hidden_size), AnswerCounts(store, backend.fingerprint.digest)
        self._speed_kept = time.monotonic()
        self._look_for_crowd()
        with cost.recalling(store, cost.FILE):
            if (measured := cost.read(store.read_text(cost.FILE)).get(self._machine)) is not None:
                self._costs.take(measured)

    def plan(self, config: BlendConfig, factor: float = 1.0) -> Plan:
        """Return what settings mean before the chunks of the prompt are known; `factor` is of a margin not given."""
        asked, config = config, self._suited(config)
        if config.ratio is not None:
            return Plan(config)
        if config.policy in ("none", "full"):
            return Plan(replace(config, ratio=1.0 if config.policy == "full" else 0.0))
        calibration, note = self._calibrated(asked)
        start, margin = (calibration.start, calibration.margin) if calibration else (None, None)
        if self._backend.keeps_states and start is None and config.margin is None and config.controller == "auto":
            return Plan(replace(config, policy="full", ratio=1.0), reason=_UNCALIBRATED, notes=(note,) if note else ())
        margin = next(value for value in (config.margin, margin, MARGIN) if value is not None)
        if not margin and config.margin is None and factor > 1:  # the calibration's fixed ratio has lost answers
            margin = MARGIN
        if not margin and (start is None or config.margin is not None):  # nothing will be completed
            start = START if calibration is None or calibration.ratio is None else calibration.ratio
        elif start is None:
            start = 0.0 if config.controller == "auto" else START
        if config.margin is None and margin and factor != 1:
            margin = min(max(margin * factor, BOUNDS[0]), BOUNDS[1])
        return Plan(_beginning(config, start), margin=margin, notes=(note,) if note else ())

    def _suited(self, config: BlendConfig) -> BlendConfig:
        """Return the settings with a policy that the model can follow; raise SettingError if it is another one."""
        if not self._backend.keeps_states or config.policy in ("none", "full", "tail"):
            return config
        if config.policy != DEFAULT_POLICY:
            raise SettingError(
                f"policy {config.policy} recomputes scattered tokens, which layers that keep a state cannot: "
                "leave policy out, or use 'tail'"
            )
        return replace(config, policy="tail")

    def decide(self, plan: Plan, request: RequestState) -> Plan:
        """Let the controller choose between full prefill and blending, and the ratio, unless they were asked for.

        Args:
            plan: Of the settings of this request, which has its chunks.

        Raises:
            DamagedChunkError, ChunkUnreadableError: A chunk could not be read to measure the disk.
        """
        config = request.config
        is_open = config.ratio is None and config.policy not in ("none", "full") and config.controller == "auto"
        if not is_open or not request.runs or plan.is_full:
            return plan
        if plan.margin:
            calibration = self.calibration(config)
            if (calibration is None or calibration.start is None) and request.is_encoded_alone:
                plan = replace(plan, config=_beginning(self._suited(config), START))
            most = self._workload(plan.config, request).most_to_begin_with
            if most < min(plan.ratio, LEAST):
                stored = (request.kept + sum(map(len, request.runs))) / len(request.ids)
                reason = (
                    f"full prefill: {stored:.0%} is stored, and a recompute on doubt would cost more than that saves"
                )
                return replace(plan, config=replace(plan.config, policy="full", ratio=1.0), margin=0.0, reason=reason)
            plan = replace(plan, config=_beginning(self._suited(config), min(plan.ratio, most)))
        return self._decide(plan, request) if config.policy == DEFAULT_POLICY and not config.deterministic else plan

    def calibration(self, config: BlendConfig) -> Calibration | None:
        """Return the stored calibration that is valid for these settings, if any."""
        return self._calibrated(config)[0]

    def _calibrated(self, config: BlendConfig) -> tuple[Calibration | None, str]:
        """Return the calibration that is valid for these settings, if any, and a note on an invalid one."""
        if self._calibration is None:
            try:
                text = self._texts.read_text(calibrate.FILE)
                self._calibration = (Calibration.from_json(text) if text else None), ""
            except StoreError as error:  # the next prompt reads it again
                return None, f"no calibration: {error}; if this lasts, run `kvrag calibrate` again"
            except ValueError as error:
                remedy = f"ignored; run `kvrag calibrate` again ({error})"
                self._calibration = None, f"{self._path}/{calibrate.FILE} is damaged: {remedy}"
        calibration, note = self._calibration
        if calibration is not None and (mismatch := calibration.mismatch(self._backend.fingerprint.digest, config)):
            return None, f"the store's calibration is ignored: it was made for {mismatch}"
        return calibration, note

    def _decide(self, plan: Plan, request: RequestState) -> Plan:
        """Let the controller decide. If only the disk speed is unknown and counts, a small read measures it first."""
        costs, cold = self._costs, request.cold
        # after a blended beginning, nothing would be exact without a completion
        may_doubt = plan.margin and (not request.prefix or request.prefix.exact >= request.kept)
        doubt = self.counts[request.namespace].expect_doubt() if may_doubt else 0.0
        if cold and costs.speed() is not None and not costs.knows_load():
            self._probe(cold[0])
        decision = decide(costs.speed(), self._workload(plan.config, request), plan.ratio, doubt)
        if decision.full and cold and costs.load_age > _KEEP_S:  # full prefill loads nothing
            self._probe(cold[0])
            decision = decide(costs.speed(), self._workload(plan.config, request), plan.ratio, doubt)
        policy, margin = ("full", 0.0) if decision.full else (plan.config.policy, plan.margin)
        config = replace(plan.config, policy=policy, ratio=decision.ratio)
        return replace(plan, config=config, margin=margin, reason=decision.reason)

    def _workload(self, config: BlendConfig, request: RequestState) -> Workload:
        first, encoded_alone = request.runs[0], not request.matches[0].context_tokens
        after_preamble = first.offset == 0 and first.start == len(self._backend.preamble)
        after_preamble = after_preamble and encoded_alone
        after_preamble = after_preamble and not self._backend.keeps_states
        reused = sum(map(len, request.runs))
        return Workload(
            prompt=len(request.ids),
            reused=reused,
            inexact=reused - (len(first) if after_preamble else 0),
            bytes=request.cold_tokens * self._costs.bytes_per_token(self._backend.bytes_per_token),
            passes=selecting(config, self._backend.num_layers),
            kept=request.kept,
        )

    def _probe(self, reader: ChunkReader) -> None:
        """Read the first layers of a chunk, or fewer on a slow disk."""
        started, before = time.perf_counter(), reader.bytes_read
        num_layers = self._backend.num_layers
        for number in range(num_layers):
            keys, _ = reader.layer(number)
            if reader.bytes_read - before >= _PROBE_BYTES:
                break
        share = tokens_of(keys) * (number + 1) / num_layers
        self._costs.observe_load(reader.bytes_read - before, share, time.perf_counter() - started)

    def observe_encoding(self, tokens: int, pairs: float, passes: int, seconds: float, cpu: float) -> None:
        """Observe the encoding of chunks in `passes` forward passes.

        Args:
            pairs: Number of pairs of a token and a key that it attends to.
            cpu: Processor time of the thread in these seconds.
        """
        self._look_for_crowd()
        if not self._waited(seconds, cpu):
            self._costs.observe_pass("encode", tokens, pairs, seconds, passes)

    def _look_for_crowd(self) -> None:
        if self._backend.device.type == "cpu" and (advice := crowding(torch.get_num_threads())):
            logger.warning(advice)

    def _waited(self, seconds: float, cpu: float) -> bool:
        """Return whether a thread that computes waited for processors; one that uses a GPU waits for the GPU."""
        return self._backend.device.type == "cpu" and cpu < CPU_SHARE * seconds

    def observe(self, request: RequestState, rows: int, trace: Trace) -> None:
        """Observe the prefill of a prompt.

        Args:
            rows: Number of computed positions.
        """
        self._look_for_crowd()
        pass_s = trace.own_seconds["blend"]  # without waiting for the store, and without layout
        if trace.is_contended or self._waited(pass_s, trace.cpu_seconds["blend"]):
            return
        length, reused = len(request.ids), int(request.reused.sum())
        if not reused:
            self._costs.observe_pass("full", length, length**2 / 2, pass_s)
            return
        passes = 1 if self._backend.rope_follows_length else math.ceil(rows / PREFILL_BLOCK)
        if rows:
            self._costs.observe_pass("blend", rows, rows * length, pass_s, passes)
        self._costs.observe_load(request.bytes_read, request.cold_tokens, trace.seconds["load"])
        if not request.kept:  # copying a cached prefix involves no rotation
            self._costs.observe_stitch(reused, trace.seconds["stitch"])

    def observe_first_token(self, request: RequestState) -> None:
        """Observe whether the model was unsure of an answer's first token, if the controller has let it begin so."""
        if request.completion and request.report.decision:
            counts = self.counts[request.namespace]
            counts.doubts = f"{counts.doubts}{request.report.completed is not None:d}"[-FIRST_TOKENS:]

    def keep_speed_now_and_then(self) -> None:
        """Store the measurements if the last write was more than a minute ago."""
        if time.monotonic() - self._speed_kept > _KEEP_S:
            self.keep_speed()

    def keep_calibration(self, calibration: Calibration) -> Calibration:
        """Use a calibration from now on and store it. If storing fails, return it with a note."""
        try:
            self._texts.change_text(calibrate.FILE, lambda _: calibration.to_json())
        except StoreError as error:
            notes = (*calibration.notes, f"valid for this process only: {error}")
            calibration = replace(calibration, notes=notes)
        self._calibration = calibration, ""
        return calibration

    def reset_calibration(self) -> None:
        """Delete the stored calibration and what was measured for it, if any: an empty text is none."""
        for name in (calibrate.FILE, calibrate.TRIALS):
            self._texts.change_text(name, lambda _: "")
        self._calibration = None, ""

    def keep_speed(self) -> None:
        """Store the measurements and the counts of answers, if there are any."""
        self._speed_kept = time.monotonic()
        self.counts.keep()
        if self._costs.changed:
            measured = self._costs.to_dict()
            with contextlib.suppress(StoreError):  # neither answers nor ingestion depend on it
                self._texts.change_text(cost.FILE, lambda text: cost.write(text, {self._machine: measured}))
