"""`kvrag serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.cli import documents
from kvrag.cli.common import (
    add_answer_arguments,
    add_engine_arguments,
    folder,
    open_engine,
    open_index,
    read_text,
    require_extra,
    say,
)
from kvrag.cli.prompt import stuff
from kvrag.config import DEFAULT_CONTEXT, BlendConfig
from kvrag.errors import KvragError, SettingError

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex
    from kvrag.server import Corpus, ServerSettings

_KEYS = "KVRAG_API_KEY"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_MIB, _GIB = 1 << 20, 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of `kvrag serve`."""
    add_engine_arguments(parser)
    add_answer_arguments(parser)
    where = parser.add_argument_group("where, and for whom")
    where.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    where.add_argument("--port", type=int, default=8000, help="0 = any that is free (default: 8000)")
    where.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help=f"may be repeated; or in {_KEYS}, commas between"
    )
    where.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="another name of this server")
    where.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help="pages of this site may ask from a browser"
    )
    where.add_argument("--served-model-name", metavar="NAME", help="its name in requests (default: as in --model)")
    corpus = parser.add_argument_group("corpus")
    corpus.add_argument("--no-corpus", action="store_true", help="no retrieval, no embeddings, no /v1/corpus")
    corpus.add_argument("--prompt-template", metavar="FILE", help="text with {context} and {question} in it")
    corpus.add_argument("--chunk-tokens", type=int, default=256, metavar="N", help="longest chunk (default: 256)")
    corpus.add_argument("--chunk-overlap", type=int, default=0, metavar="N", help="tokens shared by neighbours")
    corpus.add_argument(
        "--context-tokens",
        type=int,
        default=DEFAULT_CONTEXT,
        metavar="N",
        help=f"as in `kvrag warm` (default: {DEFAULT_CONTEXT})",
    )
    corpus.add_argument("--embedder", help="sentence-transformers model for retrieval (default: one that is installed)")
    corpus.add_argument("--store-gib", type=float, metavar="N", help="evict least recently used chunks beyond this")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--token-limit",
        type=int,
        default=4096,
        metavar="N",
        help="longest answer that may be asked for (default: 4096)",
    )
    limits.add_argument("--concurrency", type=int, default=4, metavar="N", help="answers at a time (default: 4)")
    limits.add_argument("--queue", type=int, default=32, metavar="N", help="requests that may wait (default: 32)")
    limits.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds for a request (default: 600)")
    limits.add_argument("--max-body-mib", type=float, default=8, metavar="N", help="of a request (default: 8)")
    limits.add_argument("--max-upload-mib", type=float, default=64, metavar="N", help="of a document (default: 64)")
    limits.add_argument(
        "--shutdown-timeout",
        type=float,
        default=60,
        metavar="S",
        help="for answers under way, at the end (default: 60)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(module) is None:
            raise KvragError(f"{module} is not installed: pip install 'kvrag[server]'")
    from kvrag import server

    settings, config = _settings(args), _config(args)  # what is wrong is said before the model is loaded
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    with ExitStack() as stack:
        taken = stack.enter_context(server.bind(args.host, args.port))
        engine = stack.enter_context(open_engine(args, **config))
        if args.store_gib is not None:
            folder(engine).max_bytes = _bytes("--store-gib", args.store_gib, _GIB)
        if args.prompt_template is None:  # as `ask` does it
            from kvrag.retrieval.index import Hit

            template = stuff(engine, "{question}", [Hit("{context}", "", 1.0)])
            settings = replace(settings, template=template)
        corpus = None
        if not args.no_corpus:
            index = stack.enter_context(open_index(engine, args.embedder))
            index.embed(["what takes long the first time"])
            corpus = _corpus(args, engine, index, settings)
        app = server.create_app(engine, settings, corpus)
        _announce(args, settings, server.url(taken), corpus)
        server.serve(app, taken, args.shutdown_timeout)
    return 0


def _settings(args: argparse.Namespace) -> ServerSettings:
    from kvrag.server.settings import TEMPLATE, ServerSettings

    template = TEMPLATE if args.prompt_template is None else read_text(Path(args.prompt_template))
    return ServerSettings(
        name=args.served_model_name or args.model,
        api_keys=tuple(filter(None, [*args.api_key, *os.environ.get(_KEYS, "").split(",")])),
        hosts=(*_LOCAL, *args.allow_host) if args.host in _LOCAL else (),
        origins=tuple(args.cors_origin),
        top_k=args.top_k,
        around=args.around,
        max_tokens=args.max_tokens,
        token_limit=args.token_limit,
        temperature=args.temperature,
        concurrency=args.concurrency,
        queue=args.queue,
        timeout=args.timeout,
        max_body=_bytes("--max-body-mib", args.max_body_mib, _MIB),
        max_upload=_bytes("--max-upload-mib", args.max_upload_mib, _MIB),
        template=template,
    )


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of the engine's BlendConfig; checks what is in no settings, too."""
    if args.store_gib is not None:
        _bytes("--store-gib", args.store_gib, _GIB)
    if not 0 <= args.shutdown_timeout < float("inf"):
        raise SettingError(f"--shutdown-timeout must be a number of seconds, got {args.shutdown_timeout}")
    if not args.no_corpus:
        require_extra()
        documents.splitter(len, args.chunk_tokens, args.chunk_overlap)
    fields = {"ratio": args.ratio, "policy": args.policy, "controller": args.controller}
    config = {name: value for name, value in fields.items() if value is not None}
    if args.policy is not None:
        config = {"controller": "off", **config}  # as if every request gave it
    BlendConfig(**config, context_tokens=args.context_tokens)
    return {**config, "context_tokens": args.context_tokens}


def _bytes(option: str, size: float, unit: int) -> int:
    if not 0 < size < float("inf"):
        raise SettingError(f"{option} must be a positive number, got {size}")
    return max(1, round(size * unit))


def _corpus(args: argparse.Namespace, engine: BlendEngine, index: ChunkIndex, settings: ServerSettings) -> Corpus:
    from kvrag.server import Corpus

    encode = engine.model.tokenizer.encode
    split = documents.splitter(lambda text: len(encode(text)), args.chunk_tokens, args.chunk_overlap)
    return Corpus(engine, index, folder(engine).path / "corpus", _read, split, settings.max_pending)


def _read(kind: str, content: bytes) -> list[str]:
    """Texts of an upload: what reads files reads it."""
    with tempfile.NamedTemporaryFile(prefix="kvrag-upload-", suffix=kind) as file:
        file.write(content)
        file.flush()
        return documents.read(Path(file.name))


def _announce(args: argparse.Namespace, settings: ServerSettings, url: str, corpus: Corpus | None) -> None:
    chunks = corpus.num_chunks if corpus is not None else 0
    if args.json:
        print(json.dumps({"url": url, "model": settings.name, "pid": os.getpid(), "chunks": chunks}), flush=True)
    else:
        say(f"{settings.name} is served on {url}/v1; Ctrl-C ends it")
    if corpus is not None and not chunks and not corpus.num_pending:
        say(
            f"the corpus is empty: the model {settings.rag_name!r} has nothing to retrieve from until you add documents"
        )
    if args.host not in _LOCAL and not settings.api_keys:
        say(f"whoever reaches {url} may use it: give --api-key")
