"""The catalog has the store's content, despite damaged files and other processes."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import settle

from kvrag.index import catalog as catalog_module
from kvrag.index import segment as segment_module
from kvrag.index.catalog import Catalog
from kvrag.index.match import match
from kvrag.index.segment import DamagedSegmentError, Segment, join, read, write
from kvrag.store import FileStore
from kvrag.store.base import MANIFEST
from kvrag.store.manifest import Manifest, ManifestRow
from kvrag.store.values import Entry
from kvrag.types import Run

MIN_RUN = 16
FILE = "catalog.segment"


class Store:
    """The part of a store that a catalog uses; processes that share it share the object."""

    def __init__(self, folder: Path | None = None, read_only: bool = False) -> None:
        self.catalog_folder, self.read_only = folder or Path(os.devnull), read_only or folder is None
        self.texts: dict[int, Entry] = {}
        self.log: list[int] = []
        self.forgotten = 0  # number of the oldest removals that were dropped from the log
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
            self.log.append(number)

    def entries(self, after: int) -> Iterator[Entry]:
        for number in sorted(number for number in self.texts if number > after):
            if number in self.texts:
                self.read += 1
                yield self.texts[number]

    def removed(self, after: int) -> tuple[int, Sequence[int]] | None:
        position = 1000 + len(self.log)
        if after == 0:
            return position, []
        if not 1000 + self.forgotten <= after <= position:
            return None
        return position, self.log[after - 1000 :]

    def removals(self) -> int:
        return len(self.log)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files after a thousand tokens instead of millions."""
    for name, size in {"_AT_ONCE": 100_000, "_PORTION": 100_001, "_TAIL": 1000, "_LONG_TAIL": 4000}.items():
        monkeypatch.setattr(catalog_module, name, size)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


def _text(rng: random.Random, length: int = 100) -> list[int]:
    return [rng.randrange(30000) for _ in range(length)]


def _match(catalog: Catalog, ids: Any, min_run: int, namespace: str = "") -> list[Run]:
    """Match as a prompt does."""
    catalog.update()
    return catalog.match(ids, min_run, namespace)


def _check(catalog: Catalog, present: dict[str, list[int]], absent: dict[str, list[int]]) -> None:
    for text, ids in present.items():
        assert _match(catalog, ids, MIN_RUN) == [Run(0, len(ids), text, 0)]
        assert catalog.ids(text).tolist() == ids
    for text, ids in absent.items():
        assert _match(catalog, ids, MIN_RUN) == []
        with pytest.raises(KeyError):
            catalog.ids(text)
    assert len(catalog) == len(present)


def _fill(store: Store, rng: random.Random, count: int = 60) -> dict[str, list[int]]:
    texts = [_text(rng, rng.randrange(MIN_RUN, 150)) for _ in range(count)]
    return {store.add(ids): ids for ids in texts}


@pytest.mark.parametrize("on_disk", [True, False])
def test_additions_and_removals_are_seen_at_the_next_match(on_disk: bool, tmp_path: Path, rng: random.Random) -> None:
    store = Store(tmp_path / "catalog" if on_disk else None)
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
        settle(rng.choice((catalog, other)))
    assert (tmp_path / "catalog" / FILE).exists() == on_disk
    _check(Catalog(store), present, absent)


def test_a_catalog_is_opened_without_reading_the_texts_again(tmp_path: Path, rng: random.Random) -> None:
    store = Store(tmp_path)
    present = _fill(store, rng)
    settle(Catalog(store))
    gone = rng.sample(list(present), 5)
    for text in gone:
        store.remove(text)
    store.read = 0
    _check(Catalog(store), {t: ids for t, ids in present.items() if t not in gone}, {t: present[t] for t in gone})
    assert store.read == 0
    more = _fill(store, rng, 3)
    assert all(Catalog(store).match(ids, MIN_RUN) for ids in more.values())
    assert store.read <= 9


def test_the_file_loses_its_dead(tmp_path: Path, rng: random.Random) -> None:
    store, present, absent = Store(tmp_path), {}, {}
    (tmp_path / ".abc.tmp").touch()  # of a killed writer
    catalog = Catalog(store)
    for _ in range(40):
        present |= _fill(store, rng, 15)
        for text in rng.sample(list(present), 7):
            absent[text] = present.pop(text)
            store.remove(text)
        settle(catalog)
    assert len(read(tmp_path / FILE)) < 1.5 * len(present)
    assert {file.name for file in tmp_path.iterdir()} == {FILE, "head.lock"}
    _check(catalog, present, absent)
    _check(Catalog(store), present, absent)


def test_namespaces_share_nothing(rng: random.Random) -> None:
    store, ids = Store(), _text(rng)
    ours, theirs = store.add(ids, "ours"), store.add(ids, "theirs")
    anonymous = store.add(_text(rng))
    assert ours != theirs
    catalog = Catalog(store)
    assert [run.key for run in _match(catalog, ids, MIN_RUN, "ours")] == [ours]
    assert [run.key for run in _match(catalog, ids, MIN_RUN, "theirs")] == [theirs]
    assert _match(catalog, ids, MIN_RUN) == []
    assert _match(catalog, catalog.ids(anonymous), MIN_RUN, "ours") == []
    for _ in range(100):  # more than an anchor has candidates
        store.add([*ids, *_text(rng, 20)], "theirs")
    assert [run.key for run in _match(catalog, ids, MIN_RUN, "ours")] == [ours]
    segment = Segment.of([*store.entries(0)])
    hashes = segment.postings >> np.uint64(32)
    addresses = (segment.postings & np.uint64(0xFFFFFFFF)).astype(np.int64)
    spaces = segment.spaces[np.searchsorted(segment.starts, addresses, "right") - 1]
    by_space = [set(hashes[spaces == number].tolist()) for number in range(len(segment.namespaces))]
    assert not by_space[1] & by_space[2]


@pytest.mark.parametrize("what", ["cut", "gone", "footer"])
def test_a_damaged_file_is_made_again(
    what: str, tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    present = _fill(store, rng, 30)
    for _ in range(3):
        present |= _fill(store, rng, 30)
        settle(Catalog(store))
    segment = tmp_path / FILE
    if what == "cut":
        segment.write_bytes(segment.read_bytes()[:-100])
    elif what == "gone":
        segment.unlink()
    else:
        raw = bytearray(segment.read_bytes())
        raw[-50] ^= 1
        segment.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "kvrag"):
        catalog = Catalog(store)
        for _ in range(3):
            _check(catalog, present, {})
    assert len(caplog.records) == (what != "gone")
    settle(catalog)
    store.read = 0
    _check(Catalog(store), present, {})
    assert store.read == 0


def test_a_flipped_bit_anywhere_in_a_segment_never_makes_a_wrong_run(tmp_path: Path, rng: random.Random) -> None:
    store = Store(tmp_path)
    present = _fill(store, rng, 30)
    settle(Catalog(store))
    path = tmp_path / FILE
    whole, prompt = path.read_bytes(), [token for ids in present.values() for token in ids]
    arrays = ("ids", "postings", "directory", "starts", "numbers", "keys", "spaces")
    begins = [whole.index(getattr(read(path), name).tobytes()) for name in arrays]
    for begin, name in list(zip(begins, arrays, strict=True)) * 60:
        raw = bytearray(whole)
        raw[begin + rng.randrange(getattr(read(path), name).nbytes)] ^= 1 << rng.randrange(8)
        damaged = tmp_path / "damaged.segment"
        damaged.write_bytes(raw)
        try:
            segment = read(damaged)
        except DamagedSegmentError:
            assert name not in arrays[:3]
            continue
        with pytest.raises(DamagedSegmentError):
            segment.check()
        for run in match([segment], prompt, MIN_RUN):
            # the engine compares the ids once more, with those of the chunk that it opens
            theirs = segment.text(segment.row(run.key) or 0)[run.offset : run.offset + len(run)]
            assert theirs.tolist() == prompt[run.start : run.stop]


def test_damage_found_when_the_file_is_written_again_is_repaired(tmp_path: Path, rng: random.Random) -> None:
    store = Store(tmp_path)
    present = _fill(store, rng, 30)
    settle(Catalog(store))
    path = tmp_path / FILE
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1  # in a token id
    path.write_bytes(raw)
    catalog = Catalog(store)
    absent = {}
    for text in list(present)[:20]:  # so many that the file is written again
        absent[text] = present.pop(text)
        store.remove(text)
    settle(catalog)
    present |= _fill(store, rng, 30)
    settle(catalog)
    _check(catalog, present, absent)
    read(path).check()


def test_a_folder_that_cannot_be_written_leaves_the_catalog_in_memory(tmp_path: Path, rng: random.Random) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "catalog")
    catalog = Catalog(store)
    present = _fill(store, rng)
    settle(catalog)
    present |= _fill(store, rng)
    _check(catalog, present, {})


def test_after_a_pruned_log_of_removals_all_is_indexed_again(tmp_path: Path, rng: random.Random) -> None:
    store = Store(tmp_path)
    present, absent = _fill(store, rng), {}
    catalog = Catalog(store)
    settle(catalog)
    for text in list(present)[::3]:
        absent[text] = present.pop(text)
        store.remove(text)
    store.forgotten = len(store.log)
    for one in (catalog, Catalog(store)):
        one.refresh()
        _check(one, present, absent)
    assert {entry.text_key for entry in catalog.take_removed()} >= absent.keys()


@pytest.mark.parametrize("how", ["gone", "replaced"])
def test_texts_removed_together_with_the_file_are_reported(how: str, tmp_path: Path, rng: random.Random) -> None:
    """As by `gc`, or another process, before this one looks again."""
    store = Store(tmp_path)
    text = next(iter(_fill(store, rng)))
    catalog = Catalog(store)
    settle(catalog)
    store.remove(text)
    (tmp_path / FILE).unlink()
    if how == "replaced":
        settle(Catalog(store))
    catalog.update()
    assert [entry.text_key for entry in catalog.take_removed()] == [text]


@pytest.mark.parametrize("is_behind", [False, True])
def test_the_file_of_another_store_is_not_taken_for_ours(is_behind: bool, tmp_path: Path, rng: random.Random) -> None:
    """A rebuilt manifest counts from 1 again."""
    before, store = Store(tmp_path), Store(tmp_path)
    absent = _fill(before, rng)
    other = before if is_behind else store
    other.log, other.forgotten = [0] * 77, 77
    settle(Catalog(before))
    present = _fill(store, rng)
    catalog = Catalog(store)
    catalog.refresh()
    _check(catalog, present, absent)
    settle(catalog)
    _check(Catalog(store), present, absent)


def test_prompts_are_matched_while_others_write(tmp_path: Path, rng: random.Random) -> None:
    store = Store(tmp_path)
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
    for catalog in catalogs:
        settle(catalog)
        catalog.close()


def test_a_written_segment_is_the_joined_one(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "_PORTION", 97)
    store = Store()
    _fill(store, rng, 40)
    entries = [*store.entries(0)]
    whole = Segment.of(entries)
    parts = [Segment.of(entries[i : i + 13]) for i in range(0, 40, 13)]
    for segments in ([whole], parts):
        write(segments, tmp_path / FILE)
        for segment in (join(segments), read(tmp_path / FILE)):
            for name in ("ids", "postings", "starts", "numbers", "keys", "spaces", "alive", "directory"):
                assert np.array_equal(getattr(segment, name), getattr(whole, name)), name
            assert segment.namespaces == whole.namespaces
            assert segment.last == 40


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
        for one in (catalog, other):  # one of them writes, the other one maps the file
            settle(one)
        assert (tmp_path / "catalog" / FILE).exists()
        with closing(Manifest(tmp_path / MANIFEST)) as manifest:
            manifest.add(rows[30:])
            manifest.remove([row.key for row in rows[:5]])
        for one in (other, catalog):
            assert [bool(_match(one, ids, MIN_RUN)) for ids in texts] == [False] * 5 + [True] * 35
            one.close()
        with closing(Catalog(theirs)) as third:
            assert len(third) == 35


def test_a_read_only_store_maps_files_and_writes_none(tmp_path: Path, rng: random.Random) -> None:
    store = Store(tmp_path)
    present = _fill(store, rng)
    with closing(Catalog(store)) as catalog:
        settle(catalog)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    view = Store(tmp_path, read_only=True)
    view.texts, view.number = store.texts, store.number
    with closing(Catalog(view)) as catalog:
        assert view.read == 0
        _check(catalog, present, {})
        present |= _fill(view, rng, 200)  # enough to be written, elsewhere
        settle(catalog)
        _check(catalog, present, {})
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before
    with closing(Catalog(Store(tmp_path / "none", read_only=True))) as catalog:
        assert _match(catalog, [1] * 20, MIN_RUN) == []
    assert not (tmp_path / "none").exists()


def test_closing_gives_up_what_is_being_written(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    present = _fill(store, rng, 30)
    with closing(Catalog(store)) as catalog:
        settle(catalog)
    before = {path.name for path in tmp_path.iterdir()}
    present |= _fill(store, rng, 60)
    writing, closed = threading.Event(), threading.Event()

    def slow(*args: object) -> Iterator[object]:
        for portion in portions(*args):
            writing.set()
            assert closed.wait(60)
            yield portion

    portions = segment_module._live_postings
    monkeypatch.setattr(segment_module, "_live_postings", slow)
    catalog = Catalog(store)
    _match(catalog, [1] * 20, MIN_RUN)
    assert writing.wait(60)
    closing_thread = threading.Thread(target=catalog.close)
    closing_thread.start()
    assert catalog._background.closed.wait(60)
    closed.set()
    closing_thread.join()
    assert {path.name for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    _check(catalog, present, {})  # earlier texts can still be matched
    _check(Catalog(store), present, {})


def test_many_additions_keep_a_bounded_tail(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "_AT_ONCE", 500)
    monkeypatch.setattr(catalog_module, "_PORTION", 501)
    store, tails = Store(tmp_path), []
    present = _fill(store, rng, 600)

    def counted(segments: Sequence[Segment], *args: Any) -> None:
        tails.append(sum(segment.num_tokens for segment in segments if not segment.is_mapped))
        write(segments, *args)

    monkeypatch.setattr(catalog_module, "write", counted)
    with closing(Catalog(store)) as catalog:
        settle(catalog)
        _check(catalog, present, {})
    total = sum(map(len, present.values()))
    assert max(tails) < 2 * 4000 < total / 2  # two threads may both be taking in
    assert read(tmp_path / FILE).num_tokens > total - 2 * 4000
