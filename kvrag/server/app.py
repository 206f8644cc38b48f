"""The HTTP interface: OpenAI's, and the corpus."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from numpy.typing import NDArray
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from kvrag.engine import BlendEngine
from kvrag.errors import KvragError
from kvrag.server.answers import Teller, answer, chat_work, completion_work, while_there
from kvrag.server.corpus import Corpus, check_id
from kvrag.server.errors import ApiError, handle_errors, json_response
from kvrag.server.guard import Guard
from kvrag.server.metrics import Metrics
from kvrag.server.schemas import ChatRequest, CompletionRequest, EmbeddingRequest, NewDocument
from kvrag.server.settings import ServerSettings
from kvrag.server.turns import Turns

T = TypeVar("T")

_KINDS = {
    "text/plain": ".txt",
    "text/markdown": ".md",
    "text/html": ".html",
    "application/pdf": ".pdf",
    "application/jsonl": ".jsonl",
}
_READERS = 2  # files that are read at a time
_UPLOADS = 16  # files that may be held for that
_PATIENCE = 10.0  # seconds that the encoding of documents may take to come to a point from where it can go on


class State:
    """What the requests of one server share.

    Attributes:
        turns: For what the model does.
        reading: For what is read of uploads.
    """

    def __init__(self, engine: BlendEngine, settings: ServerSettings, corpus: Corpus | None) -> None:
        self.engine, self.settings, self.corpus = engine, settings, corpus
        self.turns = Turns(settings.concurrency, settings.queue, "answer")
        self.reading = Turns(_READERS, _UPLOADS, "read")
        self.uploads = 0
        self.metrics = Metrics()
        self.started = int(time.time())
        watch = self.metrics.watch
        watch("num_requests_running", "Requests at work", lambda: self.turns.running)
        watch("num_requests_waiting", "Requests that wait for a place", lambda: self.turns.waiting)
        if corpus is not None:
            watch("corpus_pending", "Documents that wait to be encoded or dropped", lambda: corpus.num_pending)

    def require_corpus(self) -> Corpus:
        """The corpus; an error where there is none."""
        if self.corpus is None:
            raise ApiError(404, "this server has no corpus: start it without --no-corpus", "no_corpus")
        return self.corpus

    def models(self) -> dict[str, dict[str, Any]]:
        """What `/v1/models` tells, by name."""
        made = {"object": "model", "created": self.started, "owned_by": "kvrag"}
        window = {"max_model_len": self.engine.model.context_window}
        found = {self.settings.name: window}
        if self.corpus is not None:
            found |= {self.settings.rag_name: window, self.corpus.embedder: {}}
        return {name: {"id": name, **made, **facts} for name, facts in found.items()}

    def check_model(self, name: str) -> None:
        """Raise ApiError unless this model answers prompts."""
        names = [self.settings.name] + ([] if self.corpus is None else [self.settings.rag_name])
        if name not in names:
            told = ", ".join(map(repr, names))
            raise ApiError(404, f"there is no model {name!r:.280}: this server has {told}", "model_not_found", "model")

    def teller(self, request: ChatRequest | CompletionRequest) -> Teller:
        """Who tells the answer to this request."""
        return Teller(request, f"kvrag-{self.engine.fingerprint.digest[:12]}", isinstance(request, ChatRequest))


def _state(request: Request) -> State:
    state: State = request.app.state.kvrag
    return state


Shared = Annotated[State, Depends(_state)]
router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, state: Shared) -> Response:
    """Answer a conversation; the model whose name ends in -rag retrieves from the corpus by itself."""
    state.check_model(body.model)
    body.check()
    work = chat_work(state.engine, state.corpus, state.settings, body)
    return await answer(request, state.turns, state.metrics, state.settings.timeout, work, state.teller(body))


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request, state: Shared) -> Response:
    """Go on with a text."""
    state.check_model(body.model)
    body.check()
    work = completion_work(state.engine, state.settings, body)
    return await answer(request, state.turns, state.metrics, state.settings.timeout, work, state.teller(body))


@router.post("/v1/embeddings")
async def embed(body: EmbeddingRequest, request: Request, state: Shared) -> Response:
    """Vectors of texts, by the corpus' embedder."""
    corpus = state.require_corpus()
    if body.model != corpus.embedder:
        message = f"there is no embedder {body.model!r:.280}: this server has {corpus.embedder!r}"
        raise ApiError(404, message, "model_not_found", "model")
    texts = body.texts()

    def work() -> Generator[tuple[NDArray[np.float32], int], None, None]:
        yield corpus.embed(texts)

    vectors, tokens = await while_there(request, _only(state.turns.run(work, state.settings.timeout)))
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
async def models(state: Shared) -> Response:
    """What there is to ask."""
    return json_response({"object": "list", "data": list(state.models().values())})


@router.get("/v1/models/{name:path}")
async def model(name: str, state: Shared) -> Response:
    """One model."""
    if name not in (known := state.models()):
        raise ApiError(404, f"there is no model {name!r:.280}", "model_not_found", "model")
    return json_response(known[name])


@router.post("/v1/corpus", status_code=202)
async def add_document(body: NewDocument, state: Shared) -> Response:
    """Add a text, which is encoded in the background; one of the same id is replaced."""
    corpus = state.require_corpus()
    if not body.text.strip():
        raise ApiError(400, "the text is empty", "invalid_value", "text")
    name = body.id if body.id is not None else f"doc-{time.time_ns():x}"
    status = await asyncio.to_thread(corpus.add, name, [body.text])
    return json_response(status.to_dict(), 202)


_FILE = {"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}


@router.put("/v1/corpus/{document:path}", status_code=202, openapi_extra=_FILE)
async def upload_document(document: str, request: Request, state: Shared) -> Response:
    """Add the file that is the body: text, Markdown, HTML, PDF or JSONL, by the id's suffix or the content type."""
    corpus = state.require_corpus()
    check_id(document)
    if state.uploads >= _UPLOADS:
        raise ApiError(429, "too many uploads at once: try again later", "queue_full")
    state.uploads += 1
    try:
        texts = await _read_upload(document, request, state, corpus)
    finally:
        state.uploads -= 1
    status = await asyncio.to_thread(corpus.add, document, texts)
    return json_response(status.to_dict(), 202)


async def _read_upload(document: str, request: Request, state: State, corpus: Corpus) -> list[str]:
    content = bytearray()
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

    return await while_there(request, _only(state.reading.run(work, state.settings.timeout)))


@router.get("/v1/corpus")
async def list_documents(
    state: Shared, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000, after: str = ""
) -> Response:
    """The documents by id, and how far those are that are not ready."""
    found = await asyncio.to_thread(state.require_corpus().statuses)
    rest = [status for status in found if status.id > after]
    data = [status.to_dict() for status in rest[:limit]]
    return json_response({"object": "list", "data": data, "has_more": len(rest) > limit, "total": len(found)})


@router.get("/v1/corpus/{document:path}")
async def show_document(document: str, state: Shared) -> Response:
    """How far a document is."""
    status = await asyncio.to_thread(state.require_corpus().status, document)
    return json_response(status.to_dict())


@router.delete("/v1/corpus/{document:path}")
async def delete_document(document: str, state: Shared) -> Response:
    """Drop a document: it is not found any more from now on."""
    await asyncio.to_thread(state.require_corpus().remove, document)
    return json_response({"id": document, "object": "corpus.document", "deleted": True})


@router.get("/health")
async def health(state: Shared) -> Response:
    """503 while the server is stopping."""
    turns = state.turns
    told = {"status": "stopping" if turns.is_stopping else "ok", "running": turns.running, "waiting": turns.waiting}
    return json_response(told, 503 if turns.is_stopping else 200)


@router.get("/metrics")
async def metrics(state: Shared) -> Response:
    """For Prometheus."""
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _only(pieces: AsyncGenerator[T, None]) -> T:
    """The one piece that work consists of."""
    async with aclosing(pieces):
        return await anext(pieces)


def _name_models(app: FastAPI, state: State) -> None:
    """Let the description of the interface say what models there are."""
    answering = [state.settings.name, *([] if state.corpus is None else [state.settings.rag_name])]
    embedding = [] if state.corpus is None else [state.corpus.embedder]
    named = {"ChatRequest": answering, "CompletionRequest": answering[:1], "EmbeddingRequest": embedding}
    schemas = app.openapi()["components"]["schemas"]
    for request, names in named.items():
        if names:
            schemas[request]["properties"]["model"]["enum"] = names


def create_app(engine: BlendEngine, settings: ServerSettings, corpus: Corpus | None = None) -> FastAPI:
    """An ASGI app that answers from an engine; it closes neither engine nor corpus' index.

    Args:
        corpus: For the model that retrieves, for embeddings and `/v1/corpus`; None = without these.
    """
    state = State(engine, settings, corpus)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if corpus is not None:
            corpus.start()
        yield
        stopping = [state.turns.stop(), state.reading.stop()]
        if corpus is not None:
            stopping.append(asyncio.to_thread(corpus.stop, _PATIENCE))
        await asyncio.gather(*stopping)

    app = FastAPI(title="kvrag", version=version("kvrag"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.kvrag = state
    app.include_router(router)
    handle_errors(app)
    _name_models(app, state)
    app.add_middleware(Guard, settings=settings)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app
