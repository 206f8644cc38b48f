"""`kvrag store`: show, check or clean up a store, and set budgets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Any

from kvrag.cli.common import add_engine_arguments, add_number, at_least, existing_store, open_engine, progress
from kvrag.errors import SettingError
from kvrag.words import counted, human_bytes

if TYPE_CHECKING:
    from kvrag.store import KVStore

Result = tuple[dict[str, Any], str, bool]
"""The result as JSON and as text, and whether all is well."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag store`."""
    parser.add_argument(
        "action",
        choices=tuple(_ACTIONS),
        help="stats: show contents; check: verify chunks, delete damaged ones; gc: delete unused chunks and files; "
        "budget: set the size beyond which a namespace's chunks are evicted",
    )
    add_number(parser, "--unused-days", 7.0, "gc also deletes texts of requests unused for N days")
    parser.add_argument("--gib", type=_gib, metavar="N", help="budget: size of --namespace in GiB, or none")
    add_engine_arguments(parser)


def _gib(text: str) -> float:
    """Return a size in GiB; infinity = none."""
    return inf if text == "none" else float(at_least(0.001, float)(text))


def run(args: argparse.Namespace) -> int:
    """Run the action; return 1 if chunks are damaged or cannot be read."""
    if args.action == "budget" and args.gib is None:
        raise SettingError("budget needs --gib N, or --gib none; `kvrag store stats` shows the budgets")
    with _open(args) as store:
        result, text, is_well = _ACTIONS[args.action](store, args)
    print(json.dumps(result, default=str) if args.json else text)  # paths as texts
    return 0 if is_well else 1


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[KVStore]:
    """Open a store without a model; only the default folder depends on the model's name."""
    if args.store is None:
        with open_engine(args, is_warmed=True) as engine:
            yield engine.store
        return
    name = existing_store(args.store)  # before the slow imports
    from kvrag.store import open_store

    with closing(open_store(name, args.store_cache)) as store:
        yield store


def _stats(store: KVStore, args: argparse.Namespace) -> Result:
    from kvrag.store import SharedStore

    stats = store.stats()
    result = asdict(stats)
    lines = [f"{name:10} {value}" for name, value in result.items() if name != "namespaces"]
    if isinstance(store, SharedStore):
        copies = store.local_stats()
        result["local"] = {"path": copies.path, "chunks": copies.chunks, "bytes": copies.bytes}
        lines.append(f"copies     {counted(copies.chunks, 'chunk')} ({human_bytes(copies.bytes)}) in {copies.path}")
    if any(part.namespace or part.max_bytes for part in stats.namespaces):
        for part in stats.namespaces:
            used = (
                f"{counted(part.chunks, 'chunk')} of {counted(part.documents, 'document')}, {human_bytes(part.bytes)}"
            )
            budget = human_bytes(part.max_bytes) if part.max_bytes else "no budget"
            lines.append(f"{part.namespace or '(default)'}: {used}, {budget}")
    return result, "\n".join(lines), True


def _check(store: KVStore, args: argparse.Namespace) -> Result:
    with progress("checking", args.json) as report:
        result = store.check(report)
    lines = [f"{counted(result.sound, 'sound chunk')}, {result.damaged} damaged"]
    if result.damaged:
        lines.append("damaged chunks were deleted: warm their documents again")
    if result.unreadable:
        lines.append(f"{counted(result.unreadable, 'chunk')} could not be read: kept, check again later")
    return asdict(result), "\n".join(lines), not (result.damaged or result.unreadable)


def _budget(store: KVStore, args: argparse.Namespace) -> Result:
    max_bytes = None if args.gib == inf else int(args.gib * (1 << 30))
    evicted = store.set_budget(args.namespace, max_bytes)
    text = f"{args.namespace or '(default)'}: {'no budget' if max_bytes is None else human_bytes(max_bytes)}"
    if evicted:
        text += (
            f"\nevicted {counted(evicted, 'chunk')}, which prompts compute until there is room and a document is warmed"
        )
    return {"namespace": args.namespace, "max_bytes": max_bytes, "evicted": evicted}, text, True


def _gc(store: KVStore, args: argparse.Namespace) -> Result:
    chunks, files = store.gc(args.unused_days)
    return {"chunks": chunks, "files": files}, f"deleted {counted(chunks, 'chunk')}, {counted(files, 'file')}", True


_ACTIONS = {"stats": _stats, "check": _check, "gc": _gc, "budget": _budget}
