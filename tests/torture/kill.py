"""`kill -9` at any moment while two processes warm, forget, learn, and answer prompts and edited ones on one store.

Each process owns some documents, and the texts of all of them overlap. It reports the beginning and the end of each
operation through a pipe, so that the parent can check the store after a kill. Half of the kills come at a random time,
the others right after a step of storing or deleting.

On a shared store, each process is a machine with its own local folder, and a third one examines the store.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from places import names_in, run_s3

import kvrag.store.shared
from kvrag import BlendEngine, FileStore, SharedStore
from kvrag.errors import KvragError
from kvrag.ingest.encode import encode
from kvrag.store.manifest import Manifest
from kvrag.store.objects import ObjectStore
from kvrag.store.values import text_key
from torture import tiny
from torture.campaign import Campaign

_PER_STORE = 10  # kills before a new store
_SECONDS = {"folder": 0.6, "s3": 2.0}  # of work before a process is killed, at most
_TEXTS = 24
Step = Callable[..., Any]
_STEPS: list[Step] = [os.fsync, os.replace, os.unlink, Manifest.add, Manifest.hold, Manifest.coldest, Manifest.remove]
_REMOTE_STEPS: list[Step] = [ObjectStore.write, ObjectStore.swap, ObjectStore.delete]
_SHARED_STEPS: list[Step] = [*_REMOTE_STEPS, os.replace, Manifest.add, Manifest.hold, Manifest.remove]


@dataclass
class _Journal:
    """Reports of the processes.

    Attributes:
        documents: Texts of each document after its last complete operation; None = an operation was interrupted.
        wrong: Answers that were not full prefill's, and errors.
    """

    documents: dict[str, list[int] | None] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def take(self, line: dict[str, Any]) -> None:
        if "wrong" in line:
            self.wrong.append(line["wrong"])
        else:
            self.documents[line["document"]] = line["texts"]


@dataclass
class _Store:
    """The store of some cases.

    Attributes:
        place: Folder or URL.
        budget: Its byte budget; of a shared store, of the local copies.
        caches: Parent folder of the machines' local copies.
    """

    kind: str
    place: str
    budget: int | None
    caches: Path

    def engine(self, machine: str, **settings: Any) -> BlendEngine:
        return tiny.engine(self.place, self.budget, self.caches / machine, **settings)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is evicted."""
        return self.budget is None or self.kind != "folder"


def run(campaign: Campaign) -> None:
    """Kill a process per case."""
    kind = campaign.options["store"]
    kvrag.store.shared._STALE_S = -1.0  # chunks without a row, which only `gc` in this process deletes
    fates: dict[str, int] = {"at a random time": 0, "after a step": 0}
    with _places(kind, campaign.folder) as place_of:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torture.kill_preload"])  # torch is imported once, not by each process
        journal, store = _Journal(), None
        for number in campaign.numbers():
            rng = campaign.random(number)
            if number % _PER_STORE == 0 or store is None:
                journal, budget = _Journal(), rng.choice([None, None, 900_000])
                store = _Store(kind, place_of(str(number)), budget, campaign.folder / "caches" / str(number))
            with campaign.case(number):
                step = rng.choice([None, rng.choice(_STEPS if kind == "folder" else _SHARED_STEPS)])
                fates["after a step" if step else "at a random time"] += 1
                _kill_one(context, rng, store, step, journal, number)
                _audit(store, journal, rng, number)
    campaign.result.figures |= fates | {"store": kind}


@contextmanager
def _places(kind: str, folder: Path) -> Iterator[Callable[[str], str]]:
    """Start the server of a shared store; yields a function from a store's name to its place."""
    if kind == "folder":
        yield lambda name: str(folder / name)
    else:
        with run_s3() as server:
            yield lambda name: server.url.replace("PLACE", f"kill-{name}")


def _kill_one(
    context: Any, rng: random.Random, store: _Store, step: Step | None, journal: _Journal, number: int
) -> None:
    """Let two processes work, kill one of them, and a moment later stop or kill the other one."""
    workers: list[tuple[BaseProcess, Connection]] = []
    for name in "ab":
        ours, theirs = context.Pipe()
        deadly = (step, rng.randrange(6)) if name == "a" else None
        process = context.Process(target=work, args=(theirs, store, name, f"{number}{name}", deadly))
        process.start()
        theirs.close()
        workers.append((process, ours))
    try:
        for _, pipe in workers:
            assert pipe.poll(120), "a process does not start"
            first = pipe.recv()
            assert first == "ready", f"a process does not start: {first}"
        for _, pipe in workers:
            pipe.send("begin")
        victim = workers[0][0]
        victim.join(2 if step else rng.random() * _SECONDS[store.kind])
        if victim.is_alive():
            os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join()
        assert victim.exitcode == -signal.SIGKILL, f"the victim ended with {victim.exitcode}"
        other, pipe = workers[1]
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.1)
            os.kill(other.pid or 0, signal.SIGKILL)
        else:
            pipe.send("stop")
        other.join(60)
        assert other.exitcode in (0, -signal.SIGKILL), f"the other process ended with {other.exitcode}"
    finally:
        for process, pipe in workers:
            process.kill()
            process.join()
            try:
                while pipe.poll():
                    journal.take(json.loads(pipe.recv()))
            except (EOFError, ConnectionResetError):  # that was all
                pass
            pipe.close()
    assert not journal.wrong, journal.wrong.pop()


def work(pipe: Connection, store: _Store, name: str, seed: str, deadly: tuple[Step | None, int] | None) -> None:
    """Warm, forget and answer until the end; report each operation's beginning and end."""
    rng = random.Random(seed)
    engine = store.engine(name, ram_bytes=rng.choice([0, 1 << 30]), learn=rng.random() < 0.5)
    pipe.send("ready")
    pipe.recv()
    if deadly and deadly[0]:
        _arm(engine.store, *deadly)
    while not pipe.poll():
        document, numbers = f"{name}{rng.randrange(4)}", rng.sample(range(_TEXTS), rng.randint(1, 5))
        kind = rng.choice(["warm", "warm", "forget", "answer", "talk"])
        try:
            if kind == "answer":
                tiny.check_answer(engine, tiny.prompt(numbers[:3]))
                continue
            if kind == "talk":
                tiny.check_edited_talk(engine, numbers[:3], rng)
                continue
            pipe.send(json.dumps({"document": document, "texts": None}))
            if kind == "warm":
                engine.warm(map(tiny.text, numbers), document=document)
            else:
                engine.forget(document)
            pipe.send(json.dumps({"document": document, "texts": numbers if kind == "warm" else []}))
        except (AssertionError, KvragError) as error:
            pipe.send(json.dumps({"wrong": f"{kind} failed: {type(error).__name__}: {error}"}))
    engine.close()


def _arm(store: Any, step: Step, count: int) -> None:
    """Kill this process right after one of the next calls of a function."""
    owner = type(store._remote) if step in _REMOTE_STEPS else Manifest if step in vars(Manifest).values() else os
    real, left = getattr(owner, step.__name__), [count]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, step.__name__, deadly)


# -------------------------------------------------------------------- what has to be there


def _audit(store: _Store, journal: _Journal, rng: random.Random, number: int) -> None:
    """Check that nothing is damaged, no reported chunk is missing, and nothing is stored twice."""
    machine = rng.choice(["c", f"c{number}"])  # a machine that used the store before, or a new one
    with store.engine(machine) as engine:
        _check_documents(engine, journal, store.keeps_all)
        held = engine.store
        assert isinstance(held, FileStore | SharedStore)
        texts = [entry.text_key for entry in held.entries(0)]
        assert len(texts) == len({*texts}), "a text is stored twice"
        if isinstance(held, FileStore):
            _age(held.path)
        if rng.random() < 0.5:
            held.gc()
        found = held.check()
        assert found.damaged == found.unreadable == 0, found
        held.gc()
        again = held.check()
        assert again.damaged == again.unreadable == 0, again
        sizes, stats = _sizes(held), held.stats()
        assert len(sizes) == stats.chunks == again.sound, (
            f"{len(sizes)} files, {stats.chunks} chunks, {again.sound} sound"
        )
        assert len({name.partition("-")[0] for name in sizes}) == len(sizes), "a chunk is stored twice"
        assert sum(sizes.values()) == stats.bytes
        if store.budget is not None:
            size = (held if isinstance(held, FileStore) else held._local).stats().bytes
            assert size <= store.budget, f"{size} bytes in a budget of {store.budget}"
        _check_documents(engine, journal, store.keeps_all)
        _check_values(engine, rng)
        tiny.check_answer(engine, tiny.prompt(rng.sample(range(_TEXTS), 3)))


def _age(folder: Path) -> None:
    """Make all files of chunks look as if the killed processes had left them an hour ago."""
    for path in folder.glob("chunks/*/*"):
        os.utime(path, (time.time() - 7200,) * 2)


def _sizes(store: FileStore | SharedStore) -> dict[str, int]:
    """Return name and size of all chunks, with and without a row."""
    if isinstance(store, SharedStore):
        names = names_in(store._remote, "chunks/")
        return {name.rpartition("/")[2]: store._remote.open(name)[0] for name in names}
    return {path.name: path.stat().st_size for path in store.path.glob("chunks/*/*")}


def _check_documents(engine: BlendEngine, journal: _Journal, keeps_all: bool) -> None:
    held = engine.store.documents()
    for document, numbers in journal.documents.items():
        if numbers is None:
            continue
        assert (document in held) == bool(numbers), f"{document} is {'there' if document in held else 'lost'}"
        if keeps_all:
            missing = engine.store.missing(held.get(document, []))
            assert not missing, f"{len(missing)} chunks of {document} are lost"
        texts = [text_key("", engine.encode(tiny.text(number))) for number in numbers]
        states = engine.store.look_up(texts)
        held_by_it = [key for state in states.values() for key in state.sources.get(document, "").split()]
        assert len(held_by_it) == len({*texts}), f"{document} has lost texts"


def _check_values(engine: BlendEngine, rng: random.Random) -> None:
    """Check that the KV of a chunk equals the model's."""
    keys = [key for keys in engine.store.documents().values() for key in keys]
    stored = sorted({*keys} - {*engine.store.missing(keys)})
    for key in rng.sample(stored, min(len(stored), 2)):
        reader = engine.store.open(key)
        assert reader is not None
        with closing(reader):
            context = reader.context.tolist()  # type: ignore[attr-defined]
            ((_, layers),) = encode(engine.model, [reader.ids.tolist()], [context])
            for number in range(reader.num_layers):
                for ours, theirs in zip(reader.layer(number), layers[number], strict=True):
                    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
