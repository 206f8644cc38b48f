"""The chat page at `/`: static files; and the endpoints at `/docs`."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

# path -> file; they hold no data, so they need no API key
FILES = {"/": "index.html", "/style.css": "style.css", "/app.js": "app.js", "/markdown.js": "markdown.js"}
_FOLDER = Path(__file__).parent / "web"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a new version of the server must not meet an old script
}
_DOCS = """<!doctype html>
<html lang="en"><meta name="viewport" content="width=device-width"><title>kvrag API</title>
<link rel="stylesheet" href="style.css"><link rel="icon" href="data:,">
<body class="docs"><h1>kvrag API</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p>
"""

router = APIRouter(include_in_schema=False)


async def _file(request: Request) -> Response:
    return FileResponse(_FOLDER / FILES[request.scope["path"]], headers=_HEADERS)


for _path in FILES:
    router.add_api_route(_path, _file)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Return a page of all endpoints. FastAPI's own loads scripts from another server."""
    spec = request.app.openapi()
    parts = {f"{verb.upper()} {path}": part for path, verbs in spec["paths"].items() for verb, part in verbs.items()}
    rows = (
        f"<details><summary><code>{escape(name)}</code> {escape(part.get('description', ''))}</summary>"
        f"<pre>{escape(json.dumps(part, indent=1))}</pre></details>"
        for name, part in (parts | spec["components"]["schemas"]).items()
    )
    return Response(_DOCS + "".join(rows), media_type="text/html", headers=_HEADERS)
