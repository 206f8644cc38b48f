"""The server process: socket, signals, shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kvrag.errors import SettingError


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that is not listening yet; port 0 = any free port. Raise SettingError if it is taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingError(f"port {port} of {host} is in use: choose another with --port") from None
        raise SettingError(f"cannot listen on port {port} of {host}: {error}") from None
    return taken


def url(taken: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def share_arenas() -> None:
    """Let all threads that start from now on share two of glibc's arenas: else each has one, which keeps memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(-8, 2)  # M_ARENA_MAX


class _Server(uvicorn.Server):
    """Rejects waiting requests as soon as it is stopped, while uvicorn lets pending answers finish."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        app: FastAPI = self.config.app  # type: ignore[assignment]
        # deferred: the signal may interrupt the admission of a request
        asyncio.get_running_loop().call_soon_threadsafe(app.state.kvrag.answering.close)
        # uvicorn's own handler raises the signal again at the end, which would skip the code after `run`
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def make_server(app: FastAPI, shutdown_timeout: float) -> uvicorn.Server:
    """Return a server for an app of `create_app`. `.run([socket])` runs it, `should_exit` stops it."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(shutdown_timeout)),
    )
    return _Server(config)
