"""Processes on one store: their work, and their communication with a test."""

from __future__ import annotations

import os
import random
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from families import build
from records import HELPERS
from run_script import CONTEXT
from transformers import AutoTokenizer
from warmer import Warmer, warmer_on

import kvrag
from kvrag import Model

GGUF = "KVRAG_TEST_GGUF"
"""Environment variable with the path of a file that runs in llama.cpp in place of the tiny llama."""

COMMON = """
import sys
sys.path.insert(0, {helpers!r})
import blending, torch, processes as here
torch.set_num_threads(1)
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
import records as made
size = len(made.packed(made.record(0)))
store = made.opened({folder!r}, max_bytes=10 * size)
write, first = store._write, int(sys.stdin.readline())
def paused(record):
    if record.key == records[0].key:
        print("writing", flush=True)
        sys.stdin.readline()
    return write(record)
store._write = paused
records = [made.record(first + i) for i in range(8)]
store.put(records)
print("done", flush=True)
"""
)

EVICT = (
    COMMON
    + """
import os, signal
import records as made
store = made.opened({folder!r})
for line in sys.stdin:
    first, kills = map(int, line.split())
    unlink = store._delete
    def deadly(names):
        unlink(list(names)[:1])
        os.kill(os.getpid(), signal.SIGKILL)
    if kills:
        store._delete = deadly
    for i in range(first, first + 8):
        store.put([made.record(i, namespace="us")])
    print("done", flush=True)
"""
)

READ = (
    COMMON
    + """
from kvrag import BlendEngine, FileStore
engine = BlendEngine(here.fresh_model(), FileStore({folder!r}, min_free_bytes=0))
print("ready", flush=True)
ids = engine.model.tokenizer.render(blending.messages(*here.TEXTS[:4]))
full = blending.plain_logits(engine.model.hf, ids)[-1]
reused = 0
for line in sys.stdin:
    done = blending.prepare(engine, ids, 1.0, "random")
    assert blending.relative(done.logits[0], full) <= 1e-5
    assert not done.report.notes, done.report.notes
    assert done.report.stored_tokens >= reused
    reused = done.report.stored_tokens
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
    """A new copy of the tests' tiny llama, or of the GGUF file: the same weights in every process."""
    if path := os.environ.get(GGUF):
        return Model.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(Path(kvrag.__file__).parent / "reader")
    return Model(build("llama", max_position_embeddings=2048), tokenizer, "tiny")


def fresh_warmer(folder: str) -> Warmer:
    """An ingestion on this folder."""
    return warmer_on(fresh_model(), Path(folder))


class Process:
    """A process that runs code and starts quickly: what the tests need of `subprocess.Popen`."""

    def __init__(self, code: str) -> None:
        (stdin, writer), (reader, stdout) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_run, args=(code, stdin, stdout))
        self._process.start()
        self.stdin = os.fdopen(os.dup(writer.fileno()), "w")
        self.stdout = os.fdopen(os.dup(reader.fileno()))
        for end in (stdin, stdout, reader, writer):
            end.close()
        self.kill = self._process.kill

    def poll(self) -> int | None:
        """Return the exit code; None = it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; return the exit code."""
        self._process.join(timeout)
        return self.poll()


def _run(code: str, stdin: Connection, stdout: Connection) -> None:
    for number, end in enumerate((stdin, stdout)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    exec(code, {"__name__": "__main__"})


def start(code: str, folder: Path) -> Process:
    return Process(code.format(helpers=HELPERS, folder=str(folder)))


def tell(process: Process, line: str) -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def expect(process: Process, wanted: str) -> None:
    assert process.stdout.readline().strip() == wanted


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
