"""`kvrag warm`: encode files and folders into a store."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.cli.common import (
    LOADED,
    add_corpus_arguments,
    add_engine_arguments,
    open_engine,
    open_index,
    progress,
    require_extra,
    say,
)
from kvrag.client.connection import KEY_VARIABLE
from kvrag.client.servers import whole_documents
from kvrag.config import NamedText
from kvrag.errors import KvragError, SettingError
from kvrag.retrieval import documents
from kvrag.retrieval.content import Problem
from kvrag.retrieval.sandbox import Sandbox
from kvrag.types import WarmReport
from kvrag.words import counted, human_bytes

if TYPE_CHECKING:
    from kvrag.client import RemoteEngine
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex

_PORTION_BYTES = 1 << 20  # of texts that are encoded by one call, which has their token ids in memory
_SUMS = ("chunks", "new", "reused", "skipped", "tokens", "bytes", "seconds")
_NAMED = 3  # documents or files named in a message
_LOCAL = ("store", "codec", *LOADED, "context_tokens", "embedder", "tune")
_PROBE = "Déjà vu: 3.14 quick brown foxes (or 27) jumped, unbelievably; def f(x):\n\treturn x  # 漢字"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag warm`."""
    add_local_arguments(parser)
    parser.set_defaults(model=None)  # with --server, the server's
    tune = "then measure how much this model has to recompute on these documents (calibrate)"
    parser.add_argument("--tune", action="store_true", help=tune)
    server = parser.add_argument_group("on a server")
    url = "encode on this server, `kvrag serve` or vLLM with kvrag's KV connector; --model is then a name there "
    server.add_argument("--server", metavar="URL", help=f"{url}(default: its first model)")
    key = f"the server's API key; also read from the environment variable {KEY_VARIABLE}"
    server.add_argument("--api-key", metavar="KEY", help=key)
    tokenizer = "hub name or folder of the tokenizer that measures chunks for the server (default: --model)"
    server.add_argument("--tokenizer", metavar="NAME", help=tokenizer)


def add_local_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, and the options of reading and encoding them into a store."""
    paths = "files and folders with " + " ".join(documents.SUFFIXES)
    parser.add_argument("paths", nargs="+", metavar="PATH", help=paths)
    add_engine_arguments(parser)
    add_corpus_arguments(parser)
    prune = "drop documents whose files no longer exist in the folders in PATH; what cannot be read is kept"
    parser.add_argument("--prune", action="store_true", help=prune)


def run(args: argparse.Namespace) -> int:
    """Encode the chunks that the store lacks; return 1 if a file or a folder could not be read."""
    for option in ("api_key", "tokenizer"):
        if getattr(args, option) is not None and args.server is None:
            raise SettingError(f"--{option.replace('_', '-')} needs --server")
    if args.server is not None:
        return run_with(warm_on_server, args)
    args.model = args.model or "reader"
    return run_with(warm_here, args)


def run_with(warm: Callable[[argparse.Namespace], dict[str, Any]], args: argparse.Namespace) -> int:
    """Encode with a function that returns what `warm_here` does, and print the result; returns as `run`."""
    started = time.perf_counter()
    require_extra()
    documents.find(args.paths)  # report mistakes before loading the model
    documents.check_lengths(args.chunk_tokens, args.chunk_overlap)
    try:
        result = warm(args)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; encoded chunks are kept: run the command again to resume") from None
    gone, problems = result["gone"], result["problems"]
    result |= {"seconds": time.perf_counter() - started, "problems": [problem.to_dict() for problem in problems]}
    if args.json:
        print(json.dumps(result))
    else:
        for warning in result["warnings"]:
            say(warning)
        if gone:
            done = f"dropped {counted(result['dropped'], 'chunk')}" if args.prune else "pass --prune to drop them"
            say(f"the files of {counted(len(gone), 'document')} no longer exist ({_named(gone)}): {done}")
        print(
            f"{counted(result['chunks'], 'chunk')}: {result['new']} new, {result['reused']} reused; "
            f"{counted(result['tokens'], 'token')} and {human_bytes(result['bytes'])} written "
            f"in {result['seconds']:.1f} s"
        )
        if "tuned" in result:
            print(result["tuned"])
    unreadable = [problem.file for problem in problems if problem.is_unreadable]
    if unreadable:
        say(f"{_named(unreadable)} could not be read: documents there stay as they were")
    return 1 if unreadable else 0


def warm_here(args: argparse.Namespace) -> dict[str, Any]:
    """Encode the files' chunks in this process, and add them to the chunk index."""
    with open_engine(args) as engine, open_index(engine.store, args.namespace, args.embedder) as index:
        store, place = engine.store, engine.store.stats().path
        gone = find_gone(args.paths, lambda prefix: [*index.counts(), *store.documents(prefix, args.namespace)])
        # first: otherwise a chunk moved to another file would temporarily belong to two documents
        dropped = drop(index, gone, partial(engine.forget, namespace=args.namespace)) if args.prune else 0
        chunks, pages, problems = read_chunks(args, engine.encode)
        say(f"{counted(len(chunks), 'document')}, for {place}")
        result = _encode(engine, chunks, args) | {"gone": gone, "dropped": dropped, "problems": problems}
        result["indexed"] = 0
        with progress("indexing", args.json) as update:  # last, so that every retrievable chunk has its KV
            for number, (name, texts) in enumerate(chunks.items(), 1):
                result["indexed"] += index.add(texts, name, pages=pages[name])
                update(number, len(chunks))
        if args.tune:
            with progress("calibrating", args.json) as update:
                result["tuned"] = str(engine.calibrate(namespace=args.namespace, progress=update))
        return result | {"store": place, "model": engine.model.name}


def warm_on_server(args: argparse.Namespace) -> dict[str, Any]:
    """Split the files here, and encode their chunks on the server in `args.server`."""
    from kvrag.client import RemoteEngine

    for option in _LOCAL:
        if getattr(args, option) != args.parser.get_default(option):
            raise SettingError(f"--{option.replace('_', '-')} is for a local store: leave it out with --server")
    with RemoteEngine(args.server, args.model, api_key=args.api_key) as engine:
        gone = find_gone(args.paths, lambda prefix: engine.documents(prefix, namespace=args.namespace))
        dropped = sum(engine.forget(name, namespace=args.namespace) for name in gone) if args.prune else 0
        chunks, _, problems = read_chunks(args, _tokenizer(args.tokenizer or engine.model_name, engine))
        say(f"{counted(len(chunks), 'document')}, for {engine.model_name} on {args.server}")
        result = _encode(engine, chunks, args) | {"gone": gone, "dropped": dropped, "problems": problems}
        return result | {"server": args.server, "model": engine.model_name}


def _encode(
    engine: BlendEngine | RemoteEngine, chunks: dict[str, list[str]], args: argparse.Namespace
) -> dict[str, Any]:
    """Encode documents, and drop the chunks that they no longer have."""
    reports, done = list[WarmReport](), 0
    rows = [NamedText(text, name, name) for name, texts in chunks.items() for text in texts]
    with progress("encoding", args.json) as update:
        for portion in whole_documents(rows, _PORTION_BYTES):
            texts, names, _ = map(list, zip(*portion, strict=True))

            def count(part: int, whole: int, before: int = done, size: int = len(texts)) -> None:
                update(before + size * part // max(whole, 1), len(rows))

            namespace = args.namespace
            reports.append(engine.warm(texts, document=names, namespace=namespace, progress=count, skip_invalid=True))
            done += len(texts)
    sums = {name: sum(getattr(report, name) for report in reports) for name in _SUMS}
    return sums | {"warnings": [text for report in reports for text in report.warnings], "files": len(chunks)}


def _tokenizer(name: str, engine: RemoteEngine) -> Callable[[str], list[int]]:
    """Load a tokenizer, without its model, and make sure that it is the server's."""
    from kvrag.backend.transformers.loading import load_tokenizer
    from kvrag.backend.transformers.tokenizer import Tokenizer

    try:
        encode = Tokenizer(load_tokenizer(name), name).encode
    except KvragError as error:
        raise SettingError(f"no tokenizer {name!r} to measure chunks with ({error}): pass --tokenizer NAME") from error
    if encode(_PROBE) != engine.encode(_PROBE):
        raise SettingError(f"the server's tokenizer is not that of {name!r}: pass --tokenizer NAME")
    return encode


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def read_chunks(
    args: argparse.Namespace, encode: Callable[[str], list[int]]
) -> tuple[dict[str, list[str]], dict[str, dict[str, tuple[int, int]]], list[Problem]]:
    """Return the chunks of all readable files, their pages in PDFs, and the problems, which are also printed.

    Raises:
        KvragError: No file could be read.
    """
    split = documents.splitter(lambda text: len(encode(text)), args.chunk_tokens, args.chunk_overlap)
    chunks: dict[str, list[str]] = {}
    pages: dict[str, dict[str, tuple[int, int]]] = {}
    paths, problems = documents.find(args.paths)
    with progress("reading", args.json) as report, closing(Sandbox()) as sandbox:
        for number, path in enumerate(paths, 1):
            content = documents.read(path, sandbox.parse)
            problems += content.problems
            if content.texts:
                chunks[content.file] = split(content.texts)
                pages[content.file] = documents.page_numbers(chunks[content.file], content.texts, content.pages)
            report(number, len(paths))
    for problem in problems:
        say(str(problem))
    if not chunks:
        raise KvragError(f"no text: none of {counted(len(paths), 'file')} could be read")
    return chunks, pages, problems


def find_gone(paths: Sequence[str], known: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the documents from the folders among these paths whose files no longer exist, sorted.

    Args:
        known: Returns the documents whose names start with a prefix, possibly also others.
    """
    gone: set[str] = set()
    for path in filter(os.path.isdir, paths):
        folder = os.path.join(Path(path).resolve(), "")
        names = [name for name in known(folder) if name.startswith(folder) and _is_gone(name)]
        with suppress(KvragError):  # without files, it was perhaps unmounted; reported when they are read
            documents.find([path])
            gone.update(names)
    return sorted(gone)


def _is_gone(name: str) -> bool:
    """Return whether a file does not exist; False if the system does not say so, as in a folder without permission."""
    try:
        os.lstat(name)
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError | ValueError)
    return False


def drop(index: ChunkIndex, names: Sequence[str], forget: Callable[[str], int]) -> int:
    """Drop documents from an index and, with `forget`, from a store; return the number of chunks deleted."""
    for name in names:
        index.remove(name)  # first, so that every retrievable chunk has its KV
    return sum(map(forget, names))
