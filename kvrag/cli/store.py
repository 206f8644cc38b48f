"""`kvrag store`: look into a store, check it, clean it up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvrag.cli.common import add_engine_arguments, existing_store, folder, human_bytes, open_engine, progress, say

if TYPE_CHECKING:
    from kvrag.store import FileStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of `kvrag store`."""
    parser.add_argument(
        "action",
        choices=("stats", "check", "gc"),
        help="stats: what is in it; check: read everything, put damaged chunks aside; gc: delete what nothing needs",
    )
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if `check` found damage."""
    with _open(args) as store:
        if args.action == "stats":
            return _stats(store, args.json)
        return _check(store, args.json) if args.action == "check" else _gc(store, args.json)


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[FileStore]:
    """A store needs no model; only the default folder's name is the model's."""
    if args.store is None:
        with open_engine(args) as engine:
            yield folder(engine)
        return
    from kvrag.store import FileStore

    with closing(FileStore(existing_store(args.store))) as store:
        yield store


def _stats(store: FileStore, as_json: bool) -> int:
    stats = store.stats()
    if as_json:
        print(json.dumps(asdict(stats)))
    else:
        print(f"folder     {stats.path}\nmodel      {stats.model or '-'}\ncodec      {stats.codec}")
        print(f"chunks     {stats.chunks}")
        print(f"tokens     {stats.tokens}\nbytes      {stats.bytes} ({human_bytes(stats.bytes)})")
        print(f"documents  {stats.documents}\ndamaged    {stats.damaged} since it was created")
    return 0


def _check(store: FileStore, as_json: bool) -> int:
    with progress("checking", as_json) as report:
        sound, damaged, adopted = store.check(report)
    if as_json:
        print(json.dumps({"sound": sound, "damaged": damaged, "adopted": adopted}))
    else:
        print(f"{sound} chunks are sound, {adopted} of them were found without an entry; {damaged} damaged")
        if damaged:
            say("the damaged ones are put aside: they are encoded again when they are warmed")
    return 1 if damaged else 0


def _gc(store: FileStore, as_json: bool) -> int:
    chunks, files = store.gc()
    print(json.dumps({"chunks": chunks, "files": files}) if as_json else f"deleted {chunks} chunks, {files} files")
    return 0
