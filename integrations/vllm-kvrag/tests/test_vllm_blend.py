"""Blending in vLLM equals kvrag's own engine, and at a ratio of 1.0 vLLM's full prefill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm_engines import CHUNKS, Engine, blended, checkpoint, distance, prompt_of, reference, started, text_of
from vllm_kvrag.backend import VllmBackend

from kvrag import BlendEngine, FileStore
from kvrag.prefill import Pipeline
from kvrag.request import Request

NEAR = 1e-4
ORDER = [CHUNKS[2], CHUNKS[0], CHUNKS[3], CHUNKS[1]]


class Both(NamedTuple):
    vllm: Engine
    kvrag: BlendEngine
    folder: Path


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "gemma3", "gpt_oss"])
def both(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """vLLM and kvrag's engine on one store, in which transformers has encoded a document."""
    model, store = checkpoint(request.param, folder), tmp_path_factory.mktemp("store")
    with ExitStack() as stack:
        own = stack.enter_context(reference(model, store))
        own.warm(CHUNKS[:4], document="a")
        yield Both(stack.enter_context(started(model, store)), own, store)


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Results of all prefills of this process."""
    seen: list[Request] = []
    prefill = Pipeline.prefill

    def spied(self: Pipeline, request: Request, *args: Any, **settings: Any) -> None:
        prefill(self, request, *args, **settings)
        seen.append(request)

    monkeypatch.setattr(Pipeline, "prefill", spied)
    return seen


def test_a_prefix_of_a_chunk_that_was_encoded_under_other_frequencies_is_not_exact(
    folder: Path, tmp_path: Path
) -> None:
    """Frequencies of dynamic NTK follow the length in transformers, and are fixed in vLLM."""
    model = checkpoint("llama-dynamic", folder)
    with reference(model, tmp_path) as own:
        long = own.encode(text_of(1, 40))
        assert len(long) > own.model.stable_length == 512
        own.warm([text_of(1, 40)])
        ids = [*own.model.preamble, *long[:60], *own.encode(" Who?")]
    with started(model, tmp_path, max_model_len=2048) as engine:
        done = engine.ask(ids, ratio=1.0, policy="query")
        assert done.report is not None
        assert (done.report["reused_tokens"], done.report["recomputed_tokens"]) == (0, 60)
        assert distance(done.logprobs, engine.full(ids).logprobs) < NEAR


def test_the_prompt_has_the_same_ids(both: Both) -> None:
    prompt = prompt_of(*ORDER)
    assert both.vllm.full(prompt).ids == both.kvrag.model.tokenizer.render(prompt)


def test_at_ratio_1_it_is_full_prefill(both: Both) -> None:
    full = both.vllm.full(prompt_of(*ORDER), 8)
    for policy in ("query", "hkvd"):
        done = both.vllm.ask(prompt_of(*ORDER), 8, policy=policy, ratio=1.0)
        assert done.report is not None
        assert done.report["reused_tokens"] + done.report["recomputed_tokens"] > 150
        assert done.report["exact"]
        assert distance(done.logprobs, full.logprobs) < NEAR
        assert done.tokens == full.tokens


def test_vllm_computes_what_comes_after_the_last_stored_kv(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    forward = VllmBackend._pass

    def counted(self: VllmBackend, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        passes.append(len(ids))
        return forward(self, ids, *args)

    monkeypatch.setattr(VllmBackend, "_pass", counted)
    lead = text_of(90, 8)  # of no chunk, so that nothing is exact; vLLM's prefix cache has it for the second prompt
    for prompt in (prompt_of(lead, *ORDER), prompt_of(lead, *reversed(ORDER))):
        passes.clear()
        full = both.vllm.full(prompt, 4)
        done = both.vllm.ask(prompt, 4, policy="query", ratio=1.0)
        assert done.report is not None
        assert done.report["recomputed_tokens"] > 150
        assert sum(passes) <= 1
        assert (done.tokens, distance(done.logprobs, full.logprobs) < NEAR) == (full.tokens, True)


@pytest.mark.parametrize("policy", ["query", "hkvd", "first_k", "random", "none"])
def test_it_is_what_kvrags_own_engine_gives(both: Both, policy: str, prefilled: list[Request]) -> None:
    ratio = 0.0 if policy == "none" else 0.15
    done = both.vllm.ask(prompt_of(*ORDER), policy=policy, ratio=ratio)
    wanted = blended(both.kvrag, done.ids, ratio, policy)
    assert done.report is not None
    assert done.report["reused_tokens"] == wanted.report.reused_tokens > 100
    assert done.report["recomputed_tokens"] == wanted.report.recomputed_tokens
    if done.report["conversation_tokens"] == 0:
        assert torch.equal(prefilled[0].selected, wanted.selected)
    assert distance(done.logprobs, wanted.logits[0].log_softmax(-1)) < NEAR


def assert_both_encode_alike(both: Both, texts: list[str], document: str, folder: Path) -> None:
    assert both.vllm.warm(texts, document=document)["new"] == len(texts)
    with closing(FileStore(folder)) as other, closing(FileStore(both.folder)) as ours:
        BlendEngine(both.kvrag.model, other).warm(texts, document=document)
        assert sorted(ours.documents()[document]) == sorted(other.documents()[document])
        for key in other.documents()[document]:
            with closing(ours.open(key)) as one, closing(other.open(key)) as two:
                assert (one.ids == two.ids).all()
                for number in range(two.num_layers):
                    torch.testing.assert_close(one.layer(number), two.layer(number), atol=1e-5, rtol=1e-5)


def test_texts_that_overlap_are_encoded_alike(both: Both, tmp_path: Path) -> None:
    words = " ".join(text_of(50 + number) for number in range(8)).split()
    texts = [" ".join(words[start : start + 40]) for start in range(0, len(words) - 40, 30)]
    assert len(texts) > 5
    assert_both_encode_alike(both, texts, "overlapping", tmp_path)


def test_chunks_of_either_engine_serve_the_other(both: Both, tmp_path: Path) -> None:
    texts = CHUNKS[4:]
    assert_both_encode_alike(both, texts, "b", tmp_path)
    prompt = prompt_of(*reversed(texts))
    done = both.vllm.ask(prompt, policy="query", ratio=0.15)
    wanted = blended(both.kvrag, done.ids, 0.15, "query")
    assert done.report["reused_tokens"] == wanted.report.reused_tokens > 150  # type: ignore[index]
    assert distance(done.logprobs, wanted.logits[0].log_softmax(-1)) < NEAR
