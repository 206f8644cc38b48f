"""Discrete-event simulation of replicas that answer from stored chunks, by prefix caching, or by full prefill.

Popularity follows Zipf's law; what each cache holds follows from it by Che's approximation, so that a hundred million
chunks are not listed one by one. Arrivals, loads and the turns on each replica are simulated event by event.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cluster.plan import Plan, Profile
from benchmarks.cluster.popularity import Floats, Ints, Zipf, lru_age

if TYPE_CHECKING:
    from simpy import Environment, Event

BLEND, PREFIX, FULL = "kvrag", "prefix caching", "full prefill"
TIERS = ("device", "RAM", "disk", "store")

_GIB = 1 << 30
_MONTH_S = 730 * 3600
_RANGE = 4 << 20  # bytes of a read from a bucket
_BUSY = 0.9  # highest share of the time that prefills may take: beyond it, queues grow without end
_DRAWS = 30  # of a prompt's chunks until all of them are different
_64 = 2**64 - 1
_WARM_UP = 0.1  # share of the requests that are not counted: the cluster begins idle


@dataclass(frozen=True)
class Outcome:
    """Result of one simulation.

    Attributes:
        ttft_s: 50th, 95th and 99th percentile.
        token_s: Median time per token of an answer after its first one.
        busy: Share of the time that prefills take on the average replica.
        hits: Share of the requested chunks by the tier that they came from; "computed" were in none. Empty if nothing
            is stored.
        reused: Share of the prompts' tokens that was not computed in full.
        full: Share of the requests for which full prefill was chosen.
        gpu_cost, store_cost, read_cost: Per 1,000 requests.
    """

    system: str
    replicas: int
    gpus: int
    ttft_s: tuple[float, float, float]
    token_s: float
    busy: float
    hits: dict[str, float] = field(default_factory=dict)
    reused: float = 0.0
    full: float = 0.0
    gpu_cost: float = 0.0
    store_cost: float = 0.0
    read_cost: float = 0.0

    @property
    def cost(self) -> float:
        """Cost of 1,000 requests."""
        return self.gpu_cost + self.store_cost + self.read_cost


# -------------------------------------------------------------------- requested chunks, and their tiers


@dataclass(frozen=True)
class _Requests:
    """Seconds of arrival; ranks of the chunks, all different within a prompt; uniform numbers for what is drawn later.

    The same seed draws the same requests, whatever they are simulated on.
    """

    arrivals: Floats  # (N,)
    ranks: Ints  # (N, K)
    where: Floats  # (N,)
    age: Floats  # (N, K)


def _draw(plan: Plan, popularity: Zipf) -> _Requests:
    rng = np.random.default_rng(plan.seed)
    shape = plan.requests, plan.chunks_per_prompt
    arrivals = rng.exponential(1.0, plan.requests).cumsum() / plan.rate
    ranks = popularity.sample(rng, shape)
    for attempt in itertools.count():
        order = ranks.argsort(axis=1, kind="stable")
        ordered = np.take_along_axis(ranks, order, axis=1)
        twice = np.zeros(shape, dtype=bool)
        np.put_along_axis(twice, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
        if not twice.any():
            break
        # where a few chunks get nearly all requests, drawing others would take forever
        again = popularity.sample(rng, shape) if attempt < _DRAWS else ranks % plan.chunks + 1
        ranks = np.where(twice, again, ranks)
    return _Requests(arrivals, ranks, rng.random(plan.requests), 1 - rng.random(shape))


def _homes(ranks: Ints, replicas: int) -> Ints:
    """Return each chunk's home by rendezvous hashing: the replica with the largest hash of (chunk, replica)."""
    best, homes = np.zeros(ranks.shape, dtype=np.uint64), np.zeros(ranks.shape, dtype=np.int64)
    for replica in range(replicas):
        x = ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64((replica + 1) * 0xD1B54A32D192ED03 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
        homes = np.where(x >= best, replica, homes)
        best = np.maximum(best, x)
    return homes


def _route(asked: _Requests, plan: Plan, replicas: int, homes: Ints) -> Ints:
    """Return the replica of each request: any, or the home of most of its chunks; ties are drawn."""
    if plan.routing == "random":
        return (asked.where * replicas).astype(np.int64)
    votes = np.zeros((plan.requests, replicas))
    np.add.at(votes, (np.arange(plan.requests)[:, None], homes), 1)
    return (votes + np.random.default_rng((plan.seed, replicas)).random(votes.shape)).argmax(axis=1)


def _tiers(asked: _Requests, plan: Plan, replicas: int, popularity: Zipf, homes: Ints, where: Ints) -> Ints:
    """Return the tier of each requested chunk: an index into TIERS, or their number if it is in none.

    How long ago a chunk was asked for is exponentially distributed. A cache holds it if that is less than the age at
    which the cache drops chunks.
    """
    is_home = homes == where[:, None]
    if plan.routing == "random":
        home = part = np.float64(1 / replicas)
    else:
        home = is_home.mean()
        part = np.where(is_home, home, (1 - home) / max(replicas - 1, 1))
    with np.errstate(divide="ignore"):  # never requested here
        age = -np.log(asked.age) / (popularity.share(asked.ranks) * part)
    warmed = round(plan.stored * plan.chunks)
    tiers = np.full(age.shape, len(TIERS))
    tiers[asked.ranks <= warmed] = TIERS.index("store")
    for name, gib in (("disk", plan.disk_gib), ("RAM", plan.ram_gib), ("device", plan.device_gib)):  # the nearest wins
        limit = lru_age(popularity, warmed, gib * _GIB // plan.chunk_bytes, float(home), replicas)
        tiers[(asked.ranks <= warmed) & (age < limit)] = TIERS.index(name)
    return tiers


# -------------------------------------------------------------------- events


@dataclass
class _Job:
    """A request: its needs, and the times of its tokens."""

    number: int
    arrival: float
    replica: int
    gpu_s: float
    disk_bytes: float = 0.0
    store_bytes: float = 0.0
    first: float = 0.0
    last: float = 0.0


class _Link:
    """A connection that serves its loads in order."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def send(self, now: float, size: float) -> float:
        """Return when the last byte arrives."""
        if size:
            self._free_at = max(now, self._free_at) + size / self._bytes_per_s
            return self._free_at
        return now


class _Replica:
    """One copy of the model. Prefills take turns; between two of them every answer gets a token."""

    def __init__(self, env: Environment, profile: Profile, answer_tokens: int) -> None:
        self._env, self._profile, self._answer_tokens = env, profile, answer_tokens
        self.disk, self.network = _Link(profile.disk_bytes_per_s), _Link(profile.store_bytes_per_s)
        self._waiting: deque[_Job] = deque()
        self._answers: list[tuple[int, int, _Job]] = []  # heap by the step in which they end
        self._steps = 0
        self._arrived = env.event()
        env.process(self._run())

    def add(self, job: _Job) -> None:
        """Queue a request whose KV will be loaded when it is needed."""
        self._waiting.append(job)
        if not self._arrived.triggered:
            self._arrived.succeed()

    def _run(self) -> Generator[Event, Any, None]:
        while True:
            if self._waiting:
                job = self._waiting.popleft()
                yield self._env.timeout(job.gpu_s)
                job.first = job.last = self._env.now
                if self._answer_tokens > 1:
                    heapq.heappush(self._answers, (self._steps + self._answer_tokens - 1, job.number, job))
                    yield from self._decode(1)
            elif self._answers:
                yield from self._decode(self._answers[0][0] - self._steps)
            else:
                self._arrived = self._env.event()
                yield self._arrived

    def _decode(self, steps: int) -> Generator[Event, Any, None]:
        """Take so many steps, fewer if a request arrives meanwhile."""
        step_s = self._profile.decode_step_s + self._profile.decode_answer_s * len(self._answers)
        began, end = self._env.now, self._env.timeout(steps * step_s)
        if steps == 1:
            yield end
        else:
            self._arrived = self._env.event()
            yield end | self._arrived
            if not end.processed:
                steps = min(steps, math.floor((self._env.now - began) / step_s) + 1)
                yield self._env.timeout(max(began + steps * step_s - self._env.now, 0.0))
        self._steps += steps
        while self._answers and self._answers[0][0] <= self._steps:
            heapq.heappop(self._answers)[2].last = self._env.now


def _play(jobs: Sequence[_Job], replicas: int, profile: Profile, answer_tokens: int) -> None:
    """Run the events; sets `first` and `last` of the jobs."""
    from simpy import Environment

    env = Environment()
    machines = [_Replica(env, profile, answer_tokens) for _ in range(replicas)]
    everyone = _Link(profile.store_total_bytes_per_s)

    def arrive() -> Generator[Event, Any, None]:
        for job in jobs:
            yield env.timeout(job.arrival - env.now)
            machine, now = machines[job.replica], env.now
            loaded = machine.disk.send(now, job.disk_bytes)
            if job.store_bytes:
                sent = max(machine.network.send(now, job.store_bytes), everyone.send(now, job.store_bytes))
                loaded = max(loaded, sent + profile.store_latency_s)
            stall = loaded - now - profile.overlap * job.gpu_s
            if stall > 0:  # others have their turns meanwhile
                env.process(later(stall, machine, job))
            else:
                machine.add(job)

    def later(seconds: float, machine: _Replica, job: _Job) -> Generator[Event, Any, None]:
        yield env.timeout(seconds)
        machine.add(job)

    env.process(arrive())
    env.run()


# -------------------------------------------------------------------- one simulation


@dataclass(frozen=True)
class _Work:
    """What each request needs: seconds of the model, bytes to load; and its reuse."""

    gpu_s: Floats  # (N,)
    disk: Floats  # (N,)
    store: Floats  # (N,)
    reused: Floats  # (N,) tokens
    is_full: NDArray[np.bool_]  # (N,)
    chunks: dict[str, Ints] = field(default_factory=dict)  # (N,) by tier


def simulate(plan: Plan, profile: Profile, system: str, replicas: int) -> Outcome:
    """Simulate one way of answering on this many replicas."""
    popularity = Zipf(plan.chunks, plan.exponent)
    asked = _draw(plan, popularity)
    homes = _homes(asked.ranks, replicas) if plan.routing == "rendezvous" else asked.ranks
    where = _route(asked, plan, replicas, homes)
    if system == PREFIX and plan.routing == "rendezvous":  # a prefix has one home
        where = homes[:, 0]
    work = _work(system, plan, profile, popularity, asked, homes, where, replicas)
    columns = (asked.arrivals, where, work.gpu_s, work.disk, work.store)
    jobs = [_Job(number, *row) for number, row in enumerate(zip(*(column.tolist() for column in columns), strict=True))]
    _play(jobs, replicas, profile, plan.answer_tokens)
    counted = jobs[round(_WARM_UP * plan.requests) :]
    percentiles = np.percentile([job.first - job.arrival for job in counted], (50, 95, 99)).tolist()
    per_token = [(job.last - job.first) / max(plan.answer_tokens - 1, 1) for job in counted]
    gpus, thousand_s = replicas * plan.gpus_per_replica, 1000 / plan.rate
    reads = float(work.store.mean()) / plan.chunk_bytes * math.ceil(plan.chunk_bytes / _RANGE)
    return Outcome(
        system,
        replicas,
        gpus,
        ttft_s=(percentiles[0], percentiles[1], percentiles[2]),
        token_s=float(np.median(per_token)),
        busy=float(work.gpu_s.sum() / (asked.arrivals[-1] * replicas)),
        hits={name: float(number.mean() / plan.chunks_per_prompt) for name, number in work.chunks.items()},
        reused=float(work.reused.mean() / plan.prompt_tokens),
        full=float(work.is_full.mean()),
        gpu_cost=gpus * plan.gpu_hour / 3600 * thousand_s,
        store_cost=plan.stored_bytes_total / 1e9 * plan.store_gb_month / _MONTH_S * thousand_s if work.chunks else 0.0,
        read_cost=reads * plan.reads_thousand,
    )


def _work(
    system: str,
    plan: Plan,
    profile: Profile,
    popularity: Zipf,
    asked: _Requests,
    homes: Ints,
    where: Ints,
    replicas: int,
) -> _Work:
    prompt_s = plan.prompt_tokens / profile.prefill_tokens_per_s
    nothing = np.zeros(plan.requests)
    if system == FULL:
        return _Work(np.full(plan.requests, prompt_s), nothing, nothing, nothing, nothing == 0)
    # prefix caching: the system prompt, and the first chunk if a prompt that began with it was recently here
    kept = plan.prefix_gib * _GIB / (plan.kv_bytes * plan.prompt_tokens)  # prompts
    spread = replicas if plan.routing == "rendezvous" else 1
    age = -np.log(asked.age[:, 0]) / (popularity.share(asked.ranks[:, 0]) * spread)
    prefix = plan.system_tokens + np.where(age < kept, plan.chunk_tokens, 0.0)
    prefix_s = prompt_s * (1 - prefix / plan.prompt_tokens)
    if system == PREFIX:
        return _Work(prefix_s, nothing, nothing, prefix, nothing == 0)
    from kvrag.control.tuning import NOTICEABLE_S

    tiers = _tiers(asked, plan, replicas, popularity, homes, where)
    chunks = {name: (tiers == number).sum(axis=1) for number, name in enumerate((*TIERS, "computed"))}
    disk, store = chunks["disk"] * plan.chunk_bytes, chunks["store"] * plan.chunk_bytes
    fresh_s = chunks["computed"] * plan.chunk_tokens / profile.prefill_tokens_per_s
    blend_s = profile.blend_share * prompt_s + (1 - profile.blend_share) * fresh_s
    blend_s = blend_s + (chunks["RAM"] * plan.chunk_bytes + disk + store) / profile.ram_bytes_per_s
    load_s = np.maximum(disk / profile.disk_bytes_per_s, store / profile.store_bytes_per_s)
    load_s = load_s + np.where(store > 0, profile.store_latency_s, 0.0)
    alone_s = blend_s + np.maximum(load_s - profile.overlap * blend_s, 0.0)
    # the controller's choice, by the time to first token on an idle machine
    is_full = (prefix_s + NOTICEABLE_S <= alone_s) & (plan.controller == "auto")
    reused = plan.system_tokens + (plan.chunks_per_prompt - chunks["computed"]) * float(plan.chunk_tokens)
    return _Work(
        np.where(is_full, prefix_s, blend_s),
        np.where(is_full, 0.0, disk),
        np.where(is_full, 0.0, store),
        np.where(is_full, prefix, reused),
        is_full,
        chunks,
    )


# -------------------------------------------------------------------- how many GPUs


def fit(plan: Plan, profile: Profile, system: str) -> Outcome | None:
    """Return the outcome with the fewest replicas that reach the target; None if more replicas do not help."""
    known: dict[int, Outcome] = {}

    def at(replicas: int) -> Outcome:
        if replicas not in known:
            known[replicas] = simulate(plan, profile, system, replicas)
        return known[replicas]

    def fits(replicas: int) -> bool:
        return at(replicas).ttft_s[1] <= plan.target_s and at(replicas).busy <= _BUSY

    guess = max(1, math.ceil(plan.rate * plan.prompt_tokens / profile.prefill_tokens_per_s / 2))
    first = max(1, math.ceil(guess * at(guess).busy / _BUSY))  # fewer would be too busy
    most = 8 * first + 8
    low, high = 0, first
    while not fits(high):
        if high > most:
            return None
        low, high = high, high + max(1, high // 6)
    while not low and high > 1 and at(high - 1).busy <= _BUSY and fits(high - 1):
        high -= 1
    while low and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return at(high)


def outcome(plan: Plan, profile: Profile, system: str, replicas: int | None) -> Outcome | None:
    """Return the outcome on this many replicas, or on as many as the target needs."""
    return fit(plan, profile, system) if replicas is None else simulate(plan, profile, system, replicas)
