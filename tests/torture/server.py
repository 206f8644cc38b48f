"""A real server in its own process, and measurements of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
MODEL = "reader"
SERVE = ("kvrag.cli.main", "serve", "--model", MODEL, "--port", 0, "--json", "--shutdown-timeout", 5)


@dataclass(frozen=True)
class Usage:
    """Resources of a process: resident bytes, open files, threads."""

    memory: int
    files: int
    threads: int


@dataclass
class Server:
    """A server under torture."""

    process: subprocess.Popen[str]
    url: str
    http: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        """For a socket."""
        return self.http.base_url.host, self.http.base_url.port or 80

    def usage(self) -> Usage:
        """Read the resources from /proc."""
        place = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        memory = int(status["VmRSS"].split()[0]) << 10
        return Usage(memory, len(os.listdir(place / "fd")), int(status["Threads"]))

    def busy(self) -> int:
        """Return the number of requests running or waiting."""
        health = self.http.get("/health").json()
        return int(health["running"]) + int(health["waiting"])

    def settle(self, seconds: float = 60.0) -> int:
        """Wait until no request runs or waits; return how many still do."""
        end = time.monotonic() + seconds
        while (busy := self.busy()) and time.monotonic() < end:
            time.sleep(0.1)
        return busy

    def ask(self, question: str, **changes: Any) -> str:
        """Return a greedy answer."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 4}
        answered = self.http.post("/v1/chat/completions", json=body | changes).raise_for_status()
        return str(answered.json()["choices"][0]["message"]["content"])


@contextmanager
def serving(log: Path, *command: object) -> Iterator[Server]:
    """Run `python -m COMMAND`, which prints its address as JSON, until the context ends; `log` gets its messages."""
    argv = [sys.executable, "-m", *map(str, command)]
    with log.open("w") as messages:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=messages, text=True, cwd=ROOT)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"the server does not start: {log.read_text()[-500:]}"
            url = json.loads(line)["url"]
            with httpx.Client(base_url=url, timeout=120) as http:
                yield Server(process, url, http)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
