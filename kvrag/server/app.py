"""The HTTP API: OpenAI's endpoints, and the corpus."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from numpy.typing import NDArray
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response

from kvrag.engine import BlendEngine
from kvrag.errors import KvragError
from kvrag.server import page
from kvrag.server.answers import chat_work, completion_work, respond, warm_work, while_connected
from kvrag.server.corpus import Corpus, check_id
from kvrag.server.errors import ApiError, handle_errors, json_response
from kvrag.server.guard import Guard
from kvrag.server.response import ResponseBuilder
from kvrag.server.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    NewChunks,
    NewDocument,
    TokenizeRequest,
)
from kvrag.server.settings import ServerSettings
from kvrag.server.state import UPLOADS, State, Tenant

T = TypeVar("T")

_KINDS = {
    "text/plain": ".txt",
    "text/markdown": ".md",
    "text/html": ".html",
    "application/pdf": ".pdf",
    "application/jsonl": ".jsonl",
}
_ENCODING_S = 10.0  # seconds for the corpora to reach a point where the next server can resume


def _state(request: Request) -> State:
    state: State = request.app.state.kvrag
    return state


def _tenant(request: Request) -> Tenant:
    return _state(request).tenants[request.state.namespace]


Server = Annotated[State, Depends(_state)]
Caller = Annotated[Tenant, Depends(_tenant)]
router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, state: Server, tenant: Caller) -> Response:
    """Answer a conversation. The model with the suffix -rag retrieves from the corpus itself."""
    state.check_model(body.model)
    body.check()
    work = chat_work(state.engine, state.settings, tenant, body)
    return await respond(request, state, tenant, work, ResponseBuilder(body, _fingerprint(state)))


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request, state: Server, tenant: Caller) -> Response:
    """Continue a text."""
    state.check_model(body.model)
    body.check()
    work = completion_work(state.engine, state.settings, tenant, body)
    return await respond(request, state, tenant, work, ResponseBuilder(body, _fingerprint(state)))


def _fingerprint(state: State) -> str:
    return f"kvrag-{state.engine.fingerprint.digest[:12]}"


@router.post("/v1/embeddings")
async def embed(body: EmbeddingRequest, request: Request, state: Server, tenant: Caller) -> Response:
    """Embed texts with the corpus's embedder."""
    corpus = tenant.require_corpus()
    if body.model != corpus.embedder:
        message = f"unknown embedder {body.model!r:.280}: this server has {corpus.embedder!r}"
        raise ApiError(404, message, "model_not_found", "model")
    texts = body.texts()

    def work() -> Generator[tuple[NDArray[np.float32], int], None, None]:
        yield corpus.embed(texts)

    pieces = state.answering.run(work, state.settings.timeout, tenant.namespace)
    vectors, tokens = await while_connected(request, _only(pieces))
    if body.dimensions not in (None, vectors.shape[1]):
        raise ApiError(400, f"dimensions must be {vectors.shape[1]}", "unsupported_value", "dimensions")
    as_text = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": number,
            "embedding": base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist(),
        }
        for number, vector in enumerate(vectors.astype("<f4"))
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response({"object": "list", "data": data, "model": body.model, "usage": usage})


@router.get("/v1/models")
async def models(state: Server) -> Response:
    """List the models."""
    return json_response({"object": "list", "data": list(state.models().values())})


@router.get("/v1/models/{name:path}")
async def model(name: str, state: Server) -> Response:
    """Return one model."""
    if name not in (known := state.models()):
        raise ApiError(404, f"unknown model {name!r:.280}: see /v1/models", "model_not_found", "model")
    return json_response(known[name])


@router.post("/v1/corpus", status_code=202)
async def add_document(body: NewDocument, tenant: Caller) -> Response:
    """Add a text, to be encoded in the background. It replaces the document with the same id."""
    corpus = tenant.require_corpus()
    if not body.text.strip():
        raise ApiError(400, "the text is empty: send one with content", "invalid_value", "text")
    name = body.id if body.id is not None else f"doc-{time.time_ns():x}"
    status = await asyncio.to_thread(corpus.add, name, [body.text])
    return json_response(status.to_dict(), 202)


_FILE = {"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}


@router.put("/v1/corpus/{document:path}", status_code=202, openapi_extra=_FILE)
async def upload_document(document: str, request: Request, state: Server, tenant: Caller) -> Response:
    """Add the uploaded file (text, Markdown, HTML, PDF or JSONL, by the id's suffix or the content type)."""
    corpus = tenant.require_corpus()
    check_id(document)
    if tenant.uploads >= UPLOADS:
        raise ApiError(429, "too many concurrent uploads: retry later", "queue_full")
    tenant.uploads += 1
    try:
        texts = await _read_upload(document, request, state, tenant)
    finally:
        tenant.uploads -= 1
    status = await asyncio.to_thread(corpus.add, document, texts)
    return json_response(status.to_dict(), 202)


async def _read_upload(document: str, request: Request, state: State, tenant: Tenant) -> list[str]:
    corpus, content = tenant.require_corpus(), bytearray()
    async for part in request.stream():
        content += part
    kind = PurePosixPath(document).suffix.lower()
    if kind not in (*_KINDS.values(), ".htm"):
        kind = _KINDS.get(request.headers.get("content-type", "").partition(";")[0].strip().lower(), ".txt")

    def work() -> Generator[list[str], None, None]:
        try:
            yield corpus.read(kind, bytes(content))
        except KvragError as error:
            raise ApiError(400, f"{document} cannot be read: {error}", "unreadable_document") from error

    pieces = state.reading.run(work, state.settings.timeout, tenant.namespace)
    return await while_connected(request, _only(pieces))


@router.get("/v1/corpus")
async def list_documents(
    tenant: Caller, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000, after: str = ""
) -> Response:
    """List the documents by id, with the progress of unfinished ones."""
    found = await asyncio.to_thread(tenant.require_corpus().statuses)
    rest = [status for status in found if status.id > after]
    data = [status.to_dict() for status in rest[:limit]]
    return json_response({"object": "list", "data": data, "has_more": len(rest) > limit, "total": len(found)})


@router.get("/v1/corpus/{document:path}")
async def show_document(document: str, tenant: Caller) -> Response:
    """Return a document's status."""
    status = await asyncio.to_thread(tenant.require_corpus().status, document)
    return json_response(status.to_dict())


@router.delete("/v1/corpus/{document:path}")
async def delete_document(document: str, tenant: Caller) -> Response:
    """Delete a document. It is no longer retrieved from now on."""
    await asyncio.to_thread(tenant.require_corpus().remove, document)
    return json_response({"id": document, "object": "corpus.document", "deleted": True})


@router.post("/v1/chunks")
async def warm_chunks(body: NewChunks, request: Request, state: Server, tenant: Caller) -> Response:
    """Encode the chunks that the store lacks, and return the report. They are not retrieved by the -rag model."""
    left = threading.Event()
    work = warm_work(state.engine, tenant, body, left.is_set)
    pieces = state.answering.run(work, state.settings.timeout, tenant.namespace)
    try:
        report = await while_connected(request, _only(pieces))
    finally:
        left.set()
    return json_response(report.to_dict())


@router.get("/v1/chunks")
async def list_chunks(state: Server, tenant: Caller, prefix: str = "") -> Response:
    """Return the names of the documents that start with `prefix` and have chunks, sorted."""
    found = await asyncio.to_thread(state.engine.documents, prefix, namespace=tenant.namespace)
    return json_response({"documents": found})


@router.delete("/v1/chunks/{document:path}")
async def forget_chunks(document: str, state: Server, tenant: Caller) -> Response:
    """Delete a document's chunks unless another document has them."""
    removed = await asyncio.to_thread(state.engine.forget, document, namespace=tenant.namespace)
    return json_response({"document": document, "removed": removed})


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, state: Server) -> Response:
    """Return the token ids of a prompt, as vLLM does; `add_special_tokens=false`: of a chunk's text."""
    body.check()
    engine = state.engine

    def ids() -> list[int]:
        if body.messages is not None:
            return engine.tokenize([message.plain() for message in body.messages], tools=body.tools)
        assert body.prompt is not None
        return engine.encode(body.prompt) if body.add_special_tokens is False else engine.tokenize(body.prompt)

    tokens = await asyncio.to_thread(ids)
    return json_response({"count": len(tokens), "max_model_len": engine.context_window, "tokens": tokens})


@router.get("/health")
async def health(state: Server) -> Response:
    """Return whether the server accepts requests, with 503 if it is stopping. Needs no key."""
    queue, namespace = state.answering, state.settings.namespaces[0]
    content: dict[str, Any] = {"status": "stopping" if queue.is_stopping else "ok"}
    if not state.is_shared:
        content |= {"running": queue.running(namespace), "waiting": queue.waiting(namespace)}
    return json_response(content, 503 if queue.is_stopping else 200)


@router.get("/metrics")
async def metrics(tenant: Caller) -> Response:
    """Return the metrics of the caller's namespace for Prometheus."""
    return Response(tenant.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _only(pieces: AsyncGenerator[T, None]) -> T:
    """Return the only item."""
    async with aclosing(pieces):
        return await anext(pieces)


def _name_models(app: FastAPI, state: State) -> None:
    """List the model names in the OpenAPI description."""
    embedding = [] if state.embedder is None else [state.embedder]
    named = {
        "ChatRequest": state.answering_models,
        "CompletionRequest": state.answering_models[:1],
        "EmbeddingRequest": embedding,
    }
    schemas = app.openapi()["components"]["schemas"]
    for request, names in named.items():
        if names:
            schemas[request]["properties"]["model"]["enum"] = names


def create_app(engine: BlendEngine, settings: ServerSettings, corpora: Sequence[Corpus] = ()) -> FastAPI:
    """Return an ASGI app that answers with an engine. It closes neither the engine nor the corpora's indexes.

    Args:
        corpora: One per namespace in `settings.namespaces`, for the -rag model, for embeddings and `/v1/corpus`;
            empty = without these.

    Raises:
        SettingError: The corpora do not match the namespaces.
    """
    state = State(engine, settings, corpora)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for corpus in corpora:
            corpus.start()
        yield
        encoding = [asyncio.to_thread(corpus.stop, _ENCODING_S) for corpus in corpora]
        await asyncio.gather(state.answering.stop(), state.reading.stop(), *encoding)

    app = FastAPI(title="kvrag", version=version("kvrag"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.kvrag = state
    app.include_router(router)
    app.include_router(page.router)
    handle_errors(app)
    _name_models(app, state)
    app.add_middleware(Guard, settings=settings)
    if settings.hosts and not settings.api_keys:
        hosts = [
            f"[{host}]" if ":" in host else host for host in settings.hosts
        ]  # IPv6 addresses need brackets, as in URLs
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app
