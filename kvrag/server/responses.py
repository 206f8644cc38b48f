"""OpenAI's `/v1/responses`: a request becomes a chat, and its answer becomes the items and events of a response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvrag.retrieval.index import Hit
from kvrag.server.errors import ApiError
from kvrag.server.response import Choice, Event, Piece, TokenText, citations, openai_logprob, openai_usage
from kvrag.server.schemas import ChatRequest, Common, Contextual, Effort, Request, Verbosity
from kvrag.types import CallPiece, Delta, InvalidCall, Messages, ToolCall

_LOGPROBS = "message.output_text.logprobs"


class _Sent(BaseModel):
    """Base of what clients copy from earlier responses: unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class TextPart(_Sent):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Item(_Sent):
    """An item of the input. `reasoning` items, which other servers return, are ignored."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None


class FunctionTool(_Sent):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Request):
    """OpenAI's `text`."""

    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None


class Reasoning(_Sent):
    """OpenAI's `reasoning`; summaries are not supported."""

    effort: Effort | None = None


class ResponsesRequest(Common, Contextual):
    """The body of `/v1/responses`."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream_options: dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[FunctionTool] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
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
        shared = {name: getattr(self, name) for name in (*Common.model_fields, *Contextual.model_fields)}
        has_logprobs = _LOGPROBS in (self.include or ())
        choice, format_ = self.tool_choice, None if self.text is None else self.text.format
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": "function", "function": {"name": choice["name"]}}
        if format_ is not None and format_.get("type") == "json_schema":
            format_ = {"type": "json_schema", "json_schema": format_}
        tools = [{"type": "function", "function": _plain(tool)} for tool in self.tools or ()]
        shared |= {"tools": tools or None, "tool_choice": choice, "response_format": format_}
        return ChatRequest.model_validate(
            shared
            | {
                "messages": self._messages(),
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": has_logprobs,
                "top_logprobs": self.top_logprobs if has_logprobs else None,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            }
        )

    def _messages(self) -> Messages:
        messages: Messages = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for number, item in enumerate(items):
            place = f"input[{number}]"
            if item.type == "message":
                content = _text(_required(item.content, f"{place}.content"))
                messages.append({"role": _required(item.role, f"{place}.role"), "content": content})
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
        raise ApiError(400, f"Missing required parameter: '{place}'.", "missing_required_parameter", place)
    return value


def _text(content: str | list[TextPart], between: str = "") -> str:
    return content if isinstance(content, str) else between.join(part.text for part in content)


def _plain(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True, exclude={"type"})


class ResponsesBuilder:
    """Builds a response; see `kvrag.server.response.Builder`."""

    def __init__(self, request: ResponsesRequest, token_text: TokenText) -> None:
        self.is_stream = bool(request.stream)
        self._request, self._token_text = request, token_text
        self._has_logprobs = _LOGPROBS in (request.include or ())
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._choice = Choice(max_calls=1 if request.parallel_tool_calls is False else None)
        self._hits: list[Hit] | None = None
        self._output: list[dict[str, Any]] = []
        self._message: dict[str, Any] | None = None  # the last item, while text is added to it
        self._calls: list[int] = []  # numbers of the items that are calls
        self._num_events = 0
        self._num_logprobs = 0  # that were sent

    def add(self, piece: Piece) -> Sequence[Event]:
        """See Builder."""
        if isinstance(piece, list):
            self._hits = piece
            return ()
        events: list[Event] = []
        if not self._num_events:
            events += [self._event(f"response.{kind}", response=self._body()) for kind in ("created", "in_progress")]
        shown = self._choice.add(piece[1])
        if shown.text:
            events += self._add_text(shown)
        for fragment in shown.call_pieces:
            events += self._add_arguments(fragment)
        ended: list[ToolCall | InvalidCall] = [*shown.tool_calls, *shown.invalid_calls]
        for call in ended:
            events += self._close_call(call)
        if self._choice.report is not None:
            if not self._output:
                events += self._open_message()
            events += self._close_message()
        return events

    def last_events(self) -> Sequence[Event]:
        """See Builder."""
        body = self.whole()
        return (self._event(f"response.{body['status']}", response=body),)

    def error_events(self, content: dict[str, Any]) -> Sequence[Event]:
        """See Builder."""
        error = content["error"]
        details = {name: error[name] for name in ("code", "message", "param")}
        failed = {"code": "server_error", "message": error["message"]}  # one of the few codes that OpenAI's schema has
        body = self._body() | {"status": "failed", "error": failed}
        return self._event("error", **details), self._event("response.failed", response=body)

    def whole(self) -> dict[str, Any]:
        """See Builder."""
        choice, usage = self._choice, openai_usage([self._choice], 1)
        assert choice.report is not None
        extras: dict[str, Any] = {"kvrag": choice.report.to_dict()}
        if self._hits is not None:
            extras["citations"] = citations(self._hits)
        return self._body() | {
            "status": "incomplete" if choice.is_cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if choice.is_cut_off else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            **extras,
        }

    def _body(self) -> dict[str, Any]:
        request = self._request
        text = request.text or TextOptions()
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": list(self._output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": text.format or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _add_text(self, delta: Delta) -> Sequence[Event]:
        opened = () if self._message is not None else self._open_message()
        assert self._message is not None
        part = self._message["content"][0]
        new = self._choice.logprobs[self._num_logprobs :] if self._has_logprobs else []
        self._num_logprobs += len(new)
        logprobs = [openai_logprob(row, self._token_text) for row in new]
        part["text"] += delta.text
        part["logprobs"] += logprobs
        return *opened, self._part_event("output_text.delta", delta=delta.text, logprobs=logprobs)

    def _open_message(self) -> Sequence[Event]:
        item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._message = item | {"status": "in_progress", "content": [part]}
        self._output.append(self._message)
        return (
            self._item_event("added", item | {"status": "in_progress", "content": []}),
            self._part_event("content_part.added", part=part | {"logprobs": []}),
        )

    def _close_message(self) -> Sequence[Event]:
        if self._message is None:
            return ()
        item, part = self._message, self._message["content"][0]
        item["status"] = "incomplete" if self._choice.is_cut_off else "completed"
        events = (
            self._part_event("output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._part_event("content_part.done", part=part),
            self._item_event("done", item),
        )
        self._message = None
        return events

    def _add_arguments(self, piece: CallPiece) -> Sequence[Event]:
        events: list[Event] = []
        if piece.id:
            events += self._close_message()
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": piece.id, "name": piece.name}
            self._calls.append(len(self._output))
            self._output.append(item | {"arguments": "", "status": "in_progress"})
            events.append(self._item_event("added", dict(self._output[-1])))
        number = self._calls[piece.index]
        item = self._output[number]
        item["arguments"] += piece.arguments
        if piece.arguments:
            place = {"item_id": item["id"], "output_index": number}
            events.append(self._event("response.function_call_arguments.delta", **place, delta=piece.arguments))
        return events

    def _close_call(self, call: ToolCall | InvalidCall) -> Sequence[Event]:
        number = next(number for number in self._calls if self._output[number]["call_id"] == call.id)
        item = self._output[number]
        item["status"] = "completed" if isinstance(call, ToolCall) else "incomplete"
        done = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
        return (
            self._event("response.function_call_arguments.done", output_index=number, **done),
            self._event("response.output_item.done", output_index=number, item=item),
        )

    def _item_event(self, what: str, item: dict[str, Any]) -> Event:
        return self._event(f"response.output_item.{what}", output_index=len(self._output) - 1, item=item)

    def _part_event(self, what: str, **fields: Any) -> Event:
        assert self._message is not None
        place = {"item_id": self._message["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return self._event(f"response.{what}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}
