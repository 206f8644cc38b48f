"""Plan a cluster: a discrete-event simulation of servers with stored chunks, beside prefix caching and full prefill.

Popularity follows Zipf's law; what each cache holds follows from it by Che's approximation, so that a hundred million
chunks are not listed one by one. Arrivals, loads and the turns on each GPU are simulated event by event. Speeds come
from a profile: derived from the cost model of `kvrag bench simulate`, or measured with --calibrate by the functions of
`kvrag bench ttft` and `kvrag bench decode`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvrag.bench.popularity import Floats, Ints, Zipf, lru_age
from kvrag.bench.simulate import DEVICES, MODELS, Shape, speed_of
from kvrag.config import BlendConfig
from kvrag.errors import KvragError, SettingError

if TYPE_CHECKING:  # the options of the command need the tables only
    from simpy import Environment, Event

SHAPES = MODELS | {"reader": Shape(4.1e6, 8, 256, 4, 4, 64)}
BLEND, PREFIX, FULL = "kvrag", "prefix caching", "full prefill"
TIERS = ("device", "RAM", "disk", "store")
ROUTINGS = ("random", "rendezvous")

_GIB = 1 << 30
_MONTH_S = 730 * 3600
_RANGE = 4 << 20  # bytes of a read from a bucket
_BUSY = 0.9  # highest share of the time that prefills may take: beyond it, queues grow without end
_PARALLEL = 0.8  # assumed share of the speed of several GPUs that tensor parallelism reaches
_DRAWS = 30  # of a prompt's chunks until all of them are different
_64 = 2**64 - 1
_WARM_UP = 0.1  # share of the requests that are not counted: the cluster begins idle


@dataclass(frozen=True)
class Profile:
    """Speeds of one replica, that is of one copy of the model.

    Attributes:
        prefill_tokens_per_s: Full prefill of a prompt of the plan's length.
        blend_share: Time of the model for a blended prompt, as a share of full prefill; without laying out the KV.
        overlap: Share of the time for blending during which KV can still be loaded.
        ram_bytes_per_s: From RAM to the model, layout and rotation included; the model waits.
        disk_bytes_per_s, store_bytes_per_s: From one machine's local disk, and over its network.
        store_total_bytes_per_s: From the shared store to all machines.
        store_latency_s: Until the first byte from the shared store.
        decode_step_s, decode_answer_s: A decoding step, and what each answer in it adds.
        measured: Names of the fields that were measured; all others are assumptions.
        source: Where the numbers are from.
    """

    prefill_tokens_per_s: float
    blend_share: float
    overlap: float
    ram_bytes_per_s: float
    disk_bytes_per_s: float
    store_bytes_per_s: float
    store_total_bytes_per_s: float
    store_latency_s: float
    decode_step_s: float
    decode_answer_s: float
    measured: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for name in SPEEDS:
            value = getattr(self, name)
            least = 0.0 if name in ("overlap", "store_latency_s", "decode_step_s", "decode_answer_s") else 1e-12
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise SettingError(f"{name} must be a positive number, got {value!r}")

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a file that `write` has written.

        Raises:
            SettingError: The file is not a profile.
        """
        try:
            found = json.loads(path.read_text("utf-8"))
            return cls(**found | {"measured": tuple(found.get("measured", ()))})
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingError(f"{path} is not a profile: {error}; write one with --calibrate {path}") from None

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


SPEEDS = tuple(name for name in Profile.__dataclass_fields__ if name not in ("measured", "source"))


@dataclass(frozen=True)
class Plan:
    """Corpus, traffic, sizes and prices.

    Attributes:
        chunks, chunk_tokens: The corpus.
        exponent: Of Zipf's law.
        chunks_per_prompt, system_tokens, question_tokens, answer_tokens: A request. The system prompt is the same for
            all requests, and in every cache.
        rate: Requests per second (Poisson).
        kv_bytes, stored_bytes: KV of a token in the model's memory, and as stored under the codec.
        device_gib, ram_gib, disk_gib: Room for chunks, per replica.
        stored: Share of the corpus that was warmed into the shared store, the most popular chunks.
        prefix_gib: Memory for the pages of prefix caching, per replica.
        controller: "auto": full prefill where the controller would choose it; "off": always blend.
        routing: "random", or "rendezvous": to the replica that is home to most of the prompt's chunks.
        gpus_per_replica: GPUs that hold one copy of the model.
        target_s: Time to first token that 95 % of the requests have to reach.
        gpu_hour, store_gb_month, reads_thousand: Prices: a GPU with its host per hour, 10^9 stored bytes per month, a
            thousand reads of 4 MiB.
        requests, seed: Size of the simulation.
    """

    chunks: int = 100_000_000
    chunk_tokens: int = 512
    exponent: float = 0.85
    chunks_per_prompt: int = 10
    system_tokens: int = 256
    question_tokens: int = 64
    answer_tokens: int = 128
    rate: float = 50.0
    kv_bytes: float = 131072.0
    stored_bytes: float = 131072.0
    device_gib: float = 0.0
    ram_gib: float = 256.0
    disk_gib: float = 4000.0
    stored: float = 0.01
    prefix_gib: float = 40.0
    controller: str = "auto"
    routing: str = "random"
    gpus_per_replica: int = 1
    target_s: float = 1.0
    gpu_hour: float = 3.0
    store_gb_month: float = 0.023
    reads_thousand: float = 0.0004
    requests: int = 4000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chunks < 2 * self.chunks_per_prompt:
            raise SettingError(f"a corpus of {self.chunks} chunks is too small for {self.chunks_per_prompt} per prompt")
        if not 0 <= self.stored <= 1:
            raise SettingError(f"the stored share of the corpus must be from 0 to 1, got {self.stored:g}")

    @property
    def prompt_tokens(self) -> int:
        """Length of a prompt."""
        return self.system_tokens + self.chunks_per_prompt * self.chunk_tokens + self.question_tokens

    @property
    def chunk_bytes(self) -> float:
        """Stored bytes of a chunk."""
        return self.chunk_tokens * self.stored_bytes

    @property
    def stored_bytes_total(self) -> float:
        """Bytes in the shared store."""
        return self.stored * self.chunks * self.chunk_bytes


@dataclass(frozen=True)
class Outcome:
    """Result of one simulation.

    Attributes:
        ttft_s: 50th, 95th and 99th percentile.
        token_s: Median time per token of an answer behind its first one.
        busy: Share of the time that prefills take on the average replica.
        hits: Share of the chunks asked for by the tier that they came from; "computed" were in none. Empty if nothing
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


def profile_of(
    device: str, model: str, plan: Plan, ratio: float, policy: str, loads: dict[str, Any] | None = None
) -> Profile:
    """Derive a replica's speeds from the tables and the cost model of `kvrag bench simulate`.

    Args:
        loads: Fields of the profile that do not follow from the device: bandwidths and latency of disk and store.
    """
    from kvrag.control.controller import Workload, blend_seconds, full_seconds, selecting

    shape, one = SHAPES[model], DEVICES[device]
    scale = 1.0 if plan.gpus_per_replica == 1 else _PARALLEL * plan.gpus_per_replica
    replica = replace(one, flops=one.flops * scale, memory=one.memory * scale, into=one.into * scale)
    if 2 * shape.params > one.room * plan.gpus_per_replica:
        raise SettingError(
            f"{model} does not fit into {plan.gpus_per_replica} x {device} in bf16: use more --gpus-per-replica"
        )
    speed = replace(speed_of(replica, shape, 1.0), stitch_s=0.0)  # the layout is counted by ram_bytes_per_s
    selects = selecting(BlendConfig(policy=policy), shape.layers)
    reused = plan.chunks_per_prompt * plan.chunk_tokens
    request = Workload(plan.prompt_tokens, reused, reused, 0.0, *selects, kept=plan.system_tokens)
    full_s, blend_s = full_seconds(speed, plan.prompt_tokens), blend_seconds(speed, request, ratio)
    # while everything waits for a long load, this much of the time for blending is left to come
    waiting = blend_seconds(speed, replace(request, bytes=1e6), ratio) - 1e6
    return Profile(
        prefill_tokens_per_s=plan.prompt_tokens / full_s,
        blend_share=blend_s / full_s,
        overlap=1 - waiting / blend_s,
        ram_bytes_per_s=replica.into,
        decode_step_s=speed.pass_s,
        decode_answer_s=plan.prompt_tokens * plan.kv_bytes / replica.memory,
        **LOAD_SPEEDS | (loads or {}),
        source=f"{model} on {plan.gpus_per_replica} x {device}; {one.source}",
    )


LOAD_SPEEDS: dict[str, Any] = {
    "disk_bytes_per_s": 6e9,
    "store_bytes_per_s": 2.5e9,
    "store_total_bytes_per_s": 100e9,
    "store_latency_s": 0.03,
}
"""Assumed: NVMe; 80 % of 25 Gbit/s; a bucket for many readers; the middle of 10 to 50 ms."""


# -------------------------------------------------------------------- what is asked for, and where it is


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
        # where a few chunks get nearly all requests, drawing others would take for ever
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
    """Return the tier of each chunk that is asked for: an index into TIERS, or their number if it is in none.

    How long ago a chunk was asked for is exponentially distributed. A cache holds it if that is less than the age at
    which the cache drops chunks.
    """
    is_home = homes == where[:, None]
    if plan.routing == "random":
        home = part = np.float64(1 / replicas)
    else:
        home = is_home.mean()
        part = np.where(is_home, home, (1 - home) / max(replicas - 1, 1))
    with np.errstate(divide="ignore"):  # never asked for here
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
    """A request: what it needs, and when its tokens came."""

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
        """Queue a request whose KV will be there when it is needed."""
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
    """What each request needs: seconds of the model, bytes to load; and what was found for it."""

    gpu_s: Floats  # (N,)
    disk: Floats  # (N,)
    store: Floats  # (N,)
    reused: Floats  # (N,) tokens
    is_full: NDArray[np.bool_]  # (N,)
    chunks: dict[str, Ints] = field(default_factory=dict)  # (N,) by tier


def simulate(plan: Plan, profile: Profile, system: str, replicas: int) -> Outcome:
    """Simulate one way of answering on so many replicas."""
    popularity = Zipf(plan.chunks, plan.exponent)
    asked = _draw(plan, popularity)
    homes = _homes(asked.ranks, replicas) if plan.routing == "rendezvous" else asked.ranks
    where = _route(asked, plan, replicas, homes)
    if system == PREFIX and plan.routing == "rendezvous":  # a prefix has one home
        where = homes[:, 0]
    work = _work(system, plan, profile, popularity, asked, homes, where, replicas)
    columns = (asked.arrivals, where, work.gpu_s, work.disk, work.store)
    jobs = [_Job(number, *row) for number, row in enumerate(zip(*(each.tolist() for each in columns), strict=True))]
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
        (percentiles[0], percentiles[1], percentiles[2]),
        float(np.median(per_token)),
        float(work.gpu_s.sum() / (asked.arrivals[-1] * replicas)),
        {name: float(number.mean() / plan.chunks_per_prompt) for name, number in work.chunks.items()},
        float(work.reused.mean() / plan.prompt_tokens),
        float(work.is_full.mean()),
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
    # prefix caching: the system prompt, and the first chunk if a prompt that began with it was lately here
    kept = plan.prefix_gib * _GIB / (plan.kv_bytes * plan.prompt_tokens)  # prompts
    spread = replicas if plan.routing == "rendezvous" else 1
    age = -np.log(asked.age[:, 0]) / (popularity.share(asked.ranks[:, 0]) * spread)
    prefix = plan.system_tokens + np.where(age < kept, plan.chunk_tokens, 0.0)
    prefix_s = prompt_s * (1 - prefix / plan.prompt_tokens)
    if system == PREFIX:
        return _Work(prefix_s, nothing, nothing, prefix, nothing == 0)
    from kvrag.control.controller import NOTICEABLE_S

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
    found = plan.system_tokens + (plan.chunks_per_prompt - chunks["computed"]) * float(plan.chunk_tokens)
    return _Work(
        np.where(is_full, prefix_s, blend_s),
        np.where(is_full, 0.0, disk),
        np.where(is_full, 0.0, store),
        np.where(is_full, prefix, found),
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
    """Return the outcome on so many replicas, or on as many as the target needs."""
    return fit(plan, profile, system) if replicas is None else simulate(plan, profile, system, replicas)


@dataclass(frozen=True)
class Case:
    """A change of the plan or of an assumption, and its outcomes."""

    name: str
    outcomes: dict[str, Outcome | None]


def variants(plan: Plan) -> dict[str, tuple[Plan, bool]]:
    """Return plans that differ in one decision, and whether it matters to the others, too."""
    stored = {f"{share:g} of the corpus stored": (replace(plan, stored=share), False) for share in _SHARES}
    routed = {f"{routing} routing": (replace(plan, routing=routing), True) for routing in ROUTINGS}
    others = {
        "controller off": (replace(plan, controller="off"), False),
        "no local disk": (replace(plan, disk_gib=0.0), False),
    }
    return stored | routed | others


_SHARES = (0.001, 0.01, 0.1, 1.0)

# the assumption, the fields of the profile or the plan, whether it matters to prefix caching, too
_ASSUMED: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("prefill tokens/s", ("prefill_tokens_per_s",), True),
    ("blending's share of full prefill", ("blend_share",), False),
    ("bandwidth RAM to model", ("ram_bytes_per_s",), False),
    ("bandwidth of the disk", ("disk_bytes_per_s",), False),
    ("bandwidth of the network", ("store_bytes_per_s", "store_total_bytes_per_s"), False),
    ("latency of the store", ("store_latency_s",), False),
    ("time of a decoding step", ("decode_step_s", "decode_answer_s"), True),
    ("Zipf's exponent", ("exponent",), True),
    ("requests/s", ("rate",), True),
    ("RAM for chunks", ("ram_gib",), False),
    ("disk for chunks", ("disk_gib",), False),
    ("price of a GPU", ("gpu_hour",), True),
    ("price of storage and reads", ("store_gb_month", "reads_thousand"), False),
)


def sensitivity(
    plan: Plan, profile: Profile, replicas: int | None, base: Outcome | None, progress: Callable[[str], None]
) -> Iterator[Case]:
    """Return the outcomes with each assumption halved and doubled.

    Args:
        base: Of prefix caching without a change.
    """
    for name, names, for_all in _ASSUMED:
        for factor in (0.5, 2.0):
            progress(f"{name} x {factor:g}")
            changes = {each: getattr(profile if each in SPEEDS else plan, each) * factor for each in names}
            speeds = {each: value for each, value in changes.items() if each in SPEEDS}
            sizes = {each: value for each, value in changes.items() if each not in SPEEDS}
            other_plan, other_profile = replace(plan, **sizes), replace(profile, **speeds)
            prefix = outcome(other_plan, other_profile, PREFIX, replicas) if for_all else base
            blend = outcome(other_plan, other_profile, BLEND, replicas)
            yield Case(f"{name} x {factor:g}", {BLEND: blend, PREFIX: prefix})


# -------------------------------------------------------------------- measured on this machine


def calibrate(plan: Plan, profile: Profile, model: str, args: argparse.Namespace) -> Profile:
    """Measure what this machine can, by the functions of the other benchmarks; the rest stays assumed."""
    from kvrag.backend.transformers import Model
    from kvrag.backend.transformers.shapes import random_model
    from kvrag.bench import decode, ttft

    progress = _say
    net = Model.from_pretrained("reader") if model == "reader" else random_model(model.lower())
    setup = ttft.TtftSetup(
        model.lower(),
        chunks=plan.chunks_per_prompt,
        chunk_tokens=plan.chunk_tokens,
        question_tokens=plan.question_tokens,
        policies=(args.policy,),
        ratio=args.ratio,
        repeats=args.repeats,
        ram_bytes=8 << 30,
    )
    size = plan.chunks_per_prompt * plan.chunk_tokens * net.bytes_per_token
    warm = ttft.measure(setup, progress=progress, net=net, with_prefix=False)
    cold = ttft.measure(replace(setup, ram_bytes=0, cold=True), progress=progress, net=net, with_prefix=False)
    full, blend = warm.rows
    load_s = blend.load_alone_s, cold.rows[1].load_alone_s
    assert load_s[0] is not None
    assert load_s[1] is not None
    answers = decode.measure(decode.DecodeSetup(model.lower(), repeats=args.repeats), progress, net)
    # tokens per second of one answer and of several: seconds of a step = a + b x answers
    rows = decode.DecodeSetup.rows
    one_s, rows_s = 1 / answers.alone, rows / answers.together
    answer_s = min(max((rows_s - one_s) / (rows - 1), 0.0), one_s)
    measured = {
        "prefill_tokens_per_s": warm.prompt_tokens / full.ttft_s,
        "blend_share": max(blend.ttft_s - load_s[0], 1e-6) / full.ttft_s,  # the layout is counted by ram_bytes_per_s
        "ram_bytes_per_s": size / load_s[0],
        "disk_bytes_per_s": size / load_s[1],
        "decode_step_s": one_s - answer_s,
        "decode_answer_s": answer_s,
    }
    settings = ", ".join(f"{name} {value}" for name, value in ttft.run_settings(net).items())
    source = f"{warm.prompt_tokens} tokens, {args.policy} at {args.ratio:g}; {settings}; the rest: {profile.source}"
    return replace(profile, **measured, measured=tuple(measured), source=source)


# -------------------------------------------------------------------- the command


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the plan that the options describe."""
    import torch

    from kvrag.store.codec import share

    shape = SHAPES[args.model]
    given = {each.name: getattr(args, each.name) for each in fields(Plan) if hasattr(args, each.name)}
    packed = share(args.codec, args.chunk_tokens, shape.head_dim, torch.bfloat16)
    return Plan(**given, kv_bytes=shape.bytes_per_token, stored_bytes=shape.bytes_per_token * packed)


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the tables."""
    if find_spec("simpy") is None:
        raise KvragError("simpy is not installed: pip install 'kvrag[bench]'")
    if args.profile and args.calibrate:
        raise SettingError("--calibrate writes the profile that --profile reads: give one of them")
    plan = plan_of(args)
    if args.profile:
        profile = Profile.read(args.profile)
    else:
        loads = {
            "disk_bytes_per_s": args.disk_gb_s * 1e9,
            "store_bytes_per_s": args.store_gb_s * 1e9,
            "store_total_bytes_per_s": args.store_total_gb_s * 1e9,
            "store_latency_s": args.store_latency_ms / 1000,
        }
        profile = profile_of(args.device, args.model, plan, args.ratio, args.policy, loads)
    if args.calibrate:
        profile = calibrate(plan, profile, args.model, args)
        profile.write(args.calibrate)
    systems = {system: _simulated(plan, profile, system, args.replicas) for system in (BLEND, PREFIX, FULL)}
    others, assumed = [], []
    if not args.brief:
        for name, (other, for_all) in variants(plan).items():
            _say(name)
            prefix = outcome(other, profile, PREFIX, args.replicas) if for_all else systems[PREFIX]
            others.append(Case(name, {BLEND: outcome(other, profile, BLEND, args.replicas), PREFIX: prefix}))
        assumed = list(sensitivity(plan, profile, args.replicas, systems[PREFIX], _say))
    if args.json:
        result = {"plan": asdict(plan), "profile": asdict(profile)}
        result["systems"] = {name: each and asdict(each) | {"cost": each.cost} for name, each in systems.items()}
        for title, cases in (("variants", others), ("sensitivity", assumed)):
            result[title] = {
                case.name: {name: each and asdict(each) | {"cost": each.cost} for name, each in case.outcomes.items()}
                for case in cases
            }
        print(json.dumps(result))
        return 0
    print(_text(plan, profile, systems))
    for title, cases in (("Decisions", others), ("Each assumption halved and doubled", assumed)):
        if cases:
            print(f"\n### {title}\n\n{_table(cases)}")
    return 0


def _simulated(plan: Plan, profile: Profile, system: str, replicas: int | None) -> Outcome | None:
    _say(f"simulating {system}")
    return outcome(plan, profile, system, replicas)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _text(plan: Plan, profile: Profile, systems: dict[str, Outcome | None]) -> str:
    """Return the assumptions and the comparison."""
    lines = [f"Profile: {profile.source}\n", "| | per replica | |", "|---|---|---|"]
    for name in SPEEDS:
        said = "measured" if name in profile.measured else "**assumed, unmeasured**"
        lines.append(f"| `{name}` | {getattr(profile, name):,.4g} | {said} |")
    warmed_s = plan.stored * plan.chunks * plan.chunk_tokens / profile.prefill_tokens_per_s
    gpu_h = warmed_s * plan.gpus_per_replica / 3600
    lines += [
        f"\n{plan.rate:g} requests/s of {plan.prompt_tokens} tokens with {plan.chunks_per_prompt} of {plan.chunks:,} "
        f"chunks, Zipf {plan.exponent:g}, answers of {plan.answer_tokens} tokens, {plan.routing} routing.",
        f"Warmed: {plan.stored:.2%} of the chunks, the most popular ones: {plan.stored_bytes_total / 1e12:.1f} TB, "
        f"{gpu_h:,.0f} GPU hours (${gpu_h * plan.gpu_hour:,.0f}) once.\n",
    ]
    lines += [
        "| | GPUs | TTFT p50 | p95 | p99 | ms per token | reused | busy | per 1,000 requests | GPUs, storage, reads |",
        "|---" * 10 + "|",
    ]
    for system, found in systems.items():
        if found is None:
            lines.append(f"| {system} | p95 of {plan.target_s:g} s is out of reach" + " | " * 8 + " |")
            continue
        ttft = " | ".join(f"{value:.2f} s" for value in found.ttft_s)
        parts = f"${found.gpu_cost:.3f}, ${found.store_cost:.3f}, ${found.read_cost:.3f}"
        lines.append(
            f"| {system} | {found.gpus} | {ttft} | {found.token_s * 1000:.0f} | {found.reused:.0%} | {found.busy:.0%} "
            f"| ${found.cost:.3f} | {parts} |"
        )
    blend = systems[BLEND]
    if blend is not None:
        rates = ", ".join(f"{name} {share:.1%}" for name, share in blend.hits.items())
        lines.append(f"\nChunks came from: {rates}. Full prefill was chosen for {blend.full:.0%} of the prompts.")
    return "\n".join(lines)


def _table(cases: Sequence[Case]) -> str:
    """Return a Markdown table: kvrag's outcome, and its cost relative to prefix caching."""
    lines = [
        "| | GPUs | prefix caching | TTFT p95 | computed | per 1,000 requests | of prefix caching's |",
        "|---" * 7 + "|",
    ]
    for case in cases:
        blend, prefix = case.outcomes[BLEND], case.outcomes[PREFIX]
        cells = ["-"] * 6
        if prefix is not None:
            cells[1] = str(prefix.gpus)
        if blend is not None:
            computed = f"{blend.hits['computed']:.0%}"
            cells[0], cells[2:5] = str(blend.gpus), [f"{blend.ttft_s[1]:.2f} s", computed, f"${blend.cost:.3f}"]
        if blend is not None and prefix is not None:
            cells[5] = f"{blend.cost / prefix.cost:.2f}"
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)
