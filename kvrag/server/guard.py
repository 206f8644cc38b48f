"""Checks before a request is read: API key, browser origin, size."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrag.server.api_errors import ApiError, error_response
from kvrag.server.settings import ServerSettings

PAGE = {"/": "index.html", "/style.css": "style.css", "/app.js": "app.js"}
"""The files of a page, such as `examples/chat` of a checkout, by path."""

# for load balancers, and for browsers, which send no key with a page; that of examples/chat asks for the key itself
_OPEN = ("/health", "/openapi.json", *PAGE)
_READING = 64  # requests per namespace beyond those in the admission queue; each may hold a body
UPLOADS = 16  # per namespace; each may hold a file
_BODY_S = 10.0  # for a body to arrive ...
_BODY_RATE = 16 << 10  # ... and a second more for each of these bytes: a body that stalls takes a place


def most_requests(settings: ServerSettings) -> tuple[int, int]:
    """Return how many ordinary requests, and how many uploads, of a namespace may be in the server."""
    return settings.concurrency + settings.queue + _READING, UPLOADS


class Guard:
    """ASGI middleware that checks API keys, origins, the number of requests, and the size and duration of bodies.

    It stores the namespace of the request's key in the request's state.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._inside: Counter[tuple[str, bool]] = Counter()  # by namespace, and whether they are uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        namespace = self._settings.namespace
        try:
            headers = Headers(scope=scope)
            is_upload = scope["path"].startswith("/v1/corpus") and scope["method"] == "PUT"
            if scope["path"] not in _OPEN:
                namespace = self._check_sender(headers)
                if self._inside[namespace, is_upload] >= most_requests(self._settings)[is_upload]:
                    raise ApiError(429, "too many concurrent requests: retry later", "queue_full")
            receive = self._bounded(is_upload, headers, receive)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["namespace"] = namespace
        self._inside[namespace, is_upload] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside[namespace, is_upload] -= 1

    def _check_sender(self, headers: Headers) -> str:
        """Return the sender's namespace; raise an error for a wrong key or origin."""
        if self._settings.api_keys:
            secret = headers.get("authorization", "").removeprefix("Bearer ").encode()
            # compare every key, so that the timing reveals nothing
            matching = [key for key in self._settings.api_keys if hmac.compare_digest(secret, key.secret.encode())]
            if not matching:
                message = "missing or wrong API key: send it as 'Authorization: Bearer KEY'"
                raise ApiError(401, message, "invalid_api_key")
            return matching[0].namespace
        # without keys, any web page in a local browser could send requests
        origin = headers.get("origin")
        if origin is not None and not {"*", origin} & set(self._settings.origins) and not self._is_own(headers):
            how = "start the server with --cors-origin or --api-key"
            raise ApiError(403, f"requests from the origin {origin:.80} are rejected: {how}")
        return self._settings.namespace

    def _is_own(self, headers: Headers) -> bool:
        """Return whether the page that sends the request came from this server, and by an address that it must have.

        Any other host name may belong to a web page that has redirected it to this server (DNS rebinding).
        """
        host = urlsplit(f"//{headers.get('host', '')}")
        try:
            ip_address(host.hostname or "")
        except ValueError:
            if host.hostname not in self._settings.hosts:
                return False
        return urlsplit(headers["origin"]).netloc == host.netloc

    def _bounded(self, is_upload: bool, headers: Headers, receive: Receive) -> Receive:
        """Return `receive` with limits on the body's size and duration."""
        limit = self._settings.max_upload if is_upload else self._settings.max_body
        option = "--max-upload-mib" if is_upload else "--max-body-mib"
        too_long = f"the body exceeds this server's limit of {limit / (1 << 20):g} MiB ({option}): send less at once"
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > limit:
            raise ApiError(413, too_long, "body_too_large")
        received, is_whole = 0, False
        started = asyncio.get_running_loop().time()

        async def bounded() -> Message:
            nonlocal received, is_whole
            allowed = min(self._settings.timeout, _BODY_S + received / _BODY_RATE)
            try:
                async with asyncio.timeout_at(None if is_whole else started + allowed):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {allowed:.3g} s") from None
            received += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if received > limit:
                raise HTTPException(413, too_long)  # FastAPI lets HTTP exceptions through
            return message

        return bounded
