"""From a request to the engine's answer, and from that to OpenAI's words."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrag.config import Grammar
from kvrag.engine import BlendEngine
from kvrag.errors import PromptError
from kvrag.retrieval.index import Hit
from kvrag.server.corpus import Corpus
from kvrag.server.errors import ApiError, ClientGone, described, json_response, log
from kvrag.server.metrics import Metrics
from kvrag.server.schemas import Answering, ChatRequest, CompletionRequest, Document
from kvrag.server.settings import ServerSettings
from kvrag.server.turns import Turns
from kvrag.types import BlendReport, Delta, Messages, ToolCall

T = TypeVar("T")
Piece = Delta | list[Hit]
"""What an answer consists of: the chunks retrieved for it, if there are any, then its deltas."""
Work = Callable[[], Generator[Piece, None, None]]


# ---------------------------------------------------------------- what is to be answered


def chat_work(engine: BlendEngine, corpus: Corpus | None, settings: ServerSettings, request: ChatRequest) -> Work:
    """The engine's work for a chat, not begun.

    Raises:
        ApiError, SettingError: The request contradicts itself or asks for too much.
    """
    call = request.sampling(settings)
    if request.tools or request.tool_choice not in (None, "auto", "none"):
        call |= {"tools": request.tools, "tool_choice": request.tool_choice}
    if request.response_format is not None:
        call["grammar"] = Grammar.of_response_format(request.response_format)
    if request.chat_template_kwargs is not None:
        call["template"] = request.chat_template_kwargs.model_dump(exclude_none=True)
    messages: Messages = [message.plain() for message in request.messages]
    retrieves = request.model == settings.rag_name
    if request.retrieval is not None and not retrieves:
        raise ApiError(400, f"retrieval is for the model {settings.rag_name!r}", "invalid_value", "retrieval")
    if request.documents and retrieves:
        raise ApiError(400, f"documents are for the model {settings.name!r}", "invalid_value", "documents")

    def work() -> Generator[Piece, None, None]:
        if retrieves:
            assert corpus is not None  # else there is no such model
            wanted = request.retrieval
            hits = corpus.search(
                _question(messages),
                settings.top_k if wanted is None or wanted.top_k is None else wanted.top_k,
                settings.around if wanted is None or wanted.around is None else wanted.around,
            )
            yield hits
        else:
            given = [Document(text=each) if isinstance(each, str) else each for each in request.documents or ()]
            hits = [Hit(each.text, each.id, 1.0) for each in given]
        texts = [hit.text for hit in hits]
        if texts:
            place_context(messages, settings, texts)
        yield from engine.stream(messages, documents=None if retrieves else texts, **call)

    return work


def completion_work(engine: BlendEngine, settings: ServerSettings, request: CompletionRequest) -> Work:
    """The engine's work for a completion, not begun."""
    if request.model == settings.rag_name:
        raise ApiError(400, f"the model {settings.rag_name!r} is for /v1/chat/completions", "invalid_value", "model")
    text, call = request.text(), request.sampling(settings)
    return lambda: engine.stream(text, **call)


def place_context(messages: Messages, settings: ServerSettings, texts: list[str]) -> None:
    """Put texts into the last user message, by the template; changes `messages`."""
    question = _question(messages)
    last = _last_user(messages)
    messages[last] = {**messages[last], "content": settings.prompt(texts, question)}


def _question(messages: Messages) -> str:
    content = messages[_last_user(messages)]["content"]
    if isinstance(content, list):
        if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise PromptError("only text can be answered, and the last user message has other content")
        content = "".join(part["text"] for part in content)
    if not content.strip():
        raise PromptError("the last user message is empty: there is no question")
    return str(content)


def _last_user(messages: Messages) -> int:
    for number in range(len(messages) - 1, -1, -1):
        if messages[number]["role"] == "user":
            return number
    raise PromptError("there is no user message: there is no question")


# ---------------------------------------------------------------- how it is told


@dataclass
class Teller:
    """Tells one answer in OpenAI's words, piece by piece or whole."""

    request: Answering
    fingerprint: str
    is_chat: bool
    made: int = field(default_factory=lambda: int(time.time()))
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    hits: list[Hit] | None = None
    report: BlendReport | None = None
    finish_reason: str | None = None
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"

    def hear(self, piece: Piece) -> Delta:
        """Take in a piece; what of it is to be told."""
        if isinstance(piece, list):
            self.hits = piece
            return Delta("")
        calls = piece.tool_calls
        if isinstance(self.request, ChatRequest) and self.request.parallel_tool_calls is False:
            calls = calls[: max(0, 1 - len(self.calls))]
        self.text += piece.text
        self.calls += calls
        self.num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.report = piece.report
            self.finish_reason = "tool_calls" if self.calls and piece.finish_reason == "stop" else piece.finish_reason
        return Delta(piece.text, tool_calls=calls)

    def whole(self) -> dict[str, Any]:
        """The whole answer."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self.finish_reason}
        if self.is_chat:
            calls = [_call(call) for call in self.calls]
            said = {"content": None if calls and not self.text else self.text, "refusal": None}
            choice["message"] = {"role": "assistant", **said, **({"tool_calls": calls} if calls else {})}
        else:
            choice["text"] = self.text
        return self._envelope("", [choice]) | self._extras() | {"usage": self.usage()}

    def opening(self) -> Sequence[dict[str, Any]]:
        """What a stream begins with."""
        if not self.is_chat:
            return ()
        opening = self._chunk({"role": "assistant", "content": ""})
        return (opening if self.hits is None else opening | {"citations": _citations(self.hits)},)

    def piece(self, delta: Delta) -> Sequence[dict[str, Any]]:
        """What is told of a delta; nothing if it says nothing."""
        if not (delta.text or delta.tool_calls):
            return ()
        if not self.is_chat:
            return (self._chunk(delta.text),)
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.tool_calls:
            first = len(self.calls) - len(delta.tool_calls)
            said["tool_calls"] = [{"index": first + i, **_call(call)} for i, call in enumerate(delta.tool_calls)]
        return (self._chunk(said),)

    def end(self) -> Sequence[dict[str, Any]]:
        """What a stream ends with."""
        assert self.report is not None
        last = self._chunk({} if self.is_chat else "", self.finish_reason) | {"kvrag": self.report.to_dict()}
        if not self._wants_usage:
            return (last,)
        return last, self._envelope(".chunk", []) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        assert self.report is not None
        prompt = self.report.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            # what was encoded for this very answer was not there before
            "prompt_tokens_details": {"cached_tokens": self.report.reused_tokens - self.report.created_tokens},
        }

    @property
    def _wants_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    def _chunk(self, said: Any, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self.is_chat else "text": said, "logprobs": None}
        envelope = self._envelope(".chunk", [{**choice, "finish_reason": finish_reason}])
        return envelope | ({"usage": None} if self._wants_usage else {})

    def _envelope(self, part: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # OpenAI's streamed completions are called like whole ones
        kind = f"chat.completion{part}" if self.is_chat else "text_completion"
        envelope = {"id": self.id, "object": kind, "created": self.made, "model": self.request.model}
        return envelope | {"system_fingerprint": self.fingerprint, "choices": choices}

    def _extras(self) -> dict[str, Any]:
        assert self.report is not None
        citations = {} if self.hits is None else {"citations": _citations(self.hits)}
        return {"kvrag": self.report.to_dict(), **citations}


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _citations(hits: Sequence[Hit]) -> list[dict[str, Any]]:
    """What was retrieved, in the order in which the model reads it."""
    return [
        {"index": number, "document": hit.document, "text": hit.text, "score": hit.score}
        for number, hit in enumerate(hits, 1)
    ]


# ---------------------------------------------------------------- how it is sent


async def answer(
    request: Request, turns: Turns, metrics: Metrics, limit: float, work: Work, teller: Teller
) -> Response:
    """An answer as JSON, or as a stream whose first piece is there, so that what goes wrong before has its status."""
    pieces = _observed(turns, metrics, limit, work)
    deltas = _told(pieces, teller)
    try:
        if not teller.request.stream:
            async with aclosing(deltas):
                await while_there(request, _exhaust(deltas))
            return json_response(teller.whole())
        first = await while_there(request, anext(deltas))
    except BaseException:
        await deltas.aclose()
        raise
    return EventStream(_events(first, deltas, teller), deltas, limit)


async def _observed(turns: Turns, metrics: Metrics, limit: float, work: Work) -> AsyncGenerator[Piece, None]:
    """The pieces of an answer; tells the metrics."""
    started = last = time.perf_counter()
    is_first, is_complete, status = True, False, 499
    try:
        async with aclosing(turns.run(work, limit, metrics.queued)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Delta):
                    now = time.perf_counter()
                    metrics.token(now - last, len(piece.token_ids), is_first)
                    last, is_first = now, False
                    if piece.finish_reason is not None:
                        assert piece.report is not None
                        metrics.answered(piece.report, piece.finish_reason, now - started)
                        is_complete = True
                yield piece
    except Exception as error:
        status, _ = described(error)
        raise
    finally:
        if not is_complete:
            metrics.failed(status)


async def _told(pieces: AsyncGenerator[Piece, None], teller: Teller) -> AsyncGenerator[Delta, None]:
    """What is to be told, from the first delta on."""
    async with aclosing(pieces):
        async for piece in pieces:
            delta = teller.hear(piece)
            if isinstance(piece, Delta):
                yield delta


async def _events(
    first: Delta, rest: AsyncGenerator[Delta, None], teller: Teller
) -> AsyncGenerator[dict[str, Any] | str, None]:
    """The stream's events."""
    for event in (*teller.opening(), *teller.piece(first)):
        yield event
    try:
        async for delta in rest:
            for event in teller.piece(delta):
                yield event
    except Exception as error:  # the status has been sent
        log(error)
        _, content = described(error)
        yield content
        return
    for event in teller.end():
        yield event
    yield "[DONE]"


class EventStream(Response):
    """Server-sent events, for as long as the client is there."""

    def __init__(
        self, events: AsyncGenerator[dict[str, Any] | str, None], deltas: AsyncGenerator[Delta, None], limit: float
    ) -> None:
        # proxies would collect events, and browsers cache them
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, headers, "text/event-stream")
        del self.headers["content-length"]
        self._events, self._deltas, self._limit = events, deltas, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; ends their work when the client goes away, or does not read them."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            # the work ends in time by itself; a client that never reads would keep the connection for ever
            await asyncio.wait({sending, leaving}, timeout=2 * self._limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(sending, leaving)
            await self._events.aclose()
            await self._deltas.aclose()
        if not sending.cancelled():
            sending.result()  # raises what went wrong

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            data = event if isinstance(event, str) else json.dumps(event)
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Wait for something as long as the client does.

    Raises:
        ClientGone: It does not wait any more; the work has been cancelled.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancel(working, leaving)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _exhaust(deltas: AsyncIterator[Delta]) -> None:
    async for _ in deltas:
        pass
