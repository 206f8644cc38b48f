"""Real processes on one store: warming at once, killed in the middle, reading meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from conftest import messages, prepare
from test_ingest import OTHER_SECRET, SECRET, SHARED, Warmer, encoded_alone, warmer_on
from test_store import opened, packed, record

from kvrag import BlendEngine, FileStore, Model
from kvrag.store import StoreCheck

COMMON = """
import sys
sys.path.insert(0, {tests!r})
import conftest, test_two_processes as here
here.torch.set_num_threads(1)
"""

WARM = (
    COMMON
    + """
warmer = here.fresh_warmer({folder!r})
print("ready", flush=True)
for start in range(0, len(here.TEXTS), 3):
    warmer.warm(*here.TEXTS[start : start + 3])
    print(start, flush=True)
warmer.store.close()
print("done", flush=True)
"""
)

SHARE = (
    COMMON
    + """
warmer = here.fresh_warmer({folder!r})
print("ready", flush=True)
for line in sys.stdin:
    name, secret, shared = line.rstrip().split("|")
    warmer.warm(secret, shared, document=name)
    print(warmer.served(shared) == warmer.alone(shared), flush=True)
"""
)

FILL = (
    COMMON
    + """
from kvrag.store import FileStore
import test_store
size = len(test_store.packed(test_store.record(0)))
store = test_store.opened({folder!r}, max_bytes=10 * size)
write, first = store._write, int(sys.stdin.readline())
def paused(record):
    if record.key == records[0].key:
        print("writing", flush=True)
        sys.stdin.readline()
    return write(record)
store._write = paused
records = [test_store.record(first + i) for i in range(8)]
store.put(records)
print("done", flush=True)
"""
)

EVICT = (
    COMMON
    + """
import os, signal
import test_store
store = test_store.opened({folder!r})
for line in sys.stdin:
    first, kills = map(int, line.split())
    unlink = store._unlink
    def deadly(names):
        unlink(list(names)[:1])
        os.kill(os.getpid(), signal.SIGKILL)
    if kills:
        store._unlink = deadly
    for i in range(first, first + 8):
        store.put([test_store.record(i, namespace="us")])
    print("done", flush=True)
"""
)

READ = (
    COMMON
    + """
engine = here.BlendEngine(here.fresh_model(), here.FileStore({folder!r}, min_free_bytes=0))
print("ready", flush=True)
ids = engine.model.tokenizer.render(conftest.messages(*here.TEXTS[:4]))
full = conftest.plain_logits(engine.model.hf, ids)[-1]
reused = 0
for line in sys.stdin:
    done = conftest.prepare(engine, ids, 1.0, "random")
    assert conftest.relative(done.logits[0], full) <= 1e-5
    assert not done.report.notes, done.report.notes
    assert done.report.reused_tokens >= reused
    reused = done.report.reused_tokens
    print(reused, flush=True)
"""
)


def _texts(count: int = 36) -> list[str]:
    rng = random.Random(0)
    names = ["Mira Brel", "Kan Dror", "Zel Vinford", "Tran Works", "Florton", "Stelburg", "Grelville"]
    return [
        " ".join(
            f"{rng.choice(names)} met {rng.choice(names)} in {rng.choice(names)} in {rng.randrange(1900, 2000)}."
            for _ in range(rng.randrange(3, 9))
        )
        for _ in range(count)
    ]


TEXTS = _texts()


def fresh_model() -> Model:
    """The tiny llama of conftest, made anew: the same weights in every process."""
    from families import build
    from transformers import AutoTokenizer

    import kvrag

    tokenizer = AutoTokenizer.from_pretrained(Path(kvrag.__file__).parent / "reader")
    return Model(build("llama", max_position_embeddings=2048), tokenizer, "tiny")


def fresh_warmer(folder: str) -> Warmer:
    """An ingestion on this folder."""
    return warmer_on(fresh_model(), Path(folder))


def _start(code: str, folder: Path) -> subprocess.Popen[str]:
    code = code.format(tests=str(Path(__file__).parent), folder=str(folder))
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _expect(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == wanted


def _check(folder: Path, model: Model) -> None:
    """Everything is there, once, whole, and right."""
    warmer = warmer_on(model, folder)
    store = warmer.store
    report = warmer.warm(*TEXTS)
    keys = {warmer.alone(text) for text in TEXTS}
    assert report.chunks == len(keys)
    assert {warmer.served(text) for text in TEXTS} == keys
    stats = store.stats()
    assert (stats.chunks, stats.damaged) == (len(keys), 0)
    entries = [entry.text for entry in store.entries(0)]
    assert sorted(entries) == sorted({warmer.text(text) for text in TEXTS}), "nothing twice"
    assert store.check() == StoreCheck(sound=len(keys), damaged=0, adopted=0, repaired=0, unreadable=0)
    for path in folder.glob("chunks/*/*"):  # what killed writers have left
        os.utime(path, (time.time() - 7200,) * 2)
    store.gc()
    assert stats.bytes == sum(path.stat().st_size for path in folder.glob("chunks/*/*"))
    for text in TEXTS[5:12]:
        torch.testing.assert_close(warmer.values(text), encoded_alone(model, text), atol=1e-4, rtol=1e-4)
    store.close()


def test_two_processes_that_warm_a_shared_text_leave_it_alone(tmp_path: Path, model: Model) -> None:
    """Whoever comes second sees to it before he is done; never is it missing, or behind one document's words."""
    processes = [_start(SHARE, tmp_path / "kv") for _ in range(2)]
    warmer = warmer_on(model, tmp_path / "kv")
    try:
        for process in processes:
            _expect(process, "ready")
        for number in range(20):
            shared = f"Number {number}. {SHARED}"
            for process, name, secret in zip(processes, "ab", (SECRET, OTHER_SECRET), strict=True):
                assert process.stdin is not None
                process.stdin.write(f"{name}{number}|{name} {secret}|{shared}\n")
            for process in processes:
                assert process.stdin is not None
                process.stdin.flush()
            seen = {process.stdout.readline().strip() for process in processes if process.stdout}
            assert "True" in seen, number
            assert warmer.served(shared) == warmer.alone(shared), number
            torch.testing.assert_close(warmer.values(shared), encoded_alone(model, shared), atol=1e-4, rtol=1e-4)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        warmer.store.close()


def test_two_processes_that_fill_a_store_stay_within_its_budget(tmp_path: Path) -> None:
    """Both have made room before either of them has stored anything."""
    processes = [_start(FILL, tmp_path) for _ in range(2)]
    try:
        for process, first in zip(processes, (0, 100), strict=True):
            _tell(process, str(first))
        for process in processes:
            _expect(process, "writing")
        for process in processes:
            _tell(process, "go")
            _expect(process, "done")
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
    processes = [_start(EVICT, tmp_path) for _ in range(2)]
    try:
        for process, first in zip(processes, (1000, 2000), strict=True):
            _tell(process, f"{first} 0")
        for process in processes:
            _expect(process, "done")
        assert 3 * size <= store._manifest.num_bytes("us") <= 6 * size + 200
        _tell(processes[0], "3000 1")
        assert processes[0].wait(timeout=60) == -signal.SIGKILL
        _tell(processes[1], "4000 0")
        _expect(processes[1], "done")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    check = store.check()
    assert (check.damaged, check.repaired, check.unreadable) == (0, 0, 0)
    assert store.set_budget("us", 2 * size + 200) > 0
    stats = {part.namespace: part for part in store.stats().namespaces}
    assert stats["us"].bytes <= 2 * size + 200
    assert stats["them"].chunks == 1
    store.close()


def test_two_processes_warm_the_same_corpus_while_a_third_reads(tmp_path: Path, model: Model, hf: Any) -> None:
    folder = tmp_path / "kv"
    processes = [_start(WARM, folder), _start(WARM, folder), _start(READ, folder)]
    first, second, reader = processes
    try:
        for process in processes:
            _expect(process, "ready")
        seen = []
        while first.poll() is None or second.poll() is None or len(seen) < 2:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write("again\n")
            reader.stdin.flush()
            seen.append(int(reader.stdout.readline()))
        assert seen[-1] > 100, "the reader sees what others have stored"
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
    steady = _start(WARM, folder)
    victims = [_start(WARM, folder) for _ in range(3)]
    try:
        for victim in victims:
            _expect(victim, "ready")
            time.sleep(rng.random() * 0.2)
            victim.send_signal(signal.SIGKILL)
            assert victim.wait() == -signal.SIGKILL
        assert steady.wait(timeout=120) == 0
    finally:
        for process in (steady, *victims):
            process.kill()
            process.wait()
    _check(folder, model)
    for path in folder.rglob("*.tmp"):
        swept = path.parent == folder or path.parent.parent.name == "chunks"
        assert swept, "what is left of a killed writer is where it will be swept"
        assert path.name.startswith(".")


KILL = """
import os, signal
from kvrag.store.manifest import Manifest
owner = {"fsync": os, "replace": os, "add": Manifest, "hold": Manifest}["STEP"]
real, calls = getattr(owner, "STEP"), iter(range(1000))
def deadly(*args, **kwargs):
    number = next(calls)
    result = real(*args, **kwargs)
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, "STEP", deadly)
"""


def test_killed_at_every_step_of_storing(tmp_path: Path, model: Model) -> None:
    """Not by chance, but right there."""
    code = WARM.replace('print("ready"', 'exec(KILL)\nprint("ready"')
    steps = ["fsync", "replace", "add", "hold"]
    processes = [
        _start(code.replace("exec(KILL)", f"exec(here.KILL.replace('STEP', '{step}'))"), tmp_path / step)
        for step in steps
    ]
    for process, step in zip(processes, steps, strict=True):
        assert process.wait(timeout=120) == -signal.SIGKILL
        _check(tmp_path / step, model)
