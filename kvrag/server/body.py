"""JSON bodies of requests: parsed and validated in a thread."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from kvrag.config import check_depth
from kvrag.server.answers import result
from kvrag.server.api_errors import ApiError, invalid

M = TypeVar("M", bound=BaseModel)


def parse(content: bytes, kind: type[M]) -> M:
    """Return the model that JSON describes; raise ApiError if it is not valid."""
    try:
        sent = json.loads(content, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", "invalid_json") from None
    check_depth("the body", sent)
    try:
        return kind.model_validate(sent)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False)) from None


def _number(text: str) -> float:
    """Return a finite number; raise ValueError for NaN, an infinity, and what is one as a float."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


class _Parsed(Request):
    """Request whose JSON FastAPI gets as a model, which it then leaves as it is."""

    model: BaseModel

    async def json(self) -> Any:
        """Return the model."""
        return self.model


class ParsingRoute(APIRoute):
    """Route whose endpoint's argument `body` is read by `parse`; FastAPI would parse and validate on the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        respond = super().get_route_handler()
        kind = get_type_hints(self.endpoint).get("body")

        async def handle(request: Request) -> Response:
            request = _Parsed(request.scope, request.receive)
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind is not None and media_type.startswith("application/") and media_type.endswith(("/json", "+json")):
                parsing = partial(parse, await request.body(), kind)
                request.model = await result(request, request.app.state.kvrag.parsing, parsing)
            return await respond(request)

        return handle
