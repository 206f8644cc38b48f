"""Malformed and hostile requests: no response with status 500 or above, and no request left in the server.

Three kinds take turns: requests that Schemathesis derives from the server's OpenAPI description, raw bytes that break
HTTP or JSON, and clients that are slow or leave.
"""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings

from torture.campaign import Campaign, describe
from torture.server import MODEL, SERVE, Server, Usage, serving

_PER_CASE = 20  # requests
_REST = 10  # cases between two measurements of the server
_QUESTION = "What does Ingla play?"
_OPTIONS = ("--token-limit", 12, "--max-tokens", 4, "--timeout", 30, "--max-body-mib", 1, "--max-upload-mib", 1)
_THREADS, _FILES = 8, 16  # more than in the first third of the run


def run(campaign: Campaign) -> None:
    """Send batches of requests; a case is a batch."""
    warnings.simplefilter("ignore")
    log = campaign.out / "fuzz.server.log"
    with serving(log, *SERVE, "--store", campaign.folder / "kv", *_OPTIONS) as server:
        schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
        operations = [found.ok() for found in schema.get_all_operations()]
        wanted, samples, last = server.ask(_QUESTION), list[Usage](), 0
        for number in campaign.numbers():
            limits = campaign.limits
            if limits.seconds is None and limits.only is None and campaign.result.cases >= limits.count:
                break
            rng = campaign.random(number)
            kind = rng.choice(["schema", "schema", "schema", "raw", "raw", "clients"])
            with campaign.case(number, _PER_CASE):
                if kind == "schema":
                    _derived(server, rng.choice(operations), rng)
                else:
                    for _ in range(_PER_CASE):
                        (_raw if kind == "raw" else _leave)(server, rng)
            campaign.kinds[kind] += _PER_CASE
            if number % _REST == _REST - 1 and number != last:
                last = number
                with campaign.case(number, 0):
                    assert not (left := server.settle()), f"{left} requests are still running or waiting"
                    samples.append(server.usage())
                    assert server.ask(_QUESTION) == wanted, "an ordinary request got a different answer"
        with campaign.case(campaign.limits.count, 0):
            _check_usage(campaign, server, samples)
            said = log.read_text()
            assert "Traceback" not in said, f"{log} has {said.count('Traceback')} errors: {_last_error(said)}"


def _last_error(log: str) -> str:
    return " ".join(re.findall(r"^[\w.]+(?:Error|Exception|Group)\b.*", log, re.MULTILINE)[-1:])


def _check_usage(campaign: Campaign, server: Server, samples: list[Usage]) -> None:
    server.settle()
    samples.append(server.usage())
    first = samples[: max(1, len(samples) // 3)]
    threads, files = max(one.threads for one in first), max(one.files for one in first)
    last = samples[-1]
    campaign.result.figures |= {
        "threads": f"{threads} -> {last.threads}",
        "open files": f"{files} -> {last.files}",
        "MiB": f"{first[0].memory >> 20} -> {last.memory >> 20}",
    }
    assert last.threads <= threads + _THREADS, f"{last.threads} threads, {threads} in the first third"
    assert last.files <= files + _FILES, f"{last.files} open files, {files} in the first third"


# -------------------------------------------------------------------- from the description


def _derived(server: Server, operation: Any, rng: random.Random) -> None:
    """Send requests that match the description of an operation, or nearly do."""
    mode = rng.choice([*schemathesis.GenerationMode])
    failed: list[str] = []

    @hypothesis.seed(rng.randrange(2**32))
    @settings(
        max_examples=_PER_CASE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if failed:
            return
        if isinstance(case.body, dict) and rng.random() < 0.8 and "model" in case.body:
            case.body["model"] = MODEL  # otherwise most are rejected because of the model's name
        try:
            response = case.call(base_url=server.url, timeout=60)
        except requests.exceptions.ConnectionError as error:
            if server.process.poll() is not None:
                failed.append(f"the server has ended: {describe(error)}")
            return
        except (ValueError, requests.exceptions.RequestException):
            return  # nothing that the client library can send
        if response.status_code >= 500:
            said = response.content[:200].decode(errors="replace")
            failed.append(f"{response.status_code} {said} to {case.as_curl_command()[:600]}")

    with suppress(hypothesis.errors.Unsatisfiable, hypothesis.errors.FailedHealthCheck):
        send()
    assert not failed, failed[0]


# -------------------------------------------------------------------- raw bytes


def _raw(server: Server, rng: random.Random) -> None:
    content = rng.choice(_RAW)(rng)
    with socket.create_connection(server.address, timeout=60) as connection:
        with suppress(ConnectionError):
            connection.sendall(content)
        connection.shutdown(socket.SHUT_WR) if rng.random() < 0.5 else connection.settimeout(0.5)
        status = _status(connection)
    assert status is None or status < 500, f"status {status} to {content[:300]!r}"


def _status(connection: socket.socket) -> int | None:
    """Return the status of the response; None if there is none."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    with suppress(TimeoutError, ConnectionError):
        while True:
            event = client.next_event()
            if isinstance(event, h11.Response):
                return event.status_code
            if event is h11.NEED_DATA:
                client.receive_data(received := connection.recv(65536))
                if not received:
                    return None
            elif isinstance(event, h11.ConnectionClosed):
                return None
    return None


def _body(rng: random.Random) -> dict[str, Any]:
    message = {"role": "user", "content": "Who? " * rng.randint(1, 30)}
    return {"model": MODEL, "messages": [message], "max_tokens": 2, "stream": rng.random() < 0.5}


def _request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        head.append(f"content-length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1", errors="replace") + body


_PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/chunks",
    "/tokenize",
]


def _mutated(rng: random.Random) -> bytes:
    content = bytearray(_request(rng.choice(_PATHS), json.dumps(_body(rng)).encode()))
    for _ in range(rng.choice([1, 2, 10])):
        place = rng.randrange(len(content))
        content[place : place + rng.choice([0, 1, 5])] = rng.choice(
            [b"", rng.randbytes(3), b"\r\n", b"\0", b'"', b"\xff"]
        )
    return bytes(content)


def _odd_json(rng: random.Random) -> bytes:
    body = json.dumps(_body(rng))
    odd = rng.choice(
        [
            "[" * 100_000,
            '{"a":' * 50_000,
            body.replace("2", "1e999"),
            body.replace("2", "NaN"),
            body.replace("2", "-1"),
            body.replace("2", "9" * 5000),
            body.replace("Who", "\\ud800"),
            body.replace("Who", "\\u0000"),
            body.replace('"user"', "null"),
            body[:-1] + "," + body[1:],
            "\ufeff" + body,
            body + body,
            "null",
            '"',
            "",
            json.dumps({"model": MODEL, "prompt": [[10**12]], "max_tokens": 2}),
            json.dumps({"model": MODEL, "prompt": [-1], "max_tokens": 2}),
            json.dumps({"model": MODEL, "input": ["a"] * 3, "texts": ["\ud800"], "text": "\ud800", "document": "\0"}),
        ]
    )
    return _request(rng.choice(_PATHS), odd.encode(errors="surrogatepass"))


def _odd_http(rng: random.Random) -> bytes:
    body = json.dumps(_body(rng)).encode()
    path = rng.choice(_PATHS)
    chunked = "transfer-encoding: chunked"
    odd: list[Callable[[], bytes]] = [
        lambda: _request(path, body, f"content-length: {len(body)}", chunked),
        lambda: _request(path, b"zz\r\n" + body, chunked),
        lambda: _request(path, b"5\r\nabc", chunked),
        lambda: _request(path, b"fffffffffffffffff\r\nabc", chunked),
        lambda: _request(path, body, "content-length: -1"),
        lambda: _request(path, body, f"content-length: {10**30}"),
        lambda: _request(path, body, f"content-length: {len(body) + 10}"),
        lambda: _request(path, body, "content-length: 3"),
        lambda: _request(path, body) * 5,
        lambda: _request(path, body, f"x: {'a' * 100_000}"),
        lambda: _request(path, body, *[f"x{i}: y" for i in range(2000)]),
        lambda: _request(path, body, "content-encoding: gzip"),
        lambda: _request(path, body, "expect: 100-continue"),
        lambda: _request(path, body, "host: other"),
        lambda: _request(path, body, "content-type: multipart/form-data; boundary=x"),
        lambda: _request(path, b"--x\r\ncontent-disposition: form-data; name=file; filename=\xff\r\n\r\na\r\n--x--"),
        lambda: _request(
            "/v1/corpus/" + "%2e%2e%2f" * 9 + "etc%00passwd", b"x", method=rng.choice(["PUT", "GET", "DELETE"])
        ),
        lambda: _request("/v1/corpus/" + "a" * 20_000, b"x", method=rng.choice(["PUT", "GET", "DELETE"])),
        lambda: _request("/v1/chunks/%ff%fe%ed%a0%80", b"", method="DELETE"),
        lambda: _request("/v1/models/%00", b"", method="GET"),
        lambda: _request(f"/v1/corpus?limit={'9' * 400}&after=%ff", b"", method="GET"),
        lambda: _request("//v1///corpus/..;/", b"", method=rng.choice(["TRACE", "OPTIONS", "get", "PATCH"])),
        lambda: _request("/v1/models", b"", "upgrade: websocket", "connection: upgrade", method="GET"),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"GET /\r\n\r\n",
        lambda: rng.randbytes(rng.randint(1, 5000)),
    ]
    return rng.choice(odd)()


_RAW = [_mutated, _odd_json, _odd_http]

# -------------------------------------------------------------------- clients that are slow or leave


def _leave(server: Server, rng: random.Random) -> None:
    """Send a request slowly or in part, or read only the beginning of the answer."""
    path = rng.choice([*_PATHS[:3], "/v1/chunks"])
    body = _body(rng) | {
        "stream": True,
        "max_tokens": 12,
        "texts": ["A text of some length. " * 20],
        "document": "left",
    }
    if path == "/v1/completions":
        body["prompt"] = "Who? " * 50
    if path == "/v1/responses":
        body = {"model": MODEL, "input": "Who? " * 50, "stream": True}
    content = _request(path, json.dumps(body).encode())
    with socket.create_connection(server.address, timeout=60) as connection, suppress(ConnectionError, TimeoutError):
        if rng.random() < 0.5:  # a slow body
            for start in range(0, len(content), step := rng.choice([40, 100])):
                connection.sendall(content[start : start + step])
                time.sleep(0.002)
                if rng.random() < 0.02:
                    break
        else:
            connection.sendall(content)
        if rng.random() < 0.7:
            connection.settimeout(rng.choice([0.01, 0.2, 2.0]))
            said = connection.recv(rng.choice([1, 100, 4000]))
            status = re.match(rb"HTTP/1.1 (\d+)", said)
            assert status is None or int(status[1]) < 500, f"status {int(status[1])} to {content[:300]!r}"
        if rng.random() < 0.5:  # reset the connection instead of closing it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
