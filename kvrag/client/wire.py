"""The wire: from the arguments of an engine to the JSON of a request, and from the server's JSON to an answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from kvrag.client.connection import Body
from kvrag.config import Sampling
from kvrag.errors import PromptError, ServerError
from kvrag.types import BlendReport, Delta, InvalidCall, Messages, ToolCall, arguments_of

# as OpenAI and vLLM name them
_SAME = {"tools", *(row.name for row in fields(Sampling))} - {"max_new_tokens", "logprobs"}
_SWITCHES = ("enable_thinking", "thinking")  # of thoughts, in chat templates


def body_of(model: str, prompt: str | Messages, options: Body, is_stream: bool) -> Body:
    """Return the part of a request that all servers take; raise PromptError if the prompt cannot be sent."""
    if isinstance(prompt, str):
        if options["tools"]:
            raise PromptError("tools need a chat prompt: pass the prompt as a list of messages")
        if not prompt.strip():
            raise PromptError("the prompt is empty")
        body: Body = {"prompt": prompt}
    else:
        # the names of the switch in chat templates; they ignore unknown ones
        switch = {} if options["reasoning"] is None else dict.fromkeys(_SWITCHES, options["reasoning"])
        body = {"messages": messages_of(prompt), "chat_template_kwargs": switch | (options["template"] or {})}
        body["parallel_tool_calls"] = options["parallel_tool_calls"]
    body |= {"model": model, "max_tokens": options["max_new_tokens"]}
    body |= {name: options[name] for name in _SAME}
    if (seed := options["seed"]) is not None and seed >= 1 << 63:
        body["seed"] = seed - (1 << 64)  # servers take signed numbers
    body["tool_choice"] = _choice(options["tool_choice"])
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if options["grammar"] is not None and options["grammar"].json_schema is not None:
        schema = {"name": "answer", "schema": dict(options["grammar"].json_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in body.items() if value is not None and value not in ("", [], (), {})}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    if not isinstance(choice, str) or choice in ("auto", "none", "required"):
        return choice
    return "required" if choice == "any" else {"type": "function", "function": {"name": choice}}


def messages_of(messages: Any) -> Messages:
    """Return messages for chat templates in OpenAI's form; raise PromptError if these are no messages."""
    is_list = isinstance(messages, (list, tuple)) and all(isinstance(message, Mapping) for message in messages)
    if not is_list or not messages:
        raise PromptError(f"a prompt must be one string or a list of messages, got {messages!r:.80}")
    return [_message(message) for message in messages]


def _message(message: Mapping[str, Any]) -> Body:
    converted = dict(message)
    if isinstance(content := message.get("content"), list):
        converted["content"] = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if thought := message.get("reasoning_content"):
        converted.setdefault("reasoning", thought)  # vLLM reads this name, and sets both for the chat template
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [_call(call) for call in calls]
    return converted


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call  # the server refuses what is malformed
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


async def deltas_of(
    responses: AsyncIterator[Body], is_forced: bool, report: Callable[[Body, Body], Awaitable[BlendReport]]
) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of a response, or of the events of a stream.

    Args:
        is_forced: The answer must be a tool call.
        report: Returns the report for the responses' fields that OpenAI does not have, and OpenAI's usage.
    """
    extras, usage, finish = Body(), Body(), ""
    calls: dict[int, InvalidCall] = {}  # by index, not parsed yet
    async for body in responses:
        extras |= {name: body[name] for name in ("kvrag", "kv_transfer_params") if body.get(name)}
        usage = body.get("usage") or usage
        text, thought, parts, reason = _content(body)
        finish = reason or finish
        if is_forced and finish == "length" and not calls and not parts:  # vLLM omits a call that was cut off
            text, parts = "", [{"index": 0}]
        for part in parts:
            _add_part(calls, part)
        if text or thought:
            yield Delta(text, reasoning=thought)
    if finish not in ("stop", "length", "tool_calls", "function_call"):
        raise ServerError(f"the server ended the answer early ({finish or 'the stream broke off'}): retry")
    valid, invalid = _parsed(calls, is_cut=finish == "length")
    yield Delta(
        "",
        finish_reason="length" if finish == "length" else "stop",
        report=await report(extras, usage),
        tool_calls=tuple(valid),
        num_tokens=usage.get("completion_tokens") or 0,
        invalid_calls=tuple(invalid),
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0,
    )


def _content(body: Body) -> tuple[str, str, list[Body], str]:
    """Return text, thought, pieces of tool calls, and the reason of the end ("" = none) in a response or an event."""
    choice = next(iter(body.get("choices") or ()), Body())
    message = choice.get("delta") or choice.get("message") or {}
    text = message.get("content") or choice.get("text") or ""
    thought = message.get("reasoning_content") or message.get("reasoning") or ""  # vLLM renamed it
    parts = [{"index": number, **part} for number, part in enumerate(message.get("tool_calls") or ())]
    return text, thought, parts, choice.get("finish_reason") or ""


def _add_part(calls: dict[int, InvalidCall], part: Body) -> None:
    """Add a piece of a tool call to its call."""
    index, function = part["index"], part.get("function") or {}
    call = calls.get(index) or InvalidCall("", "", part.get("id") or uuid.uuid4().hex[:9])
    name, arguments = function.get("name") or "", function.get("arguments") or ""
    calls[index] = replace(call, name=call.name + name, arguments=call.arguments + arguments)


def _parsed(calls: dict[int, InvalidCall], is_cut: bool) -> tuple[list[ToolCall], list[InvalidCall]]:
    """Return the calls of a complete answer: valid and invalid ones. The last one may be part of a cut off answer."""
    valid, invalid = list[ToolCall](), list[InvalidCall]()
    for index, call in calls.items():
        # servers omit empty arguments, unless the answer was cut off
        is_whole = call.arguments.strip() or not (is_cut and index == max(calls))
        arguments = arguments_of(call.arguments) if is_whole else None
        if arguments is None:
            invalid.append(call)
        else:
            valid.append(ToolCall(call.name, arguments, call.id))
    return valid, invalid


def report_of(content: object, usage: Body, missing: str) -> BlendReport:
    """Return the report that a server sent; without one, the numbers of tokens in `usage`, and the note `missing`."""
    if isinstance(content, dict) and "error" in content:
        missing = f"the server could not reuse chunks: {content['error']}"
    elif isinstance(content, dict):
        try:
            report = BlendReport.from_dict(content)
            ignored = [f"ignored by the server: {name}" for name in content.get("ignored") or ()]
            return replace(report, notes=(*report.notes, *ignored))
        except TypeError:
            missing = "the server sent an incomplete report"
    reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return BlendReport.unblended(usage.get("prompt_tokens") or 0, reused, notes=(missing,))
