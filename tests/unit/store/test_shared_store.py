"""Shared stores: several machines on one store, and faults of the store."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import pytest
import torch
from blending import CHUNKS, messages
from fleet import contents
from places import Bucket, Faults, Stalling, free_port, names_in
from records import FINGERPRINT, A, B, C, drop_copies, has, held, record, text

from kvrag import (
    BlendEngine,
    ChunkUnreadableError,
    FileStore,
    FingerprintMismatchError,
    KvragError,
    Model,
    SettingError,
    SharedStore,
    StoreError,
)
from kvrag.cli.main import main
from kvrag.store import ON_REQUEST, chunkfile, log, open_store, remote, shared, visible_variant
from kvrag.store.shared import connect
from kvrag.store.values import chunk_key, text_key

Machine = Callable[..., SharedStore]


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A shared store of this test."""
    server = request.getfixturevalue(request.param)
    return str(server.url.replace("PLACE", blake2b(str(tmp_path).encode(), digest_size=8).hexdigest()))


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Counter[log.Log]:
    """How often each machine's manifest started again from a base."""
    counts, real = Counter[log.Log](), log.Log._restore

    def counted(self: log.Log, head: Any) -> None:
        real(self, head)
        counts[self] += 1

    monkeypatch.setattr(log.Log, "_restore", counted)
    return counts


@pytest.fixture
def machine(url: str, tmp_path: Path) -> Iterator[Machine]:
    """Opens the shared store from a machine, each with its own local folder."""
    with contextlib.ExitStack() as stack:

        def connected(name: str, bound: bool = True, **settings: Any) -> SharedStore:
            store = SharedStore(url, tmp_path / name, **{"min_free_bytes": 0, **settings})
            stack.callback(store.close)
            if bound:
                store.bind(FINGERPRINT)
            return store

        yield connected


def soon(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether this becomes true soon; the limit is generous, since the machine may be busy."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def settle(store: SharedStore) -> None:
    """Wait until the chunks that were used have been copied."""
    store._promoter.wait()


def chunks_in(store: SharedStore) -> list[str]:
    return names_in(store._remote, "chunks/")


# ---------------------------------------------------------------- several machines


def test_a_machine_finds_chunks_of_another_and_copies_those_that_it_reads(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    one.put([A, B])
    one.set_document("doc", held("doc", A, B))
    assert soon(lambda: two.documents() == {"doc": sorted([A.key, B.key])})
    assert [entry.text_key for entry in two.entries(0)] == [text(A), text(B)]
    reader = two.open(A.key)
    assert reader is not None
    assert reader.tier == "shared"
    assert torch.equal(reader.layer(2)[1], A.layers[2][1])
    reader.close()
    settle(two)
    again = two.open(A.key)
    assert again is not None
    assert again.tier == "disk"
    again.close()
    assert two.local_stats().chunks == 1
    assert one.local_stats().chunks == 2


def test_removals_reach_other_machines_and_their_copies(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    one.put([A, B])
    one.set_document("doc", held("doc", A, B))
    assert soon(lambda: not two.missing([A.key]))
    assert has(two, A)
    settle(two)
    before = two.removals()
    one.set_document("doc", held("doc", B))
    assert soon(lambda: two.removals() != before)
    assert two.missing([A.key]) == [A.key]
    assert two.open(A.key) is None
    assert soon(lambda: two.local_stats().chunks == 0), "the follower deletes them right after its transaction"
    assert [Path(name).name.partition("-")[0] for name in chunks_in(one)] == [B.key]


def test_two_machines_that_store_the_same_keep_one_object(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda store: store.put([A, B, C]), (one, two)))
    for store in (one, two):
        store._log.pull()
        assert store.stats().chunks == 3
    assert len(chunks_in(one)) == 3


def test_all_machines_apply_the_same_operations_in_the_same_order(machine: Machine) -> None:
    """For any operations at the same time."""
    stores = [machine(name) for name in ("one", "two", "three")]
    records = [record(number) for number in range(10, 16)]

    def work(number: int) -> None:
        store = stores[number]
        for turn, chunk in enumerate(records):
            store.put([chunk])
            store.set_document(f"{turn % 2}", held(f"source {number}", chunk), replace=turn % 3 == 0)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    states = []
    for store in stores:
        store._log.pull()
        states.append(contents(store))
    assert states[0] == states[1] == states[2]


def test_sources_that_come_at_the_same_time_see_each_other(machine: Machine) -> None:
    """Of two machines that record a holder, at least one sees both: see decision 14."""
    one, two = machine("one"), machine("two")
    for number in range(20, 26):
        behind = {name: record(number, context=[ord(name), 1, 2]) for name in "ab"}

        def warm(store: SharedStore, name: str, behind: dict[str, Any] = behind) -> int:
            store.put([behind[name]])
            store.set_document(name + str(number), held(name, behind[name]))  # noqa: B023
            return len(store.look_up([text(behind[name])])[text(behind[name])].sources)

        with ThreadPoolExecutor(2) as pool:
            seen = list(pool.map(warm, (one, two), "ab"))
        assert max(seen) == 2


def test_a_new_machine_starts_from_the_base(machine: Machine, restored: Counter[log.Log]) -> None:
    one, behind, current = machine("one"), machine("behind"), machine("current")
    one.put([A])
    one.set_document("doc", held("doc", A))
    behind.sync()
    one.put([B])
    one.set_document("doc", held("doc", B), replace=False)
    drop_copies(one)
    one.discard(B.key)
    current.sync()
    behind._unfollow()
    assert one.gc()[0] == 0
    assert names_in(one._remote, "changes/") == [], "token ids are gone"
    one.put([C])
    new = machine("new")
    for store in (new, behind, current):
        store.sync()
        assert restored[store._log] == (store is not current)
        assert contents(store) == contents(one)
        assert store.documents() == one.documents() == {"doc": sorted([A.key, B.key])}
        assert store.stats() == one.stats()
        assert has(store, A)
        assert has(store, C)


def test_a_change_while_the_head_is_read_needs_no_new_start(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, restored: Counter[log.Log]
) -> None:
    """Of another thread or process of this machine."""
    one = machine("one")
    one.put([A])
    one._unfollow()
    real, later = one._log._head, [B, C]

    def head() -> Any:
        read = real()
        if later:
            monkeypatch.setattr(one._log, "_pulling", contextlib.nullcontext())
            one.put([later.pop()])
        return read

    monkeypatch.setattr(one._log, "_head", head)
    one._log.pull()
    assert restored[one._log] == 0
    assert one.missing([A.key, B.key, C.key]) == []


def test_what_follows_removals_notices_a_new_base(machine: Machine, restored: Counter[log.Log]) -> None:
    """Other processes of a machine may have read entries and removals before."""
    one, two = machine("one"), machine("two")
    one.put([A, B])
    two.sync()
    two._unfollow()
    numbers, removals = two.numbers(), two.removals()
    one.remove([A.key])
    one.gc()
    one.put([C])
    two.sync()
    assert restored[two._log] == 1
    assert two.removals() != removals
    assert {entry.text_key for entry in two.entries(max(numbers.tolist()))} == {text(C)}
    assert set(two.numbers()).isdisjoint(numbers)


def test_the_log_is_compacted_now_and_then(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, restored: Counter[log.Log]
) -> None:
    """Machines that are a few changes behind need no base."""
    monkeypatch.setattr(shared, "_COMPACT_EVERY", 4)
    monkeypatch.setattr(shared, "_KEPT", 2)
    one, behind = machine("one"), machine("behind")
    for number in range(30, 33):
        one.put([record(number)])
    behind.sync()
    behind._unfollow()
    one.put([record(33)])
    assert soon(lambda: len(names_in(one._remote, "changes/")) == 2)
    assert len(names_in(one._remote, "bases/")) == 1
    one.put([record(34)])
    behind.sync()
    assert restored[behind._log] == 0
    new = machine("new")
    assert restored[new._log] == 1
    for store in (new, behind):
        assert store.stats().chunks == 5
        assert contents(store) == contents(one)


def test_a_store_of_an_earlier_version_is_refused(machine: Machine, url: str, tmp_path: Path) -> None:
    owner = json.loads(machine("one")._remote.look("fingerprint.json")[0] or b"")
    machine("one")._remote.write("fingerprint.json", json.dumps({**owner, "format": "3"}).encode())
    with pytest.raises(StoreError, match="another version's format, which this version cannot read"):
        SharedStore(url, tmp_path / "two", min_free_bytes=0)


def test_the_local_copies_stay_within_their_budget(machine: Machine) -> None:
    one = machine("one")
    records = [record(number) for number in range(8)]
    size = one.put(records) // 8
    small = machine("small", cache_bytes=3 * size)
    for chunk in records:
        assert has(small, chunk)
        settle(small)
        assert small.local_stats().bytes <= 3 * size
    assert small.local_stats().chunks >= 2
    bare = machine("bare", cache_bytes=1)
    assert has(bare, A)
    settle(bare)
    assert bare.local_stats().chunks == 0


def test_on_a_full_disk_the_oldest_copies_make_room(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(number) for number in range(8)]
    size = machine("one").put(records) // 8
    two = machine("two")

    def free(_: object) -> Any:
        return shutil._ntuple_diskusage(0, 0, 4 * size - two.local_stats().bytes)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", free)
    for chunk in records:
        assert has(two, chunk)
        settle(two)
    assert 2 * size <= two.local_stats().bytes <= 4 * size
    newest = two.open(records[-1].key)
    assert newest is not None
    assert newest.tier == "disk"
    newest.close()


def test_a_store_is_for_one_model(machine: Machine, url: str, tmp_path: Path) -> None:
    machine("one").put([A])
    other = SharedStore(url, tmp_path / "two", min_free_bytes=0)
    with pytest.raises(FingerprintMismatchError, match="use codec native instead of int8"):
        other.bind(replace(FINGERPRINT, codec="int8"))
    other.close()


def test_chunks_that_are_read_ahead_are_loaded_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("one").put([A, B, C])
    two = machine("two")
    opened: list[str] = []
    real = two._remote.open
    monkeypatch.setattr(two._remote, "open", lambda name: (opened.append(name), real(name))[1])
    two.read_ahead([A.key, B.key, "0" * 32])
    two.read_ahead([A.key])
    assert has(two, A)
    assert has(two, B)
    assert len(opened) == 2
    settle(two)
    two.read_ahead([A.key, B.key])
    assert len(opened) == 2, "they are here"


@pytest.mark.parametrize("error", [StoreError("no answer"), FileNotFoundError("gone")])
def test_a_chunk_whose_reading_ahead_failed_is_requested_again(
    error: Exception, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("one").put([A])
    two = machine("two")

    def fail(name: str) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(two._remote, "open", fail)
        two.read_ahead([A.key])
        assert soon(lambda: two._opening[A.key].error)
    assert has(two, A)


def test_a_chunk_that_is_stored_after_it_was_read_ahead_is_found(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    two.read_ahead([A.key])
    one.put([A])
    two.sync()
    assert has(two, A)


def test_a_chunk_that_is_read_ahead_and_removed_is_not_held(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    one.put([A])
    two.sync()
    two.read_ahead([A.key])
    assert two._opening[A.key].read(0, 1)
    one.remove([A.key])
    two.sync()
    assert not two._opening


@pytest.mark.parametrize("deletes", ["gc", "forget_requests"])
def test_a_chunk_that_a_document_begins_to_hold_is_not_deleted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, deletes: str
) -> None:
    """It was held by nothing when the other machine looked."""
    one, two = machine("one"), machine("two")
    one.put([A, B])
    one.set_document(ON_REQUEST, held("", A, B))
    real = one._log.change

    def late(op: str, **fields: Any) -> Any:
        if op == "remove":
            monkeypatch.undo()
            two.set_document("doc", held("doc", A))
            assert two.missing([A.key]) == []
        return real(op, **fields)

    monkeypatch.setattr(one._log, "change", late)
    assert one.gc(-1.0)[0] == 1 if deletes == "gc" else one.forget_requests() == [B.key]
    two.sync()
    assert has(two, A)
    assert not has(two, B)


def test_an_operation_that_cannot_be_applied_does_not_stop_the_others(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    one.put([A])
    with pytest.raises(UnicodeEncodeError):
        one.set_document("\ud800", held("doc", A))
    two.set_document("doc", held("doc", A))
    one.sync()
    assert one.documents() == {"doc": [A.key]}


def test_a_machine_that_was_killed_before_it_dropped_its_copies_drops_them_when_it_starts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the transaction that removes rows, and the deletion of the copies."""
    one, two = machine("one"), machine("two")
    one.put([A, B])
    one.set_document("doc", held("doc", A, B))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one._log, "_removed", die)
        with pytest.raises(KeyboardInterrupt):
            one.set_document("doc", held("doc", B))
    assert {*one._local.keys()} == {A.key, B.key}
    one.close()
    two.sync()
    assert two.missing([A.key, B.key]) == [A.key]
    assert machine("one")._local.keys() == [B.key]


# ---------------------------------------------------------------- budgets


def test_a_budget_applies_to_all_machines(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    size = one.put([A])
    two._log.pull()
    assert has(two, A)
    settle(two)
    assert one.set_budget("", 3 * size) == 0
    assert soon(lambda: two._manifest.budgets() == {"": 3 * size})
    one.set_document("doc", held("doc", A))
    for number in range(40, 48):
        two.put([record(number)])
        assert two._manifest.num_bytes("") <= 3 * size
    one._log.pull()
    assert one.missing([A.key]) == [A.key]
    assert one.stats().bytes == two.stats().bytes <= 3 * size
    assert one.open(A.key) is None
    for store in (one, two):
        assert store._local.missing([A.key]), "copies go, too"
    assert len(chunks_in(one)) == one.stats().chunks
    assert one.documents() == {"doc": [A.key]}


def test_two_machines_that_evict_at_once_do_not_evict_twice(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = machine("one"), machine("two")
    size = one.put([record(number) for number in range(40, 50)]) // 10
    two._log.pull()
    for store in (one, two):
        store._log.change("set_budget", namespace="", bytes=5 * size)
    real = two._log.change

    def late(op: str, **fields: Any) -> Any:
        monkeypatch.undo()
        assert one._evict(5 * size, "") == 5
        return real(op, **fields)

    monkeypatch.setattr(two._log, "change", late)
    assert two._evict(5 * size, "") == 0
    assert two.stats().chunks == 5


def test_a_machine_that_is_killed_while_it_evicts_leaves_objects_to_gc(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two")
    size = one.put([A, B, C]) // 3

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one, "_delete", die)
        with pytest.raises(KeyboardInterrupt):
            one.set_budget("", size)
    two._log.pull()
    assert (two.stats().chunks, len(chunks_in(two))) == (1, 3)
    assert two._manifest.budgets() == {"": size}
    monkeypatch.setattr(shared, "_STALE_S", -5.0)
    assert two.gc() == (1, 2), "one chunk has no document, two have no row"


def test_chunks_popular_on_any_machine_stay_for_a_new_machine(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    records = [record(number) for number in range(40, 50)]
    size = one.put(records) // 10
    one.set_document("doc", held("doc", *records))
    one.set_budget("", 20 * size)
    two._log.pull()
    for _ in range(3):
        two.touch([records[3].key, records[7].key])
    two._record_uses()
    one.gc()
    new = machine("new")
    assert new._manifest.budgets() == {"": 20 * size}
    assert new._manifest.counter("clock") == one._manifest.counter("clock") > 0
    assert new._manifest.coldest(0, 10) == one._manifest.coldest(0, 10)
    assert new.set_budget("", 2 * size + size // 2) == 8
    assert new.missing([chunk.key for chunk in records]) == [r.key for n, r in enumerate(records) if n not in (3, 7)]


def test_counts_of_machines_add_up_and_survive_compaction(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    one.count({"a x": 2})
    two.count({"a x": 3, "a y": 1})
    one.sync()
    assert one.counts("a ") == two.counts("a ") == {"x": 5, "y": 1}
    one.gc()
    assert machine("new").counts("a ") == {"x": 5, "y": 1}


# ---------------------------------------------------------------- faults


def test_a_damaged_object_is_deleted_and_stored_again(machine: Machine) -> None:
    one, two = machine("one"), machine("two")
    one.put([A])
    _spoil(one, A.key)
    two._log.pull()
    reader = two.open(A.key)
    assert reader is not None
    with pytest.raises(StoreError, match="damaged"):
        reader.layer(2)
    two.discard(A.key)
    assert two.missing([A.key]) == [A.key]
    assert chunks_in(two) == []
    one._log.pull()
    assert one.open(A.key) is None
    assert one.put([A]) > 0
    two._log.pull()
    assert has(two, A)
    assert two.stats().damaged == one.stats().damaged == 1


def test_a_damaged_copy_is_deleted_and_read_again(machine: Machine) -> None:
    one = machine("one")
    one.put([A])
    (path,) = one.path.glob(f"local/chunks/*/{A.key}-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    reader = one.open(A.key)
    assert reader is not None
    with pytest.raises(StoreError, match="damaged"):
        reader.layer(2)
    one.discard(A.key)
    assert one.stats().damaged == 0
    again = one.open(A.key)
    assert again is not None
    assert again.tier == "shared"
    path.unlink(missing_ok=True)
    assert has(one, A)
    path.write_bytes(b"")
    assert has(one, A)


def test_a_missing_object_is_a_miss_for_all(machine: Machine) -> None:
    one, two = machine("one", cache_bytes=1), machine("two")
    one.put([A])
    one._remote.delete(chunks_in(one))
    two._log.pull()
    assert two.open(A.key) is None
    assert soon(lambda: one.missing([A.key]) == [A.key])
    assert one.put([A]) > 0
    assert has(one, A)


def stop_at(length: int, store: Any, patch: pytest.MonkeyPatch, stop: Callable[[], None]) -> None:
    """Call this when so many bytes of a chunk have arrived."""
    opened = store._remote.open

    def cut(name: str) -> Any:
        size, pieces = opened(name)
        content = b"".join(pieces)

        def parts() -> Iterator[bytes]:
            yield content[:length]
            stop()
            yield content[length:]

        return size, parts()

    patch.setattr(store._remote, "open", cut)


def test_a_chunk_that_is_deleted_while_it_is_read_is_no_outage(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two", cache_bytes=1)
    one.put([A])
    assert soon(lambda: not two.missing([A.key]))
    outages = list[StoreError]()

    def deleted() -> None:
        raise FileNotFoundError

    stop_at(1500, two, monkeypatch, deleted)
    monkeypatch.setattr(two, "_fail", outages.append)
    with pytest.raises(ChunkUnreadableError, match="deleted"):
        two.open(A.key).layer(2)  # type: ignore[union-attr]
    assert not outages


@pytest.mark.parametrize("says", ["the network is down", "no answer for 0.1 s"])
def test_an_outage_while_a_chunk_is_read_leaves_it_in_place(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    one, two = machine("one"), machine("two", cache_bytes=1)
    one.put([A])
    two.sync()
    two._unfollow()
    over = threading.Event()

    def stop() -> None:
        if "no answer" in says:
            over.wait(60)
        raise StoreError("the network is down")

    with monkeypatch.context() as patch:
        stop_at(1500, two, patch, stop)
        patch.setattr("kvrag.store.remote.TIMEOUT_S", 0.1)
        reader = two.open(A.key)
        assert reader is not None
        with pytest.raises(ChunkUnreadableError, match=says):
            reader.layer(2)
        over.set()
    assert two._is_failing
    two.sync()
    assert has(two, A)


def test_a_writer_that_is_killed_leaves_nothing_that_is_served(machine: Machine, monkeypatch: Any) -> None:
    one, two = machine("one"), machine("two")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one, "_add", die)
        patch.setattr(one, "_delete", lambda names: None)
        with pytest.raises(KeyboardInterrupt):
            one.put([A])
    assert len(chunks_in(one)) == 1
    assert two.open(A.key) is None
    assert two.gc() == (0, 0), "it may still be about to record it"
    monkeypatch.setattr(shared, "_STALE_S", -5.0)
    assert two.gc() == (0, 1)
    assert chunks_in(one) == []
    assert one.put([A]) > 0
    assert soon(lambda: has(two, A))


def test_a_lost_response_does_not_append_twice(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries again, and finds its own operation."""
    one = machine("one")
    real = one._remote.swap
    monkeypatch.setattr(one._remote, "swap", lambda *args: real(*args) and False)
    one.put([A])
    one.set_document("doc", held("doc", A))
    assert len(one._log._head().changes) == 2
    assert has(machine("two"), A)


def test_a_store_that_was_deleted_starts_again(machine: Machine) -> None:
    """Also for running machines: they detect that the log does not continue their own."""
    one, two = machine("one"), machine("two")
    one.put([A, B])
    one.set_document("doc", held("doc", A, B))
    two._log.pull()
    one._remote.delete([*names_in(one._remote, "changes/"), "fingerprint.json", "head.json"])
    one._remote.delete(chunks_in(one))
    before = one.removals()
    one._pull()
    assert one.removals() != before
    assert one.documents() == {}
    one.put([C])
    two._pull()
    assert [entry.text_key for entry in two.entries(0)] == [text(C)]
    assert has(two, C)


def test_a_store_that_now_belongs_to_another_model_is_left_alone(machine: Machine, url: str, tmp_path: Path) -> None:
    one = machine("one")
    one.put([A])
    one._remote.delete([*names_in(one._remote, "changes/"), "fingerprint.json", "head.json"])
    other = SharedStore(url, tmp_path / "two", min_free_bytes=0)
    other.bind(replace(FINGERPRINT, weights="other"))
    with pytest.raises(FingerprintMismatchError, match="different: weights"):
        one.put([B])
    assert one.missing([A.key]) == []
    assert has(one, A), "from the copy"
    assert other._log.last == 0
    other.close()


@pytest.mark.parametrize("ignores", ["If-Match", "If-None-Match"])
def test_a_store_without_conditional_writes_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: str
) -> None:
    """Its machines would overwrite each other's changes."""
    store = SharedStore(url, tmp_path, min_free_bytes=0)
    put = obstore.put

    def ignoring(*args: Any, mode: Any = "overwrite", **more: Any) -> Any:
        is_ignored = mode == "create" if ignores == "If-None-Match" else isinstance(mode, dict)
        return put(*args, mode="overwrite" if is_ignored else mode, **more)

    monkeypatch.setattr(obstore, "put", ignoring)
    with pytest.raises(StoreError, match=r"ignores conditional writes \(If-Match, If-None-Match\)"):
        store.bind(FINGERPRINT)
    store.close()


def test_an_uploaded_object_stays_if_its_record_is_uncertain(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change may have been appended although the answer was an error."""
    one = machine("one")
    real = one._remote.swap

    def swap(*args: Any) -> bool:
        real(*args)
        raise StoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(one._remote, "swap", swap)
        with pytest.raises(StoreError, match="no answer"):
            one.put([A])
    assert soon(lambda: one.missing([A.key]) == [])
    assert has(one, A)


@pytest.mark.parametrize("damage", [lambda content: content[:-3] + b"xyz", lambda content: b"", None])
def test_a_damaged_log_is_an_error_with_a_remedy(machine: Machine, damage: Callable[[bytes], bytes] | None) -> None:
    one, two = machine("one"), machine("two")
    two.put([A])
    one.put([B])
    one.set_document("doc", held("doc", A, B))
    name = log._change(one._log._head().changes[1])
    (content,) = one._remote.read([name])
    assert content is not None
    two._unfollow()
    if damage:
        one._remote.write(name, damage(content))
    else:
        one._remote.delete([name])
    with pytest.raises(StoreError, match=r"changes.* is damaged: run `kvrag store gc`") as caught:
        machine("new")
    assert "\n" not in str(caught.value)
    one.gc()
    two.sync()
    assert has(two, B)


@pytest.mark.parametrize("content", [b"", b"x", b"no SQLite", b"SQLite format 3\0" + bytes(4080)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_damaged_base_is_an_error_with_a_remedy(machine: Machine, content: bytes, is_packed: bool) -> None:
    one = machine("one")
    one.put([A])
    one.set_document("doc", held("doc", A))
    one._log.compact()
    one._remote.write(log._base(one._log._head().base), log._packed(content) if is_packed else content)
    with pytest.raises(StoreError, match=r"bases/.* is damaged: run `kvrag store gc`"):
        machine("two")
    one.gc()
    assert has(machine("two"), A)


@pytest.mark.parametrize("head", [b"", b"x", log._pack({}), log._pack({"base": 0, "after": "x", "changes": []})])
def test_a_damaged_head_is_an_error(machine: Machine, head: bytes) -> None:
    one = machine("one")
    one.put([A])
    one._remote.write(log.HEAD, head)
    for use in (one.sync, lambda: one.put([B]), one.gc):
        with pytest.raises(StoreError, match=r"head\.json is damaged"):
            use()
    assert has(one, A)


def test_check_finds_damage_and_losses(machine: Machine) -> None:
    one = machine("one")
    one.put([A, B, C])
    _spoil(one, A.key)
    one._remote.delete([name for name in chunks_in(one) if B.key in name])
    found = one.check()
    assert (found.sound, found.damaged, found.unreadable) == (1, 2, 0)
    assert one.missing([A.key, B.key, C.key]) == [A.key, B.key]
    assert one.check().damaged == 0


def test_an_empty_object_is_damaged(s3: Bucket, tmp_path: Path) -> None:
    with contextlib.closing(SharedStore(s3.url.replace("PLACE", "empty"), tmp_path, min_free_bytes=0)) as store:
        store.bind(FINGERPRINT)
        store.put([A])
        (path,) = names_in(store._remote, "chunks/")
        store._remote.write(path, b"")
        assert store.check().damaged == 1


def test_a_listing_with_an_invalid_time_is_refused(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*_: Any) -> Any:
        raise ValueError("year 0 is out of range")

    monkeypatch.setattr(obstore, "list", listed)
    with pytest.raises(StoreError, match="damaged metadata: year 0"):
        list(connect(s3.url).listed("changes/"))


@pytest.mark.parametrize("part", ["format", "model", "rope", "digest"])
def test_a_damaged_fingerprint_is_refused(machine: Machine, part: str) -> None:
    one = machine("one")
    for damaged in ("x", "../..", 1, None):
        one._remote.write("fingerprint.json", json.dumps({**one.owner(), part: damaged}).encode())
        with pytest.raises(StoreError, match=r"damaged|another format"):
            machine("two", bound=False)


@pytest.mark.parametrize("operation", [{"op": "add", "rows": [[1]]}, {"op": "hold"}, [], "x", None, {"op": ["add"]}])
def test_an_operation_that_no_machine_writes_is_refused(machine: Machine, operation: Any) -> None:
    one = machine("one")
    one.put([A])
    head = one._log._head()
    one._remote.write(log._change(7), log._pack(operation))
    assert one._log._swap(replace(head, changes=[*head.changes, 7]))
    with pytest.raises(StoreError):
        one._log.pull()
    assert has(one, A)


def test_while_the_shared_store_is_unreachable_only_kv_encoded_alone_is_served(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = machine("one")
    behind, alone = record(1, context=[5, 6]), record(2)
    one.put([behind, alone])
    one.set_document("doc", held("doc", behind, alone))
    names = [text(behind), text(alone)]

    def served() -> list[str | None]:
        return [visible_variant(state, alone_only=False) for state in one.look_up(names).values()]

    assert served() == [behind.key, alone.key]
    monkeypatch.setattr(shared, "_TRUST_S", 0.2)
    monkeypatch.setattr("kvrag.store.shared._RETRY_S", 0.05)

    def away(*_: object) -> Any:
        raise StoreError("the network is down")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        for method in ("read", "look", "open", "swap", "write"):
            patch.setattr(one._remote, method, away)
        assert soon(lambda: served() == [None, alone.key])
        assert has(one, alone), "the copy is here"
        one._local.remove([alone.key])
        with pytest.raises(ChunkUnreadableError, match=r"cannot be reached|network is down"):
            one.open(alone.key)
        with pytest.raises(StoreError, match="the network is down"):
            one.put([C])
        with pytest.raises(StoreError, match="the network is down"):
            one.set_document("two", held("two", alone))
    assert "prompts are answered from this machine's copy" in caplog.text
    assert soon(lambda: served() == [behind.key, alone.key])
    assert soon(lambda: one.open(alone.key) is not None)


def test_a_copy_is_as_old_as_the_request_that_shows_it_is_current(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines may have added holders while this one waited for the answer."""
    one, late = machine("one"), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=time.sleep)
    for module in (log, shared):
        monkeypatch.setattr(module, "time", clock)
    real = one._remote.swap

    def swap(*args: Any) -> bool:
        late[0] += 1000.0
        return real(*args)

    monkeypatch.setattr(one._remote, "swap", swap)
    one._unfollow()
    one.put([A])
    assert clock.monotonic() - one._confirmed >= 1000.0


@contextlib.contextmanager
def impatient(store: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give up requests of this store after a moment: only in the context, so that a busy machine does no harm."""
    remote = vars(store._remote)
    patient = dict(remote)
    with monkeypatch.context() as patch:
        for name in ("remote", "objects", "shared"):
            patch.setattr(f"kvrag.store.{name}.TIMEOUT_S", 0.3)
        patch.setattr("kvrag.store.objects._LARGE_S", 0.3)
        patch.setattr("kvrag.store.objects._RETRIES", 1)
        remote.update(vars(connect(url)))
        yield
    remote.update(patient)


@pytest.mark.parametrize("fault", ["500", "hang", "cut"])
def test_a_failing_bucket_costs_only_time(
    s3: Bucket, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Errors of the server, no answers, answers that end half way: the answer stays that of full prefill."""
    monkeypatch.setattr("kvrag.store.shared._RETRY_S", 0.1)
    faults = Faults(s3)
    prompt: Any = messages(*CHUNKS)
    url = faults.url.replace("PLACE", f"faults-{fault}")
    with (
        contextlib.closing(faults),
        BlendEngine(model, SharedStore(url, tmp_path, min_free_bytes=0), ram_bytes=0) as engine,
    ):
        engine.warm(CHUNKS[:3], document="doc")
        full = engine.generate(prompt, policy="full", max_new_tokens=8, temperature=0).token_ids
        store: Any = engine.store
        drop_copies(store)
        faults.mode = fault
        with impatient(store, url, monkeypatch):
            answer = engine.generate(prompt, ratio=1.0, policy="random", max_new_tokens=8, temperature=0)
            assert answer.token_ids == full
            assert answer.report.stored_tokens == 0
            assert any("recomputed" in note for note in answer.report.notes)
            assert not any("damaged" in note for note in answer.report.notes)
            with pytest.raises(StoreError, match=r"cannot use s3://kvrag/faults-") as caught:
                engine.warm(CHUNKS, document="doc")
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 250
        faults.mode = "pass"
        assert soon(lambda: engine.warm(CHUNKS, document="doc").chunks == 4 if store._pull() is None else False)
        assert soon(lambda: engine.generate(prompt, ratio=1.0, max_new_tokens=1).report.stored_tokens > 80)
        assert store.check().damaged == 0
        assert store.stats().damaged == 0


@pytest.mark.slow
@pytest.mark.parametrize("most", [20, 2000])
def test_a_network_that_stalls_within_an_answer_costs_only_time(
    most: int, s3: Bucket, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt: Any = messages(*CHUNKS)
    with contextlib.closing(Stalling(s3.port)) as proxy:
        url = s3.url.replace(str(s3.port), str(proxy.port)).replace("PLACE", f"stalls-{tmp_path.name}")
        engine = BlendEngine(model, SharedStore(url, tmp_path, min_free_bytes=0), ram_bytes=0)
        engine.warm(CHUNKS[:3], document="doc")
        full = engine.generate(prompt, policy="full", max_new_tokens=8, temperature=0).token_ids
        store: Any = engine.store
        drop_copies(store)
        proxy.left = most
        with impatient(store, url, monkeypatch):
            answer = engine.generate(prompt, ratio=1.0, policy="random", max_new_tokens=8, temperature=0)
            assert (answer.token_ids, answer.report.stored_tokens) == (full, 0)
            calls: list[Callable[[], object]] = [
                lambda: engine.warm(CHUNKS, document="doc"),
                lambda: engine.forget("doc"),
                lambda: store.set_budget("", 10**9),
                lambda: store.check(),
                engine.close,
            ]
            for call in calls:
                with ThreadPoolExecutor(1) as pool:
                    error = pool.submit(call).exception(60)
                assert isinstance(error, StoreError) or (error is None and (most > 20 or call == engine.close))


def test_closing_does_not_wait_for_a_request_to_a_dead_store(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked, answered = machine("one"), threading.Event(), threading.Event()
    one.put([A])

    def hang(*_: object) -> Any:
        asked.set()
        answered.wait(60)
        raise StoreError("the network is down")

    monkeypatch.setattr(shared, "_CLOSE_S", 0.01)
    one._fail(StoreError("the network is down"))
    one._in_background(hang)
    assert asked.wait(60)
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    closing.join(30)
    is_over = not closing.is_alive()
    answered.set()
    assert is_over


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s4://bucket/x", "unknown scheme: use a folder, or one of s3://, gs://"),
        ("s3:/bucket/x", "is not a URL: write s3://"),
        ("s3://", "names no bucket"),
        ("s3://bucket/x?endpont=http://here", "unknown option endpont (known: endpoint, region)"),
        ("gs://bucket/x?endpoint=http://here", "unknown option endpoint (known: none)"),
        ("valkey://here/0", "unknown scheme: use a folder, or one of s3://"),
    ],
)
def test_a_wrong_url_is_refused_in_one_line(url: str, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        open_store(url)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_url_is_not_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in ("s3://bucket/x", Path("s3://bucket/x")):
        with pytest.raises(SettingError, match=r"is not a folder: a URL needs kvrag\.SharedStore"):
            FileStore(wrong)
    with pytest.raises(SettingError, match="store_cache is the folder of local copies of a shared store"):
        open_store(tmp_path / "kv", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvrag.store.objects", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(KvragError, match=r"obstore is not installed: pip install 'kvrag\[shared\]'"):
        connect("s3://bucket/x")


def _connect_refused(url: str) -> None:
    with pytest.raises(SettingError, match="forked from one that has used an object store"):
        connect(url)


def test_a_forked_process_is_refused(s3: Bucket) -> None:
    """The client's threads do not survive a fork: the child would wait forever."""
    connect(s3.url)
    child = multiprocessing.get_context("fork").Process(target=_connect_refused, args=(s3.url,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_missing_bucket_and_a_wrong_address_are_named(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="the bucket nothing does not exist: create it, or correct the URL"):
        SharedStore(f"s3://nothing/x?endpoint={s3.endpoint}")
    monkeypatch.setattr("kvrag.store.objects._RETRIES", 0)
    with pytest.raises(StoreError, match=r"cannot use s3://kvrag/x \(.*refused.*\)") as caught:
        SharedStore(f"s3://kvrag/x?endpoint=http://127.0.0.1:{free_port()}")
    assert len(str(caught.value)) < 200


def test_tls_is_checked(tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without TLS is refused, and is not used in plain text."""
    monkeypatch.setattr("kvrag.store.objects._RETRIES", 0)
    with pytest.raises(StoreError, match="cannot use") as caught:
        SharedStore(f"s3://kvrag/x?endpoint=https://127.0.0.1:{s3.port}", tmp_path)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- engines


@pytest.fixture
def engines(model: Model, url: str, tmp_path: Path) -> Iterator[list[BlendEngine]]:
    """Two machines on one shared store."""
    with contextlib.ExitStack() as stack:
        stores = [SharedStore(url, tmp_path / name, min_free_bytes=0) for name in ("one", "two")]
        yield [stack.enter_context(BlendEngine(model, store, conversation_bytes=0)) for store in stores]


def test_an_answer_is_the_same_on_every_machine(engines: list[BlendEngine]) -> None:
    one, two = engines
    prompt: Any = messages(*CHUNKS)
    full = one.generate(prompt, policy="full", max_new_tokens=8, temperature=0)
    one.warm(CHUNKS, document="doc")
    assert soon(lambda: two.documents() == ["doc"])
    for tier in ("shared", "ram"):
        answer = two.generate(prompt, ratio=1.0, policy="random", max_new_tokens=8, temperature=0)
        assert answer.token_ids == full.token_ids
        assert (answer.report.tier, answer.report.stored_tokens > 80) == (tier, True)
    none = two.generate(prompt, ratio=0.0, policy="none", max_new_tokens=8, temperature=0)
    assert none.token_ids == one.generate(prompt, ratio=0.0, policy="none", max_new_tokens=8, temperature=0).token_ids
    assert one.forget("doc") == len(CHUNKS)
    assert soon(lambda: two.generate(prompt, max_new_tokens=1).report.stored_tokens == 0)
    assert two.documents() == []


def test_two_machines_that_warm_a_shared_text_leave_it_alone(engines: list[BlendEngine]) -> None:
    """It is never missing or encoded with one document's context."""
    for number in range(4):
        common = f"Number {number}. The company sells chairs. Its logo is blue. It employs Kan Dror of Stelburg."

        def warm(engine: BlendEngine, name: str, common: str = common) -> None:
            secret = f"{name} is a secret that Mira Brel told nobody in Florton or in Grelville before {name}."
            engine.warm([secret, common], document=f"{name}{common}")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(warm, engines, ("a", "b")))
        for engine in engines:
            engine.store._log.pull()  # type: ignore[attr-defined]
            ids = engine.encode(common)
            state = engine.store.look_up([text_key("", ids)])[text_key("", ids)]
            assert visible_variant(state, alone_only=False) == chunk_key(engine.fingerprint.digest, ids)


def test_prompts_are_answered_without_the_shared_store(
    engines: list[BlendEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = engines
    prompt: Any = messages(*CHUNKS)
    one.warm(CHUNKS)
    full = one.generate(prompt, policy="full", max_new_tokens=8, temperature=0).token_ids
    assert soon(lambda: len(list(two.store.entries(0))) == len(CHUNKS) or two.store.removals() < 0)

    def fail(*_: object) -> Any:
        raise StoreError("the network is down")

    for method in ("open", "read", "look"):
        monkeypatch.setattr(two.store._remote, method, fail)  # type: ignore[attr-defined]
    answer = two.generate(prompt, ratio=1.0, policy="random", max_new_tokens=8, temperature=0)
    assert answer.token_ids == full
    assert answer.report.stored_tokens == 0
    assert any("recomputed" in note for note in answer.report.notes)
    with pytest.raises(StoreError, match="the network is down"):
        two.warm(["A text that was never seen before, long enough to become a chunk of its own."])


# ---------------------------------------------------------------- the command line


def test_the_command_line_looks_into_a_shared_store(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ["--store-cache", str(tmp_path / "cache")]
    assert main(["store", "stats", "--store", url, *cache]) == 1
    assert "has no store: create one with `kvrag warm PATH" in capsys.readouterr().err
    with contextlib.closing(SharedStore(url, tmp_path / "other", min_free_bytes=0)) as store:
        store.bind(FINGERPRINT)
        store.put([A, B])
        store.set_document("doc", held("doc", A, B))
        store.set_budget("", 10**6)
    assert main(["store", "stats", "--store", url, *cache]) == 0
    assert "copies     0 chunks" in capsys.readouterr().out
    assert main(["store", "budget", "--store", url, *cache]) == 1
    assert "budget needs --gib N, or --gib none" in capsys.readouterr().err
    assert main(["store", "budget", "--store", url, "--namespace", "us", "--gib", "0.5", *cache]) == 0
    assert capsys.readouterr().out == "us: 512.0 MiB\n"
    assert main(["store", "stats", "--store", url, *cache]) == 0
    stats = capsys.readouterr().out
    assert "(default): 2 chunks of 1 document, 9.4 KiB, 976.6 KiB\n" in stats
    assert "us: 0 chunks of 0 documents, 0 B, 512.0 MiB\n" in stats
    assert main(["store", "budget", "--store", url, "--namespace", "us", "--gib", "none", "--json", *cache]) == 0
    assert json.loads(capsys.readouterr().out) == {"namespace": "us", "max_bytes": None, "evicted": 0}
    for wrong in ("0", "-1", "much", "nan"):
        with pytest.raises(SystemExit):
            main(["store", "budget", "--store", url, "--gib", wrong, *cache])
        assert "--gib" in capsys.readouterr().err
    assert main(["store", "check", "--store", url, *cache]) == 0
    assert main(["store", "gc", "--store", url, *cache]) == 0


def _spoil(store: SharedStore, key: str) -> None:
    """Flip a bit of a shared chunk's last layer."""
    name = store._manifest.file(key)
    assert name is not None
    path = f"chunks/{name[:2]}/{name}"
    (content,) = store._remote.read([path])
    assert content is not None
    store._remote.write(path, content[:-1] + bytes([content[-1] ^ 1]))


def test_another_machine_warms_the_same_documents_without_encoding(
    s3: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvrag warm` on one machine, `kvrag ask` on another."""
    url = s3.url.replace("PLACE", "cli")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "harp.txt").write_text("\n\n".join(CHUNKS[:2]))
    (docs / "snake.txt").write_text(CHUNKS[3])

    def run(command: str, machine: str, *more: str) -> Any:
        assert main([command, *more, "--store", url, "--store-cache", str(tmp_path / machine), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    warmed = run("warm", "one", str(docs), "--chunk-tokens", "40")
    assert warmed["store"] == url.partition("?")[0]
    assert warmed["new"] == warmed["chunks"]
    asked = ["ask", "Who owns a snake?", "--store", url, "--store-cache", str(tmp_path / "two")]
    assert main(asked) == 1
    assert "run `kvrag warm PATH` first, on this machine" in capsys.readouterr().err
    again = run("warm", "two", str(docs), "--chunk-tokens", "40")
    assert (again["new"], again["indexed"]) == (0, warmed["chunks"])
    answer = run("ask", "two", "Who owns a snake?", "--top-k", "1")
    assert "snake" in json.dumps(answer)
    assert answer["report"]["reused_tokens"] > 16


def test_a_layer_is_read_while_the_others_arrive(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    long, arrives = record(1, layers=12), threading.Event()
    machine("one").put([long])
    two = machine("two", cache_bytes=1)
    size, layer = chunkfile.estimate(long), sum(part.nbytes for part in long.layers[0])
    stop_at(size - 6 * layer, two, monkeypatch, lambda: arrives.wait(60) or None)
    reader = two.open(long.key)
    assert reader is not None
    assert all(map(torch.equal, reader.layer(0), long.layers[0]))
    arrives.set()
    for number, each in enumerate(long.layers):
        assert all(map(torch.equal, reader.layer(number), each))
    assert reader.bytes_read == 13 * layer
    reader.close()


def test_a_chunk_is_left_out_where_no_thread_can_be_started(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine("one", cache_bytes=1)
    one.put([A])

    def refuse(**_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "threading", SimpleNamespace(Condition=threading.Condition, Thread=refuse))
        with pytest.raises(ChunkUnreadableError, match="can't start new thread"):
            one.open(A.key)
    one.sync()
    assert has(one, A)
