"""Responses to chats and completions in OpenAI's JSON: built piece by piece, returned whole or as stream events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from kvrag.engine import BlendEngine
from kvrag.retrieval.index import Hit
from kvrag.server.schemas import AnswerFields, ChatRequest
from kvrag.types import Answer, Delta, InvalidCall, TokenLogprob, ToolCall, join, openai_usage

Piece = tuple[int, Delta] | list[Hit]
"""A piece of an answer: first the retrieved chunks, if any, then the number of a choice and its next delta."""

Event = dict[str, Any] | str
"""Data of a server-sent event."""


@dataclass
class Choice:
    """The part of one answer that has been generated.

    Attributes:
        calls: Tool calls, valid or not, in order.
        offset: Length of the text of the tokens whose log probabilities were sent.
    """

    deltas: list[Delta] = field(default_factory=list)
    calls: list[ToolCall | InvalidCall] = field(default_factory=list)
    offset: int = 0

    @cached_property
    def answer(self) -> Answer:
        """The complete answer."""
        return join(self.deltas)

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish reason of the complete answer."""
        return "tool_calls" if self.calls and self.answer.finish_reason == "stop" else self.answer.finish_reason

    def add(self, delta: Delta) -> Sequence[ToolCall | InvalidCall]:
        """Add a delta; return its calls."""
        self.deltas.append(delta)
        calls: list[ToolCall | InvalidCall] = [*delta.tool_calls, *delta.invalid_calls]
        self.calls += calls
        return calls


class Builder:
    """Builds the response to one request from the pieces of its answer."""

    def __init__(self, is_stream: bool | None, engine: BlendEngine) -> None:
        self.is_stream = bool(is_stream)
        self._token_text = engine.model.tokenizer.token_text
        self._created = int(time.time())
        self._extras: dict[str, Any] = {}  # the citations, once something was retrieved

    def add(self, piece: Piece) -> Iterator[Event]:
        """Add a piece; yield its stream events, each of which is valid until the next."""
        if isinstance(piece, tuple):
            yield from self._add(*piece)
        else:
            self._extras["citations"] = [{"index": number, **asdict(hit)} for number, hit in enumerate(piece, 1)]

    def _add(self, number: int, delta: Delta) -> Iterator[Event]:
        raise NotImplementedError

    def last_events(self) -> Sequence[Event]:
        """Return the last events of a complete stream."""
        raise NotImplementedError

    def error_events(self, content: dict[str, Any]) -> Sequence[Event]:
        """Return the last events of a stream that fails with this error object."""
        return (content,)

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        raise NotImplementedError

    def _logprob(self, row: TokenLogprob) -> dict[str, Any]:
        """Return a token's log probability in the form of chats and responses."""

        def entry(token: int, value: float) -> dict[str, Any]:
            text, content = self._token_text(token)
            return {"token": text, "logprob": value, "bytes": list(content)}

        return entry(row.token, row.logprob) | {"top_logprobs": [entry(token, value) for token, value in row.top]}


class ResponseBuilder(Builder):
    """Builds the response to a chat or a completion."""

    def __init__(self, request: AnswerFields, engine: BlendEngine) -> None:
        super().__init__(request.stream, engine)
        self._request = request
        self._is_chat = isinstance(request, ChatRequest)
        self._wants_usage = request.stream_options is not None and request.stream_options.include_usage
        self._fingerprint = f"kvrag-{engine.fingerprint.digest[:12]}"
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._choices: dict[int, Choice] = {}

    def _add(self, number: int, delta: Delta) -> Iterator[Event]:
        if number not in self._choices:
            self._choices[number] = Choice()
            if self._is_chat:
                extras = self._extras if len(self._choices) == 1 else {}
                yield self._chunk(number, {"role": "assistant", "content": ""}) | extras
        choice = self._choices[number]
        num_calls = len(choice.calls)
        calls = [{"index": index, **_call(call)} for index, call in enumerate(choice.add(delta), num_calls)]
        if delta.text or calls or delta.logprobs or (delta.reasoning and self._is_chat):
            yield self._chunk(number, self._content(delta, calls), self._logprobs(delta.logprobs, choice))
        if delta.finish_reason is not None:
            last = self._chunk(number, {} if self._is_chat else "", finish_reason=choice.finish_reason)
            yield last | {"kvrag": choice.answer.report.to_dict()}

    def whole(self) -> dict[str, Any]:
        """See Builder."""
        choices = [self._whole_choice(number, choice) for number, choice in sorted(self._choices.items())]
        body = self._envelope("", choices) | {"usage": self._usage()} | self._extras
        if len(choices) == 1:
            body["kvrag"] = choices[0].pop("kvrag")
        return body

    def last_events(self) -> Sequence[Event]:
        """See Builder."""
        usage = [self._envelope(".chunk", []) | {"usage": self._usage()}] if self._wants_usage else []
        return (*usage, "[DONE]")

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        answer, choice.offset = choice.answer, 0
        body: dict[str, Any] = {"index": index, "logprobs": self._logprobs(answer.logprobs, choice)}
        body |= {"finish_reason": choice.finish_reason, "kvrag": answer.report.to_dict()}
        if not self._is_chat:
            return body | {"text": answer.text}
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if choice.calls:
            message |= {"content": answer.text or None, "tool_calls": [_call(call) for call in choice.calls]}
        return body | {"message": message | _thought(answer.reasoning)}

    def _content(self, delta: Delta, calls: list[dict[str, Any]]) -> Any:
        if not self._is_chat:
            return delta.text
        content: dict[str, Any] = _thought(delta.reasoning) | ({"content": delta.text} if delta.text else {})
        return content | ({"tool_calls": calls} if calls else {})

    def _logprobs(self, logprobs: Sequence[TokenLogprob], choice: Choice) -> dict[str, Any] | None:
        """Return the next log probabilities of a choice in OpenAI's form. Advances `choice.offset`."""
        if not logprobs:
            return None
        if self._is_chat:
            return {"content": [self._logprob(row) for row in logprobs], "refusal": None}
        texts = [self._token_text(row.token)[0] for row in logprobs]
        top = [{self._token_text(token)[0]: value for token, value in row.top} for row in logprobs]
        *starts, choice.offset = accumulate(map(len, texts), initial=choice.offset)
        values = [row.logprob for row in logprobs]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": starts}

    def _usage(self) -> dict[str, Any]:
        # the choices of one prompt follow each other
        answers = [choice.answer for _, choice in sorted(self._choices.items())]
        return openai_usage(answers, self._request.n)

    def _chunk(
        self, number: int, content: Any, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": number, "delta" if self._is_chat else "text": content, "logprobs": logprobs}
        envelope = self._envelope(".chunk", [{**choice, "finish_reason": finish_reason}])
        return envelope | ({"usage": None} if self._wants_usage else {})

    def _envelope(self, part: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # OpenAI's streamed completions have the same `object` as non-streamed ones
        kind = f"chat.completion{part}" if self._is_chat else "text_completion"
        envelope = {"id": self._id, "object": kind, "created": self._created, "model": self._request.model}
        return envelope | {"system_fingerprint": self._fingerprint, "choices": choices}


def _thought(text: str) -> dict[str, str]:
    """Return a thought under both names in use: newer clients of vLLM read `reasoning`, most others the long name."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(call: ToolCall | InvalidCall) -> dict[str, Any]:
    """Return a call in OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}


def arguments_text(call: ToolCall | InvalidCall) -> str:
    """Return the arguments of a call as text."""
    return call.arguments if isinstance(call, InvalidCall) else json.dumps(call.arguments, ensure_ascii=False)
