"""Selective recompute: causal by true position, exact where everything is recomputed, with bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS, LayOut, blend_selected, full_prefill, messages, plain_logits, prepare, relative
from families import FAMILIES, build

import kvrag.backend.protocol
import kvrag.reuse.blend
import kvrag.reuse.load
from kvrag import BlendConfig, BlendEngine, FileStore, Model

WINDOWS = ["llama", "mistral-window", "gemma3", "qwen2-window", "gpt_oss", "llama-dynamic", "phi3-longrope"]


def test_full_prefill_is_the_models_own(model: Model, hf: Any) -> None:
    ids = torch.arange(3, 200)
    logits, stitched = full_prefill(model, ids, 256)
    assert relative(logits[0], plain_logits(hf, ids.tolist())[-1]) <= 1e-6
    assert not stitched.reused.any()
    assert stitched.runs == []
    assert stitched.cache.get_seq_length() == len(ids)


def test_a_later_chunk_cannot_change_earlier_chunks(model: Model, lay_out: LayOut) -> None:
    """With a mask aligned to the last rows instead, selected tokens would attend to later tokens."""
    one, other = lay_out(*CHUNKS[:3]), lay_out(CHUNKS[0], CHUNKS[1], CHUNKS[3])
    border = one.runs[2].start
    assert other.runs[2].start == border
    assert torch.equal(one.ids[:border], other.ids[:border])
    for stitched in (one, other):
        early = stitched.inexact[stitched.inexact < border][::3]
        late = stitched.inexact[stitched.inexact >= border][::2]
        blend_selected(model, stitched, torch.cat([early, late]))
    for layer in range(model.num_layers):
        for a, b in zip(one.cache.layer(layer), other.cache.layer(layer), strict=True):
            torch.testing.assert_close(a[:, :, :border], b[:, :, :border], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(one.cache.layer(1)[0][:, :, border + 5], other.cache.layer(1)[0][:, :, border + 5])


def test_only_fresh_and_selected_positions_change(model: Model, lay_out: LayOut) -> None:
    stitched, untouched = lay_out(*CHUNKS), lay_out(*CHUNKS)
    selected = stitched.inexact[5:25]
    blend_selected(model, stitched, selected)
    kept = stitched.reused.clone()
    kept[selected] = False
    for layer in range(model.num_layers):
        for a, b in zip(stitched.cache.layer(layer), untouched.cache.layer(layer), strict=True):
            a, b = a[:, :, : len(kept)], b[:, :, : len(kept)]
            assert torch.equal(a[:, :, kept], b[:, :, kept])
            if layer > 0:
                assert not torch.isclose(a[:, :, selected], b[:, :, selected], rtol=1e-4).all(dim=(0, 1, 3)).any()


def test_selected_positions_may_come_in_any_order(model: Model, lay_out: LayOut) -> None:
    selected = lay_out(*CHUNKS).inexact[::2]
    logits = [blend_selected(model, lay_out(*CHUNKS), chosen) for chosen in (selected, selected.flip(0))]
    assert torch.equal(*logits)


def test_more_recomputed_is_nearer_to_full_prefill(model: Model, hf: Any, engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    ids = model.tokenizer.render(messages(*CHUNKS))
    full = plain_logits(hf, ids)[-1]
    errors = [relative(prepare(engine, ids, ratio, "random").logits[0], full) for ratio in (0.0, 0.5, 0.95, 1.0)]
    assert errors[-1] <= 1e-5 < errors[2]
    assert errors[2] < errors[0]


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_blocks_give_what_one_pass_gives(
    family: str, ratio: float, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        ids = model.tokenizer.render(messages(*CHUNKS))
        once = prepare(engine, ids, ratio, "random").logits
        passes: list[int] = []
        forward = model.forward

        def counted(*args: Any) -> torch.Tensor:
            passes.append(args[0].shape[1])
            return forward(*args)

        monkeypatch.setattr(model, "forward", counted)
        monkeypatch.setattr(kvrag.backend.protocol, "PREFILL_BLOCK", 7)
        blocks = prepare(engine, ids, ratio, "random").logits
        assert relative(blocks, once) <= 1e-5
        assert (len(passes) == 1) == model.rope_follows_length
        assert all(rows <= 7 for rows in passes) or model.rope_follows_length


UNWRITTEN = [*WINDOWS, "gemma2", "qwen3_moe"]
OTHERS = ("none", "hkvd", "first_k")
PAIRS = [(family, policy) for i, family in enumerate(UNWRITTEN) for policy in ("query", OTHERS[i % 3])]


@pytest.mark.parametrize(("family", "policy"), PAIRS)
def test_memory_that_was_never_written_is_never_read(
    family: str, policy: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        prompt = messages(*CHUNKS)
        before = engine.generate(prompt, ratio=0.2, policy=policy, max_new_tokens=5, temperature=0)
        plain = kvrag.reuse.load._empty

        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            return plain(*args, **kwargs).fill_(torch.nan)

        monkeypatch.setattr(kvrag.reuse.load, "_empty", poisoned)
        monkeypatch.setattr(kvrag.backend.protocol, "PREFILL_BLOCK", 50)
        after = engine.generate(prompt, ratio=0.2, policy=policy, max_new_tokens=5, temperature=0)
        assert after.token_ids == before.token_ids


def test_the_cache_continues_like_the_models_own(model: Model, hf: Any, lay_out: LayOut) -> None:
    """Token by token after the prompt, also beyond the initial capacity."""
    stitched = lay_out(*CHUNKS)
    blend_selected(model, stitched, stitched.inexact)
    more = list(range(40, 340))
    wanted = plain_logits(hf, [*stitched.ids.tolist(), *more])
    assert stitched.cache.layer(0)[0].shape[2] == len(stitched.ids) + 10
    for count, token in enumerate(more):
        logits = model.forward(torch.tensor([[token]]), stitched.cache)
        if count % 60 == 0 or count in (8, 9, 10, 11, 299):
            assert relative(logits[0], wanted[len(stitched.ids) + count]) <= 1e-5
    assert stitched.cache.get_seq_length() == len(stitched.ids) + 300


def test_the_last_position_is_computed_even_if_it_is_known(model: Model, hf: Any, lay_out: LayOut) -> None:
    ids = [*model.tokenizer.preamble, *model.tokenizer.encode(CHUNKS[0])]
    stitched = lay_out(ids=ids)
    assert stitched.fresh.tolist() == [*range(len(model.tokenizer.preamble)), len(ids) - 1]
    logits = blend_selected(model, stitched, stitched.inexact)
    assert relative(logits[0], plain_logits(hf, ids)[-1]) <= 1e-5


def test_bfloat16_blends_to_full_prefill_within_its_precision(tokenizer: Any, tmp_path: Path) -> None:
    hf = build("llama").bfloat16()
    model = Model(hf, tokenizer)
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        ids = model.tokenizer.render(messages(*CHUNKS))
        full = plain_logits(hf, ids)[-1]
        errors = {ratio: relative(prepare(engine, ids, ratio, "hkvd").logits[0], full) for ratio in (0.0, 1.0)}
        assert errors[1.0] < 0.1 < errors[0.0]


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_a_part_of_a_chunk_is_stitched_from_its_beginning(offset: int, model: Model, lay_out: LayOut) -> None:
    """Layer 0 does not depend on the context: there, stitched keys and values are the model's own."""
    encode = model.tokenizer.encode
    ids = [*model.tokenizer.preamble, *encode(CHUNKS[1])[offset:], *encode(CHUNKS[2])[offset:-3], *encode(" Who?")]
    stitched = lay_out(ids=ids)
    assert [run.offset for run in stitched.runs] == [offset, offset]
    own = model.new_cache(len(ids))
    model.forward(torch.tensor([ids]), own)
    at = stitched.reused
    for ours, theirs in zip(stitched.cache.layer(0), own.layer(0), strict=True):
        torch.testing.assert_close(ours[:, :, : len(ids)][:, :, at], theirs[:, :, at], atol=1e-5, rtol=1e-5)
    assert bool(stitched.exact.any()) == (offset == 0), "only a chunk's beginning depends on the preamble alone"


@pytest.mark.parametrize("between", ["\n", "Another word. "])
def test_a_chunk_that_does_not_follow_its_preamble_is_not_exact(between: str, model: Model, lay_out: LayOut) -> None:
    encode = model.tokenizer.encode
    ids = [*model.tokenizer.preamble, *encode(between), *encode(CHUNKS[1]), *encode(" Who?")]
    assert not lay_out(ids=ids).exact.any()
    assert not lay_out(ids=ids[len(model.tokenizer.preamble) + len(encode(between)) :]).exact.any()


def test_only_a_chunk_encoded_alone_is_exact_after_the_preamble(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, FileStore(tmp_path), BlendConfig(context_tokens=64)) as engine:
        engine.warm(CHUNKS[:2], document="a")
        alone, behind = (
            engine.generate(messages(chunk), ratio=0.0, policy="none", max_new_tokens=1).report for chunk in CHUNKS[:2]
        )
    assert [run.start for report in (alone, behind) for run in report.runs] == [len(model.preamble)] * 2
    assert alone.exact
    assert not behind.exact, "it was encoded with another context"
