"""Memory that the server's threads keep."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from kvrag import SettingError
from kvrag.cli import serve

SCRIPT = """
import ctypes, sys, threading
from kvrag.server.run import share_arenas

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "shared":
    share_arenas()
together = threading.Barrier(6)

def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


def _arenas(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True, env={})
    return done.stdout.count("<heap nr=")


def test_all_threads_share_two_arenas() -> None:
    assert _arenas("own") > 2
    assert _arenas("shared") == 2


def test_the_command_shares_them_before_the_engine_starts_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[str] = []

    def build(*_: object) -> None:
        order.append("engine")
        raise SettingError("enough")

    monkeypatch.setattr("kvrag.server.run.share_arenas", lambda: order.append("arenas"))
    monkeypatch.setattr(serve, "build", build)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(SettingError, match="enough"):
        serve.run(parser.parse_args(["--store", str(tmp_path), "--port", "0"]))
    assert order == ["arenas", "engine"]
