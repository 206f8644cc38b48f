"""From the arguments of an engine to the JSON of a request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvrag.client.connection import Body
from kvrag.config import (
    ANSWER_DEFAULTS,
    ANSWER_SETTINGS,
    BlendConfig,
    Sampling,
    check_namespace,
    check_timeout,
    fill_options,
    named_texts,
)
from kvrag.errors import PromptError, SettingError
from kvrag.types import Messages

_SAMPLING = [field.name for field in fields(Sampling) if field.name != "logprobs"]
_SAME = {*_SAMPLING, "tools"} - {"max_new_tokens"}  # as OpenAI and vLLM name them
_SWITCHES = ("enable_thinking", "thinking")  # of thoughts, in chat templates
_DEFAULTS = {name: value for name, value in ANSWER_DEFAULTS.items() if name != "logprobs"}


def checked(options: Mapping[str, Any]) -> Body:
    """Return the options of an answer, as in `BlendEngine.stream`, and defaults; raise SettingError if one is wrong."""
    given = fill_options("an answer", _DEFAULTS, options)
    check_timeout(given["timeout"])
    check_namespace(given["namespace"])
    BlendConfig(**blend_of(given))
    if not isinstance(given["tools"] or (), (list, tuple)):
        raise SettingError(f"tools must be a list of dicts, got {given['tools']!r:.80}")
    if not (given["reasoning"] is None or isinstance(given["reasoning"], bool)):
        raise SettingError(f"reasoning must be True, False or None, got {given['reasoning']!r:.80}")
    documents = named_texts(given["documents"] or ())
    sampling = Sampling(**{name: given[name] for name in _SAMPLING})
    return {**given, **{name: getattr(sampling, name) for name in _SAMPLING}, "documents": documents}


def blend_of(options: Body) -> Body:
    """Return the options of blending that are given."""
    return {name: options[name] for name in ANSWER_SETTINGS if options[name] is not None}


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
    if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
        raise PromptError(f"a prompt must be one string or a list of messages, got {messages!r:.80}")
    if not messages:
        raise PromptError("the prompt is empty: pass at least one message")
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
