"""Sixteen clients for a long time on one server with a byte budget: memory and answer times do not grow.

The clients warm documents, forget them, ask about chunks, and abandon streams. A fixed computation measures the
machine's speed meanwhile, because other processes may share it.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from torture import tiny
from torture.campaign import Campaign, describe
from torture.server import MODEL, Server, Usage, serving

_CLIENTS = 16
_TEXTS = 400  # the store has room for about a quarter of them
_BUDGET = 60 << 20
_SAMPLES = 80
_SLOWER = 1.5  # the last quarter's 99th percentile, of the first quarter's
_GROWTH = 1.05  # of resident memory after the first quarter
_FILES, _THREADS = 16, 8  # more than in the first quarter
_QUIET_S = 20.0, 60.0  # at least and at most, of filling caches before anything is measured
_SHORTEST_S = 60.0  # a quarter of a shorter run has too few answers


@dataclass
class _Seen:
    """Measurements of the clients and the watcher; times since the beginning in seconds."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    usage: list[tuple[float, Usage]] = field(default_factory=list)
    speeds: list[tuple[float, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(campaign: Campaign) -> None:
    """Load the server for as many seconds as the campaign has cases, or as it may take, and for a minute at least."""
    seconds = max(_SHORTEST_S, campaign.limits.seconds or campaign.limits.count)
    seen, log = _Seen(), campaign.out / "soak.server.log"
    with serving(log, "torture.small_server", campaign.folder / "kv", _BUDGET) as server:
        begin = time.monotonic() + min(max(_QUIET_S[0], seconds / 10), _QUIET_S[1])
        end = begin + seconds
        with ThreadPoolExecutor(_CLIENTS + 1) as pool:
            clients = [pool.submit(_client, campaign, server, number, begin, end, seen) for number in range(_CLIENTS)]
            pool.submit(_watch, server, begin, end, seen).result()
            for client in clients:
                client.result()
        with campaign.case(0, 0):
            assert not (left := server.settle()), f"{left} requests are still running or waiting"
            said = log.read_text()
            assert "Traceback" not in said, f"{log} has {said.count('Traceback')} errors"
        with campaign.case(0, 0):
            _check_store(campaign)
        _check(campaign, seen, seconds)


def _client(campaign: Campaign, server: Server, number: int, begin: float, end: float, seen: _Seen) -> None:
    rng = campaign.random(number)
    with httpx.Client(base_url=server.url, timeout=300) as http:
        while (now := time.monotonic()) < end:
            what = rng.choice(["ask"] * 6 + ["warm", "warm", "forget", "leave"])
            try:
                status = _DO[what](http, rng)
                took = time.monotonic() - now
                if status == 429:
                    time.sleep(0.2)
                    continue
                assert status < 400, f"{what}: status {status}"
            except Exception as error:
                with seen.lock:
                    campaign.fail(number, f"{what}: {describe(error)}")
                continue
            with seen.lock:
                campaign.result.cases += 1
                campaign.kinds[what] += 1
                if what == "ask" and now >= begin:
                    seen.latencies.append((now - begin, took))


def _ask(http: httpx.Client, rng: random.Random) -> int:
    texts = [tiny.text(number) for number in rng.sample(range(_TEXTS), 3)]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Who met whom?"}], "documents": texts}
    return http.post("/v1/chat/completions", json=body | {"max_tokens": 4}).status_code


def _leave(http: httpx.Client, rng: random.Random) -> int:
    text = tiny.text(rng.randrange(_TEXTS))
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 200, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        for _ in zip(range(rng.randint(1, 5)), response.iter_lines(), strict=False):
            pass
        return response.status_code


def _warm(http: httpx.Client, rng: random.Random) -> int:
    texts = [tiny.text(number) for number in rng.sample(range(_TEXTS), rng.randint(1, 5))]
    return http.post("/v1/chunks", json={"texts": texts, "document": f"d{rng.randrange(40)}"}).status_code


def _forget(http: httpx.Client, rng: random.Random) -> int:
    return http.delete(f"/v1/chunks/d{rng.randrange(40)}").status_code


_DO = {"ask": _ask, "leave": _leave, "warm": _warm, "forget": _forget}


def _watch(server: Server, begin: float, end: float, seen: _Seen) -> None:
    while (now := time.monotonic()) < end:
        if now >= begin:
            seen.usage.append((now - begin, server.usage()))
            started = time.perf_counter()
            json.dumps([[i] * 10 for i in range(20_000)])
            seen.speeds.append((now - begin, time.perf_counter() - started))
        time.sleep(max(0.1, (end - begin) / _SAMPLES))


def _check_store(campaign: Campaign) -> None:
    size = sum(path.stat().st_size for path in (campaign.folder / "kv" / "chunks").glob("*/*"))
    campaign.result.figures["MiB in the store"] = f"{size >> 20} of {_BUDGET >> 20}"
    assert size <= 1.1 * _BUDGET, f"the store has {size} bytes, its budget is {_BUDGET}"


def _check(campaign: Campaign, seen: _Seen, seconds: float) -> None:
    """Compare the last quarter with the first one; every comparison is a check of its own."""
    first, last = (lambda at: at < seconds / 4), (lambda at: at >= 3 * seconds / 4)

    def quarter(pairs: list, when) -> list:  # type: ignore[no-untyped-def, type-arg]
        return [value for at, value in pairs if when(at)]

    p99 = [statistics.quantiles(quarter(seen.latencies, when), n=100)[98] for when in (first, last)]
    speed = [statistics.median(quarter(seen.speeds, when)) for when in (first, last)]
    slower = p99[1] / p99[0]
    relative = slower * speed[0] / speed[1]
    usage = [quarter(seen.usage, when) for when in (first, last)]
    memory, files, threads = (
        [max(getattr(one, name) for one in part) for part in usage] for name in ("memory", "files", "threads")
    )
    series = [(round(at), one.memory >> 20, one.files, one.threads) for at, one in seen.usage]
    (campaign.out / "soak.usage.json").write_text(json.dumps(series))
    campaign.result.figures |= {
        "p99 of asking": f"{p99[0]:.2f} -> {p99[1]:.2f} s",
        "p99 per unit of the machine's speed": f"{relative:.2f}x",
        "MiB": f"{memory[0] >> 20} -> {memory[1] >> 20}",
        "open files": f"{files[0]} -> {files[1]}",
        "threads": f"{threads[0]} -> {threads[1]}",
    }
    for holds, what in (
        # a busy machine makes one of them large, a slow server both
        (
            min(slower, relative) <= _SLOWER,
            f"the 99th percentile grew {slower:.2f}x, {relative:.2f}x per unit of speed",
        ),
        (memory[1] <= _GROWTH * memory[0], f"resident memory grew from {memory[0] >> 20} to {memory[1] >> 20} MiB"),
        (files[1] <= files[0] + _FILES, f"open files grew from {files[0]} to {files[1]}"),
        (threads[1] <= threads[0] + _THREADS, f"threads grew from {threads[0]} to {threads[1]}"),
    ):
        with campaign.case(0, 0):
            assert holds, what
