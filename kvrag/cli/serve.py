"""`kvrag serve`: serve an OpenAI-compatible API."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.cli.ask import template
from kvrag.cli.common import (
    add_answer_arguments,
    add_corpus_arguments,
    add_engine_arguments,
    add_number,
    add_setting,
    at_least,
    open_engine,
    open_index,
    read_config,
    read_text,
    require_extra,
    say,
)
from kvrag.client.connection import KEY_VARIABLE
from kvrag.config import DECLARED
from kvrag.errors import SettingError
from kvrag.retrieval import documents
from kvrag.server.settings import ApiKey, ServerSettings
from kvrag.words import counted

if TYPE_CHECKING:
    from kvrag.server.state import State

_LOCAL = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag serve`."""
    add_engine_arguments(parser)
    add_answer_arguments(parser)
    where = parser.add_argument_group("address and access")
    host = "address to listen on (default: 127.0.0.1, for this machine only)"
    where.add_argument("--host", default="127.0.0.1", help=host)
    add_number(where, "--port", 8000, "0 = any free port", most=65535, metavar="PORT")
    keys = "require an API key; repeatable with a NAME each, the namespace of its documents, conversations and metrics "
    keys += f"(default: --namespace). Also read from the environment variable {KEY_VARIABLE}, comma-separated"
    where.add_argument("--api-key", action="append", default=[], metavar="[NAME:]KEY", help=keys)
    no_key = "let anyone who can reach the server use it; without a key, needed to listen beyond this machine"
    where.add_argument("--no-api-key", action="store_true", help=no_key)
    hosts = "host name that requests without an API key may use"
    where.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=hosts)
    origins = "web origin that may send requests"
    where.add_argument("--cors-origin", action="append", default=[], metavar="URL", help=origins)
    where.add_argument("--served-model-name", metavar="NAME", help="model name in requests (default: --model)")
    page = "folder of a page to serve at /, such as examples/chat of a checkout"
    where.add_argument("--page", type=Path, metavar="FOLDER", help=page)
    corpus = parser.add_argument_group("corpus")
    corpus.add_argument("--no-corpus", action="store_true", help="disable retrieval and /v1/corpus")
    corpus.add_argument("--prompt-template", metavar="FILE", help="prompt template with {context} and {question}")
    add_corpus_arguments(corpus)
    budget = "evict the chunks that save least beyond this size; see also kvrag store budget"
    corpus.add_argument("--store-gib", type=_size(30), dest="store_bytes", metavar="N", help=budget)
    add_setting(parser, "edited_history")
    add_setting(parser, "deterministic")
    add_setting(parser, "learn")
    add_setting(parser, "check", metavar="SHARE")
    limits = parser.add_argument_group("limits")
    for tier in ("ram", "device", "conversation", "batch"):
        name, kind = f"{tier}_bytes", _size(30, least=0.001 if tier == "batch" else 0)
        default, about = DECLARED[name].default, DECLARED[name].metadata["about"]
        gib = None if default is None else f"{default >> 30}"
        add_number(limits, f"--{tier}-gib", gib, about, type=kind, dest=name)
    add_number(limits, "--token-limit", 4096, "maximum answer length; longer requests are cut to it", least=1)
    add_number(limits, "--concurrency", 16, "concurrent requests", least=1)
    add_number(limits, "--queue", 32, "maximum waiting requests per namespace")
    add_number(limits, "--timeout", 600.0, "time limit of a request in seconds", metavar="S")
    mib = _size(20)
    add_number(limits, "--max-body-mib", "8", "maximum size of a request", type=mib, dest="max_body")
    add_number(limits, "--max-upload-mib", "64", "maximum size of a document", type=mib, dest="max_upload")
    shutdown = "seconds for pending answers to finish at shutdown"
    add_number(limits, "--shutdown-timeout", 60.0, shutdown, metavar="S")


def _size(bits: int, least: float = 0.001) -> Callable[[str], int]:
    """Return a type for argparse: a size in units of 2**bits bytes, converted to bytes."""

    def size(text: str) -> int:
        return math.ceil(at_least(least, float)(text) * (1 << bits))

    return size


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    require_extra("server")
    settings = read_settings(args)  # reports mistakes before the slow imports
    from kvrag.server.run import bind, make_server, share_arenas, url

    share_arenas()  # before the engine starts threads
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    with ExitStack() as stack:
        taken = stack.enter_context(bind(args.host, args.port))
        app = build(args, settings, stack)
        taken.listen()  # whoever reads the announcement may connect at once
        _announce(args, settings, url(taken), app.state.kvrag)
        make_server(app, args.shutdown_timeout).run([taken])
    return 0


def build(args: argparse.Namespace, settings: ServerSettings, stack: ExitStack) -> Any:
    """Open the engine and the corpora, as long as `stack` is open, and return the ASGI app."""
    from kvrag.server.app import create_app
    from kvrag.server.corpus import Corpus

    say(f"loading {args.model}")
    engine = stack.enter_context(open_engine(args))
    if args.store_bytes is not None:
        engine.store.max_bytes = args.store_bytes
    if args.prompt_template is None:  # same prompt as `kvrag ask`
        settings = replace(settings, template=template(engine))

    corpora = []
    for namespace in () if args.no_corpus else settings.namespaces:
        index = stack.enter_context(open_index(engine.store, namespace, args.embedder))
        index.embed(["loads the embedder"])
        split = documents.splitter(lambda text: len(engine.encode(text)), args.chunk_tokens, args.chunk_overlap)
        corpora.append(Corpus(engine, index, split, namespace))
    return create_app(engine, settings, corpora)


def read_settings(args: argparse.Namespace) -> ServerSettings:
    """Return the settings of the server; also check the options of the engine and the corpus."""
    read_config(args)
    if not args.no_corpus:
        require_extra()
        documents.check_lengths(args.chunk_tokens, args.chunk_overlap)
    keys = _keys(args)
    if not (keys or args.no_api_key or _is_local(args.host)):
        how = f"pass --api-key or set {KEY_VARIABLE}, or let everyone in with --no-api-key"
        raise SettingError(f"anyone who can reach {args.host} could use the server: {how}")
    options = vars(args)
    settings = {row.name: options[row.name] for row in fields(ServerSettings) if row.name in options}
    if args.prompt_template is not None:
        settings["template"] = read_text(Path(args.prompt_template))
    return ServerSettings(
        name=args.served_model_name or args.model,
        api_keys=keys,
        hosts=(*_LOCAL, *args.allow_host) if _is_local(args.host) else (),
        origins=tuple(args.cors_origin),
        **settings,
    )


def _is_local(host: str) -> bool:
    """Return whether only this machine can reach a server on this address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _keys(args: argparse.Namespace) -> tuple[ApiKey, ...]:
    given = [*args.api_key, *filter(None, os.environ.get(KEY_VARIABLE, "").split(","))]
    if given and args.no_api_key:
        raise SettingError(f"--no-api-key contradicts the keys of --api-key or {KEY_VARIABLE}: leave out one of them")
    if len(given) > 1 and not all(":" in key for key in given):
        raise SettingError("several API keys need names: pass --api-key NAME:KEY, where NAME is the key's namespace")
    return tuple(ApiKey.parse(key, args.namespace) for key in given)


def _announce(args: argparse.Namespace, settings: ServerSettings, url: str, state: State) -> None:
    chunks = sum(len(corpus.index) for corpus in state.corpora)
    if args.json:
        print(json.dumps({"url": url, "model": settings.name, "pid": os.getpid(), "chunks": chunks}), flush=True)
    else:
        also = f", and {settings.page} on {url}/" if settings.page else ""
        say(f"serving {settings.name} on {url}/v1{also}; stop with Ctrl-C")
    if state.corpora and not chunks:
        say(f"the corpus is empty: add documents before using the model {settings.rag_name!r}")
    shares = {share.namespace: share.documents for share in state.engine.store.stats().namespaces}
    if shares.get(args.namespace) and args.namespace not in settings.namespaces:
        name = args.namespace or "(default)"
        documents = counted(shares[args.namespace], "document")
        say(f"no API key reads the {documents} in the namespace {name}: pass a key without NAME")
