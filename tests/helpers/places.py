"""Shared stores for tests: a bucket in memory, and a server of S3 (moto) on a free port."""

from __future__ import annotations

import http.client
import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import obstore
from obstore.store import MemoryStore

from kvrag.store.objects import ObjectStore

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True)
class Bucket:
    """A running S3 server with the bucket "kvrag"."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """A store's URL; PLACE stands for a prefix."""
        return f"s3://kvrag/PLACE?endpoint={self.endpoint}"


class Memory:
    """A bucket in this process's memory, reached by the code of S3 stores.

    Calling it creates the client of a prefix, as obstore's S3Store does.
    """

    url = "s3://kvrag/PLACE"

    def __init__(self) -> None:
        self._prefixes: defaultdict[str, MemoryStore] = defaultdict(MemoryStore)

    def __call__(self, bucket: str, *, prefix: str, **_: object) -> MemoryStore:
        return self._prefixes[prefix]


def names_in(remote: ObjectStore, prefix: str) -> list[str]:
    """Return the names of the objects under a prefix."""
    return [item["path"] for page in obstore.list(remote._quick, prefix) for item in page]


@contextmanager
def run_s3() -> Iterator[Bucket]:
    """With credentials for it in the environment."""
    code = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
server._thread.join()
"""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    os.environ.update(CREDENTIALS)
    try:
        assert process.stdout is not None
        bucket = Bucket(int(process.stdout.readline()))
        urllib.request.urlopen(urllib.request.Request(f"{bucket.endpoint}/kvrag", method="PUT")).close()
        yield bucket
    finally:
        process.kill()
        process.wait()


class Faults:
    """A proxy in front of an S3 server that can fail in the ways networks and servers do.

    Attributes:
        mode: "pass", "500", "403" (every request fails), "hang" (no answer until `hang_up`), "cut" (answers to GET end
            half way), "slow", "once" (a chunk can be read once, then it fails).
        refused: Chunks that could not be read again.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.mode, faults = "pass", self
        self.refused: set[str] = set()
        first: dict[str, object] = {}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if faults.mode == "hang":
                    faults._hung_up.wait()
                    self.close_connection = True
                    return
                is_chunk = self.command == "GET" and "/chunks/" in self.path
                if faults.mode == "once" and is_chunk and first.setdefault(self.path, mine := object()) is not mine:
                    faults.refused.add(self.path)
                    self._send(500, [], b"<Error><Code>InternalError</Code></Error>")
                    return
                if faults.mode in ("500", "403"):
                    code = {"500": b"InternalError", "403": b"InvalidAccessKeyId"}[faults.mode]
                    self._send(int(faults.mode), [], b"<Error><Code>%s</Code></Error>" % code)
                    return
                if faults.mode == "slow":
                    time.sleep(0.1)
                connection = http.client.HTTPConnection("127.0.0.1", bucket.port)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                self._send(answer.status, answer.getheaders(), answer.read())
                connection.close()

            def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response(status)
                given = {name.lower() for name, _ in headers}
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                if "content-length" not in given:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if faults.mode == "cut" and self.command == "GET" and len(body) > 1:
                    body, self.close_connection = body[: len(body) // 2], True
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

            def log_message(self, *_: object) -> None:
                pass

        self._hung_up = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"s3://kvrag/PLACE?endpoint=http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def hang_up(self) -> None:
        """Close the connections that hang."""
        self._hung_up.set()

    def close(self) -> None:
        self.hang_up()
        self._server.shutdown()
        self._server.server_close()


class Stalling:
    """A TCP proxy. Once it stalls, each connection gets this many more bytes of the answers, and then nothing."""

    def __init__(self, port: int) -> None:
        self._target, self.left = port, math.inf
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._sockets = [self._listening]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                pair = self._listening.accept()[0], socket.create_connection(("127.0.0.1", self._target))
                self._sockets += pair
                for source, target, is_answer in ((*pair, False), (*pair[::-1], True)):
                    threading.Thread(target=self._forward, args=(source, target, is_answer), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        before = math.inf
        with suppress(OSError):
            while content := source.recv(1 << 16):
                before = self.left if before == math.inf else before
                part = content[: int(min(before, len(content)))] if is_answer else content
                before -= len(part) if is_answer else 0
                target.sendall(part)
            target.close()

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _await(connect: object) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            connect()  # type: ignore[operator]
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
