"""The catalog has the store's texts, despite other threads and processes."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blending import num_texts

from kvrag.index import catalog as catalog_module
from kvrag.index.catalog import Catalog
from kvrag.index.match import match
from kvrag.index.segment import Segment, join
from kvrag.store import FileStore
from kvrag.store.base import MANIFEST
from kvrag.store.manifest import Manifest, ManifestRow
from kvrag.store.values import Entry
from kvrag.types import Run

MIN_RUN = 16


class Store:
    """The part of a store that a catalog uses; processes that share it share the object."""

    def __init__(self) -> None:
        self.texts: dict[int, Entry] = {}
        self.removed = 0
        self.number = 0
        self.read = 0  # entries given out

    def add(self, ids: Sequence[int], namespace: str = "") -> str:
        self.number += 1
        text = f"{abs(hash((namespace, tuple(ids)))):032x}"
        self.texts[self.number] = Entry(self.number, text, namespace, np.asarray(ids, np.uint32))
        return text

    def remove(self, text: str) -> None:
        for number in [number for number, entry in self.texts.items() if entry.text_key == text]:
            del self.texts[number]
            self.removed += 1

    def entries(self, after: int) -> Iterator[Entry]:
        for number in sorted(number for number in self.texts if number > after):
            if number in self.texts:
                self.read += 1
                yield self.texts[number]

    def numbers(self) -> Any:
        return np.array(list(self.texts), np.int64)

    def removals(self) -> int:
        return self.removed


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


def _text(rng: random.Random, length: int = 100) -> list[int]:
    return [rng.randrange(30000) for _ in range(length)]


def _match(catalog: Catalog, ids: Any, min_run: int, namespace: str = "") -> list[Run]:
    """Match as a prompt does."""
    catalog.update()
    return match(catalog._snapshot.segments, ids, min_run, namespace)


def _check(catalog: Catalog, present: dict[str, list[int]], absent: dict[str, list[int]]) -> None:
    for text, ids in present.items():
        assert _match(catalog, ids, MIN_RUN) == [Run(0, len(ids), text, 0)]
        assert [entry.ids.tolist() for entry in catalog._texts([text])] == [ids]
    for text, ids in absent.items():
        assert _match(catalog, ids, MIN_RUN) == []
        assert list(catalog._texts([text])) == []
    assert num_texts(catalog) == len(present)


def _fill(store: Store, rng: random.Random, count: int = 60) -> dict[str, list[int]]:
    texts = [_text(rng, rng.randrange(MIN_RUN, 150)) for _ in range(count)]
    return {store.add(ids): ids for ids in texts}


@pytest.mark.parametrize("largest", [2000, 1 << 23])
def test_additions_and_removals_are_seen_at_the_next_match(
    largest: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "_LARGEST", largest)
    store = Store()
    present, absent = _fill(store, rng), {}
    catalog, other = Catalog(store), Catalog(store)
    for _ in range(12):
        present |= _fill(store, rng, 10)
        for text in rng.sample(list(present), 6):
            absent[text] = present.pop(text)
            store.remove(text)
        for text in rng.sample(list(absent), 2):
            present[text] = absent.pop(text)
            assert store.add(present[text]) == text
        for one in (catalog, other):
            _check(one, present, absent)
    _check(Catalog(store), present, absent)


def test_each_text_is_read_once(rng: random.Random) -> None:
    store = Store()
    present = _fill(store, rng)
    catalog = Catalog(store)
    for text in rng.sample(list(present), 5):
        present.pop(text)
        store.remove(text)
    store.read = 0
    _check(catalog, present, {})
    assert store.read == 0
    present |= _fill(store, rng, 3)
    _check(catalog, present, {})
    assert store.read == 3


def test_there_are_few_segments_without_many_dead(rng: random.Random) -> None:
    store, present = Store(), dict[str, list[int]]()
    catalog = Catalog(store)
    for _ in range(60):
        present |= _fill(store, rng, 3)
        if len(present) > 30:
            for text in rng.sample(list(present), 5):
                present.pop(text)
                store.remove(text)
        catalog.update()
    segments = catalog._snapshot.segments
    assert len(segments) < 8
    assert sum(map(len, segments)) <= 2 * len(present)
    for text in present:
        store.remove(text)
    catalog.update()
    assert catalog._snapshot.segments == ()


def test_namespaces_share_nothing(rng: random.Random) -> None:
    store, ids = Store(), _text(rng)
    ours, theirs = store.add(ids, "ours"), store.add(ids, "theirs")
    anonymous = store.add(_text(rng))
    assert ours != theirs
    catalog = Catalog(store)
    assert [run.key for run in _match(catalog, ids, MIN_RUN, "ours")] == [ours]
    assert [run.key for run in _match(catalog, ids, MIN_RUN, "theirs")] == [theirs]
    assert _match(catalog, ids, MIN_RUN) == []
    assert _match(catalog, next(catalog._texts([anonymous])).ids, MIN_RUN, "ours") == []
    for _ in range(100):  # more than an anchor has candidates
        store.add([*ids, *_text(rng, 20)], "theirs")
    assert [run.key for run in _match(catalog, ids, MIN_RUN, "ours")] == [ours]
    segment = Segment.of([*store.entries(0)])
    hashes = segment.postings >> np.uint64(32)
    addresses = (segment.postings & np.uint64(0xFFFFFFFF)).astype(np.int64)
    spaces = segment.spaces[np.searchsorted(segment.starts, addresses, "right") - 1]
    by_space = [set(hashes[spaces == number].tolist()) for number in range(len(segment.namespaces))]
    assert not by_space[1] & by_space[2]


def test_removed_texts_are_reported_once(rng: random.Random) -> None:
    """By their next look, whoever removed them."""
    store = Store()
    text, other = [*_fill(store, rng)][:2]
    catalog = Catalog(store)
    reported = catalog.removed = deque()
    store.remove(text)
    catalog.update()
    catalog.update()
    assert [entry.text_key for entry in reported] == [text]
    _, removed = catalog.removing(lambda: store.remove(other))
    assert [entry.text_key for entry in removed] == [other]
    assert [entry.text_key for entry in reported] == [text, other]


def test_removed_texts_that_nobody_asked_for_are_freed(rng: random.Random) -> None:
    store = Store()
    texts = _fill(store, rng)
    catalog = Catalog(store)
    (segment,) = catalog._snapshot.segments
    ids = weakref.ref(segment.ids)
    del segment
    for text in texts:
        store.remove(text)
    catalog.update()
    gc.collect()
    assert ids() is None


def test_another_manifest_in_the_same_place_is_noticed(rng: random.Random) -> None:
    """All its texts have new numbers."""
    store = Store()
    before = _fill(store, rng)
    catalog = Catalog(store)
    kept = rng.sample(list(before), 5)
    store.texts, store.removed = {}, 10**6
    for text in kept:
        store.add(before[text])
    catalog.update()
    _check(catalog, {text: before[text] for text in kept}, {t: ids for t, ids in before.items() if t not in kept})


def test_prompts_are_matched_while_others_write(rng: random.Random) -> None:
    store = Store()
    present = _fill(store, rng, 20)
    catalogs, errors, stop = [Catalog(store), Catalog(store)], [], threading.Event()

    def ask(catalog: Catalog, seed: int) -> None:
        mine = random.Random(seed)
        while not stop.is_set():
            text = mine.choice(list(present))
            if [run.key for run in _match(catalog, present[text], MIN_RUN)] != [text]:
                errors.append(text)

    threads = [threading.Thread(target=ask, args=(catalogs[i % 2], i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        more = _fill(store, rng, 20)
        for catalog in catalogs:
            catalog.refresh()
        for text in rng.sample(list(more), 10):
            store.remove(text)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_joined_segment_is_one_of_all_texts(rng: random.Random) -> None:
    store = Store()
    _fill(store, rng, 40)
    entries = [*store.entries(0)]
    whole = Segment.of(entries)
    joined = join([Segment.of(entries[i : i + 13]) for i in range(0, 40, 13)])
    for name in ("ids", "postings", "starts", "numbers", "keys", "spaces", "alive"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name)), name
    assert joined.namespaces == whole.namespaces


def _rows(texts: Sequence[list[int]]) -> list[ManifestRow]:
    return [
        ManifestRow(f"{i:032x}", f"{i:032x}", "", np.asarray(ids, "<u4").tobytes(), 0, f"{i}.chunk", 1)
        for i, ids in enumerate(texts)
    ]


def test_a_store_on_disk_opened_twice(tmp_path: Path, rng: random.Random) -> None:
    """As in two processes: each has its own connection to the manifest."""
    texts = [_text(rng) for _ in range(40)]
    rows = _rows(texts)
    with closing(FileStore(tmp_path)) as ours, closing(FileStore(tmp_path)) as theirs:
        with closing(Manifest(tmp_path / MANIFEST)) as manifest:
            manifest.add(rows[:30])
        catalog, other = Catalog(ours), Catalog(theirs)
        with closing(Manifest(tmp_path / MANIFEST)) as manifest:
            manifest.add(rows[30:])
            manifest.remove([row.key for row in rows[:5]])
        for one in (other, catalog):
            assert [bool(_match(one, ids, MIN_RUN)) for ids in texts] == [False] * 5 + [True] * 35
        assert num_texts(Catalog(theirs)) == 35
