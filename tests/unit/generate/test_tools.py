"""Tools: their description in the prompt, and the calls in the answer."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS

from kvrag import BlendEngine, Delta, FileStore, Grammar, Model, PromptError, SettingError, ToolCall
from kvrag.generate.parse import AnswerParser, call_regions
from kvrag.generate.prompt import prepare
from kvrag.types import FinishReason, join

HELLO = [{"role": "user", "content": "Hello."}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "Useful.", "parameters": parameters}}


LOOK = tool("look", where={"type": "string", "maxLength": 6}, far={"type": "boolean"})
COUNT = tool("count", number={"type": "integer", "minimum": 0, "maximum": 9})
NOTHING = {"type": "function", "function": {"name": "rest"}}
TOOLS = [LOOK, COUNT, NOTHING]

CALLED = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "look", "arguments": {"where": "up", "far": True}},
}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is up?"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "content": "A bird.", "tool_call_id": "abcdefghi", "name": "look"},
]


def template(tools: str, call: str) -> str:
    """A chat template with the tool parts of a well-known one."""
    return (
        f"{{% if tools %}}{tools}{{% endif %}}"
        "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
        f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}\n"
        "{% endfor %}assistant:"
    )


_SIGNATURES = "{% for t in tools %}{{ t | tojson }}{% endfor %}"
_LLAMAS = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
TEMPLATES = {
    "qwen": template(_SIGNATURES, "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"),
    "llama": template(
        f"{{{{ '{_LLAMAS}' }}}}{_SIGNATURES}",
        '{{ \'{"name": "\' + c.function.name + \'", "parameters": \' + c.function.arguments | tojson + "}" }}',
    ),
    "mistral": template("[AVAILABLE_TOOLS]{{ tools | tojson }}", "[TOOL_CALLS][{{ c.function | tojson }}]"),
    "mistral-args": template(
        "[AVAILABLE_TOOLS]{{ tools | tojson }}",
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    ),
}


@pytest.fixture(params=["reader", *TEMPLATES])
def talker(request: pytest.FixtureRequest, tokenizer: Any, hf: Any, tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine of the tiny llama with the tool format of this model."""
    theirs = copy.deepcopy(tokenizer)
    if request.param in TEMPLATES:
        theirs.chat_template = TEMPLATES[request.param]
    if request.param.startswith("mistral"):
        theirs.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    with BlendEngine(Model(hf, theirs, request.param), FileStore(tmp_path, min_free_bytes=0)) as engine:
        yield engine


def check(call: ToolCall) -> bool:
    """Return whether the arguments match the tool."""
    if call.name == "look":
        assert list(call.arguments) == ["where", "far"]
        assert isinstance(call.arguments["where"], str)
        return isinstance(call.arguments["far"], bool)
    if call.name == "count":
        return list(call.arguments) == ["number"] and call.arguments["number"] in range(10)
    return call.name == "rest" and call.arguments == {}


# ---------------------------------------------------------------- forced calls


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        "look",
        "rest",
        {"type": "function", "function": {"name": "count"}},
        {"type": "tool", "name": "count"},  # Anthropic's form
    ],
)
def test_a_forced_call_is_returned_for_every_model_and_format(talker: BlendEngine, choice: Any) -> None:
    settings = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.5, "seed": 7, "max_new_tokens": 100}
    answer = talker.generate(HELLO, **settings)
    [call] = answer.tool_calls
    assert check(call)
    assert choice == "required" or call.name in str(choice)
    assert len(call.id) == 9
    assert call.id.isalnum()
    assert (answer.text, answer.finish_reason) == ("", "stop")
    deltas = list(talker.stream(HELLO, **settings))
    assert [(c.name, c.arguments) for delta in deltas for c in delta.tool_calls] == [(call.name, call.arguments)]
    assert sum(len(delta.token_ids) for delta in deltas) == len(answer.token_ids)
    assert not any(delta.text for delta in deltas)


def test_a_forced_call_can_have_nested_types(talker: BlendEngine) -> None:
    nested = tool("keep", places={"type": "array", "items": {"$ref": "#/$defs/Place"}, "minItems": 1, "maxItems": 1})
    place = {"type": "object", "properties": {"row": {"enum": [1, 2]}}, "required": ["row"]}
    nested["function"]["parameters"]["$defs"] = {"Place": place}
    answer = talker.generate(HELLO, tools=[LOOK, nested], tool_choice="keep", temperature=0, max_new_tokens=100)
    [call] = answer.tool_calls
    assert call.arguments in ({"places": [{"row": 1}]}, {"places": [{"row": 2}]})


def test_answers_without_a_call_can_have_a_format(talker: BlendEngine) -> None:
    answers = [
        talker.generate(
            HELLO, tools=[COUNT], grammar=Grammar(json_schema={"enum": ["yes", "no"]}), seed=seed, temperature=3.0
        )
        for seed in range(12)
    ]
    said = {answer.text for answer in answers}
    assert said <= {'"yes"', '"no"', ""}
    assert all(check(answer.tool_calls[0]) for answer in answers if not answer.text)
    assert all(not answer.tool_calls for answer in answers if answer.text)


def test_unforced_answers_depend_on_the_prompt_alone(talker: BlendEngine) -> None:
    prepared = prepare(talker.model.tokenizer, HELLO, TOOLS)
    ids = talker.model.tokenizer.render(prepared.prompt, **prepared.template)
    told = talker.model.tokenizer.decode(ids)
    for name in ("look", "count", "rest"):
        assert f'"name": "{name}"' in told
    answer = talker.generate(HELLO, tools=TOOLS, temperature=0, max_new_tokens=10)
    assert answer.report.prompt_tokens == len(ids)
    free = talker.generate(prepared.prompt, template=prepared.template, temperature=0, max_new_tokens=10)
    assert (answer.text, answer.token_ids) == (free.text, free.token_ids)


def test_no_tools_are_described_if_none_may_be_called(talker: BlendEngine) -> None:
    plain = talker.generate(HELLO, temperature=0, max_new_tokens=3)
    none = talker.generate(HELLO, tools=TOOLS, tool_choice="none", temperature=0, max_new_tokens=3)
    assert none.report.prompt_tokens == plain.report.prompt_tokens


# ---------------------------------------------------------------- what the model reads


def test_calls_and_their_results_reach_the_model(talker: BlendEngine) -> None:
    prepared = prepare(talker.model.tokenizer, HISTORY, TOOLS)
    told = talker.model.tokenizer.decode(talker.model.tokenizer.render(prepared.prompt, **prepared.template))
    assert "A bird." in told
    assert '{"where": "up", "far": true}' in told
    as_text = copy.deepcopy(HISTORY)
    as_text[2]["tool_calls"][0]["function"]["arguments"] = '{"where": "up", "far": true}'  # type: ignore[index]
    assert prepare(talker.model.tokenizer, as_text, TOOLS) == prepared
    assert HISTORY[2]["tool_calls"] == [CALLED]


def test_lone_surrogates_in_arguments_do_not_end_the_conversation(talker: BlendEngine) -> None:
    """Models write them as escapes, and agents send the calls back as they got them."""
    text, calls, _ = listen('<tool_call>{"name": "look", "arguments": {"where": "a\\ud83d"}}</tool_call>')
    assert (text, calls) == ("", [("look", {"where": "a\ufffd"})])
    for arguments in ('{"where": "a\\ud83d"}', {"where": "a\ud83d"}, {"where": "a\ufffd"}):
        call = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": arguments}}
        told = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, HISTORY[3]]
        assert "a\ufffd" in talker.model.tokenizer.decode(talker.tokenize(told, tools=TOOLS))


def test_a_template_without_tools_gets_them_as_text(model: Model) -> None:
    prepared = prepare(model.tokenizer, HISTORY, TOOLS)
    assert prepared.template == {}
    system, user, assistant, result = prepared.prompt
    assert isinstance(system, dict)
    assert system["content"].startswith("Be brief.\n\n# Tools")  # type: ignore[index]
    assert system["content"].count('{"type": "function"') == 3  # type: ignore[index]
    assert user == HISTORY[1]
    call = '{"name": "look", "arguments": {"where": "up", "far": true}}'
    assert assistant == {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}
    assert result == {"role": "user", "content": "<tool_response>\nA bird.\n</tool_response>"}
    [system, _] = prepare(model.tokenizer, HELLO, [COUNT]).prompt
    assert system["role"] == "system"  # type: ignore[index]
    parts = [{"role": "tool", "content": [{"type": "text", "text": "A bird."}]}, *HELLO]
    told = model.tokenizer.decode(model.tokenizer.render(prepare(model.tokenizer, parts).prompt))
    assert "<tool_response>\nA bird.\n</tool_response>" in told


def test_a_template_with_another_name_for_tools_gets_them_as_text(tokenizer: Any, hf: Any) -> None:
    theirs = copy.deepcopy(tokenizer)
    theirs.chat_template = TEMPLATES["mistral"].replace("if tools", "if xml_tools")
    prepared = prepare(Model(hf, theirs, "other").tokenizer, HELLO, TOOLS, "look")
    assert prepared.template == {}
    assert "# Tools" in prepared.prompt[0]["content"]  # type: ignore[index]
    assert prepared.grammar is not None
    assert "<tool_call>" in str(prepared.grammar.lark)


def test_text_blocks_of_a_tools_result_are_joined_by_line_breaks(talker: BlendEngine) -> None:
    def prompt(content: Any) -> list[int]:
        prepared = prepare(talker.model.tokenizer, [*HISTORY[:3], {**HISTORY[3], "content": content}], TOOLS)
        return talker.model.tokenizer.render(prepared.prompt, **prepared.template)

    blocks = [{"type": "text", "text": "A bird."}, "A plane.", {"type": "text", "text": "The sun."}]
    assert prompt(blocks) == prompt("A bird.\nA plane.\nThe sun.")
    assert prompt([]) == prompt("")


def test_chunks_in_a_tools_result_are_reused(talker: BlendEngine) -> None:
    talker.warm(CHUNKS)
    found = {**HISTORY[3], "content": "\n\n".join(CHUNKS)}
    answer = talker.generate([*HISTORY[:3], found], tools=TOOLS, max_new_tokens=2)
    stored = sum(len(talker.model.tokenizer.encode(chunk)) for chunk in CHUNKS)
    assert answer.report.stored_tokens >= 0.95 * stored


# ---------------------------------------------------------------- what it says


def listen(
    text: str, size: int = 3, names: tuple[str, ...] = ("look", "count")
) -> tuple[str, list[tuple[str, Any]], list[str]]:
    """Parse a text in pieces of this size; return the text, the calls, and the streamed pieces."""
    tools = [tool(name) for name in names]
    parser = AnswerParser(call_regions(tools), tools)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    heard = [parser.parse(Delta(piece, (1,))) for piece in pieces] + [parser.parse(Delta("", (), "stop"))]
    calls = [(call.name, call.arguments) for delta in heard for call in delta.tool_calls]
    return "".join(delta.text for delta in heard), calls, [delta.text for delta in heard if delta.text]


UP = ("look", {"where": "up"})
ONE = ("count", {"number": 1})
HERMES_UP = '<tool_call>\n{"name": "look", "arguments": {"where": "up"}}\n</tool_call>'
HERMES_ONE = '<tool_call>{"name": "count", "arguments": "{\\"number\\": 1}"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (HERMES_UP, "", [UP]),
        (f"{HERMES_UP}\n{HERMES_ONE}\n", "", [UP, ONE]),
        (f"Let me look.\n\n{HERMES_UP}", "Let me look.", [UP]),
        (f"First\n{HERMES_UP}\nthen\n{HERMES_ONE}\n.\n", "First\nthen\n.", [UP, ONE]),
        (HERMES_UP.removesuffix("</tool_call>"), "", [UP]),
        (HERMES_UP.replace("up", "a </tool_call> b"), "", [("look", {"where": "a </tool_call> b"})]),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", {})]),
        ('{"name": "look", "parameters": {"where": "up"}}', "", [UP]),
        ('{"type": "function", "function": {"name": "look", "parameters": {"where": "up"}}}', "", [UP]),
        ('{"name": "look", "parameters": {"where": "up"}}; {"name": "count"}', "", [UP, ("count", {})]),
        ('<|python_tag|>{"name": "look", "parameters": {"where": "up"}}', "", [UP]),
        ('[TOOL_CALLS] [{"name": "look", "arguments": {"where": "up"}}]', "", [UP]),
        (' [{"name": "look", "arguments": {"where": "up"}}, {"name": "count"}]', "", [UP, ("count", {})]),
        ('[TOOL_CALLS]look[ARGS]{"where": "up"}', "", [UP]),
        ('look{"where": "up"}', "", [UP]),
        ('{"name": "look"}', "", [("look", {})]),
    ],
)  # fmt: skip
def test_calls_are_found(text: str, said: str, calls: list[Any]) -> None:
    for size in (1, 4, 1000):
        assert listen(text, size)[:2] == (said, calls), size


@pytest.mark.parametrize(
    "text",
    [
        "Nothing to do.\n",
        "  spaces  ",
        "look at this",
        "lo",
        "a <tool_ b <tool_call",
        '{"name": "Mira", "age": 3}',
        '{"name": "unknown", "parameters": {}}',
        "[1, 2, 3]",
        "[]",
        "{ }",
        '{"a": 1}',
        '{"name": "look", "parameters": ',
        "<tool_call>\nlook up\n</tool_call> is how",
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "look", "args": "</tool_call>',
        'Use {"name": "look", "parameters": {}}',
    ],
)
def test_text_that_is_not_a_call_is_returned_unchanged(text: str) -> None:
    for size in (1, 4, 1000):
        assert listen(text, size)[:2] == (text, []), size


def test_text_is_streamed_as_soon_as_it_cannot_be_a_call() -> None:
    _, _, pieces = listen("one two <three four", size=1)
    assert listen("[1] so", size=1)[2] == ["[1", "]", " s", "o"]
    assert pieces == [*"one", " t", *"wo", " <th", *"ree", " f", *"our"]


def spell(text: str, size: int, finish: FinishReason, has_one_call: bool = False) -> list[Delta]:
    """Parse an answer that arrives in pieces of this size."""
    tools = [tool("look"), tool("count")]
    parser = AnswerParser(call_regions(tools), tools, has_one_call=has_one_call)
    pieces = [Delta(text[at : at + size], (1,)) for at in range(0, len(text), size)]
    return [parser.parse(piece) for piece in [*pieces, Delta("", (), finish)]]


LONG = '{"where": "</tool_call> up \\"{ and\ndown", "far": [{"a": 1}, "}"]}'
FORMATS = {
    "hermes": 'Well.\n<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>\n' + HERMES_ONE,
    "llama": '{"name": "look", "parameters": %s}; {"name": "count", "parameters": {"number": 1}}',
    "llama-function": '{"type": "function", "function": {"name": "look", "parameters": %s}}',
    "mistral": '[TOOL_CALLS] [{"name": "look", "arguments": %s}, {"name": "count", "arguments": {"number": 1}}]',
    "mistral-args": "[TOOL_CALLS]look[ARGS]%s",
}


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("form", FORMATS)
def test_calls_are_found_in_every_format(form: str, size: int) -> None:
    deltas = spell(FORMATS[form] % LONG, size, "stop")
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert not any(delta.invalid_calls for delta in deltas)
    assert calls[0].arguments == json.loads(LONG, strict=False)
    assert len({call.id for call in calls}) == len(calls) == FORMATS[form].count('"name"') + (form == "mistral-args")


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("arguments", [LONG, '{"where": up}'])
def test_calls_after_the_first_can_be_left_out(size: int, arguments: str) -> None:
    all_calls = spell(FORMATS["hermes"] % arguments, size, "stop")
    deltas = spell(FORMATS["hermes"] % arguments, size, "stop", has_one_call=True)
    found = [call.name for delta in deltas for call in (*delta.tool_calls, *delta.invalid_calls)]
    assert found == ["look"]
    assert "".join(delta.text for delta in deltas) == "".join(delta.text for delta in all_calls)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "look", "arguments": {"where": "</tool_call>', '{"where": "</tool_call>'),
        ('<tool_call>{"name": "look", "arguments": {"a": 1} or}</tool_call>', '{"a": 1} or}'),
        ('look{"a": 1} is what I would say', '{"a": 1} is what I would say'),
    ],
)
def test_a_call_that_is_malformed_after_its_arguments_began_is_invalid(text: str, arguments: str, size: int) -> None:
    deltas = spell(text, size, "stop")
    [call] = (call for delta in deltas for call in delta.invalid_calls)
    assert (call.name, call.arguments) == ("look", arguments)
    assert not any(delta.text or delta.tool_calls for delta in deltas)


def test_an_answer_that_only_resembles_a_call_is_text_when_cut() -> None:
    assert [delta.text for delta in spell('{"name": "lo', 1000, "length")] == ["", '{"name": "lo']
    [call] = spell('<tool_call>\n{"name": "lo', 3, "length")[-1].invalid_calls
    assert (call.name, call.arguments) == ("", "")
    for mark in ("<tool_call>", "[TOOL_CALLS]"):
        assert [call.arguments for call in spell(mark, 3, "length")[-1].invalid_calls] == [""]
        assert spell(mark, 3, "stop")[-1].text == mark


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_forced_call_cut_off_is_never_text(talker: BlendEngine, step: int) -> None:
    settings = {"tools": TOOLS, "temperature": 1.5, "seed": 7}
    whole = len(talker.generate(HELLO, tool_choice="look", max_new_tokens=100, **settings).token_ids)
    for length in range(1, whole, step):
        deltas = list(talker.stream(HELLO, tool_choice="look", max_new_tokens=length, **settings))
        answer = join(deltas)
        assert answer.finish_reason == "length"
        assert answer.text == ""
        [call] = [*answer.tool_calls, *answer.invalid_calls]
        assert call.name == "look"
        assert answer.invalid_calls or check(answer.tool_calls[0])  # then only closing marks are missing
    [unknown] = talker.generate(HELLO, tool_choice="any", max_new_tokens=1, **settings).invalid_calls
    assert (unknown.name, unknown.arguments) == ("", "")
    stopped = talker.generate(HELLO, tool_choice="look", stop=['"'], max_new_tokens=100, **settings)
    assert (stopped.text, len(stopped.invalid_calls), stopped.finish_reason) == ("", 1, "stop")


CALLS_FIELD = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}
TRANSFORM = {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.with}"}}
RESPONSES = {
    "start_anchor": "assistant:",
    "defaults": {"role": "assistant"},
    "fields": {"content": {"close": "<eot>"}, "tool_calls": {**CALLS_FIELD, "transform": TRANSFORM}},
}


def test_a_tokenizers_own_response_template_is_used(tokenizer: Any, hf: Any) -> None:
    theirs = copy.deepcopy(tokenizer)
    theirs.chat_template = template("{{ tools | tojson }}", "{{ c.function | tojson }}")
    theirs.response_template = RESPONSES
    model = Model(hf, theirs, "templated")
    prepared = prepare(model.tokenizer, HELLO, TOOLS)
    assert prepared.template == {"tools": [LOOK, COUNT, tool_without_arguments()]}

    def hear(text: str) -> tuple[str, list[tuple[str, Any]]]:
        parser = prepared.parser(model.tokenizer, model.tokenizer.render(HELLO))
        assert parser is not None
        assert parser.control_tokens
        heard = [parser.parse(Delta(letter, (1,))) for letter in text] + [parser.parse(Delta("", (), "stop"))]
        calls = [(call.name, call.arguments) for delta in heard for call in delta.tool_calls]
        return "".join(delta.text for delta in heard), calls

    call = '<call>{"tool": "look", "with": {"where": "up"}}</call>'
    assert hear(f"Let me see. {call}") == ("Let me see. ", [UP])
    assert hear("Nothing.") == ("Nothing.", [])
    broken = '<call>{"tool": look}</call>'
    assert hear(f"So: {broken} or not") == ('So: {"tool": look} or not', [])
    assert hear(f"So: {broken} {call}") == ('So: {"tool": look} ', [UP])
    theirs.response_template = {**RESPONSES, "fields": {"content": {"close": "<eot>"}, "tool_calls": CALLS_FIELD}}
    parser = prepared.parser(model.tokenizer, model.tokenizer.render(HELLO))
    assert parser is not None
    text = '<call>{"name": "look", "arguments": {"where": "up"}}</call>'
    deltas = [parser.parse(Delta(letter, (1,))) for letter in text] + [parser.parse(Delta("", (), "stop"))]
    assert [(call.name, call.arguments) for delta in deltas for call in delta.tool_calls] == [UP]
    for cut in ('<call>{"tool": "lo', text[:-20]):
        parser = prepared.parser(model.tokenizer, model.tokenizer.render(HELLO))
        assert parser is not None
        deltas = [parser.parse(Delta(letter, (1,))) for letter in cut] + [parser.parse(Delta("", (), "length"))]
        assert not any(delta.text or delta.tool_calls for delta in deltas)
        assert [len(delta.invalid_calls) for delta in deltas] == [0] * len(cut) + [1]
    forced = prepare(model.tokenizer, HELLO, TOOLS, "look")
    assert forced.template == prepared.template
    assert isinstance(forced.parser(model.tokenizer, []), AnswerParser)


def tool_without_arguments() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "rest", "parameters": {"type": "object", "properties": {}}}}


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"tools": LOOK}, "tools must be a list"),
        ({"tools": ["look"]}, "a tool is .*got 'look'"),
        ({"tools": [{"name": "look"}]}, "a tool is"),
        ({"tools": [tool("look up")]}, "a tool's name may have letters"),
        ({"tools": [tool("look", where={1, 2})]}, "tool look is not JSON"),
        ({"tools": [{"type": "function", "function": {"name": "look", "parameters": [1]}}]}, "must be a JSON schema"),
        ({"tools": TOOLS, "tool_choice": "smell"}, r"a tool's name \(look, count, rest\), got 'smell'"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_choice must be .*got {'type': 'any'}"),
        ({"tool_choice": "any"}, "no tools given"),
        ({"tools": TOOLS, "tool_choice": "any", "grammar": Grammar(regex="a")}, "exclude each other"),
        ({"tools": TOOLS, "grammar": Grammar(regex="a")}, "must be a json_schema"),
    ],
)
def test_wrong_tools_are_refused(engine: BlendEngine, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        engine.generate(HELLO, **wrong)


def test_a_schema_that_cannot_be_guaranteed_is_refused_when_it_must_be(engine: BlendEngine) -> None:
    wrong = tool("look", where={"type": "string", "minLength": 3, "maxLength": 2})
    with pytest.raises(SettingError, match="unsatisfiable"):
        engine.generate(HELLO, tools=[wrong], tool_choice="any")
    assert engine.generate(HELLO, tools=[wrong], max_new_tokens=1).token_ids


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("name", ["look", ""])
def test_a_malformed_call_of_the_history_is_text_and_so_is_its_result(
    talker: BlendEngine, name: str, with_tools: bool
) -> None:
    tokenizer, broken = (
        talker.model.tokenizer,
        {"id": "b23456789", "function": {"name": name, "arguments": '{"a": "do'}},
    )
    history = [
        *HELLO,
        {"role": "assistant", "content": "Well.", "tool_calls": [CALLED, broken]},
        {"role": "tool", "content": "A bird.", "tool_call_id": CALLED["id"]},
        {"role": "tool", "content": "It was cut off.", "tool_call_id": broken["id"]},
        {"role": "assistant", "content": None, "tool_calls": [{**broken, "id": None}]},
    ]
    tokenizer = talker.model.tokenizer
    prepared = prepare(tokenizer, history, TOOLS if with_tools else None)
    text = tokenizer.decode(prepared.render(tokenizer), control_tokens=True)
    assert text.count('{"a": "do') == 2
    assert "Well." in text
    assert "<tool_response>\nIt was cut off." in text
    assert history[1]["tool_calls"] == [CALLED, broken]


def test_messages_that_are_not_tool_talk_are_refused(engine: BlendEngine) -> None:
    with pytest.raises(PromptError, match="tools need a chat prompt"):
        engine.generate("Hello.", tools=TOOLS)
    for wrong in (
        "look",
        {"function": "look"},
        {"function": {"name": "look", "arguments": 5}},
        {"function": {"name": 5, "arguments": "{"}},
        {"function": {"name": "look", "arguments": {"far": object()}}},
    ):
        with pytest.raises(PromptError, match="a tool call is"):
            engine.generate([*HELLO, {"role": "assistant", "tool_calls": [wrong]}])
    with pytest.raises(PromptError, match="a message must be a dict"):
        engine.generate(["Hello."], tools=TOOLS)


def test_tools_are_left_as_they_were(engine: BlendEngine) -> None:
    before = json.dumps(TOOLS)
    engine.generate(HELLO, tools=TOOLS, tool_choice="any", max_new_tokens=2)
    assert json.dumps(TOOLS) == before


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        # a forgotten brace
        (
            '<tool_call>{"name": "look", "arguments": {"q": "a"</tool_call>\n'
            '<tool_call>{"name": "count", "arguments": {}}</tool_call>',
            ["count"],
            "",
        ),
        ('<tool_call>{"name": "look", "arguments": {}}.</tool_call> Done.', [], "Done."),
        # the tag in a string
        ('<tool_call>{"name": "look", "arguments": {"q": "{}</tool_call> and more"}}</tool_call>', ["look"], ""),
        ("<tool_call>{no call}</tool_call> so", [], "<tool_call>{no call}</tool_call> so"),
    ],
)
def test_a_tag_ends_a_call_except_in_a_string(text: str, calls: list[str], rest: str, size: int) -> None:
    spoken, found, _ = listen(text, size)
    assert [name for name, _ in found] == calls
    assert spoken.strip() == rest
