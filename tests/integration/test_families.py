"""The gate: for every supported family, blending with everything selected is full prefill."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from blending import CHUNKS, messages, plain_logits, prefilled, prepare, relative
from families import FAMILIES, HYBRIDS, SINCE, SMALL, build
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import kvrag.backend.positions
from kvrag import BlendEngine, FileStore, Model, ModelLoadError, OutOfMemoryError, UnsupportedModelError
from kvrag.backend.transformers import loading
from kvrag.errors import ModelError, PromptError
from kvrag.generate.decode import AHEAD
from kvrag.inspect.gate import verify
from kvrag.types import Messages

TOLERANCE = 1e-5


def test_the_families_claimed_are_the_families_tested() -> None:
    families = {model_type for model_type, _ in (FAMILIES | HYBRIDS).values()}
    known = families.intersection(CONFIG_MAPPING.keys())  # the oldest transformers that is supported has fewer
    configs = [AutoConfig.for_model(model_type) for model_type in known]
    assert {config.get_text_config().model_type for config in configs} | (families - known) == loading.FAMILIES


PROMPT = messages(*(CHUNKS[number] for number in (2, 0, 3, 1)))


def _without_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Return the model, whose answers do not end."""
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    return model


def _by_transformers(model: Model) -> tuple[list[int], torch.Tensor, list[int]]:
    """Return the prompt's ids, transformers' logits after them, and the 20 tokens that it generates."""
    ids = model.tokenizer.render(PROMPT)
    full = plain_logits(model.hf, ids)[-1]  # first: generating changes the frequencies of dynamic RoPE
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    with torch.inference_mode():
        generated = model.hf.generate(torch.tensor([ids]), max_new_tokens=20, **options)
    return ids, full, generated[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_gate(family: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, changes = FAMILIES[family]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    hf = build(model_type, **changes)
    if Version(transformers.__version__) < Version(SINCE.get(family, "5")):
        with pytest.raises(UnsupportedModelError):
            Model(hf, tokenizer, family)
        return
    model = _without_end(Model(hf, tokenizer, family), monkeypatch)
    with BlendEngine(model, tmp_path) as engine:
        engine.warm(CHUNKS)
        ids, full, generated = _by_transformers(model)
        for policy in ("hkvd", "query"):
            done = prepare(engine, ids, 1.0, policy)
            report = done.report
            assert report.exact
            assert len(report.runs) == 4
            assert report.recomputed_tokens == len(done.inexact) > 80
            assert relative(done.logits[0], full) <= TOLERANCE
        answer = engine.generate(PROMPT, ratio=1.0, max_new_tokens=20, temperature=0)
        assert list(answer.token_ids) == generated
        _the_next_turn_of_the_conversation_is_exact(engine, hf, PROMPT, answer.text)

        assert relative(prepare(engine, ids, 0.0, "none").logits[0], full) > 1e-3, "reuse alone cannot be exact"
        _layer_0_keys_are_the_models_own(engine, hf, ids)
        _single_chunk_behind_its_preamble_is_exact(engine, hf)
        _a_decode_step_of_unequal_rows_is_exact(engine, hf, ids)


@pytest.mark.parametrize("family", HYBRIDS)
def test_gate_of_families_with_states(
    family: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, changes = HYBRIDS[family]
    if Version(transformers.__version__) < Version(SINCE[family]):
        pytest.skip(f"transformers {transformers.__version__} keeps no states in its caches")
    hf = build(model_type, **changes)
    model = _without_end(Model(hf, tokenizer, family), monkeypatch)
    with BlendEngine(model, tmp_path) as engine:
        engine.warm(CHUNKS)
        ids, full, generated = _by_transformers(model)
        done = prepare(engine, ids, 1.0)
        assert done.report.exact
        assert len(done.report.runs) == 4
        assert done.report.recomputed_tokens == len(done.inexact) > 80
        assert relative(done.logits[0], full) <= TOLERANCE
        _states_equal(engine, done, ids)
        assert not engine.generate(PROMPT, margin=1e-9, max_new_tokens=20, temperature=0).report.exact
        in_doubt = engine.generate(PROMPT, margin=1e6, max_new_tokens=20, temperature=0)
        assert in_doubt.report.completed.rows == len(ids)
        assert in_doubt.report.policy == "tail"
        answer = engine.generate(PROMPT, ratio=1.0, max_new_tokens=20, temperature=0)
        assert answer.report.conversation_tokens > 100
        assert list(answer.token_ids) == list(in_doubt.token_ids) == generated
        _the_next_turn_of_the_conversation_is_exact(engine, hf, PROMPT, answer.text)

        plain, tail = prepare(engine, ids, 0.0, "none"), prepare(engine, ids, 0.4)
        assert relative(plain.logits[0], full) > 1e-3, "reuse alone cannot be exact"
        assert not plain.report.exact
        last = torch.arange(int(tail.selected[0]), len(ids))
        assert set(tail.selected.tolist()) == set(last.tolist()) & set(tail.inexact.tolist())
        _a_decode_step_of_unequal_rows_is_exact(engine, hf, ids)


# short convolutions, three kinds of recurrences, and layers that have attention too
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "bamba", "kimi_linear", "falcon_h1"])
def test_gate_with_stored_states(family: str, tokenizer: Any) -> None:
    model_type, changes = HYBRIDS[family]
    if Version(transformers.__version__) < Version(SINCE[family]):
        pytest.skip(f"transformers {transformers.__version__} keeps no states in its caches")
    model = Model(build(model_type, **changes), tokenizer, family, store_states=True)
    checks = list(verify(partial(BlendEngine, model)))
    assert all(check.passed for check in checks)
    assert "plain reuse after the preamble = full prefill" in [check.name for check in checks]


def _states_equal(engine: BlendEngine, done: Any, ids: list[int]) -> None:
    """After a recompute of everything over stitched KV, states are those of a prefill with nothing reused."""
    own = engine.model.new_cache(len(ids))
    engine.model.forward(torch.tensor([ids]), own)
    assert list(done.cache.checkpoints)[-1] == list(own.checkpoints)[-1] == len(ids)
    states, expected = (cache.checkpoints[len(ids)] for cache in (done.cache, own))
    assert states.keys() == expected.keys()
    for key, state in states.items():
        torch.testing.assert_close(state, expected[key], atol=1e-4, rtol=1e-4)


def _the_next_turn_of_the_conversation_is_exact(engine: BlendEngine, hf: Any, prompt: Messages, said: str) -> None:
    model = engine.model
    question = len(model.tokenizer.render(prompt)) - model.tokenizer.generation_prompt_length()
    ids = model.tokenizer.render([*prompt, {"role": "assistant", "content": said}, *messages(CHUNKS[2], CHUNKS[0])])
    done = prefilled(engine, ids, replace(engine.config, ratio=1.0), goes_on=True)
    report = done.report
    assert report.exact
    if model.rope_follows_length:
        assert report.conversation_tokens == 0, "KV of a shorter prompt is not reused"
    else:
        assert question <= report.conversation_tokens < len(ids)
        assert len(report.runs) == 2
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= TOLERANCE


def _layer_0_keys_are_the_models_own(engine: BlendEngine, hf: Any, ids: list[int]) -> None:
    done = prepare(engine, ids, 0.0, "none")
    own = engine.model.new_cache(len(ids))
    engine.model.forward(torch.tensor([ids]), own)
    reused = done.reused
    for ours, theirs in zip(done.cache.layer(0), own.layer(0), strict=True):
        torch.testing.assert_close(ours[:, :, : len(ids)][:, :, reused], theirs[:, :, reused], atol=1e-5, rtol=1e-5)


def _a_decode_step_of_unequal_rows_is_exact(engine: BlendEngine, hf: Any, ids: list[int]) -> None:
    rows = [ids[:length] for length in (7, 60, 90, 47)]
    expected = []
    for step in range(2):
        rows = [[*row, ids[step]] for row in rows]
        expected.append([plain_logits(hf, row)[-1] for row in rows])
    for least in (99, 2):  # as on a CPU and on a GPU
        with patch.object(engine.model, "joins_from", least):
            _steps_of_unequal_rows_are_exact(engine.model, rows, expected)


def _steps_of_unequal_rows_are_exact(model: Model, rows: list[list[int]], expected: list[list[torch.Tensor]]) -> None:
    lengths = [len(row) - len(expected) for row in rows]
    caches = [model.new_cache(length) for length in lengths]
    for row, length, cache in zip(rows, lengths, caches, strict=True):
        model.forward(torch.tensor([row[:length]]), cache)
    for step, wanted in enumerate(expected, 1):
        assert all(model.can_share_steps(length + step - 1) for length in lengths)
        logits = model.forward_each([row[length + step - 1] for row, length in zip(rows, lengths, strict=True)], caches)
        for own, full in zip(logits, wanted, strict=True):
            assert relative(own, full) <= 10 * TOLERANCE  # products of other shapes round differently


def _single_chunk_behind_its_preamble_is_exact(engine: BlendEngine, hf: Any) -> None:
    tokenizer = engine.model.tokenizer
    ids = [*tokenizer.preamble, *tokenizer.encode(CHUNKS[1]), *tokenizer.encode(" Who?")]
    done = prepare(engine, ids, 0.0, "none")
    report = done.report
    # beyond it, frequencies that follow the length would differ from those the chunk was encoded under
    assert len(ids) <= engine.model.stable_length
    assert report.exact
    assert report.recomputed_tokens == 0
    assert report.stored_tokens == len(tokenizer.encode(CHUNKS[1]))
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "kimi_k25", "llama4", "mistral3", "qwen2_5_vl", "qwen3_5"])
def test_the_text_part_of_a_checkpoint_that_also_reads_images_loads(
    model_type: str, tokenizer: Any, tmp_path: Path
) -> None:
    if Version(transformers.__version__) < Version(SINCE.get(model_type, "5")):
        pytest.skip(f"transformers {transformers.__version__} reads no positions of text for {model_type}")
    hf = build(model_type, images=True, **(FAMILIES | HYBRIDS).get(model_type, (model_type, {}))[1])
    hf.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = Model.from_pretrained(tmp_path / "model")
    ids = model.tokenizer.encode(CHUNKS[0])
    # Llama 4 as a whole fails in transformers 5.24.0, on text too
    full = plain_logits(hf.language_model if model_type == "llama4" else hf, ids)
    assert relative(model.forward_all(torch.tensor([ids]), model.new_cache(len(ids)))[0], full) <= 1e-5
    assert all(check.passed for check in verify(partial(BlendEngine, model)))
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    with pytest.raises(PromptError, match="only text is supported, got message content of type 'image_url'"):
        model.tokenizer.render(image)


@pytest.mark.parametrize(
    ("family", "is_broken"), [("deepseek_v3", False), ("gemma4-shared", False), ("deepseek_v3", True)]
)
def test_verify_allows_for_the_noise_of_half_precision_but_for_no_error(
    family: str, is_broken: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of these, transformers' own attention implementations route some tokens to different experts."""
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes).bfloat16(), tokenizer, family)
    if is_broken:  # recomputed tokens attend to later ones, of the same block
        monkeypatch.setattr("kvrag.backend.transformers.rows._PACKED", 4096)
        monkeypatch.setattr("kvrag.backend.transformers.rows.CPU_ROWS", 4096)
        mask = kvrag.backend.positions.Rows.mask
        monkeypatch.setattr("kvrag.backend.positions.Rows.mask", lambda *args: torch.zeros_like(mask(*args)))
    failed = [check.name for check in verify(partial(BlendEngine, model)) if not check.passed]
    assert ("ratio 1.0 = full prefill (logits)" in failed) == is_broken
    assert bool(failed) == is_broken


@pytest.mark.parametrize("family", ["llama-dynamic", "llama-longrope"])
def test_a_prefix_of_a_chunk_that_was_encoded_under_other_frequencies_is_not_exact(
    family: str, tokenizer: Any, tmp_path: Path
) -> None:
    model_type, changes = FAMILIES[family]
    hf = build(model_type, **changes)
    model = Model(hf, tokenizer, family)
    with BlendEngine(model, tmp_path) as engine:
        long_chunk = " ".join(CHUNKS)
        ids = model.tokenizer.encode(long_chunk)
        assert len(ids) > model.stable_length
        engine.warm([long_chunk])
        ids = [*model.tokenizer.preamble, *ids[:50], *model.tokenizer.encode(" Who?")]
        done = prepare(engine, ids, 0.0, "none")
        assert done.report.stored_tokens == 50
        assert not done.report.exact
        assert relative(done.logits[0], plain_logits(hf, ids)[-1]) > TOLERANCE
        assert relative(prepare(engine, ids, 1.0).logits[0], plain_logits(hf, ids)[-1]) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
def test_an_answer_does_not_depend_on_earlier_prompts(family: str, tokenizer: Any, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[family]
    hf = build(model_type, **changes)
    model = Model(hf, tokenizer, family)
    with BlendEngine(model, tmp_path) as engine:
        engine.warm(CHUNKS)
        short = model.tokenizer.render(messages(CHUNKS[1]))
        long = model.tokenizer.render(messages(*CHUNKS))
        assert len(short) <= model.stable_length < len(long)
        before = prepare(engine, short, 0.3).logits
        prepare(engine, long, 0.3)
        torch.testing.assert_close(prepare(engine, short, 0.3).logits, before, atol=0, rtol=0)


ROPES = ["llama", "llama-dynamic", "llama-longrope", "phi3-longrope"]  # all but the first change with the length


@pytest.mark.parametrize("family", ROPES)
@pytest.mark.parametrize("fails", [False, True])
def test_an_abandoned_stream_that_others_have_decoded_ahead_leaves_full_prefills_kv(
    family: str, fails: bool, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across the length at which frequencies change, also if there is no memory for the pass that changes them."""
    model_type, changes = FAMILIES[family]
    hf = build(model_type, **changes)
    model = Model(hf, tokenizer, family)
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    forward = model.forward

    def failing(ids: torch.Tensor, cache: Any, *more: Any) -> torch.Tensor:
        logits = forward(ids, cache, *more)
        if fails and ids.shape[1] == 97:
            raise OutOfMemoryError("no memory")
        return logits

    monkeypatch.setattr(model, "forward", failing)
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        for length in (81, 87, 93):
            ids = torch.randint(5, 1000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            left, other = (engine.stream(each, max_new_tokens=60, temperature=0) for each in (ids, ids[50::-1]))
            said = [token for _ in range(2) for token in next(left).token_ids]
            for _ in range(AHEAD + 2):
                next(other)
            left.close()
            other.close()
            ids = [*ids, *said, 7]
            done = prefilled(engine, ids, replace(engine.config, ratio=1.0), goes_on=True)
            assert done.report.exact
            assert done.report.conversation_tokens >= length
            assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= TOLERANCE


@pytest.mark.parametrize("family", ROPES)
@pytest.mark.parametrize("history", ["exact", "blend"])
@pytest.mark.parametrize("told", [1, 60])
def test_a_prompt_continues_no_kv_of_one_whose_length_gave_other_frequencies(
    told: int, history: str, family: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with one system message, before and beyond that length, by streams that are abandoned or complete."""
    model_type, changes = FAMILIES[family]
    hf = build(model_type, **changes)
    model = Model(hf, tokenizer, family)
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    system = {"role": "system", "content": CHUNKS[3]}
    lengths = set[bool]()
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS[:3])
        for number, chunks in enumerate((CHUNKS[:3], (), CHUNKS[1:3], ())):
            prompt = [system, *messages(*chunks, question=f"Who is number {number}?")]
            ids = model.tokenizer.render(prompt)
            lengths.add(len(ids) <= 96)  # where the frequencies of these families change
            done = prefilled(engine, ids, replace(engine.config, ratio=1.0, edited_history=history), goes_on=True)
            assert done.report.exact
            assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= TOLERANCE
            stream = engine.stream(prompt, ratio=0.3, max_new_tokens=50, temperature=0, edited_history=history)
            for _ in zip(range(told), stream, strict=False):
                pass
            stream.close()
    assert lengths == {True, False}


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gpt_oss", "cohere", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_full_prefill(
    family: str, dtype: torch.dtype, tokenizer: Any, tmp_path: Path
) -> None:
    model_type, changes = FAMILIES[family]
    hf = build(model_type, **changes)
    reference = hf.to(dtype)
    model = Model(reference, tokenizer, family)
    with BlendEngine(model, tmp_path) as engine:
        engine.warm(CHUNKS)
        ids = model.tokenizer.render(messages(*reversed(CHUNKS)))
        full = plain_logits(reference, ids)[-1]
        done = prepare(engine, ids, 1.0, "random")
        if family != "qwen3_moe":  # a rounding error may send a token to another expert
            assert relative(done.logits[0], full) < 0.15
        assert done.cache.layer(1)[0].dtype == dtype
        assert torch.isfinite(prepare(engine, ids, 0.2, "query").logits).all()


# ---------------------------------------------------------------- what cannot work

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "not by a rotary table"),
    "gpt2": ("gpt2", {}, "not by a rotary table"),
    "bloom": ("bloom", {}, "no layer applies rotary"),
    "mpt": ("mpt", {}, "no layer applies rotary"),
    "gptj": ("gptj", {"rotary_dim": 8}, "not by a rotary table|position-free keys"),
    "rwkv": ("rwkv", {}, "does not write its keys into the cache"),
    "mamba": ("mamba", {"state_size": 4, "time_step_rank": 4}, "none of its layers has attention"),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "do not go on from their state"),
    "minimax": ("minimax", {"head_dim": 16}, "a trial forward pass with a cache and a mask failed"),
    "deepseek_v32": ("deepseek_v32", {}, "attention layers are neither full, sliding nor chunked attention"),
    "doge": ("doge", {}, "a trial forward pass with a cache and a mask failed"),
    "jetmoe": ("jetmoe", {}, "it attends to other keys than those in its cache"),
    "gpt_neox_japanese": ("gpt_neox_japanese", {}, "do not use transformers' attention interface"),
    "xlstm": ("xlstm", {}, "a trial forward pass with a cache and a mask failed"),
    "t5": ("t5", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}, "encoder-decoder"),
    "bart": (
        "bart",
        {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
        "encoder-decoder",
    ),
}


def _random(model_type: str, changes: dict[str, Any]) -> Any:
    if model_type not in ("t5", "bart"):
        return build(model_type, **changes)
    config = AutoConfig.for_model(model_type, **({"vocab_size": 1536} | changes))
    return AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_with_the_reason(name: str, tokenizer: Any) -> None:
    model_type, changes, reason = REFUSED[name]
    hf = _random(model_type, changes)
    with pytest.raises(UnsupportedModelError, match=f"{model_type} models cannot be blended"):
        Model(hf, tokenizer, name)
    with pytest.raises(UnsupportedModelError, match=reason):
        Model(hf, tokenizer, name, allow_unverified=True)


@pytest.mark.parametrize("model_type", ["minimax", "recurrent_gemma", "zamba2", "zaya"])
def test_other_families_with_states_are_refused_from_the_configuration(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{model_type} models cannot be blended: "):
        loading.refuse_unsupported(AutoConfig.for_model(model_type))


def test_alibi_is_refused_from_the_configuration(tokenizer: Any) -> None:
    config = AutoConfig.for_model("falcon", alibi=True)
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        loading.refuse_unsupported(config, allow_unverified=True)


def test_an_untested_family_needs_allow_unverified(tokenizer: Any) -> None:
    hf = _random("diffllama", {})
    with pytest.raises(UnsupportedModelError, match=r"untested.*allow-unverified"):
        Model(hf, tokenizer)
    assert Model(hf, tokenizer, allow_unverified=True).num_layers == 4


def test_memory_that_is_full_is_not_blamed_on_the_architecture(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hf = build("llama")
    monkeypatch.setattr(hf, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        Model(hf, tokenizer)


def test_weights_that_are_elsewhere_are_refused(tokenizer: Any) -> None:
    hf = build("llama")
    hf.model.layers[1].to("meta")  # as accelerate leaves an offloaded layer
    with pytest.raises(ModelLoadError, match=r"offloaded weights to CPU memory or disk.*device='cpu'"):
        Model(hf, tokenizer)


@pytest.mark.parametrize(("layer_1", "works"), [("cpu", True), ("disk", False)])
def test_device_map_spreads_a_model_but_does_not_offload_it(
    layer_1: str, works: bool, tokenizer: Any, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    build("llama").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{number}" for number in range(4)]
    device_map = dict.fromkeys(parts, "cpu") | {"model.layers.1": layer_1}
    hf = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    if works:
        assert Model(hf, tokenizer).num_layers == 4
        assert Model.from_pretrained(tmp_path / "model", device_map={"": "cpu"}).num_layers == 4
        return
    with pytest.raises(ModelLoadError, match="offloaded"):
        Model(hf, tokenizer)
    with pytest.raises(ModelLoadError, match="offload"):
        Model.from_pretrained(tmp_path / "model", device_map=device_map)


@pytest.mark.parametrize(
    ("weights", "config", "reason"),
    [
        ("llama", "qwen3", r"no weights for model.layers.0.self_attn.k_norm.weight"),
        ("qwen3", "llama", r"LlamaForCausalLM.*does not use model.layers.0.self_attn.k_norm.weight.*another model's"),
        ("qwen2", "llama", r"does not use model.layers.0.self_attn.k_proj.bias"),
        ("deepseek_v3", "llama", "config.json gives other sizes than the weights have"),
    ],
)
def test_weights_of_another_family_than_the_configuration_says_are_refused(
    weights: str, config: str, reason: str, tokenizer: Any, tmp_path: Path
) -> None:
    build(weights).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": config}))
    with pytest.raises(ModelError, match=reason):
        Model.from_pretrained(tmp_path, allow_unverified=True)


def _save_with_fewer_layers(hf: Any, tokenizer: Any, folder: Path, more: dict[str, torch.Tensor] | None = None) -> None:
    """Save a model of four layers, and `more` weights, with a config.json that says two."""
    hf.save_pretrained(folder, state_dict=hf.state_dict() | (more or {}))
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": 2} | ({"layer_types": text["layer_types"][:2]} if "layer_types" in text else {})
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "deepseek_v3", "gemma3", "qwen3_vl"])
def test_a_configuration_with_fewer_layers_than_the_weights_is_refused(
    family: str, tokenizer: Any, tmp_path: Path
) -> None:
    _save_with_fewer_layers(build(FAMILIES[family][0]), tokenizer, tmp_path)
    with pytest.raises(ModelLoadError, match=r"config.json has 2 layers, the files hold 4: it is another model's"):
        Model.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_and_rotary_buffers_are_no_part_of_the_model(
    family: str, tokenizer: Any, tmp_path: Path
) -> None:
    hf = build(family)
    own = {key: tensor for key, tensor in hf.state_dict().items() if key.startswith("model.layers.1.")}
    more = {key.replace("layers.1.", "layers.4."): tensor.clone() for key, tensor in own.items()}
    more |= {
        "model.layers.4.eh_proj.weight": torch.ones(64, 128),
        "model.layers.3.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    hf.save_pretrained(tmp_path, state_dict=hf.state_dict() | more)
    tokenizer.save_pretrained(tmp_path)
    assert Model.from_pretrained(tmp_path).num_layers == 4


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_mask_is_refused(name: str, tokenizer: Any) -> None:
    hf = build("llama")
    hf.config._attn_implementation_internal = name
    with pytest.raises(UnsupportedModelError, match=f"{name}.*attn_implementation='sdpa' or 'eager'"):
        Model(hf, tokenizer)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_attention_that_takes_no_mask_is_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    import re

    with pytest.raises(UnsupportedModelError, match=f"{re.escape(name)}.*attn_implementation='sdpa' or 'eager'"):
        Model.from_pretrained("reader", attn_implementation=name)
    with pytest.raises(UnsupportedModelError):
        Model.from_pretrained(tmp_path / "nowhere", attn_implementation=name)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["qwen2", "gemma4-shared", "deepseek_v3", "llama4"])
def test_both_attentions_give_full_prefill(attention: str, family: str, tokenizer: Any, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[family]
    hf = build(model_type, attn_implementation=attention, **changes)
    model = Model(hf, tokenizer)
    assert model.config._attn_implementation == attention
    with BlendEngine(model, tmp_path) as engine:
        engine.warm(CHUNKS)
        ids = model.tokenizer.render(messages(*CHUNKS))
        for policy in ("random", "query", "hkvd"):
            logits = prepare(engine, ids, 1.0, policy).logits[0]
            assert relative(logits, plain_logits(hf, ids)[-1]) <= TOLERANCE
        assert model.config._attn_implementation == attention, "scoring must not change the cache"
        prepare(engine, ids, 0.3, "query")
        assert model.config._attn_implementation == attention


# ---------------------------------------------------------------- context window


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 1024),
        (FAMILIES["llama-linear"][1], 2048),
        (FAMILIES["llama-yarn"][1], 1024),
        (FAMILIES["llama-dynamic"][1], 384),
        (FAMILIES["llama-llama3"][1], 1024),
    ],
)
def test_the_context_window_counts_rope_scaling(changes: dict[str, Any], window: int) -> None:
    assert loading.context_window(AutoConfig.for_model("llama", **(SMALL | changes))) == window


def test_gemma_states_its_window_with_the_scaling_of_its_full_layers_counted_in() -> None:
    config = AutoConfig.for_model(
        "gemma3_text",
        **SMALL
        | {
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    )
    assert loading.context_window(config) == 131072
