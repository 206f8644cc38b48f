"""Controller: choose between full prefill and blending, and raise the ratio where loading hides it.

Blending computes few rows, but it has to load KV, lay it out and run the policy's own passes. Loading overlaps with
computing. `decide` compares both by the cost model of `kvrag.control.cost`. It is a pure function, so that
`python -m benchmarks simulate` can evaluate it for other machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrag.backend.protocol import PREFILL_BLOCK
from kvrag.control.cost import Speed
from kvrag.reuse.select import CANDIDATES, NO_PASSES, Passes

NOTICEABLE_S = 0.01
"""Minimum advantage of full prefill in seconds: smaller differences should not make answers depend on timing."""
STEP = 0.05
"""A ratio hidden by loading is rounded down to a multiple of this, so that it does not vary with every answer."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of a matched prompt.

    Attributes:
        prompt, reused, inexact: Tokens of the prompt; those with stored KV; those of them that may deviate.
        kept: Tokens of the conversation's cached prefix.
        bytes: Bytes to load from below the RAM tier.
        passes: Shares of the layers that the policy runs to select.
    """

    prompt: int
    reused: int
    inexact: int
    bytes: float
    passes: Passes = NO_PASSES
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice and its reason. `blend_s` and `full_s` are predictions; None without measurements."""

    full: bool
    ratio: float
    reason: str
    blend_s: float | None = None
    full_s: float | None = None


def decide(speed: Speed | None, request: Workload, ratio: float) -> Decision:
    """Choose between full prefill and blending, and the ratio.

    Args:
        speed: None = no measurements yet: blend, which gives some.
        ratio: Lowest allowed ratio.
    """
    if speed is None:
        return Decision(False, ratio, f"blend at {ratio:g}: no measurements on this machine yet")
    full_s, load_s = full_seconds(speed, request.prompt, request.kept), request.bytes / speed.load
    blend_s = blend_seconds(speed, request, ratio)
    if full_s + NOTICEABLE_S <= blend_s:
        slow_load = f"loading alone takes {seconds(load_s)} at {speed.load / 1e9:.3g} GB/s"
        cause = slow_load if load_s > full_s else "the context is short"
        reason = f"full prefill: predicted {seconds(full_s)}, blending {seconds(blend_s)}; {cause}"
        return Decision(True, 1.0, reason, blend_s, full_s)
    hidden = _hidden(speed, request, ratio, blend_s)
    reason = f"blend at {hidden:g}: predicted {seconds(blend_s)}, full prefill {seconds(full_s)}"
    if hidden > ratio:
        reason += f"; {hidden:g} instead of {ratio:g} because loading takes as long"
    return Decision(False, hidden, reason, blend_s, full_s)


def full_seconds(speed: Speed, prompt: int, kept: int = 0) -> float:
    """Predict full prefill of that many tokens, the first `kept` of which are cached."""
    pairs = (prompt * prompt - kept * kept) / 2  # causal: every token attends to those before it
    return _pass(speed, prompt - kept, pairs)


def blend_seconds(speed: Speed, request: Workload, ratio: float) -> float:
    """Predict blending, from the match to the first logits.

    Layers are read while others are computed: some while the policy selects, the rest while the blend recomputes.
    """
    fresh = request.prompt - request.kept - request.reused
    rows = fresh + ratio * request.inexact
    compute = _pass(speed, rows, rows * request.prompt) + (math.ceil(rows / PREFILL_BLOCK) - 1) * speed.pass_s
    load, stitch = request.bytes / speed.load, request.reused * speed.stitch_s
    passes = request.passes
    selecting = min(1.0, max(passes.query, passes.candidates) + passes.detection) if ratio else 0.0
    select = passes.query * _pass(speed, fresh, fresh * request.prompt)
    select += passes.detection * full_seconds(speed, request.prompt, request.kept)
    candidates = fresh + min(CANDIDATES * ratio, 1.0) * request.inexact
    select += passes.candidates * _pass(speed, candidates, candidates * request.prompt)
    while_selecting = max(selecting * load, (select if ratio else 0.0) + selecting * stitch)
    return while_selecting + selecting * compute + (1 - selecting) * max(load, compute + stitch)


def seconds(value: float) -> str:
    """Format a duration."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _pass(speed: Speed, rows: float, pairs: float) -> float:
    return speed.pass_s + speed.row_s * rows + speed.pair_s * pairs


def _hidden(speed: Speed, request: Workload, ratio: float, blend_s: float) -> float:
    """Return the largest ratio that takes no longer than `ratio` because loading takes as long."""
    steps = (round(number * STEP, 10) for number in range(1, math.ceil(1 / STEP)))
    hidden = [step for step in steps if step > ratio and blend_seconds(speed, request, step) <= blend_s * 1.001]
    return max([ratio, *hidden])
