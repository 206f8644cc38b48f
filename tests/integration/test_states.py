"""Hybrids: layers that keep a state of the tokens so far in place of KV."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from blending import CHUNKS, messages, plain_logits, prefilled, prepare, relative
from families import HYBRIDS, SINCE, build
from packaging.version import Version
from places import Memory
from safetensors.numpy import load_file
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvrag import (
    BlendConfig,
    BlendEngine,
    FileStore,
    FingerprintMismatchError,
    Model,
    OutOfMemoryError,
    SettingError,
)
from kvrag.backend.transformers import BlendCache
from kvrag.backend.transformers.rows import cache_argument
from kvrag.ingest.encode import encode
from kvrag.reuse.blend import LateRecompute

TOLERANCE = 1e-5
PROMPT = messages(*(CHUNKS[number] for number in (2, 0, 3, 1)))

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version(SINCE["lfm2"]), reason="caches of this transformers keep no states"
)


@pytest.fixture(params=["lfm2", "qwen3_next", "falcon_h1"])
def hybrid(request: pytest.FixtureRequest, tokenizer: Any) -> Model:
    """A tiny one: with short convolutions, a gated delta net, Mamba beside attention."""
    model_type, changes = HYBRIDS[request.param]
    if request.param == "qwen3_next":  # one whose last layer keeps a state
        changes = changes | {"layer_types": changes["layer_types"][::-1]}
    model = Model(build(model_type, **changes), tokenizer, request.param)
    model.__dict__["eos_ids"] = frozenset()
    return model


@pytest.fixture
def storing(hybrid: Model, tokenizer: Any) -> Model:
    """The same model, whose chunks' states are stored."""
    model = Model(hybrid.hf, tokenizer, hybrid.name, store_states=True)
    model.__dict__["eos_ids"] = frozenset()
    return model


@pytest.fixture
def hybrid_engine(hybrid: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(hybrid, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        yield engine


def _greedy(model: Model, ids: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        prompt = torch.tensor([ids])
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
        return model.hf.generate(prompt, max_new_tokens=count, **options)[0, len(ids) :].tolist()


def test_a_tail_is_transformers_own_pass_over_stitched_kv_without_states(hybrid_engine: BlendEngine) -> None:
    model = hybrid_engine.model
    ids = model.tokenizer.render(PROMPT)
    done = prepare(hybrid_engine, ids, 0.3)
    assert done.report.policy == "tail"
    budget, start = round(0.3 * len(done.inexact)), int(done.selected[0])
    assert start in [run.start for run in done.runs], "states begin with a chunk, not within a text"
    assert budget < len(done.selected) == done.report.recomputed_tokens == int((done.inexact >= start).sum())
    assert len(prepare(hybrid_engine, ids, 0.05).selected) == round(0.05 * len(done.inexact)), "more than twice as many"
    while not done.reused[start - 1]:  # separators before the chunk are computed in the same pass
        start -= 1
    cache = DynamicCache(config=model.config)
    kinds = model.config.layer_types
    own = [layer for layer, kind in zip(cache.layers, kinds, strict=True) if kind in ("full_attention", "hybrid")]
    assert len(own) == model.num_layers
    for number, layer in enumerate(own):
        keys, values = (part[:, :, :start].clone() for part in done.cache.layer(number))
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        layer.dtype, layer.device = keys.dtype, keys.device
    with torch.inference_mode():
        tail = torch.tensor([ids[start:]])
        positions = torch.arange(start, len(ids))[None]
        logits = model.hf(
            tail, position_ids=positions, use_cache=True, **{cache_argument(type(model.hf).forward): cache}
        ).logits[0, -1]
    assert relative(done.logits[0], logits) <= TOLERANCE
    assert relative(done.logits[0], plain_logits(model.hf, ids)[-1]) > 1e-3


def test_encoded_in_one_batch_or_alone_a_chunk_has_the_models_own_kv(hybrid: Model) -> None:
    chunks = [hybrid.tokenizer.encode(chunk) for chunk in CHUNKS]
    chunks.append([*chunks[0][:-3], *chunks[1]])  # shares a beginning, but not the states after it
    contexts: list[list[int]] = [[], chunks[3], [], chunks[3], [], []][: len(chunks)]
    for number, layers in encode(hybrid, chunks, contexts):
        row = [*hybrid.preamble, *contexts[number], *chunks[number]]
        cache = hybrid.new_cache(len(row))
        hybrid.forward(torch.tensor([row]), cache)
        rotations = hybrid.rotations(torch.arange(len(row)))
        first = len(row) - len(chunks[number])
        assert len(layers) == hybrid.num_layers
        for layer, (keys, values) in enumerate(layers):
            own_keys, own_values = cache.layer(layer)
            own_keys = rotations[layer].unrotate(own_keys[:, :, : len(row)])
            torch.testing.assert_close(keys, own_keys[0, :, first : len(row)], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(values, own_values[0, :, first : len(row)], atol=1e-5, rtol=1e-4)


def test_a_step_that_is_taken_back_or_fails_is_computed_again(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = hybrid.tokenizer.render(PROMPT)
    caches = [hybrid.new_cache(len(ids)) for _ in range(2)]
    for cache, length in zip(caches, (len(ids), 40), strict=True):
        hybrid.forward(torch.tensor([ids[:length]]), cache)
    first = hybrid.forward_each([7, 8], caches)
    for cache, length in zip(caches, (len(ids), 40), strict=True):
        cache.set_length(length)
    assert torch.equal(hybrid.forward_each([7, 8], caches), first)
    alone = hybrid.new_cache(40)  # copies nothing
    hybrid.forward(torch.tensor([ids[:40]]), alone)
    logits = hybrid.forward_each([8], [alone])
    alone.set_length(40)
    assert torch.equal(hybrid.forward_each([8], [alone]), logits)

    update, calls = BlendCache.update, []

    def failing(self: BlendCache, *args: Any) -> Any:
        calls.append(0)
        if len(calls) == 4:  # in the second layer with KV
            raise OutOfMemoryError("no memory")
        return update(self, *args)

    monkeypatch.setattr(BlendCache, "update", failing)
    with pytest.raises(OutOfMemoryError):
        hybrid.forward_each([9, 9], caches)
    for cache, length in zip(caches, (len(ids), 40), strict=True):
        cache.set_length(length + 1)
    logits = hybrid.forward_each([9, 9], caches)
    for number, (length, token) in enumerate(((len(ids), 7), (40, 8))):
        own = plain_logits(hybrid.hf, [*ids[:length], token, 9])[-1]
        assert relative(logits[number], own) <= 10 * TOLERANCE


def test_states_that_are_not_kept_are_an_error_not_a_wrong_answer(hybrid: Model) -> None:
    ids = hybrid.tokenizer.render(PROMPT)
    cache = hybrid.new_cache(len(ids))
    hybrid.forward(torch.tensor([ids]), cache)
    cache.set_length(20)
    with pytest.raises(ValueError, match="the states before position 20 are not kept"):
        hybrid.forward(torch.tensor([ids[20:]]), cache)


def test_answers_that_share_steps_equal_generate(hybrid_engine: BlendEngine) -> None:
    model = hybrid_engine.model
    prompts = [messages(*CHUNKS[number:], question=f"Who is {number}?") for number in range(4)]
    answers = hybrid_engine.generate_batch(prompts, ratio=1.0, max_new_tokens=8, temperature=0)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == _greedy(model, model.tokenizer.render(prompt), 8)
    alone = hybrid_engine.generate(prompts[0], ratio=1.0, max_new_tokens=8, temperature=0, deterministic=True)
    assert alone.token_ids == answers[0].token_ids
    assert alone.report.conversation_tokens == 0


def test_a_prompt_begins_with_the_states_of_a_warmed_prefix_or_of_an_exact_turn(hybrid_engine: BlendEngine) -> None:
    model = hybrid_engine.model
    system = {"role": "system", "content": CHUNKS[3]}
    prompts = [[system, *messages(CHUNKS[number], question="Who?")] for number in range(3)]
    warmed = hybrid_engine.generate([system], ratio=1.0, max_new_tokens=1).report.prompt_tokens
    shared = warmed - model.tokenizer.generation_prompt_length()
    for prompt in prompts[:2]:
        ids = model.tokenizer.render(prompt)
        answer = hybrid_engine.generate(prompt, ratio=1.0, max_new_tokens=5, temperature=0)
        assert answer.report.conversation_tokens == shared
        assert list(answer.token_ids) == _greedy(model, ids, 5)
        again = hybrid_engine.generate(prompt, ratio=0.2, max_new_tokens=5, temperature=0)
        assert shared < again.report.conversation_tokens < len(ids), "up to the generation prompt"
        assert again.report.exact
        assert again.token_ids == answer.token_ids
    blended = hybrid_engine.generate(prompts[2], ratio=0.2, max_new_tokens=5, temperature=0)
    assert blended.report.conversation_tokens == shared
    assert not blended.report.exact
    told = [*prompts[2], {"role": "assistant", "content": blended.text}, *messages(question="More?")[1:]]
    ids = model.tokenizer.render(told)
    answer = hybrid_engine.generate(told, ratio=1.0, max_new_tokens=5, temperature=0)
    assert answer.report.conversation_tokens == shared, "what is not exact is not continued"
    assert list(answer.token_ids) == _greedy(model, ids, 5)


def test_forgetting_a_chunk_drops_the_states_that_have_seen_it(hybrid_engine: BlendEngine) -> None:
    model = hybrid_engine.model
    hybrid_engine.warm([CHUNKS[0] + " It rains."], document="a")
    prompt = messages(CHUNKS[1], CHUNKS[0] + " It rains.", question="Who?")
    hybrid_engine.generate(prompt, ratio=1.0, max_new_tokens=3, temperature=0)
    ids = model.tokenizer.render(prompt)
    kept = prefilled(hybrid_engine, ids, goes_on=True).report.conversation_tokens
    assert kept > 50
    hybrid_engine.forget("a")
    done = prefilled(hybrid_engine, ids, replace(hybrid_engine.config, ratio=1.0), goes_on=True)
    assert done.report.conversation_tokens < 50
    assert relative(done.logits[0], plain_logits(model.hf, ids)[-1]) <= TOLERANCE


@pytest.mark.parametrize("limit", [1 << 30, 300_000])
def test_conversations_with_edits_equal_full_prefill(limit: int, storing: Model, tmp_path: Path) -> None:
    rng, history, continued = random.Random(1), list[dict[str, str]](), 0
    with BlendEngine(storing, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=limit) as engine:
        engine.warm(CHUNKS)
        kept = engine._answering._conversations
        for _ in range(14):
            if not history or rng.random() < 0.2:
                system = {"role": "system", "content": rng.choice(CHUNKS[:2])}
                history = [system, *messages(*rng.sample(CHUNKS, 2), question=f"Who is {rng.randrange(3)}?")]
            elif rng.random() < 0.3:
                history = [*history[: rng.randrange(1, len(history))], *messages(rng.choice(CHUNKS))]
            else:
                history = [*history, *messages(question=f"And {rng.randrange(3)}?")[1:]]
            ids = storing.tokenizer.render(history)
            if len(ids) > 800:
                history = []
                continue
            config = replace(engine.config, ratio=1.0, edited_history=rng.choice(["exact", "blend"]))
            done = prefilled(engine, ids, config, goes_on=True)
            assert done.report.exact
            assert relative(done.logits[0], plain_logits(storing.hf, ids)[-1]) <= 2 * TOLERANCE
            continued += done.report.conversation_tokens > 0
            options: dict[str, Any] = rng.choice([{"ratio": 1.0}, {"ratio": 0.3}, {}])
            stream = engine.stream(
                history, max_new_tokens=6, temperature=0, edited_history=config.edited_history, **options
            )
            said = "".join(delta.text for delta, _ in zip(stream, range(rng.choice([1, 3, 6])), strict=False))
            stream.close()
            history = [*history, {"role": "assistant", "content": said}]
            each = [stretch.num_bytes for stretch in kept._kept]
            assert kept._num_bytes == sum(each) <= limit
    assert continued >= 2 or limit < 1 << 30


def test_prompts_are_prefilled_in_full_until_a_calibration(hybrid_engine: BlendEngine, learning: None) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 2, "temperature": 0}
    report = hybrid_engine.generate(PROMPT, **asked).report
    assert (report.policy, report.exact, report.recomputed_tokens) == ("full", True, 0)
    assert report.decision.startswith(
        "full prefill: models with layers that keep a state are blended once they are cal"
    )
    plan = hybrid_engine._planner.plan
    for settings in ({"ratio": 0.2}, {"margin": 2.0}, {"controller": "off"}):
        assert not plan(BlendConfig(**settings)).is_full
    hybrid_engine.calibrate([messages(*CHUNKS, question=f"Question {number}?") for number in range(4)])
    assert not plan(BlendConfig()).is_full
    assert plan(BlendConfig(deterministic=True)).is_full


def test_what_hybrids_cannot_do_is_refused_in_one_line(hybrid_engine: BlendEngine) -> None:
    model = hybrid_engine.model
    for policy in ("hkvd", "first_k", "random"):
        with pytest.raises(SettingError, match=r"^policy \S+ recomputes scattered tokens, .*leave policy out"):
            hybrid_engine.generate(PROMPT, policy=policy, ratio=0.3)
        hybrid_engine.generate(PROMPT, policy="none", max_new_tokens=1)
    assert prepare(hybrid_engine, model.tokenizer.render(PROMPT), 0.0).report.recomputed_tokens == 0
    assert BlendConfig().policy == "query"


def test_stored_are_the_models_own_states_at_a_chunks_end(storing: Model) -> None:
    chunks = [storing.tokenizer.encode(chunk) for chunk in CHUNKS]
    chunks += [chunks[0][:-3], chunks[3][: len(chunks[0])]]  # the beginning of another; in one pass with another
    contexts: list[list[int]] = [[], chunks[3], [], chunks[3], [], []]
    for number, (*kv, states) in encode(storing, chunks, contexts):
        row = [*storing.preamble, *contexts[number], *chunks[number]]
        cache = storing.new_cache(len(row))
        storing.forward(torch.tensor([row]), cache)
        assert len(kv) == storing.num_layers
        for ours, theirs in zip(states, storing.states_after(cache, 0), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        assert sum(part.nbytes for part in states) == storing.bytes_per_chunk


@pytest.mark.parametrize(("ratio", "codec"), [(0.0, "native"), (0.2, "native"), (0.2, "int8")])
def test_a_tail_goes_on_from_the_state_of_the_chunk_before_it(
    storing: Model, ratio: float, codec: str, tmp_path: Path
) -> None:
    ids = storing.tokenizer.render(PROMPT)
    with BlendEngine(storing, FileStore(tmp_path, min_free_bytes=0), codec=codec) as engine:
        engine.warm(CHUNKS, document="a")
        done = prepare(engine, ids, ratio)
        start = int(torch.cat([done.selected, done.fresh[-1:]]).min())
        while not done.reused[start - 1]:
            start -= 1
        (run,) = [run for run in done.runs if run.stop == start]
        with closing(engine.store.open(run.key)) as reader:
            row = [*storing.preamble, *reader.context.tolist(), *reader.ids.tolist()]
            assert reader.context.size
        assert len(row) != start, "else positions would tell nothing"
        cache = _after(storing, row)
        own = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
        assert len(own) == storing.num_layers
        for number, layer in enumerate(own):
            layer.keys, layer.values = (part[:, :, :start].clone() for part in done.cache.layer(number))
        positions = torch.arange(start, len(ids))[None]
        arguments = {cache_argument(type(storing.hf).forward): cache}
        with torch.inference_mode():
            logits = storing.hf(torch.tensor([ids[start:]]), position_ids=positions, **arguments).logits[0, -1]
        assert relative(done.logits[0], logits) <= 5 * TOLERANCE
        again = prepare(engine, ids, ratio)
        assert done.report.bytes_loaded > 0
        assert again.report.bytes_loaded == 0, "states too are in memory"
        assert torch.equal(again.logits, done.logits)


def _after(model: Model, row: list[int]) -> DynamicCache:
    """transformers' own cache after these tokens."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model.hf(torch.tensor([row]), use_cache=True, **{cache_argument(type(model.hf).forward): cache})
    return cache


def test_a_completion_does_not_begin_with_the_states_of_a_chunk(
    storing: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = storing.tokenizer.render(PROMPT)
    with BlendEngine(storing, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        done = prepare(engine, ids, 0.0)
    assert relative(done.logits[0], plain_logits(storing.hf, ids)[-1]) > 1e-3
    # so that one of its passes begins where the question's did
    monkeypatch.setattr("kvrag.backend.protocol.PREFILL_BLOCK", done.runs[-1].stop)
    logits = LateRecompute(storing, done, 1.0).recompute(torch.tensor(ids), 0)
    assert relative(logits[0], plain_logits(storing.hf, ids)[-1]) <= TOLERANCE


def test_a_damaged_state_is_noticed_and_its_chunk_computed(storing: Model, tmp_path: Path) -> None:
    ids = storing.tokenizer.render(PROMPT)
    last = storing.tokenizer.encode(CHUNKS[1])
    with BlendEngine(storing, FileStore(tmp_path, min_free_bytes=0), ram_bytes=0) as engine:
        engine.warm(CHUNKS)
        (file,) = [path for path in tmp_path.rglob("*.safetensors") if np.array_equal(load_file(path)["ids"], last)]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        done = prepare(engine, ids, 0.0)
        assert "does not match its digest" in " ".join(done.report.notes)
        assert len(done.runs) == 3


def test_a_store_with_states_and_one_without_are_two(
    storing: Model, hybrid: Model, model: Model, tmp_path: Path
) -> None:
    BlendEngine(storing, FileStore(tmp_path / "with", min_free_bytes=0)).close()
    BlendEngine(hybrid, FileStore(tmp_path / "without", min_free_bytes=0)).close()
    with pytest.raises(FingerprintMismatchError, match=r"different: states\): pass store_states, or use another"):
        BlendEngine(hybrid, FileStore(tmp_path / "with", min_free_bytes=0))
    with pytest.raises(FingerprintMismatchError, match=r"different: states\): leave out store_states, or use another"):
        BlendEngine(storing, FileStore(tmp_path / "without", min_free_bytes=0))
    with pytest.raises(SettingError, match=r"^store_states: .* has no layers that keep a state; leave it out$"):
        Model(model.hf, model.tokenizer.hf, store_states=True)


def test_history_behind_an_edit_has_no_states_to_go_on_from(storing: Model, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "edited_history": "blend"}
    with BlendEngine(storing, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        told = messages(CHUNKS[0], question=" ".join(f"Is {name} the brother of the founder?" for name in "ABCDEFGH"))
        told = [*told, {"role": "assistant", "content": engine.generate(told, ratio=1.0, **asked).text}]
        engine.generate([*told, *messages(question="And?")[1:]], ratio=1.0, **asked)
        edited = [{"role": "user", "content": CHUNKS[1]}, *told[1:], *messages(question="More?")[1:]]
        report = engine.generate(edited, ratio=0.0, **asked).report
    assert report.moved_tokens > 20


def test_machines_share_states(storing: Model, memory: Memory, tmp_path: Path) -> None:
    ids = storing.tokenizer.render(PROMPT)
    logits = []
    for machine in ("a", "b"):
        with BlendEngine(storing, memory.url, store_cache=tmp_path / machine) as engine:
            if not logits:
                engine.warm(CHUNKS, document="a")
            logits.append(prepare(engine, ids, 0.2).logits)
    assert torch.equal(*logits)
