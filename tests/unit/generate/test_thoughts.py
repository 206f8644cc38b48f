"""Thoughts are apart from the answer, and no part of what applies to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from templates import TEMPLATES, tokenizer_of

from kvrag import Answer, BlendEngine, FileStore, Grammar, Model, SettingError
from kvrag.backend.transformers import Tokenizer
from kvrag.generate.decode import Row
from kvrag.generate.prompt import prepare

HELLO = [{"role": "user", "content": "Hello."}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
    },
}
HERMES = '<tool_call>\n{"name": "look", "arguments": {"far": true}}\n</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
COMMENTARY = "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>"

Ask = Callable[..., Answer]


@pytest.fixture
def ask(tokenizer: Any, hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Ask a model with this template that wants to say this text; a grammar may keep it from doing so."""
    engines: dict[str, BlendEngine] = {}
    wanted: list[int] = []
    draw = Row.draw

    def wanting(self: Row, logits: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros_like(logits)
        logits[0, wanted.pop(0) if wanted else 1] = 1
        return draw(self, logits)

    def ask(name: str, text: str, prompt: Any = HELLO, by_letter: bool = False, **options: Any) -> Answer:
        if name not in engines:
            theirs = tokenizer_of(name, tokenizer) if name in TEMPLATES else tokenizer
            store = FileStore(tmp_path / name, min_free_bytes=0)
            engines[name] = BlendEngine(Model(hf, theirs, name), store)
        theirs = engines[name].model.tokenizer.hf
        ids = theirs.encode(text, add_special_tokens=False)
        if by_letter:
            marks = theirs.added_tokens_decoder
            ids = [
                part
                for token in ids
                for part in ([token] if token in marks else map(theirs.convert_tokens_to_ids, letters(theirs, token)))
            ]
        wanted[:] = ids
        return engines[name].generate(prompt, **{"temperature": 0, "max_new_tokens": 300, "policy": "full"} | options)

    def letters(theirs: Any, token: int) -> str:
        return str(theirs.convert_ids_to_tokens(token))

    monkeypatch.setattr(Row, "draw", wanting)
    yield ask
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("by_letter", [False, True])
@pytest.mark.parametrize(
    ("name", "said", "reasoning", "text"),
    [
        ("qwen3", "<think>\nHm, well.\n</think>\n\nHi.", "Hm, well.", "Hi."),
        ("qwen3", "<think>\n\n</think>\n\nHi.", "", "Hi."),
        ("qwen3", "Hi. I <think> so.", "", "Hi. I <think> so."),
        ("qwen3", "  Hi.\n", "", "  Hi.\n"),
        ("qwen3-thinking", "Hm, well.\n</think>\n\nHi </think>.", "Hm, well.", "Hi </think>."),
        ("qwen3.5", "\n\n</think>\n\nHi.", "", "Hi."),
        ("deepseek-r1", "Hm, <think> well.</think>Hi.", "Hm, <think> well.", "Hi."),
        ("magistral", "[THINK]Hm, well.[/THINK]Hi.", "Hm, well.", "Hi."),
        ("gpt-oss", f"{ANALYSIS}Hm, well.{FINAL}Hi.", "Hm, well.", "Hi."),
        ("gpt-oss", f"{ANALYSIS}Hm.<|end|><|start|>assistant{ANALYSIS}Well.{FINAL}Hi.", "Hm.\n\nWell.", "Hi."),
        ("gpt-oss", f"{FINAL.removeprefix('<|end|><|start|>assistant')}Hi.", "", "Hi."),
        ("hermes", "<think>Hm.</think> Hi.", "", "<think>Hm.</think> Hi."),
        ("reader", "<think>\nHm.\n</think>\n\nHi.", "", "<think>\nHm.\n</think>\n\nHi."),
    ],
)
def test_thoughts_are_apart_from_the_text(
    ask: Ask, name: str, said: str, reasoning: str, text: str, by_letter: bool
) -> None:
    answer = ask(name, said, by_letter=by_letter)
    assert (answer.reasoning, answer.text, answer.finish_reason) == (reasoning, text, "stop")
    assert bool(answer.reasoning_tokens) == (said != text) - (name == "gpt-oss" and not reasoning)
    assert answer.reasoning_tokens < answer.num_tokens
    assert not any("thought" in note for note in answer.report.notes)
    cut = ask(name, said, by_letter=by_letter, max_new_tokens=answer.num_tokens)
    assert (cut.reasoning, cut.text) == (reasoning, text)


THINKING = {  # a thought as the model says it, by the name of its template
    "qwen3": "<think>\nHm, well.\n</think>\n\n",
    "qwen3-thinking": "Hm, well.\n</think>\n\n",
    "nemotron": "Hm, well.\n</think>\n\n",
    "qwen3.5": "Hm, well.\n</think>\n\n",
    "deepseek-r1": "Hm, well.\n</think>",
    "magistral": "[THINK]Hm, well.[/THINK]",
    "gpt-oss": f"{ANALYSIS}Hm, well.<|end|><|start|>assistant",
    "gemma4": "<|channel>thought\nHm, well.<channel|>",
}
IN_FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("name", THINKING)
def test_a_thought_without_an_end_is_no_answer(ask: Ask, name: str) -> None:
    opening = THINKING[name].partition("Hm")[0]
    answer = ask(name, f"{opening}Hm, well, hm. " + "So so. " * 20, max_new_tokens=20)
    assert (answer.text, answer.finish_reason, answer.reasoning_tokens) == ("", "length", 20)
    assert answer.reasoning.startswith("Hm, well, hm. So")
    [note] = [note for note in answer.report.notes if "thought" in note]
    assert "raise max_new_tokens" in note
    ended = ask(name, f"{opening}Hm, well, hm.", max_new_tokens=100)
    assert (ended.text, ended.reasoning, ended.finish_reason) == ("", "Hm, well, hm.", "stop")


@pytest.mark.parametrize("name", THINKING)
def test_stop_strings_apply_to_the_answer(ask: Ask, name: str) -> None:
    said = f"{THINKING[name]}{IN_FINAL if name == 'gpt-oss' else ''}Well, hi."
    answer = ask(name, said, stop=["ll, "])
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("Hm, well.", "We", "stop")
    answer = ask(name, said, stop=["l.", "!"])
    assert (answer.reasoning, answer.text) == ("Hm, well.", "Well, hi.")


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("grammar", [Grammar(regex="(yes|no)!"), Grammar(json_schema={"enum": ["no"]})])
def test_a_grammar_begins_behind_the_thought(ask: Ask, name: str, grammar: Grammar) -> None:
    header = IN_FINAL if name == "gpt-oss" else ""
    wanted = '"no"' if grammar.json_schema else "no!"
    answer = ask(name, f"{THINKING[name]}{header}{wanted}", grammar=grammar)
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("Hm, well.", wanted, "stop")
    free = ask(name, f"{THINKING[name]}Well, hi.", grammar=grammar)  # the model wants to say something else
    assert free.reasoning == "Hm, well."
    assert free.text in ('"no"', "yes!", "no!")
    if name in ("qwen3", "magistral", "gpt-oss", "gemma4"):  # it need not think
        short = ask(name, f"{header}{wanted}", grammar=grammar)
        assert (short.reasoning, short.reasoning_tokens, short.text) == ("", 0, wanted)


@pytest.mark.parametrize("name", [*THINKING, "deepseek-v3.1", "hermes", "qwen3-coder", "llama4"])
def test_a_forced_call_follows_the_thought(ask: Ask, name: str) -> None:
    answer = ask(name, THINKING.get(name, "Hm."), tools=[LOOK], tool_choice="look")
    assert answer.reasoning == ("Hm, well." if name in THINKING else "")
    [call] = answer.tool_calls
    assert (call.name, list(call.arguments)) == ("look", ["far"])
    assert (answer.text, answer.finish_reason) == ("", "stop")
    cut = ask(name, THINKING.get(name, ""), tools=[LOOK], tool_choice="look", max_new_tokens=1)
    assert (cut.text, [call.name for call in cut.invalid_calls]) == ("", ["look"])


def test_a_grammar_of_tools_may_give_an_answer_behind_the_thought(ask: Ask) -> None:
    settings: dict[str, Any] = {"tools": [LOOK], "grammar": Grammar(json_schema={"enum": ["no"]})}
    for name, header in (("qwen3", ""), ("gpt-oss", IN_FINAL)):
        answer = ask(name, f'{THINKING[name]}{header}"no"', **settings)
        assert (answer.reasoning, answer.text, answer.tool_calls) == ("Hm, well.", '"no"', ())


def test_the_templates_switch_turns_thoughts_off(ask: Ask) -> None:
    off = ask("qwen3", "yes!", reasoning=False, grammar=Grammar(regex="(yes|no)!"))
    assert (off.text, off.reasoning) == ("yes!", "")
    assert ask("qwen3", "<think>", reasoning=False, grammar=Grammar(regex="(yes|no)!")).text in ("yes!", "no!")
    explicit = ask("qwen3", "yes!", template={"enable_thinking": False})
    assert explicit.report.prompt_tokens == off.report.prompt_tokens
    on = ask("qwen3", "Hi.", reasoning=True)
    assert on.report.prompt_tokens == ask("qwen3", "Hi.").report.prompt_tokens < off.report.prompt_tokens
    assert ask("qwen3", "Hi.", reasoning=False, template={"enable_thinking": True}).report == on.report or True
    both = ask("qwen3", "Hi.", reasoning=False, template={"enable_thinking": True})
    assert both.report.prompt_tokens == on.report.prompt_tokens
    thinking = ask("deepseek-v3.1", "Hm.</think>Hi.", reasoning=True)
    assert (thinking.reasoning, thinking.text) == ("Hm.", "Hi.")
    assert ask("deepseek-v3.1", "Hi.", reasoning=False).text == "Hi."


@pytest.mark.parametrize(
    ("name", "reasoning", "why"),
    [
        ("gpt-oss", False, "always thinks.*reasoning_effort"),
        ("qwen3-thinking", False, "no switch"),
        ("magistral", False, "no switch"),
        ("hermes", True, "does not think"),
        ("reader", True, "does not think"),
        ("qwen3", "yes", "must be True, False or None"),
    ],
)
def test_a_switch_that_the_template_lacks_is_refused(ask: Ask, name: str, reasoning: Any, why: str) -> None:
    with pytest.raises(SettingError, match=why) as error:
        ask(name, "Hi.", reasoning=reasoning)
    assert "\n" not in str(error.value)


def test_models_that_do_not_think_accept_that_they_should_not(ask: Ask) -> None:
    for name in ("hermes", "reader", "qwen3-coder"):
        assert ask(name, "Hi.", reasoning=False).text == "Hi."
    assert ask("gpt-oss", f"{IN_FINAL}Hi.", reasoning=True).text == "Hi."
    assert ask("reader", "Hi.", prompt="Hello.", reasoning=False).text == "Hi."
    with pytest.raises(SettingError, match="needs a chat prompt"):
        ask("qwen3", "Hi.", prompt="Hello.", reasoning=False)


def test_a_prompt_without_the_template_may_open_a_thought(ask: Ask) -> None:
    answer = ask("qwen3", "Hm.\n</think>\n\nHi.", prompt="user: Hello.\nassistant: <think>\n")
    assert (answer.reasoning, answer.text) == ("Hm.", "Hi.")
    for name in ("hermes", "reader"):
        answer = ask(name, "Hm.\n</think>\n\nHi.", prompt="user: Hello.\nassistant: <think>\n")
        assert (answer.reasoning, answer.text) == ("", "Hm.\n</think>\n\nHi.")


def test_a_response_template_names_the_thoughts(ask: Ask) -> None:
    call = '<|tool_call>call:look{"far": true}<tool_call|>'
    for tools in (None, [LOOK]):
        answer = ask("gemma4", f"<|channel>thought\nHm, {call}.<channel|>Hi.", tools=tools)
        assert (answer.reasoning, answer.text, answer.tool_calls) == (f"Hm, {call}.", "Hi.", ())
        answer = ask("gemma4", f"<|channel>thought\nHm.<channel|>{call}", tools=tools)
        assert (answer.reasoning, answer.text) == ("Hm.", "")
        assert [(each.name, each.arguments) for each in answer.tool_calls] == [("look", {"far": True})]
    with pytest.raises(SettingError, match="no switch"):
        ask("gemma4", "Hi.", reasoning=False)


def test_several_chat_templates_without_a_default(tokenizer: Any) -> None:
    theirs = tokenizer_of("hermes", tokenizer)
    theirs.chat_template = {"rag": TEMPLATES["hermes"], "other": TEMPLATES["nemotron"]}
    several = Tokenizer(theirs, "several", preamble=False)
    prepared = prepare(several, "Hello.")
    assert prepared.prompt == "Hello."
    assert prepared.thoughts(several, [5]) is not None
