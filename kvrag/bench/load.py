"""Load test of a running server: every stream must be complete and equal to the answer of the same request alone.

Clients beyond the queue get 429, which is not an error, and retry. Some clients disconnect mid-stream, which must leave
no work behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from kvrag.errors import KvragError

_WORDS = (
    "the",
    "red",
    "old",
    "river",
    "market",
    "bridge",
    "stone",
    "near",
    "winter",
    "harbour",
    "seven",
    "lamps",
    "song",
)
_DOCUMENTS = 12
_PROMPTS = 16
_RETRY_S = 0.5
_LONG = 200  # tokens of an answer that a client abandons: long enough to leave work
_TRYING = 6  # seconds' worth of disconnecting clients that may still wait for their stream to begin
_IDLE_S = 60.0  # for the server to become idle at the end
_SAMPLES = 16  # of the memory, besides the first one
_MEMORY, _GONE = "process_resident_memory_bytes", 'kvrag_request_failure_total{status="499"}'
_GROWTH = 1.1  # more growth after the first quarter is not noise


@dataclass
class LoadResult:
    """Result of a load test.

    Attributes:
        rate: Requests per second that were sent at random times (Poisson) instead of by the clients; 0 = by them.
        complete: Streams read to their end; `unequal` of them differed from the same request alone.
        rejected: Responses with 429.
        kill: Planned disconnections mid-stream per second ...
        killed: ... and actual disconnections in total. The server stopped `stopped` requests of disconnected clients.
        errors: Other errors, with their counts.
        left: Requests still running or waiting on the server a minute after the last client disconnected.
        memory: Resident bytes, at regular intervals from start to end.
        ttft_s: Seconds from each request to the first text of its complete stream, as the client saw it.
    """

    clients: int
    seconds: float
    kill: int = 0
    rate: float = 0.0
    complete: int = 0
    unequal: int = 0
    rejected: int = 0
    killed: int = 0
    stopped: int = 0
    tokens: int = 0
    left: int = 0
    memory: list[int] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if everything was correct and something was tested."""
        is_shown = self.complete > 0 and (not self.kill or (self.killed > 0 and self.stopped > 0))
        return is_shown and not (self.unequal or self.left or self.errors)

    @property
    def is_flat(self) -> bool:
        """True if the memory did not grow after the first quarter."""
        quarter = len(self.memory) // 4
        return max(self.memory[-quarter:]) <= _GROWTH * max(self.memory[: quarter + 1])


class _Rejected(Exception):
    """The server responded with 429."""


def requests(model: str, count: int, max_tokens: int = 24) -> list[dict[str, Any]]:
    """Return different requests over the same documents, greedy and sampled; deterministic."""
    rng = random.Random(0)
    documents = [" ".join(rng.choices(_WORDS, k=40)) for _ in range(_DOCUMENTS)]
    made = []
    for number in range(count):
        sampling = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
        question = f"Where is the {rng.choice(_WORDS)}?"
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
        body |= {"documents": rng.sample(documents, 3), "stream": True, "stream_options": {"include_usage": True}}
        made.append(body | {"controller": "off"} | sampling)  # otherwise the decision depends on timing
    return made


async def load(
    url: str,
    clients: int,
    seconds: float,
    kill: int = 0,
    api_key: str = "",
    model: str = "",
    prompts: int = _PROMPTS,
    rate: float = 0.0,
) -> LoadResult:
    """Send each request alone, then all of them from many clients for some time, then wait until the server is idle.

    Args:
        rate: Send so many requests per second at random times, whether or not earlier ones were answered.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        model = model or (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        bodies = requests(model, prompts)
        for body in bodies:  # documents are new only once
            await _say(http, body)
        alone = [await _say(http, body) for body in bodies]
        result = LoadResult(clients, seconds, kill, rate, memory=[round(await _metric(http, _MEMORY))])
        before = await _metric(http, _GONE)
        end = time.monotonic() + seconds
        workers = [_client(http, bodies, alone, end, number, result) for number in range(clients if not rate else 0)]
        if rate:
            workers = [_arrivals(http, bodies, alone, end, result)]
        await asyncio.gather(*workers, _killer(http, bodies, end, result), _watch(http, seconds, result))
        result.left = await _rest(http)
        result.stopped = round(await _metric(http, _GONE) - before)
        result.memory.append(round(await _metric(http, _MEMORY)))
    return result


async def _client(
    http: httpx.AsyncClient,
    bodies: list[dict[str, Any]],
    alone: list[tuple[str, int]],
    end: float,
    number: int,
    result: LoadResult,
) -> None:
    rng = random.Random(number)
    while time.monotonic() < end:
        which = rng.randrange(len(bodies))
        if not await _once(http, bodies[which], alone[which], result):
            await asyncio.sleep(_RETRY_S * (1 + rng.random()))


async def _arrivals(
    http: httpx.AsyncClient, bodies: list[dict[str, Any]], alone: list[tuple[str, int]], end: float, result: LoadResult
) -> None:
    """Send requests at random times, `result.rate` per second on average."""
    rng = random.Random(0)
    sent: list[asyncio.Task[bool]] = []
    at = time.monotonic() + rng.expovariate(result.rate)
    while at < end:
        await asyncio.sleep(max(at - time.monotonic(), 0))
        which = rng.randrange(len(bodies))
        sent.append(asyncio.create_task(_once(http, bodies[which], alone[which], result)))
        at += rng.expovariate(result.rate)
    await asyncio.gather(*sent)


async def _once(http: httpx.AsyncClient, body: dict[str, Any], expected: tuple[str, int], result: LoadResult) -> bool:
    """Send a request and count its result; return False if the server rejected it with 429."""
    first_s: list[float] = []
    try:
        said, tokens = await _say(http, body, first_s)
    except _Rejected:
        result.rejected += 1
        return False
    except (httpx.HTTPError, KvragError) as error:
        _count(result, error)
    else:
        result.complete += 1
        result.unequal += (said, tokens) != expected
        result.tokens += tokens
        result.ttft_s += first_s
    return True


async def _killer(http: httpx.AsyncClient, bodies: list[dict[str, Any]], end: float, result: LoadResult) -> None:
    """Start some clients per second that disconnect after a few deltas; fewer while many wait for the first."""
    rng = random.Random(-1)
    leaving: set[asyncio.Task[None]] = set()
    while result.kill and time.monotonic() < end:
        for _ in range(min(result.kill, _TRYING * result.kill - len(leaving))):
            body = rng.choice(bodies) | {"max_tokens": _LONG}
            task = asyncio.create_task(_leave(http, body, rng.randint(1, 4), result))
            leaving.add(task)
            task.add_done_callback(leaving.discard)
        await asyncio.sleep(1)
    await asyncio.gather(*leaving)


async def _leave(http: httpx.AsyncClient, body: dict[str, Any], pieces: int, result: LoadResult) -> None:
    """Retry until a stream begins, then disconnect."""
    while True:
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for data in _events(response):
                    pieces -= 1
                    if not pieces:
                        result.killed += data != "[DONE]"
                        break
            return
        except _Rejected:
            result.rejected += 1
            await asyncio.sleep(_RETRY_S)
        except (httpx.HTTPError, KvragError) as error:
            _count(result, error)
            return


async def _watch(http: httpx.AsyncClient, seconds: float, result: LoadResult) -> None:
    for _ in range(_SAMPLES - 1):
        await asyncio.sleep(seconds / _SAMPLES)
        result.memory.append(round(await _metric(http, _MEMORY)))


async def _say(http: httpx.AsyncClient, body: dict[str, Any], first_s: list[float] | None = None) -> tuple[str, int]:
    """Return text and number of tokens of a complete stream; append the seconds until the first text to `first_s`."""
    text, last, usage = "", "", None
    started = time.monotonic()
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for data in _events(response):
            last = data
            if data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise KvragError(event["error"]["message"])
            usage = event.get("usage") or usage
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if piece and not text and first_s is not None:
                first_s.append(time.monotonic() - started)
            text += piece
    if last != "[DONE]" or usage is None:
        raise KvragError("a stream ended early")
    return text, usage["completion_tokens"]


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    if response.status_code == 429:
        raise _Rejected
    if response.status_code != 200:
        raise KvragError(f"status {response.status_code}: {(await response.aread()).decode()[:200]}")
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def _metric(http: httpx.AsyncClient, name: str) -> float:
    said = await http.get("/metrics")
    while said.status_code == 429:
        await asyncio.sleep(_RETRY_S)
        said = await http.get("/metrics")
    for line in said.raise_for_status().text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0  # not counted yet, or not supported by the server's system


async def _rest(http: httpx.AsyncClient) -> int:
    """Wait until the server is idle; return the number of remaining requests."""
    for _ in range(round(_IDLE_S / 0.2)):
        left = sum([round(await _metric(http, f"kvrag_num_requests_{what}")) for what in ("running", "waiting")])
        if not left:
            break
        await asyncio.sleep(0.2)
    return left


def _count(result: LoadResult, error: Exception) -> None:
    name = f"{type(error).__name__}: {error}"
    result.errors[name] = result.errors.get(name, 0) + 1


def run(args: argparse.Namespace) -> int:
    """Run the load test; return 1 on a failure."""
    try:
        given = (args.url, args.clients, args.seconds, args.kill, args.api_key, args.model)
        result = asyncio.run(load(*given, rate=args.rate))
    except httpx.HTTPError as error:
        raise KvragError(f"no server answers at {args.url}: {error}") from error
    if args.json:
        print(json.dumps(asdict(result) | {"passed": result.passed, "is_flat": result.is_flat}))
    else:
        _print(result)
    return 0 if result.passed and result.is_flat else 1


def _print(result: LoadResult) -> None:
    memory = ", ".join(f"{size / (1 << 20):.0f}" for size in result.memory[:: _SAMPLES // 4])
    who = f"{result.rate:g} requests/s" if result.rate else f"{result.clients} clients"
    print(
        f"{who}, {result.seconds:g} s: {result.complete} complete streams, "
        f"{result.unequal} different; {result.rejected} times 429; "
        f"{result.tokens / result.seconds:.1f} tokens/s of complete streams"
    )
    if len(result.ttft_s) > 1:
        p50, p95 = (statistics.quantiles(result.ttft_s, n=100)[at] for at in (49, 94))
        print(f"time to first token: p50 {1000 * p50:.0f} ms, p95 {1000 * p95:.0f} ms")
    print(
        f"{result.killed} disconnected mid-stream, {result.killed / result.seconds:.1f} of {result.kill} per s; the "
        f"server stopped {result.stopped} requests of disconnected clients; {result.left} requests were left at the end"
    )
    print(f"resident MiB at the start and after each quarter: {memory}")
    for error, count in result.errors.items():
        print(f"{count} x {error}", file=sys.stderr)
