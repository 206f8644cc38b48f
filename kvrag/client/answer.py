"""From the server's JSON to an answer: text, tool calls, number of tokens."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from kvrag.client.connection import Body
from kvrag.errors import ServerError
from kvrag.types import BlendReport, CallPiece, Delta, InvalidCall, ToolCall


@dataclass
class AnswerBuilder:
    """Builds the deltas of an answer from a response, or from the events of a stream.

    Attributes:
        is_forced: The answer must be a tool call.
        extras: Fields of the responses that OpenAI does not have.
        usage: OpenAI's usage.
    """

    is_forced: bool = False
    extras: Body = field(default_factory=dict)
    usage: Body = field(default_factory=dict)
    _calls: dict[int, CallPiece] = field(default_factory=dict)  # joined
    _finish: str | None = None

    def add(self, body: Body) -> Delta:
        """Add a response or an event; return what is new."""
        self.extras |= {name: body[name] for name in ("kvrag", "kv_transfer_params") if body.get(name)}
        self.usage = body.get("usage") or self.usage
        text = ""
        pieces: list[CallPiece] = []
        for choice in body.get("choices") or ():
            message = choice.get("delta") or choice.get("message") or {}
            text += message.get("content") or choice.get("text") or ""
            for position, part in enumerate(message.get("tool_calls") or ()):
                pieces.append(self._add_call(part.get("index", position), part))
            self._finish = choice.get("finish_reason") or self._finish
        if self.is_forced and not self._calls and self._finish == "length":  # vLLM omits a call that was cut off
            text, pieces = "", [self._add_call(0, {})]
        return Delta(text, call_pieces=tuple(pieces))

    def last(self, report: BlendReport) -> Delta:
        """Return the last delta.

        Raises:
            ServerError: The answer is incomplete.
        """
        if self._finish not in ("stop", "length", "tool_calls", "function_call"):
            raise ServerError(f"the server ended the answer early ({self._finish or 'the stream broke off'}): retry")
        is_cut = self._finish == "length"
        valid: list[ToolCall] = []
        invalid: list[InvalidCall] = []
        for index, call in sorted(self._calls.items()):
            arguments = _arguments(call.arguments, is_cut and index == max(self._calls))
            if arguments is None:
                invalid.append(InvalidCall(call.name, call.arguments, call.id))
            else:
                valid.append(ToolCall(call.name, arguments, call.id))
        return Delta(
            "",
            finish_reason="length" if is_cut else "stop",
            report=report,
            tool_calls=tuple(valid),
            num_tokens=self.usage.get("completion_tokens") or 0,
            invalid_calls=tuple(invalid),
        )

    def _add_call(self, index: int, part: dict[str, Any]) -> CallPiece:
        function, before = part.get("function") or {}, self._calls.get(index)
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if before is None:
            piece = self._calls[index] = CallPiece(index, arguments, name, part.get("id") or uuid.uuid4().hex[:9])
            return piece
        self._calls[index] = CallPiece(index, before.arguments + arguments, before.name + name, before.id)
        return CallPiece(index, arguments, name)


def _arguments(text: str, is_cut: bool) -> dict[str, Any] | None:
    """Return the arguments; None if they are no JSON object. Servers omit empty ones, unless the answer was cut off."""
    try:
        value = json.loads(text, strict=False) if text.strip() or is_cut else {}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def report_of(content: object, usage: Body, missing: str) -> BlendReport:
    """Return the report that a server sent.

    Args:
        usage: OpenAI's usage, for the numbers of tokens if there is no report.
        missing: Note of the report in this case.
    """
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
