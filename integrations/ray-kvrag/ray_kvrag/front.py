"""ASGI app in front of several servers: checks and reads requests, and forwards each to a server."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrag.server.api_errors import ApiError, describe, error_response
from kvrag.server.guard import Guard
from kvrag.server.settings import ServerSettings
from ray_kvrag.routing import Route

logger = logging.getLogger("kvrag")

_TRIES = 3  # servers tried per request, if they die before they answer
_FIELDS = (  # of an ASGI scope, that can be sent to another process
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)

Forward = Callable[[Scope, bytes, Route], AsyncGenerator[list[Message], None]]
"""Function that forwards a request with its body to a server, and yields lists of the response's messages."""


class ServerLost(Exception):
    """The server or its machine has died."""


def front(settings: ServerSettings, forward: Forward) -> ASGIApp:
    """Return an ASGI app that forwards requests.

    A request is sent to another server if its server dies before it answers.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read(receive)
        except HTTPException as error:
            code = "timeout" if error.status_code == 408 else "body_too_large"
            await error_response(ApiError(error.status_code, error.detail, code))(scope, receive, send)
            return
        if body is None:
            return
        route = Route.of(scope["path"], scope["state"]["namespace"], body)
        fields = {name: scope[name] for name in _FIELDS if name in scope}
        first: Message | None = None
        for _ in range(_TRIES):
            try:
                async with aclosing(forward(fields, body, route)) as parts:
                    async for messages in parts:
                        for message in messages:
                            first = first or message
                            await send(message)
                return
            except ServerLost as error:
                logger.warning("%s", error)
                if first:
                    break
        lost = ApiError(503, "the server that worked on this request has died: send it again", "stopping")
        if first is None:
            await error_response(lost)(scope, receive, send)
        elif b"text/event-stream" in dict(first["headers"]).get(b"content-type", b""):
            event = f"data: {json.dumps(describe(lost)[1])}\n\n"
            await send({"type": "http.response.body", "body": event.encode()})
        else:
            raise lost

    guarded = Guard(answer, settings)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        await guarded(scope, receive, send)

    return app


async def _read(receive: Receive) -> bytes | None:
    """Return the body of a request; None if the client has disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)
