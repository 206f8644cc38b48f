"""`kill -9` at any moment while two processes warm, forget and answer on one store.

Each process owns some documents, and the texts of all of them overlap. It reports the beginning and the end of each
operation through a pipe, so that the parent knows what has to be there when a process is dead. Half of the kills come
at a random time, the others right behind a step of storing or deleting.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from kvrag import BlendEngine, FileStore
from kvrag.errors import KvragError
from kvrag.fingerprint import text_key
from kvrag.ingest.encode import encode
from kvrag.store.manifest import Manifest
from torture import tiny
from torture.campaign import Campaign

_PER_STORE = 10  # kills before a new store
_SECONDS = 0.6  # of work before a process is killed, at most
_TEXTS = 24
_STEPS = {
    "fsync": os,
    "replace": os,
    "unlink": os,
    "add": Manifest,
    "hold": Manifest,
    "evict": Manifest,
    "remove": Manifest,
}


@dataclass
class _Journal:
    """What the processes have reported.

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


def run(campaign: Campaign) -> None:
    """Kill a process per case."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torture.kill_preload"])  # torch is imported once, not by each process
    journal, place, budget = _Journal(), "", None
    fates: dict[str, int] = {"at a random time": 0, "behind a step": 0}
    for number in campaign.numbers():
        rng = campaign.random(number)
        if number % _PER_STORE == 0 or not place:
            journal, budget = _Journal(), rng.choice([None, None, 900_000])
            place = f"{campaign.options['store'] or campaign.folder}/{number}"
        with campaign.case(number):
            step = rng.choice([None, rng.choice([*_STEPS])])
            fates["behind a step" if step else "at a random time"] += 1
            _kill_one(context, rng, place, budget, step, journal, number)
            _audit(place, journal, rng, budget)
    campaign.result.figures |= fates


def _kill_one(
    context: Any, rng: random.Random, place: str, budget: int | None, step: str | None, journal: _Journal, number: int
) -> None:
    """Let two processes work, kill one of them, and a moment later stop the other one, sometimes by a kill, too."""
    workers: list[tuple[BaseProcess, Connection]] = []
    for name in "ab":
        ours, theirs = context.Pipe()
        deadly = (step, rng.randrange(6)) if name == "a" else None
        process = context.Process(target=work, args=(theirs, place, budget, name, f"{number}{name}", deadly))
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
        victim.join(2 if step else rng.random() * _SECONDS)
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


def work(
    pipe: Connection, place: str, budget: int | None, name: str, seed: str, deadly: tuple[str | None, int] | None
) -> None:
    """Warm, forget and answer until the end; reports what is begun and done."""
    rng = random.Random(seed)
    engine = tiny.engine(place, max_bytes=budget, ram_bytes=rng.choice([0, 1 << 30]))
    pipe.send("ready")
    pipe.recv()
    if deadly and deadly[0]:
        _arm(*deadly)
    while not pipe.poll():
        document, numbers = f"{name}{rng.randrange(4)}", rng.sample(range(_TEXTS), rng.randint(1, 5))
        kind = rng.choice(["warm", "warm", "forget", "answer"])
        try:
            if kind == "answer":
                tiny.check_answer(engine, tiny.prompt(numbers[:3]))
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


def _arm(name: str, count: int) -> None:
    """Die right behind one of the next calls of a function."""
    owner = _STEPS[name]
    real, left = getattr(owner, name), [count]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


# -------------------------------------------------------------------- what has to be there


def _audit(place: str, journal: _Journal, rng: random.Random, budget: int | None) -> None:
    """Nothing is damaged, nothing that was reported is missing, nothing is there twice."""
    with tiny.engine(place, max_bytes=budget) as engine:
        _check_documents(engine, journal, budget)
        store = engine.store
        assert isinstance(store, FileStore)
        texts = [entry.text for entry in store.entries(0)]
        assert len(texts) == len({*texts}), "a text is stored twice"
        for path in Path(place).glob("chunks/*/*"):  # as if the killed processes had left them an hour ago
            os.utime(path, (time.time() - 7200,) * 2)
        if rng.random() < 0.5:  # otherwise `check` takes over what has no row yet
            store.gc()
        found = store.check()
        assert found.damaged == found.repaired == found.unreadable == 0, found
        store.gc()
        again = store.check()
        assert again.damaged == again.repaired == again.unreadable == again.adopted == 0, again
        sizes = {path.name: path.stat().st_size for path in Path(place).glob("chunks/*/*")}
        stats = store.stats()
        assert len(sizes) == stats.chunks == again.sound, (
            f"{len(sizes)} files, {stats.chunks} chunks, {again.sound} sound"
        )
        assert len({name.partition("-")[0] for name in sizes}) == len(sizes), "a chunk is stored twice"
        assert sum(sizes.values()) == stats.bytes
        if budget is not None:
            assert stats.bytes <= budget, f"{stats.bytes} bytes in a budget of {budget}"
        _check_documents(engine, journal, budget)
        _check_values(engine, rng)
        tiny.check_answer(engine, tiny.prompt(rng.sample(range(_TEXTS), 3)))


def _check_documents(engine: BlendEngine, journal: _Journal, budget: int | None) -> None:
    held = engine.store.documents()
    for document, numbers in journal.documents.items():
        if numbers is None:
            continue
        assert (document in held) == bool(numbers), f"{document} is {'there' if document in held else 'lost'}"
        if budget is None:
            missing = engine.store.missing(held.get(document, []))
            assert not missing, f"{len(missing)} chunks of {document} are lost"
        texts = [text_key("", engine.encode(tiny.text(number))) for number in numbers]
        states = engine.store.look_up(texts)
        held_by_it = [key for state in states.values() for key in state.sources.get(document, "").split()]
        assert len(held_by_it) == len({*texts}), f"{document} has lost texts"


def _check_values(engine: BlendEngine, rng: random.Random) -> None:
    """The KV of a chunk is what the model computes."""
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
