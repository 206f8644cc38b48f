"""Convert LangChain's messages to the form of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, FunctionMessage, ToolMessage

from kvrag import PromptError
from kvrag.llm import template_call

# not LangChain's convert_to_openai_messages: it keeps reasoning in prompts, and joins parts with line breaks
_ROLES = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool", "function": "tool"}
# parts without text for the prompt: templates render calls from `tool_calls` and, if at all, thoughts from
# `reasoning_content`
_LEFT_OUT = (
    *("reasoning", "thinking", "redacted_thinking", "reasoning_content"),
    *("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use"),
)


def template_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return dicts of role, content and tool fields.

    Raises:
        PromptError: Prompts cannot contain a message of this type, such as a RemoveMessage.
    """
    return [_template_message(message) for message in messages]


def _kind(message: BaseMessage) -> str:
    return message.type.removesuffix("MessageChunk").lower()


def _template_message(message: BaseMessage) -> dict[str, Any]:
    role = message.role if isinstance(message, ChatMessage) else _ROLES.get(_kind(message))
    if role is None:
        raise PromptError(f"prompts cannot contain a {type(message).__name__}: remove it")
    content = message.content
    if isinstance(content, list):
        content = [_without_index(part) for part in content if _kind_of(part) not in _LEFT_OUT]
    fields: dict[str, Any] = {"role": role, "content": content}
    if isinstance(message, AIMessage) and (thought := _thought(message)):
        fields["reasoning_content"] = thought
    # invalid calls stay in prompts as they were generated; they have their arguments as text
    calls = [*message.tool_calls, *message.invalid_tool_calls] if isinstance(message, AIMessage) else []
    if calls:
        fields["tool_calls"] = [template_call(call["id"], call["name"] or "", call["args"] or "") for call in calls]
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, (ToolMessage, FunctionMessage)) and message.name:
        fields["name"] = message.name
    return fields


def _kind_of(part: str | dict[str, Any]) -> Any:
    return part.get("type") if isinstance(part, dict) else "text"


def _without_index(part: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return the part without the number by which LangChain merges chunks; servers may not know it."""
    return {key: value for key, value in part.items() if key != "index"} if isinstance(part, dict) else part


def _thought(message: AIMessage) -> str:
    blocks = cast(list[dict[str, Any]], message.content_blocks)
    return "".join(block.get("reasoning") or "" for block in blocks if block["type"] == "reasoning")
