"""Errors in OpenAI's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
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
_RETRY_AFTER_S = 5


class ApiError(KvragError):
    """An error response; `param` is the name of the invalid request field."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response in ASCII, so that it can quote a lone surrogate from the client."""
    return Response(json.dumps(content), status, dict(headers or {}), "application/json")


_STATUSES: tuple[tuple[Any, int, str | None], ...] = (
    (ContextWindowError, 400, "context_length_exceeded"),
    ((PromptError, SettingError), 400, "invalid_value"),
    ((StoreFullError, StoreReadOnlyError), 507, "store_full"),
    (OutOfMemoryError, 503, "out_of_memory"),
    (Exception, 500, None),
)
_TYPES_OF_ERRORS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and OpenAI's error object. Details of internal errors are hidden from clients."""
    status, code = next((status, code) for kind, status, code in _STATUSES if isinstance(error, kind))
    param = None
    if isinstance(error, ApiError):
        status, code, param = error.status, error.code, error.param
    message = str(error) if isinstance(error, KvragError) else "internal error: see the server's log"
    kind = _TYPES_OF_ERRORS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def log(error: Exception) -> None:
    """Log an internal error, and a lack of memory. Errors in requests are reported to their senders only."""
    if describe(error)[0] == 500 or isinstance(error, OutOfMemoryError):
        is_ours = isinstance(error, KvragError)
        logger.error("%s", error if is_ours else "a request failed", exc_info=None if is_ours else error)


def error_response(error: Exception) -> Response:
    """Return the response to a failed request."""
    status, content = describe(error)
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(content, status, headers)


def invalid(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for pydantic's problems with a request."""
    # a value that may have several types has an error for each; one that is not about the type says more
    problem = min(problems, key=lambda row: row["type"].endswith("_type"))
    place = [str(name) for name in problem["loc"]] or ["body"]
    code = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}.get(problem["type"])
    message = problem["msg"].removeprefix("Value error, ")  # of a check by `kvrag.config`
    return ApiError(400, f"{'.'.join(place):.300}: {message}", code or "invalid_value", place[0])


def handle_errors(app: FastAPI) -> None:
    """Report every error of the app in OpenAI's format."""

    @app.exception_handler(RequestValidationError)
    async def not_read(_: Request, error: RequestValidationError) -> Response:
        problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
        if problems[0]["loc"]:  # behind "query" or "path"
            return error_response(invalid(problems))
        # of a body that is not read as JSON
        message = "the body must be JSON: set the header Content-Type: application/json"
        return error_response(ApiError(400, message, "invalid_json"))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        messages = {
            404: f"unknown path {request.url.path}",
            405: f"{request.url.path} does not support {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        response = error_response(ApiError(error.status_code, message, _CODES.get(error.status_code)))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nginx's status for disconnected clients; never sent

    @app.exception_handler(KvragError)
    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        if isinstance(error, KvragError):  # Starlette raises others again, and uvicorn logs them
            log(error)
        return error_response(error)
