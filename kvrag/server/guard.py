"""What every request has to pass before it is read: who asks, from where, how much."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrag.server.errors import ApiError, error_response
from kvrag.server.settings import ServerSettings

_OPEN = ("/health",)  # for those who watch over the server
_READING = 64  # requests besides those that the engine knows of: each may hold a body


class Guard:
    """ASGI middleware: the API key, the browser pages that may ask, the size of bodies and the time they may take."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            if scope["path"] not in _OPEN:
                self._check_sender(headers)
                self._check_number()
            receive = self._bounded(scope, headers, receive)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1

    def _check_number(self) -> None:
        if self._inside >= self._settings.concurrency + self._settings.queue + _READING:
            raise ApiError(429, "too many requests at once: try again later", "queue_full")

    def _check_sender(self, headers: Headers) -> None:
        if self._settings.api_keys:
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            # every key is compared, so that the time taken tells nothing
            if not sum(hmac.compare_digest(given, key.encode()) for key in self._settings.api_keys):
                raise ApiError(401, "wrong or no API key: send it as 'Authorization: Bearer KEY'", "invalid_api_key")
            return
        # without a key, whoever reaches the port may ask: a page in somebody's browser must not be among them
        origin = headers.get("origin")
        if origin is not None and not {"*", origin} & set(self._settings.origins):
            raise ApiError(403, f"pages of {origin:.80} may not ask: start the server with --cors-origin or --api-key")
        host = _name(headers.get("host", ""))
        if self._settings.hosts and host not in self._settings.hosts:
            raise ApiError(403, f"this server is not {host:.80}: start it with --host, --allow-host or --api-key")

    def _bounded(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """`receive` for a body that is not too long, neither in bytes nor in coming."""
        upload = scope["method"] == "PUT" and scope["path"].startswith("/v1/corpus/")
        limit = self._settings.max_upload if upload else self._settings.max_body
        too_long = f"the body has more than the {limit} bytes that are allowed"
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > limit:
            raise ApiError(413, too_long, "body_too_large")
        received, is_whole = 0, False
        deadline = asyncio.get_running_loop().time() + self._settings.timeout

        async def bounded() -> Message:
            nonlocal received, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {self._settings.timeout:g} s") from None
            received += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if received > limit:
                raise HTTPException(413, too_long)  # which FastAPI lets through
            return message

        return bounded


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
