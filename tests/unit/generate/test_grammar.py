"""Answers under a grammar: for any model, the answer is in the grammar's language."""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import messages, prepare
from families import build
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvrag import Answer, BlendEngine, FileStore, Grammar, Model, ModelError, SettingError
from kvrag.generate.grammar import constrain

PROMPT = messages("Who?")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "home": {"$ref": "#/$defs/Place"},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "home", "kind", "tags"],
    "$defs": {"Place": {"type": "object", "properties": {"is_far": {"type": "boolean"}}, "required": ["is_far"]}},
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    home = person.pop("home")
    assert list(home) == ["is_far"]
    assert isinstance(home["is_far"], bool)
    assert list(person) == ["name", "age", "kind", "tags"]
    assert len(person["name"]) <= 8
    assert 0 <= person["age"] <= 150
    assert person["kind"] in ("cat", "dog")
    return all(isinstance(tag, bool) for tag in person["tags"])


LANGUAGES: list[tuple[Grammar, Callable[[str], Any]]] = [
    (Grammar(json_schema=PERSON), is_person),
    (Grammar(regex=r"[0-9]{3}-(yes|no)\."), re.compile(r"[0-9]{3}-(yes|no)\.").fullmatch),
    (Grammar(regex="grün|こんにちは"), ["grün", "こんにちは"].count),
    (
        Grammar(lark='start: word (", " word)~2 "!"\nword: /[a-c]{2,4}/'),
        re.compile("([a-c]{2,4}, ){2}[a-c]{2,4}!").match,
    ),
    (Grammar(lark='root ::= ("a" | "b") "c"'), ["ac", "bc"].count),
]


@pytest.mark.parametrize("temperature", [0, 2.0])
@pytest.mark.parametrize(("grammar", "is_in"), LANGUAGES)
def test_answers_are_in_the_language_and_end_with_it(
    engine: BlendEngine, grammar: Grammar, is_in: Callable[[str], Any], temperature: float
) -> None:
    settings = {"grammar": grammar, "temperature": temperature, "seed": 3, "max_new_tokens": 120}
    answer = engine.generate(PROMPT, **settings)
    assert is_in(answer.text), answer.text
    assert answer.finish_reason == "stop"
    assert "".join(delta.text for delta in engine.stream(PROMPT, **settings)) == answer.text


def test_the_model_chooses_among_what_is_allowed(model: Model, engine: BlendEngine) -> None:
    answer = engine.generate(PROMPT, temperature=0, grammar=Grammar(regex="[a-z]"))
    letters = [model.tokenizer.encode(letter)[0] for letter in string.ascii_lowercase]
    logits = prepare(engine, model.tokenizer.render(PROMPT), policy="full").logits[0]
    assert list(answer.token_ids) == [max(letters, key=lambda token: float(logits[token]))]


def test_an_end_token_is_allowed_only_where_the_grammar_may_end(model: Model) -> None:
    logits = torch.zeros(1, model.vocab_size)
    constraint = constrain(model, Grammar(regex="a+"))
    [a] = model.tokenizer.encode("a")
    eos = next(iter(model.eos_ids))
    allowed = constraint.mask(logits).isfinite()[0]
    assert allowed[a]
    assert not allowed[eos]
    assert not allowed[len(model.tokenizer.hf) :].any()
    assert not constraint.push(a)
    allowed = constraint.mask(logits).isfinite()[0]
    assert allowed[a]
    assert allowed[eos]
    assert allowed.sum() < 10


def test_json_has_no_free_space_and_no_properties_but_those_named(model: Model) -> None:
    inner = {"type": "object", "properties": {"b": {"enum": [1]}}, "required": ["b"]}
    outer = {"type": "object", "properties": {"a": {"anyOf": [inner]}}, "required": ["a"]}
    constraint = constrain(model, Grammar(json_schema=outer))
    for letter in '{"a": {"b": 1}}':
        allowed = constraint.mask(torch.zeros(1, model.vocab_size)).isfinite()[0].nonzero().flatten()
        starts = {model.tokenizer.decode([int(token)])[:1] for token in allowed}
        assert starts == {letter}
        is_complete = constraint.push(model.tokenizer.encode(letter)[0])
    assert is_complete


def test_nothing_is_computed_after_the_end_of_the_grammar(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = Model.forward_each

    def counting(self: Model, tokens: list[int], *args: Any) -> torch.Tensor:
        steps.append(len(tokens))
        return step(self, tokens, *args)

    monkeypatch.setattr(Model, "forward_each", counting)
    answer = engine.generate(PROMPT, grammar=Grammar(regex="[xyz]{6}"), temperature=0, policy="full")
    assert steps.count(1) == len(answer.token_ids) - 1


def test_top_k_chooses_among_what_is_allowed(engine: BlendEngine) -> None:
    answer = engine.generate(PROMPT, grammar=Grammar(regex="[xyz]{6}"), top_k=1, temperature=1.0, seed=1)
    assert re.fullmatch("[xyz]{6}", answer.text)


def test_an_answer_cut_off_is_reported(engine: BlendEngine) -> None:
    answer = engine.generate(PROMPT, grammar=Grammar(regex="a{500}"), max_new_tokens=5)
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 5)
    assert set(answer.text) == {"a"}


def test_a_grammar_does_not_change_reuse(engine: BlendEngine) -> None:
    chunk = "Kan Dror was born in Stelburg. He plays the banjo. He owns a goat and a cat. He studied geology."
    engine.warm([chunk])
    engine._answering.close()  # the second prompt would begin like the first
    answers: list[Answer] = [
        engine.generate(messages(chunk), ratio=1.0, temperature=0, max_new_tokens=40, grammar=grammar, policy=policy)
        for grammar in (None, Grammar(regex="[a-z ]{30}"))
        for policy in ("full", "hkvd")
    ]
    assert answers[0].text == answers[1].text
    assert answers[2].text == answers[3].text
    assert answers[1].report.stored_tokens == answers[3].report.stored_tokens > 20


# ---------------------------------------------------------------- other tokenizers


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Like Llama 2's and Gemma's: spaces are letters, and characters outside the vocabulary are bytes."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    pieces = ["<s>", "</s>", *bytes_, "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁the", "th", "he", "an"]
    merges = [("▁", "a"), ("t", "h"), ("h", "e"), ("a", "n"), ("▁", "the")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "the"])}
    bpe = Tokenizer(models.BPE(vocabulary, merges[:4], byte_fallback=True, unk_token=None))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT's, Llama 3's and Qwen's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    bpe.train_from_iterator(["the cat and the hat, über den Wolken"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("make", [sentencepiece_like, byte_level])
def test_other_kinds_of_tokenizers(make: Callable[[], Any], tmp_path: Path) -> None:
    model = Model(build("llama"), make(), "other")
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        for regex in ("the cat [a-z]{5}", "über 你好"):
            answer = engine.generate("the cat", grammar=Grammar(regex=regex), temperature=1.5, seed=1)
            assert re.fullmatch(regex, answer.text)
        person = engine.generate("the", grammar=Grammar(json_schema=PERSON), temperature=0, max_new_tokens=200)
        assert is_person(person.text)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "needs json_schema, regex or lark, got none"),
        ({"regex": "a", "lark": "b"}, "got regex, lark"),
        ({"regex": 3}, "regex must be a string, got 3"),
        ({"json_schema": "{}"}, "json_schema must be a dict"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema is not JSON"),
    ],
)
def test_an_invalid_grammar_is_refused_when_it_is_created(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        Grammar(**wrong)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar(regex="("), "regex is invalid or not supported: .*invalid regex"),
        (Grammar(lark="start: foo"), 'lark is invalid or not supported: .*unknown name: "foo"'),
        (Grammar(lark="root ::= ("), "lark"),
        (Grammar(json_schema={"type": "objct"}), "Invalid type: objct"),
        (Grammar(json_schema={"type": "string", "minLength": 3, "maxLength": 2}), "Unsatisfiable"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused_before_any_work(
    engine: BlendEngine, grammar: Grammar, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlendEngine, "prefill", None)
    with pytest.raises(SettingError, match=why) as error:
        engine.generate(PROMPT, grammar=grammar)
    assert "\n" not in str(error.value)


def test_without_the_extra_the_remedy_is_named(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SettingError, match=r"pip install 'kvrag\[grammar\]'"):
        engine.generate(PROMPT, grammar=Grammar(regex="a"))
    assert engine.generate(PROMPT, max_new_tokens=1).token_ids


def test_a_token_that_was_not_allowed_is_an_error(model: Model) -> None:
    constraint = constrain(model, Grammar(regex="a+"))
    with pytest.raises(ModelError, match="the grammar cannot continue"):
        constraint.push(model.tokenizer.encode("b")[0])


LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", **LOOP},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"], **LOOP},
    ],
)
def test_a_schema_that_refers_to_itself_without_an_end_is_a_wrong_setting(
    engine: BlendEngine, schema: dict[str, Any]
) -> None:
    with pytest.raises(SettingError, match=r"the grammar cannot continue .*refer to itself") as error:
        engine.generate(PROMPT, grammar=Grammar(json_schema=schema), max_new_tokens=400)
    assert "\n" not in str(error.value)


def test_a_long_chain_of_references_does_not_overflow_the_stack(model: Model) -> None:
    def chain(length: int) -> Grammar:
        links = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(length)}
        return Grammar(json_schema={"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "integer"}}})

    assert constrain(model, chain(100))
    assert constrain(model, chain(15_000))
    with pytest.raises(SettingError, match="the grammar is longer than 1048576 characters"):
        constrain(model, Grammar(json_schema={"enum": ["a" * 1_100_000]}))


@pytest.mark.parametrize("levels", [98, 101, 480, 5000])
def test_json_that_is_nested_too_deeply_is_refused(levels: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    if levels < 100:
        assert Grammar(json_schema=schema)
        return
    for wrong in (schema, [schema]):
        with pytest.raises(SettingError, match=r"nested deeper than 100 levels|json_schema must be a dict") as error:
            Grammar.of_response_format({"type": "json_schema", "json_schema": {"schema": wrong}})
        assert len(str(error.value)) < 400
    with pytest.raises(SettingError, match="response_format must be"):
        Grammar.of_response_format({"type": schema})


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}, PERSON),
    ],
)
def test_openais_response_format_is_a_grammar(response_format: dict[str, Any], schema: dict[str, Any]) -> None:
    grammar = Grammar.of_response_format(response_format)
    assert grammar is not None
    assert grammar.json_schema == schema
    assert Grammar.of_response_format({"type": "text"}) is None


@pytest.mark.parametrize(
    "wrong", [{}, {"type": "json_schema"}, {"type": "xml"}, "json", {"type": "json_schema", "json_schema": 3}]
)
def test_invalid_response_formats_are_refused(wrong: Any) -> None:
    with pytest.raises(SettingError, match="response_format must be"):
        Grammar.of_response_format(wrong)


def test_grammars_of_answers_that_are_decoded_together(engine: BlendEngine) -> None:
    each: list[Any] = [{"grammar": Grammar(regex="[a-f]{9}x")}, {}, {"grammar": Grammar(regex="(yes|no) [0-9]{3}")}]
    settings: dict[str, Any] = {"temperature": 0, "max_new_tokens": 15, "policy": "full"}
    alone = [engine.generate(PROMPT, **settings, **own) for own in each]
    answers = engine.generate_batch([PROMPT] * 3, each, **settings)
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
