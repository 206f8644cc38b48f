"""A process that is killed, a compiled model, and starts that fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import CHUNKS, checkpoint, distance, prompt_of, reference, started, text_of
from vllm_kvrag.connector import open_store
from vllm_kvrag.params import ConnectorSettings

from kvrag import FileStore
from kvrag.errors import FingerprintMismatchError, KvragError

NEAR = 1e-4
HERE = Path(__file__).parent


def test_reported_chunks_survive_a_kill(folder: Path, tmp_path: Path) -> None:
    model = checkpoint("llama", folder)
    script = [sys.executable, str(HERE / "run_warm.py"), str(model), str(tmp_path)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        warmed = list(islice((line.strip() for line in process.stdout if line.startswith("d")), 7))
        process.send_signal(signal.SIGKILL)
        warmed += [line.strip() for line in process.stdout if line.startswith("d")]
    assert len(warmed) >= 7
    store = FileStore(tmp_path)
    check = store.check()
    assert not check.damaged
    documents = store.documents()
    for name in warmed:
        assert len(documents[name]) == 3
        assert not store.missing(documents[name])
    store.close()
    with reference(model, tmp_path) as own:  # the KV is what transformers computes
        number = int(warmed[-1][1:])
        report = own.warm([text_of(100 * number + part) for part in range(3)], document=warmed[-1])
        assert report.new == 0


def test_a_compiled_model(folder: Path, tmp_path: Path) -> None:
    model = checkpoint("llama", folder, num_hidden_layers=2)
    with reference(model, tmp_path) as own:
        own.warm(CHUNKS[:3], document="a")
    with started(model, tmp_path, enforce_eager=False) as engine:
        prompt = prompt_of(*reversed(CHUNKS[:3]))
        full = engine.full(prompt, 4)
        done = engine.ask(prompt, 4, policy="query", ratio=1.0)
        assert done.report is not None
        assert done.report["reused_tokens"] + done.report["recomputed_tokens"] > 100
        assert distance(done.logprobs, full.logprobs) < NEAR
        assert done.tokens == full.tokens


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"worker_cls": None}, "worker-cls"),
        ("mistral-window", {}, "window only"),
    ],
)
def test_vllm_serves_as_usual_where_it_cannot_blend(
    family: str, changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    model = checkpoint(family, folder)
    with reference(model, tmp_path) as own:
        own.warm(CHUNKS[:2], document="a")
    with started(model, tmp_path, **changes) as engine:
        for given in ({"ratio": 0.15}, {"mode": "warm", "document": "b"}, {"mode": "forget", "document": "a"}):
            done = engine.ask(prompt_of(*CHUNKS[:2]), 3, **given)
            assert len(done.tokens) == 3
            assert done.report is not None
            assert reason in done.report["error"]
        assert engine.ask(prompt_of(*CHUNKS[:2]), 3).report is None
    assert list(FileStore(tmp_path).documents()) == ["a"]


def test_a_store_of_another_model_stops_the_start(folder: Path, tmp_path: Path) -> None:
    with reference(checkpoint("qwen2", folder), tmp_path) as own:
        own.warm(CHUNKS[:1], document="a")
    with pytest.raises(FingerprintMismatchError), started(checkpoint("llama", folder), tmp_path):
        pass


@pytest.mark.parametrize("extra", [{"store": "/proc/kvrag"}, {"raito": 0.1}])
def test_wrong_settings_stop_the_start(extra: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(KvragError), started(checkpoint("llama", folder), tmp_path, extra):
        pass


@pytest.mark.parametrize("store", ["/dev/null/kv", ""])
def test_a_folder_that_cannot_be_a_store_is_refused(store: str) -> None:
    with pytest.raises(KvragError):
        open_store(ConnectorSettings.of({"store": store}))
