"""Errors in OpenAI's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvrag.errors import (
    ContextWindowError,
    KvragError,
    OutOfMemoryError,
    PromptError,
    SettingError,
    StoreFullError,
    StoreReadOnlyError,
)

logger = logging.getLogger("kvrag")

_CODES = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "body_too_large"}

RETRY_AFTER = 5
"""Seconds after which clients should retry on 429 and 503."""


class ApiError(KvragError):
    """An error response.

    Attributes:
        status: The HTTP status.
        code: Machine-readable error code.
        param: Name of the invalid request field.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class ClientDisconnected(Exception):
    """The client disconnected before the response."""


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response in ASCII, so that it can quote a lone surrogate from the client."""
    return Response(json.dumps(content), status, dict(headers or {}), "application/json")


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and OpenAI's error object. Details of internal errors are hidden from clients."""
    code = param = None
    status, message = 500, str(error)
    if isinstance(error, ApiError):
        status, code, param = error.status, error.code, error.param
    elif isinstance(error, ContextWindowError):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, (PromptError, SettingError)):
        status, code = 400, "invalid_value"
    elif isinstance(error, (StoreFullError, StoreReadOnlyError)):
        status, code = 507, "store_full"
    elif isinstance(error, OutOfMemoryError):
        status, code = 503, "out_of_memory"
    elif not isinstance(error, KvragError):
        message = "internal error: see the server's log"
    return status, {"error": {"message": message, "type": _kind(status), "param": param, "code": code}}


def log(error: Exception) -> None:
    """Log an internal error, and a lack of memory. Errors in requests are reported to their senders only."""
    if describe(error)[0] == 500 or isinstance(error, OutOfMemoryError):
        is_ours = isinstance(error, KvragError)
        logger.error("%s", error if is_ours else "a request failed", exc_info=None if is_ours else error)


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_response(error: Exception) -> Response:
    """Return the response to a failed request."""
    status, content = describe(error)
    headers = {"Retry-After": str(RETRY_AFTER)} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(content, status, headers)


def handle_errors(app: FastAPI) -> None:
    """Report every error of the app in OpenAI's format."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
        if first["type"] == "json_invalid":
            return error_response(ApiError(400, "the body is not valid JSON", "invalid_json"))
        if not place and "json" not in request.headers.get("content-type", ""):
            message = "the body must be JSON: set the header Content-Type: application/json"
            return error_response(ApiError(400, message, "invalid_json"))
        message = f"{'.'.join(place) or 'the body'}: {first['msg']}"
        return error_response(ApiError(400, message, "invalid_value", place[0] if place else None))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        # FastAPI returns 400 for bodies that are not JSON, or nested too deeply
        messages = {
            400: "the body is not valid JSON",
            404: f"unknown path {request.url.path}",
            405: f"{request.url.path} does not support {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        response = error_response(ApiError(error.status_code, message, _CODES.get(error.status_code)))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnected)
    async def disconnected(_: Request, __: ClientDisconnected) -> Response:
        return Response(status_code=499)  # nginx's status for disconnected clients; never sent

    @app.exception_handler(KvragError)
    async def failed(_: Request, error: KvragError) -> Response:
        log(error)
        return error_response(error)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return error_response(error)  # Starlette raises it again, and uvicorn logs it
