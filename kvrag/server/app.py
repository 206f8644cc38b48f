"""The HTTP API: OpenAI's endpoints, and the corpus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import generate_latest
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import FileResponse, Response

from kvrag.engine import BlendEngine
from kvrag.errors import KvragError
from kvrag.retrieval.content import Content
from kvrag.retrieval.documents import SUFFIXES
from kvrag.retrieval.sandbox import Sandbox
from kvrag.server.answers import chat_work, completion_work, respond, result
from kvrag.server.api_errors import ApiError, handle_errors, json_response
from kvrag.server.corpus import Corpus, check_id
from kvrag.server.guard import PAGE, Guard
from kvrag.server.response import ResponseBuilder
from kvrag.server.responses import ResponsesBuilder, ResponsesRequest
from kvrag.server.schemas import ChatRequest, CompletionRequest, NewChunks, TokenizeRequest, parse
from kvrag.server.settings import ServerSettings
from kvrag.server.state import State, Tenant
from kvrag.store.base import no_progress

_TOKENIZED, _PER_TOKEN = 1 << 20, 16  # bytes of a body of /tokenize: at least, and per token of the window


# async: FastAPI would run plain functions in threads, which slow endpoints of one namespace could fill
async def _server(request: Request) -> State:
    state: State = request.app.state.kvrag
    return state


async def _tenant(request: Request) -> Tenant:
    return (await _server(request)).tenants[request.state.namespace]


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


Server = Annotated[State, Depends(_server)]
Caller = Annotated[Tenant, Depends(_tenant)]
router = APIRouter(route_class=ParsingRoute)


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, state: Server, tenant: Caller) -> Response:
    """Answer a conversation. The model with the suffix -rag retrieves from the corpus itself."""
    work = chat_work(state, tenant, body)
    return await respond(request, state, tenant, work, ResponseBuilder(body, state.engine))


@router.post("/v1/responses")
async def respond_to_input(body: ResponsesRequest, request: Request, state: Server, tenant: Caller) -> Response:
    """Answer a conversation, in the form of OpenAI's Responses API. Nothing is stored."""
    work = chat_work(state, tenant, await result(request, state.parsing, body.chat))
    return await respond(request, state, tenant, work, ResponsesBuilder(body, state.engine))


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request, state: Server, tenant: Caller) -> Response:
    """Continue texts or token ids."""
    work = completion_work(state, tenant, body)
    return await respond(request, state, tenant, work, ResponseBuilder(body, state.engine))


@router.get("/v1/models")
async def models(state: Server) -> Response:
    """List the models."""
    return json_response({"object": "list", "data": list(state.models.values())})


@router.get("/v1/models/{name:path}")
async def model(name: str, state: Server) -> Response:
    """Return one model."""
    state.check_model(name)
    return json_response(state.models[name])


_FILE = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


@router.put("/v1/corpus/{document:path}", openapi_extra={"requestBody": _FILE})
async def upload_document(document: str, request: Request, state: Server, tenant: Caller) -> Response:
    """Encode the uploaded file, which can then be retrieved. It replaces the document with the same id.

    The suffix of the id names the format; without one, it is a text. `problems` of the response are what was skipped.
    """
    corpus = tenant.require_corpus()
    check_id(document)  # before its content is read
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "send the file itself, not a form: curl -T FILE", "invalid_value")
    uploaded, suffix = await request.body(), PurePosixPath(document).suffix.lower()

    def read() -> Content:
        try:
            with closing(Sandbox()) as sandbox:  # one each, so that a hostile file delays no other
                content = sandbox.parse(document, suffix if suffix in SUFFIXES else ".txt", uploaded)
        except KvragError as error:
            raise ApiError(400, f"{document} cannot be read: {error}", "unreadable_document") from error
        if not content.texts:
            raise ApiError(400, "; ".join(map(str, content.problems[:3])), "unreadable_document")
        return content

    content = await result(request, state.reading, read)
    add = partial(corpus.add, document, content.texts, content.pages)
    status = await result(request, state.encoding, add)
    return json_response(status | {"problems": [problem.to_dict() for problem in content.problems]})


@router.get("/v1/corpus")
async def list_documents(
    request: Request,
    state: Server,
    tenant: Caller,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    after: str = "",
) -> Response:
    """List the documents by id."""
    statuses = await result(request, state.working, tenant.require_corpus().statuses)
    rest = [status for status in statuses if status["id"] > after]
    numbers = {"has_more": len(rest) > limit, "total": len(statuses)}
    return json_response({"object": "list", "data": rest[:limit], **numbers})


@router.get("/v1/corpus/{document:path}")
async def show_document(document: str, request: Request, state: Server, tenant: Caller) -> Response:
    """Return a document's status."""
    return json_response(await result(request, state.working, partial(tenant.require_corpus().status, document)))


@router.delete("/v1/corpus/{document:path}")
async def delete_document(document: str, request: Request, state: Server, tenant: Caller) -> Response:
    """Delete a document. It is no longer retrieved from now on."""
    await result(request, state.working, partial(tenant.require_corpus().remove, document))
    return json_response({"id": document, "object": "corpus.document", "deleted": True})


@router.post("/v1/chunks")
async def warm_chunks(body: NewChunks, request: Request, state: Server, tenant: Caller) -> Response:
    """Encode the chunks that the store lacks, and return the report. They are not retrieved by the -rag model."""
    work = partial(state.engine.warm, **body.model_dump(), namespace=tenant.namespace, progress=no_progress)
    report = await result(request, state.answering, work)
    return json_response(report.to_dict())


@router.get("/v1/chunks")
async def list_chunks(request: Request, state: Server, tenant: Caller, prefix: str = "") -> Response:
    """Return the names of the documents that start with `prefix` and have chunks, sorted."""
    work = partial(state.engine.documents, prefix, namespace=tenant.namespace)
    return json_response({"documents": await result(request, state.working, work)})


@router.delete("/v1/chunks/{document:path}")
async def forget_chunks(document: str, request: Request, state: Server, tenant: Caller) -> Response:
    """Delete a document's chunks unless another document has them."""
    work = partial(state.engine.forget, document, namespace=tenant.namespace)
    removed = await result(request, state.working, work)
    return json_response({"document": document, "removed": removed})


@router.get("/v1/checks")
async def checks(state: Server, tenant: Caller) -> Response:
    """Return how much recompute the model needs by the answers of the namespace, and what was `learned`."""
    stats = state.engine.stats(tenant.namespace)
    learned = {"learned": stats["learned"].to_dict()} if "learned" in stats else {}
    return json_response({**stats["checked"].to_dict(), "text": str(stats["checked"]), **learned})


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, state: Server) -> Response:
    """Return the token ids of a prompt, as vLLM does; `add_special_tokens=false`: of a chunk's text."""
    engine = state.engine
    limit = max(_TOKENIZED, _PER_TOKEN * engine.context_window)  # no work can be stopped within a text
    if len(await request.body()) > limit:
        message = f"/tokenize takes at most {limit / (1 << 20):g} MiB: send a longer text in parts"
        raise ApiError(413, message, "body_too_large")

    def work() -> Response:
        if body.messages is not None:
            tokens = engine.tokenize([message.plain() for message in body.messages], tools=body.tools)
        elif body.add_special_tokens is False:
            tokens = engine.encode(body.prompt or "")
        else:
            tokens = engine.tokenize(body.prompt or "")
        return json_response({"count": len(tokens), "max_model_len": engine.context_window, "tokens": tokens})

    return await result(request, state.working, work)


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
    return Response(generate_latest(tenant.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a new version of the page must not meet an old script
}


def create_app(engine: BlendEngine, settings: ServerSettings, corpora: Sequence[Corpus] = ()) -> FastAPI:
    """Return an ASGI app that answers with an engine. It closes neither the engine nor the corpora's indexes.

    Args:
        corpora: One per namespace in `settings.namespaces`; empty = no -rag model and `/v1/corpus`.
    """
    state = State(engine, settings, corpora)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.gather(*(queue.stop() for queue in state.queues))

    app = FastAPI(
        title="kvrag",
        version=version("kvrag"),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads scripts from another server
        redoc_url=None,
        # described in /openapi.json; Guard checks the keys
        dependencies=[Depends(HTTPBearer(auto_error=False))] if settings.api_keys else None,
    )
    app.state.kvrag = state
    app.include_router(router)
    if (page := settings.page) is not None:

        async def page_file(request: Request) -> Response:
            return FileResponse(page / PAGE[request.scope["path"]], headers=_PAGE_HEADERS)

        for path in PAGE:
            app.add_route(path, page_file, include_in_schema=False)
    handle_errors(app)
    app.add_middleware(Guard, settings=settings)
    if settings.hosts and not settings.api_keys:
        # IPv6 addresses need brackets, as in URLs
        hosts = [f"[{host}]" if ":" in host else host for host in settings.hosts]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app
