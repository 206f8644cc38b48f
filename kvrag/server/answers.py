"""From requests to engine work, and from engine output to HTTP responses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrag.engine import BlendEngine
from kvrag.errors import PromptError
from kvrag.retrieval.index import Hit
from kvrag.server.errors import ApiError, ClientDisconnected, describe, json_response, log
from kvrag.server.response import Builder, Event, Piece
from kvrag.server.schemas import ChatRequest, CompletionRequest, Document, Retrieval
from kvrag.server.settings import ServerSettings
from kvrag.server.state import State, Tenant
from kvrag.types import Messages

T = TypeVar("T")

Work = Callable[[], Generator[Piece, None, None]]

_FOR_ANSWER = 1 / 8
"""Share of the window that retrieved chunks leave free."""

KEEP_ALIVE_S = 5.0
"""Seconds without an event until a stream gets a comment, so that proxies and clients keep the connection."""


# ---------------------------------------------------------------- engine work


def chat_work(engine: BlendEngine, settings: ServerSettings, tenant: Tenant, request: ChatRequest) -> Work:
    """Return the work of a chat for the engine, not started yet.

    Raises:
        ApiError, SettingError: The request is contradictory or exceeds a limit.
    """
    call = request.sampling(settings) | {"namespace": tenant.namespace}
    if request.tools or request.tool_choice not in (None, "auto", "none"):
        call |= {"tools": request.tools, "tool_choice": request.tool_choice}
    call["template"] = request.template()
    messages: Messages = [message.plain() for message in request.messages]
    retrieves = request.model == settings.rag_name
    if request.retrieval is not None and not retrieves:
        raise ApiError(400, f"`retrieval` requires the model {settings.rag_name!r}", "invalid_value", "retrieval")
    for field in ("documents", "chunks"):
        if retrieves and getattr(request, field):
            raise ApiError(400, f"`{field}` require the model {settings.name!r}", "invalid_value", field)

    def work() -> Generator[Piece, None, None]:
        if retrieves:
            options = request.retrieval or Retrieval()
            top_k = settings.top_k if options.top_k is None else options.top_k
            around = settings.around if options.around is None else options.around
            retrieved = tenant.require_corpus().search(_question(messages), top_k, around)
            hits = _fitting(engine, settings, messages, retrieved)
            yield hits
            texts = [hit.text for hit in hits]
        else:
            texts = [row.text if isinstance(row, Document) else row for row in request.documents or ()]
        if texts:
            place_context(messages, settings, texts)
        texts += request.chunks or []
        calls = _calls(call, request.num_choices())
        yield from engine.stream_batch([messages] * len(calls), calls, documents=None if retrieves else texts)

    return work


def completion_work(engine: BlendEngine, settings: ServerSettings, tenant: Tenant, request: CompletionRequest) -> Work:
    """Return the engine's work for a completion, not started yet."""
    if request.model == settings.rag_name:
        raise ApiError(
            400, f"the model {settings.rag_name!r} supports /v1/chat/completions only", "invalid_value", "model"
        )
    prompts = request.prompts()
    calls = _calls(request.sampling(settings) | {"namespace": tenant.namespace}, request.num_choices())

    def work() -> Generator[Piece, None, None]:
        repeated = [prompt for prompt in prompts for _ in calls]
        yield from engine.stream_batch(repeated, calls * len(prompts), documents=request.chunks)

    return work


def _calls(call: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the arguments of `count` answers, with consecutive seeds if one is set."""
    seed = call["seed"]
    return [call | {"seed": None if seed is None else (seed + i) % (1 << 64)} for i in range(count)]


def _fitting(engine: BlendEngine, settings: ServerSettings, messages: Messages, hits: Sequence[Hit]) -> list[Hit]:
    """Return the best hits that fit into the model's window, at least one; a part of it stays free for the answer."""
    tokenizer, bare = engine.model.tokenizer, list(messages)
    place_context(bare, settings, [])
    room = engine.model.context_window * (1 - _FOR_ANSWER) - len(tokenizer.render(bare))
    if sum(len(hit.text.encode()) + 2 for hit in hits) <= room:  # no token is shorter than a byte: nothing to count
        return list(hits)
    fitting: list[Hit] = []
    for hit, length in zip(hits, tokenizer.lengths([f"{hit.text}\n\n" for hit in hits]), strict=True):
        room -= length
        if room < 0 and fitting:
            break
        fitting.append(hit)
    return fitting


def place_context(messages: Messages, settings: ServerSettings, texts: list[str]) -> None:
    """Insert texts into the last user message with the template. Changes `messages`."""
    question = _question(messages)
    last = _last_user(messages)
    messages[last] = {**messages[last], "content": settings.prompt(texts, question)}


def _question(messages: Messages) -> str:
    content = messages[_last_user(messages)]["content"]
    if isinstance(content, list):
        if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise PromptError("only text is supported: the last user message has other content")
        content = "".join(part["text"] for part in content)
    if not content.strip():
        raise PromptError("the last user message is empty: put the question into it")
    return str(content)


def _last_user(messages: Messages) -> int:
    for number in range(len(messages) - 1, -1, -1):
        if messages[number]["role"] == "user":
            return number
    raise PromptError("the messages contain no user message: add one with the question")


# ---------------------------------------------------------------- responses


async def respond(request: Request, state: State, tenant: Tenant, work: Work, builder: Builder) -> Response:
    """Return an answer as JSON or as a stream.

    A stream is returned once its first events exist, so that earlier errors get their own HTTP status, but not later
    than the first keep-alive.
    """
    events = _events(_measured(state, tenant, work), builder)
    if not builder.is_stream:
        async with aclosing(events):
            await while_connected(request, _exhaust(events))
        return json_response(builder.whole())
    parts = _with_pauses(events)
    try:
        first = await while_connected(request, anext(parts))
    except BaseException:
        await parts.aclose()
        raise
    return EventStream(_stream(first, parts, builder), parts, state.settings.timeout)


async def _measured(state: State, tenant: Tenant, work: Work) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of an answer, counting each of its choices in the namespace's metrics."""
    metrics = tenant.metrics
    started = time.perf_counter()
    last: dict[int, float] = {}  # by choice
    is_complete, status, num_complete = False, 499, 0
    admitted = state.answering.run(work, state.settings.timeout, tenant.namespace, metrics.queued)
    try:
        async with aclosing(admitted) as pieces:
            async for piece in pieces:
                if isinstance(piece, tuple):
                    (number, delta), now = piece, time.perf_counter()
                    metrics.token(now - last.get(number, started), len(delta.token_ids), number not in last)
                    last[number] = now
                    if delta.finish_reason is not None:
                        assert delta.report is not None
                        metrics.answered(delta.report, delta.finish_reason, now - started)
                        num_complete += 1
                    is_complete = num_complete == len(last)
                yield piece
    except Exception as error:
        status, _ = describe(error)
        raise
    finally:
        if not is_complete:
            metrics.failed(status)


async def _events(pieces: AsyncGenerator[Piece, None], builder: Builder) -> AsyncGenerator[Sequence[Event], None]:
    """Yield the stream events of each delta."""
    async with aclosing(pieces):
        async for piece in pieces:
            events = builder.add(piece)
            if isinstance(piece, tuple):
                yield events


async def _with_pauses(items: AsyncGenerator[T, None]) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None after every `KEEP_ALIVE_S` seconds without one."""
    step: asyncio.Future[T] | None = None
    try:
        while True:
            step = step or asyncio.ensure_future(anext(items))
            await asyncio.wait({step}, timeout=KEEP_ALIVE_S)
            if not step.done():
                yield None
                continue
            try:
                item = step.result()
            except StopAsyncIteration:
                return
            step = None
            yield item
    finally:
        if step is not None:
            step.cancel()
            await asyncio.wait({step})
        await items.aclose()


async def _stream(
    first: Sequence[Event] | None, rest: AsyncGenerator[Sequence[Event] | None, None], builder: Builder
) -> AsyncGenerator[Event | None, None]:
    """Yield the events of a stream, and None for keep-alives."""
    try:
        for event in (None,) if first is None else first:
            yield event
        async for events in rest:
            for event in (None,) if events is None else events:
                yield event
    except Exception as error:  # the status has already been sent
        log(error)
        _, content = describe(error)
        for event in builder.error_events(content):
            yield event
        return
    for event in builder.last_events():
        yield event


class EventStream(EventSourceResponse):
    """Server-sent events. A client that disconnects or stops reading ends the work."""

    def __init__(
        self, events: AsyncGenerator[Event | None, None], source: AsyncGenerator[Any, None], limit: float
    ) -> None:
        super().__init__(
            _encoded(events),
            headers={"Cache-Control": "no-cache"},
            sep="\n",
            ping=4 * limit,  # never: the events contain the keep-alives
            shutdown_grace_period=2 * limit,  # a stopping server finishes its streams
        )
        self._events, self._source, self._limit = events, source, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            # the work has its own limit, but a client that never reads would keep the connection open
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self._limit):
                    await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._source.aclose()


async def _encoded(events: AsyncGenerator[Event | None, None]) -> AsyncGenerator[dict[str, str], None]:
    async with aclosing(events):
        async for event in events:
            if event is None:
                yield {"comment": "waiting"}
            elif isinstance(event, str):
                yield {"data": event}
            else:  # the events of responses have types
                yield {"data": json.dumps(event)} | ({"event": event["type"]} if "type" in event else {})


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Wait for work while the client is connected.

    Raises:
        ClientDisconnected: The client disconnected, and the work was cancelled.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _exhaust(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass
