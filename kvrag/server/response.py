"""OpenAI's JSON for an answer: built piece by piece, returned as a whole or as stream events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from kvrag.retrieval.index import Hit
from kvrag.server.schemas import Answering, ChatRequest
from kvrag.types import BlendReport, CallPiece, Delta, InvalidCall, ToolCall

Piece = Delta | list[Hit]
"""A piece of an answer: first the retrieved chunks, if any, then the deltas."""


class ResponseBuilder:
    """Builds the response to one request from the pieces of its answer."""

    def __init__(self, request: Answering, fingerprint: str) -> None:
        self.request = request
        self._fingerprint = fingerprint
        self._is_chat = isinstance(request, ChatRequest)
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._text = ""
        self._calls: list[ToolCall | InvalidCall] = []
        self._hits: list[Hit] | None = None
        self._report: BlendReport | None = None
        self._finish_reason: str | None = None
        self._num_tokens = 0

    def add(self, piece: Piece) -> Delta:
        """Add a piece; return the part that is visible to the client."""
        if isinstance(piece, list):
            self._hits = piece
            return Delta("")
        calls: list[ToolCall | InvalidCall] = [*piece.tool_calls, *piece.invalid_calls]
        pieces = piece.call_pieces
        if isinstance(self.request, ChatRequest) and self.request.parallel_tool_calls is False:
            calls = calls[: max(0, 1 - len(self._calls))]
            pieces = tuple(each for each in pieces if each.index == 0)
        self._text += piece.text
        self._calls += calls
        self._num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self._report = piece.report
            called = self._calls and piece.finish_reason == "stop"
            self._finish_reason = "tool_calls" if called else piece.finish_reason
        return Delta(piece.text, call_pieces=pieces)

    def whole(self) -> dict[str, Any]:
        """Return the body of a non-streamed response."""
        assert self._report is not None
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._finish_reason}
        if self._is_chat:
            calls = [_call(call) for call in self._calls]
            content = None if calls and not self._text else self._text
            message = {"role": "assistant", "content": content, "refusal": None}
            choice["message"] = {**message, "tool_calls": calls} if calls else message
        else:
            choice["text"] = self._text
        extras = {"kvrag": self._report.to_dict(), "usage": self._usage()}
        return self._envelope("", [choice]) | extras | self._citations()

    def first_events(self) -> Sequence[dict[str, Any]]:
        """Return the first events of a stream."""
        if not self._is_chat:
            return ()
        return (self._chunk({"role": "assistant", "content": ""}) | self._citations(),)

    def events(self, delta: Delta) -> Sequence[dict[str, Any]]:
        """Return the events of a delta from `add`; none if it is empty."""
        if not (delta.text or delta.call_pieces):
            return ()
        if not self._is_chat:
            return (self._chunk(delta.text),)
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.call_pieces:
            content["tool_calls"] = [_fragment(piece) for piece in delta.call_pieces]
        return (self._chunk(content),)

    def last_events(self) -> Sequence[dict[str, Any]]:
        """Return the last events of a complete stream."""
        assert self._report is not None
        last = self._chunk({} if self._is_chat else "", self._finish_reason) | {"kvrag": self._report.to_dict()}
        if not self._wants_usage:
            return (last,)
        return last, self._envelope(".chunk", []) | {"usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        assert self._report is not None
        prompt = self._report.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
            # chunks encoded for this answer were not cached
            "prompt_tokens_details": {"cached_tokens": self._report.reused_tokens - self._report.created_tokens},
        }

    @property
    def _wants_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    def _chunk(self, content: Any, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self._is_chat else "text": content, "logprobs": None}
        envelope = self._envelope(".chunk", [{**choice, "finish_reason": finish_reason}])
        return envelope | ({"usage": None} if self._wants_usage else {})

    def _envelope(self, part: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # OpenAI's streamed completions have the same `object` as non-streamed ones
        kind = f"chat.completion{part}" if self._is_chat else "text_completion"
        envelope = {"id": self._id, "object": kind, "created": self._created, "model": self.request.model}
        return envelope | {"system_fingerprint": self._fingerprint, "choices": choices}

    def _citations(self) -> dict[str, Any]:
        """Return the retrieved chunks, in prompt order."""
        if self._hits is None:
            return {}
        cited = [
            {"index": number, "document": hit.document, "text": hit.text, "score": hit.score}
            for number, hit in enumerate(self._hits, 1)
        ]
        return {"citations": cited}


def _fragment(piece: CallPiece) -> dict[str, Any]:
    function = {"arguments": piece.arguments}
    if not piece.id:
        return {"index": piece.index, "function": function}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": {"name": piece.name, **function}}


def _call(call: ToolCall | InvalidCall) -> dict[str, Any]:
    is_valid = isinstance(call, ToolCall)
    arguments = json.dumps(call.arguments, ensure_ascii=False) if is_valid else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
