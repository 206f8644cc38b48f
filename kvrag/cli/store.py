"""`kvrag store`: show, check, clean up or copy a store, and set budgets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Any

from kvrag.cli.common import (
    add_engine_arguments,
    add_number,
    at_least,
    existing_store,
    human_bytes,
    open_engine,
    progress,
)
from kvrag.config import CODECS
from kvrag.errors import SettingError

if TYPE_CHECKING:
    from kvrag.store import KVStore

Result = tuple[dict[str, Any], str, bool]
"""The result as JSON and as text, and whether all is well."""


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
    add_number(parser, "--unused-days", 7.0, "gc also deletes texts of requests unused for N days")
    parser.add_argument("--gib", type=_gib, metavar="N", help="budget: size of --namespace in GiB, or none")
    add_engine_arguments(parser)


def _gib(text: str) -> float:
    """Return a size in GiB; infinity = none."""
    return inf if text == "none" else float(at_least(0.001, float)(text))


def run(args: argparse.Namespace) -> int:
    """Run the action; return 1 if chunks are damaged or cannot be read."""
    if args.action == "copy":
        result, text, is_well = _copy(args)
    else:
        if args.stores:
            raise SettingError(f"name the store with --store {args.stores[0]}")
        if args.action == "budget" and args.gib is None:
            raise SettingError("budget needs --gib N, or --gib none; `kvrag store stats` shows the budgets")
        with _open(args) as store:
            result, text, is_well = _ACTIONS[args.action](store, args)
    print(json.dumps(result) if args.json else text)
    return 0 if is_well else 1


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[KVStore]:
    """Open a store without a model; only the default folder depends on the model's name."""
    if args.store is None:
        with open_engine(args, is_warmed=True) as engine:
            yield engine.store
        return
    with closing(_connect(existing_store(args.store), args.store_cache)) as store:
        yield store


def _connect(name: str, cache: str | None, keep_copies: bool = True) -> KVStore:
    from kvrag.store import FileStore, SharedStore, is_shared

    return SharedStore(name, cache, keep_copies=keep_copies) if is_shared(name) else FileStore(name)


def _copy(args: argparse.Namespace) -> Result:
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
        if calibration and args.to_codec is None and not target_store.read_text(FILE):
            target_store.change_text(FILE, lambda _: calibration)
    size = human_bytes(copied.bytes)
    lines = [f"{copied.copied} chunks copied ({size}), {copied.present} were there; {copied.documents} documents"]
    if copied.documents:
        lines.append(
            "the index for `kvrag ask` and the server's corpus is not copied: "
            f"run `kvrag warm DOCS --store {target}`, which encodes nothing"
        )
    if copied.unreadable:
        lines.append(f"{copied.unreadable} chunks could not be read and were left out: run `kvrag store check`")
    return asdict(copied), "\n".join(lines), not copied.unreadable


def _stats(store: KVStore, args: argparse.Namespace) -> Result:
    from kvrag.store import SharedStore

    stats = store.stats()
    result = asdict(stats)
    lines = [
        f"{'shared' if isinstance(store, SharedStore) else 'folder'}     {stats.path}",
        f"model      {stats.model or '-'}",
        f"codec      {stats.codec}",
        f"chunks     {stats.chunks}",
        f"tokens     {stats.tokens}",
        f"bytes      {stats.bytes} ({human_bytes(stats.bytes)})",
        f"documents  {stats.documents}",
        f"damaged    {stats.damaged} since it was created",
    ]
    if isinstance(store, SharedStore):
        copies = store.local_stats()
        result["local"] = {"path": copies.path, "chunks": copies.chunks, "bytes": copies.bytes}
        lines.append(f"copies     {copies.chunks} chunks ({human_bytes(copies.bytes)}) in {copies.path}")
    if any(part.namespace or part.max_bytes for part in stats.namespaces):
        heads = ("namespace", "texts", "chunks", "tokens", "bytes", "budget", "documents")
        rows: list[tuple[str, ...]] = [heads]
        for part in stats.namespaces:
            budget = "-" if part.max_bytes is None else human_bytes(part.max_bytes)
            counts = part.texts, part.chunks, part.tokens, human_bytes(part.bytes), budget, part.documents
            rows.append((part.namespace or "(default)", *map(str, counts)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append("")
        for name, *values in rows:
            padded = (f"{value:>{width}}" for value, width in zip(values, widths[1:], strict=True))
            lines.append("  ".join([f"{name:{widths[0]}}", *padded]))
    return result, "\n".join(lines), True


def _check(store: KVStore, args: argparse.Namespace) -> Result:
    with progress("checking", args.json) as report:
        result = store.check(report)
    lines = [f"{result.sound} chunks are sound, {result.damaged} damaged"]
    if result.adopted:
        lines.append(f"{result.adopted} of the sound chunks were missing from the store's index and were added to it")
    if result.repaired:
        lines.append(f"the rows of {result.repaired} chunks did not match their files and were repaired")
    if result.damaged:
        lines.append("damaged chunks were moved to quarantine: warm their documents again")
    if result.unreadable:
        lines.append(f"{result.unreadable} chunks could not be read and were kept: check again later")
    return asdict(result), "\n".join(lines), not (result.damaged or result.unreadable)


def _budget(store: KVStore, args: argparse.Namespace) -> Result:
    max_bytes = None if args.gib == inf else int(args.gib * (1 << 30))
    evicted = store.set_budget(args.namespace, max_bytes)
    text = f"{args.namespace or '(default)'}: {'no budget' if max_bytes is None else human_bytes(max_bytes)}"
    if evicted:
        text += f"\nevicted {evicted} chunks: prompts compute them, until there is room and their documents are warmed"
    return {"namespace": args.namespace, "max_bytes": max_bytes, "evicted": evicted}, text, True


def _gc(store: KVStore, args: argparse.Namespace) -> Result:
    chunks, files = store.gc(args.unused_days)
    return {"chunks": chunks, "files": files}, f"deleted {chunks} chunks, {files} files", True


_ACTIONS = {"stats": _stats, "check": _check, "gc": _gc, "budget": _budget}
