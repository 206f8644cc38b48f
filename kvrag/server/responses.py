"""OpenAI's `/v1/responses`: a request becomes a chat, and its answer becomes the items and events of a response."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Annotated, Any, Literal

from pydantic import Field

from kvrag.engine import BlendEngine
from kvrag.server.api_errors import ApiError
from kvrag.server.response import Builder, Choice, Event, arguments_text
from kvrag.server.schemas import Body, ChatRequest, Common, Contextual, Effort, Many, Part, Verbosity
from kvrag.types import Delta, InvalidCall, Messages, ToolCall, openai_usage

_LOGPROBS = "message.output_text.logprobs"
_STATUS = {"stop": "completed", "length": "incomplete"}  # by the engine's finish reason

# items with text: the start of the id, fields, and the part that takes the text
_NEW: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "message": ("msg", {"role": "assistant"}, {"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
}


class TextPart(Part):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str


class Item(Part):
    """An item of the input. Of `reasoning` items, the text goes to the chat template."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Many[TextPart] | None = None


class FunctionTool(Part):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Body):
    """OpenAI's `text`."""

    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None


class Reasoning(Part):
    """OpenAI's `reasoning`; summaries are not supported."""

    effort: Effort | None = None


class ResponsesRequest(Common, Contextual):
    """The body of `/v1/responses`."""

    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream_options: dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Many[FunctionTool] | None = None
    include: Many[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    # accepted with their default values only
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None

    # accepted without effect
    max_tool_calls: int | None = None

    def chat(self) -> ChatRequest:
        """Return the same request as a chat.

        Raises:
            ApiError: An option is not supported, or an item is incomplete.
        """
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                message = f"{name} is not supported: responses are not stored, send the whole conversation as input"
                raise ApiError(400, message, "unsupported_value", name)
        fields = {name: getattr(self, name) for name in (*Common.model_fields, *Contextual.model_fields)}
        fields["messages"] = self._messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        if _LOGPROBS in (self.include or ()):
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.tools:
            functions = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in self.tools]
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and (format_ := self.text.format) is not None:
            is_schema = format_.get("type") == "json_schema"
            fields["response_format"] = {"type": "json_schema", "json_schema": format_} if is_schema else format_
        return ChatRequest.model_validate(fields)

    def _messages(self) -> Messages:
        messages: Messages = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for number, item in enumerate(items):
            place = f"input.{number}"
            if item.type == "message":
                content = _text(_required(item.content, f"{place}.content"))
                role = _required(item.role, f"{place}.role")
                last = messages[-1] if messages else {}
                is_thought = "reasoning_content" in last and last["content"] is None and "tool_calls" not in last
                if role == "assistant" and is_thought:
                    last["content"] = content
                else:
                    messages.append({"role": role, "content": content})
            elif item.type == "reasoning" and item.content:  # others have a summary only
                thought = _text(item.content)
                messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
            elif item.type == "function_call":
                name, arguments = _required(item.name, f"{place}.name"), _required(item.arguments, f"{place}.arguments")
                call = {"type": "function", "id": item.call_id, "function": {"name": name, "arguments": arguments}}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
            elif item.type == "function_call_output":
                content = _text(_required(item.output, f"{place}.output"), "\n")
                call_id = _required(item.call_id, f"{place}.call_id")
                messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        if not messages:
            raise ApiError(400, "the input contains no message", "invalid_value", "input")
        return messages


def _required(value: Any, place: str) -> Any:
    if value is None:
        raise ApiError(400, f"{place}: Field required", "missing_required_parameter", place)
    return value


def _shown_choice(choice: Any) -> Any:
    """Return a tool choice, which may have the form of a chat, in that of a response."""
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, dict) else None
    choice = "required" if choice == "any" else choice
    return choice if choice in ("auto", "none", "required") else {"type": "function", "name": choice}


def _text(content: str | list[TextPart], between: str = "") -> str:
    return content if isinstance(content, str) else between.join(part.text for part in content)


class ResponsesBuilder(Builder):
    """Builds the response to a request of `/v1/responses`."""

    def __init__(self, request: ResponsesRequest, engine: BlendEngine) -> None:
        super().__init__(request.stream, engine)
        self._choice = Choice()
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None  # the last one, while text is added to it
        self._logprobs: list[dict[str, Any]] = []  # of the next text
        self._num_events = 0
        self._body = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {name: str(value) for name, value in (request.metadata or {}).items()},
            "model": request.model,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": _shown_choice(request.tool_choice or "auto"),
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _add(self, number: int, delta: Delta) -> Iterator[Event]:
        if not self._num_events:
            yield self._event("response.created", response=self._body)
            yield self._event("response.in_progress", response=self._body)
        calls = self._choice.add(delta)
        self._logprobs += map(self._logprob, delta.logprobs[delta.reasoning_tokens :])  # those of the text
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        if delta.text:
            yield from self._add_text("message", delta.text)
        for call in calls:
            yield from self._add_call(call)
        if delta.finish_reason is not None:
            if not self._output:
                yield from self._open("message")
            yield from self._close(_STATUS[delta.finish_reason])

    def last_events(self) -> Sequence[Event]:
        """See Builder."""
        body = self.whole()
        return (self._event(f"response.{body['status']}", response=body),)

    def error_events(self, content: dict[str, Any]) -> Sequence[Event]:
        """See Builder."""
        details = {name: content["error"][name] for name in ("code", "message", "param")}
        # one of the few codes that OpenAI's schema has
        body = self._body | {"status": "failed", "error": {"code": "server_error", "message": details["message"]}}
        return self._event("error", **details), self._event("response.failed", response=body)

    def whole(self) -> dict[str, Any]:
        """See Builder."""
        answer = self._choice.answer
        counts = openai_usage([answer]).items()  # by the names of chats
        return self._body | {
            "status": _STATUS[answer.finish_reason],
            "incomplete_details": {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None,
            "usage": {name.replace("prompt", "input").replace("completion", "output"): count for name, count in counts},
            "kvrag": answer.report.to_dict(),
            **self._extras,
        }

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._item is None or self._item["type"] != kind:
            yield from self._close()
            yield from self._open(kind)
        assert self._item is not None
        part, more = self._item["content"][0], {}
        part["text"] += text
        if kind == "message":
            more["logprobs"], self._logprobs = self._logprobs, []
            part["logprobs"] += more["logprobs"]
        yield self._item_event(f"{part['type']}.delta", self._item, content_index=0, delta=text, **more)

    def _open(self, kind: str) -> Iterator[Event]:
        prefix, fields, part = deepcopy(_NEW[kind])
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, **fields, "status": "in_progress"}
        self._item = item | {"content": []}
        self._output.append(self._item)
        yield self._item_event("output_item.added", self._item)
        self._item["content"].append(part)
        yield self._item_event("content_part.added", self._item, content_index=0, part=part)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        item, self._item = self._item, None
        if item is not None:
            item["status"] = status
            part = item["content"][0]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._item_event(f"{part['type']}.done", item, content_index=0, **done)
            yield self._item_event("content_part.done", item, content_index=0, part=part)
            yield self._item_event("output_item.done", item)

    def _add_call(self, call: ToolCall | InvalidCall) -> Iterator[Event]:
        yield from self._close()
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call.id, "name": call.name}
        self._output.append(item := item | {"arguments": "", "status": "in_progress"})
        yield self._item_event("output_item.added", item)
        item["arguments"] = arguments = arguments_text(call)
        item["status"] = "incomplete" if isinstance(call, InvalidCall) else "completed"
        yield self._item_event("function_call_arguments.delta", item, delta=arguments)
        yield self._item_event("function_call_arguments.done", item, name=call.name, arguments=arguments)
        yield self._item_event("output_item.done", item)

    def _item_event(self, kind: str, item: dict[str, Any], **fields: Any) -> Event:
        """Return an event about a whole item, or, with fields, about a part of it."""
        about = {"item_id": item["id"], **fields} if fields else {"item": item}
        return self._event(f"response.{kind}", output_index=self._output.index(item), **about)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}
