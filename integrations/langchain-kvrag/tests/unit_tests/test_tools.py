"""ChatBlend: tools and structured output, for any model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest
from frameworks import merged
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, convert_to_openai_messages
from langchain_core.tools import tool
from langchain_kvrag import BlendLLM, ChatBlend
from langchain_kvrag.messages import template_messages
from pydantic import BaseModel, Field

from kvrag import (
    BlendEngine,
    Grammar,
    Model,
    PromptError,
    SettingError,
)

QUESTION = "Question: Who likes curry?"


@tool
def look(where: Literal["up", "down"], far: bool) -> str:
    """Look somewhere."""
    return f"Nothing {where} there."


class Count(BaseModel):
    """Count something."""

    number: int = Field(ge=0, le=9)


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    numbers: list[Count] = Field(min_length=1, max_length=2)
    friend: Count | None


class Place(TypedDict):
    """A place."""

    is_far: bool


REST = {"type": "function", "function": {"name": "rest", "description": "Do nothing."}}
SCHEMA = {
    "title": "Way",
    "description": "A way.",
    "type": "object",
    "properties": {"to": {"enum": ["up", "down"]}},
    "required": ["to"],
}


@pytest.fixture
def chat(settings: dict[str, Any]) -> ChatBlend:
    return ChatBlend(**{**settings, "max_tokens": 120})


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("any", {"look", "Count", "rest"}),
        ("look", {"look"}),
        ({"type": "function", "function": {"name": "Count"}}, {"Count"}),
    ],
)
async def test_a_forced_call_is_returned_by_every_method(chat: ChatBlend, choice: Any, names: set[str]) -> None:
    bound = chat.bind_tools([look, Count, REST], tool_choice=choice)
    bound.invoke(QUESTION)  # the others begin like it
    message = bound.invoke(QUESTION)
    [call] = message.tool_calls
    assert call["name"] in names
    assert call["id"]
    assert (message.content, message.response_metadata["finish_reason"]) == ("", "tool_calls")
    streamed = merged(list(bound.stream(QUESTION)))
    astreamed = merged([piece async for piece in bound.astream(QUESTION)])
    for other in (streamed, astreamed, await bound.ainvoke(QUESTION)):
        assert [(c["name"], c["args"]) for c in other.tool_calls] == [(call["name"], call["args"])]
        assert other.usage_metadata == message.usage_metadata
        assert other.response_metadata["finish_reason"] == "tool_calls"
    assert [chunk["index"] for chunk in streamed.tool_call_chunks] == [0]


@pytest.mark.parametrize(("choice", "bound"), [(True, "required"), ("required", "required"), ("rest", "rest")])
def test_other_ways_to_force_a_call_are_bound(chat: ChatBlend, choice: Any, bound: str) -> None:
    assert chat.bind_tools([look, REST], tool_choice=choice).kwargs["tool_choice"] == bound


def test_the_arguments_can_be_given_to_the_tool(chat: ChatBlend) -> None:
    message = chat.bind_tools([look], tool_choice="any").invoke(QUESTION)
    result = look.invoke(message.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert result.tool_call_id == message.tool_calls[0]["id"]
    answer = chat.bind_tools([look]).invoke([HumanMessage(QUESTION), message, result])
    told = chat.get_num_tokens_from_messages([HumanMessage(QUESTION), message, result], tools=[look])
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == told


@pytest.mark.parametrize("choice", [None, False, "auto"])
def test_without_force_the_tools_are_only_described(chat: ChatBlend, choice: Any) -> None:
    plain, bound = chat.invoke(QUESTION), chat.bind_tools([look], tool_choice=choice, max_tokens=2).invoke(QUESTION)
    assert plain.usage_metadata is not None
    assert bound.usage_metadata is not None
    assert bound.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"] + 50
    assert chat.bind_tools([]).invoke(QUESTION).content == plain.content
    assert chat.bind_tools([look], tool_choice="none").invoke(QUESTION).content == plain.content


def test_calls_in_content_blocks_are_the_same_prompt() -> None:
    call = {"type": "tool_call", "name": "look", "args": {"where": "up"}, "id": "1"}
    plain = AIMessage("Let me see.", tool_calls=[call])  # type: ignore[list-item]
    blocks = AIMessage(
        content_blocks=[{"type": "text", "text": "Let me see."}, call],  # type: ignore[list-item,misc]
        response_metadata={"output_version": "v1"},
    )
    said, block_said = template_messages([plain, blocks])
    assert block_said["tool_calls"] == said["tool_calls"]
    assert block_said["content"] == [{"type": "text", "text": "Let me see."}]


def test_why_messages_are_converted_here(chat: ChatBlend) -> None:
    parts = [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "Let me see."}]
    messages = [HumanMessage(QUESTION), AIMessage(parts), HumanMessage("And?")]  # type: ignore[arg-type]
    plain = [HumanMessage(QUESTION), AIMessage("Let me see."), HumanMessage("And?")]
    engine = chat._open()
    assert engine.count_tokens(template_messages(messages)) == engine.count_tokens(template_messages(plain))
    with pytest.raises(PromptError, match="content of type 'reasoning'"):
        engine.count_tokens(convert_to_openai_messages(messages))  # type: ignore[arg-type]


def test_wrong_tools_are_refused(chat: ChatBlend) -> None:
    with pytest.raises(SettingError, match="tool_choice must be"):
        chat.bind_tools([look], tool_choice="smell").invoke(QUESTION)
    with pytest.raises(SettingError, match="a tool is"):
        chat.invoke(QUESTION, tools=["look"])
    image = {"type": "image", "base64": "AA==", "mime_type": "image/png"}
    with pytest.raises(PromptError, match="content of type 'image'"):
        chat.invoke([HumanMessage(QUESTION), AIMessage("", tool_calls=[]), ToolMessage([image], tool_call_id="1")])


def test_text_models_take_grammars_but_no_tools(settings: dict[str, Any]) -> None:
    llm = BlendLLM(**settings)
    assert llm.bind(grammar=Grammar(regex="yes|no")).invoke(QUESTION) in ("yes", "no")
    with pytest.raises(SettingError, match="use ChatBlend for tools"):
        llm.invoke(QUESTION, tools=[REST])


# ---------------------------------------------------------------- structured output


@pytest.mark.parametrize(
    ("method", "strict"),
    [
        ("json_schema", None),
        ("function_calling", True),  # `strict` changes nothing
    ],
)
async def test_structured_output_follows_the_schema(chat: ChatBlend, method: Any, strict: bool | None) -> None:
    def structured(schema: Any) -> Any:
        return chat.with_structured_output(schema, method=method, strict=strict)

    assert isinstance(structured(Count).invoke(QUESTION), Count)
    assert isinstance(structured(Pet).invoke(QUESTION), Pet)
    place = structured(Place).invoke(QUESTION)
    assert place in ({"is_far": True}, {"is_far": False})
    way = structured(SCHEMA).invoke(QUESTION)
    assert way in ({"to": "up"}, {"to": "down"})
    assert list(structured(SCHEMA).stream(QUESTION))[-1] == way
    assert await structured(SCHEMA).ainvoke(QUESTION) == way
    assert [piece async for piece in structured(SCHEMA).astream(QUESTION)][-1] == way


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_the_raw_message_can_be_had_too(chat: ChatBlend, method: Any) -> None:
    answer = chat.with_structured_output(Count, method=method, include_raw=True).invoke(QUESTION)
    assert isinstance(answer["parsed"], Count)
    assert isinstance(answer["raw"], AIMessage)
    assert answer["raw"].response_metadata["kvrag"]["prompt_tokens"] > 0
    assert answer["parsing_error"] is None


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_cut_off_is_an_error(chat: ChatBlend, method: Any) -> None:
    short = chat.model_copy(update={"max_tokens": 3})
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        short.with_structured_output(Count, method=method).invoke(QUESTION)
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        list(short.with_structured_output(Count, method=method).stream(QUESTION))
    raw = short.with_structured_output(Count, method=method, include_raw=True).invoke(QUESTION)
    assert raw["parsed"] is None
    assert "raise max_tokens" in str(raw["parsing_error"])


def test_the_prompt_shows_the_schema_only_to_function_calling(chat: ChatBlend) -> None:
    def num_tokens(method: Any) -> int:
        answer = chat.with_structured_output(Count, method=method, include_raw=True).invoke(QUESTION)
        return int(answer["raw"].usage_metadata["input_tokens"])

    plain = chat.get_num_tokens_from_messages([HumanMessage(QUESTION)])
    assert num_tokens("json_schema") == plain
    assert num_tokens("function_calling") > plain + 50


def test_tools_and_a_response_format_go_together(chat: ChatBlend) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "way", "schema": SCHEMA}}
    message = chat.bind_tools([Count], response_format=response_format).invoke(QUESTION)
    if message.tool_calls:
        assert Count(**message.tool_calls[0]["args"])
    else:
        assert json.loads(str(message.content)) in ({"to": "up"}, {"to": "down"})


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"schema": None}, "needs a schema"),
        ({"schema": Count, "method": "yaml"}, "method must be"),
        ({"schema": Count, "tools": []}, "does not support tools"),
    ],
)
def test_wrong_arguments_of_structured_output_are_refused(chat: ChatBlend, wrong: Any, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        chat.with_structured_output(**wrong)


def test_a_grammar_excludes_a_response_format(chat: ChatBlend) -> None:
    with pytest.raises(SettingError, match="exclude each other"):
        chat.invoke(QUESTION, grammar=Grammar(regex="a"), response_format={"type": "json_object"})


def test_arguments_of_a_call_are_in_the_cache_key(settings: dict[str, Any], forwards: list[int]) -> None:
    chat = ChatBlend(**settings, cache=InMemoryCache())
    asked = [
        chat,
        chat.bind_tools([Count]),
        chat.bind_tools([Count], tool_choice="any"),
        chat.bind(response_format={"type": "json_object"}),
        chat.bind(grammar=Grammar(regex="[ab]{3}")),
        chat.bind(grammar=Grammar(regex="[ab]{4}")),
        chat.bind(documents=["a"]),
        chat.bind(ratio=0.3),
    ]
    for one in asked:
        done = len(forwards)
        one.invoke(QUESTION)
        assert len(forwards) > done
    done = len(forwards)
    for one in asked:
        one.invoke(QUESTION)
    assert len(forwards) == done


# ---------------------------------------------------------------- properties of a model object


def test_the_profile_lists_the_supported_features(settings: dict[str, Any], model: Model) -> None:
    chat = ChatBlend(**settings)
    assert chat.profile is not None
    assert chat.profile["tool_calling"] is chat.profile["tool_choice"] is chat.profile["structured_output"] is True
    assert chat.profile["image_inputs"] is False
    assert chat.profile["max_input_tokens"] == model.context_window
    unknown = ChatBlend(model="nobody/has-this", store=settings["store"])  # its configuration is not on this disk
    assert unknown.profile is not None
    assert "max_input_tokens" not in unknown.profile
    unknown.engine, unknown.model, unknown.store = chat._open(), None, None
    unknown.warm([])
    assert unknown.profile["max_input_tokens"] == model.context_window
    assert ChatBlend(**settings, profile={"max_input_tokens": 5}).profile == {"max_input_tokens": 5}


def test_another_model_can_be_asked_per_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    import kvrag.reader

    other = str(Path(kvrag.reader.__file__).parent)
    chat = ChatBlend(model="reader", dtype="float32", max_tokens=4)
    assert chat.invoke(QUESTION).response_metadata["model_name"] == "reader"
    message = chat.invoke(QUESTION, model=other)
    assert message.response_metadata["model_name"] == other
    assert chat._get_ls_params(model=other)["ls_model_name"] == other
    assert merged(list(chat.stream(QUESTION, model=Path(other)))).response_metadata["model_name"] == other
    assert chat.invoke(QUESTION).response_metadata["model_name"] == "reader"


def test_documents_of_a_call_count_as_cache_creation_the_first_time(chat: ChatBlend, chunks: list[str]) -> None:
    chat.warm(chunks[:1])
    prompt = "\n\n".join([*chunks, QUESTION])
    first, again = (chat.invoke(prompt, documents=chunks, max_tokens=1).usage_metadata for _ in range(2))
    assert first is not None
    assert again is not None
    created, read = first["input_token_details"]["cache_creation"], first["input_token_details"]["cache_read"]
    assert created > 60
    assert read > 16
    assert again["input_token_details"]["cache_creation"] == 0
    assert again["input_token_details"]["cache_read"] > read + created / 2


def test_an_engine_given_is_not_written_out(tmp_path: Path) -> None:
    engine = BlendEngine.from_pretrained("reader", store=tmp_path, dtype="float32")
    assert ChatBlend(engine=engine).to_json()["type"] == "not_implemented"


# ---------------------------------------------------------------- at most one call


@pytest.mark.parametrize("parallel", [True, False, None])
def test_parallel_calls_can_be_switched_off(
    chat: ChatBlend, parallel: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    stream = BlendEngine.stream

    def recording(self: BlendEngine, prompt: Any, **options: Any) -> Any:
        asked.append(options.get("parallel_tool_calls"))
        return stream(self, prompt, **options)

    monkeypatch.setattr(BlendEngine, "stream", recording)
    bound = chat.bind_tools([look, Count], parallel_tool_calls=parallel)
    bound.invoke(QUESTION)
    list(bound.stream(QUESTION))
    assert asked == [parallel] * 2


def test_parallel_tool_calls_is_a_bool(chat: ChatBlend) -> None:
    with pytest.raises(SettingError, match="parallel_tool_calls must be True, False or None, got 2"):
        chat.bind_tools([look], parallel_tool_calls=2).invoke(QUESTION)


# ---------------------------------------------------------------- schemas without a title

UNTITLED = {key: value for key, value in SCHEMA.items() if key != "title"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [UNTITLED, {**UNTITLED, "title": "The way to go"}])
def test_a_schema_needs_no_name(chat: ChatBlend, method: Any, schema: dict[str, Any]) -> None:
    assert chat.with_structured_output(schema, method=method).invoke(QUESTION) in ({"to": "up"}, {"to": "down"})


def test_an_answer_need_not_be_an_object(chat: ChatBlend) -> None:
    schema = {"title": "Ways", "type": "array", "items": {"enum": ["up", "down"]}, "minItems": 2, "maxItems": 2}
    ways = chat.with_structured_output(schema).invoke(QUESTION)
    assert len(ways) == 2
    assert {*ways} <= {"up", "down"}
    with pytest.raises(
        SettingError, match=r"must be an object, got a schema of type 'array': use method='json_schema'"
    ):
        chat.with_structured_output(schema, method="function_calling")


def test_a_tool_needs_a_name(chat: ChatBlend) -> None:
    with pytest.raises(SettingError, match="a tool needs a name: give its JSON schema a title"):
        chat.bind_tools([UNTITLED])


class Branch(BaseModel):
    """A part of a tree."""

    leaf: bool
    branches: list[Branch] = Field(max_length=1)


@tool
def grow(branch: Branch) -> str:
    """Grow."""
    return ""


def plant(branch: Branch) -> str:
    """Plant."""
    return ""


def test_a_recursive_class_stays_recursive(chat: ChatBlend) -> None:
    def items(schema: dict[str, Any]) -> Any:
        schema = schema["properties"].get("branch", schema)
        target = schema if "properties" in schema else whole["$defs"]["Branch"]
        return target["properties"]["branches"]["items"]

    bound: Any = chat.with_structured_output(Branch)
    whole = bound.steps[0].kwargs["response_format"]["json_schema"]["schema"]
    assert items(whole) == {"$ref": "#/$defs/Branch"}
    as_json = {"title": "Branch", **Branch.model_json_schema()["$defs"]["Branch"], "$defs": {"Branch": {}}}
    tools = [*chat.with_structured_output(Branch, method="function_calling").steps[0].kwargs["tools"]]
    tools += chat.bind_tools([Branch, grow, plant, as_json]).kwargs["tools"]
    for one in tools:
        whole = one["function"]["parameters"]
        assert items(whole) == {"$ref": "#/$defs/Branch"}
    assert "$ref" not in json.dumps(chat.bind_tools([Pet]).kwargs["tools"])  # what is not recursive is written out


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_recursive_class_is_enforced(chat: ChatBlend, method: Any) -> None:
    assert isinstance(chat.with_structured_output(Branch, method=method).invoke(QUESTION), Branch)


def test_an_invalid_call_stays_in_the_history(chat: ChatBlend) -> None:
    invalid: Any = {"type": "invalid_tool_call", "id": "b23456789", "name": "look", "args": '{"where": "u', "error": ""}
    said = AIMessage("", invalid_tool_calls=[invalid])
    [message] = template_messages([said])
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"where": "u'}
    history = [HumanMessage("a"), said, ToolMessage("No.", tool_call_id="b23456789"), HumanMessage("b")]
    without = chat.get_num_tokens_from_messages([*history[:1], AIMessage("x"), *history[2:]])
    assert chat.get_num_tokens_from_messages(history) > without
    chat.invoke(history)
