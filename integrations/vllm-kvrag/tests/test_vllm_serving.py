"""One engine under all conditions: prefixes, namespaces, wrong input, failures, aborts, preemption."""

from __future__ import annotations

import errno
import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm_engines import Engine, blended, checkpoint, distance, prompt_of, reference, started, text_of, until
from vllm_kvrag.tasks import TaskHandler

from kvrag import BlendEngine, FileStore
from kvrag.errors import StoreError, StoreFullError
from kvrag.store.chunkfile import ChunkFile

NEAR = 1e-4
BLOCK = 32
SIZES: dict[str, Any] = {
    "block_size": BLOCK,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 70,
    "max_num_seqs": 8,
}


class Both(NamedTuple):
    vllm: Engine
    kvrag: BlendEngine
    store: Path

    def full(self, ids: list[int]) -> torch.Tensor:
        """(V,) log-probabilities by transformers alone."""
        with torch.inference_mode():
            return self.kvrag.model.hf(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)  # type: ignore[no-any-return]

    def is_greedy(self, ids: list[int], tokens: list[int]) -> bool:
        """Whether these are the tokens that full prefill and greedy decoding give, up to rounding."""
        with torch.inference_mode():
            logits = self.kvrag.model.hf(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return bool((logits.max(dim=-1).values - chosen < 1e-3).all())


@pytest.fixture(scope="module")
def both(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """vLLM with few pages and small steps, and transformers as the reference."""
    model, store = checkpoint("llama", folder), tmp_path_factory.mktemp("store")
    with ExitStack() as stack:
        own = stack.enter_context(reference(model, store))
        own.warm([text_of(number) for number in range(4)], document="shared")
        yield Both(stack.enter_context(started(model, store, **SIZES)), own, store)


@pytest.fixture(autouse=True)
def _nothing_leaks(both: Both) -> Iterator[None]:
    """After every test: no request, no job, and all pages free."""
    free = both.vllm.free_blocks
    yield
    both.vllm.drain()
    assert both.vllm.free_blocks == free
    assert not both.vllm.jobs()
    assert not both.vllm.connector._blocks
    assert not both.vllm.scheduler.connector._tracker._requests


@pytest.fixture
def texts(both: Both, request: pytest.FixtureRequest) -> list[str]:
    """Four chunks of this test alone, in a document with its name."""
    first = 100 + random.Random(request.node.name).randrange(10**6)
    made = [text_of(first + 11 * number) for number in range(4)]
    both.kvrag.warm(made, document=request.node.name)
    return made


def reused(answer: Any) -> int:
    assert answer.report is not None
    return int(answer.report["prompt_tokens"] - answer.report["fresh_tokens"])


def size(answer: Any) -> int:
    return len(answer.ids)


# ---------------------------------------------------------------- pages and prefixes


def test_a_prompt_longer_than_a_step(both: Both) -> None:
    made = [text_of(5000 + number, 12) for number in range(6)]
    both.kvrag.warm(made, document="long")
    prompt = prompt_of(*reversed(made))
    done = both.vllm.ask(prompt, ratio=1.0, policy="query")
    assert size(done) > 2 * 512
    assert reused(done) > 900
    assert distance(done.logprobs, both.full(done.ids)) < NEAR
    assert both.vllm.warm([text_of(6000, 30)], document="long too")["new"] == 1  # longer than a step


def test_the_second_turn_reuses_blended_pages(both: Both, texts: list[str]) -> None:
    first = both.vllm.ask(prompt_of(*reversed(texts)), 8, ratio=0.15, policy="query")
    assert first.report is not None
    assert first.report["conversation_tokens"] == 0
    ids = [*first.ids, *first.tokens, *both.kvrag.model.tokenizer.encode("\n\n" + prompt_of(text_of(1)))]
    second = both.vllm.ask(ids, ratio=0.15, policy="query")
    assert second.report is not None
    kept = second.report["conversation_tokens"]
    assert kept >= size(first) // BLOCK * BLOCK
    assert reused(second) > kept
    assert both.vllm.ask([*ids, 5, 6], ratio=1.0, policy="query").report["conversation_tokens"] == 0  # type: ignore[index]


def test_a_prompt_in_blended_pages_is_not_reported_as_exact(both: Both, texts: list[str]) -> None:
    prompt = prompt_of(*reversed(texts))
    first = both.vllm.ask(prompt, ratio=0.0, policy="none")
    again = both.vllm.ask(prompt, ratio=0.0, policy="none")
    assert first.report is not None
    assert again.report is not None
    assert not first.report["exact"]
    assert not again.report["exact"]
    assert reused(again) > 100


def test_an_exact_request_gets_no_blended_page(both: Both, texts: list[str]) -> None:
    prompt = prompt_of(*reversed(texts))
    blended = both.vllm.ask(prompt, ratio=0.0, policy="none")
    exact = both.vllm.full(prompt, 4)
    wanted = both.full(exact.ids)
    assert distance(blended.logprobs, wanted) > 10 * NEAR  # a reused page would show in the answer
    assert distance(exact.logprobs, wanted) < NEAR
    assert exact.report is not None
    assert (reused(exact), exact.report["exact"]) == (0, True)
    for settings in ({"policy": "full"}, {"ratio": 1.0, "policy": "query"}):
        assert distance(both.vllm.ask(prompt, **settings).logprobs, wanted) < NEAR
    assert distance(both.vllm.ask(prompt, settings={"prompt_logprobs": 1}, ratio=0.0).logprobs, wanted) < NEAR


def test_a_request_without_parameters_is_blended_too(both: Both, texts: list[str]) -> None:
    done = both.vllm.ask(prompt_of(*reversed(texts)))
    assert done.report is not None
    assert reused(done) > 100


def test_another_namespace_gets_nothing(both: Both, texts: list[str]) -> None:
    prompt = prompt_of(*reversed(texts))
    both.vllm.ask(prompt, ratio=0.0, policy="none")
    other = both.vllm.ask(prompt, ratio=0.0, policy="none", namespace="other")
    assert reused(other) == 0
    assert distance(other.logprobs, both.full(other.ids)) < NEAR
    assert both.vllm.warm(texts, document="theirs", namespace="other")["new"] == 4
    assert reused(both.vllm.ask(prompt, ratio=0.0, policy="none", namespace="other")) > 100
    assert both.vllm.ask("x", mode="documents", namespace="other").report == {"documents": ["theirs"]}
    assert both.vllm.ask("x", mode="forget", document="theirs", namespace="other").report == {"forgotten": 4}
    assert reused(both.vllm.ask(prompt, ratio=0.0, policy="none")) > 100


def test_a_forgotten_document_is_gone(both: Both) -> None:
    made = [text_of(7000 + number) for number in range(4)]
    both.vllm.warm(made, document="secret")
    prompt = prompt_of(*made)
    assert reused(both.vllm.ask(prompt, ratio=0.0, policy="none")) > 100
    assert both.vllm.ask("x", mode="forget", document="secret").report == {"forgotten": 4}
    after = both.vllm.ask(prompt, ratio=0.0, policy="none")
    assert reused(after) == 0
    assert distance(after.logprobs, both.full(after.ids)) < NEAR


def test_pages_of_a_withdrawn_variant_are_not_reused(both: Both) -> None:
    """The text got a second source: its KV with the first one's context must not reach readers of the other."""
    secret, text = text_of(7050), text_of(7051, 8)
    both.kvrag.warm([secret, text], document="private")
    prompt = prompt_of(text)
    assert reused(both.vllm.ask(prompt, ratio=0.0, policy="none")) > 80
    both.kvrag.warm([text], document="public")
    after = both.vllm.ask(prompt, ratio=0.0, policy="none")
    assert after.report is not None
    assert after.report["conversation_tokens"] == 0
    wanted = blended(both.kvrag, after.ids, 0.0, "none")
    assert distance(after.logprobs, wanted.logits[0].log_softmax(-1)) < NEAR


def test_a_document_that_is_warmed_again_replaces_its_texts(both: Both) -> None:
    made = [text_of(7100 + number) for number in range(3)]
    both.vllm.warm(made, document="d")
    both.vllm.warm(made[:1], document="d")
    assert len(FileStore(both.store).documents("d")["d"]) == 1
    both.vllm.warm(made[1:], document="d", replace=False)
    assert len(FileStore(both.store).documents("d")["d"]) == 3


# ---------------------------------------------------------------- what clients send


def test_wrong_parameters_are_named_and_harmless(both: Both, texts: list[str]) -> None:
    prompt = prompt_of(*reversed(texts))
    done = both.vllm.ask(prompt, ratio=7, raito=0.1)
    assert done.report is not None
    assert len(done.report["ignored"]) == 2
    off = both.vllm.ask(prompt, mode="of")
    assert off.report is not None
    assert reused(off) == 0
    assert "mode" in off.report["ignored"][0]


@pytest.mark.parametrize(
    "wrong", [{"texts": []}, {"texts": "a"}, {"replace": "no"}, {"document": 3}, {"sources": 1}, {"typo": 1}]
)
def test_a_wrong_warm_request_changes_nothing(both: Both, wrong: dict[str, Any]) -> None:
    """A default in its place could replace a document by the wrong texts."""
    made = [text_of(7200 + number) for number in range(2)]
    both.vllm.warm(made, document="kept")
    before = FileStore(both.store).documents()
    given = {"mode": "warm", "document": "kept", "texts": [text_of(7300)]} | wrong
    report = both.vllm.ask(prompt_of(text_of(7301)), **given).report
    assert report is not None
    assert "error" in report
    assert len(report["ignored"]) == 1
    assert FileStore(both.store).documents() == before


def test_a_warm_request_that_cannot_be_carried_out_leaves_no_page(both: Both) -> None:
    text = text_of(7400, 4)
    done = both.vllm.ask(text, mode="warm", document="pages", settings={"prompt_logprobs": 1})
    assert done.report is not None
    assert "error" in done.report
    exact = both.vllm.full(text)
    assert distance(exact.logprobs, both.full(exact.ids)) < NEAR


def test_warming_the_prompt_itself(both: Both) -> None:
    text = text_of(7500, 4)
    done = both.vllm.ask(text, mode="warm", document="itself")
    assert done.report is not None
    assert done.report["new"] == 1
    assert both.kvrag.warm([text], document="itself").new == 0  # the same key
    exact = both.vllm.full(text)
    assert distance(exact.logprobs, both.full(exact.ids)) < NEAR


@pytest.mark.parametrize(
    ("prompt", "text", "error"),
    [("x", text_of(7600, 4), "ContextWindowError"), ("x", text_of(7601, 120), "ContextWindowError")],
)
def test_a_text_without_enough_pages(both: Both, prompt: str, text: str, error: str) -> None:
    report = both.vllm.ask(prompt, mode="warm", texts=[text], document="too long").report
    assert report is not None
    assert report["type"] == error
    assert "too long" not in FileStore(both.store).documents()


def test_short_and_empty_texts_and_one_beyond_the_window(both: Both) -> None:
    texts = ["", "a", "word " * 5000, "a b"]
    report = both.vllm.ask("a", mode="warm", texts=texts, document="short", skip_invalid=True).report
    assert report is not None
    assert report["skipped"] == 3
    assert report["warnings"][0].startswith("skipped: chunk 2 of document 'short' has ")
    assert both.vllm.ask("a", 3).report is None
    assert reused(both.vllm.ask([5], 3, ratio=0.5)) == 0
    report = both.vllm.ask([5], mode="warm", document="short").report
    assert report is not None
    assert report["skipped"] == 1


def test_forget_needs_a_name(both: Both) -> None:
    for given in ({}, {"document": ["a"]}, {"document": "nobody"}):
        report = both.vllm.ask("x", mode="forget", **given).report
        assert report is not None
        assert ("error" in report) == (given.get("document") != "nobody")


def test_reports_are_kept_under_a_tag(both: Both, texts: list[str]) -> None:
    both.vllm.ask(prompt_of(*reversed(texts)), tag="t1", ratio=0.15)
    kept = both.vllm.ask("x", mode="report", tag="t1").report
    assert kept is not None
    assert kept["reused_tokens"] + kept["recomputed_tokens"] > 100
    again = both.vllm.ask("x", mode="report", tag="t1").report
    assert again is not None
    assert "error" in again


def test_several_answers_to_one_prompt(both: Both, texts: list[str]) -> None:
    sampling = {"n": 2, "temperature": 1.0, "seed": 1, "logprobs": None}
    blended = both.vllm.ask(prompt_of(*reversed(texts)), 6, settings=sampling, ratio=0.15)
    assert blended.report is not None
    assert blended.report["reused_tokens"] + blended.report["recomputed_tokens"] > 100
    warmed = both.vllm.ask("\n\n".join(texts), settings=sampling, mode="warm", document="twice")
    assert warmed.report is not None
    assert warmed.report["chunks"] == 1
    with closing(FileStore(both.store)) as store:
        assert len(store.documents()["twice"]) == 1


# ---------------------------------------------------------------- disks


def chunk_files(store: Path) -> set[Path]:
    return set((store / "chunks").rglob("*.safetensors"))


@pytest.mark.parametrize("how", ["damaged", "cut", "vanished"])
def test_a_chunk_that_cannot_be_read_is_recomputed(both: Both, how: str, request: pytest.FixtureRequest) -> None:
    before = chunk_files(both.store)
    made = [text_of(8000 + 50 * ["damaged", "cut", "vanished"].index(how) + number) for number in range(3)]
    both.kvrag.warm(made, document=how)
    file = min(chunk_files(both.store) - before)
    if how == "damaged":
        content = bytearray(file.read_bytes())
        content[-5000:-4000] = bytes(1000)
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:3000])
    else:
        file.unlink()
    prompt = prompt_of(*reversed(made))
    done = both.vllm.ask(prompt, ratio=1.0, policy="query")
    assert reused(done) > 50
    assert distance(done.logprobs, both.full(done.ids)) < NEAR
    assert reused(both.vllm.ask(prompt, ratio=0.15, policy="query")) > 50


def test_a_slow_disk_stalls_no_other_request(both: Both, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    both.vllm.ask(prompt_of(text_of(2)), ratio=0.15)  # now in RAM
    disk = threading.Event()
    layer = ChunkFile.layer

    def slow(self: ChunkFile, number: int) -> Any:
        assert disk.wait(300)
        return layer(self, number)

    monkeypatch.setattr(ChunkFile, "layer", slow)
    waiting = both.vllm.submit(prompt_of(*reversed(texts)), given={"kvrag": {"ratio": 1.0, "policy": "query"}})
    for _ in range(3):
        both.vllm.step()
    exact = both.vllm.submit(prompt_of(text_of(3)), 6, {"kvrag": {"mode": "off"}})
    plain = both.vllm.submit("nothing of it is stored", 6)
    both.vllm.wait(exact, plain)
    assert waiting not in both.vllm.answers
    disk.set()
    (done,) = both.vllm.wait(waiting)
    assert reused(done) > 100
    assert distance(done.logprobs, both.full(done.ids)) < NEAR


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "no space"), StoreFullError("full"), MemoryError(), PermissionError(errno.EACCES, "no")],
    ids=lambda error: type(error).__name__,
)
def test_a_disk_that_rejects_all_writes(both: Both, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise error

    made = [text_of(8500 + number) for number in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put", fails)
        report = both.vllm.warm(made, document="full disk")
        assert report["type"] == ("OutOfMemoryError" if isinstance(error, MemoryError) else type(error).__name__)
    assert "full disk" not in FileStore(both.store).documents()
    assert both.vllm.warm(made, document="full disk")["new"] == 2
    both.vllm.ask("x", mode="forget", document="full disk")


@pytest.mark.parametrize("name", ["removals", "look_up", "documents", "open"])
def test_a_store_that_cannot_be_read_ends_no_engine(
    both: Both, texts: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise StoreError("input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, name, fails)
        done = both.vllm.ask(prompt_of(*reversed(texts)), ratio=1.0, policy="query")
        assert distance(done.logprobs, both.full(done.ids)) < NEAR
        both.vllm.ask("x", mode="documents")
    assert reused(both.vllm.ask(prompt_of(*reversed(texts)), ratio=0.3, policy="query")) > 100


# ---------------------------------------------------------------- failures and aborts


@pytest.mark.parametrize("error", [RuntimeError("bug"), MemoryError(), StoreFullError("full")], ids=repr)
def test_a_job_that_fails_is_computed_by_vllm(
    both: Both, texts: list[str], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(TaskHandler, "_blend", fails)
    done = both.vllm.ask(prompt_of(*reversed(texts)), 3, ratio=0.1, policy="query")
    assert done.report is not None
    assert done.report["type"] == type(error).__name__
    assert distance(done.logprobs, both.full(done.ids)) < NEAR


def test_a_job_that_fails_after_a_shared_prefix_harms_no_other_request(
    both: Both, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"ratio": 1.0, "policy": "query"}
    first = both.vllm.ask(prompt_of(*reversed(texts)), ratio=1.0, policy="query")
    running = both.vllm.submit([*first.ids, 7, 8, 9], 40, {"kvrag": settings})
    until(both.vllm, lambda: bool(both.vllm.scheduler.running))
    for _ in range(3):
        both.vllm.step()
    (request,) = both.vllm.scheduler.running
    computed = request.num_computed_tokens
    with monkeypatch.context() as patch:
        patch.setattr(TaskHandler, "_blend", lambda *args: 1 / 0)
        more = both.kvrag.model.tokenizer.encode("\n\n" + prompt_of(text_of(1), text_of(3)))
        failing = both.vllm.submit([*first.ids, *more], 3, {"kvrag": settings})
        while failing not in both.vllm.answers:
            both.vllm.step()
            if running not in both.vllm.answers:
                assert request.num_computed_tokens >= computed, "a running request lost its pages"
                computed = request.num_computed_tokens
    for answer in both.vllm.wait(running, failing):
        assert both.is_greedy(answer.ids, answer.tokens)


def test_aborts_at_every_step(both: Both, texts: list[str]) -> None:
    prompt = prompt_of(*reversed(texts))
    tasks: list[dict[str, Any]] = [
        {"ratio": 0.15, "policy": "query"},
        {"ratio": 0.15, "policy": "hkvd"},
        {"mode": "warm", "document": "aborted", "texts": [text_of(9000), text_of(9001)]},
        {"mode": "forget", "document": "nobody"},
    ]
    for given in tasks:
        for steps in range(8):
            text = prompt if given.get("mode") != "warm" else prompt_of(text_of(9000), text_of(9001), text_of(9002))
            name = both.vllm.submit(text, 3, {"kvrag": given})
            for _ in range(steps):
                both.vllm.step()
            both.vllm.abort(name)
            if steps % 2:
                both.vllm.drain()
    both.vllm.drain()
    done = both.vllm.ask(prompt, ratio=1.0, policy="query")
    assert reused(done) > 100
    assert distance(done.logprobs, both.full(done.ids)) < NEAR


def test_an_abort_while_the_disk_is_slow(both: Both, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    layer = ChunkFile.layer

    def slow(self: ChunkFile, number: int) -> Any:
        assert disk.wait(300)
        return layer(self, number)

    monkeypatch.setattr(ChunkFile, "layer", slow)
    free = both.vllm.free_blocks
    names = [both.vllm.submit(prompt_of(*reversed(texts)), given={"kvrag": {"ratio": 0.15}}) for _ in range(3)]
    for _ in range(5):
        both.vllm.step()
    for name in names:
        both.vllm.abort(name)
    for _ in range(5):
        both.vllm.step()
    assert both.vllm.free_blocks < free  # the jobs may still write there
    disk.set()
    both.vllm.drain()
    assert both.vllm.free_blocks == free


def test_several_warm_requests_at_once(both: Both, tmp_path: Path) -> None:
    """They share a page in addition to their own, so they run one after the other."""
    documents = {f"w{d}": [text_of(9100 + 10 * d + number) for number in range(3)] for d in range(5)}
    names = [
        both.vllm.submit("\n\n".join(made), given={"kvrag": {"mode": "warm", "document": document, "texts": made}})
        for document, made in documents.items()
    ]
    names += [both.vllm.submit(prompt_of(text_of(n)), 4, {"kvrag": {"ratio": 1.0, "policy": "query"}}) for n in (0, 1)]
    names += [both.vllm.submit(prompt_of(text_of(n)), 4, {"kvrag": {"mode": "off"}}) for n in (2, 3)]
    answers = both.vllm.wait(*names)
    for answer in answers[5:]:
        assert both.is_greedy(answer.ids, answer.tokens)
    other = FileStore(tmp_path)
    theirs = BlendEngine(both.kvrag.model, other)
    ours = FileStore(both.store)
    for document, made in documents.items():
        theirs.warm(made, document=document)
        keys = ours.documents()[document]
        assert sorted(keys) == sorted(other.documents()[document])
        for key in keys:
            one, two = ours.open(key), other.open(key)
            assert one is not None
            assert two is not None
            for number in range(two.num_layers):
                torch.testing.assert_close(one.layer(number), two.layer(number), atol=1e-5, rtol=1e-5)
            one.close()
            two.close()


def test_an_idle_engine_wakes_up(both: Both, texts: list[str]) -> None:
    assert not both.vllm.scheduler.has_requests()
    assert both.vllm.step() == []
    assert reused(both.vllm.ask(prompt_of(*reversed(texts)), ratio=0.15)) > 100


def random_task(choice: random.Random, made: list[str]) -> tuple[str, dict[str, Any]]:
    chunks = choice.sample(made, choice.randint(1, 4))
    question = f"Question {choice.randrange(4)}: who plays the harp?\nAnswer:"
    kind = choice.choice(["off", "off", "exact", "blend", "blend", "warm", "plain"])
    prompt = prompt_of(*chunks, question=question)
    given: dict[str, dict[str, Any]] = {
        "off": {"mode": "off"},
        "exact": {"ratio": 1.0, "policy": "query"},
        "blend": {"ratio": choice.choice([0.0, 0.15, 0.5]), "policy": choice.choice(["query", "hkvd", "first_k"])},
        "warm": {"mode": "warm", "document": f"d{choice.randrange(6)}", "texts": chunks},
        "plain": {"ratio": 0.15, "namespace": "empty"},
    }
    return prompt, given[kind]


def test_random_requests_with_few_pages(both: Both, capsys: pytest.CaptureFixture[str]) -> None:
    """Preemption, aborts, and pages that change hands: every exact request gets vLLM's own answer."""
    choice = random.Random(5)
    made = [text_of(9500 + number, 8) for number in range(12)]
    both.kvrag.warm(made[:6], document="random")
    todo = [random_task(choice, made) for _ in range(40)]
    flying: dict[str, tuple[dict[str, Any], int]] = {}
    aborted = checked = preempted = 0
    preempt = type(both.vllm.scheduler)._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(both.vllm.scheduler), "_preempt_request", counted)
        while todo or flying:
            while todo and len(flying) < 8:
                prompt, given = todo.pop()
                name = both.vllm.submit(prompt, 70, {"kvrag": given}, logprobs=None)  # of 70 tokens they take long
                flying[name] = given, choice.choice([0, 0, 0, 2, 9, 30])
            both.vllm.step()
            for name, (given, steps) in list(flying.items()):
                if name in both.vllm.answers:
                    del flying[name]
                    answer = both.vllm.answers[name]
                    if given.get("mode") == "off" or given.get("ratio") == 1.0 or "namespace" in given:
                        checked += 1
                        assert both.is_greedy(answer.ids, answer.tokens), json.dumps(given)
                elif steps == 1:
                    both.vllm.abort(name)
                    aborted += 1
                    del flying[name]
                else:
                    flying[name] = given, max(steps - 1, 0)
    assert preempted > 0
    assert checked > 5
    assert aborted > 5
