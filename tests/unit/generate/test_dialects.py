# ruff: noqa: RUF001
"""Calls in the formats of today's models: streamed, parallel, cut off, within thoughts, and text that is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from templates import tokenizer_of
from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS

from kvrag import Delta, Grammar
from kvrag.backend.transformers import Tokenizer
from kvrag.generate.prompt import Prepared, prepare
from kvrag.types import Answer, BlendReport, FinishReason, join

HELLO = [{"role": "user", "content": "Hello."}]
REPORT = BlendReport.unblended(1, 0)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


WRITE = tool(
    "write_file",
    path={"type": "string"},
    text={"type": "string"},
    mode={"type": "integer"},
    size={"type": "number"},
    is_new={"type": "boolean"},
    tags={"type": "array"},
    owner={"$ref": "#/$defs/Owner"},
    note={"anyOf": [{"type": "string"}, {"type": "null"}]},
)
TOOLS = [WRITE, tool("look", where={"type": "string"}), tool("rest")]
PATH, TEXT = "a <b>.py", 'if "x":\n    print([1, (2)], "}")\n'
SOME = {"path": PATH, "text": TEXT, "mode": 420, "size": 1.5, "is_new": True, "tags": [1, "a"]}
ALL = {**SOME, "owner": {"id": 7}, "note": None}
UP: dict[str, Any] = {"where": "up"}


def spell(name: str, arguments: dict[str, Any]) -> dict[str, str]:
    """Return one call in each of the formats."""
    text = json.dumps(arguments)
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    xml = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return {
        "qwen3": f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>',
        "qwen3-coder": f"<tool_call>\n<function={name}>\n{xml}</function>\n</tool_call>",
        "llama": f'{{"name": "{name}", "parameters": {text}}}',
        "llama4": f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})",
        "magistral": f"[TOOL_CALLS]{name}[ARGS]{text}",
        "gpt-oss": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}",
        "deepseek-r1": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>",
        "deepseek-v3.1": f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
    }


FORMATS = {  # what precedes calls, is between them, and follows
    "qwen3": ("", "\n", ""),
    "qwen3-coder": ("", "\n", ""),
    "llama": ("", "; ", ""),
    "llama4": ("[", ", ", "]"),
    "magistral": ("", "", ""),
    "gpt-oss": ("", "<|call|><|start|>assistant", "<|call|>"),
    "deepseek-r1": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek-v3.1": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
}
THOUGHTS = {
    "qwen3": "<think>\nHm: {}\n</think>\n\n",
    "qwen3.5": "Hm: {}\n</think>\n\n",
    "deepseek-r1": "Hm: {}\n</think>\n\n",
    "magistral": "[THINK]Hm: {}[/THINK]",
    "gpt-oss": "<|channel|>analysis<|message|>Hm: {}<|end|><|start|>assistant",
}
SIZES = [1, 2, 7, 100_000]


def calls_of(form: str, *calls: tuple[str, dict[str, Any]]) -> str:
    before, between, after = FORMATS[form]
    return before + between.join(spell(*call)[form] for call in calls) + after


class Model:
    """The tokenizer of a model, with the tools in its prompt."""

    def __init__(self, name: str, tokenizer: Any, **options: Any) -> None:
        if name == "llama4" and "python-call-list" not in CONTENT_PARSERS:
            pytest.skip("older transformers do not parse Python")
        self.name = name
        self.tokenizer = Tokenizer(tokenizer_of(name, tokenizer), name)
        self.prepared: Prepared = prepare(self.tokenizer, HELLO, TOOLS, **options)

    def hear(self, text: str, size: int = 1, finish: FinishReason = "stop", is_behind: bool = True) -> Answer:
        """Parse an answer that arrives in pieces of this size."""
        ids = self.prepared.render(self.tokenizer)
        thoughts, parser = self.prepared.thoughts(self.tokenizer, ids), self.prepared.parser(self.tokenizer, ids)
        assert parser is not None
        if is_behind and self.name == "deepseek-r1":
            text = f"</think>{text}"
        hidden = {t.content for t in self.tokenizer.hf.added_tokens_decoder.values() if t.special}
        hidden -= {self.tokenizer.hf.convert_ids_to_tokens(token) for token in parser.control_tokens}
        hidden -= {self.tokenizer.hf.convert_ids_to_tokens(t) for t in (thoughts.control_tokens if thoughts else ())}
        for mark in hidden:
            text = text.replace(mark, "")
        deltas = []
        for at in range(0, len(text), size):
            piece = text[at : at + size]
            more = thoughts.push(piece) if thoughts else piece
            deltas.append(parser.parse(Delta(more, (1,), **(thoughts.take() if thoughts else {}))))
        rest = thoughts.end() if thoughts else ""
        last = Delta(rest, (), finish, REPORT, **(thoughts.take() if thoughts else {}))
        deltas.append(parser.parse(last))
        return join(deltas)


def check(answer: Answer, *calls: tuple[str, dict[str, Any]]) -> None:
    """Assert that the answer has these calls."""
    assert [(call.name, call.arguments) for call in answer.tool_calls] == list(calls)
    assert not answer.invalid_calls
    assert len({call.id for call in answer.tool_calls}) == len(calls)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
def test_calls_are_found(form: str, size: int, tokenizer: Any) -> None:
    model = Model(form, tokenizer)
    assert model.prepared.is_native
    for calls in ([("write_file", ALL)], [("rest", {})], [("write_file", SOME), ("look", UP), ("rest", {})]):
        answer = model.hear(calls_of(form, *calls), size)
        check(answer, *calls)
        assert answer.text == ""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", THOUGHTS)
def test_a_call_in_a_thought_is_text_of_the_thought(form: str, size: int, tokenizer: Any) -> None:
    model = Model(form, tokenizer)
    written = "qwen3-coder" if form == "qwen3.5" else form
    said = calls_of(written, ("look", UP)).replace("<|call|>", "").replace("[TOOL_CALLS]", "").replace("[ARGS]", "")
    thought = THOUGHTS[form].format(said)
    answer = model.hear(f"{thought}{calls_of(written, ('rest', {}))}", size, is_behind=False)
    check(answer, ("rest", {}))
    assert (answer.reasoning, answer.text) == (f"Hm: {said}".rstrip(), "")
    answer = model.hear(thought, size, "length", is_behind=False)
    check(answer)
    assert (answer.reasoning, answer.text) == (f"Hm: {said}".rstrip(), "")


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("form", FORMATS)
def test_a_call_cut_off_is_invalid(form: str, size: int, tokenizer: Any) -> None:
    model = Model(form, tokenizer)
    whole = calls_of(form, ("write_file", SOME))
    for end in range(whole.index("write_file") + len("write_file") + 1, len(whole) + 1):
        answer = model.hear(whole[:end], size, "length")
        assert len(answer.tool_calls) + len(answer.invalid_calls) <= 1, whole[:end]
        if answer.tool_calls:  # only closing marks are missing
            check(answer, ("write_file", SOME))
        elif answer.invalid_calls:
            [call] = answer.invalid_calls
            assert call.name in ("", "write_file")
            with pytest.raises(json.JSONDecodeError):
                json.loads(call.arguments)
        else:  # nothing but its beginning
            assert end <= whole.index("write_file") + len("write_file") + 20
            assert answer.text == whole[:end].replace("[TOOL_CALLS]", "").replace("[ARGS]", "")
    middle = model.hear(whole[: whole.index("print")], size, "length")
    assert [call.name for call in middle.invalid_calls] == ["write_file"]
    assert middle.text == ""


TEXTS = {
    "qwen3-coder": [
        "a <tool_call> b <function",
        "<tool_call>\nno call\n</tool_call> is how",
        "So: </tool_call> <b>",
        "  Well.\n\n",
    ],
    "llama4": [
        "[1, 2]",
        "[look",
        "[look(1)] x",
        "[look(where=up)]",
        "[look(where='up'), or down]",
        "[jump(far=True)]",
        "[]",
        "See [look(where='up')]",
    ],
    "llama": ["[1, 2]", "[look(where=up)]", "[jump(far=True)]"],
    "deepseek-r1": [
        "a <｜tool▁call▁begin b",
        "<｜tool▁call▁begin｜>no call<｜tool▁call▁end｜>.",
        "<｜tool▁calls▁end｜>",
    ],
    "gpt-oss": ["Hi to=functions.look", "  Well.\n\n", "{}"],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in TEXTS.items() for text in texts])
def test_text_that_is_no_call_is_returned_unchanged(form: str, text: str, size: int, tokenizer: Any) -> None:
    before = {"gpt-oss": "<|channel|>final<|message|>"}.get(form, "")
    answer = Model(form, tokenizer).hear(before + text, size)
    check(answer)
    assert (answer.text, answer.reasoning) == (text, "")


def test_values_in_xml_have_the_types_of_the_schema(tokenizer: Any) -> None:
    model = Model("qwen3-coder", tokenizer)
    values = {
        "path": "420",
        "mode": "3",
        "size": "big",
        "is_new": "False",
        "tags": "[1",
        "note": "null",
        "owner": "{}",
    }
    xml = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    answer = model.hear(f"Well.\n<function=write_file>\n{xml}<parameter=other>1</parameter></function>\nSo.")
    wanted = {"path": "420", "mode": 3, "size": "big", "is_new": False, "tags": "[1", "note": None, "owner": {}}
    check(answer, ("write_file", {**wanted, "other": "1"}))
    assert answer.text == "Well.\nSo."


def test_a_call_that_is_malformed_after_it_began_is_invalid(tokenizer: Any) -> None:
    for form, said in (
        ("qwen3", '<tool_call>{"name": "look", "arguments": {"where": "up"} or}</tool_call>'),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{'where': up}<｜tool▁call▁end｜>"),
    ):
        for size in SIZES:
            answer = Model(form, tokenizer).hear(said, size)
            [call] = answer.invalid_calls
            assert call.name == "look"
            assert (answer.text, answer.tool_calls) == ("", ())


@pytest.mark.parametrize("form", FORMATS)
def test_tools_and_earlier_calls_are_rendered_by_the_template(form: str, tokenizer: Any) -> None:
    model = Model(form, tokenizer)
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "look", "arguments": '{"where": "up"}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    history = [*HELLO, said, {"role": "tool", "content": "A bird.", "tool_call_id": "abcdefghi"}]
    prepared = prepare(model.tokenizer, history, TOOLS)
    told = model.tokenizer.decode(prepared.render(model.tokenizer), control_tokens=True)
    assert prepared.is_native
    assert "write_file" in told
    assert "A bird." in told
    earlier = spell("look", UP)["llama" if form == "llama4" else form]
    assert earlier.partition("<|constrain|>")[0].removeprefix("<|channel|>commentary ").strip() in told


@pytest.mark.parametrize("form", [*FORMATS, "qwen3.5", "gemma4"])
def test_a_prompt_does_not_depend_on_whether_a_call_is_forced(form: str, tokenizer: Any) -> None:
    free, forced = (Model(form, tokenizer, tool_choice=choice) for choice in (None, "look"))
    other = Model(form, tokenizer, grammar=Grammar(json_schema={"enum": ["yes", "no"]}))
    prompts = [model.prepared.render(model.tokenizer) for model in (free, forced, other)]
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_format_that_cannot_be_forced_is_replaced_in_the_call(tokenizer: Any) -> None:
    for form in ("qwen3-coder", "qwen3.5", "llama4", "gemma4"):
        model = Model(form, tokenizer, tool_choice="look")
        assert "arguments" in str(model.prepared.grammar)
        before = "</think>" if form == "qwen3.5" else ""
        answer = model.hear(before + spell("look", UP)["qwen3"])
        check(answer, ("look", UP))


@pytest.mark.parametrize("form", FORMATS)
def test_an_earlier_call_is_rendered_with_its_letters(form: str, tokenizer: Any) -> None:
    """Escaped ones would be other tokens than those that the model wrote, so that their KV would not be reused."""
    model = Model(form, tokenizer)
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "look", "arguments": {"where": "Zürich"}}}
    prepared = prepare(model.tokenizer, [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS)
    assert "Zürich" in model.tokenizer.decode(prepared.render(model.tokenizer), control_tokens=True)


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_cut_off_anywhere_continues_as_a_conversation(form: str, tokenizer: Any) -> None:
    model = Model(form, tokenizer)
    whole = "Well. " * (form not in ("llama", "llama4")) + calls_of(form, ("look", UP), ("write_file", {"path": PATH}))
    for length in range(len(whole)):
        answer = model.hear(whole[:length], 1000, "length")
        calls = [*answer.tool_calls, *answer.invalid_calls]
        said = [{"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "No."} for call in calls]
        history = [*HELLO, {"role": "assistant", "content": answer.text, "tool_calls": said}, *results, *HELLO]
        ids = prepare(model.tokenizer, history, TOOLS).render(model.tokenizer)
        text = model.tokenizer.decode(ids, control_tokens=True)
        assert text.count("No.") == len(calls)
        if not answer.tool_calls:  # some templates leave out the text of a message with calls
            assert all(call.arguments in text for call in answer.invalid_calls)
