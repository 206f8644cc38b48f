"""Decoding equals `model.generate`, streamed: the same tokens and processors, text as soon as it is certain."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from blending import CHUNKS, messages, prepare
from families import FAMILIES, build
from packaging import version

import kvrag.backend.transformers.rows
import kvrag.prefill
from kvrag import BlendEngine, Delta, FileStore, Model, ModelError, Sampling, SettingError
from kvrag.generate.decode import Row, decode

PROMPT = messages(*CHUNKS[:2])


def _generate(hf: Any, ids: list[int], seed: int | None = None, **settings: Any) -> list[int]:
    if seed is not None:
        torch.manual_seed(seed)
    with torch.inference_mode():
        output = hf.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **settings)
    return output[0, len(ids) :].tolist()


# ---------------------------------------------------------------- parity with model.generate


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "gpt_oss", "llama-dynamic", "phi3-longrope"])
def test_greedy_tokens_are_generates_past_windows_and_capacity(
    family: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 48 tokens, RoPE that follows the length, and a cache that has to grow on the way."""
    if family == "phi3-longrope" and version.parse(transformers.__version__) < version.parse("5.20"):
        pytest.skip("transformers before 5.20 forgets the prompt where the frequencies change")
    monkeypatch.setattr(kvrag.prefill, "_ROOM", 3)
    monkeypatch.setattr(kvrag.backend.transformers.rows, "_GROWTH", 7)
    model_type, changes = FAMILIES[family]
    hf = build(model_type, **changes)
    model = Model(hf, tokenizer, family)
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        for prompt in (messages(*CHUNKS), messages(CHUNKS[1])):
            ids = model.tokenizer.render(prompt)
            wanted = _generate(hf, ids, max_new_tokens=70, do_sample=False, eos_token_id=None, pad_token_id=2)
            for policy in ("hkvd", "full"):
                answer = engine.generate(prompt, ratio=1.0, policy=policy, max_new_tokens=70, temperature=0)
                assert list(answer.token_ids) == wanted
                assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.3}, {"seed": 3}, {"top_p": 0.5}]
)
def test_a_device_is_waited_for_once_per_token(
    settings: dict[str, float], endless: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these calls waits for a GPU."""
    waits: list[str] = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        real: Callable[..., Any] = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, real: Any = real, name: str = name, **more: Any) -> Any:
            waits.append(name)
            return real(self, *args, **more)

        monkeypatch.setattr(torch.Tensor, name, counted)
    ids = torch.tensor(endless.tokenizer.render(PROMPT))
    cache = endless.new_cache(len(ids))
    logits = endless.forward(ids[None], cache)
    sampling = Sampling(10, **({"temperature": 0.9} | settings))  # type: ignore[arg-type]
    answer = decode(Row(endless, ids, cache, logits, sampling))
    next(answer)
    for _ in range(8):
        before = len(waits)
        next(answer)
        assert len(waits) - before == 1, waits[before:]


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.4},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.7, "top_k": 50},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampling_is_generates_with_the_same_seed(
    settings: dict[str, float], engine: BlendEngine, endless: Model, hf: Any
) -> None:
    ids = endless.tokenizer.render(PROMPT)
    wanted = _generate(hf, ids, 7, do_sample=True, max_new_tokens=25, eos_token_id=None, pad_token_id=2, **settings)
    answer = engine.generate(PROMPT, policy="full", seed=7, max_new_tokens=25, **settings)
    assert list(answer.token_ids) == wanted
    again = engine.generate(PROMPT, policy="full", seed=7, max_new_tokens=25, **settings)
    assert again.token_ids == answer.token_ids
    other = engine.generate(PROMPT, policy="full", seed=8, max_new_tokens=25, **settings)
    assert other.token_ids != answer.token_ids


def test_repetition_penalty_also_when_greedy(engine: BlendEngine, endless: Model, hf: Any) -> None:
    ids = endless.tokenizer.render(PROMPT)
    more = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 2}
    plain, penalised = _generate(hf, ids, **more), _generate(hf, ids, repetition_penalty=3.0, **more)
    assert plain != penalised
    answer = engine.generate(PROMPT, policy="full", temperature=0, repetition_penalty=3.0, max_new_tokens=30)
    assert list(answer.token_ids) == penalised


def test_without_a_seed_nothing_repeats(engine: BlendEngine, endless: Model) -> None:
    answers = {engine.generate(PROMPT, temperature=2.0, max_new_tokens=20).token_ids for _ in range(3)}
    assert len(answers) == 3


@pytest.fixture
def opinionated(tokenizer: Any) -> tuple[Model, Any]:
    """A model whose generation config samples, like Qwen's."""
    hf = build("llama", eos_token_id=None)
    hf.generation_config.do_sample = True
    hf.generation_config.temperature = 0.7
    hf.generation_config.top_k = 20
    hf.generation_config.top_p = 0.8
    hf.generation_config.repetition_penalty = 1.2
    model = Model(hf, tokenizer)
    model.__dict__["eos_ids"] = frozenset()
    return model, hf


def test_unset_fields_come_from_the_generation_config(opinionated: tuple[Model, Any], tmp_path: Path) -> None:
    model, hf = opinionated
    ids = model.tokenizer.render(PROMPT)
    more = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 2}
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:

        def ours(**settings: Any) -> list[int]:
            return list(engine.generate(PROMPT, policy="full", max_new_tokens=20, **settings).token_ids)

        assert ours(seed=3) == _generate(hf, ids, 3, **more)
        assert ours(seed=3, top_k=3) == _generate(hf, ids, 3, top_k=3, **more) != ours(seed=3)
        assert ours(temperature=0) == _generate(hf, ids, do_sample=False, **more)
        assert ours(temperature=0) == ours(temperature=0, seed=5)
        assert ours(seed=3, temperature=5.0, top_k=0, top_p=1.0, repetition_penalty=1.0) == _generate(
            hf, ids, 3, temperature=5.0, top_k=0, top_p=1.0, repetition_penalty=1.0, **more
        )


def test_min_p_is_generates(opinionated: tuple[Model, Any], tmp_path: Path) -> None:
    model, hf = opinionated
    ids = model.tokenizer.render(PROMPT)
    free = {"temperature": 5.0, "top_k": 0, "top_p": 1.0}
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        answers = {}
        for min_p in (0.0, 0.8, 1.0):
            ours = engine.generate(PROMPT, policy="full", max_new_tokens=20, seed=3, min_p=min_p, **free).token_ids
            more = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 2}
            assert list(ours) == _generate(hf, ids, 3, min_p=min_p, **free, **more)
            answers[min_p] = ours
    assert len(set(answers.values())) == 3


def test_an_answer_that_the_window_cuts_off_is_noted(engine: BlendEngine, endless: Model) -> None:
    ids = [5 + number % 1000 for number in range(endless.context_window - 3)]
    answer = engine.generate(ids, max_new_tokens=10**6, temperature=0)
    assert (len(answer.token_ids), answer.finish_reason) == (3, "length")
    assert "the answer has 3 of 1000000 tokens: the window" in answer.report.notes[-1]
    assert engine.explain(answer.report).report == answer.report
    assert not any("window" in note for note in engine.generate(ids, max_new_tokens=3).report.notes)


def test_a_model_without_sampling_defaults_is_greedy(engine: BlendEngine, endless: Model, hf: Any) -> None:
    ids = endless.tokenizer.render(PROMPT)
    wanted = _generate(hf, ids, max_new_tokens=10, eos_token_id=None, pad_token_id=2)
    assert list(engine.generate(PROMPT, policy="full", max_new_tokens=10).token_ids) == wanted


# ---------------------------------------------------------------- a scripted model

Script = Callable[..., list[Delta]]


@pytest.fixture
def script(endless: Model, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Decode with a model that generates exactly this text, one token after the other."""

    def run(said: str | list[int], **settings: Any) -> list[Delta]:
        tokens = endless.tokenizer.encode(said) if isinstance(said, str) else said
        settings.setdefault("max_new_tokens", len(tokens))
        coming = iter([*tokens, *[500] * 1000])

        def logits(*_: Any) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor([next(coming)]), endless.vocab_size) * 50.0

        monkeypatch.setattr(endless, "forward_each", logits)
        cache = endless.new_cache(8)
        row = Row(endless, torch.tensor([5, 6]), cache, logits(), Sampling(temperature=0, **settings))
        return list(decode(row))

    return run


def _text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


SAID = "The café's “crème brûlée” costs 3 €; 東京から 🍮🍮 and more."


def test_characters_are_whole_and_nothing_is_lost(script: Script, endless: Model) -> None:
    deltas = script(SAID)
    assert _text(deltas) == SAID
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert len(deltas) == len(endless.tokenizer.encode(SAID))
    assert any(delta.text == "" for delta in deltas), "some characters are several tokens"
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert [token for delta in deltas for token in delta.token_ids] == endless.tokenizer.encode(SAID)


def test_an_answer_that_ends_inside_a_character_shows_that_it_does(script: Script, endless: Model) -> None:
    tokens = endless.tokenizer.encode("ab 🍮")
    deltas = script(tokens[:-1])
    assert _text(deltas) == "ab \ufffd"
    assert _text(deltas[:-1]) == "ab "


@pytest.mark.parametrize("stop", ["brûlée", "é", "costs 3 €; 東", "T", "🍮🍮", ".", " and more.", "“crème brûlée”"])
def test_the_answer_ends_before_a_stop_string_wherever_token_borders_lie(stop: str, script: Script) -> None:
    deltas = script(SAID, stop=(stop,))
    assert _text(deltas) == SAID[: SAID.index(stop)]
    assert deltas[-1].finish_reason == "stop"
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_a_possible_stop_string_is_held_back_and_released(script: Script) -> None:
    said = "One two thr. One two three!"
    deltas = script(said, stop=("three!",))
    assert _text(deltas) == said[: said.index("three!")]
    deltas = script(said, stop=("three?",))
    assert _text(deltas) == said
    assert deltas[-1].finish_reason == "length"
    so_far = ""
    for delta in deltas[:-1]:
        so_far += delta.text
        assert not any(so_far.endswith("three?"[:n]) for n in range(1, 6)), "never the beginning of a stop string"


def test_the_first_of_several_stop_strings_counts(script: Script) -> None:
    assert _text(script(SAID, stop=("and", "costs", "東京"))) == SAID[: SAID.index("costs")]
    assert _text(script("aaab aab ab", stop=("ab ab", "b a"))) == "aaa"
    assert _text(script("xyxyxyz end", stop=("xyz",))) == "xyxy"


def test_two_stop_strings_in_one_token(script: Script, endless: Model) -> None:
    words = {token: endless.tokenizer.decode([token]).strip() for token in range(3, 1000)}
    token, word = next((token, word) for token, word in words.items() if word.isalpha() and len(word) > 3)
    first, last = word[:2], word[-1]
    for stop in ((first, last), (last, first)):
        assert _text(script([16, token], stop=stop)).strip() == endless.tokenizer.decode([16])


def test_work_ends_with_the_stop_string(script: Script, endless: Model) -> None:
    deltas = script("One two three. And many more words that nobody wants to hear.", stop=("three",))
    assert sum(len(delta.token_ids) for delta in deltas) <= len(endless.tokenizer.encode("One two three. And"))


@pytest.mark.parametrize("at", [0, 1, 5])
def test_any_of_the_end_tokens_ends_the_answer(
    at: int, script: Script, endless: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(endless.__dict__, "eos_ids", frozenset({1, 274}))
    tokens = endless.tokenizer.encode("Some words were said.")
    assert not {1, 274} & set(tokens)
    for end in (1, 274):
        deltas = script([*tokens[:at], end, *tokens[at:]], max_new_tokens=100)
        assert [token for delta in deltas for token in delta.token_ids] == tokens[:at]
        assert deltas[-1].finish_reason == "stop"
        assert _text(deltas) == endless.tokenizer.decode(tokens[:at])


def test_held_back_text_is_released_with_the_end_token(
    script: Script, endless: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(endless.__dict__, "eos_ids", frozenset({1}))
    deltas = script([*endless.tokenizer.encode("So it end"), 1], max_new_tokens=50, stop=("ending",))
    assert _text(deltas) == "So it end"
    assert deltas[-1].text == "end" or deltas[-1].text.endswith("end")
    assert deltas[-1].finish_reason == "stop"


def test_end_tokens_are_the_models_own(tokenizer: Any) -> None:
    hf = build("llama", num_hidden_layers=1)
    hf.generation_config.eos_token_id = [1, 274]
    assert Model(hf, tokenizer).eos_ids == {1, 274}
    hf.generation_config.eos_token_id = 7
    assert Model(hf, tokenizer).eos_ids == {7}
    hf.generation_config.eos_token_id = None
    assert Model(hf, tokenizer).eos_ids == {tokenizer.eos_token_id}


# ---------------------------------------------------------------- borders


def test_the_window_ends_the_answer(tokenizer: Any, tmp_path: Path) -> None:
    model = Model(build("llama", max_position_embeddings=64), tokenizer)
    model.__dict__["eos_ids"] = frozenset()
    ids = model.tokenizer.encode(CHUNKS[0] + CHUNKS[1])[:60]
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        done = prepare(engine, ids)
        deltas = list(decode(Row(model, done.ids, done.cache, done.logits, Sampling(max_new_tokens=50))))
        assert sum(len(delta.token_ids) for delta in deltas) == 4
        assert deltas[-1].finish_reason == "length"
        done = prepare(engine, ids[:10])
        deltas = list(decode(Row(model, done.ids, done.cache, done.logits, Sampling(max_new_tokens=1))))
        assert [(len(delta.token_ids), delta.finish_reason) for delta in deltas] == [(1, "length")]


def test_logits_that_are_no_numbers_are_an_error_that_says_what_to_do(endless: Model) -> None:
    logits = torch.full((1, endless.vocab_size), torch.nan)
    with pytest.raises(ModelError, match="bfloat16"):
        Row(endless, torch.tensor([5]), endless.new_cache(8), logits, Sampling())


def test_deltas_are_made_when_they_are_asked_for(engine: BlendEngine, endless: Model, monkeypatch: Any) -> None:
    engine.warm(CHUNKS)
    passes = []
    forward, step = endless.forward, endless.forward_each
    monkeypatch.setattr(endless, "forward", lambda *args: passes.append(1) or forward(*args))
    monkeypatch.setattr(endless, "forward_each", lambda *args: passes.append(1) or step(*args))
    deltas = engine.stream(PROMPT, max_new_tokens=50)
    assert not passes
    next(deltas)
    after_first = len(passes)
    for _ in range(3):
        next(deltas)
    assert len(passes) == after_first + 3
    deltas.close()
    assert len(passes) == after_first + 3


def test_streamed_text_and_tokens_are_the_answers(engine: BlendEngine, endless: Model) -> None:
    engine.warm(CHUNKS)
    answer = engine.generate(PROMPT, max_new_tokens=60, temperature=0)
    deltas = list(engine.stream(PROMPT, max_new_tokens=60, temperature=0))
    assert _text(deltas) == answer.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == answer.token_ids
    assert len(answer.token_ids) == 60
    assert endless.tokenizer.decode(answer.token_ids) == answer.text
    assert [delta.report is not None for delta in deltas] == [False] * 59 + [True]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"top_k": 1.5},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
        {"stop": "a string"},
        {"stop": (3,)},
        {"seed": 1.5},
        {"max_new_tokens": "5"},
        {"temperature": "hot"},
        {"temperature": 1e-45},
        {"temperature": float("inf")},
        {"temperature": 10**400},
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 1e39},
        {"seed": 1 << 64},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], engine: BlendEngine) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        Sampling(**settings)
    with pytest.raises(SettingError, match=next(iter(settings))):
        engine.stream(PROMPT, **settings)


@pytest.mark.parametrize("stop", [None, 3, b"bytes", {"a": 1}, np.array(0.5)], ids=repr)
def test_stop_strings_are_a_sequence_of_strings(stop: Any) -> None:
    with pytest.raises(SettingError, match="stop"):
        Sampling(stop=stop)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 2},  # transformers insists on floats
        {"temperature": 1e-9},
        {"temperature": 1e9, "repetition_penalty": 1e9},
        {"temperature": 1e-9, "repetition_penalty": 1e-9},
        {"temperature": np.float32(0.5), "top_p": np.float16(0.5), "repetition_penalty": np.int64(2)},
        {"temperature": Fraction(1, 3)},
        {"temperature": 1, "top_k": np.int8(3), "seed": np.uint64((1 << 64) - 1)},
        {"temperature": 1.0, "top_k": 1 << 70},
        {"temperature": 1.0, "top_p": 1e-9},
        {"max_new_tokens": 10**400},
    ],
    ids=lambda settings: repr(settings)[:60],
)
def test_every_number_in_range_can_be_decoded_with(settings: dict[str, Any], endless: Model) -> None:
    sampling = Sampling(**settings)
    ids, cache = torch.tensor([5, 6, 7]), endless.new_cache(8)
    deltas = decode(Row(endless, ids, cache, endless.forward(ids[None], cache), sampling))
    assert [len(next(deltas).token_ids) for _ in range(3)] == [1, 1, 1]


def test_logits_that_leave_nothing_to_draw_are_an_error(endless: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endless.hf.generation_config, "suppress_tokens", list(range(endless.vocab_size)))
    logits = torch.zeros(1, endless.vocab_size)
    for temperature in (0, 1.0):
        with pytest.raises(SettingError, match="no token"):
            Row(endless, torch.tensor([5]), endless.new_cache(8), logits, Sampling(temperature=temperature))
