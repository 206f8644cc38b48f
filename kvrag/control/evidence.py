"""Evidence of how much recompute a model needs: counts of tokens, by how sure the model was of them.

The *margin* of a token is by how many nats the likeliest token is more likely than the next one; a small margin is
doubt. A margin says nothing by itself: how often a token in doubt is wrong depends on the model, on the corpus and on
what was recomputed before. So tokens are counted by margin, for each state of the KV (`rung`):

    seen    tokens that were decided by such KV
    judged  those of them that were decided by better KV as well: a doubt is answered by recomputing more, idle time
            compares whole answers with full prefill
    lost    those of them that the better KV surely decides otherwise

From the counts follows, for every start and margin, how many answers will be in doubt, and how many will be lost before
they are. Counts are sums, so that those of several processes are added up in the store. Nothing else of
prompts and answers is stored, and of a namespace's name only a digest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrag.config import DEFAULT_RATIO
from kvrag.control.cost import Speed, Workload, full_seconds, pass_seconds
from kvrag.errors import StoreError
from kvrag.reuse.blend import DEEPENED, FIRST, may_complete, share_on_doubt
from kvrag.store import KVStore
from kvrag.store.values import text_key

_PREFIX = "evidence "  # of its counters in a store
EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0)
"""Margins between the bins of counts; the last bin has no upper end."""

START = DEFAULT_RATIO
"""Start where the controller is off or the policy has no evidence."""
STARTS, MARGINS = (0.0, START, 2 * START), (0.0, *EDGES[:6])
"""Starts and margins to choose from."""

_BINS = len(EDGES) + 1
_ANSWERS = "answers"
_TOKENS, _FEW = 12.0, 4.0  # of an answer, as long as few were counted, and the answers that this counts as
_MOST = 5000.0  # tokens of a rung, beyond which all its counts are halved: models stay, corpora change
_SEEN = (0.01, 0.01, 0.02, 0.02, 0.03, 0.05, 0.1, 0.1, 0.66)
"""Expected shares of tokens by margin; they count as one seen token."""
_WRONG = {
    False: (0.3, 0.15, 0.2, 0.2, 0.05, 0.06, 0.02, 0.01, 0.003),
    True: (0.2, 0.1, 0.1, 0.05, 0.05, 0.04, 0.002, 0.001, 0.001),
}
"""Expected shares of wrong tokens by margin, after plain reuse and where some were recomputed: decision 37."""
_WEIGHT = np.array([4, 4, 4, 6, 6, 10, 20, 20, 60], dtype=float)
"""Judged tokens that the expected shares count as."""

Table = NDArray[np.float64]
"""(3, bins): seen, judged and lost tokens by margin."""


class Forecast(NamedTuple):
    """Shares of answers that come into doubt, and that are lost before they do."""

    doubts: float
    lost: float


class Answers(NamedTuple):
    """Numbers of answers of which something is known, of their tokens, of blended ones that were compared with full
    prefill's and of these the kept ones, and of those that a doubt may complete: deepened, and completed after that."""

    answers: float
    tokens: float
    compared: float
    kept: float
    deepened: float
    completed: float

    @property
    def length(self) -> float:
        """Tokens of an answer."""
        return (self.tokens + _TOKENS * _FEW) / (self.answers + _FEW)

    @property
    def again(self) -> float:
        """Share of the deepened answers that are in doubt once more."""
        return (self.completed + 1.0) / (self.deepened + 3.0)


def rung(policy: str, ratio: float, is_deepened: bool, is_alone: bool) -> str:
    """Return the name of a state of the KV: what was recomputed of chunks that were encoded alone, or with context."""
    return f"{policy} {ratio:g}{'+' if is_deepened else ''}{' alone' if is_alone else ''}"


def bin_of(margin: float) -> int:
    """Return the number of the bin of a margin."""
    return int(np.searchsorted(EDGES, margin, side="right"))


def scaled(token: int, margin: float) -> float:
    """Return the margin of a token of an answer as if it were not the first one, which has the number 0."""
    return margin / FIRST if token == 0 else margin


def tally(seen: Iterable[float], judged: Iterable[tuple[float, bool]] = ()) -> Table:
    """Return counts of tokens by scaled margins; of the judged ones also whether they are lost."""
    table = np.zeros((3, _BINS))
    for margin in seen:
        table[0, bin_of(margin)] += 1
    for margin, is_lost in judged:
        table[1:, bin_of(margin)] += 1, is_lost
    return table


def forecast(table: Table, margin: float, tokens: float, is_recomputed: bool) -> Forecast:
    """Predict answers of that many tokens, as if each token had the same chance of every margin.

    Args:
        margin: Below it, a token is in doubt; one of `EDGES`, or 0.
        is_recomputed: A share of the chunks was recomputed before.
    """
    seen, judged, lost = table
    share = (seen + np.array(_SEEN)) / (seen.sum() + 1)
    wrong = (lost + _WEIGHT * np.array(_WRONG[is_recomputed])) / (judged + _WEIGHT)
    below = bin_of(margin) if margin else 0
    doubt, loss = float(share[:below].sum()), float((share * wrong)[below:].sum())
    ends = doubt + loss
    ended = 1 - (1 - min(ends, 1.0)) ** tokens
    return Forecast(ended * doubt / ends, ended * loss / ends)


class Evidence:
    """Counts of one namespace. Thread-safe: single additions, under the lock of `EvidenceStore`."""

    def __init__(self, lock: threading.Lock, stored: Mapping[str, Table] = {}) -> None:
        self._lock = lock
        self._stored = stored
        self._new: dict[str, Table] = {}

    def add(self, name: str, table: Table) -> None:
        """Add counts to those of a rung."""
        with self._lock:
            self._new[name] = self._new.get(name, 0.0) + table

    def count(self, **numbers: int) -> None:
        """Add to the numbers of `answers`."""
        self.add(_ANSWERS, np.array([[numbers.get(name, 0) for name in Answers._fields]], dtype=float))

    def of(self, name: str) -> Table:
        """Return the counts of a rung."""
        return self._sum(name, np.zeros((3, _BINS)))

    @property
    def answers(self) -> Answers:
        """The numbers of answers."""
        return Answers(*self._sum(_ANSWERS, np.zeros((1, len(Answers._fields))))[0].tolist())

    def _sum(self, name: str, default: Table) -> Table:
        with self._lock:
            return default + self._stored.get(name, 0.0) + self._new.get(name, 0.0)

    def new(self) -> dict[str, Table]:
        """Return the counts that are not stored yet."""
        with self._lock:
            return dict(self._new)

    def settle(self, added: Mapping[str, Table], stored: Mapping[str, Table]) -> None:
        """Note that counts were added to those that are stored, and what these are now. Old ones fade."""
        with self._lock:
            self._stored = stored
            left = {name: table - added.get(name, 0.0) for name, table in self._new.items()}
            for name, table in stored.items():
                if table[0].sum() > _MOST:
                    left[name] = left.get(name, 0.0) - table // 2
            self._new = {name: table for name, table in left.items() if table.any()}


class Setting(NamedTuple):
    """A start and a margin, and what follows for an answer.

    Attributes:
        doubts: Expected share of answers in doubt; each deepens, or is completed where there is nothing to deepen.
        again: Share of these that are completed as well.
        lost: Expected share of answers that are lost.
        seen: Number of tokens that this is expected by.
        more: What the first doubt recomputes, relative to the start.
    """

    start: float
    margin: float
    doubts: float
    again: float
    lost: float
    seen: float
    more: float = 1.0

    def doubts_seconds(self, speed: Speed, request: Workload) -> float:
        """Predict the seconds that doubts cost an answer, on average."""
        rest = full_seconds(speed, request.prompt, request.kept + request.reused - request.inexact)
        if not self.start:
            return self.doubts * rest
        rows = request.fresh + self.more * self.start * request.inexact
        return self.doubts * (pass_seconds(speed, rows, rows * request.prompt) + self.again * rest)


def settings(
    evidence: Evidence, answers: Answers, policy: str, is_alone: bool, given: float | None = None
) -> list[Setting]:
    """Return what every start and margin would do, by the evidence and its numbers of answers.

    `given` is the margin that was asked for.
    """
    length, found = answers.length, []
    for start in STARTS:
        again, share = (answers.again, DEEPENED) if may_complete(start, given) else (0.0, 0.0)
        more = share_on_doubt(start, given)
        at_first, later = (evidence.of(rung(policy, start, is_deepened, is_alone)) for is_deepened in (False, True))
        for margin in MARGINS:
            doubts, lost = forecast(at_first, margin, length, start > 0)
            if start:  # the rest of the answer, with less margin
                lost += doubts * (1 - again) * forecast(later, margin * share, length / 2, True).lost
            found.append(Setting(start, margin, doubts, again, lost, float(at_first[0].sum()), more))
    return found


class EvidenceStore(dict[str, Evidence]):
    """Evidence by namespace, stored as counters of the store: a restart does not reset it."""

    def __init__(self, store: KVStore) -> None:
        super().__init__()
        self._store, self._lock = store, threading.Lock()

    def __missing__(self, namespace: str) -> Evidence:
        return self.setdefault(namespace, Evidence(self._lock, self._read(namespace)))  # another thread may be faster

    def keep(self) -> None:
        """Add what is new to what is stored, to which other processes may have added theirs."""
        new = {namespace: tables for namespace, evidence in list(self.items()) if (tables := evidence.new())}
        numbers = {
            f"{_key(namespace)}{name} {place}": int(number)
            for namespace, tables in new.items()
            for name, table in tables.items()
            for place, number in enumerate(table.flat)
            if number
        }
        with suppress(StoreError):  # no answer depends on it
            if numbers:
                self._store.count(numbers)
            for namespace, tables in new.items():
                self[namespace].settle(tables, self._read(namespace))

    def forget(self) -> None:
        """Delete all counts, also the stored ones."""
        self._store.count({_PREFIX + name: -number for name, number in self._store.counts(_PREFIX).items()})
        self.clear()

    def _read(self, namespace: str) -> dict[str, Table]:
        tables: dict[str, Table] = {}
        for place, number in self._store.counts(_key(namespace)).items():
            name, _, at = place.rpartition(" ")
            table = tables.setdefault(name, np.zeros((1, len(Answers._fields)) if name == _ANSWERS else (3, _BINS)))
            table.flat[int(at)] = max(number, 0)  # below 0 if processes let them fade at the same time
        return tables


def _key(namespace: str) -> str:
    """Return the beginning of the names of a namespace's counters."""
    return f"{_PREFIX}{text_key(namespace, ())} "
