"""`kvrag warm`: encode files and folders into a store."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.cli import documents
from kvrag.cli.common import (
    add_engine_arguments,
    folder,
    human_bytes,
    open_engine,
    open_index,
    progress,
    require_extra,
    say,
)
from kvrag.config import DEFAULT_CONTEXT
from kvrag.errors import KvragError, StoreFullError
from kvrag.fingerprint import text_key

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex

_NAMED = 3  # documents named in a message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag warm`."""
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="files and folders with " + " ".join(documents.SUFFIXES)
    )
    add_engine_arguments(parser)
    parser.add_argument(
        "--chunk-tokens", type=int, default=256, metavar="N", help="maximum tokens per chunk (default: 256)"
    )
    parser.add_argument(
        "--chunk-overlap", type=int, default=0, metavar="N", help="overlap of adjacent chunks in tokens"
    )
    parser.add_argument(
        "--context-tokens",
        type=int,
        default=DEFAULT_CONTEXT,
        metavar="N",
        help="encode chunks with N preceding tokens as context, to resolve pronouns and references; 0 = alone "
        f"(default: {DEFAULT_CONTEXT})",
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="text field of the objects in .jsonl files"
    )
    parser.add_argument("--embedder", help="sentence-transformers model for retrieval (default: the one in kvrag[cli])")
    parser.add_argument(
        "--prune", action="store_true", help="drop documents whose files no longer exist in the folders in PATH"
    )


@dataclass(frozen=True)
class Plan:
    """Documents to encode with their chunks, and unreadable files with reasons."""

    chunks: dict[str, list[str]]
    unreadable: dict[str, str]
    tokens: int
    new_tokens: int


def run(args: argparse.Namespace) -> int:
    """Encode the chunks that the store lacks."""
    started = time.perf_counter()
    require_extra()
    documents.find(args.paths)  # report mistakes before loading the model
    config = {"context_tokens": args.context_tokens}
    with open_engine(args, **config) as engine, open_index(engine, args.namespace, args.embedder) as index:
        gone = find_gone(engine, index, args.paths, args.namespace)
        # first: otherwise a chunk moved to another file would temporarily belong to two documents
        dropped = drop(engine, index, gone, args.namespace) if args.prune else 0
        plan = make_plan(engine, args)
        for name, reason in plan.unreadable.items():
            say(f"skipped {name}: {reason}")
        if not plan.chunks:
            raise KvragError(f"no text to warm: none of {len(plan.unreadable)} files could be read")
        needed = plan.new_tokens * _bytes_per_token(engine, args.chunk_tokens)
        say(
            f"{len(plan.chunks)} documents, {plan.tokens} tokens, {plan.new_tokens} of them new: "
            f"needs {human_bytes(needed)} in {folder(engine).path}"
        )
        _check_room(engine, needed)
        try:
            result = warm(engine, index, plan, args.json, args.namespace)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; encoded chunks are kept: run the command again to resume") from None
        result |= {"gone": gone, "dropped": dropped}
        result |= {"store": str(folder(engine).path), "model": engine.model.name}
    result |= {"skipped_files": plan.unreadable, "seconds": time.perf_counter() - started}
    if args.json:
        print(json.dumps(result))
    else:
        for warning in result["warnings"]:
            say(warning)
        if gone:
            names = ", ".join(gone[:_NAMED]) + (f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else "")
            done = f"{dropped} chunks were dropped" if args.prune else "pass --prune to drop them"
            say(f"the files of {len(gone)} documents no longer exist ({names}): {done}")
        print(
            f"{result['chunks']} chunks: {result['new']} new, {result['reused']} reused; {result['tokens']} tokens and "
            f"{human_bytes(result['bytes'])} written in {result['seconds']:.1f} s"
        )
    return 0


def make_plan(engine: BlendEngine, args: argparse.Namespace) -> Plan:
    """Read and split all files without encoding."""
    encode = engine.model.tokenizer.encode
    split = documents.splitter(lambda text: len(encode(text)), args.chunk_tokens, args.chunk_overlap)
    paths = documents.find(args.paths)
    chunks: dict[str, list[str]] = {}
    unreadable: dict[str, str] = {}
    lengths: dict[str, int] = {}
    with progress("reading", args.json) as report:
        for number, path in enumerate(paths, 1):
            try:
                chunks[str(path)] = split(documents.read(path, args.text_field))
            except documents.UnreadableError as error:
                unreadable[str(path)] = str(error)
            else:
                for chunk in chunks[str(path)]:
                    ids = encode(chunk)
                    if len(ids) >= engine.config.min_run:
                        lengths[text_key(args.namespace, ids)] = len(ids)
            report(number, len(paths))
    stored = engine.store.look_up(list(lengths))
    new = sum(length for text, length in lengths.items() if not stored[text].variants)
    return Plan(chunks, unreadable, sum(lengths.values()), new)


def warm(engine: BlendEngine, index: ChunkIndex, plan: Plan, quiet: bool, namespace: str = "") -> dict[str, Any]:
    """Encode a plan's documents one by one; a document's old chunks are dropped once its new ones are stored."""
    totals: dict[str, Any] = dict.fromkeys(("chunks", "new", "reused", "skipped", "tokens", "bytes"), 0)
    short = indexed = 0
    with progress("encoding", quiet) as report:
        for name, chunks in plan.chunks.items():

            def moved(done: int, total: int, before: int = totals["tokens"]) -> None:
                report(before + done, plan.new_tokens)

            done = engine.warm(chunks, document=name, namespace=namespace, progress=moved)
            for field in totals:
                totals[field] += getattr(done, field)
            short += done.skipped
            indexed += index.add(chunks, document=name)
    warnings = []
    if short:
        warnings.append(
            f"{short} chunks have fewer than {engine.config.min_run} tokens: they can be retrieved but not reused"
        )
    return totals | {"files": len(plan.chunks), "indexed": indexed, "warnings": warnings}


def find_gone(engine: BlendEngine, index: ChunkIndex, paths: Sequence[str], namespace: str) -> list[str]:
    """Return the documents from the folders among these paths whose files no longer exist, sorted."""
    inside = tuple(os.path.join(Path(path).resolve(), "") for path in paths if Path(path).is_dir())
    known = {*index.documents(), *(name for prefix in inside for name in engine.documents(prefix, namespace=namespace))}
    return sorted(name for name in known if name.startswith(inside) and not os.path.lexists(name))


def drop(engine: BlendEngine, index: ChunkIndex, names: Sequence[str], namespace: str) -> int:
    """Drop documents; return the number of chunks that no other document has."""
    for name in names:
        index.remove(name)  # first, so that every retrievable chunk has its KV
    return sum(engine.forget(name, namespace=namespace) for name in names)


def _bytes_per_token(engine: BlendEngine, chunk_tokens: int) -> float:
    from kvrag.backend.transformers.loading import head_dim
    from kvrag.store.codec import share

    model = engine.model
    return model.bytes_per_token * share(engine.codec, chunk_tokens, head_dim(model.config), model.dtype)


def _check_room(engine: BlendEngine, needed: float) -> None:
    store = folder(engine)
    free = shutil.disk_usage(Path(store.path)).free
    if needed and free - needed < store.min_free_bytes:
        raise StoreFullError(
            f"{store.path} has {human_bytes(free)} free, but {human_bytes(needed)} are needed and "
            f"{human_bytes(store.min_free_bytes)} must stay free: free space, warm less, or choose another --store"
        )
