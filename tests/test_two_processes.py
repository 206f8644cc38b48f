"""Real processes on one store: warming at once, killed in the middle, reading meanwhile."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from conftest import messages, plain_logits, prepare, relative

from kvrag import BlendEngine, FileStore, Model

COMMON = """
import sys
sys.path.insert(0, {tests!r})
import conftest, test_two_processes as here
from kvrag import BlendEngine, FileStore
torch = here.torch
torch.set_num_threads(1)
engine = here.engine_on({folder!r})
"""

WARM = (
    COMMON
    + """
print("ready", flush=True)
for start in range(0, len(here.TEXTS), 3):
    engine.warm(here.TEXTS[start : start + 3])
    print(start, flush=True)
engine.close()
print("done", flush=True)
"""
)

READ = (
    COMMON
    + """
print("ready", flush=True)
ids = engine.model.tokenizer.render(conftest.messages(*here.TEXTS[:4]))
full = conftest.plain_logits(engine.model.hf, ids)[-1]
reused = 0
for line in sys.stdin:
    done = conftest.prepare(engine, ids, 1.0, "random")
    assert conftest.relative(done.logits[0], full) <= 1e-5
    assert not done.report(0.0).notes, done.report(0.0).notes
    assert done.report(0.0).reused_tokens >= reused
    reused = done.report(0.0).reused_tokens
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


def engine_on(folder: str) -> BlendEngine:
    """The tiny llama of conftest, made anew: the same weights in every process."""
    from families import build
    from transformers import AutoTokenizer

    import kvrag

    tokenizer = AutoTokenizer.from_pretrained(Path(kvrag.__file__).parent / "reader")
    model = Model(build("llama", max_position_embeddings=2048), tokenizer, "tiny")
    return BlendEngine(model, FileStore(folder, min_free_bytes=0))


def _start(code: str, folder: Path) -> subprocess.Popen[str]:
    code = code.format(tests=str(Path(__file__).parent), folder=str(folder))
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _expect(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == wanted


def _check(folder: Path, model: Model, hf: Any) -> None:
    """Everything is there, once, whole, and right."""
    keys = [model.fingerprint.chunk_key(model.tokenizer.encode(text)) for text in TEXTS]
    with BlendEngine(model, FileStore(folder, min_free_bytes=0)) as engine:
        store = engine.store
        assert isinstance(store, FileStore)
        report = engine.warm(TEXTS)
        assert report.chunks == len(set(keys))
        assert store.missing(keys) == []
        stats = store.stats()
        assert (stats.chunks, stats.damaged) == (len(set(keys)), 0)
        entries = [entry.key for entry in store.entries(0)]
        assert sorted(entries) == sorted(set(keys)), "nothing twice"
        assert stats.bytes == sum(path.stat().st_size for path in folder.glob("chunks/*/*.safetensors"))
        assert store.check() == (len(set(keys)), 0, 0)
        ids = model.tokenizer.render(messages(*TEXTS[5:12]))
        done = prepare(engine, ids, 1.0, "random")
        assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
        assert len({run.key for run in done.report(0.0).runs}) == 7


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
    _check(folder, model, hf)
    with (
        BlendEngine(model, FileStore(tmp_path / "own", min_free_bytes=0)) as own,
        BlendEngine(model, FileStore(folder, min_free_bytes=0)) as theirs,
    ):
        own.warm(TEXTS)
        ids = model.tokenizer.render(messages(*TEXTS[:6]))
        a, b = (prepare(engine, ids, 0.0, "none").logits for engine in (own, theirs))
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


def test_a_process_that_is_killed_again_and_again_damages_nothing(tmp_path: Path, model: Model, hf: Any) -> None:
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
    _check(folder, model, hf)
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


def test_killed_at_every_step_of_storing(tmp_path: Path, model: Model, hf: Any) -> None:
    """Not by chance, but right there."""
    code = WARM.replace('print("ready"', 'exec(KILL)\nprint("ready"')
    steps = ["fsync", "replace", "add", "hold"]
    processes = [
        _start(code.replace("exec(KILL)", f"exec(here.KILL.replace('STEP', '{step}'))"), tmp_path / step)
        for step in steps
    ]
    for process, step in zip(processes, steps, strict=True):
        assert process.wait(timeout=120) == -signal.SIGKILL
        _check(tmp_path / step, model, hf)
