"""Convert LlamaIndex's messages to the form of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from kvrag.llm import template_call

_ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
# templates render calls from `tool_calls` and, if at all, thoughts from `reasoning_content`; a CachePoint is a hint for
# hosted APIs
_SUPPORTED = (TextBlock, ThinkingBlock, ToolCallBlock, CachePoint)


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return dicts of role, content and tool fields."""
    return [_template_message(message) for message in messages]


def assistant_message(text: str, calls: Sequence[ToolCallBlock], thoughts: Sequence[ThinkingBlock] = ()) -> ChatMessage:
    """Return a message of the model; its calls also in OpenAI's form for compatibility."""
    return ChatMessage(
        role=MessageRole.ASSISTANT,
        blocks=[*thoughts, *([TextBlock(text=text)] if text or not calls else []), *calls],
        additional_kwargs={"tool_calls": [_template_call(call) for call in calls]} if calls else {},
    )


def _template_call(call: ToolCallBlock) -> dict[str, Any]:
    return template_call(call.tool_call_id, call.tool_name, call.tool_kwargs)


def _template_message(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": _ROLES.get(message.role, message.role.value), "content": message.content}
    unsupported = [block for block in message.blocks if not isinstance(block, _SUPPORTED)]
    if unsupported:
        fields["content"] = [{"type": block.block_type} for block in unsupported]  # the engine rejects them
    if thought := "".join(block.content or "" for block in message.blocks if isinstance(block, ThinkingBlock)):
        fields["reasoning_content"] = thought
    calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if calls:
        fields["tool_calls"] = [_template_call(call) for call in calls]
    fields |= {
        name: message.additional_kwargs[name] for name in ("tool_call_id", "name") if name in message.additional_kwargs
    }
    return fields
