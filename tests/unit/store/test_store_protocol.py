"""Requirements of every tier that an engine can use as its store. Enter a new tier in STORES."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from blending import CHUNKS, messages
from records import FINGERPRINT, A, B, C, drop_copies, has, held, record, text

from kvrag import (
    BlendEngine,
    FileStore,
    FingerprintMismatchError,
    KVStore,
    Model,
    SettingError,
    SharedStore,
    StoreFullError,
)
from kvrag.errors import ChunkUnreadableError
from kvrag.store import ON_REQUEST, ChunkRecord, TextState, visible_variant

Open = Callable[[], KVStore]
Budgeted = FileStore | SharedStore

# name -> opens a store at an empty path or URL; opened there again, it has the same content
STORES: dict[str, Callable[[Path, pytest.FixtureRequest], KVStore]] = {
    "files": lambda path, _: FileStore(path, min_free_bytes=0),
    "memory": lambda path, request: shared(request.getfixturevalue("memory").url, path),
    "s3": lambda path, request: shared(request.getfixturevalue("s3").url, path),
}


def shared(url: str, path: Path) -> SharedStore:
    """A shared store and a local folder of this test."""
    place = blake2b(str(path).encode(), digest_size=8).hexdigest()
    return SharedStore(url.replace("PLACE", place), path, min_free_bytes=0)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name == "s3" else ()) for name in STORES])
def opens(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the store under test, each time at the same path or URL."""
    opened: list[KVStore] = []

    def open_one() -> KVStore:
        opened.append(STORES[request.param](tmp_path / "store", request))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(opens: Open) -> KVStore:
    """Bound and empty."""
    store = opens()
    store.bind(FINGERPRINT)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_stored_chunks_are_returned_unchanged(store: KVStore, dtype: torch.dtype) -> None:
    wanted = record(1, dtype=dtype, context=[7, 8, 9], namespace='Zoë\'s "notes"')
    assert store.put([wanted]) > sum(tensor.nbytes for layer in wanted.layers for tensor in layer)
    assert has(store, wanted)
    (entry,) = store.entries(0)
    assert (entry.text_key, entry.namespace) == (text(wanted), wanted.namespace)
    assert entry.ids.tolist() == wanted.ids.tolist()


def test_stored_chunks_are_not_stored_again(store: KVStore) -> None:
    assert store.open(A.key) is None
    assert store.put([A, A]) > 0
    assert store.put([A]) == 0
    assert store.missing([C.key, A.key, B.key]) == [C.key, B.key]
    assert store.stats().chunks == len(list(store.entries(0))) == 1


def test_entries_are_numbered_in_order_of_arrival(store: KVStore) -> None:
    store.put([A, B])
    first = list(store.entries(0))
    store.put([C])
    numbers = [entry.number for entry in store.entries(0)]
    assert numbers == sorted(set(numbers))
    assert {entry.text_key for entry in first} == {text(A), text(B)}
    assert [entry.text_key for entry in store.entries(first[-1].number)] == [text(C)]


def test_a_text_is_one_entry_for_all_its_contexts(store: KVStore) -> None:
    behind = record(1, context=[5, 6])
    store.put([behind])
    (entry,) = store.entries(0)
    store.put([A])
    assert [again.number for again in store.entries(0)] == [entry.number]
    store.remove([behind.key])
    assert store.numbers().tolist() == [entry.number]
    store.remove([A.key])
    assert store.numbers().tolist() == []
    store.put([A])
    assert next(iter(store.entries(0))).number > entry.number


def test_documents_share_chunks(store: KVStore) -> None:
    store.put([A, B, C])
    assert store.set_document("x/one", held("x/one", A, B)) == []
    assert store.set_document("x/two", held("x/two", B, C)) == []
    assert list(store.documents("x/")) == ["x/one", "x/two"]
    assert set(store.documents("x/")["x/one"]) == {A.key, B.key}
    assert list(store.documents("x/t")) == ["x/two"]
    lengths = {chunk.key: len(chunk.ids) for chunk in (A, B, C)}
    assert store.count_tokens("x/t") == {"x/two": lengths[B.key] + lengths[C.key]}
    assert store.count_tokens() == store.count_tokens("x/") != {}
    assert store.count_tokens("", "other") == {}
    before = store.removals()
    assert store.set_document("x/one", []) == [A.key]
    assert store.removals() != before
    assert [has(store, chunk) for chunk in (A, B, C)] == [False, True, True]
    assert list(store.documents()) == ["x/two"]
    assert {entry.text_key for entry in store.entries(0)} == {text(B), text(C)}
    store.set_document("x/two", held("x/two", A), replace=False)
    assert set(store.documents()["x/two"]) == {A.key, B.key, C.key}


def test_the_holders_of_a_text_decide_its_variant(store: KVStore) -> None:
    behind = record(1, context=[5, 6])
    store.put([behind])
    store.set_document("one", held("a", behind))
    assert store.look_up([text(A)]) == {text(A): TextState({behind.key: 2}, {"a": behind.key})}
    assert visible_variant(store.look_up([text(A)])[text(A)], alone_only=False) == behind.key
    store.set_document("two", held("b", A))
    assert visible_variant(store.look_up([text(A)])[text(A)], alone_only=False) is None
    store.put([A])
    assert visible_variant(store.look_up([text(A)])[text(A)], alone_only=False) == A.key
    store.remove([A.key, behind.key])
    assert store.look_up([text(A)])[text(A)].sources == {"a": behind.key, "b": A.key}


def test_namespaces_share_nothing(store: KVStore) -> None:
    mine, theirs = record(1, namespace="me"), record(1, namespace="them")
    assert len({mine.key, theirs.key, record(1).key}) == 3
    assert len({text(mine), text(theirs), text(record(1))}) == 3
    store.put([mine, theirs])
    store.set_document("report", held("report", mine), "me")
    store.set_document("report", held("report", theirs), "them")
    assert store.look_up([text(mine)]) == {text(mine): TextState({mine.key: 0}, {"report": mine.key})}
    assert store.documents(namespace="me") == {"report": [mine.key]}
    assert store.documents() == {}
    assert {entry.namespace: entry.text_key for entry in store.entries(0)} == {"me": text(mine), "them": text(theirs)}
    counted = {
        part.namespace: (part.texts, part.chunks, part.tokens, part.documents) for part in store.stats().namespaces
    }
    assert counted == {"me": (1, 1, 20, 1), "them": (1, 1, 20, 1)}
    assert store.set_document("report", [], "me") == [mine.key]
    assert has(store, theirs)


def test_chunks_without_a_name_stay(store: KVStore) -> None:
    store.put([A, B])
    store.set_document("", held("", A))
    store.set_document("", held("", B))
    store.set_document("one", held("one", A))
    assert store.set_document("one", []) == []
    assert has(store, A)
    assert has(store, B)
    assert store.documents() == {}


def test_chunks_of_prompts_stay_unless_a_document_had_them(store: KVStore) -> None:
    store.put([A, B])
    store.set_document(ON_REQUEST, held("", A))
    store.set_document(ON_REQUEST, held("", B))
    store.set_document("one", held("one", A))
    store.set_document("two", held("two", A))
    assert store.set_document("one", []) == []
    assert store.set_document("two", []) == [A.key]
    assert has(store, B)
    assert store.forget_requests("other") == []
    assert store.forget_requests() == [B.key]
    assert not has(store, B)


def test_an_open_chunk_that_is_removed_is_read_or_unreadable(store: KVStore) -> None:
    store.put([A])
    store.set_document("one", held("one", A))
    reader = store.open(A.key)
    assert reader is not None
    assert store.set_document("one", []) == [A.key]
    assert store.open(A.key) is None
    with contextlib.suppress(ChunkUnreadableError):
        assert torch.equal(reader.layer(2)[1], A.layers[2][1])
    reader.close()


def test_a_damaged_chunk_is_missing_and_counted(store: KVStore) -> None:
    store.put([A, B])
    before = store.removals()
    if isinstance(store, SharedStore):
        drop_copies(store)
    store.discard(A.key)
    assert [has(store, chunk) for chunk in (A, B)] == [False, True]
    assert store.removals() != before
    assert store.stats().damaged == 1
    assert store.put([A]) > 0
    assert has(store, A)


def test_a_restart_loses_nothing(opens: Open, store: KVStore) -> None:
    store.put([A, B])
    store.set_document("one", held("one", A))
    store.touch([A.key, B.key])
    before = store.stats()
    store.close()
    again = opens()
    again.bind(FINGERPRINT)
    assert again.stats() == before
    assert again.documents() == {"one": [A.key]}
    assert has(again, A)


@pytest.mark.parametrize("other", [{"weights": "other"}, {"dtype": "float16"}, {"codec": "int8"}], ids=str)
def test_kv_of_another_model_or_codec_is_refused(opens: Open, store: KVStore, other: dict[str, str]) -> None:
    store.put([A])
    with pytest.raises(FingerprintMismatchError, match=next(iter(other))):
        opens().bind(replace(FINGERPRINT, **other))


def test_threads_that_store_the_same_store_it_once(store: KVStore) -> None:
    records = [record(number) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(store.put, [records] * 4))
    assert len(list(store.entries(0))) == 8
    assert all(has(store, chunk) for chunk in records)


def test_an_engine_gives_the_same_answers_with_and_without_it(opens: Open, model: Model) -> None:
    prompt = messages(*CHUNKS)
    with BlendEngine(model, opens(), ram_bytes=0) as first:
        warmed = first.warm(CHUNKS, document="one")
        wanted = first.generate(prompt, policy="full", max_new_tokens=8, temperature=0)
    with BlendEngine(model, opens(), ram_bytes=0) as engine:
        assert (warmed.new, engine.warm(CHUNKS, document="one").new) == (len(CHUNKS), 0)
        answer = engine.generate(prompt, ratio=1.0, policy="random", max_new_tokens=8, temperature=0)
        assert answer.token_ids == wanted.token_ids
        assert answer.report.stored_tokens > 80
        assert engine.forget("one") == len(CHUNKS)
        assert engine.generate(prompt, ratio=1.0, max_new_tokens=1).report.stored_tokens == 0


# ---------------------------------------------------------------- budgets


def of(namespace: str, *numbers: int) -> list[ChunkRecord]:
    """Chunks of a namespace, all of one size."""
    return [record(number, namespace=namespace) for number in numbers]


def kept(store: Budgeted, *records: ChunkRecord) -> list[bool]:
    return [not store.missing([chunk.key]) for chunk in records]


@pytest.fixture
def budgeted(store: KVStore) -> Budgeted:
    assert isinstance(store, FileStore | SharedStore)
    return store


def test_a_namespace_beyond_its_budget_evicts_its_own_chunks(budgeted: Budgeted) -> None:
    size = budgeted.put(of("them", 1, 2, 3)) // 3
    budgeted.put(of("us", 1))
    assert budgeted.set_budget("us", 5 * size + 200) == 0
    for number in range(2, 12):
        budgeted.put(of("us", number))
        assert budgeted._manifest.num_bytes("us") <= 5 * size + 200
    assert all(kept(budgeted, *of("them", 1, 2, 3), *of("us", 11)))
    assert not any(kept(budgeted, *of("us", 1, 2, 3)))
    assert has(budgeted, of("us", 11)[0])
    stats = {part.namespace: part for part in budgeted.stats().namespaces}
    assert (stats["us"].max_bytes, stats["them"].max_bytes) == (5 * size + 200, None)
    assert budgeted.set_budget("us", None) == 0
    budgeted.put(of("us", *range(20, 28)))
    assert budgeted._manifest.num_bytes("us") > 8 * size


def test_used_chunks_outlast_newer_ones(budgeted: Budgeted) -> None:
    size = budgeted.put(of("us", 1))
    budgeted.set_budget("us", 5 * size + 200)
    for number in range(2, 12):
        budgeted.touch([of("us", 1)[0].key])
        budgeted.put(of("us", number))
    assert kept(budgeted, *of("us", 1, 2)) == [True, False]


def test_a_portion_beyond_the_budget_is_refused_and_evicts_nothing(budgeted: Budgeted) -> None:
    size = budgeted.put(of("us", 1, 2)) // 2
    budgeted.set_budget("us", 3 * size)
    with pytest.raises(StoreFullError, match=r"budget of \d+ bytes of the namespace 'us': raise it with `kvrag store"):
        budgeted.put([*of("us", 3, 4, 5, 6), *of("them", 1)])
    assert kept(budgeted, *of("us", 1, 2, 3), *of("them", 1)) == [True, True, False, False]
    for wrong in (0, -1):
        with pytest.raises(SettingError, match="a budget must be a number in"):
            budgeted.set_budget("us", wrong)


def test_a_budget_below_the_stored_size_evicts_at_once_and_keeps_the_holders(budgeted: Budgeted) -> None:
    """A text of several holders that is evicted must not come back as the only holder's."""
    behind, alone, other = record(1, context=[5, 6]), record(1), record(2)
    size = budgeted.put([alone]) + 0 * budgeted.put([behind, other])
    budgeted.set_document("one", held("a", behind))
    budgeted.set_document("two", held("b", alone))
    budgeted.set_document("them", held("them", record(1, namespace="them")), "them")
    budgeted.put([record(1, namespace="them")])
    before = budgeted.removals()
    assert budgeted.set_budget("", size // 2) == 3
    assert budgeted.removals() != before
    assert not any(kept(budgeted, behind, alone, other))
    assert has(budgeted, record(1, namespace="them"))
    assert budgeted.documents() == {"one": [behind.key], "two": [alone.key]}
    assert budgeted.look_up([text(alone)])[text(alone)] == TextState({}, {"a": behind.key, "b": alone.key})
    budgeted.set_budget("", None)
    budgeted.put([behind])
    assert visible_variant(budgeted.look_up([text(alone)])[text(alone)], alone_only=False) is None
    (part,) = (part for part in budgeted.stats().namespaces if part.namespace == "")
    assert (part.chunks, part.documents) == (1, 2)


def test_a_budget_survives_a_restart_and_the_removal_of_all_chunks(opens: Open, budgeted: Budgeted) -> None:
    budgeted.put(of("us", 1))
    budgeted.set_document("doc", held("doc", *of("us", 1)), "us")
    budgeted.set_budget("us", 10**6)
    budgeted.set_document("doc", [], "us")
    (part,) = budgeted.stats().namespaces
    assert (part.namespace, part.chunks, part.max_bytes) == ("us", 0, 10**6)
    assert budgeted.set_budget("us", 1) == 0
    budgeted.close()
    again = opens()
    assert isinstance(again, FileStore | SharedStore)
    again.bind(FINGERPRINT)
    assert again._manifest.budgets() == {"us": 1}
    with pytest.raises(StoreFullError):
        again.put(of("us", 1))


def test_two_machines_that_store_at_once_stay_within_one_budget(opens: Open, budgeted: Budgeted) -> None:
    size = budgeted.put(of("us", 1))
    budgeted.set_budget("us", 6 * size + 200)
    second = opens()
    assert isinstance(second, FileStore | SharedStore)
    second.bind(FINGERPRINT)

    def fill(store: Budgeted, numbers: range) -> None:
        for number in numbers:
            store.put(of("us", number))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fill, (budgeted, second), (range(10, 18), range(20, 28))))
    for store in (budgeted, second):
        assert 3 * size <= store._manifest.num_bytes("us") <= 6 * size + 200
        assert sorted(store._manifest.rows()) == sorted(budgeted._manifest.rows())
    assert all(has(budgeted, chunk) for chunk in of("us", *range(10, 28)) if not budgeted.missing([chunk.key]))
