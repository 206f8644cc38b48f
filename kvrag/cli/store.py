"""`kvrag store`: show, check or clean up a store."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvrag.cli.common import (
    add_engine_arguments,
    at_least,
    existing_store,
    folder,
    human_bytes,
    open_engine,
    progress,
    say,
)

if TYPE_CHECKING:
    from kvrag.store import FileStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag store`."""
    parser.add_argument(
        "action",
        choices=("stats", "check", "gc"),
        help="stats: show contents; check: verify chunks, quarantine damaged ones; gc: delete unused chunks and files",
    )
    parser.add_argument(
        "--unused-days",
        type=at_least(0, float),
        default=7.0,
        metavar="N",
        help="gc also deletes texts of requests unused for N days (default: 7)",
    )
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the action; return 1 if `check` found damage."""
    with _open(args) as store:
        if args.action == "stats":
            return _stats(store, args.json)
        return _check(store, args.json) if args.action == "check" else _gc(store, args.unused_days, args.json)


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[FileStore]:
    """Open a store without a model; only the default folder depends on the model's name."""
    if args.store is None:
        with open_engine(args, is_warmed=True) as engine:
            yield folder(engine)
        return
    path = existing_store(args.store)
    from kvrag.store import FileStore

    with closing(FileStore(path)) as store:
        yield store


def _stats(store: FileStore, as_json: bool) -> int:
    stats = store.stats()
    if as_json:
        print(json.dumps(asdict(stats)))
        return 0
    print(f"folder     {stats.path}\nmodel      {stats.model or '-'}\ncodec      {stats.codec}")
    print(f"chunks     {stats.chunks}")
    print(f"tokens     {stats.tokens}\nbytes      {stats.bytes} ({human_bytes(stats.bytes)})")
    print(f"documents  {stats.documents}\ndamaged    {stats.damaged} since it was created")
    if any(part.namespace for part in stats.namespaces):
        width = max(len("namespace"), *(len(part.namespace) for part in stats.namespaces), len("(default)"))
        print(f"\n{'namespace':{width}}  {'texts':>8}  {'chunks':>8}  {'tokens':>10}  {'bytes':>10}  {'documents':>9}")
        for part in stats.namespaces:
            print(
                f"{part.namespace or '(default)':{width}}  {part.texts:>8}  {part.chunks:>8}  {part.tokens:>10}"
                f"  {human_bytes(part.bytes):>10}  {part.documents:>9}"
            )
    return 0


def _check(store: FileStore, as_json: bool) -> int:
    with progress("checking", as_json) as report:
        found = store.check(report)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        print(f"{found.sound} chunks are sound, {found.damaged} damaged")
        if found.adopted:
            say(f"{found.adopted} of the sound chunks were missing from the store's index and were added to it")
        if found.repaired:
            say(f"the rows of {found.repaired} chunks did not match their files and were repaired")
        if found.damaged:
            say("damaged chunks were moved to quarantine: warm their documents again")
        if found.unreadable:
            say(f"{found.unreadable} chunks could not be read and were kept: check again later")
    return 1 if found.damaged or found.unreadable else 0


def _gc(store: FileStore, unused_days: float, as_json: bool) -> int:
    chunks, files = store.gc(unused_days)
    print(json.dumps({"chunks": chunks, "files": files}) if as_json else f"deleted {chunks} chunks, {files} files")
    return 0
