"""Which chunks are evicted: frequently and recently used ones stay."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from records import opened, record

from kvrag import StoreFullError
from kvrag.store.manifest import Manifest, ManifestRow

BUDGET, LOW, CORPUS = 300, 285, 1000  # chunks of one size
PROMPT = 4  # chunks per prompt

Access = tuple[str, int]


@pytest.fixture
def manifest(tmp_path: Path) -> Iterator[Manifest]:
    manifest = Manifest(tmp_path / "manifest.sqlite")
    yield manifest
    manifest.close()


def row(number: int, tokens: int = 8, context: int = 0, num_bytes: int = 1000, namespace: str = "") -> ManifestRow:
    key = f"{namespace}{number:08d}"
    return ManifestRow(key, f"text {key}", namespace, bytes(4 * tokens), context, f"{key}-0.safetensors", num_bytes)


def touch(manifest: Manifest, uses: dict[str, int]) -> None:
    manifest.touch(list(uses), list(uses.values()))


def evict(manifest: Manifest, *limits: Any) -> list[tuple[str, str]]:
    return manifest.remove(manifest.coldest(*limits))


def popular(exponent: float, rng: random.Random, prompts: int) -> list[list[Access]]:
    """Prompts of chunks whose popularity follows Zipf's law; every call shuffles the popularity."""
    numbers = list(range(CORPUS))
    rng.shuffle(numbers)
    weights = [(place + 1) ** -exponent for place in range(CORPUS)]
    return [[("known", number) for number in rng.choices(numbers, weights, k=PROMPT)] for _ in range(prompts)]


def scan() -> list[list[Access]]:
    """Every chunk of another corpus once."""
    return [[("scanned", at + i) for i in range(PROMPT)] for at in range(0, 2 * BUDGET, PROMPT)]


class Lru:
    """The earlier policy: least recently used first."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[Access, None] = OrderedDict()

    def ask(self, prompt: Sequence[Access]) -> int:
        hits = [access for access in dict.fromkeys(prompt) if access in self._chunks]
        for access in hits:
            self._chunks.move_to_end(access)
        new = [access for access in dict.fromkeys(prompt) if access not in self._chunks]
        if len(self._chunks) + len(new) > BUDGET:
            while len(self._chunks) + len(new) > LOW:
                self._chunks.popitem(last=False)
        self._chunks.update(dict.fromkeys(new))
        return len(hits)


class Scored:
    """The manifest itself, used as a store does."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def ask(self, prompt: Sequence[Access]) -> int:
        rows = {self._row(access).key: self._row(access) for access in prompt}
        with self._manifest.transaction():
            hits = self._manifest.known(list(rows))
            new = [row for key, row in rows.items() if key not in hits]
            touch(self._manifest, dict.fromkeys(hits, 1))
        if self._manifest.num_bytes() + 1000 * len(new) > 1000 * BUDGET:
            evict(self._manifest, 1000 * LOW - 1000 * len(new), 500)
        self._manifest.add(new)
        return len(hits)

    def _row(self, access: Access) -> ManifestRow:
        kind, number = access
        return row(number + (10**6 if kind == "scanned" else 0))


def hit_rate(store: Lru | Scored, before: Sequence[Sequence[Access]], prompts: Sequence[Sequence[Access]]) -> float:
    """Share of the known chunks' tokens that are found, after other prompts."""
    for prompt in before:
        store.ask(prompt)
    return sum(store.ask(prompt) for prompt in prompts) / sum(len(set(prompt)) for prompt in prompts)


@pytest.mark.parametrize("exponent", [0.7, 1.0])
def test_frequently_used_chunks_stay(exponent: float, manifest: Manifest) -> None:
    rng = random.Random(0)
    prompts = popular(exponent, rng, 1500)
    ours, lru = (hit_rate(store, prompts[:500], prompts[500:]) for store in (Scored(manifest), Lru()))
    assert ours > lru + 0.015


@pytest.mark.parametrize("exponent", [0.7, 1.0])
def test_a_scan_does_not_evict_frequently_used_chunks(exponent: float, manifest: Manifest) -> None:
    rng = random.Random(1)
    prompts = popular(exponent, rng, 1000)
    before = prompts[:750] + scan()
    ours, lru = (hit_rate(store, before, prompts[750:]) for store in (Scored(manifest), Lru()))
    assert ours > lru + 0.05


@pytest.mark.parametrize("exponent", [0.7, 1.0])
def test_formerly_popular_chunks_are_evicted(exponent: float, manifest: Manifest) -> None:
    rng = random.Random(2)
    before, after = popular(exponent, rng, 1000), popular(exponent, rng, 500)
    ours, lru = (hit_rate(store, before, after) for store in (Scored(manifest), Lru()))
    assert ours > lru - 0.02


def test_between_chunks_used_alike_the_one_with_fewer_bytes_per_token_stays(manifest: Manifest) -> None:
    plain, packed = row(2), row(1, num_bytes=500)
    manifest.add([packed, plain])
    assert manifest.coldest(0, 2) == [plain.key, packed.key]
    touch(manifest, {plain.key: 50})
    assert manifest.coldest(0, 2) == [packed.key, plain.key]


def test_a_context_does_not_keep_a_chunk(manifest: Manifest) -> None:
    """A prompt that lacks a chunk computes the chunk alone, however long the context was that it was encoded with."""
    behind, used, alone = row(1, context=2000), row(2), row(3)
    manifest.add([behind, used, alone])
    touch(manifest, {used.key: 1})
    assert manifest.coldest(0, 3) == [behind.key, alone.key, used.key]


def test_recent_uses_count_more(manifest: Manifest) -> None:
    once, often, late = row(1), row(2), row(3)
    manifest.add([once, often, late])
    touch(manifest, {often.key: 6, once.key: 1})
    assert manifest.coldest(0, 3) == [late.key, once.key, often.key]
    touch(manifest, {row(9).key: 1000})  # not stored: no use of these three
    assert manifest.coldest(0, 3) == [late.key, once.key, often.key]
    for _ in range(5):
        touch(manifest, {late.key: 20})
    touch(manifest, {once.key: 1})
    assert manifest.coldest(0, 3) == [often.key, once.key, late.key], "six old uses are less than a new one"


def test_eviction_stops_at_the_limit_and_in_the_namespace(manifest: Manifest) -> None:
    manifest.add([row(number, namespace=name) for number in range(4) for name in "ab"])
    assert len(evict(manifest, 2000, 10, "a")) == 2
    assert (manifest.num_bytes("a"), manifest.num_bytes("b")) == (2000, 4000)
    assert evict(manifest, 2000, 10, "a") == []
    assert len(evict(manifest, 0, 1, "a")) == 1
    assert evict(manifest, 0, 10, "nobody") == []
    assert manifest.num_bytes() == 5000


def test_eviction_frees_a_twentieth_of_the_budget_and_nothing_while_there_is_room(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "one")) as store:
        size = store.put([record(10)])
    with closing(opened(tmp_path / "ten", max_bytes=10 * size + size // 2)) as store:
        for number in range(10, 20):
            store.put([record(number)])
        assert store.stats().chunks == 10, "they fit"
        store.put([record(20)])
        assert store.stats().chunks == 9, "down to 95 %, with the new chunk"
        with pytest.raises(StoreFullError, match="exceed"):
            store.put([record(number) for number in range(30, 42)])
