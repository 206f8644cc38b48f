"""Two processes per model, whose scheduler is in this process, and a failure in one of the two."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm_engines import CHUNKS, Engine, blended, checkpoint, distance, prompt_of, reference, started

from kvrag import BlendEngine

NEAR = 1e-4


class Both(NamedTuple):
    vllm: Engine
    kvrag: BlendEngine
    store: Path
    fail: Path


@pytest.fixture(scope="module")
def both(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """vLLM and kvrag's engine on one store; the file `fail` names the point at which a process of vLLM's fails."""
    model, place = checkpoint("llama", folder), tmp_path_factory.mktemp("parallel")
    store, fail = place / "kv", place / "fail"
    fail.touch()
    changes = {"tensor_parallel_size": 2, "max_num_batched_tokens": 128, "worker_cls": "vllm_failing.FailingWorker"}
    with pytest.MonkeyPatch.context() as environment, reference(model, store) as own:
        environment.setenv("KVRAG_FAIL", str(fail))
        own.warm(CHUNKS[:4], document="a")
        with started(model, store, **changes) as engine:
            yield Both(engine, own, store, fail)


def report_of(answer: Any) -> dict[str, Any]:
    report = answer.report
    assert isinstance(report, dict)
    return report


def test_two_processes_blend_as_one_does(both: Both) -> None:
    vllm, own = both.vllm, both.kvrag
    prompt = prompt_of(CHUNKS[2], CHUNKS[0], CHUNKS[3], CHUNKS[1])
    full = vllm.full(prompt)
    for policy, ratio in (("query", 1.0), ("query", 0.15), ("hkvd", 0.15), ("none", 0.0)):
        done = vllm.ask(prompt, policy=policy, ratio=ratio)
        wanted = blended(own, done.ids, ratio, policy)
        expected = full.logprobs if ratio == 1.0 else wanted.logits[0].log_softmax(-1)
        assert distance(done.logprobs, expected) < NEAR, (policy, ratio)
        assert report_of(done)["recomputed_tokens"] == wanted.report.recomputed_tokens

    # all at once: warm, blend, exact
    tasks: list[tuple[str, dict[str, Any]]] = [
        (CHUNKS[4 + n], {"mode": "warm", "document": f"d{n}", "texts": [CHUNKS[4 + n]]}) for n in range(3)
    ]
    tasks += [(prompt, {"policy": "query", "ratio": 1.0})] * 3 + [(prompt, {"mode": "off"})]
    answers = vllm.wait(*[vllm.submit(text, 1, {"kvrag": given}) for text, given in tasks])
    assert [report_of(answer)["new"] for answer in answers[:3]] == [1, 1, 1]
    assert max(distance(answer.logprobs, full.logprobs) for answer in answers[3:]) < NEAR
    key = own.store.documents()["d0"][0]
    assert own.warm([CHUNKS[4]], document="d0").new == 0
    assert key in own.store.documents()["d0"]

    # a chunk that is damaged while the engine runs
    file = max((both.store / "chunks").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    file.write_bytes(file.read_bytes()[:-5000] + bytes(5000))
    plain = vllm.full(prompt_of(*CHUNKS[4:7]))
    done = vllm.ask(prompt_of(*CHUNKS[4:7]), policy="query", ratio=1.0)
    assert distance(done.logprobs, plain.logprobs) < NEAR
    assert len(report_of(done)["notes"]) == 1
    assert vllm.ask("x", mode="forget", document="d1").report == {"forgotten": 1}


def test_a_process_that_fails_ends_the_request_in_both(both: Both) -> None:
    """The other one would wait in a collective forever; vLLM computes the prompt."""
    orders = permutations(CHUNKS[:4])  # a prompt with a known beginning needs no pass
    for point in ("stitch", "prepare", "pack", ""):
        for policy in ("query", "hkvd"):
            both.fail.write_text(point)
            prompt = prompt_of(*next(orders)[::-1])
            done, full = both.vllm.ask(prompt, 2, policy=policy, ratio=1.0), both.vllm.full(prompt, 2)
            assert distance(done.logprobs, full.logprobs) < NEAR, (point, policy)
            assert both.fail.read_text() == ""
            assert ("error" in report_of(done)) == bool(point), (point, policy)
            assert point or report_of(done)["reused_tokens"] + report_of(done)["recomputed_tokens"] > 100
