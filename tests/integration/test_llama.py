"""GGUF files in llama.cpp: the gate on each family, engines end to end, and what cannot be run."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers", minversion="5.24")

import gguf_files
from blending import CHUNKS, messages, prepare, relative
from families import build
from forks import forked
from gguf_files import needs_library, write_gguf

from kvrag import BlendConfig, BlendEngine, Model, ModelLoadError, OutOfMemoryError, SettingError, UnsupportedModelError
from kvrag.backend.llama import library
from kvrag.backend.llama.cache import SEQUENCES, LlamaContext
from kvrag.backend.llama.graph import Inputs
from kvrag.backend.llama.model import LlamaModel
from kvrag.backend.transformers.gguf import read_header
from kvrag.errors import AbandonedError, ContextWindowError
from kvrag.inspect.gate import verify
from kvrag.scheduling.waiting import is_cancelled

pytestmark = needs_library


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **more}}


_WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _llama3_factors() -> Any:
    """As llama.cpp's converter computes them, for 16 dimensions, base 5,000 and factor 8."""
    lengths = 2 * np.pi * 5000.0 ** (np.arange(8) / 8)
    smooth = np.clip((8192 / lengths - 1.0) / (4.0 - 1.0), 0, 1)
    return (1 / ((1 - smooth) / 8.0 + smooth)).astype(np.float32)


_GRANITE = {"attention_multiplier": 0.25, "logits_scaling": 4.0}
_YARN = {"own__rope__scaling__type": "yarn", "own__rope__scaling__factor": 4.0}
_MINISTRAL = _YARN | {
    "own__attention__temperature_scale": 0.1,
    "own__rope__scaling__original_context_length": 1024,
}


def _longrope(original: int) -> dict[str, Any]:
    """Settings of a file whose factors for long contexts are used above this length."""
    names = ("rope_factors_short__weight", "rope_factors_long__weight")
    factors = {name: np.linspace(1, top, 8).astype(np.float32) for name, top in zip(names, (2, 40), strict=True)}
    own = {"own__rope__scaling__original_context_length": original, "own__rope__scaling__attn_factor": 1.19}
    return factors | own


# name -> architecture of the file, type of the model, its settings, quantisation of the file, more metadata
FILES: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("llama", "llama", _rope(), "F32", {}),
    "llama-8-bits": ("llama", "llama", _rope(), "Q8_0", {}),
    "llama3": (
        "llama",
        "llama",
        _rope("llama3", factor=8.0, **_LLAMA3) | {"max_position_embeddings": 32768},
        "F16",
        {"rope_freqs__weight": _llama3_factors()},
    ),
    "llama-linear": (
        "llama",
        "llama",
        _rope("linear", factor=2.0),
        "F16",
        {"own__rope__scaling__type": "linear", "own__rope__scaling__factor": 2.0},
    ),
    "llama-yarn": ("llama", "llama", _rope(), "F16", _YARN | {"own__rope__scaling__original_context_length": 256}),
    "qwen3-yarn": ("qwen3", "qwen3", _rope(), "F16", _YARN | {"own__rope__scaling__yarn_beta_fast": 4.0}),
    "phi3-short": ("phi3", "phi3", {"sliding_window": None}, "F16", _longrope(4096)),
    "phi3-long": ("phi3", "phi3", {"sliding_window": None}, "F16", _longrope(96)),
    "mistral-window": ("llama", "mistral", {"sliding_window": 48}, "F16", {}),  # which llama.cpp does not read
    "mixtral": ("llama", "mixtral", {}, "F16", {}),
    "ministral": ("mistral3", "ministral3", _rope(), "F16", _MINISTRAL),
    "granite": ("granite", "granite", _GRANITE, "Q8_0", {"own__attention__scale": 0.25, "own__logit_scale": 4.0}),
    "smollm3": ("smollm3", "smollm3", {"no_rope_layers": [1, 1, 1, 0]}, "F16", {}),
    "cohere2": ("cohere2", "cohere2", {}, "F16", {"own__logit_scale": 0.25}),
    "gpt-oss": ("gpt-oss", "gpt_oss", {}, "F16", _YARN | {"own__expert_feed_forward_length": 96}),
    "gemma": ("gemma", "gemma", {}, "F16", {}),
    "gemma2": ("gemma2", "gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}, "F16", {}),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"head_dim": 32, "num_hidden_layers": 7, "layer_types": None},
        "Q8_0",
        {"own__rope__scaling__type": "linear", "own__rope__scaling__factor": 8.0},
    ),
    "llama-bias": ("llama", "llama", _WIDE | {"attention_bias": True, "mlp_bias": True}, "Q3_K", {}),
    "qwen2": ("qwen2", "qwen2", _rope() | {"tie_word_embeddings": True}, "F16", {}),
    "qwen3": ("qwen3", "qwen3", _rope() | {"head_dim": 32}, "Q8_0", {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"norm_topk_prob": True, "moe_intermediate_size": 32}, "F16", {}),
    "phi3": ("phi3", "phi3", _rope(partial_rotary_factor=0.5) | {"sliding_window": None}, "F16", {}),
    "nemotron": ("nemotron", "nemotron", _rope(partial_rotary_factor=0.75), "F16", {}),
    "stablelm": ("stablelm", "stablelm", _WIDE | {"use_qkv_bias": True}, "F16", {}),
    "starcoder2": ("starcoder2", "starcoder2", _WIDE | _rope(), "Q4_K", {}),
}


# llama.cpp has 8 bits for heads of a multiple of 32 dimensions
HEADS_OF_32 = ("llama-bias", "qwen3", "stablelm", "starcoder2", "gemma2", "gemma3")


@pytest.mark.parametrize(
    ("name", "flash", "kv_type"),
    [*product(FILES, (0, 1), ["f16"]), *product(HEADS_OF_32, (1,), ["q8_0"])],
)
def test_gate(name: str, flash: int, kv_type: str, tokenizer: Any, tmp_path: Path) -> None:
    architecture, model_type, changes, kind, metadata = FILES[name]
    path = write_gguf(tmp_path / "tiny.gguf", architecture, build(model_type, **changes), tokenizer, kind, **metadata)
    header = read_header(str(path))
    assert header is not None
    model = LlamaModel(header, kv_type=kv_type, flash=flash)
    assert model._context.layout.is_transposed == (not flash)
    checks = list(verify(partial(BlendEngine, model), 60))
    assert all(check.passed for check in checks), checks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A tiny qwen2 in 16 bits."""
    hf = build("qwen2", **_rope())
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "qwen2", hf, tokenizer, "F16")


@pytest.fixture(scope="module")
def model(path: Path) -> LlamaModel:
    """The tiny qwen2, with room for two prompts at a time."""
    found = Model.from_pretrained(path, n_ctx=512)
    assert isinstance(found, LlamaModel)
    return found


@pytest.fixture
def endless(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> LlamaModel:
    """The tiny qwen2 without an end token."""
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    return model


@pytest.fixture
def engine(endless: LlamaModel, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(endless, tmp_path / "store", BlendConfig(context_tokens=0)) as engine:
        engine.warm(CHUNKS, document="all")
        yield engine


FLOOR = 0.02
"""Relative difference of logits by which two divisions of one prompt differ, and more."""


def ids_of(engine: BlendEngine, *chunks: str) -> list[int]:
    return engine.model.tokenizer.render(messages(*chunks))


def kv(model: LlamaModel, cache: Any) -> torch.Tensor:
    return torch.cat([side.flatten() for number in range(model.num_layers) for side in cache.layer(number)]).float()


def test_size_is_known(model: LlamaModel) -> None:
    """Start and margin depend on it."""
    assert model.num_parameters == build("qwen2", **_rope()).num_parameters()


def test_restored_kv_is_the_own_prefill(model: LlamaModel) -> None:
    ids = model.tokenizer.encode(" ".join(CHUNKS))
    whole, positions = model.new_cache(len(ids)), torch.arange(len(ids))
    expected, rotations = model.forward(torch.tensor([ids]), whole), model.rotations(positions)
    layers = [whole.layer(number) for number in range(model.num_layers)]
    free = [rotation.unrotate(keys) for rotation, (keys, _) in zip(rotations, layers, strict=True)]

    def source(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = free[number].clone()
        rotations[number].rotate(keys)
        return keys, layers[number][1]

    last = len(ids) - 1
    for rows in ([last], [0, 1, 2, last], [7, 20, 21, 22, last - 3, last], list(range(10, len(ids)))):
        filled = torch.tensor([at for at in range(last) if at not in rows or at == 20])  # 20 is overwritten
        cache = model.new_cache(len(ids), source, filled)
        logits = model.forward(torch.tensor(ids)[rows][None], cache, torch.tensor(rows))
        assert relative(logits, expected) <= FLOOR
        assert relative(kv(model, cache), kv(model, whole)) <= FLOOR


def test_rows_with_gaps_are_one_pass(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the stored KV is; and again over KV that is in the context."""
    ids = torch.tensor(model.tokenizer.encode(" ".join(CHUNKS)))
    own, positions, more = model.new_cache(len(ids)), torch.arange(len(ids)), torch.arange(60, 75)
    model.forward(ids[None].flip(1), own)
    layers = [own.layer(number) for number in range(model.num_layers)]
    rows = torch.tensor([*range(10, 80, 10), 81, *range(len(ids) - 9, len(ids))])
    filled = positions[~torch.isin(positions, rows)]
    caches = [model.new_cache(len(ids), lambda number: layers[number], filled) for _ in range(2)]
    for stretch in [*rows[:8].split(1), rows[8:], more, rows[8:]]:
        expected = model.forward(ids[stretch][None], caches[0], stretch)
    decode, passes = LlamaContext.decode, list[int]()

    def counting(self: LlamaContext, rows: Any, outputs: Any) -> Any:
        passes.append(len(rows))
        return decode(self, rows, outputs)

    monkeypatch.setattr(LlamaContext, "decode", counting)
    model.forward(ids[rows][None], caches[1], rows)
    again = torch.cat([more, rows[8:]])
    found = model.forward(ids[again][None], caches[1], again)
    assert passes == [len(rows), len(again)]
    assert relative(found, expected) <= FLOOR
    assert relative(kv(model, caches[1]), kv(model, caches[0])) <= FLOOR
    with pytest.raises(ValueError, match="have no KV"):
        model.forward(ids[rows[1:]][None], model.new_cache(len(ids), lambda n: layers[n], filled), rows[1:])


def test_keys_outside_of_windows_stay(tmp_path: Path, tokenizer: Any) -> None:
    """llama.cpp would give their cells to other positions, and leaves them out of states."""
    hf = build("gemma2", head_dim=32, query_pre_attn_scalar=32)
    found = Model.from_pretrained(write_gguf(tmp_path / "tiny.gguf", "gemma2", hf, tokenizer, "F16"), n_ctx=512)
    assert isinstance(found, LlamaModel)
    assert found.windows == (48, None) * 2
    ids, before = torch.arange(450)[None] % 500 + 3, found.new_cache(100)
    found.forward(ids[:, :100], before)
    cache, whole = found.new_cache(450), found.new_cache(450)
    found.forward(ids[:, :300], cache)
    del before  # its cells are taken first, and then those of the beginning would be
    for token in ids[0, 300:].tolist():
        logits = found.forward_each([token], [cache])
    cache.outside = found._context.take_out(cache)
    assert relative(logits, found.forward(ids, whole)) <= FLOOR
    assert relative(kv(found, cache), kv(found, whole)) <= FLOOR


def test_branches_are_rows_of_their_own(model: LlamaModel) -> None:
    ids, rows = model.tokenizer.encode(" ".join(CHUNKS))[:40], torch.arange(30)
    found: dict[int, torch.Tensor] = {}
    cache = model.new_cache(40)
    branches = [(20, 4), (25, 6)]
    own = [*ids[:30], *ids[30:34], *ids[34:40]]
    model.forward_until(3, torch.tensor([own]), cache, rows, branches, lambda n, keys, _: found.update({n: keys}))
    assert found.keys() == {0, 1, 2, 3}
    assert found[3].shape[2] == cache.layer(3)[0].shape[2] == 40
    for at, start, stop in ((20, 30, 34), (25, 34, 40)):
        alone = model.new_cache(40)
        model.forward(torch.tensor([[*ids[:at], *own[start:stop]]]), alone)
        assert relative(cache.layer(2)[0][:, :, start:stop], alone.layer(2)[0][:, :, at:]) <= FLOOR


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize(("flash", "kv_type"), [(1, "f16"), (0, "f16"), (1, "q8_0")])
def test_attention_is_that_of_transformers(name: str, flash: int, kv_type: str, tokenizer: Any, tmp_path: Path) -> None:
    """Over KV from elsewhere, with rows in two passes, gaps and windows. Later layers are not computed."""
    architecture, model_type, changes, _, metadata = FILES[name]
    hf = build(model_type, **changes)
    path = write_gguf(tmp_path / "tiny.gguf", architecture, hf, tokenizer, "F16", **metadata)
    header = read_header(str(path))
    assert header is not None
    model, own = LlamaModel(header, kv_type=kv_type, flash=flash), Model(hf, tokenizer)
    ids = (7 * torch.arange(300)) % 500 + 3
    stale = own.new_cache(300)
    own.forward(ids[None].flip(1), stale)

    def received(each: Model, rows: torch.Tensor) -> torch.Tensor:
        filled = torch.arange(300)[~torch.isin(torch.arange(300), rows)]
        cache = each.new_cache(300, lambda number: tuple(part.to(each.dtype) for part in stale.layer(number)), filled)
        return each.attention_received(ids[rows][None], cache, rows, 140, range(1, 3))

    for end in (300, 270):  # with KV behind the last row, too
        rows = torch.tensor([5, 60, *range(end - 150, end)])
        found, expected = received(model, rows), received(own, rows)
        assert len(found) == end
        assert relative(found, expected) <= FLOOR


def test_a_pass_begins_while_attention_is_read(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread; it is computed as any other."""
    ids, rows = torch.arange(40)[None] % 500 + 3, torch.tensor([5, *range(30, 40)])
    layers, found, fill = model.new_cache(40), list[torch.Tensor](), model._fill
    model.forward(ids, layers)
    thread = threading.Thread(target=lambda: found.append(model.forward(ids, model.new_cache(40))))

    def slow(*args: Any) -> Any:
        thread.start()
        thread.join(0.2)  # it waits for the lock then
        return fill(*args)

    monkeypatch.setattr(model, "_fill", slow)
    model.attention_received(ids[:, rows], layers, rows, 5, range(1, 3))
    thread.join()
    assert relative(*found, model.forward(ids, model.new_cache(40))) <= FLOOR


@pytest.mark.parametrize("policy", ["query", "tail", "first_k", "random"])
def test_policies_recompute_stretches(policy: str, engine: BlendEngine) -> None:
    ids = ids_of(engine, *reversed(CHUNKS))
    expected = engine.model.own_logits(ids)
    some, whole = (prepare(engine, ids, ratio, policy) for ratio in (0.2, 1.0))
    assert 0 < some.report.recomputed_tokens < some.report.reused_tokens
    assert relative(whole.logits, expected) <= FLOOR
    full = prepare(engine, ids, policy="full")
    assert relative(full.logits, expected) <= FLOOR


def test_full_prefill_is_llama_cpps_own(engine: BlendEngine) -> None:
    ids = ids_of(engine, *CHUNKS)
    answer = engine.generate(ids, policy="full", max_new_tokens=12, temperature=0)
    assert answer.token_ids == tuple(engine.model.own_tokens(ids, 12))


def test_the_default_is_plain_reuse_and_full_prefill_on_doubt(engine: BlendEngine) -> None:
    ids = ids_of(engine, *reversed(CHUNKS))
    plain = engine.prefill(ids, BlendConfig(context_tokens=0, controller="off", margin=0.0, ratio=0))
    assert plain.report.recomputed_tokens == 0
    sure = engine.generate(ids, margin=1e6, controller="off", max_new_tokens=12, temperature=0)
    assert sure.report.completed is not None
    assert sure.token_ids == tuple(engine.model.own_tokens(ids, 12))


def test_an_answer_is_streamed_stopped_and_goes_on(engine: BlendEngine) -> None:
    prompt = messages(*CHUNKS)
    options: Any = {"max_new_tokens": 8, "temperature": 0, "policy": "full"}
    whole = engine.generate(prompt, **options)
    deltas = list(engine.stream(prompt, **options))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == "length"
    stop = whole.text[2:5]
    assert engine.generate(prompt, **options, stop=[stop]).text == whole.text[: whole.text.index(stop)]
    seeded = [engine.generate(prompt, max_new_tokens=8, temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    abandoned = engine.stream(prompt, max_new_tokens=8, temperature=0)
    next(abandoned)
    abandoned.close()
    history = [*prompt, {"role": "assistant", "content": whole.text}, {"role": "user", "content": "And then?"}]
    again = engine.generate(history, max_new_tokens=4, temperature=0)
    assert again.report.conversation_tokens > 0


def test_16_answers_leave_the_context_to_each_other(engine: BlendEngine) -> None:
    prompts = [ids_of(engine, *CHUNKS[start:], *CHUNKS[:start]) for start in range(4)] * 4
    options: Any = {"policy": "full", "max_new_tokens": 16, "temperature": 0}
    expected = [engine.generate(prompt, **options).token_ids for prompt in prompts]
    found: list[Any] = [None] * len(prompts)

    def answer(number: int) -> None:
        found[number] = engine.generate(prompts[number], **options).token_ids

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(map(len, prompts)) > 2 * engine.model.context_window  # they do not fit at the same time
    same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    assert same >= len(prompts) - 2, (found, expected)  # steps of several rows round otherwise, which near ties show


def test_a_cancelled_prefill_leaves_the_model_usable(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(engine, *CHUNKS)
    with pytest.raises(TimeoutError):
        engine.generate(ids * 2, timeout=1e-9, max_new_tokens=2)
    decode, calls = LlamaContext.decode, list[int]()

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return decode(*args)

    monkeypatch.setattr(LlamaContext, "decode", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(engine, ids, 0.3, "first_k")
    monkeypatch.undo()
    answer = engine.generate(ids, policy="full", max_new_tokens=8, temperature=0)
    assert answer.token_ids == tuple(engine.model.own_tokens(ids, 8))


@pytest.mark.parametrize("has_gaps", [False, True])
def test_a_pass_ends_once_its_consumer_has_left(
    has_gaps: bool, model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, head = torch.arange(5, 105)[None], torch.arange(5, 45)[None]
    rows = torch.tensor([3, *range(40, 140)])
    more = torch.cat([head[:, :1], ids], 1) if has_gaps else ids

    def computed(cache: Any) -> torch.Tensor:
        return model.forward(more, cache, rows if has_gaps else None)

    whole, cache = (model.new_cache(200) for _ in range(2))
    model.forward(head, whole)
    model.forward(head, cache)
    expected = computed(whole)
    lib, left = model._library.functions, threading.Event()
    decode, limit = lib.llama_decode, time.monotonic() + 60

    def in_the_midst(*args: Any) -> Any:
        left.set()
        context = model._other if has_gaps else model._context
        while context._goes_on.ne[0] and time.monotonic() < limit:
            time.sleep(0.01)
        return decode(*args)

    monkeypatch.setattr(lib, "llama_decode", in_the_midst)
    token = is_cancelled.set(left.is_set)
    with pytest.raises(AbandonedError):
        computed(cache)
    is_cancelled.reset(token)
    monkeypatch.undo()
    again = model.new_cache(200) if has_gaps else cache
    if has_gaps:
        model.forward(head, again)
    assert relative(computed(again), expected) <= FLOOR


def test_an_error_in_a_shared_step_leaves_its_answers_usable(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [model.new_cache(8) for _ in range(3)]
    for cache in caches:
        model.forward(torch.tensor([[5, 6, 7]]), cache)
    lib = model._library.functions
    decode = lib.llama_decode
    monkeypatch.setattr(lib, "llama_decode", lambda *args: decode(*args) or -3)
    with pytest.raises(OutOfMemoryError, match=r"could not compute a pass \(status -3"):
        model.forward_each([9, 9, 9], caches)
    monkeypatch.undo()
    assert not model.relieve(), "it has nothing to free"
    logits = model.forward_each([9, 9, 9], caches)
    whole = model.forward(torch.tensor([[5, 6, 7, 9]]), model.new_cache(8))
    assert relative(logits, whole.expand_as(logits)) <= FLOOR


def test_namespaces_forgetting_and_damage(engine: BlendEngine) -> None:
    ids = ids_of(engine, *CHUNKS)
    plain: Any = {"ratio": 0, "max_new_tokens": 1, "temperature": 0}
    reused = engine.generate(ids, **plain).report.reused_tokens
    assert reused > 60
    assert engine.generate(ids, **plain, namespace="other").report.reused_tokens == 0
    for file in (Path(engine.store.path) / "chunks").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        file.write_bytes(data)
    engine._pipeline.memory.drop(engine._pipeline.memory.keys())
    damaged = engine.prefill(ids, BlendConfig(ratio=0, context_tokens=0))
    assert damaged.report.reused_tokens == 0
    assert damaged.report.notes
    engine.warm(CHUNKS, document="all")
    assert engine.generate(ids, **plain).report.reused_tokens == reused
    assert engine.forget("all") == len(CHUNKS)
    assert engine.generate(ids, **plain).report.reused_tokens == 0
    assert relative(damaged.logits, engine.model.own_logits(ids)) <= FLOOR


def test_a_policy_that_needs_single_layers_is_refused(engine: BlendEngine) -> None:
    with pytest.raises(SettingError, match=r"policy hkvd .* llama\.cpp does not give: leave policy out, or use query"):
        engine.generate(ids_of(engine, *CHUNKS), policy="hkvd", max_new_tokens=1)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"quantization": "int8"},
        {"store_states": True},
        {"revision": "main"},
        {"attn_implementation": "eager"},
    ],
)
def test_options_of_torch_are_refused(options: dict[str, Any], path: Path) -> None:
    with pytest.raises(SettingError, match=f"{next(iter(options))}: a GGUF file runs in llama.cpp as it is"):
        Model.from_pretrained(path, **options)


def test_another_device_is_refused(path: Path) -> None:
    with pytest.raises(SettingError, match=r"device: llama\.cpp takes its own GPU, or 'cpu' for none"):
        Model.from_pretrained(path, device="cuda")


@pytest.mark.parametrize("options", [{"n_ctx": 512}, {"kv_type": "q8_0"}, {"n_threads": 1}, {"n_gpu_layers": 0}])
def test_options_of_gguf_files(options: Any, path: Path) -> None:
    with pytest.raises(SettingError, match=f"{next(iter(options))} is for GGUF files"):
        Model.from_pretrained("reader", **options)
    with pytest.raises(SettingError, match=r"n_threads must be an integer in \[1, 512\]"):
        Model.from_pretrained(path, n_threads=513)  # of many thousands, OpenMP would end this process
    if options.keys() & {"n_threads", "n_gpu_layers"}:
        assert Model.from_pretrained(path, **options).own_tokens([5, 6, 7], 2)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> LlamaModel:
    """A tiny llama of many layers, in which rounding adds up, with 8 bits of KV."""
    hf = build("llama", **_WIDE, num_hidden_layers=24)
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama", hf, tokenizer, "F16")
    found = Model.from_pretrained(path, n_ctx=512, kv_type="q8_0")
    assert isinstance(found, LlamaModel)
    return found


def test_kv_of_8_bits_is_restored_as_it_was(rounded: LlamaModel) -> None:
    ids = rounded.tokenizer.encode(" ".join(CHUNKS))[:64]
    cache, positions = rounded.new_cache(len(ids)), torch.arange(len(ids))
    rounded.forward(torch.tensor([ids]), cache)
    layers = [cache.layer(number) for number in range(rounded.num_layers)]
    for layer, rotation in zip(layers, rounded.rotations(positions), strict=True):
        keys = rotation.unrotate(layer[0]).half()
        rotation.rotate(keys)
        layer[0].copy_(keys)
    restored = rounded.new_cache(len(ids), lambda number: layers[number], positions)
    state, own = restored.state(), rounded._context.take_out(cache)
    assert len(state) == len(own) < 0.6 * rounded.bytes_per_token * len(ids)
    assert (state != own).mean() < 0.01


def test_stored_kv_names_the_kind_that_it_was_made_with(rounded: LlamaModel) -> None:
    other = Model.from_pretrained(rounded.name, n_ctx=512)
    assert other.fingerprint.digest != rounded.fingerprint.digest
    assert other.context_window == rounded.context_window


def test_what_llama_cpp_cannot_keep_in_8_bits(path: Path, rounded: LlamaModel) -> None:
    with pytest.raises(OutOfMemoryError, match=r"does not divide .*: pass a smaller n_ctx or another kv_type"):
        Model.from_pretrained(path, kv_type="q8_0")
    header = read_header(rounded.name)
    assert header is not None
    with pytest.raises(OutOfMemoryError, match=r"requires flash_attn .*: pass a smaller n_ctx or another kv_type"):
        LlamaModel(header, n_ctx=128, kv_type="q8_0", flash=0)


def test_a_prompt_that_is_too_long(path: Path) -> None:
    for n_ctx, way_out in ((64, "use fewer or shorter chunks, or raise n_ctx$"), (1 << 40, "shorter chunks$")):
        model = Model.from_pretrained(path, n_ctx=n_ctx)
        with pytest.raises(ContextWindowError, match=way_out):
            model.check_window(model.context_window)


def test_a_model_is_freed_at_once(path: Path) -> None:
    engine_model = Model.from_pretrained(path, n_ctx=256)
    gone = weakref.ref(engine_model)
    engine_model.forward(torch.tensor([[1, 2, 3]]), engine_model.new_cache(3))
    del engine_model
    assert gone() is None


def test_fingerprints_are_the_files(path: Path, model: LlamaModel, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "copy.gguf").write_bytes(path.read_bytes())
    assert Model.from_pretrained(tmp_path / "copy.gguf").fingerprint.digest == model.fingerprint.digest
    other = write_gguf(tmp_path / "other.gguf", "qwen2", build("qwen2", **_rope()), tokenizer, "Q8_0")
    assert Model.from_pretrained(other).fingerprint.digest != model.fingerprint.digest


def test_more_caches_than_sequences_are_steps_one_after_another(model: LlamaModel) -> None:
    caches = [model.new_cache(4) for _ in range(SEQUENCES + 3)]
    for cache in caches:
        model.forward(torch.tensor([[5, 6, 7]]), cache)
    logits = model.forward_each([9] * len(caches), caches)
    alone = model.new_cache(4)
    assert relative(logits, model.forward(torch.tensor([[5, 6, 7, 9]]), alone).expand_as(logits)) <= FLOOR


def test_without_memory_for_a_longer_prompt_the_model_stays_usable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = Model.from_pretrained(path, n_ctx=1024), torch.tensor([3, 700])
    cache = model.new_cache(701)
    model.forward(torch.arange(701)[None] % 500, cache)
    monkeypatch.setattr(model._library.functions, "llama_init_from_model", lambda *_: None)
    with pytest.raises(OutOfMemoryError, match=r"makes no context of 1024 tokens .*: pass a smaller n_ctx"):
        model.forward(torch.tensor([[1, 2]]), cache, rows)
    monkeypatch.undo()
    assert model.own_tokens([5, 6, 7], 2)


def test_memory_that_is_not_there(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  8000000 kB\nMemFree:  100 kB\nMemAvailable:     300 kB\n")
    monkeypatch.setattr("kvrag.backend.llama.model._MEMORY", tmp_path / "meminfo")
    said = r"1024 tokens need 512\.0 KiB of memory, and 300\.0 KiB are free: pass a smaller n_ctx or another kv_type"
    with pytest.raises(OutOfMemoryError, match=said):
        Model.from_pretrained(path, n_ctx=1024, preamble=False)
    assert Model.from_pretrained(path, n_ctx=512, preamble=False).context_window == 512


def test_a_forked_process_is_refused(model: LlamaModel) -> None:
    with pytest.raises(SettingError, match="this model was in use when this process was forked"):
        forked(lambda: model.forward(torch.tensor([[5, 6, 7]]), model.new_cache(3)))


# ---------------------------------------------------------------- what cannot be run

Write = Callable[..., Path]
_STARCODER = {"own__feed_forward_length": 96, "own__attention__head_count_kv": 1}
_STARCODER |= {"own__attention__layer_norm_epsilon": 1e-5}
_DEEPSEEK = {"own__attention__q_lora_rank": 16, "own__attention__kv_lora_rank": 16, "own__rope__dimension_count": 8}
_DEEPSEEK |= {"own__leading_dense_block_count": 1, "own__attention__key_length": 16, "own__attention__value_length": 16}
_DEEPSEEK |= {"own__vocab_size": 1536, "own__expert_count": 4, "own__expert_weights_scale": 1.0}
_DEEPSEEK |= {"own__expert_feed_forward_length": 48, "own__expert_shared_count": 1, "own__expert_gating_func": 2}


@pytest.fixture
def write(tmp_path: Path, tokenizer: Any) -> Write:
    """Write a tiny llama with other metadata."""
    return lambda **more: write_gguf(tmp_path / "tiny.gguf", "llama", build("llama"), tokenizer, **more)


def refusal(path: Path, kind: type[Exception] = UnsupportedModelError) -> str:
    with pytest.raises(kind) as caught:
        Model.from_pretrained(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tokenizer__ggml__pre": "unheard-of"}, "llama.cpp: error loading model vocabulary"),
        ({"own__attention__value_length": 8}, "wrong shape"),
        ({"general__architecture": "rwkv99"}, "no language model, or not its first shard"),
        ({"own__expert_count": 2, "own__expert_used_count": 3}, r"llama.cpp aborts on it \(llama-model.cpp"),
        ({"own__block_count": 9}, "blk.4.attn_norm.weight. not found"),
    ],
)
def test_files_that_are_refused(more: dict[str, Any], said: str, write: Write) -> None:
    import re

    assert re.search(said, refusal(write(**more), Exception))


@pytest.mark.parametrize(
    ("architecture", "model_type", "more", "said"),
    [
        ("gemma-embedding", "gemma3_text", {}, "it keeps no KV"),
        ("dream", "qwen2", {}, "it keeps no KV"),
        ("starcoder", "gpt_bigcode", _STARCODER, "none of its layers has RoPE"),
        ("refact", "llama", {}, "one hides other keys than windows do"),  # ALiBi
        (
            "qwen2vl",
            "qwen2",
            {"own__rope__dimension_sections": [2, 3, 3, 0]},
            "its keys are not rotated by one position",
        ),
        ("deepseek2", "deepseek_v3", _DEEPSEEK, "its keys are not rotated by RoPE alone"),
    ],
)
def test_families_that_are_refused(
    architecture: str, model_type: str, more: dict[str, Any], said: str, tmp_path: Path, tokenizer: Any
) -> None:
    changes = {"n_inner": 96} if model_type == "gpt_bigcode" else {}
    path = write_gguf(tmp_path / "tiny.gguf", architecture, build(model_type, **changes), tokenizer, "F16", **more)
    found = refusal(path)
    assert said in found
    assert found.endswith("use the model's original files, which torch runs")


def test_queries_that_depend_on_positions(tmp_path: Path, tokenizer: Any) -> None:
    """llama.cpp would take them from the numbers of cells."""
    own = _MINISTRAL | {"own__rope__scaling__original_context_length": 256}
    path = write_gguf(tmp_path / "tiny.gguf", "mistral3", build("ministral3", **_rope()), tokenizer, "F16", **own)
    assert r"its queries depend on their position after 256 (pass n_ctx=256)" in refusal(path)
    assert Model.from_pretrained(path, n_ctx=256).context_window == 256


def test_states_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    conv = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
    heads = {"own__attention__head_count_kv": [0, 2, 0, 2], "own__attention__layer_norm_rms_epsilon": 1e-5}
    lfm = write_gguf(tmp_path / "b.gguf", "lfm2", build("lfm2", **conv), tokenizer, "F16", **heads)
    assert "its layers keep a state, which this backend does not restore" in refusal(lfm)


def test_a_wrong_rotation_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Inputs._settings
    monkeypatch.setattr(Inputs, "_settings", lambda *args: settings(*args)._replace(scale=1.5))
    header = read_header(str(path))
    assert header is not None
    with pytest.raises(UnsupportedModelError, match="its keys are not rotated by RoPE alone"):
        LlamaModel(header)


def test_tokens_that_occur_twice(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp would end this process."""
    vocabulary = gguf_files._vocabulary

    def doubled(*args: Any) -> dict[str, Any]:
        settings = vocabulary(*args)
        settings["tokenizer.ggml.tokens"][300] = settings["tokenizer.ggml.tokens"][301]
        return settings

    monkeypatch.setattr(gguf_files, "_vocabulary", doubled)
    file = write_gguf(tmp_path / "tiny.gguf", "llama", build("llama"), tokenizer)
    assert "llama.cpp aborts on it (llama-vocab.cpp" in refusal(file, ModelLoadError)


@pytest.mark.parametrize("shift", [(0, 3), (100, 0)])
def test_wrong_gaps_are_found(shift: tuple[int, int], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that RoPE reads, and cells that the mask hides."""
    replace = Inputs.replace
    monkeypatch.setattr(Inputs, "replace", lambda self, cells, rows: replace(self, cells - shift[0], rows + shift[1]))
    assert "llama.cpp computes rows with gaps otherwise" in refusal(path)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.999])
def test_a_truncated_file(share: float, path: Path, tmp_path: Path) -> None:
    data, file = path.read_bytes(), tmp_path / "tiny.gguf"
    file.write_bytes(data[: int(share * len(data))])
    assert "tiny.gguf" in refusal(file, ModelLoadError)


def test_without_the_library(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", lambda: None)
    with pytest.raises(ModelLoadError, match=r"need llama.cpp's library: pip install 'kvrag\[llama\]'"):
        Model.from_pretrained(path, n_ctx=128)


def test_a_library_that_cannot_be_used(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libllama.so").write_bytes(b"no library")
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "libllama.so"))
    with pytest.raises(ModelLoadError, match=r"libllama\.so cannot be used .*: pip install xllamacpp=="):
        Model.from_pretrained(path, n_ctx=128)
    own = library.__dict__["_TRIAL"]
    monkeypatch.setattr(library, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(ModelLoadError, match="it was built for other processors"):
        library.load("tiny", path)
    monkeypatch.setattr(library, "_TRIAL", own)
    monkeypatch.delenv(library.VARIABLE)
    found = library.find()
    assert found is not None
    monkeypatch.setattr(library, "_DEFAULTS", (("llama_context_default_params", {"n_ctx": 513}),))
    with pytest.raises(ModelLoadError, match="its n_ctx is not where b11549 has it"):
        library._load.__wrapped__(found)
