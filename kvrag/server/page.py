"""A page at `/`: the files of a folder, such as `examples/chat` of a checkout."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import FileResponse, Response

# path -> file; they hold no data, so they need no API key
FILES = {"/": "index.html", "/style.css": "style.css", "/app.js": "app.js"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a new version of the page must not meet an old script
}


async def file(request: Request) -> Response:
    """Return a file of the page."""
    return FileResponse(request.app.state.kvrag.settings.page / FILES[request.scope["path"]], headers=_HEADERS)
