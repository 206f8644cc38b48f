"""Tensor parallelism, processes that are killed, compiled models, and starts that fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import CHUNKS, checkpoint, distance, lines, prompt_of, reference, started, text_of
from vllm_kvrag.connector import open_store
from vllm_kvrag.params import ConnectorSettings

from kvrag import FileStore
from kvrag.errors import FingerprintMismatchError, KvragError

NEAR = 1e-4
HERE = Path(__file__).parent


def test_two_processes_blend_as_one_does(folder: Path, tmp_path: Path) -> None:
    model = checkpoint("llama", folder)
    script = [sys.executable, str(HERE / "run_parallel.py"), str(model), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = {}
    policies = 0
    for line in lines(done.stdout):
        if "policy" in line:
            policies += 1
            assert line["difference"] < NEAR, line
            assert line["same counts"], line
        seen |= line
    assert policies == 4
    assert seen["new"] == [1, 1, 1]
    assert max(seen["mixed"]) < NEAR
    assert seen["same keys"]
    assert seen["damaged"] < NEAR
    assert len(seen["notes"]) == 1
    assert seen["forgotten"] == 1


def test_a_process_that_fails_ends_the_request_in_both(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one would wait in a collective forever; vLLM computes the prompt."""
    monkeypatch.setenv("KVRAG_FAIL", str(tmp_path / "fail"))
    script = [sys.executable, str(HERE / "run_failures.py"), str(checkpoint("llama", folder)), str(tmp_path / "kv")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = lines(done.stdout)
    assert [line["point"] for line in answers] == [each for each in ("stitch", "prepare", "pack", "") for _ in (0, 1)]
    for line in answers:
        assert line["difference"] < NEAR, line
        assert ("error" in line["report"]) == bool(line["point"]), line
        assert line["point"] or line["report"]["reused_tokens"] > 100


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
    model = checkpoint("llama", folder)
    with reference(model, tmp_path) as own:
        own.warm(CHUNKS[:3], document="a")
    with started(model, tmp_path, enforce_eager=False) as engine:
        prompt = prompt_of(*reversed(CHUNKS[:3]))
        full = engine.full(prompt, 4)
        done = engine.ask(prompt, 4, policy="query", ratio=1.0)
        assert done.report is not None
        assert done.report["reused_tokens"] > 100
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
