"""From requests to engine work, and from engine output to HTTP responses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvrag.errors import PromptError
from kvrag.retrieval.index import fitting
from kvrag.scheduling.bridge import once
from kvrag.server.api_errors import ApiError, describe, json_response, log
from kvrag.server.queue import AdmissionQueue
from kvrag.server.response import Builder, Event, Piece
from kvrag.server.schemas import AnswerFields, ChatRequest, CompletionRequest, Document, Retrieval
from kvrag.server.settings import ServerSettings, fill
from kvrag.server.state import State, Tenant
from kvrag.types import Messages

T = TypeVar("T")

Work = Callable[[], Generator[Piece, None, None]]

KEEP_ALIVE_S = 5.0  # without an event, a stream then gets a comment: proxies and clients keep the connection


def chat_work(state: State, tenant: Tenant, request: ChatRequest) -> Work:
    """Return the engine's work for a chat, not started yet."""
    engine, settings = state.engine, state.settings
    calls = _calls(state, tenant, request)
    retrieves = request.model == settings.rag_name
    if request.retrieval is not None and not retrieves:
        raise ApiError(400, f"`retrieval` requires the model {settings.rag_name!r}", "invalid_value", "retrieval")
    for field in ("documents", "chunks"):
        if retrieves and getattr(request, field):
            raise ApiError(400, f"`{field}` require the model {settings.name!r}", "invalid_value", field)

    def work() -> Generator[Piece, None, None]:
        messages = [engine.model.tokenizer.checked_message(message.plain()) for message in request.messages]
        if retrieves:
            wanted = (request.retrieval or Retrieval()).model_dump(exclude_none=True)
            wanted = {"top_k": settings.top_k, "around": settings.around} | wanted
            number, question = _question(messages)
            before = [message["content"] for message in messages[:number] if message["role"] == "user"]
            found = tenant.require_corpus().index.search(question, wanted["top_k"], wanted["around"], before)
            if not found:
                how = "add documents with PUT /v1/corpus/NAME, or run `kvrag warm PATH`"
                raise ApiError(400, f"the corpus is empty: {how}", "corpus_empty")
            hits = fitting(found, engine.model, _with_context(messages, settings, []))
            yield hits
            texts = [hit.text for hit in hits]
        else:
            texts = [row.text if isinstance(row, Document) else row for row in request.documents or ()]
        prompt = _with_context(messages, settings, texts) if texts else messages
        texts += request.chunks or []
        yield from engine.stream_batch([prompt] * len(calls), calls, documents=None if retrieves else texts)

    return work


def completion_work(state: State, tenant: Tenant, request: CompletionRequest) -> Work:
    """Return the engine's work for a completion, not started yet."""
    if request.model == state.settings.rag_name:
        message = f"the model {request.model!r} supports /v1/chat/completions only"
        raise ApiError(400, message, "invalid_value", "model")
    calls, prompts = _calls(state, tenant, request), request.prompts()
    repeated, calls = [prompt for prompt in prompts for _ in calls], calls * len(prompts)
    return partial(state.engine.stream_batch, repeated, calls, documents=request.chunks)


def _calls(state: State, tenant: Tenant, request: AnswerFields) -> list[dict[str, Any]]:
    """Return the engine's arguments for each answer to a prompt, with consecutive seeds if one is set."""
    state.check_model(request.model)
    call = request.options(state.settings) | {"namespace": tenant.namespace}
    seeds = [None if request.seed is None else (request.seed + i) % (1 << 64) for i in range(request.n)]
    return [call | {"seed": seed} for seed in seeds]


def _with_context(messages: Messages, settings: ServerSettings, texts: list[str]) -> Messages:
    """Return the messages, whose content is text, with these texts in the last user message, by the template."""
    number, question = _question(messages)
    filled = {**messages[number], "content": fill(settings.template, texts, question)}
    return [*messages[:number], filled, *messages[number + 1 :]]


def _question(messages: Messages) -> tuple[int, str]:
    """Return the number and the text of the last user message."""
    numbers = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not numbers:
        raise PromptError("the messages contain no user message: add one with the question")
    content = messages[numbers[-1]]["content"]
    if not content.strip():
        raise PromptError("the last user message is empty: put the question into it")
    return numbers[-1], content


async def respond(request: Request, state: State, tenant: Tenant, work: Work, builder: Builder) -> Response:
    """Return an answer as JSON or as a stream.

    A stream is returned once its first events exist, so that earlier errors get their own HTTP status, but not later
    than the first keep-alive.
    """
    pieces = _measured(state, tenant, work)
    if not builder.is_stream:
        return json_response(await while_connected(request.receive, _whole(pieces, builder)))
    events = _events(pieces, builder)
    first = await while_connected(request.receive, anext(events))
    return EventStream(first, events, builder, state.settings.timeout)


async def _measured(state: State, tenant: Tenant, work: Work) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of an answer, counting each of its choices in the namespace's metrics."""
    started = time.perf_counter()
    last: dict[int, float] = {}  # by choice
    status, num_complete = 499, 0
    admitted = state.answering.run(work, state.settings.timeout, tenant.namespace, tenant.queue_time.observe)
    try:
        async with aclosing(admitted) as pieces:
            async for piece in pieces:
                if isinstance(piece, tuple):
                    (number, delta), now = piece, time.perf_counter()
                    tenant.count_tokens(now - last.get(number, started), len(delta.token_ids), number not in last)
                    last[number] = now
                    if delta.finish_reason is not None:
                        assert delta.report is not None
                        tenant.count_answer(delta.report, delta.finish_reason, now - started)
                        num_complete += 1
                yield piece
    except Exception as error:
        status, _ = describe(error)
        raise
    finally:
        if num_complete < max(1, len(last)):
            tenant.failed.labels(str(status)).inc()


async def _whole(pieces: AsyncGenerator[Piece, None], builder: Builder) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    async with aclosing(pieces):
        async for piece in pieces:
            for _ in builder.add(piece):
                pass
    return builder.whole()


async def _events(pieces: AsyncGenerator[Piece, None], builder: Builder) -> AsyncGenerator[bytes, None]:
    """Yield the encoded events of a stream, and a comment after every `KEEP_ALIVE_S` seconds without one."""
    step: asyncio.Future[Piece | None] | None = None
    try:
        while True:
            step = step or asyncio.ensure_future(anext(pieces, None))
            await asyncio.wait({step}, timeout=KEEP_ALIVE_S)
            if not step.done():
                yield b": waiting\n\n"
                continue
            piece, step = step.result(), None
            if piece is None:
                break
            yield _encoded(builder.add(piece))  # also if it is empty: the headers are sent
    finally:
        if step is not None:
            step.cancel()
            await asyncio.wait({step})
        await pieces.aclose()
    yield _encoded(builder.last_events())


def _encoded(events: Iterable[Event]) -> bytes:
    """Return server-sent events; those of `/v1/responses` have types."""
    lines = []
    for event in events:
        name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
        lines.append(f"{name}data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
    return "".join(lines).encode()


class EventStream(StreamingResponse):
    """Server-sent events. A client that disconnects or stops reading ends the work."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], builder: Builder, limit: float) -> None:
        async def events() -> AsyncGenerator[bytes, None]:
            yield first
            try:
                async for more in rest:
                    yield more
            except Exception as error:  # the status has already been sent
                log(error)
                yield _encoded(builder.error_events(describe(error)[1]))

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter for nginx
        super().__init__(events(), media_type="text/event-stream", headers=headers)
        self._rest, self._limit = rest, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            # the work has its own limit, but a client that never reads would keep the connection open
            with suppress(ClientDisconnect, TimeoutError):
                async with asyncio.timeout(2 * self._limit):
                    await while_connected(receive, self.stream_response(send))
        finally:
            await self._rest.aclose()


async def result(request: Request, queue: AdmissionQueue, work: Callable[[], T]) -> T:
    """Run work in a thread once the queue admits it, while the client is connected; return its result."""
    limit = request.app.state.kvrag.settings.timeout
    async with aclosing(queue.run(partial(once, work), limit, request.state.namespace)) as pieces:
        (only,) = await while_connected(request.receive, anext(pieces))
        return only


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of work. If the client disconnects, cancel the work and raise ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
