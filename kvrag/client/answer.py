"""From the server's JSON to an answer: text, tool calls, number of tokens."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from kvrag.client.connection import Body
from kvrag.errors import ServerError
from kvrag.types import Answer, BlendReport, Delta, FinishReason, ToolCall


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
        extras: Fields of the responses that OpenAI does not have.
        usage: OpenAI's usage.
    """

    extras: Body = field(default_factory=dict)
    usage: Body = field(default_factory=dict)
    _text: str = ""
    _calls: list[_PartialCall] = field(default_factory=list)
    _done: list[ToolCall] = field(default_factory=list)
    _complete: int = 0  # calls that were examined
    _finish: str | None = None

    def add(self, body: Body) -> Delta:
        """Add a response or an event; return what is new and complete."""
        self.extras |= {name: body[name] for name in ("kvrag", "kv_transfer_params") if body.get(name)}
        self.usage = body.get("usage") or self.usage
        text = ""
        for choice in body.get("choices") or ():
            said = choice.get("delta") or choice.get("message") or {}
            text += said.get("content") or choice.get("text") or ""
            for position, part in enumerate(said.get("tool_calls") or ()):
                self._add_call(part.get("index", position), part)
            self._finish = choice.get("finish_reason") or self._finish
        return self._delta(text, len(self._calls) - 1)  # the last one may go on

    def last(self, report: BlendReport) -> Delta:
        """Return the last delta.

        Raises:
            ServerError: The answer is incomplete.
        """
        if self._finish not in ("stop", "length", "tool_calls", "function_call"):
            raise ServerError(f"the server ended the answer early ({self._finish or 'the stream broke off'}): retry")
        rest = self._delta("", len(self._calls))
        finish: FinishReason = "length" if self._finish == "length" else "stop"
        return Delta(rest.text, (), finish, report, rest.tool_calls, self.usage.get("completion_tokens") or 0)

    def answer(self, report: BlendReport) -> Answer:
        """Return the answer after everything was added."""
        last = self.last(report)
        assert last.finish_reason is not None
        return Answer(self._text, (), last.finish_reason, report, tuple(self._done), last.num_tokens)

    def _add_call(self, index: int, part: dict[str, Any]) -> None:
        while len(self._calls) <= index:
            self._calls.append(_PartialCall())
        call, function = self._calls[index], part.get("function") or {}
        call.id = call.id or part.get("id") or ""
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""

    def _delta(self, text: str, complete: int) -> Delta:
        """Return the delta of a text and of the first `complete` calls; what is not a valid call is text."""
        calls = []
        for call in self._calls[self._complete : max(complete, self._complete)]:
            arguments = _arguments(call.arguments)
            if arguments is None:
                text += f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}'
            else:
                calls.append(ToolCall(call.name, arguments, call.id or uuid.uuid4().hex[:9]))
        self._complete = max(complete, self._complete)
        self._text += text
        self._done += calls
        return Delta(text, tool_calls=tuple(calls))


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, strict=False) if text.strip() else {}
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
            notes = [*report.notes, *(f"ignored by the server: {each}" for each in ignored)]
            return BlendReport.from_dict({**report.to_dict(), "notes": notes})
    elif isinstance(content, dict):
        problem = f"the server could not reuse chunks: {content['error']}"
    prompt = usage.get("prompt_tokens") or 0
    reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return BlendReport.unblended(prompt, reused, notes=(problem,))
