"""Damaged records of a shared store: prompts are answered, and every error is a KvragError.

Each case writes the records of a store to a shared store, with one record damaged. A machine that
used the store before, or a new one, asks, checks and collects. A damaged chunk must not raise an error; a damaged log
may.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from places import names_in, run_s3
from records import drop_copies

from kvrag.errors import KvragError
from kvrag.store import SharedStore
from kvrag.store.chunkfile import PackedChunk
from kvrag.store.shared import connect
from torture import tiny
from torture.campaign import Campaign
from torture.damage import Layers, only_what_was_stored

_DOCUMENTS = {"a": [0, 1, 2], "b": [4, 5, 2]}
_PROMPT = [1, 4, 2]


def run(campaign: Campaign) -> None:
    """Damage one record per case."""
    with run_s3() as bucket:
        place = _Place(bucket.url)
        known = campaign.folder / "known"
        made = place.make(known)
        for number in campaign.numbers():
            with campaign.case(number):
                _case(campaign, campaign.random(number), place, known, *made)


class _Place:
    """All records of one shared store."""

    def __init__(self, url: str) -> None:
        self.url = url.replace("PLACE", "torture")
        self.remote: Any = connect(self.url)

    def make(self, known: Path) -> tuple[dict[str, bytes], Layers]:
        """Fill a store; return its records and layers. `known` becomes the local folder of a machine that used it."""
        truth: Layers = {}
        with tiny.engine(self.url, cache=known) as engine:
            store: Any = engine.store
            for name, numbers in _DOCUMENTS.items():
                engine.warm(map(tiny.text, numbers), document=name)
            store.count({"evidence": 1})
            store._log.compact()
            engine.warm([tiny.text(6)], document="c")
            for keys in store.documents().values():
                for key in keys:
                    reader = store.open(key)
                    truth |= {(key, number): reader.layer(number) for number in range(reader.num_layers)}
                    reader.close()
            drop_copies(store)
        names = names_in(self.remote, "")
        contents = self.remote.read(names)
        assert None not in contents
        return dict(zip(names, contents, strict=True)), truth

    def fill(self, records: dict[str, bytes]) -> None:
        """Replace all records by these."""
        self.remote.delete(names_in(self.remote, ""))
        for name, record in records.items():
            self.remote.write(name, record)


def _case(
    campaign: Campaign, rng: random.Random, place: _Place, known: Path, intact: dict[str, bytes], truth: Layers
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
        assert found.damaged == found.unreadable == 0, f"a second check still finds {found}"
        engine.warm(map(tiny.text, _DOCUMENTS["a"]), document="a")
        tiny.check_answer(engine, tiny.prompt(_PROMPT))


def _damage(rng: random.Random, records: dict[str, bytes], name: str) -> str:
    """Damage one record; return a description."""
    how = rng.choice([*_WAYS, "deleted", "swapped"])
    if how == "swapped":
        other = rng.choice([each for each in sorted(records) if each[:7] == name[:7]])  # chunks among themselves
        records[name], records[other] = records[other], records[name]
    elif how == "deleted":
        del records[name]
    else:
        records[name] = _WAYS[how](rng, records[name])
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
