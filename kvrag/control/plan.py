"""Plan: what settings, evidence and speeds mean for a prompt. Full prefill, or blending from a start, with a margin.

An answer begins with a share of its chunks recomputed, the *start*. Before the first token whose margin is too small is
emitted, the next share is recomputed, and then all; see `kvrag.reuse.blend`. Start and margin follow the model: a prior
by its size, then the counts of its own answers (`kvrag.control.evidence`). Chosen is what costs the least until the end
of the answer, of all that is expected to keep enough answers; full prefill, if nothing costs less.

    asked for                        start and margin                      full prefill instead
    a ratio, or policy none or full  these, 0                              no
    margin=0                         START, 0                              where it is predicted to be faster
    of a hybrid, without evidence                                          yes
    controller="off"                 by the model's size                   no
    deterministic, another policy    by the model's size                   where doubts would cost more than reuse saves
    nothing, or a margin             by the evidence                       where it is predicted to cost less

The evidence is stored beside the chunks. `decide` is a pure function, so that `python -m benchmarks
simulate` can evaluate it for other machines.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvrag.backend.protocol import PREFILL_BLOCK, Backend
from kvrag.config import DEFAULT_POLICY, BlendConfig
from kvrag.control.cost import CostModel, Speed, Workload, blend_seconds, full_seconds, measured
from kvrag.control.evidence import MARGINS, START, STARTS, EvidenceStore, Setting, rung, settings
from kvrag.errors import SettingError
from kvrag.request import Request
from kvrag.reuse.blend import begins_exactly, selecting
from kvrag.reuse.load import Trace
from kvrag.store import KVStore
from kvrag.words import human_bytes

logger = logging.getLogger("kvrag")

LEAST = 0.05
"""Ratio below which blending does not begin, if it cannot begin with its start."""
TARGET = 0.98
"""Share of the answers that must be kept by default."""
LOSS = 1 - TARGET
"""Share of answers that may be lost."""
LARGE, SMALL = (2 * START, 0.25), ((0.0, 3.0), (START, 3.0))
"""Start and margin before there is evidence; of small models for chunks with context and encoded alone: decision 37."""
PARAMETERS = 900_000_000
"""Parameters from which a model counts as large: see decision 37."""
GAIN = 0.95
"""Predicted cost of a whole answer, relative to full prefill's, above which a prompt is prefilled in full."""
ENOUGH = 100
"""Tokens of a start without which it is not chosen, a model with states is not blended, and no verdict is given."""
FEW = 8
"""Answers of a namespace before anything but the prior is followed."""

_Z = 1.96  # 95 %
_FIXED = {"none": 0.0, "full": 1.0}  # ratios of policies that have one
_BY_SPEED = (DEFAULT_POLICY, "tail")  # policies of which the cost is known
_TYPICAL = Workload(1000, 930, 930, 0)  # before the chunks are known
_TRIED = 16  # of so many prompts for which full prefill is cheaper, one is blended: else a change would not be noticed

NOTICEABLE_S = 0.01
"""Minimum advantage of full prefill in seconds: smaller differences should not make answers depend on timing."""
SLOWER = 0.05
"""The same, relative to full prefill, on a GPU: short prompts take a few hundredths of a second there."""
CPU_SHARE = 2 / 3
"""Timings of a thread that had a processor for a smaller share of the time are not used: the machine was busy."""

_ROWS = Speed(0.0, 1.0, 0.0, 0.0, math.inf)  # counts rows, as long as no speed is known
_KEEP_S = 60.0  # seconds between writes of the evidence


@dataclass(frozen=True, slots=True)
class Plan:
    """How a prompt is prefilled: in full, or by blending at a ratio.

    Attributes:
        config: The settings that were asked for, with the ratio and, for full prefill, the policy filled in.
        margin: Of a token that is emitted, see `kvrag.reuse.blend`; 0 = any.
        reason: The controller's choice and its reason; "" if it made none.
        start: What it was chosen by: `config.ratio` may be another one, for the rows before the first token.
        is_observed: The answer's tokens are counted, whatever the margin.
    """

    config: BlendConfig
    margin: float = 0.0
    reason: str = ""
    start: float = 0.0
    is_observed: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the prompt is prefilled in full."""
        return self.config.policy == "full"


def decide(speed: Speed | None, request: Workload, ratio: float, doubts_s: float = 0.0) -> tuple[bool, str]:
    """Return whether to prefill in full instead of blending at a ratio, and the reason.

    Args:
        speed: None = no measurements yet: blend, which gives some.
        doubts_s: Expected seconds of what is recomputed during the answer, by the same speed.
    """
    known = speed or _ROWS
    full_s, blend_s = full_seconds(known, request.prompt, request.kept), blend_seconds(known, request, ratio)
    noticeable_s = min(NOTICEABLE_S, SLOWER * full_s) if known.blended else NOTICEABLE_S
    if speed and full_s + noticeable_s <= blend_s:
        load_s = request.bytes / speed.load
        slow_load = f"loading alone takes {_seconds(load_s)} at {human_bytes(speed.load)}/s"
        cause = slow_load if load_s > full_s else "the context is short"
        return True, f"full prefill: predicted {_seconds(full_s)}, blending {_seconds(blend_s)}; {cause}"
    expected = (blend_s + doubts_s) / full_s
    if doubts_s and expected > GAIN and full_s + NOTICEABLE_S <= blend_s + doubts_s / GAIN:
        return True, f"full prefill: this model is so often unsure that blending would cost {expected:.0%} of it in all"
    name = f"blend at {ratio:g}" if ratio else "plain reuse to begin with"
    if speed is None:
        return False, f"{name}: no measurements on this machine yet (none are taken while it is busy)"
    reason = f"{name}: predicted {_seconds(blend_s)}, full prefill {_seconds(full_s)}"
    if doubts_s:
        reason += f"; {_seconds(blend_s + doubts_s)} with what doubts will cost, on average"
    return False, reason


def _in_full(config: BlendConfig, reason: str) -> Plan:
    return Plan(replace(config, policy="full", ratio=1.0), reason=reason)


def _beginning(config: BlendConfig, ratio: float) -> BlendConfig:
    """Return the settings that adaptive recompute begins with."""
    return replace(config, policy=config.policy if ratio else "none", ratio=ratio)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


_UNCALIBRATED = (
    "full prefill: models with layers that keep a state are blended once they are calibrated (`kvrag warm --tune`), "
    "or where a ratio or margin is given"
)  # see decision 34


def has_lost_too_many(compared: int, kept: int) -> bool:
    """Return whether so many losses are improbable (5 %) where `TARGET` of the answers are kept."""
    by_chance = (
        math.comb(compared, lost) * LOSS**lost * TARGET ** (compared - lost) for lost in range(compared - kept)
    )
    return compared >= FEW and 1 - sum(by_chance) < 0.05


def wilson(hits: float, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, 1927), valid for few samples and for shares near 1."""
    share, z2 = hits / total, _Z * _Z
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


class Planner:
    """The evidence and running measurements of one engine. Thread-safe."""

    def __init__(self, backend: Backend, store: KVStore, codec: str) -> None:
        self._backend, self._codec = backend, codec
        self._is_gpu = backend.device.type == "cuda"
        # vLLM's cache has a request's blocks only
        self._is_unmeasured = self._is_gpu and not (backend.leaves_tail or backend.keeps_states)
        self._costs, self.evidence = CostModel(backend.hidden_size, self._is_gpu), EvidenceStore(store)
        self._is_large = backend.num_parameters >= PARAMETERS
        self._kept_at, self._planned = time.monotonic(), Counter[str]()

    def plan(self, config: BlendConfig, namespace: str = "", request: Request | None = None) -> Plan:
        """Return what settings mean for a prompt.

        Args:
            request: The prompt with its chunks; None = they are not known yet.
        """
        config = self._suited(config)
        if config.ratio is not None:
            return Plan(config)
        if config.policy in _FIXED:
            return Plan(replace(config, ratio=_FIXED[config.policy]))
        if self._is_unknown(config, namespace):
            return _in_full(config, _UNCALIBRATED)
        is_auto, chosen = config.controller == "auto", None
        is_by_speed = config.policy in _BY_SPEED and not config.deterministic
        if self._is_unmeasured and is_by_speed and is_auto and request:
            for prefill in measured(self._backend):
                self._costs.observe_pass(*prefill)
            self._is_unmeasured = False
        speed = self._costs.speed() if is_by_speed else None
        is_alone = request.is_encoded_alone if request and is_auto else not is_auto
        start, margin = self._prior(config, is_alone) if config.margin != 0 else (START, 0.0)
        if self.learns(config):

            def work(ratio: float) -> Workload:
                return self._workload(_beginning(config, ratio), request) if request else _TYPICAL

            by = speed if request and speed else _ROWS
            chosen = self._choose(config, namespace, is_alone, by, work)
            start, margin, *_ = chosen
        plan = Plan(_beginning(config, start), margin, start=start, is_observed=bool(request and chosen))
        return self._with_chunks(plan, config, request, chosen, speed) if request and is_auto else plan

    def _with_chunks(
        self, plan: Plan, config: BlendConfig, request: Request, chosen: Setting | None, speed: Speed | None
    ) -> Plan:
        """Return the plan for a prompt with these chunks, or full prefill where it is predicted to be better."""
        ratio = plan.start
        if plan.margin and (not ratio or self._backend.keeps_states):  # a doubt is answered by full prefill
            most = self._workload(plan.config, request).most_to_begin_with
            if most < min(ratio, LEAST):
                stored = (request.kept + request.num_matched) / len(request.ids)
                cause = f"{stored:.0%} is stored, and a recompute on doubt would cost more than that saves"
                return _in_full(config, f"full prefill: {cause}")
            ratio = min(ratio, most)
            plan = replace(plan, config=_beginning(config, ratio))
        if config.policy not in _BY_SPEED or config.deterministic:
            return plan
        workload, doubts_s = self._workload(plan.config, request), 0.0
        # after a blended beginning, nothing would be exact without a completion
        is_exact_before = not request.prefix or request.prefix.exact >= request.kept
        if chosen and is_exact_before and self.evidence[request.namespace].answers.answers >= FEW:
            self._planned[request.namespace] += 1
            if self._planned[request.namespace] % _TRIED:
                doubts_s = chosen.doubts_seconds(speed or _ROWS, workload)
        is_full, reason = decide(speed, workload, ratio, doubts_s)
        return _in_full(config, reason) if is_full else replace(plan, reason=reason)

    def learns(self, config: BlendConfig) -> bool:
        """Return whether answers with these settings follow the evidence."""
        is_adaptive = config.ratio is None and config.margin != 0 and config.policy in _BY_SPEED
        return is_adaptive and config.controller == "auto" and not config.deterministic

    def _prior(self, config: BlendConfig, is_alone: bool) -> tuple[float, float]:
        """Return start and margin by the model's size alone."""
        start, margin = LARGE if self._is_large else SMALL[is_alone]
        return start, margin if config.margin is None else config.margin

    def _is_unknown(self, config: BlendConfig, namespace: str) -> bool:
        """Return whether it is a model with states, of which nothing is known, by default."""
        if not self._backend.keeps_states or config.margin is not None or config.controller == "off":
            return False
        evidence = self.evidence[namespace]
        judged = sum(float(evidence.of(rung(config.policy, START, False, alone))[1].sum()) for alone in (False, True))
        return config.deterministic or judged < ENOUGH

    def _suited(self, config: BlendConfig) -> BlendConfig:
        """Return the settings with a policy that the model can follow; raise SettingError if it is another one."""
        known = self._backend.policies
        if not known or config.policy in (*_FIXED, *known):
            return config
        if config.policy != DEFAULT_POLICY:
            reason = "recomputes scattered tokens, which layers that keep a state cannot"
            if not self._backend.keeps_states:
                reason = "needs the layers one by one, which llama.cpp does not give"
            raise SettingError(f"policy {config.policy} {reason}: leave policy out, or use {' or '.join(known)}")
        return replace(config, policy=known[0])

    def _choose(
        self, config: BlendConfig, namespace: str, is_alone: bool, speed: Speed, work: Callable[[float], Workload]
    ) -> Setting:
        """Return the cheapest of the prior's setting and those that are expected to keep enough answers.

        The prior's is no choice once the answers that were compared with full prefill's show that it loses too many.
        """
        evidence, given = self.evidence[namespace], config.margin
        answers = evidence.answers
        start, margin = self._prior(config, is_alone)
        by_margin = min(MARGINS, key=lambda one: abs(one - margin))
        found = settings(evidence, answers, config.policy, is_alone, given)
        prior = next(one for one in found if (one.start, one.margin) == (start, by_margin))
        loses = has_lost_too_many(round(answers.compared), round(answers.kept))

        def seconds(setting: Setting) -> float:
            workload = work(setting.start)
            return blend_seconds(speed, workload, setting.start) + setting.doubts_seconds(speed, workload)

        candidates = [one for one in found if one.lost <= LOSS and one.seen >= ENOUGH and given in (None, one.margin)]
        if answers.answers < FEW:
            chosen = prior
        elif loses and not candidates:
            chosen = min(found, key=lambda one: (one.lost, seconds(one)))
        else:
            chosen = min([*([] if loses else [prior]), *candidates], key=seconds)
        return chosen if given is None else chosen._replace(margin=given)

    def verdict(self, namespace: str) -> str:
        """Return in a sentence what is done on this model, and what it keeps; "" = too little is known."""
        evidence, policy = self.evidence[namespace], (*self._backend.policies, DEFAULT_POLICY)[0]
        answers = evidence.answers
        if answers.answers < FEW:
            return ""
        alone, behind = (
            sum(evidence.of(rung(policy, one, False, is_alone))[0].sum() for one in STARTS)
            for is_alone in (True, False)
        )
        chosen = self._choose(BlendConfig(policy=policy), namespace, bool(alone > behind), _ROWS, lambda _: _TYPICAL)
        cost_s = blend_seconds(_ROWS, _TYPICAL, chosen.start) + chosen.doubts_seconds(_ROWS, _TYPICAL)
        saved = full_seconds(_ROWS, _TYPICAL.prompt) / cost_s
        if saved * GAIN < 1:
            return "On this model, prompts are prefilled in full: it is so often unsure that reuse saves nothing."
        if answers.compared < FEW:
            return ""
        low, high = wilson(answers.kept, round(answers.compared))
        name = f"{chosen.start:.0%} recomputed" if chosen.start else "plain reuse"
        margin = f", and more below a margin of {chosen.margin:g}," if chosen.margin else ""
        return f"On this model, {name}{margin} keeps {low:.0%} to {high:.0%} of the answers: {saved:.1f}x less prefill."

    def _workload(self, config: BlendConfig, request: Request) -> Workload:
        reused = request.num_matched
        exact = len(request.runs[0]) if begins_exactly(self._backend, request, self._codec) else 0
        return Workload(
            prompt=len(request.ids),
            reused=reused,
            inexact=reused - exact,
            bytes=request.cold_tokens * self._costs.bytes_per_token(self._backend.bytes_per_token),
            passes=selecting(config, self._backend.num_layers),
            kept=request.kept,
        )

    def observe(self, request: Request, config: BlendConfig, rows: int, trace: Trace) -> None:
        """Observe the prefill of a prompt.

        Args:
            config: The plan's.
            rows: Number of computed positions.
        """
        pass_s = trace.own_seconds["blend"]  # without waiting for the store, and without layout
        is_on_cpu = self._backend.device.type == "cpu"  # a thread that uses a GPU waits for the GPU
        if trace.is_contended or (is_on_cpu and trace.cpu_seconds["blend"] < CPU_SHARE * pass_s):
            return
        length, reused = len(request.ids), int(request.reused.sum())
        if not reused:
            self._costs.observe_pass("full", length, length**2 / 2, pass_s)
            return
        passes = 1.0 if self._backend.rope_follows_length else math.ceil(rows / PREFILL_BLOCK)
        self._costs.observe_load(request.bytes_read, request.cold_tokens, trace.seconds["load"])
        if self._is_gpu:  # what one step launches takes its time in another
            query, detection = selecting(config, self._backend.num_layers)
            if not request.cold_tokens and not detection:
                computed, seconds = rows + query * (length - reused), sum(trace.own_seconds.values())
                seconds, passes = seconds - trace.own_seconds["match"], passes + query
                self._costs.observe_pass("blend", computed, computed * length, seconds, passes, reused - request.kept)
            return
        if rows:
            self._costs.observe_pass("blend", rows, rows * length, pass_s, passes)
        if not request.kept:  # copying a cached prefix involves no rotation
            self._costs.observe_stitch(reused, trace.seconds["stitch"])

    def keep_now_and_then(self) -> None:
        """Store the evidence if the last write was more than a minute ago."""
        if time.monotonic() - self._kept_at > _KEEP_S:
            self._kept_at = time.monotonic()
            self.evidence.keep()
