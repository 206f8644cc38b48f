"""Real processes on one store: warming at once, killed in the middle, reading meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
from blending import messages, prepare
from processes import EVICT, FILL, READ, SHARE, TEXTS, WARM, expect, start, tell
from records import opened, packed, record
from warmer import OTHER_SECRET, SECRET, SHARED, encoded_alone, warmer_on

from kvrag import BlendEngine, FileStore, Model
from kvrag.store import StoreCheck


def _check(folder: Path, model: Model) -> None:
    """Check that everything is stored, once, complete and correct."""
    warmer = warmer_on(model, folder)
    store = warmer.store
    report = warmer.warm(*TEXTS)
    keys = {warmer.alone(text) for text in TEXTS}
    assert report.chunks == len(keys)
    assert {warmer.served(text) for text in TEXTS} == keys
    stats = store.stats()
    assert (stats.chunks, stats.damaged) == (len(keys), 0)
    entries = [entry.text_key for entry in store.entries(0)]
    assert sorted(entries) == sorted({warmer.text(text) for text in TEXTS}), "nothing twice"
    assert store.check() == StoreCheck(sound=len(keys), damaged=0, unreadable=0)
    for path in folder.glob("chunks/*/*"):  # leftovers of killed writers
        os.utime(path, (time.time() - 7200,) * 2)
    store.gc()
    assert stats.bytes == sum(path.stat().st_size for path in folder.glob("chunks/*/*"))
    for text in TEXTS[5:12]:
        torch.testing.assert_close(warmer.values(text), encoded_alone(model, text), atol=1e-4, rtol=1e-4)
    store.close()


def test_two_processes_that_warm_a_shared_text_leave_it_alone(tmp_path: Path, model: Model) -> None:
    """The second process encodes it alone before it ends; it is never missing, or with one document's context."""
    processes = [start(SHARE, tmp_path / "kv") for _ in range(2)]
    warmer = warmer_on(model, tmp_path / "kv")
    try:
        for process in processes:
            expect(process, "ready")
        for number in range(20):
            shared = f"Number {number}. {SHARED}"
            for process, name, secret in zip(processes, "ab", (SECRET, OTHER_SECRET), strict=True):
                process.stdin.write(f"{name}{number}|{name} {secret}|{shared}\n")
            for process in processes:
                process.stdin.flush()
            seen = {process.stdout.readline().strip() for process in processes}
            assert "True" in seen, number
            assert warmer.served(shared) == warmer.alone(shared), number
            torch.testing.assert_close(warmer.values(shared), encoded_alone(model, shared), atol=1e-4, rtol=1e-4)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        warmer.store.close()


def test_two_processes_that_fill_a_store_stay_within_its_budget(tmp_path: Path) -> None:
    """Both free space before either of them has stored anything."""
    processes = [start(FILL, tmp_path) for _ in range(2)]
    try:
        for process, first in zip(processes, (0, 100), strict=True):
            tell(process, str(first))
        for process in processes:
            expect(process, "writing")
        for process in processes:
            tell(process, "go")
            expect(process, "done")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    size = len(packed(record(0)))
    store = FileStore(tmp_path, min_free_bytes=0)
    assert 8 * size <= store.stats().bytes <= 10 * size
    assert not store.missing([record(100 + i).key for i in range(8)]), "the oldest chunks make room"
    assert len(list(tmp_path.glob("chunks/*/*"))) == store.stats().chunks
    store.close()


def test_processes_share_a_budget_and_one_that_is_killed_while_it_evicts_damages_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    size = store.put([record(500, namespace="us")])
    store.put([record(500, namespace="them")])
    store.set_budget("us", 6 * size + 200)
    processes = [start(EVICT, tmp_path) for _ in range(2)]
    try:
        for process, first in zip(processes, (1000, 2000), strict=True):
            tell(process, f"{first} 0")
        for process in processes:
            expect(process, "done")
        assert 3 * size <= store._manifest.num_bytes("us") <= 6 * size + 200
        tell(processes[0], "3000 1")
        assert processes[0].wait(timeout=60) == -signal.SIGKILL
        tell(processes[1], "4000 0")
        expect(processes[1], "done")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    check = store.check()
    assert (check.damaged, check.unreadable) == (0, 0)
    assert store.set_budget("us", 2 * size + 200) > 0
    stats = {part.namespace: part for part in store.stats().namespaces}
    assert stats["us"].bytes <= 2 * size + 200
    assert stats["them"].chunks == 1
    store.close()


def test_two_processes_warm_the_same_corpus_while_a_third_reads(tmp_path: Path, model: Model, hf: Any) -> None:
    folder = tmp_path / "kv"
    processes = [start(WARM, folder), start(WARM, folder), start(READ, folder)]
    first, second, reader = processes
    try:
        for process in processes:
            expect(process, "ready")
        seen = []
        while first.poll() is None or second.poll() is None or len(seen) < 2:
            reader.stdin.write("again\n")
            reader.stdin.flush()
            seen.append(int(reader.stdout.readline()))
        tell(reader, "again")
        assert int(reader.stdout.readline()) >= seen[-1] > 100, "the reader sees what others have stored"
        assert seen == sorted(seen)
        assert first.wait() == second.wait() == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    _check(folder, model)
    with (
        BlendEngine(model, FileStore(tmp_path / "own", min_free_bytes=0)) as own,
        BlendEngine(model, FileStore(folder, min_free_bytes=0)) as theirs,
    ):
        own.warm(TEXTS)
        ids = model.tokenizer.render(messages(*TEXTS[:6]))
        a, b = (prepare(engine, ids, 0.0, "none").logits for engine in (own, theirs))
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


def test_a_process_that_is_killed_again_and_again_damages_nothing(tmp_path: Path, model: Model) -> None:
    folder = tmp_path / "kv"
    rng = random.Random(1)
    steady = start(WARM, folder)
    victims = [start(WARM.replace("warmer.warm(", "sys.stdin.read(1); warmer.warm("), folder) for _ in range(3)]
    try:
        for victim in victims:
            expect(victim, "ready")
            tell(victim, "\n" * 4)  # steps that it may take
            time.sleep(rng.random() * 0.2)
            victim.kill()
            assert victim.wait() == -signal.SIGKILL
        assert steady.wait(timeout=120) == 0
    finally:
        for process in (steady, *victims):
            process.kill()
            process.wait()
    _check(folder, model)
    for path in folder.rglob("*.tmp"):
        swept = path.parent == folder or path.parent.parent.name == "chunks"
        assert swept, "leftovers of a killed writer are where `gc` finds them"
        assert path.name.startswith(".")


def test_killed_at_every_step_of_storing(tmp_path: Path, model: Model) -> None:
    """Kill the process at exactly this step."""
    code = WARM.replace('print("ready"', 'exec(KILL)\nprint("ready"')
    steps = ["fsync", "replace", "add", "hold"]
    processes = [
        start(code.replace("exec(KILL)", f"exec(here.KILL.replace('STEP', '{step}'))"), tmp_path / step)
        for step in steps
    ]
    for process, step in zip(processes, steps, strict=True):
        assert process.wait(timeout=120) == -signal.SIGKILL
        _check(tmp_path / step, model)
