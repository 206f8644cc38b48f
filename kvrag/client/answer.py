"""From the server's JSON to an answer: text, tool calls, number of tokens."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from kvrag.client.connection import Body
from kvrag.errors import ServerError
from kvrag.types import Answer, BlendReport, CallPiece, Delta, FinishReason, InvalidCall, ToolCall


@dataclass
class _PartialCall:
    """A tool call that arrives in fragments."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class AnswerBuilder:
    """Builds an answer from a response, or from the events of a stream.

    Attributes:
        is_forced: The answer must be a tool call.
        extras: Fields of the responses that OpenAI does not have.
        usage: OpenAI's usage.
    """

    is_forced: bool = False
    extras: Body = field(default_factory=dict)
    usage: Body = field(default_factory=dict)
    _text: str = ""
    _calls: list[_PartialCall] = field(default_factory=list)
    _valid: list[ToolCall] = field(default_factory=list)
    _invalid: list[InvalidCall] = field(default_factory=list)
    _ended: int = 0  # number of calls that were parsed
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
        self._text += text
        valid, invalid = self._end_calls(len(self._calls) - 1)  # the last one may be incomplete
        return Delta(text, call_pieces=tuple(pieces), tool_calls=valid, invalid_calls=invalid)

    def last(self, report: BlendReport) -> Delta:
        """Return the last delta.

        Raises:
            ServerError: The answer is incomplete.
        """
        if self._finish not in ("stop", "length", "tool_calls", "function_call"):
            raise ServerError(f"the server ended the answer early ({self._finish or 'the stream broke off'}): retry")
        finish: FinishReason = "length" if self._finish == "length" else "stop"
        pieces: tuple[CallPiece, ...] = ()
        if self.is_forced and not self._calls and finish == "length":  # vLLM omits a call that was cut off
            self._text, pieces = "", (self._add_call(0, {}),)
        valid, invalid = self._end_calls(len(self._calls))
        num_tokens = self.usage.get("completion_tokens") or 0
        return Delta("", (), finish, report, valid, num_tokens, pieces, invalid)

    def answer(self, report: BlendReport) -> Answer:
        """Return the answer, once all responses or events are added."""
        last = self.last(report)
        assert last.finish_reason is not None
        calls = tuple(self._valid), last.num_tokens, tuple(self._invalid)
        return Answer(self._text, (), last.finish_reason, report, *calls)

    def _add_call(self, index: int, part: dict[str, Any]) -> CallPiece:
        while len(self._calls) <= index:
            self._calls.append(_PartialCall())
        call, function = self._calls[index], part.get("function") or {}
        is_new = not call.id
        call.id = call.id or part.get("id") or uuid.uuid4().hex[:9]
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        call.name += name
        call.arguments += arguments
        return CallPiece(index, arguments, name, call.id if is_new else "")

    def _end_calls(self, num: int) -> tuple[tuple[ToolCall, ...], tuple[InvalidCall, ...]]:
        """Return those of the first `num` calls that are new."""
        valid: list[ToolCall] = []
        invalid: list[InvalidCall] = []
        for call in self._calls[self._ended : max(num, self._ended)]:
            arguments = _arguments(call.arguments, is_cut=call is self._calls[-1] and self._finish == "length")
            if arguments is None:
                invalid.append(InvalidCall(call.name, call.arguments, call.id))
            else:
                valid.append(ToolCall(call.name, arguments, call.id))
        self._ended = max(num, self._ended)
        self._valid += valid
        self._invalid += invalid
        return tuple(valid), tuple(invalid)


def _arguments(text: str, is_cut: bool) -> dict[str, Any] | None:
    """Return the arguments; None if they are no JSON object. Servers omit empty ones, unless the answer was cut off."""
    try:
        value = json.loads(text, strict=False) if text.strip() or is_cut else {}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def report_of(content: object, usage: Body, missing: str = "") -> BlendReport:
    """Return the report that a server sent.

    Args:
        usage: OpenAI's usage, for the numbers of tokens if there is no report.
        missing: Note of the report in this case.
    """
    problem = missing
    if isinstance(content, dict) and "error" not in content:
        ignored = content.get("ignored") or ()
        try:
            report = BlendReport.from_dict(content)
        except TypeError:
            problem = "the server sent an incomplete report"
        else:
            if not ignored:
                return report
            notes = [*report.notes, *(f"ignored by the server: {name}" for name in ignored)]
            return BlendReport.from_dict({**report.to_dict(), "notes": notes})
    elif isinstance(content, dict):
        problem = f"the server could not reuse chunks: {content['error']}"
    prompt = usage.get("prompt_tokens") or 0
    reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return BlendReport.unblended(prompt, reused, notes=(problem,))
