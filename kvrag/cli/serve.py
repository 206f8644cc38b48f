"""`kvrag serve`: serve an OpenAI-compatible API."""

from __future__ import annotations

import argparse
import json
import logging
import os
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag import sample
from kvrag.cli.cluster import add_ray_argument, ray_command
from kvrag.cli.common import (
    add_answer_arguments,
    add_context_argument,
    add_engine_arguments,
    at_least,
    folder,
    open_engine,
    open_index,
    read_text,
    require_extra,
    retrieval_folder,
    say,
)
from kvrag.cli.prompt import stuff
from kvrag.config import BlendConfig
from kvrag.errors import KvragError, SettingError
from kvrag.llm import SETTINGS
from kvrag.retrieval import documents

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex
    from kvrag.server import ApiKey, Corpus, ServerSettings

_KEYS = "KVRAG_API_KEY"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_MIB, _GIB = 1 << 20, 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag serve`."""
    add_engine_arguments(parser)
    parser.add_argument("--compile-decode", action="store_true", help=SETTINGS["compile_decode"].about)
    add_answer_arguments(parser)
    where = parser.add_argument_group("address and access")
    where.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    where.add_argument("--port", type=at_least(0, int, 65535), default=8000, help="0 = any free port (default: 8000)")
    where.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="[NAME:]KEY",
        help="require an API key; repeatable with a NAME each, the namespace of its documents, conversations and "
        f"metrics (default: --namespace). Also read from the environment variable {_KEYS}, comma-separated",
    )
    where.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that requests without an API key may use",
    )
    where.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help="web origin that may send requests"
    )
    where.add_argument("--served-model-name", metavar="NAME", help="model name in requests (default: --model)")
    cluster = parser.add_argument_group("on many machines")
    add_ray_argument(cluster, "serve with Ray Serve on a cluster")
    cluster.add_argument(
        "--replicas",
        type=_replicas,
        default=(1, 1),
        metavar="N|MIN-MAX",
        help="number of engines with --ray, or its bounds (default: 1)",
    )
    corpus = parser.add_argument_group("corpus")
    corpus.add_argument("--no-corpus", action="store_true", help="disable retrieval, embeddings and /v1/corpus")
    corpus.add_argument("--prompt-template", metavar="FILE", help="prompt template with {context} and {question}")
    corpus.add_argument(
        "--chunk-tokens", type=at_least(1), default=256, metavar="N", help="maximum tokens per chunk (default: 256)"
    )
    corpus.add_argument(
        "--chunk-overlap", type=at_least(0), default=0, metavar="N", help="overlap of adjacent chunks in tokens"
    )
    add_context_argument(corpus, "as in `kvrag warm`")
    corpus.add_argument("--embedder", help="sentence-transformers model for retrieval (default: the one in kvrag[cli])")
    corpus.add_argument(
        "--store-gib",
        type=float,
        metavar="N",
        help="evict the chunks that save least beyond this size; see also kvrag store budget",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--ram-gib", type=float, default=2, metavar="N", help="stored KV kept in RAM (default: 2)")
    limits.add_argument(
        "--device-gib", type=float, default=0, metavar="N", help="stored KV kept on the GPU (default: 0)"
    )
    limits.add_argument(
        "--conversation-gib",
        type=float,
        default=1,
        metavar="N",
        help="KV of recent conversations, kept for their next turns (default: 1)",
    )
    limits.add_argument(
        "--batch-gib", type=float, default=4, metavar="N", help="KV of the answers in progress (default: 4)"
    )
    limits.add_argument(
        "--token-limit",
        type=int,
        default=4096,
        metavar="N",
        help="maximum answer length of a request (default: 4096)",
    )
    limits.add_argument("--concurrency", type=int, default=16, metavar="N", help="concurrent requests (default: 16)")
    limits.add_argument(
        "--queue", type=int, default=32, metavar="N", help="maximum waiting requests per namespace (default: 32)"
    )
    limits.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="time limit of a request in seconds (default: 600)"
    )
    limits.add_argument(
        "--max-body-mib", type=float, default=8, metavar="N", help="maximum size of a request (default: 8)"
    )
    limits.add_argument(
        "--max-upload-mib", type=float, default=64, metavar="N", help="maximum size of a document (default: 64)"
    )
    limits.add_argument(
        "--shutdown-timeout",
        type=float,
        default=60,
        metavar="S",
        help="seconds for pending answers to finish at shutdown (default: 60)",
    )


def _replicas(text: str) -> tuple[int, int]:
    """Type for argparse, `N|MIN-MAX`: the least and the largest number."""
    least, _, most = text.partition("-")
    try:
        bounds = int(least), int(most or least)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"must be a number, or two as in 2-8, got {text!r}")
    return bounds


def chat(args: argparse.Namespace) -> int:
    """Serve the web page of `kvrag chat --web`: its options, and the default of all others."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(argparse.Namespace(**{**vars(parser.parse_args([])), **vars(args)}), _open_page)


def run(args: argparse.Namespace, announce: Callable[..., None] | None = None) -> int:
    """Serve until interrupted.

    Args:
        announce: Called with (arguments, settings, URL, corpora) once the server accepts connections.
    """
    for module in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        if find_spec(module) is None:
            raise KvragError(f"{module} is not installed: pip install 'kvrag[server]'")
    if args.ray is not None:
        return int(ray_command("serve")(args))
    if args.replicas != (1, 1):
        raise SettingError("--replicas needs --ray")
    settings, config = read_settings(args), read_config(args)  # report mistakes before the slow imports
    from kvrag import server

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    with ExitStack() as stack:
        taken = stack.enter_context(server.bind(args.host, args.port))
        made = build(args, settings, config, stack)
        taken.listen()  # whoever reads the announcement may connect at once
        (announce or _announce)(args, settings, server.url(taken), made.corpora)
        server.serve(made.app, taken, args.shutdown_timeout)
    return 0


@dataclass(frozen=True)
class Built:
    """An app of `kvrag.server.create_app`, and the corpora in it."""

    app: Any
    corpora: list[Corpus]


def build(
    args: argparse.Namespace,
    settings: ServerSettings,
    config: dict[str, Any],
    stack: ExitStack,
    is_replica: bool = False,
) -> Built:
    """Open the engine and the corpora, as long as `stack` is open, and return the app.

    Args:
        is_replica: Other servers of this machine may work on the same corpus.
    """
    from kvrag import server

    say(f"loading {args.model}")
    engine = stack.enter_context(open_engine(args, _sizes(args), compile_decode=args.compile_decode, **config))
    if args.store_gib is not None:
        folder(engine).max_bytes = _bytes("--store-gib", args.store_gib, _GIB)
    if args.prompt_template is None:  # same prompt as `kvrag ask`
        from kvrag.retrieval.index import Hit

        template = stuff(engine, "{question}", [Hit("{context}", "", 1.0)])
        settings = replace(settings, template=template)
    corpora = []
    for namespace in () if args.no_corpus else settings.namespaces:
        index = stack.enter_context(open_index(engine, namespace, args.embedder))
        index.embed(["loads the embedder"])
        corpora.append(_corpus(args, engine, index, namespace, settings, is_replica))
    return Built(server.create_app(engine, settings, corpora), corpora)


def read_settings(args: argparse.Namespace) -> ServerSettings:
    """Return the settings of the server."""
    from kvrag.server.settings import TEMPLATE, ServerSettings

    template = TEMPLATE if args.prompt_template is None else read_text(Path(args.prompt_template))
    return ServerSettings(
        name=args.served_model_name or args.model,
        api_keys=_keys(args),
        namespace=args.namespace,
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


def _keys(args: argparse.Namespace) -> tuple[ApiKey, ...]:
    from kvrag.server.settings import ApiKey

    given = [*args.api_key, *filter(None, os.environ.get(_KEYS, "").split(","))]
    if len(given) > 1 and not all(":" in key for key in given):
        raise SettingError("several API keys need names: pass --api-key NAME:KEY, where NAME is the key's namespace")
    return tuple(ApiKey.parse(key, args.namespace) for key in given)


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the engine's BlendConfig; also check options that are not settings."""
    _sizes(args)
    if args.store_gib is not None:
        _bytes("--store-gib", args.store_gib, _GIB)
    if not 0 <= args.shutdown_timeout < float("inf"):
        raise SettingError(f"--shutdown-timeout must be a number of seconds, got {args.shutdown_timeout}")
    if not args.no_corpus:
        require_extra()
        documents.check_lengths(args.chunk_tokens, args.chunk_overlap)
    fields = {"ratio": args.ratio, "policy": args.policy, "controller": args.controller}
    config = {name: value for name, value in fields.items() if value is not None}
    if args.policy is not None:
        config = {"controller": "off", **config}  # as in requests that name a policy
    config |= args.context_tokens
    BlendConfig(**config)
    return config


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the engine's memory, as arguments of `BlendEngine`."""
    sizes = {}
    for name in ("ram", "device", "conversation", "batch"):
        gib = getattr(args, f"{name}_gib")
        sizes[f"{name}_bytes"] = _bytes(f"--{name}-gib", gib, _GIB) if gib or name == "batch" else 0
    return sizes


def _bytes(option: str, size: float, unit: int) -> int:
    if not 0 < size < float("inf"):
        raise SettingError(f"{option} must be a positive number, got {size}")
    return max(1, round(size * unit))


def _corpus(
    args: argparse.Namespace,
    engine: BlendEngine,
    index: ChunkIndex,
    namespace: str,
    settings: ServerSettings,
    is_replica: bool,
) -> Corpus:
    from kvrag.server import Corpus, CorpusInUseError

    encode = engine.model.tokenizer.encode
    split = documents.splitter(lambda text: len(encode(text)), args.chunk_tokens, args.chunk_overlap)
    tasks = retrieval_folder(engine, namespace) / "corpus"
    for number in count(1):
        try:
            return Corpus(engine, index, tasks, split, namespace)
        except CorpusInUseError:
            if not is_replica:
                raise
            tasks = tasks.with_name(f"corpus-{number}")
    raise AssertionError


def _open_page(args: argparse.Namespace, settings: ServerSettings, url: str, corpora: Sequence[Corpus]) -> None:
    """Add the sample documents to an empty corpus, and open the page."""
    for corpus in corpora:
        if not corpus.statuses():
            for name, text in sample.of(args.model).documents().items():
                corpus.add(name, [text])
    say(f"chat with {settings.name} on {url}/; stop with Ctrl-C")
    if args.json:
        print(json.dumps({"url": url, "model": settings.name, "pid": os.getpid()}), flush=True)
    elif not args.no_browser and {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):  # a browser in a terminal would wait
        webbrowser.open(f"{url}/")


def _announce(args: argparse.Namespace, settings: ServerSettings, url: str, corpora: Sequence[Corpus]) -> None:
    chunks = sum(len(corpus.index) for corpus in corpora)
    if args.json:
        print(json.dumps({"url": url, "model": settings.name, "pid": os.getpid(), "chunks": chunks}), flush=True)
    else:
        say(f"serving {settings.name} on {url}/v1, a chat page on {url}/; stop with Ctrl-C")
    if corpora and not chunks and not any(corpus.count_pending() for corpus in corpora):
        say(f"the corpus is empty: add documents before using the model {settings.rag_name!r}")
    if args.host not in _LOCAL and not settings.api_keys:
        say(f"anyone who can reach {url} can use the server: require a key with --api-key")
