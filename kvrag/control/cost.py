"""Cost model: speed of this machine with this model, estimated from the passes and loads of normal operation.

A forward pass takes a + b·rows + c·pairs seconds: `a` is the fixed cost (reading the weights, launching kernels), `b`
the cost of each computed token, `c` the cost of each key that a token attends to.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = "speed.json"
_KEPT = 16  # observations of each kind: enough to average out noise, few enough to follow changes in load
_MACHINES = 16  # machines per store
_STALE_S = 30 * 86400  # older measurements may be of another driver, disk or load
_MEMORY = 4  # earlier observations count at most this many times as much as the current one
_WARM_UP_ROWS = 1000  # shorter passes do not outweigh the start-up costs of a process's first pass


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one machine with one model.

    Attributes:
        pass_s: Fixed seconds of a forward pass.
        row_s: Seconds per computed token.
        pair_s: Seconds per pair of a token and a key that it attends to.
        stitch_s: Seconds to lay out and rotate one reused token.
        load: Bytes per second from below the RAM tier, decoding included.
    """

    pass_s: float
    row_s: float
    pair_s: float
    stitch_s: float
    load: float


class CostModel:
    """Running estimates of a Speed. Thread-safe."""

    def __init__(self, hidden_size: int) -> None:
        """Create an empty model. `hidden_size` relates pairs to rows while all passes have the same length."""
        self._pair_rows = 1 / (6 * hidden_size)  # a layer computes 24 E² per token and 4 E per pair
        self._lock = threading.Lock()
        self._passes: dict[str, deque[tuple[float, float, float, float]]] = {}
        self._load = self._stitch = (0.0, 0.0)  # amount, seconds
        self._loaded = (0.0, 0.0)  # bytes, tokens
        self._loaded_at = -math.inf
        self._warmed_up = False
        self._speed: Speed | None = None
        self.changed = False

    def observe_pass(self, kind: str, rows: int, pairs: float, seconds: float, passes: int = 1) -> None:
        """Observe one or more forward passes. A short first pass of a process is ignored: it includes start-up costs.

        Args:
            kind: The last few of each kind are kept, so that many short passes do not displace the long ones.
        """
        with self._lock:
            if (self._warmed_up or rows >= _WARM_UP_ROWS) and seconds > 0:
                kept = self._passes.setdefault(kind, deque(maxlen=_KEPT))
                kept.append((passes, rows, pairs, seconds))
                self._speed, self.changed = None, True
            self._warmed_up = True

    def observe_load(self, num_bytes: int, tokens: float, seconds: float) -> None:
        """Observe a load of `num_bytes`, the KV of `tokens` tokens, from below the RAM tier."""
        if num_bytes and tokens and seconds > 0:
            with self._lock:
                self._load = _fade(self._load, num_bytes, seconds)
                self._loaded = _fade(self._loaded, num_bytes, tokens)
                self._loaded_at = time.monotonic()
                self._speed, self.changed = None, True

    def observe_stitch(self, tokens: int, seconds: float) -> None:
        """Observe the layout of `tokens` reused tokens."""
        if tokens:
            with self._lock:
                self._stitch = _fade(self._stitch, tokens, seconds)
                self._speed, self.changed = None, True

    def bytes_per_token(self, default: float) -> float:
        """Return the stored bytes per token."""
        with self._lock:
            return self._loaded[0] / self._loaded[1] if self._loaded[1] else default

    @property
    def load_age(self) -> float:
        """Seconds since the last load in this process."""
        return time.monotonic() - self._loaded_at

    def speed(self) -> Speed | None:
        """Return the estimates; None until both a pass and a load were observed."""
        with self._lock:
            passes = [seen for kept in self._passes.values() for seen in kept]
            if self._speed is None and passes and self._load[1]:
                a, b, c = fit(np.array(passes), self._pair_rows)
                stitch_s = self._stitch[1] / self._stitch[0] if self._stitch[0] else 0.0
                self._speed = Speed(a, b, c, stitch_s, self._load[0] / self._load[1])
            return self._speed

    def knows_passes(self) -> bool:
        """Return whether forward passes were observed."""
        return bool(self._passes)

    def to_dict(self) -> dict[str, Any]:
        """Return the state for the store."""
        with self._lock:
            self.changed = False
            passes = {kind: list(kept) for kind, kept in self._passes.items()}
            sums = {"load": self._load, "loaded": self._loaded, "stitch": self._stitch}
            return {"passes": passes, **sums, "made": time.time()}

    def take(self, kept: dict[str, Any]) -> None:
        """Restore the state of `to_dict`; raises ValueError and changes nothing if it is invalid."""
        try:
            if time.time() - _positive(kept["made"]) > _STALE_S:
                return
            passes = {
                str(kind): deque([_four(seen) for seen in rows], maxlen=_KEPT) for kind, rows in kept["passes"].items()
            }
            sums = {name: (_positive(kept[name][0]), _positive(kept[name][1])) for name in ("load", "loaded", "stitch")}
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        with self._lock:
            self._passes = passes
            self._load, self._loaded, self._stitch = sums["load"], sums["loaded"], sums["stitch"]
            self._speed = None


def fit(passes: NDArray[np.float64], pair_rows: float) -> tuple[float, float, float]:
    """Fit a, b, c >= 0 to the observed passes by relative error.

    Passes of a single length determine one number, not three. Weak priors then decide: a pass has a fixed cost of 100
    rows, and a pair costs `pair_rows` of a row.

    Args:
        passes: (N, 4) number of passes, rows, pairs, seconds.
    """
    seconds = passes[:, 3]
    seen = passes[:, :3] * [1.0, 1.0, pair_rows]  # pairs in units of rows
    scale = float((seconds / seen[:, 1].clip(min=1)).min())  # about the seconds of a row
    beliefs = np.array([[0.01, -1.0, 0.0], [0.0, -1.0, 1.0]]) * 0.02 / scale
    table = np.vstack([seen / seconds[:, None], beliefs])
    wanted = np.append(np.ones(len(seconds)), [0.0, 0.0])
    best, found = math.inf, np.zeros(3)
    for size in (3, 2, 1):  # three unknowns: trying every set of zeros solves non-negative least squares
        for columns in map(list, itertools.combinations(range(3), size)):
            solution, *_ = np.linalg.lstsq(table[:, columns], wanted, rcond=None)
            error = float(np.square(table[:, columns] @ solution - wanted).sum())
            if (solution >= 0).all() and error < best:
                best, found = error, np.zeros(3)
                found[columns] = solution
    return float(found[0]), float(found[1]), float(found[2]) * pair_rows


def read(text: str | None, machine: str) -> dict[str, Any] | None:
    """Return one machine's entry in a text of `write`; raises ValueError if the text is damaged."""
    machines = json.loads(text) if text else {}
    if not isinstance(machines, dict):
        raise ValueError("it is not a table of machines")
    return machines.get(machine)


def write(text: str | None, machine: str, entry: dict[str, Any]) -> str:
    """Return the text with this machine's entry replaced; entries of other machines are kept."""
    try:
        machines = json.loads(text) if text else {}
    except ValueError:
        machines = {}  # damaged: measured again within a few answers
    others = [item for item in machines.items() if item[0] != machine] if isinstance(machines, dict) else []
    return json.dumps(dict([*others[-(_MACHINES - 1) :], (machine, entry)]))


def _fade(total: tuple[float, float], amount: float, other: float) -> tuple[float, float]:
    """Add to two running sums with decay; their quotient is the estimate."""
    kept = min(1.0, _MEMORY * amount / total[0], _MEMORY * other / total[1]) if all(total) else 0.0
    return total[0] * kept + amount, total[1] * kept + other


def _four(seen: Any) -> tuple[float, float, float, float]:
    passes, rows, pairs, seconds = map(_positive, seen)
    if not (passes and rows and seconds):
        raise ValueError(f"{seen!r} is not a pass")
    return passes, rows, pairs, seconds


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value!r} is not a measurement")
    return number
