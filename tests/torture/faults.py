"""Faults of the operating system below the store: the answer is right, or there is one KvragError.

Functions of `os`, `sqlite3`, `shutil` and `time` are replaced while a case runs. A fault hits only files of the case's
store. After the fault, the same engine and a new one must answer as if nothing had happened, and no intact chunk may
have been deleted.
"""

from __future__ import annotations

import builtins
import errno
import gc
import io
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kvrag import BlendEngine
from kvrag.errors import KvragError
from kvrag.store import schema
from torture import tiny
from torture.campaign import Campaign

_ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EMFILE": errno.EMFILE, "EACCES": errno.EACCES}
_SQLITE = {
    "EIO": ("disk I/O error", sqlite3.SQLITE_IOERR),
    "ENOSPC": ("database or disk is full", sqlite3.SQLITE_FULL),
    "EMFILE": ("unable to open database file", sqlite3.SQLITE_CANTOPEN),
    "EACCES": ("attempt to write a readonly database", sqlite3.SQLITE_READONLY),
}
_DOCUMENTS = {"a": [0, 1, 2, 3], "b": [4, 5]}
_KINDS = [*_ERRORS, *_ERRORS, "short reads", "slow reads", "clock"]

Decide = Callable[[], bool]


def run(campaign: Campaign) -> None:
    """Inject one kind of fault per case."""
    intact = campaign.folder / "intact"
    with tiny.engine(intact) as engine:
        for name, numbers in _DOCUMENTS.items():
            engine.warm(map(tiny.text, numbers), document=name)
    for number in campaign.numbers():
        rng = campaign.random(number)
        folder = campaign.folder / "kv"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(intact, folder)
        with campaign.case(number):
            _case(campaign, rng, folder)


def _case(campaign: Campaign, rng: random.Random, folder: Path) -> None:
    kind, rate = rng.choice(_KINDS), rng.choice([0.02, 0.1, 0.5, 1.0])
    before = _open_files()
    ram_bytes, is_open = rng.choice([0, 1 << 30]), rng.random() < 0.5
    steps, outcomes = [rng.choice(_STEPS) for _ in range(rng.randint(2, 6))], []
    engine = None
    try:
        if is_open:
            engine = tiny.engine(folder, ram_bytes=ram_bytes)
        with faults(kind, folder, lambda: rng.random() < rate):
            for step in [_open, *steps]:
                try:
                    if engine is None:
                        engine = tiny.engine(folder, ram_bytes=ram_bytes)
                    step(engine, rng)
                    outcomes.append("done")
                except KvragError as error:
                    outcomes.append(type(error).__name__)
                except Exception as error:
                    what = f"{kind}, rate {rate}, {step.__name__.strip('_')}: {type(error).__name__}: {error}"
                    raise AssertionError(what) from error
        if engine is not None:
            try:
                tiny.check_answer(engine, tiny.prompt([1, 4, 2]))
            except Exception as error:
                raise AssertionError(f"{kind}, rate {rate}, when it was over: {error}") from error
    finally:
        if engine is not None:
            engine.close()
    with tiny.engine(folder) as engine:
        tiny.check_answer(engine, tiny.prompt([1, 4, 2]))
        assert engine.store.stats().damaged == 0, f"{kind}, rate {rate}, {outcomes}: an intact chunk was deleted"
        assert engine.store.check().damaged == 0, f"{kind}, rate {rate}: damage after {outcomes}"  # type: ignore[attr-defined]
        name = rng.choice("ab")
        engine.warm(map(tiny.text, _DOCUMENTS[name]), document=name)
        tiny.check_answer(engine, tiny.prompt(_DOCUMENTS[name]))
    gc.collect()
    if (after := _open_files()) > before + 3:
        raise AssertionError(f"{kind}: {after - before} more files are open")
    for outcome in set(outcomes):
        campaign.kinds[f"{kind}: {outcome}"] += 1


# -------------------------------------------------------------------- what is done meanwhile


def _open(engine: BlendEngine, rng: random.Random) -> None:
    """Only open the store."""


def _ask(engine: BlendEngine, rng: random.Random) -> None:
    tiny.check_answer(engine, tiny.prompt(rng.choice([[1, 4, 2], [0, 5], [3, 2, 1]])))


def _ask_with_documents(engine: BlendEngine, rng: random.Random) -> None:
    number = rng.randrange(10, 14)
    tiny.check_answer(engine, tiny.prompt([number, 1]), documents=[tiny.text(number), tiny.text(1)])


def _warm(engine: BlendEngine, rng: random.Random) -> None:
    report = engine.warm([tiny.text(rng.randrange(30)) for _ in range(3)], document=rng.choice("abx"))
    assert report.chunks, "nothing was warmed"


def _forget(engine: BlendEngine, rng: random.Random) -> None:
    engine.forget(rng.choice("abx"))


def _look(engine: BlendEngine, rng: random.Random) -> None:
    engine.documents()
    engine.store.stats()
    engine.explain(tiny.prompt([1, 4]))


def _maintain(engine: BlendEngine, rng: random.Random) -> None:
    store: Any = engine.store
    rng.choice([store.check, store.gc])()


_STEPS = [_ask, _ask, _ask, _ask_with_documents, _warm, _warm, _forget, _look, _maintain]

# -------------------------------------------------------------------- the faults


@contextmanager
def faults(kind: str, folder: Path, decide: Decide) -> Iterator[None]:
    """Replace the functions that the store calls, until the context ends."""
    is_on = True  # connections that are opened meanwhile stay open

    def decides() -> bool:
        return is_on and decide()

    with ExitStack() as stack:
        for name, function in _os_functions(kind, folder, decides).items():
            stack.enter_context(mock.patch.object(os, name, function))
        stack.enter_context(_others(kind, folder, decides))
        yield
    is_on = False


def _is_below(folder: Path, file: Any) -> bool:
    """Whether a path or a descriptor belongs to the store."""
    try:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
    except (OSError, TypeError):
        return False
    return str(path).startswith(str(folder))


def _os_functions(kind: str, folder: Path, decide: Decide) -> dict[str, Any]:
    if kind in _ERRORS:
        reads, writes = ["open", "preadv", "stat"], ["open", "fsync", "replace", "link", "mkdir"]
        names = {"EIO": [*reads, *writes], "ENOSPC": writes[1:], "EMFILE": ["open"], "EACCES": ["open", "replace"]}[
            kind
        ]
        return {name: _failing(getattr(os, name), _ERRORS[kind], folder, decide) for name in {*names}}
    if kind == "short reads":
        return {"preadv": _short_preadv(folder, decide)}
    if kind == "slow reads":
        return {"preadv": _slow(os.preadv, folder, decide)}
    return {}


def _failing(real: Callable[..., Any], number: int, folder: Path, decide: Decide) -> Callable[..., Any]:
    def failing(file: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_below(folder, file) and decide():
            raise OSError(number, os.strerror(number), None if isinstance(file, int) else os.fspath(file))
        return real(file, *args, **kwargs)

    return failing


def _short_preadv(folder: Path, decide: Decide, real: Callable[..., int] = os.preadv) -> Callable[..., int]:
    def preadv(file: int, buffers: list[Any], offset: int) -> int:
        if _is_below(folder, file) and decide():
            buffers = [memoryview(buffers[0])[: max(1, len(buffers[0]) // 3)]]
        return real(file, buffers, offset)

    return preadv


def _slow(real: Callable[..., Any], folder: Path, decide: Decide) -> Callable[..., Any]:
    def slow(file: Any, *args: Any) -> Any:
        if _is_below(folder, file) and decide():
            time.sleep(0.002)
        return real(file, *args)

    return slow


@contextmanager
def _others(kind: str, folder: Path, decide: Decide) -> Iterator[None]:
    """SQLite, files opened by Python itself, the free space, and the clock."""
    if kind == "clock":
        real, jump = time.time, [0.0]

        def jumping() -> float:
            if decide():
                jump[0] = random.choice([-1e9, -86400.0, -1.0, 3600.0, 1e9])
            return real() + jump[0]

        with mock.patch.object(time, "time", jumping):
            yield
    elif kind in _ERRORS:
        message, code = _SQLITE[kind]

        class Connection(schema.SQLiteFile):
            def execute(self, *args: Any) -> Any:
                if args[0].split()[0] not in ("ROLLBACK", "COMMIT") and decide():
                    error = sqlite3.OperationalError(message)
                    error.sqlite_errorcode = code  # type: ignore[misc]
                    raise error
                return super().execute(*args)

        number, plain = _ERRORS[kind], builtins.open

        def failing_open(file: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_below(folder, file) and not isinstance(file, int) and decide():
                raise OSError(number, os.strerror(number), os.fspath(file))
            return plain(file, *args, **kwargs)

        with (
            mock.patch.object(schema, "SQLiteFile", Connection),
            mock.patch.object(builtins, "open", failing_open),
            mock.patch.object(io, "open", failing_open),
        ):
            yield
    else:
        yield


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
