"""Damaged files: no data that differ from the stored data may reach an answer.

Each case copies a store, damages one file of it and asks. Every layer that is read is compared with the one that was
stored under this key, so that damage is detected even if the answer is recomputed from the tokens.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrag.errors import KvragError
from kvrag.store import ChunkRecord, FileStore, SharedStore
from kvrag.store.chunkfile import ChunkFile, PackedChunk
from torture import tiny
from torture.campaign import Campaign

_DOCUMENTS = {"a": [0, 1, 2, 3], "b": [4, 5, 2], "c": [6, 7]}
_PROMPTS = [[1, 4, 2], [7, 0], [5, 3, 6]]

Layers = dict[tuple[str, int], tuple[Tensor, Tensor]]


def run(campaign: Campaign) -> None:
    """Damage one copy of a store per case."""
    intact = campaign.folder / "intact"
    truth = _make(intact)
    for number in campaign.numbers():
        rng = campaign.random(number)
        folder = campaign.folder / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(intact, folder)
        with campaign.case(number):
            _case(campaign, rng, folder, truth)


def _make(folder: Path) -> Layers:
    """Fill a store, and return its content."""
    with tiny.engine(folder) as engine:
        for name, numbers in _DOCUMENTS.items():
            engine.warm(map(tiny.text, numbers), document=name)
    truth: Layers = {}
    with tiny.engine(folder) as engine:
        engine.warm([tiny.text(8)], document="d")
        for keys in engine.store.documents().values():
            for key in keys:
                reader = engine.store.open(key)
                assert reader is not None
                for layer in range(reader.num_layers):
                    truth[key, layer] = reader.layer(layer)
                reader.close()
        # SQLite empties its log when the last connection closes: a store in use has one
        shutil.copytree(folder, folder.with_name("in use"))
    shutil.rmtree(folder)
    folder.with_name("in use").rename(folder)
    return truth


def _case(campaign: Campaign, rng: random.Random, folder: Path, truth: Layers) -> None:
    ram_bytes = rng.choice([0, 1 << 30])
    how = []
    is_open = rng.random() < 0.3
    with only_what_was_stored(truth, ChunkFile, FileStore):
        try:
            if not is_open:
                how.append(_damage(rng, folder, everything=True))
            with tiny.engine(folder, ram_bytes=ram_bytes, learn=rng.random() < 0.3) as engine:
                if is_open:
                    how.append(_damage(rng, folder, everything=False))
                for numbers in _PROMPTS[: rng.randint(1, 3)]:
                    tiny.check_answer(engine, tiny.prompt(numbers))
                    tiny.answer(engine, tiny.prompt(numbers), ratio=0.0, policy="none")  # reused layers are compared
                if rng.random() < 0.3:
                    tiny.check_edited_talk(engine, _PROMPTS[0], rng)
                if rng.random() < 0.3:
                    engine.warm(map(tiny.text, _DOCUMENTS["a"]), document="a")
                    tiny.check_answer(engine, tiny.prompt(_PROMPTS[0]))
                if rng.random() < 0.3:
                    _check_repairs(engine.store)
                    tiny.check_answer(engine, tiny.prompt(_PROMPTS[0]))
            outcome = "answered"
        except KvragError as error:
            outcome = f"{type(error).__name__}"
        except Exception as error:
            raise AssertionError(f"{how[0] if how else 'no damage yet'}: {type(error).__name__}: {error}") from error
    campaign.kinds[f"{how[0].split(' at ')[0]}: {outcome}"] += 1


def _check_repairs(store: Any) -> None:
    """Check that `check` leaves nothing damaged."""
    assert isinstance(store, FileStore)
    store.check()
    again = store.check()
    assert again.damaged == 0, f"a second check still finds {again}"


@contextmanager
def only_what_was_stored(
    truth: Layers, chunk: type[PackedChunk], store: type[FileStore] | type[SharedStore]
) -> Iterator[None]:
    """Raise AssertionError if a layer is read that is not the one that was stored under the key."""
    read, put, stored = chunk.layer, store.put, dict[str, list[ChunkRecord]]()

    def recorded(self: Any, records: Sequence[ChunkRecord]) -> int:
        for record in records:  # encoded again: the last bits depend on the rest of the batch
            stored.setdefault(record.key, []).append(record)
        return put(self, records)

    def compared(self: PackedChunk, number: int) -> tuple[Tensor, Tensor]:
        got = read(self, number)
        possible = [record.layers[number] for record in stored.get(self.key, [])]
        if (self.key, number) in truth:
            possible.append(truth[self.key, number])
        same = any(all(map(torch.equal, got, wanted)) for wanted in possible)
        assert same, f"layer {number} of {self.key} is not as stored"
        return got

    chunk.layer, store.put = compared, recorded  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        chunk.layer, store.put = read, put  # type: ignore[method-assign]


def _damage(rng: random.Random, folder: Path, everything: bool) -> str:
    """Damage one file; return a description. Without `everything`, no file that a process has mapped."""
    chunks = sorted(folder.glob("chunks/*/*"))
    groups: dict[str, Callable[[], Path]] = {
        "chunk": lambda: rng.choice(chunks),
        "owner": lambda: folder / "fingerprint.json",
    }
    weights = {"chunk": 10, "owner": 1}
    if everything:
        groups |= {
            "manifest": lambda: folder / "manifest.sqlite",
            "log": lambda: folder / "manifest.sqlite-wal",
        }
        weights |= {"manifest": 8, "log": 3}
    group = rng.choices(list(weights), list(weights.values()))[0]
    path = groups[group]()
    if group == "chunk":
        return damage_chunk(rng, path)
    return f"{group}, {rng.choice(_WAYS)(rng, path)}"


def damage_chunk(rng: random.Random, path: Path) -> str:
    """Damage the file of a chunk; return a description."""
    return f"chunk, {rng.choice([*_WAYS, _flip_header, _flip_header, _swap])(rng, path)}"


def _flip_at(path: Path, places: list[int]) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def _flip(rng: random.Random, path: Path) -> str:
    size = path.stat().st_size
    if not size:
        return _append(rng, path)
    places = [rng.randrange(8 * size) for _ in range(rng.choice([1, 1, 1, 2, 8, 64]))]
    _flip_at(path, places)
    return f"flipped at bits {places[:8]}"


def _flip_header(rng: random.Random, path: Path) -> str:
    end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    places = [rng.randrange(8 * end) for _ in range(rng.choice([1, 1, 2]))]
    _flip_at(path, places)
    return f"flipped in the header at bits {places}"


def _truncate(rng: random.Random, path: Path) -> str:
    size = path.stat().st_size
    left = rng.choice([0, rng.randrange(min(64, size + 1)), rng.randrange(size + 1), max(size - 1, 0)])
    path.write_bytes(path.read_bytes()[:left])
    return f"truncated at byte {left}"


def _overwrite(rng: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    length = rng.choice([1, 16, 512, 4096])
    start = rng.randrange(len(content) + 1) // 512 * 512
    content[start : start + length] = rng.choice([bytes(length), rng.randbytes(length)])[: len(content) - start]
    path.write_bytes(content)
    return f"overwritten at byte {start}"


def _append(rng: random.Random, path: Path) -> str:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice([1, 100, 5000])))
    return "extended at the end"


def _remove(rng: random.Random, path: Path) -> str:
    path.unlink()
    return "deleted at once"


def _swap(rng: random.Random, path: Path) -> str:
    other = rng.choice(sorted(path.parents[1].glob("*/*")))
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return "swapped at once"


_WAYS: list[Callable[[random.Random, Path], str]] = [_flip, _flip, _flip, _truncate, _overwrite, _append, _remove]
