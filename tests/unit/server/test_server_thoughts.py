"""Thoughts on the wire: chats and responses, streamed and not, as OpenAI's SDK, kvrag's client and LangChain read them.

The engine's answers are scripted, because no bundled model thinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from openai import OpenAI
from serving import NAME, Served, serving

from kvrag import BlendEngine, BlendReport, Delta, RemoteEngine, ToolCall
from kvrag.types import TokenLogprob, join

MESSAGES: list[Any] = [{"role": "user", "content": "Who plays the harp?"}]
REPORT = BlendReport.unblended(5, 2)
THOUGHT = (
    Delta("", (1, 2), reasoning="Mira, ", reasoning_tokens=2, logprobs=(TokenLogprob(1, -1.0), TokenLogprob(2, -1.0))),
    Delta(
        " Mi", (3, 4), reasoning="surely.", reasoning_tokens=1, logprobs=(TokenLogprob(3, 0.0), TokenLogprob(4, 0.0))
    ),
    Delta("ra.", (5,), finish_reason="stop", report=REPORT, logprobs=(TokenLogprob(5, 0.0),)),
)
PLAIN = (Delta(" Mi", (1,)), Delta("ra.", (2,), finish_reason="stop", report=REPORT))
CALL = (
    Delta("", (1,), reasoning="Look.", reasoning_tokens=1),
    Delta("", (2,), tool_calls=(ToolCall("look", {}, "c1"),)),
    Delta("", (3,), finish_reason="stop", report=REPORT),
)
CUT = (Delta("", (1,), reasoning="Mira", reasoning_tokens=1), Delta("", (2,), "length", REPORT, reasoning_tokens=1))
TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


class Script:
    """Answers with given deltas; records what was asked."""

    deltas: tuple[Delta, ...] = THOUGHT
    prompt: Any = None
    options: dict[str, Any]

    def __call__(self, prompt: Any, **options: Any) -> Iterator[Delta]:
        self.prompt, self.options = prompt, options
        yield from self.deltas


@pytest.fixture
def script(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(engine, "stream", script)
    return script


@pytest.fixture
def served(engine: BlendEngine, script: Script) -> Iterator[Served]:
    with serving(engine) as served:
        yield served


@pytest.fixture
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_the_thought_apart_from_the_answer(client: OpenAI, stream: bool) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    said: Any = client.chat.completions.create(model=NAME, messages=MESSAGES, **options)
    pieces = list(said) if stream else [said]
    parts = [choice.delta if stream else choice.message for piece in pieces for choice in piece.choices]
    for name in ("reasoning_content", "reasoning"):  # the name of most servers, and of newer vLLM
        assert "".join(getattr(part, name, "") for part in parts) == "Mira, surely."
    assert "".join(part.content or "" for part in parts) == " Mira."
    usage = pieces[-1].usage
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (5, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_without_a_thought_have_no_new_keys(served: Served, script: Script, stream: bool) -> None:
    script.deltas = PLAIN
    said = served.ask("Who plays the harp?", stream=stream)
    assert "reasoning" not in said.text.replace("reasoning_tokens", "")
    if not stream:
        assert said.json()["choices"][0]["message"] == {"role": "assistant", "content": " Mira.", "refusal": None}
        assert said.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_thought_before_a_call_and_one_that_is_cut_off(client: OpenAI, script: Script) -> None:
    script.deltas = CALL
    message: Any = client.chat.completions.create(model=NAME, messages=MESSAGES).choices[0].message
    assert (message.content, message.reasoning_content, message.tool_calls[0].id) == (None, "Look.", "c1")
    script.deltas = CUT
    choice: Any = client.chat.completions.create(model=NAME, messages=MESSAGES).choices[0]
    assert (choice.message.content, choice.message.reasoning, choice.finish_reason) == ("", "Mira", "length")


def test_a_completion_has_the_text_only(served: Served) -> None:
    said = served.http.post("/v1/completions", json={"model": NAME, "prompt": "Mira"}).json()
    assert said["choices"][0]["text"] == " Mira."
    assert "reasoning" not in said["choices"][0]


@pytest.mark.parametrize(
    ("fields", "reasoning", "template"),
    [
        ({}, None, {}),
        ({"reasoning_effort": "none"}, False, {"reasoning_effort": "none"}),
        ({"reasoning_effort": "low"}, None, {"reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None, {"enable_thinking": False}),
    ],
)
def test_requests_switch_thinking(
    served: Served, script: Script, fields: dict[str, Any], reasoning: bool | None, template: dict[str, Any]
) -> None:
    assert served.ask("Who?", **fields).status_code == 200
    assert (script.options.get("reasoning"), script.options["template"]) == (reasoning, template)
    if "reasoning_effort" in fields:
        body = {"model": NAME, "input": "Who?", "reasoning": {"effort": fields["reasoning_effort"]}}
        assert served.http.post("/v1/responses", json=body).status_code == 200
        assert script.options.get("reasoning") == reasoning


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_of_earlier_turns_reach_the_template(served: Served, script: Script, name: str) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "Mira.", name: "Surely."}, *MESSAGES]
    body = {"model": NAME, "messages": turns}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    assert script.prompt[1] == {"role": "assistant", "content": "Mira.", "reasoning_content": "Surely."}
    assert script.prompt[2] == MESSAGES[0]


def test_a_response_has_a_reasoning_item(client: OpenAI, script: Script) -> None:
    options: Any = {"include": ["message.output_text.logprobs"]}
    said: Any = client.responses.create(model=NAME, input=MESSAGES, **options)
    thought, message = said.output
    assert (thought.type, thought.status, thought.summary) == ("reasoning", "completed", [])
    assert [(part.type, part.text) for part in thought.content] == [("reasoning_text", "Mira, surely.")]
    assert said.output_text == " Mira."
    assert len(message.content[0].logprobs) == 2  # those of the text
    assert said.usage.output_tokens_details.reasoning_tokens == 3
    # sent back with a call, as agents do
    script.deltas = CALL
    called: Any = client.responses.create(model=NAME, input=MESSAGES, tools=[TOOL])
    assert [item.type for item in called.output] == ["reasoning", "function_call"]
    result = {"type": "function_call_output", "call_id": "c1", "output": "A harp."}
    sent: Any = [*MESSAGES, *said.output, *MESSAGES, *called.output, result]
    client.responses.create(model=NAME, input=sent, tools=[TOOL])
    assert [message.get("reasoning_content") for message in script.prompt] == [
        None,
        "Mira, surely.",
        None,
        "Look.",
        None,
    ]
    script.deltas = CUT
    cut: Any = client.responses.create(model=NAME, input=MESSAGES)
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]


def test_a_streamed_response_has_the_events_of_a_reasoning_item(client: OpenAI) -> None:
    with client.responses.stream(model=NAME, input="Who?") as stream:  # checks the order of the events
        events: list[Any] = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Mira, surely."
    assert [event.output_index for event in events[2:-1]] == [0] * 7 + [1] * 7
    assert events[-1].response.output[0] == events[8].item


@pytest.mark.parametrize("responses", [False, True])
def test_langchains_class_for_openai_reads_the_answer(served: Served, responses: bool) -> None:
    llm = ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model=NAME, use_responses_api=responses)  # type: ignore[arg-type]
    said = llm.invoke("Who?")
    assert said.text == " Mira."
    assert said.usage_metadata is not None
    assert said.usage_metadata["output_token_details"]["reasoning"] == 3
    assert "".join(piece.text for piece in llm.stream("Who?")) == " Mira."


def test_the_client_has_the_engines_answer(engine: BlendEngine, served: Served, script: Script) -> None:
    """Its text, white space at the start included, and its thought."""
    remote = RemoteEngine(served.url, NAME, max_retries=0)
    for script.deltas in (THOUGHT, PLAIN):
        local = join(script.deltas)
        for said in (remote.generate(MESSAGES), join(remote.stream(MESSAGES))):
            assert (said.text, said.reasoning) == (local.text, local.reasoning)
            assert (said.num_tokens, said.reasoning_tokens) == (local.num_tokens, local.reasoning_tokens)
    remote.generate(MESSAGES, reasoning=False)
    assert script.options["reasoning"] is False
