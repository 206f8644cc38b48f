"""Cost model: speed of this machine with this model, estimated from normal operation, and predictions from it.

A forward pass takes a + b·rows + c·pairs seconds: `a` is the fixed cost (reading the weights, launching kernels), `b`
the cost of each computed token, `c` the cost of each key that a token attends to.

A GPU waits for its launches: a pass takes as long as these at least, and those of a blended prefill, which stitches and
masks every layer, take longer. There, blended prefills are fitted by themselves, from the match to the first logits,
and a few prefills are measured before the first plan. On a CPU, blending loses by little where it loses, so that the
first prompts can measure the speed.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvrag.backend.protocol import PREFILL_BLOCK, Backend
from kvrag.errors import ChunkUnreadableError, OutOfMemoryError, first_line
from kvrag.process import log_once, reporting_memory
from kvrag.request import Request
from kvrag.reuse.blend import MOST, blend, stitch
from kvrag.reuse.load import LayerLoader, Trace
from kvrag.reuse.policies import NO_PASSES, Passes
from kvrag.types import Run

_KEPT = 16  # observations of each kind: enough to average out noise, few enough to follow changes in load
_MEMORY = 4  # earlier observations count at most this many times as much as the current one
_SUMS = ("load", "loaded", "stitch")  # (bytes, seconds), (bytes, tokens) and (tokens, seconds)
_DISK_S = 60.0  # that the speed of a disk is valid; then the next prompt measures it
_WARM_UP_ROWS = 1000  # shorter passes do not outweigh the start-up costs of a process's first pass
_FEW, _VOCABULARY = 64, 256  # rows of a short pass; tokens that every model has
_CAPTURED = 4  # blended passes on few rows: from the third on, they are replayed as a CUDA graph

_lock, _measured = threading.Lock(), WeakKeyDictionary[Backend, list[tuple[Any, ...]]]()


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one machine with one model.

    Attributes:
        pass_s: Fixed seconds of a forward pass.
        row_s: Seconds per computed token.
        pair_s: Seconds per pair of a token and a key that it attends to.
        stitch_s: Seconds to lay out and rotate one reused token.
        load: Bytes per second from below the RAM tier, decoding included; infinite until a load was observed.
        least_s: Seconds of a forward pass at least, whatever it computes.
        blended: Speed of blended prefills; None = this one.
    """

    pass_s: float
    row_s: float
    pair_s: float
    stitch_s: float
    load: float
    least_s: float = 0.0
    blended: Speed | None = None


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

    @property
    def fresh(self) -> int:
        """Tokens that are computed whatever the ratio."""
        return self.prompt - self.kept - self.reused

    @property
    def most_to_begin_with(self) -> float:
        """Ratio that leaves rows for a full prefill, should the model be unsure of the first token; see `MOST`."""
        rows = self.fresh * (1 + self.passes.query) + self.passes.detection * self.prompt
        return ((MOST - 1) * (self.prompt - self.kept) - rows) / max(self.inexact, 1)


def full_seconds(speed: Speed, prompt: int, kept: int = 0) -> float:
    """Predict full prefill of that many tokens, the first `kept` of which are cached."""
    pairs = (prompt * prompt - kept * kept) / 2  # causal: every token attends to those before it
    return pass_seconds(speed, prompt - kept, pairs)


def blend_seconds(speed: Speed, request: Workload, ratio: float) -> float:
    """Predict blending, from the match to the first logits.

    Layers are read while others are computed: some while the policy selects, the rest while the blend recomputes.
    """
    own = speed.blended or speed
    rows = request.fresh + ratio * request.inexact
    compute = pass_seconds(own, rows, rows * request.prompt) + (math.ceil(rows / PREFILL_BLOCK) - 1) * own.pass_s
    load, stitch = request.bytes / speed.load, request.reused * own.stitch_s
    passes = request.passes
    selecting = min(1.0, passes.query + passes.detection) if ratio else 0.0
    select = passes.query * pass_seconds(own, request.fresh, request.fresh * request.prompt)
    select += passes.detection * full_seconds(own, request.prompt, request.kept)
    while_selecting = max(selecting * load, (select if ratio else 0.0) + selecting * stitch)
    return while_selecting + selecting * compute + (1 - selecting) * max(load, compute + stitch)


def pass_seconds(speed: Speed, rows: float, pairs: float) -> float:
    """Predict one forward pass."""
    return max(speed.pass_s + speed.row_s * rows + speed.pair_s * pairs, speed.least_s)


class CostModel:
    """Running estimates of a Speed. Thread-safe."""

    def __init__(self, hidden_size: int, by_kind: bool = False) -> None:
        """Create an empty model, which fits all passes together, or `by_kind` those of full and blended prefills.

        `hidden_size` relates pairs to rows while all passes have the same length.
        """
        self._by_kind = by_kind
        self._pair_rows = 1 / (6 * hidden_size)  # a layer computes 24 E² per token and 4 E per pair
        self._lock = threading.Lock()
        self._passes: dict[str, deque[tuple[float, ...]]] = {}
        self._sums = dict.fromkeys(_SUMS, (0.0, 0.0))
        self._loaded_at = -math.inf
        self._warmed_up = False
        self._speed: Speed | None = None

    def observe_pass(
        self, kind: str, rows: float, pairs: float, seconds: float, passes: float = 1, reused: int = 0
    ) -> None:
        """Observe one or more forward passes. A short first pass of a process is ignored: it includes start-up costs.

        Args:
            kind: "full", "blend", or "least" for a pass of a few rows. The last few of each kind are kept, so that many
                short passes do not displace the long ones.
            reused: Tokens whose layout the seconds include.
        """
        with self._lock:
            if (self._warmed_up or rows >= _WARM_UP_ROWS) and seconds > 0:
                kept = self._passes.setdefault(kind, deque(maxlen=_KEPT))
                kept.append((passes, rows, pairs, reused, seconds))
                self._speed = None
            self._warmed_up = True

    def observe_load(self, num_bytes: int, tokens: float, seconds: float) -> None:
        """Observe a load of `num_bytes`, the KV of `tokens` tokens, from below the RAM tier."""
        if num_bytes and tokens and seconds > 0:
            with self._lock:
                self._add("load", num_bytes, seconds)
                self._add("loaded", num_bytes, tokens)
                self._loaded_at = time.monotonic()

    def observe_stitch(self, tokens: int, seconds: float) -> None:
        """Observe the layout of `tokens` reused tokens."""
        if tokens:
            with self._lock:
                self._add("stitch", tokens, seconds)

    def _add(self, name: str, amount: float, other: float) -> None:
        """Add to two running sums with decay; their quotient is the estimate."""
        total = self._sums[name]
        weight = min(1.0, _MEMORY * amount / total[0], _MEMORY * other / total[1]) if all(total) else 0.0
        self._sums[name] = total[0] * weight + amount, total[1] * weight + other
        self._speed = None

    def bytes_per_token(self, default: float) -> float:
        """Return the stored bytes per token."""
        with self._lock:
            return _quotient(self._sums["loaded"], default)

    def speed(self) -> Speed | None:
        """Return the estimates; None until a pass was observed."""
        with self._lock:
            passes = [observed for kept in self._passes.values() for observed in kept]
            load, (tokens, seconds) = _quotient(self._sums["load"], math.inf), self._sums["stitch"]
            if self._speed is None and passes:
                kinds = self._passes if self._by_kind else {}
                pass_s, row_s, pair_s, _ = fit(np.array(kinds.get("full", passes)), self._pair_rows)
                self._speed = Speed(pass_s, row_s, pair_s, _quotient((seconds, tokens), 0.0), load)
                if "blend" in kinds:
                    least_s = min((seconds for *_, seconds in kinds.get("least", ())), default=0.0)
                    blended = Speed(*fit(np.array(kinds["blend"]), self._pair_rows, row_s), load)
                    self._speed = replace(self._speed, least_s=least_s, blended=blended)
            is_old = time.monotonic() - self._loaded_at > _DISK_S
            return replace(self._speed, load=math.inf) if self._speed and is_old else self._speed


def fit(passes: NDArray[np.float64], pair_rows: float, usual_s: float = 0.0) -> tuple[float, float, float, float]:
    """Fit a, b, c >= 0 to the observed passes by relative error, and the seconds per reused token.

    Passes of a single length determine one number, not four. Weak priors then decide: a pass has a fixed cost of 100
    rows, or a row costs `usual_s`, if that is known; and a pair costs `pair_rows` of a row.

    Args:
        passes: (N, 5) number of passes, rows, pairs, reused tokens, seconds.
    """
    seconds = passes[:, -1]
    scaled = passes[:, :-1] * [1.0, 1.0, pair_rows, 1.0]  # pairs in units of rows
    row_s = float((seconds / scaled[:, 1].clip(min=1)).min())  # about the seconds of a row
    first = [0.0, 1.0, 0.0, 0.0] if usual_s else [0.01, -1.0, 0.0, 0.0]
    priors = np.array([first, [0.0, -1.0, 1.0, 0.0]]) * 0.02 / row_s
    table = np.vstack([scaled / seconds[:, None], priors])
    target = np.append(np.ones(len(seconds)), [0.02 * usual_s / row_s, 0.0])
    least_error, fitted = math.inf, np.zeros(4)
    for size in (4, 3, 2, 1):  # four unknowns: trying every set of zeros solves non-negative least squares
        for columns in map(list, itertools.combinations(range(4), size)):
            solution, *_ = np.linalg.lstsq(table[:, columns], target, rcond=None)
            error = float(np.square(table[:, columns] @ solution - target).sum())
            if (solution >= 0).all() and error < least_error:
                least_error, fitted = error, np.zeros(4)
                fitted[columns] = solution
    return float(fitted[0]), float(fitted[1]), float(fitted[2]) * pair_rows, float(fitted[3])


def _quotient(sums: tuple[float, float], default: float) -> float:
    return sums[0] / sums[1] if sums[1] else default


def measured(backend: Backend) -> list[tuple[Any, ...]]:
    """Return `measure(backend)`, which runs once per process; nothing without memory for it."""
    with _lock:
        if backend not in _measured:
            _measured[backend] = []
            try:
                with reporting_memory():
                    _measured[backend] = measure(backend)
            except (OutOfMemoryError, ChunkUnreadableError) as error:
                log_once(f"the speed of the GPU is unknown before its first prompts: {first_line(error)}")
        return _measured[backend]


def measure(backend: Backend) -> list[tuple[Any, ...]]:
    """Return prefills as `CostModel.observe_pass` takes them. Chunks are in RAM."""
    most, layers, found = min(PREFILL_BLOCK, backend.context_window - 1), list[Any](), list[tuple[Any, ...]]()
    reader: Any = SimpleNamespace(layer=layers.__getitem__, tier="ram", ids=(), context_tokens=1)
    for kind, rows, reused, times in (
        *(("full", most, 0, 2), ("least", _FEW, 0, 2)),
        *(("blend", _FEW, _FEW, _CAPTURED), ("blend", most // 2, most // 2, 2)),
    ):
        length, least_s = rows + reused, math.inf
        for _ in range(times):  # the first one warms up
            request, trace = Request([position % _VOCABULARY for position in range(length)]), Trace(backend)
            request.runs, request.readers = [Run(0, reused, "", 0)] * bool(reused), {"": reader}
            with closing(LayerLoader(backend, request, "native", trace, length)) as loader, trace.step("blend"):
                stitch(backend, request, loader)
                request.selected = request.inexact[:0]
                blend(backend, request)
            least_s = min(least_s, trace.seconds["blend"])
        found.append((kind, rows, rows * length if reused else length**2 / 2, least_s, 1, reused))
        if kind == "full":
            kv = map(request.cache.layer, range(backend.num_layers))
            layers += [tuple(part[0, :, : most // 2].cpu() for part in layer) for layer in kv]
    return found
