"""`kvrag store`: show, check, clean up or copy a store, and set budgets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from math import inf
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
from kvrag.config import CODECS
from kvrag.errors import SettingError

if TYPE_CHECKING:
    from kvrag.store.copy import AnyStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag store`."""
    parser.add_argument(
        "action",
        choices=("stats", "check", "gc", "copy", "budget"),
        help="stats: show contents; check: verify chunks, quarantine damaged ones; gc: delete unused chunks and files; "
        "copy: copy what TARGET lacks from SOURCE; budget: set the size beyond which a namespace's chunks are evicted",
    )
    parser.add_argument("stores", nargs="*", metavar="SOURCE TARGET", help="copy: folders or URLs")
    parser.add_argument("--to-codec", choices=CODECS, help="copy: convert chunks in native precision")
    parser.add_argument(
        "--unused-days",
        type=at_least(0, float),
        default=7.0,
        metavar="N",
        help="gc also deletes texts of requests unused for N days (default: 7)",
    )
    parser.add_argument("--gib", type=_gib, metavar="N", help="budget: size of --namespace in GiB, or none")
    add_engine_arguments(parser)


def _gib(text: str) -> float:
    """Return a size in GiB; infinity = none."""
    return inf if text == "none" else float(at_least(0.001, float)(text))


def run(args: argparse.Namespace) -> int:
    """Run the action; return 1 if `check` found damage."""
    if args.action == "copy":
        return _copy(args)
    if args.stores:
        raise SettingError(f"name the store with --store {args.stores[0]}")
    if args.action == "budget" and args.gib is None:
        raise SettingError("budget needs --gib N, or --gib none; `kvrag store stats` shows the budgets")
    with _open(args) as store:
        if args.action == "stats":
            return _stats(store, args.json)
        if args.action == "budget":
            return _budget(store, args.namespace, args.gib, args.json)
        return _check(store, args.json) if args.action == "check" else _gc(store, args.unused_days, args.json)


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[AnyStore]:
    """Open a store without a model; only the default folder depends on the model's name."""
    if args.store is None:
        with open_engine(args, is_warmed=True) as engine:
            yield folder(engine)
        return
    with closing(_connect(existing_store(args.store), args.store_cache)) as store:
        yield store


def _connect(name: str, cache: str | None, keep_copies: bool = True) -> AnyStore:
    from kvrag.store import FileStore, SharedStore, is_shared

    return SharedStore(name, cache, keep_copies=keep_copies) if is_shared(name) else FileStore(name)


def _copy(args: argparse.Namespace) -> int:
    if len(args.stores) != 2:
        raise SettingError("copy needs two stores: kvrag store copy SOURCE TARGET")
    from kvrag.control.calibrate import FILE
    from kvrag.store.copy import copy_store

    source, target = args.stores
    with (
        closing(_connect(existing_store(source), args.store_cache, False)) as source_store,
        closing(_connect(target, args.store_cache, False)) as target_store,
    ):
        with progress("copying", args.json) as report:
            copied = copy_store(source_store, target_store, args.to_codec, report)
        calibration = source_store.read_text(FILE)
        if calibration and args.to_codec is None and target_store.read_text(FILE) is None:
            target_store.change_text(FILE, lambda _: calibration)
    if args.json:
        print(json.dumps(asdict(copied)))
    else:
        print(
            f"{copied.copied} chunks copied ({human_bytes(copied.bytes)}), {copied.present} were there; "
            f"{copied.documents} documents"
        )
        if copied.documents:
            say(
                "the index for `kvrag ask` and the server's corpus is not copied: "
                f"run `kvrag warm DOCS --store {target}`, which encodes nothing"
            )
        if copied.unreadable:
            say(
                f"{copied.unreadable} chunks could not be read and were left out: run `kvrag store check` on the source"
            )
    return 1 if copied.unreadable else 0


def _stats(store: AnyStore, as_json: bool) -> int:
    from kvrag.store import SharedStore

    stats = store.stats()
    copies = store.local_stats() if isinstance(store, SharedStore) else None
    if as_json:
        names = ("path", "chunks", "bytes")
        local = {} if copies is None else {"local": {name: getattr(copies, name) for name in names}}
        print(json.dumps(asdict(stats) | local))
        return 0
    print(f"{'folder' if copies is None else 'shared'}     {stats.path}")
    print(f"model      {stats.model or '-'}")
    print(f"codec      {stats.codec}")
    print(f"chunks     {stats.chunks}")
    print(f"tokens     {stats.tokens}")
    print(f"bytes      {stats.bytes} ({human_bytes(stats.bytes)})")
    print(f"documents  {stats.documents}")
    print(f"damaged    {stats.damaged} since it was created")
    if copies is not None:
        print(f"copies     {copies.chunks} chunks ({human_bytes(copies.bytes)}) in {copies.path}")
    if any(part.namespace or part.max_bytes for part in stats.namespaces):
        width = max(len("namespace"), *(len(part.namespace) for part in stats.namespaces), len("(default)"))
        print(
            f"\n{'namespace':{width}}  {'texts':>8}  {'chunks':>8}  {'tokens':>10}  {'bytes':>10}  {'budget':>10}"
            f"  {'documents':>9}"
        )
        for part in stats.namespaces:
            print(
                f"{part.namespace or '(default)':{width}}  {part.texts:>8}  {part.chunks:>8}  {part.tokens:>10}"
                f"  {human_bytes(part.bytes):>10}  {'-' if part.max_bytes is None else human_bytes(part.max_bytes):>10}"
                f"  {part.documents:>9}"
            )
    return 0


def _check(store: AnyStore, as_json: bool) -> int:
    with progress("checking", as_json) as report:
        result = store.check(report)
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        print(f"{result.sound} chunks are sound, {result.damaged} damaged")
        if result.adopted:
            say(f"{result.adopted} of the sound chunks were missing from the store's index and were added to it")
        if result.repaired:
            say(f"the rows of {result.repaired} chunks did not match their files and were repaired")
        if result.damaged:
            say("damaged chunks were moved to quarantine: warm their documents again")
        if result.unreadable:
            say(f"{result.unreadable} chunks could not be read and were kept: check again later")
    return 1 if result.damaged or result.unreadable else 0


def _budget(store: AnyStore, namespace: str, gib: float, as_json: bool) -> int:
    max_bytes = None if gib == inf else int(gib * (1 << 30))
    evicted = store.set_budget(namespace, max_bytes)
    if as_json:
        print(json.dumps({"namespace": namespace, "max_bytes": max_bytes, "evicted": evicted}))
    else:
        print(f"{namespace or '(default)'}: {'no budget' if max_bytes is None else human_bytes(max_bytes)}")
        if evicted:
            say(f"evicted {evicted} chunks: prompts compute them, until there is room and their documents are warmed")
    return 0


def _gc(store: AnyStore, unused_days: float, as_json: bool) -> int:
    chunks, files = store.gc(unused_days)
    print(json.dumps({"chunks": chunks, "files": files}) if as_json else f"deleted {chunks} chunks, {files} files")
    return 0
