"""Damaged records of a shared store: prompts are answered, and every error is a KvragError.

Each case writes the records of a store to a shared store, with one record or one of its fields damaged. A machine that
used the store before, or a new one, asks, checks and collects. A damaged chunk must not raise an error; a damaged log
may.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from places import run_s3, run_valkey
from records import drop_copies

from kvrag.errors import KvragError
from kvrag.store import SharedStore
from kvrag.store.chunkfile import PackedChunk
from kvrag.store.remote import Remote
from kvrag.store.urls import connect
from torture import tiny
from torture.campaign import Campaign
from torture.damage import Layers, only_what_was_stored

_DOCUMENTS = {"a": [0, 1, 2], "b": [4, 5, 2]}
_PROMPT = [1, 4, 2]

Record = bytes | dict[bytes, bytes]
"""A small object or a chunk of an object store; the fields of a chunk in Valkey."""


def run(campaign: Campaign) -> None:
    """Damage one record per case, in Valkey and S3 by turns."""
    with ExitStack() as stack:
        places = [_Place(stack.enter_context(run_valkey()).url), _Place(stack.enter_context(run_s3()).url)]
        made = [place.make(campaign.folder / str(number)) for number, place in enumerate(places)]
        for number in campaign.numbers():
            with campaign.case(number):
                which = number % len(places)
                _case(campaign, campaign.random(number), places[which], campaign.folder / str(which), *made[which])


class _Place:
    """All records of one shared store."""

    def __init__(self, url: str) -> None:
        self.url = url.replace("PLACE", "torture")
        self.remote: Any = connect(self.url)

    def make(self, known: Path) -> tuple[dict[str, Record], Layers]:
        """Fill a store; return its records and layers. `known` becomes the local folder of a machine that used it."""
        truth: Layers = {}
        with tiny.engine(self.url, cache=known) as engine:
            store: Any = engine.store
            for name, numbers in _DOCUMENTS.items():
                engine.warm(map(tiny.text, numbers), document=name)
            store.change_text("speed.json", lambda _: "{}")
            store._log.trim()
            engine.warm([tiny.text(6)], document="c")
            for keys in store.documents().values():
                for key in keys:
                    reader = store.open(key)
                    truth |= {(key, number): reader.layer(number) for number in range(reader.num_layers)}
                    reader.close()
            drop_copies(store)
        names = self.remote.names("")
        return {name: self._read(name) for name in names}, truth

    def _read(self, name: str) -> Record:
        remote: Any = self.remote
        if name.startswith("chunks/") and hasattr(remote, "_client"):
            return dict(remote._client.hgetall(remote._key(name)))
        (content,) = remote.read([name])
        assert content is not None
        return bytes(content)

    def fill(self, records: dict[str, Record]) -> None:
        """Replace all records by these."""
        remote: Remote = self.remote
        remote.delete(remote.names(""))
        for name, record in records.items():
            if isinstance(record, bytes):
                remote.write(name, record)
            elif record:
                self.remote._client.hset(self.remote._key(name), mapping=record)


def _case(
    campaign: Campaign, rng: random.Random, place: _Place, known: Path, intact: dict[str, Record], truth: Layers
) -> None:
    records, cache = dict(intact), campaign.folder / "cache"
    chunks = [name for name in records if name.startswith("chunks/")]
    name = rng.choice(chunks) if rng.random() < 0.5 else rng.choice(sorted(records))
    how = _damage(rng, records, name)
    place.fill(records)
    shutil.rmtree(cache, ignore_errors=True)
    if is_known := rng.random() < 0.7:
        shutil.copytree(known, cache)
    try:
        with only_what_was_stored(truth, PackedChunk, SharedStore):
            _use(place, cache)
        outcome = "answered"
    except KvragError as error:
        outcome = type(error).__name__
        if name in chunks:
            raise AssertionError(f"{how} of {name}: {outcome}: {error}") from error
    except Exception as error:
        who = "a machine that knows the store" if is_known else "a new machine"
        raise AssertionError(f"{who}, {how} of {name}: {type(error).__name__}: {error}") from error
    campaign.kinds[f"{name.partition('/')[0]}, {how}: {outcome}"] += 1


def _use(place: _Place, cache: Path) -> None:
    """Ask, check, collect and ask again; the store must be sound afterwards."""
    with tiny.engine(place.url, cache=cache) as engine:
        store: Any = engine.store
        for _ in range(2):
            tiny.check_answer(engine, tiny.prompt(_PROMPT))
            tiny.answer(engine, tiny.prompt(_PROMPT), ratio=0.0, policy="none")  # reused layers are compared
            store.check()
            store.gc()
        found = store.check()
        assert found.damaged == found.repaired == found.unreadable == 0, f"a second check still finds {found}"
        engine.warm(map(tiny.text, _DOCUMENTS["a"]), document="a")
        tiny.check_answer(engine, tiny.prompt(_PROMPT))


def _damage(rng: random.Random, records: dict[str, Record], name: str) -> str:
    """Damage one record or one of its fields; return a description."""
    record = records[name]
    how = rng.choice([*_WAYS, "deleted", "swapped", "another type"])
    if how == "swapped":
        other = rng.choice([each for each in sorted(records) if each[:7] == name[:7]])  # chunks among themselves
        records[name], records[other] = records[other], record
    elif how == "another type":
        has_types = any(isinstance(each, dict) for each in records.values())  # objects have none
        records[name] = {b"field": b"text"} if has_types and isinstance(record, bytes) else b""
    elif isinstance(record, dict):
        field = rng.choice([*sorted(record), b"created", b"size", b"starts"])
        damaged = {field: _WAYS[how](rng, record[field])} if how in _WAYS else {}
        records[name] = {key: each for key, each in record.items() if key != field} | damaged
        how = f"{field.decode() if field.isalpha() else 'layer'} {how}"
    elif how == "deleted":
        del records[name]
    else:
        records[name] = _WAYS[how](rng, record)
    return how


def _flip(rng: random.Random, content: bytes) -> bytes:
    flipped = bytearray(content or b"0")
    place = rng.randrange(8 * min(len(flipped), rng.choice([40, len(flipped)])))  # headers are short
    flipped[place // 8] ^= 1 << place % 8
    return bytes(flipped)


_WAYS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "flipped": _flip,
    "truncated": lambda rng, content: content[: rng.randrange(len(content) + 1)],
    "extended": lambda rng, content: content + rng.randbytes(rng.choice([1, 100])),
    "emptied": lambda rng, content: b"",
    "overwritten": lambda rng, content: rng.choice(_OTHERS),
}
_OTHERS = [b"\xff\xfe", b"x", b"-1", b"9" * 25, b"9" * 5000, b"[" * 100_000, b'{"digest": 1}', b"1,x", b"0,0"]
