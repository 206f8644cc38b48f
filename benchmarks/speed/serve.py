"""Load test of a running server: complete streams, time to first token, tokens per second.

Clients beyond the queue get 429, which is not an error, and retry. Some clients disconnect mid-stream. Every prompt
begins with a system message of its own: the documents are reused from their chunks, and no earlier prompt is continued.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import httpx

from kvrag.cli.common import add_number
from kvrag.errors import KvragError

_WORDS = "the red old river market bridge stone near winter harbour seven lamps song"
_DOCUMENTS = 12
_PROMPTS = 16
_RETRY_S = 0.5
_LONG = 200  # tokens of an answer that a client abandons: long enough to leave work
_MOST_WAITING_S = 6  # at most the disconnecting clients of so many seconds wait for their first token


@dataclass
class LoadResult:
    """Result of a load test.

    Attributes:
        complete: Streams read to their end, with `tokens` in total.
        rejected: Responses with 429.
        killed: Streams whose client disconnected.
        errors: Other errors, incomplete streams among them, with their counts.
        ttft_s: Seconds from each request to the first text of its complete stream, as the client saw it.
    """

    seconds: float
    complete: int = 0
    rejected: int = 0
    killed: int = 0
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if something was tested and there was no error."""
        return self.complete > 0 and not self.errors


class _Rejected(Exception):
    """The server responded with 429."""


def requests(model: str, count: int) -> list[dict[str, Any]]:
    """Return different requests over the same documents, greedy and sampled; deterministic."""
    rng, words = random.Random(0), _WORDS.split()
    documents = [" ".join(rng.choices(words, k=40)) for _ in range(_DOCUMENTS)]
    bodies = []
    for number in range(count):
        sampling = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
        question = f"Where is the {rng.choice(words)}?"
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 24}
        body |= {"documents": rng.sample(documents, 3), "stream": True, "stream_options": {"include_usage": True}}
        bodies.append(body | {"controller": "off"} | sampling)  # otherwise the decision depends on timing
    return bodies


def begun_anew(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a request that begins with a system message of its own: it continues the KV of no earlier prompt."""
    return body | {"messages": [{"role": "system", "content": f"Request {number}."}, *body["messages"]]}


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
    """Send each request once, so that its documents are encoded, then all of them for some time.

    Args:
        clients: Number of clients that send one request after the other.
        kill: Number of further clients per second that disconnect mid-stream.
        rate: Instead of the clients, send so many requests per second at random times (Poisson).
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        model = model or (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        bodies = requests(model, prompts)
        numbers = itertools.count(1)
        for body in bodies:
            await ask(http, begun_anew(body, next(numbers)))
        run = _Load(http, bodies, numbers, time.monotonic() + seconds, LoadResult(seconds))
        senders = [run.arrivals(rate)] if rate else [run.client(random.Random(number)) for number in range(clients)]
        await asyncio.gather(*senders, run.disconnects(kill))
    return run.result


@dataclass(frozen=True)
class _Load:
    """Requests until a time, and their result."""

    http: httpx.AsyncClient
    bodies: list[dict[str, Any]]
    numbers: Iterator[int]  # of requests
    end: float
    result: LoadResult

    async def client(self, rng: random.Random) -> None:
        while time.monotonic() < self.end:
            if not await self._send(rng.choice(self.bodies)):
                await asyncio.sleep(_RETRY_S * (1 + rng.random()))

    async def arrivals(self, rate: float) -> None:
        rng = random.Random(0)
        tasks: list[asyncio.Task[bool]] = []
        at = time.monotonic() + rng.expovariate(rate)
        while at < self.end:
            await asyncio.sleep(max(at - time.monotonic(), 0))
            tasks.append(asyncio.create_task(self._send(rng.choice(self.bodies))))
            at += rng.expovariate(rate)
        await asyncio.gather(*tasks)

    async def disconnects(self, kill: int) -> None:
        """Start some clients per second that disconnect after a few events; fewer while many wait for the first."""
        rng = random.Random(-1)
        tasks: set[asyncio.Task[None]] = set()
        while kill and time.monotonic() < self.end:
            for _ in range(min(kill, _MOST_WAITING_S * kill - len(tasks))):
                body = rng.choice(self.bodies) | {"max_tokens": _LONG}
                task = asyncio.create_task(self._disconnect_after(body, rng.randint(1, 4)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(1)
        await asyncio.gather(*tasks)

    async def _disconnect_after(self, body: dict[str, Any], num_events: int) -> None:
        while True:
            if await self._send(body, num_events):
                return
            await asyncio.sleep(_RETRY_S)

    async def _send(self, body: dict[str, Any], num_events: int | None = None) -> bool:
        """Send a request and count its result; return False if the server rejected it with 429."""
        try:
            answer = await ask(self.http, begun_anew(body, next(self.numbers)), num_events)
        except _Rejected:
            self.result.rejected += 1
            return False
        except (httpx.HTTPError, KvragError) as error:
            self.result.errors[f"{type(error).__name__}: {error}"] += 1
            return True
        if answer is None:
            self.result.killed += 1
        elif num_events is None:
            self.result.complete += 1
            self.result.tokens += answer.tokens
            self.result.ttft_s += [] if answer.ttft_s is None else [answer.ttft_s]
        return True


class StreamedAnswer(NamedTuple):
    """The answer of a complete stream; `ttft_s` are the seconds to its first text, if there is any."""

    text: str
    tokens: int
    ttft_s: float | None


async def ask(http: httpx.AsyncClient, body: dict[str, Any], num_events: int | None = None) -> StreamedAnswer | None:
    """Return the answer; None after disconnecting at event number `num_events`.

    Raises:
        KvragError: The stream ended early, or the server reported an error.
    """
    text, last, usage = "", "", None
    started, ttft_s = time.monotonic(), None
    number = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for last in _events(response):
            if last == "[DONE]":
                continue
            number += 1
            if number == num_events:
                return None
            event = json.loads(last)
            if "error" in event:
                raise KvragError(event["error"]["message"])
            usage = event.get("usage") or usage
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if text and ttft_s is None:
                ttft_s = time.monotonic() - started
    if last != "[DONE]" or usage is None:
        raise KvragError("a stream ended early")
    return StreamedAnswer(text, usage["completion_tokens"], ttft_s)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    if response.status_code == 429:
        raise _Rejected
    if response.status_code != 200:
        raise KvragError(f"status {response.status_code}: {(await response.aread()).decode()[:200]}")
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    url = "http://127.0.0.1:8000"
    parser.add_argument("--url", default=url, help=f"URL of the server (default: {url})")
    parser.add_argument("--api-key", default="", metavar="KEY", help="API key, if the server requires one")
    parser.add_argument("--model", default="", help="model name (default: the server's first model)")
    add_number(parser, "--clients", 32, "concurrent clients", least=1)
    add_number(parser, "--rate", 0.0, "requests per second at random times, instead of clients that wait for answers")
    add_number(parser, "--seconds", 120.0, "duration in seconds")
    add_number(parser, "--kill", 8, "clients per second that disconnect mid-stream")


def run(args: argparse.Namespace) -> int:
    """Run the load test; return 1 on an error."""
    try:
        settings = (args.url, args.clients, args.seconds, args.kill, args.api_key, args.model)
        result = asyncio.run(load(*settings, rate=args.rate))
    except httpx.HTTPError as error:
        raise KvragError(f"no server answers at {args.url}: {error}") from error
    if args.json:
        print(json.dumps(asdict(result) | {"passed": result.passed}))
        return 0 if result.passed else 1
    print(
        f"{result.seconds:g} s: {result.complete} complete streams; {result.rejected} times 429; "
        f"{result.killed} disconnected mid-stream; {result.tokens / result.seconds:.1f} tokens/s of complete streams"
    )
    if len(result.ttft_s) > 1:
        p50, p95 = (statistics.quantiles(result.ttft_s, n=100)[at] for at in (49, 94))
        print(f"time to first token: p50 {1000 * p50:.0f} ms, p95 {1000 * p95:.0f} ms")
    for problem, count in result.errors.items():
        print(f"{count} x {problem}", file=sys.stderr)
    return 0 if result.passed else 1
