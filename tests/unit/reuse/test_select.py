"""The distinguishing property of each policy, and the rules for all policies."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS, QUESTION, LayOut, blend_selected, laying_out, messages
from families import FAMILIES, build
from torch import Tensor

from kvrag import POLICIES, BlendConfig, BlendEngine, FileStore, Model, SettingError
from kvrag.backend.transformers.rows import cache_argument
from kvrag.request import Request
from kvrag.reuse.blend import _policy_of, select

INFORMED = tuple(policy for policy in POLICIES if policy not in ("none", "full"))


def _pick(model: Model, stitched: Request, policy: str, ratio: float, **changes: Any) -> list[int]:
    if policy == "query":
        changes = {"first_tokens": 0, "band": (0.5, 1.0), **changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrag.reuse.blend._policy_of", lambda name: replace(_policy_of(name), **changes))
        return select(model, stitched, BlendConfig(policy=policy, ratio=ratio))[0].tolist()


def test_where_choosing_costs_more_than_computing_all_is_recomputed(model: Model, lay_out: LayOut) -> None:
    asked = messages(*CHUNKS[:2], question="Who is it, and where, and since when? " * 9)
    short, long = lay_out(*CHUNKS), lay_out(*CHUNKS[:2], ids=model.tokenizer.render(asked))
    assert len(_pick(model, short, "query", 0.15)) == round(0.15 * len(short.inexact))
    assert len(long.fresh) > 2 * len(long.inexact) > 40
    assert _pick(model, long, "query", 0.15) == long.inexact.tolist()
    assert len(_pick(model, long, "first_k", 0.15)) == round(0.15 * len(long.inexact)), "costs nothing"
    assert _pick(model, long, "query", 0.0) == []


@pytest.mark.parametrize("policy", INFORMED)
def test_the_budget_is_filled_with_inexact_reused_positions(policy: str, model: Model, lay_out: LayOut) -> None:
    stitched = lay_out(*CHUNKS)
    inexact = stitched.inexact.tolist()
    for ratio in (0.0, 0.01, 0.15, 0.5, 0.8, 1.0):
        picked = _pick(model, lay_out(*CHUNKS), policy, ratio)
        budget = round(ratio * len(inexact))
        assert len(picked) == budget or (policy == "tail" and budget < len(picked) <= 2 * budget)
        assert picked == sorted(set(picked))
        assert set(picked) <= set(inexact)
        assert not stitched.exact[picked].any()
        assert stitched.reused[picked].all()
    assert stitched.exact.sum() > 20, "the run after the preamble is exact"
    assert len(inexact) > 60


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_none_picks_nothing(ratio: float, model: Model, lay_out: LayOut) -> None:
    assert _pick(model, lay_out(*CHUNKS), "none", ratio) == []


@pytest.mark.parametrize("policy", INFORMED)
def test_nothing_to_choose_from(policy: str, model: Model, lay_out: LayOut) -> None:
    assert _pick(model, lay_out("Something that was never warmed."), policy, 0.5) == []
    assert _pick(model, lay_out(CHUNKS[0]), policy, 0.5) == [], "the chunk after the preamble is exact"


def test_every_policy_is_known_to_the_settings() -> None:
    assert {"hkvd", "first_k", "query", "random"} <= set(INFORMED)
    with pytest.raises(SettingError, match="unknown policy"):
        BlendConfig(policy="best")


# ---------------------------------------------------------------- hkvd


def _deviations(model: Model, stitched: Request, layer: int) -> Tensor:
    """(T,) by the definition: stitched KV against full prefill's."""
    num_tokens = len(stitched.ids)
    full = model.new_cache(num_tokens)
    model.forward(stitched.ids[None], full)
    pairs = zip(stitched.cache.layer(layer), full.layer(layer), strict=True)
    return sum((ours[:, :, :num_tokens] - theirs).square().sum(dim=(0, 1, 3)) for ours, theirs in pairs)


@pytest.mark.parametrize("check_layer", [1, 2, 3])
def test_hkvd_picks_the_highest_deviations(check_layer: int, model: Model, lay_out: LayOut) -> None:
    stitched, other = lay_out(*CHUNKS), lay_out(*CHUNKS)
    inexact = stitched.inexact
    deviations = _deviations(model, other, check_layer)[inexact]
    wanted = inexact[deviations.topk(20).indices].sort().values.tolist()
    ratio = 20 / len(inexact)
    picked = _pick(model, stitched, "hkvd", ratio, check_layer=check_layer)
    assert picked == wanted
    assert picked != _pick(
        model, lay_out(*CHUNKS), "hkvd", ratio, check_layer=4 - check_layer if check_layer != 2 else 1
    )


def test_hkvd_leaves_what_it_computed_exact_and_the_rest_alone(model: Model, lay_out: LayOut) -> None:
    stitched, untouched = lay_out(*CHUNKS), lay_out(*CHUNKS)
    _pick(model, stitched, "hkvd", 0.2, check_layer=2)
    num_tokens = len(stitched.ids)
    full = model.new_cache(num_tokens)
    model.forward(stitched.ids[None], full)
    for layer in range(3):
        for ours, theirs in zip(stitched.cache.layer(layer), full.layer(layer), strict=True):
            torch.testing.assert_close(ours[:, :, :num_tokens], theirs, atol=1e-5, rtol=1e-4)
    reused = stitched.reused
    for ours, theirs in zip(stitched.cache.layer(3), untouched.cache.layer(3), strict=True):
        assert torch.equal(ours[:, :, :num_tokens][:, :, reused], theirs[:, :, :num_tokens][:, :, reused])


def test_layer_0_does_not_deviate_and_layer_1_does(model: Model, lay_out: LayOut) -> None:
    stitched = lay_out(*CHUNKS)
    assert _deviations(model, stitched, 0)[stitched.reused].max() < 1e-6
    assert _deviations(model, stitched, 1)[stitched.inexact].mean() > 1e-3
    assert _deviations(model, stitched, 3)[stitched.exact].max() < 1e-6


def test_a_check_layer_below_the_last_one_is_the_last_one(model: Model, lay_out: LayOut) -> None:
    picked = [_pick(model, lay_out(*CHUNKS), "hkvd", 0.2, check_layer=layer) for layer in (3, 99)]
    assert picked[0] == picked[1]


# ---------------------------------------------------------------- query

BANDS = [(0.25, 0.75), (0.0, 1.0), (0.5, 0.6), (0.9, 1.0)]


def _mask(model: Model, rows: Tensor, stop: int) -> Tensor | dict[str, Tensor]:
    """(1, 1, S, stop) additive, one for each kind of layer."""
    ago = rows[:, None] - torch.arange(stop)
    kinds = getattr(model.config, "layer_types", None) or [""] * model.num_layers
    masks = {
        kind: torch.where((ago >= 0) & (ago < (window or stop)), 0.0, torch.finfo(torch.float32).min)[None, None]
        for kind, window in zip(kinds, model.windows, strict=True)
    }
    return masks if len(masks) > 1 else masks[kinds[0]]


def _attention(model: Model, stitched: Request, layers: list[int], num_queries: int) -> Tensor:
    """(T,) by transformers' eager attention over the stitched cache."""
    fresh = stitched.fresh
    cache, before = stitched.cache, model.config._attn_implementation
    cache.rows, cache.stop = fresh, len(stitched.ids)
    model.hf.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            output = model.hf(
                input_ids=stitched.ids[fresh][None],
                position_ids=fresh[None],
                attention_mask=_mask(model, fresh, len(stitched.ids)),
                **{cache_argument(type(model.hf).forward): cache},
                output_attentions=True,
            )
    finally:
        model.hf.set_attn_implementation(before)
    attentions = torch.stack([output.attentions[layer][0, :, -num_queries:] for layer in layers])
    return attentions.square().mean(dim=(0, 1, 2)).sqrt()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "mistral-window", "granite", "gemma3", "glm4"])
def test_query_picks_the_tokens_that_the_question_attends_to(family: str, tokenizer: Any, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine, ExitStack() as stack:
        engine.warm(CHUNKS)
        lay_out = stack.enter_context(laying_out(engine))
        stitched, other = lay_out(*CHUNKS), lay_out(*CHUNKS)
        num_queries = int((other.fresh > int(other.reused.nonzero()[-1])).sum())
        assert num_queries >= len(model.tokenizer.encode(QUESTION))
        inexact, scores = stitched.inexact, _attention(model, other, [1, 2], num_queries)
        wanted = inexact[scores[inexact].topk(15).indices].sort().values.tolist()
        assert _pick(model, stitched, "query", 15 / len(inexact), band=(0.25, 0.75)) == wanted


@pytest.mark.parametrize("band", BANDS)
def test_the_band_selects_the_layers_whose_attention_is_used(
    band: tuple[float, float], model: Model, lay_out: LayOut
) -> None:
    layers = {(0.25, 0.75): [1, 2], (0.0, 1.0): [1, 2, 3], (0.5, 0.6): [2], (0.9, 1.0): [3]}[band]
    stitched = lay_out(*CHUNKS)
    scores = _attention(
        model, lay_out(*CHUNKS), layers, int((stitched.fresh > int(stitched.reused.nonzero()[-1])).sum())
    )
    inexact = stitched.inexact
    wanted = inexact[scores[inexact].topk(15).indices].sort().values.tolist()
    assert _pick(model, stitched, "query", 15 / len(inexact), band=band) == wanted


def test_a_question_may_precede_the_chunks(model: Model, lay_out: LayOut) -> None:
    """Then the last fresh tokens are used as the question, however few there are."""
    encode = model.tokenizer.encode
    ids = [*model.tokenizer.preamble, *encode(QUESTION), *encode(CHUNKS[0]), *encode(CHUNKS[1])]
    stitched = lay_out(ids=ids)
    assert not stitched.reused[-1], "the last position is always computed"
    assert len(_pick(model, stitched, "query", 0.2)) == round(0.2 * len(stitched.inexact))


# ---------------------------------------------------------------- the others


def test_first_k_takes_the_beginning_of_every_run_equally(model: Model, lay_out: LayOut) -> None:
    stitched = lay_out(*CHUNKS)
    inexact_runs = [run for run in stitched.runs if not stitched.exact[run.start]]
    assert len(inexact_runs) == 3
    picked = set(_pick(model, stitched, "first_k", 12 / len(stitched.inexact)))
    assert picked == {run.start + i for run in inexact_runs for i in range(4)}


def test_the_first_tokens_of_runs_are_selected_before_the_questions_tokens(model: Model, lay_out: LayOut) -> None:
    stitched = lay_out(*CHUNKS)
    runs, num = [run for run in stitched.runs if not stitched.exact[run.start]], len(stitched.inexact)

    def picked(budget: int, first_tokens: int, policy: str = "query") -> set[int]:
        return set(_pick(model, lay_out(*CHUNKS), policy, budget / num, first_tokens=first_tokens))

    assert len(runs) == 3
    first = {run.start + i for run in runs for i in range(2)}
    for policy in ("query",):
        both = picked(20, 2, policy)
        assert len(both) == 20
        assert first <= both
        assert not first <= picked(20, 0, policy), "otherwise this test shows nothing"
    assert both != picked(20, 0)
    assert picked(20, 2) - first <= picked(20, 0)
    few = picked(6, 2)  # half of six are one token of every run
    assert {run.start for run in runs} <= few
    assert few - {run.start for run in runs} <= picked(6, 0)
    assert picked(5, 2) == picked(5, 0), "not one of every run would fit"


def test_random_is_repeatable_and_its_own(model: Model, lay_out: LayOut) -> None:
    picks = [_pick(model, lay_out(*CHUNKS), "random", 0.3, seed=seed) for seed in (0, 0, 1)]
    assert picks[0] == picks[1] != picks[2]
    state = torch.random.get_rng_state()
    _pick(model, lay_out(*CHUNKS), "random", 0.3)
    assert torch.equal(torch.random.get_rng_state(), state), "other random numbers do not change"


@pytest.mark.parametrize("policy", INFORMED)
def test_choosing_never_makes_kv_worse(policy: str, model: Model, lay_out: LayOut) -> None:
    """After any policy's writes to the cache, blending everything is still full prefill."""
    stitched = lay_out(*CHUNKS)
    _pick(model, stitched, policy, 0.2)
    logits = blend_selected(model, stitched, stitched.inexact)
    full = model.new_cache(len(stitched.ids))
    torch.testing.assert_close(logits, model.forward(stitched.ids[None], full), atol=1e-4, rtol=1e-4)
