"""The chat page at `/`: static files, and the sample documents that it offers."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from kvrag import sample
from kvrag.server.errors import json_response

# path -> file; they hold no data, so they need no API key
FILES = {"/": "index.html", "/style.css": "style.css", "/app.js": "app.js"}
_FOLDER = Path(__file__).parent / "web"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a new version of the server must not meet an old script
}

router = APIRouter(include_in_schema=False)


async def _file(request: Request) -> Response:
    return FileResponse(_FOLDER / FILES[request.scope["path"]], headers=_HEADERS)


for _path in FILES:
    router.add_api_route(_path, _file)


@router.get("/samples.json")
def samples(request: Request) -> Response:
    """Return the names of the sample documents, questions about them, and whether these may refer to earlier ones."""
    fitting = sample.of(request.app.state.kvrag.engine.model.name)
    names, questions = list(fitting.documents()), list(fitting.questions)
    return json_response({"documents": names, "questions": questions, "is_chat": fitting.is_chat})
