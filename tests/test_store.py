"""The embedded store: what goes in comes out, and whatever happens to the folder, no wrong KV ever does."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CHUNKS, messages, plain_logits, prepare, relative

from kvrag import (
    BlendEngine,
    DamagedChunkError,
    FileStore,
    FingerprintMismatchError,
    Model,
    SettingError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    ingest,
)
from kvrag.fingerprint import Fingerprint
from kvrag.reuse.match import anchors
from kvrag.store import ChunkRecord, DroppedChunks, MemoryTier, chunkfile
from kvrag.store.chunkfile import ChunkFile

FINGERPRINT = Fingerprint("tiny", "w", "t", "float32", "[]", (1,))


def record(number: int, tokens: int = 20, dtype: torch.dtype = torch.float32, layers: int = 3) -> ChunkRecord:
    generator = torch.Generator().manual_seed(number)
    ids = [(number * 1000 + i) % 60000 for i in range(tokens)]
    kv = [tuple(torch.randn(2, tokens, 4, generator=generator).to(dtype) for _ in "kv") for _ in range(layers)]
    return ChunkRecord(FINGERPRINT.chunk_key(ids), np.asarray(ids, np.uint32), anchors(ids), kv)


def opened(path: Path, **settings: Any) -> FileStore:
    store = FileStore(path, **({"min_free_bytes": 0} | settings))
    store.bind(FINGERPRINT)
    return store


def same(store: FileStore, wanted: ChunkRecord) -> bool:
    reader = store.open(wanted.key)
    if reader is None:
        return False
    try:
        assert reader.num_layers == len(wanted.layers)
        for number, pair in enumerate(wanted.layers):
            for ours, theirs in zip(reader.layer(number), pair, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)
    finally:
        reader.close()
    return True


def file_of(store: FileStore, wanted: ChunkRecord) -> Path:
    (path,) = store.path.glob(f"chunks/*/{wanted.key}.safetensors")
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    store = opened(tmp_path / "kv")
    yield store
    store.close()


# ---------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layers", [1, 3, 120])
def test_round_trip(store: FileStore, dtype: torch.dtype, layers: int) -> None:
    wanted = record(1, dtype=dtype, layers=layers)
    size = store.put([wanted])
    assert size == file_of(store, wanted).stat().st_size == store.stats().bytes
    assert same(store, wanted)
    (entry,) = store.entries(0)
    assert (entry.key, entry.ids.tolist(), entry.anchors) == (wanted.key, wanted.ids.tolist(), wanted.anchors)


def test_the_file_is_a_safetensors_file_with_each_layer_in_one_piece(store: FileStore) -> None:
    wanted = record(1)
    store.put([wanted])
    import safetensors.torch

    tensors = safetensors.torch.load_file(file_of(store, wanted))
    assert torch.equal(tensors["002.v"], wanted.layers[2][1])
    chunk = ChunkFile(file_of(store, wanted))
    for number in range(3):
        keys, values = (chunk._tensors[f"{number:03d}.{name}"]["data_offsets"] for name in "kv")
        assert keys[1] == values[0]
    chunk.close()


def test_tensors_that_are_views_are_stored_by_value(store: FileStore) -> None:
    big = torch.randn(2, 100, 8)
    wanted = replace(record(1), layers=[(big[:, 10:30, ::2], big[:, 40:60, 1::2])])
    store.put([wanted])
    assert same(store, wanted)
    assert file_of(store, wanted).stat().st_size < 4000


def test_known_chunks_are_stored_once(store: FileStore) -> None:
    assert store.put([record(1), record(1)]) > 0
    assert store.put([record(1)]) == 0
    assert store.stats().chunks == 1
    assert store.missing([record(2).key, record(1).key, record(3).key]) == [record(2).key, record(3).key]


def test_many_keys_at_once(store: FileStore) -> None:
    keys = [record(i).key for i in range(1300)]
    store.put([record(5), record(1200)])
    assert store.missing(keys) == [key for key in keys if key not in (keys[5], keys[1200])]


def test_a_restart_loses_nothing(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.put([record(i) for i in range(5)])
    first.close()
    second = opened(tmp_path)
    assert all(same(second, record(i)) for i in range(5))
    assert [entry.key for entry in second.entries(0)] == [record(i).key for i in range(5)]
    second.close()


def test_an_open_chunk_stays_readable_when_it_is_removed(store: FileStore) -> None:
    store.put([record(1)])
    reader = store.open(record(1).key)
    assert reader is not None
    store.remove([record(1).key])
    assert torch.equal(reader.layer(2)[0], record(1).layers[2][0])
    reader.close()
    assert store.open(record(1).key) is None


def test_use_after_close_says_so(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.missing(["0" * 32])


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_a_budget_is_positive(tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(SettingError, match="max_bytes"):
        FileStore(tmp_path, max_bytes=max_bytes)


# ---------------------------------------------------------------- damage


def test_every_single_flipped_bit_of_a_header_is_noticed_or_harmless(store: FileStore) -> None:
    wanted = record(1, tokens=16, layers=2)
    store.put([wanted])
    path = file_of(store, wanted)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(0)
    noticed = 0
    for at in range(header):
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        try:
            assert same(store, wanted), at  # harmless: what is read is what was written
            chunk = ChunkFile(path)
            try:
                ids, packed = chunk.ids_and_anchors()
            finally:
                chunk.close()
            assert (ids.tolist(), packed) == (wanted.ids.tolist(), wanted.anchors)
        except DamagedChunkError:
            noticed += 1
    assert noticed > header * 0.5


def test_flipped_bits_of_the_payload_are_noticed(store: FileStore) -> None:
    wanted = record(1)
    store.put([wanted])
    path = file_of(store, wanted)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(0)
    for _ in range(100):
        bad = bytearray(good)
        bad[rng.randrange(header, len(good))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        chunk = ChunkFile(path)
        with pytest.raises(DamagedChunkError):  # noqa: PT012  any of these notices
            for number in range(3):
                chunk.layer(number)
            chunk.ids_and_anchors()
        chunk.close()


@pytest.mark.parametrize("left", [0, 1, 7, 8, 9, 100, -1, -1000])
def test_a_truncated_file_is_noticed_when_it_is_opened(store: FileStore, left: int) -> None:
    wanted = record(1)
    store.put([wanted])
    path = file_of(store, wanted)
    content = path.read_bytes()
    path.write_bytes(content[:left])
    with pytest.raises(DamagedChunkError, match=wanted.key):
        store.open(wanted.key)
    path.write_bytes(content + b"x")
    with pytest.raises(DamagedChunkError, match="instead of"):
        store.open(wanted.key)


def test_a_file_cut_off_after_it_was_opened_is_noticed(store: FileStore) -> None:
    store.put([record(1)])
    reader = store.open(record(1).key)
    assert reader is not None
    os.truncate(file_of(store, record(1)), 900)
    with pytest.raises(DamagedChunkError):  # noqa: PT012
        for number in range(3):
            reader.layer(number)
    reader.close()


def test_a_disk_that_cannot_be_read_is_damage(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put([record(1)])
    reader = store.open(record(1).key)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert reader is not None
    with pytest.raises(DamagedChunkError, match="Input/output error"):
        reader.layer(0)
    reader.close()


def test_another_chunk_under_this_name_is_noticed(store: FileStore) -> None:
    store.put([record(1), record(2)])
    shutil.copy(file_of(store, record(2)), file_of(store, record(1)))
    with pytest.raises(DamagedChunkError, match=record(2).key):
        store.open(record(1).key)


def test_a_file_of_another_model_is_noticed(store: FileStore) -> None:
    store.put([record(1)])
    file_of(store, record(1)).write_bytes(chunkfile.pack(record(1), "f" * 32))
    with pytest.raises(DamagedChunkError, match="another model"):
        store.open(record(1).key)


def test_a_row_without_a_file_is_damage_and_no_row_is_none(store: FileStore) -> None:
    store.put([record(1)])
    file_of(store, record(1)).unlink()
    with pytest.raises(DamagedChunkError, match="gone"):
        store.open(record(1).key)
    assert store.open(record(2).key) is None


def test_quarantine_keeps_the_bytes_and_counts(store: FileStore) -> None:
    store.put([record(1), record(2)])
    before = store.removals()
    content = file_of(store, record(1)).read_bytes()
    store.quarantine(record(1).key)
    store.quarantine(record(2).key)
    assert store.stats().damaged == 2
    assert store.stats().chunks == 0
    assert store.removals() != before
    aside = sorted((store.path / "quarantine").iterdir())
    assert len(aside) == 2
    assert content in [path.read_bytes() for path in aside]
    store.put([record(1)])
    assert same(store, record(1))


def _damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    elif how == "flipped":
        content[-1000] ^= 4
    elif how == "header":
        content[8] ^= 0x55
    elif how == "dtype":
        content = content.replace(b'"F32"', b'"F3x"')
    elif how == "empty":
        content = bytearray()
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "flipped", "header", "dtype", "empty", "gone"])
def test_a_damaged_chunk_is_recomputed_and_the_answer_is_the_same(
    how: str, engine: BlendEngine, hf: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.warm(CHUNKS)
    ids = engine.model.tokenizer.render(messages(*CHUNKS))
    key = engine.model.fingerprint.chunk_key(engine.model.tokenizer.encode(CHUNKS[2]))
    (path,) = engine.store.path.glob(f"chunks/*/{key}.safetensors")  # type: ignore[attr-defined]
    if how == "gone":
        path.unlink()
    else:
        _damage(path, how)
    before = len(os.listdir("/proc/self/fd"))
    done = prepare(engine, ids, 1.0, "random")
    report = done.report(0.0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
    assert len(report.runs) == 3
    assert key not in {run.key for run in report.runs}
    assert "recomputed" in report.notes[0]
    assert engine.store.stats().damaged == 1
    assert engine.store.stats().chunks == 3
    assert "quarantine" in caplog.text
    warmed = engine.warm(CHUNKS)
    assert (warmed.new, warmed.reused) == (1, 3)
    done = prepare(engine, ids, 1.0, "random")
    assert len(done.report(0.0).runs) == 4
    assert done.report(0.0).notes == ()
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5


def test_every_chunk_damaged_at_once(engine: BlendEngine, hf: Any) -> None:
    engine.warm(CHUNKS)
    ids = engine.model.tokenizer.render(messages(*CHUNKS))
    for path in engine.store.path.glob("chunks/*/*"):  # type: ignore[attr-defined]
        _damage(path, "flipped")
    done = prepare(engine, ids, 0.15, "query")
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
    assert done.report(0.0).reused_tokens == 0
    assert done.report(0.0).exact
    assert engine.store.stats().damaged == 4


def test_a_quarantine_that_fails_does_not_fail_the_answer(engine: BlendEngine, hf: Any) -> None:
    engine.warm(CHUNKS)
    folder: Path = engine.store.path  # type: ignore[attr-defined]
    (folder / "quarantine").write_text("in the way")
    for path in folder.glob("chunks/*/*"):
        _damage(path, "flipped")
    ids = engine.model.tokenizer.render(messages(*CHUNKS))
    done = prepare(engine, ids, 0.0, "none")
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
    assert len(done.report(0.0).notes) == 4


# ---------------------------------------------------------------- a damaged manifest


def _spoil(path: Path, how: str) -> None:
    if how == "garbage":
        path.write_bytes(b"this is not a database" * 500)
    elif how == "header":
        content = bytearray(path.read_bytes())
        content[0:50] = os.urandom(50)
        path.write_bytes(content)
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "deleted":
        path.unlink()


@pytest.mark.parametrize("how", ["garbage", "header", "truncated", "emptied", "deleted"])
def test_a_damaged_manifest_is_rebuilt_from_the_chunk_files(how: str, tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([record(i) for i in range(40)])
    store.close()
    _spoil(tmp_path / "manifest.sqlite", how)
    again = opened(tmp_path)
    assert again.stats().chunks == 40
    assert again.stats().bytes == sum(path.stat().st_size for path in tmp_path.glob("chunks/*/*"))
    assert all(same(again, record(i)) for i in range(40))
    entries = {entry.key: entry for entry in again.entries(0)}
    for i in range(40):
        assert entries[record(i).key].ids.tolist() == record(i).ids.tolist()
        assert entries[record(i).key].anchors == record(i).anchors
    assert again.missing([record(i).key for i in range(41)]) == [record(40).key]
    if how in ("garbage", "header", "truncated"):
        assert list(tmp_path.glob("manifest.sqlite.damaged-*"))
    again.close()


def test_a_damaged_chunk_is_not_adopted_when_the_manifest_is_rebuilt(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([record(i) for i in range(6)])
    for i, name in enumerate(["ids", "anchors", "001.v"]):
        path = file_of(store, record(i))
        content = bytearray(path.read_bytes())
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        content[8 + int.from_bytes(content[:8], "little") + header[name]["data_offsets"][0]] ^= 1
        path.write_bytes(content)
    store.close()
    _spoil(tmp_path / "manifest.sqlite", "garbage")
    again = opened(tmp_path)
    assert sorted(entry.key for entry in again.entries(0)) == sorted(record(i).key for i in (3, 4, 5))
    assert again.stats().damaged == 3
    again.close()


def test_random_damage_to_the_manifest_is_repaired_or_named(tmp_path: Path) -> None:
    """Never another exception than StoreError, never wrong KV, and `check` makes the folder whole again."""
    store = opened(tmp_path / "good")
    store.put([record(i) for i in range(60)])
    store.close()
    rng = random.Random(0)
    size = (tmp_path / "good" / "manifest.sqlite").stat().st_size
    for trial in range(25):
        folder = tmp_path / f"trial{trial}"
        shutil.copytree(tmp_path / "good", folder)
        with open(folder / "manifest.sqlite", "r+b") as file:
            for _ in range(rng.choice([1, 20])):
                file.seek(rng.randrange(size))
                file.write(os.urandom(rng.choice([1, 64, 4096])))
        try:
            broken = opened(folder)
        except StoreError:
            shutil.rmtree(folder)
            continue
        try:
            broken.missing([record(1).key])
            list(broken.entries(0))
            broken.put([record(100)])
        except StoreError:
            pass
        broken.check()
        broken.put([record(100)])
        assert broken.missing([record(i).key for i in range(60)]) == [], trial
        entries = {entry.key: entry.ids.tolist() for entry in broken.entries(0)}
        for i in range(60):
            assert entries[record(i).key] == record(i).ids.tolist(), trial
            assert same(broken, record(i))
        broken.close()
        shutil.rmtree(folder)


def test_the_engine_finds_its_chunks_after_the_manifest_was_rebuilt(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        ids = model.tokenizer.render(messages(*CHUNKS))
        before = prepare(engine, ids, 0.2, "hkvd").logits
    _spoil(tmp_path / "manifest.sqlite", "garbage")
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        torch.testing.assert_close(prepare(engine, ids, 0.2, "hkvd").logits, before, atol=0, rtol=0)
        assert engine.warm(CHUNKS).new == 0


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"x"', '{"model": 3}', "\xff"])
def test_a_damaged_owner_file_is_named(content: str, tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "fingerprint.json").write_bytes(content.encode("latin-1"))
    store = FileStore(tmp_path, min_free_bytes=0)
    with pytest.raises(StoreError, match=r"fingerprint\.json is damaged"):
        store.bind(FINGERPRINT)
    store.close()


# ---------------------------------------------------------------- another model


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "x"},
        {"tokenizer": "x"},
        {"dtype": "bfloat16"},
        {"rope": "[1]"},
        {"preamble": (1, 2)},
        {"codec": "int8"},
        {"format": 2},
    ],
)
def test_kv_of_another_model_is_refused_and_the_difference_named(tmp_path: Path, other: dict[str, Any]) -> None:
    opened(tmp_path).close()
    store = FileStore(tmp_path, min_free_bytes=0)
    with pytest.raises(FingerprintMismatchError, match=rf"different: {next(iter(other))}\)") as caught:
        store.bind(replace(FINGERPRINT, model="other", **other))
    assert "holds KV of tiny" in str(caught.value)
    store.close()


def test_another_name_of_the_same_weights_shares_the_store(tmp_path: Path) -> None:
    opened(tmp_path).close()
    store = FileStore(tmp_path, min_free_bytes=0)
    store.bind(replace(FINGERPRINT, model="/a/local/copy"))
    assert store.stats().model == "tiny"
    store.close()


def test_the_engine_refuses_the_store_of_another_model(model: Model, tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(FingerprintMismatchError, match="weights"):
        BlendEngine(model, tmp_path)


# ---------------------------------------------------------------- folders that cannot be written


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "kv"):
        with pytest.raises(StoreError, match="cannot create"):
            FileStore(path)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A store of three chunks that is open for writing, under a path where nothing can be written."""
    folder, view = tmp_path / "kv", tmp_path / "view"
    store = opened(folder)
    store.put([record(i) for i in range(3)])
    if os.geteuid() != 0:
        store.close()
        for path in [folder, *folder.rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)
        yield folder
        for path in [folder, *folder.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)
        return
    view.mkdir()
    if subprocess.run(["mount", "--bind", str(folder), str(view)], capture_output=True).returncode != 0:
        store.close()
        pytest.skip("root may write anywhere, and a read-only view of a folder cannot be mounted here")
    subprocess.run(["mount", "-o", "remount,ro,bind", str(view)], check=True)
    yield view
    subprocess.run(["umount", "-l", str(view)], check=True)
    store.close()


def test_a_read_only_folder_can_be_read(read_only: Path) -> None:
    store = opened(read_only)
    assert store.stats().chunks == 3
    assert all(same(store, record(i)) for i in range(3))
    store.touch([record(0).key])
    store._flush_touched()
    store.quarantine(record(0).key)
    for write in (
        lambda: store.put([record(9)]),
        lambda: store.set_document("d", []),
        lambda: store.remove([record(1).key]),
    ):
        with pytest.raises(StoreReadOnlyError, match="another store folder"):
            write()
    assert same(store, record(0))
    store.close()


def test_a_folder_that_became_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StoreReadOnlyError, match="Read-only file system"):
        store.put([record(1)])
    monkeypatch.undo()
    assert store.stats().chunks == 0
    store.close()


def test_answers_from_a_read_only_store(model: Model, hf: Any, tmp_path: Path) -> None:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS[:3])
        engine.store._manifest.read_only = True  # type: ignore[attr-defined]
        engine.store._last_touch = -1e9  # type: ignore[attr-defined]
        for path in sorted(tmp_path.glob("chunks/*/*"))[:1]:
            _damage(path, "flipped")
        ids = model.tokenizer.render(messages(*CHUNKS))
        for _ in range(2):
            done = prepare(engine, ids, 1.0)
            assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
            assert len(done.report(0.0).runs) == 2
        answer = engine.generate(messages(*CHUNKS), documents=[CHUNKS[3]], max_new_tokens=2)
        assert "could not be kept" in answer.report.notes[0]
        with pytest.raises(StoreReadOnlyError):
            engine.warm(CHUNKS)


def test_no_space_left_while_writing_chunks(
    engine: BlendEngine, hf: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine.warm(CHUNKS[:1])
    real = os.fsync

    calls = iter(range(1000))

    def full(descriptor: int) -> None:
        if next(calls) > 0:
            time.sleep(0.05)  # the other writers are still at work when the first has failed
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFullError, match="full"):
        engine.warm(CHUNKS)
    assert engine.store.stats().chunks == 1
    assert not list(tmp_path.rglob("*.tmp"))
    answer = engine.generate(messages(*CHUNKS), documents=CHUNKS, max_new_tokens=3, ratio=1.0)
    assert "could not be kept" in answer.report.notes[0]
    assert len(answer.report.runs) == 1
    monkeypatch.setattr(os, "fsync", real)
    assert engine.warm(CHUNKS).new == 3


LIMITED = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_store import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = opened(Path({folder!r}))
store.put([record(1)])
resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))
try:
    store.put([record(2, tokens=2000)])
except StoreFullError as error:
    print("full:", error)
assert same(store, record(1))
assert store.missing([record(2).key])
assert not list(Path({folder!r}).rglob("*.tmp"))
"""


def test_a_real_file_size_limit(tmp_path: Path) -> None:
    code = LIMITED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "full:" in done.stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_really_full_disk(small_disk: Path, model: Model, hf: Any) -> None:
    store = FileStore(small_disk / "kv", min_free_bytes=0)
    with BlendEngine(model, store) as engine:
        engine.warm(CHUNKS)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(StoreFullError):
            engine.warm([" ".join(CHUNKS), " ".join(CHUNKS[::-1])])
        assert store.stats().chunks == 4
        ids = model.tokenizer.render(messages(*CHUNKS))
        store._last_touch = -1e9  # the time of use is due to be written, and cannot be
        done = prepare(engine, ids, 1.0)
        assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
        assert len(done.report(0.0).runs) == 4
        _damage(next(small_disk.glob("kv/chunks/*/*.safetensors")), "header")
        engine._ram = MemoryTier(0)
        done = prepare(engine, ids, 1.0)
        assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
        filler.unlink()
        assert engine.warm([" ".join(CHUNKS)]).new == 1


def test_a_disk_with_less_left_than_is_to_be_kept_free_is_full(tmp_path: Path) -> None:
    store = opened(tmp_path, min_free_bytes=1 << 60)
    with pytest.raises(StoreFullError, match="kept free"):
        store.put([record(1)])
    assert store.stats().chunks == 0
    store.close()


# ---------------------------------------------------------------- budget, documents, gc, check


def test_least_recently_used_chunks_make_room(tmp_path: Path) -> None:
    size = len(chunkfile.pack(record(0), FINGERPRINT.digest))
    store = opened(tmp_path, max_bytes=10 * size + 500)
    for i in range(10):
        store.put([record(i)])
    store.touch([record(0).key, record(3).key])
    removals = store.removals()
    store.put([record(10)])
    left = {i for i in range(11) if not store.missing([record(i).key])}
    assert store.stats().bytes <= 0.8 * store.max_bytes  # type: ignore[operator]
    assert {0, 3, 9, 10} <= left
    assert left.isdisjoint({1, 2})
    assert store.removals() > removals
    assert {path.name.split(".")[0] for path in tmp_path.glob("chunks/*/*")} == {record(i).key for i in left}
    with pytest.raises(StoreFullError, match="raise max_bytes"):
        store.put([record(i) for i in range(20, 40)])
    assert {i for i in range(11) if not store.missing([record(i).key])} == left
    store.close()


def test_a_corpus_larger_than_the_budget_is_pointed_out(model: Model, tmp_path: Path) -> None:
    texts = [f"{CHUNKS[i % 4]} Number {i} of the series is the {i * 7}th of its kind." for i in range(12)]
    with BlendEngine(model, FileStore(tmp_path / "a", min_free_bytes=0)) as engine:
        assert engine.warm(texts).warnings == ()
        size = engine.store.stats().bytes
    with BlendEngine(model, FileStore(tmp_path / "b", max_bytes=size // 2, min_free_bytes=0)) as engine:
        warnings: list[str] = []
        for half in (texts[:3], texts[3:6], texts[:6] + texts[6:9]):
            warnings += engine.warm(half).warnings
        assert engine.store.stats().bytes <= size // 2
        assert any("budget" in warning for warning in warnings)


def test_documents_share_chunks_and_forgetting_one_leaves_the_other(store: FileStore) -> None:
    keys = [record(i).key for i in range(4)]
    store.put([record(i) for i in range(4)])
    assert store.set_document("a", keys[:3]) == 0
    assert store.set_document("b", keys[2:]) == 0
    assert store.stats().documents == 2
    assert store.set_document("a", [keys[1]]) == 1  # keys[0] is gone, keys[2] is b's too
    assert store.missing(keys) == [keys[0]]
    assert store.set_document("b", []) == 2
    assert store.missing(keys) == [keys[0], keys[2], keys[3]]
    assert store.stats().documents == 1
    assert store.set_document("never heard of", []) == 0


def test_chunks_without_a_name_are_never_dropped_by_a_document(store: FileStore) -> None:
    key = record(1).key
    store.put([record(1)])
    store.set_document("", [key])
    store.set_document("a", [key])
    assert store.set_document("a", []) == 0
    assert store.missing([key]) == []


def test_engine_documents(engine: BlendEngine) -> None:
    engine.warm(CHUNKS[:3], document="one")
    engine.warm(CHUNKS[2:], document="two")
    assert engine.store.stats().chunks == 4
    assert engine.warm([CHUNKS[0], CHUNKS[2]], document="one").new == 0
    assert engine.store.stats().chunks == 3
    assert engine.forget("one") == 1
    assert engine.forget("one") == 0
    report = engine.generate(messages(*CHUNKS), max_new_tokens=1).report
    assert len(report.runs) == 2
    with pytest.raises(SettingError, match="name"):
        engine.forget("")


def test_several_documents_are_warmed_together(engine: BlendEngine) -> None:
    report = engine.warm([CHUNKS[0], CHUNKS[1], CHUNKS[0], "short"], document=["b/1", "a", "b/2", "b/3"])
    assert (report.new, report.skipped) == (2, 1)
    assert engine.documents() == ["a", "b/1", "b/2"]
    assert engine.documents("b/") == ["b/1", "b/2"]
    assert engine.documents("c") == []
    assert engine.forget("b/1") == 0  # b/2 has it too
    assert engine.forget("b/2") == 1
    assert engine.documents() == ["a"]
    with pytest.raises(SettingError, match="2 names of documents for 1 texts"):
        engine.warm(CHUNKS[2:3], document=["c", "d"])
    assert engine.store.stats().chunks == 1


def test_a_document_that_is_deleted_and_added_again_is_not_encoded_again(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.warm(CHUNKS[:3], document="d")
    expected = engine.generate(messages(*CHUNKS), max_new_tokens=4, policy="none")
    assert engine.forget("d") == 3
    assert engine.store.stats().chunks == 0
    assert not list(Path(engine.store.stats().path).rglob("*.safetensors"))
    encoded: list[int] = []
    encode = ingest.encode
    monkeypatch.setattr(ingest, "encode", lambda model, *given: encoded.append(len(given[0])) or encode(model, *given))
    report = engine.warm(CHUNKS[1:], document="d")
    assert encoded == [1]
    assert (report.new, report.reused) == (1, 2)
    engine.forget("d")
    engine.warm(CHUNKS[:1], document="other")  # what was dropped before is let go now
    encoded.clear()
    engine.warm(CHUNKS[:3], document="d")
    assert encoded == [2]
    again = engine.generate(messages(*CHUNKS), max_new_tokens=4, policy="none")
    assert (again.token_ids, again.report.reused_tokens) == (expected.token_ids, expected.report.reused_tokens)


def test_dropped_chunks_keep_few_files_open(store: FileStore) -> None:
    store.put([record(1)])
    dropped, readers = DroppedChunks(), [ChunkFile(store._file(record(1).key)) for _ in range(300)]
    for number, reader in enumerate(readers):
        dropped.keep(str(number), reader)
    assert [reader._file.closed for reader in readers] == [True] * 44 + [False] * 256
    assert dropped.take("0") is None
    assert dropped.take("299") is readers[299]
    dropped.keep("298", readers[0])  # instead of the one before
    dropped.clear()
    assert [reader._file.closed for reader in readers] == [True] * 299 + [False]
    readers[299].close()


def _age(path: Path, seconds: float = 7200) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_gc_deletes_what_nobody_holds_and_what_is_left_over(store: FileStore) -> None:
    store.put([record(i) for i in range(3)])
    store.set_document("a", [record(0).key])
    leftover, fresh = record(7), record(8)
    for orphan in (leftover, fresh):
        path = store.path / "chunks" / orphan.key[:2] / f"{orphan.key}.safetensors"
        chunkfile.write(path, chunkfile.pack(orphan, FINGERPRINT.digest), ".x.tmp")
        if orphan is leftover:
            _age(path)
    store.quarantine(record(1).key)
    assert store.gc() == (1, 1)
    assert store.missing([record(i).key for i in range(3)]) == [record(1).key, record(2).key]
    assert len(list(store.path.glob("quarantine/*"))) == 1  # young enough to be looked at
    for path in store.path.glob("quarantine/*"):
        _age(path)
    assert store.gc() == (0, 1)
    assert same(store, record(0))
    assert {path.name.split(".")[0] for path in store.path.glob("chunks/*/*")} == {record(0).key, fresh.key}


def test_check_adopts_whole_files_and_quarantines_damaged_ones(store: FileStore) -> None:
    store.put([record(i) for i in range(4)])
    orphan = record(9)
    chunkfile.write(store._file(orphan.key), chunkfile.pack(orphan, FINGERPRINT.digest), ".x.tmp")
    torn = store._file("ab" * 16)
    torn.parent.mkdir(exist_ok=True)
    torn.write_bytes(b"torn")
    _damage(file_of(store, record(1)), "flipped")
    file_of(store, record(2)).unlink()
    seen: list[tuple[int, int]] = []
    assert store.check(lambda done, total: seen.append((done, total))) == (3, 3, 1)
    assert seen[-1] == (6, 6)
    assert same(store, orphan)
    assert {entry.key for entry in store.entries(0)} == {record(0).key, record(3).key, orphan.key}
    assert store.check() == (3, 0, 0)
    assert store.gc() == (2, 0)  # the adopted one is held


def test_temporary_files_of_killed_writers_are_swept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([record(1)])
    store.close()
    folder = next((tmp_path / "chunks").iterdir())
    old, young = folder / ".1.abc.tmp", folder / ".2.def.tmp"
    for path in (old, young):
        path.write_bytes(b"half a chunk")
    _age(old)
    again = opened(tmp_path)
    assert not old.exists()
    assert young.exists(), "its writer may be at work"
    assert same(again, record(1))
    assert again.stats().chunks == 1
    again.close()


# ---------------------------------------------------------------- several at once


def test_a_chunk_removed_and_stored_again_at_the_same_time_has_its_file(tmp_path: Path) -> None:
    """One side removes: row, then file. The other has stored the chunk in between."""
    remover, writer = opened(tmp_path), opened(tmp_path)
    remover.put([record(1)])
    remove_rows = remover._manifest.remove

    def interrupted(keys: Sequence[str], counter: str | None = None) -> None:
        remove_rows(keys, counter)
        writer.put([record(1)])

    remover._manifest.remove = interrupted  # type: ignore[method-assign]
    remover.remove([record(1).key])
    assert same(writer, record(1)), "a row has a file"

    add_rows = writer._manifest.add
    remover._manifest.remove = remove_rows  # type: ignore[method-assign]
    remover.remove([record(1).key])

    def late(rows: Any) -> None:
        remover.put([record(1)])
        remover.remove([record(1).key])
        add_rows(rows)

    writer._manifest.add = late  # type: ignore[method-assign]
    writer.put([record(1)])
    assert same(remover, record(1))
    remover.close()
    writer.close()


OPEN = """
import sys
from pathlib import Path
from kvrag.store.manifest import Manifest
print("ready", flush=True)
for line in sys.stdin:
    manifest = Manifest(Path(line.strip()))
    print(int(manifest.read_only), int(manifest.rebuilt), manifest.totals()[0], flush=True)
    manifest.close()
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_several_processes_open_a_folder_at_once(tmp_path: Path, damaged: bool) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", OPEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for number in range(60):
            path = tmp_path / f"{number}.sqlite"
            if damaged:
                path.write_bytes(b"not a database" * 400)
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(f"{path}\n")
                process.stdin.flush()
            answers = [process.stdout.readline().split() for process in processes if process.stdout]
            assert [answer[0] for answer in answers] == ["0"] * 3, "none may think that the folder cannot be written"
            assert sum(answer[1] == "1" for answer in answers) == (1 if damaged else 0)
            assert len(list(tmp_path.glob(f"{number}.sqlite.damaged-*"))) == (1 if damaged else 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_row_that_two_writers_add_keeps_its_number(store: FileStore) -> None:
    store.put([record(1), record(2)])
    (entry, _) = store.entries(0)
    store._manifest.add([(entry.key, 20, 1, entry.ids.tobytes(), entry.anchors)])
    assert next((e.number, e.key) for e in store.entries(0)) == (entry.number, entry.key)


def test_a_failed_transaction_does_not_block_the_next(store: FileStore) -> None:
    rows = [("k", 1, 1, b"", b""), ("broken", object())]
    with pytest.raises((sqlite3.Error, StoreError, ValueError)):
        store._manifest.add(rows)  # type: ignore[arg-type]
    assert store.stats().chunks == 0
    store.put([record(1)])
    assert same(store, record(1))


# ---------------------------------------------------------------- the RAM tier


def _layers(kilobytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    half = torch.zeros(kilobytes * 512, dtype=torch.uint8)
    return [(half, half.clone())]


def test_the_ram_tier_is_bounded_and_drops_the_least_recently_used() -> None:
    memory = MemoryTier(10 * 1024)
    for name in "abc":
        memory.keep(name, _layers(3))
    assert memory.open("a") is not None
    memory.keep("d", _layers(3))
    assert [name for name in "abcd" if memory.open(name)] == ["a", "c", "d"]
    assert memory.bytes == 9 * 1024
    memory.keep("huge", _layers(11))
    assert memory.open("huge") is None
    memory.keep("a", _layers(5))
    assert memory.bytes == 9 * 1024
    memory.drop("a")
    memory.drop("a")
    assert (memory.bytes, len(memory)) == (6 * 1024, 2)


def test_the_ram_tier_takes_only_what_was_read_whole(store: FileStore) -> None:
    store.put([record(1)])
    memory = MemoryTier(1 << 20)
    for layers in ([0], [0, 1], [2, 1, 0]):
        reader = store.open(record(1).key)
        assert reader is not None
        keeping = memory.keeping(record(1).key, reader)
        for number in layers:
            keeping.layer(number)
        keeping.close()
        assert (memory.open(record(1).key) is not None) == (len(layers) == 3)
    kept = memory.open(record(1).key)
    assert kept is not None
    assert torch.equal(kept.layer(1)[0], record(1).layers[1][0])
    assert (kept.tier, kept.bytes_read, kept.num_layers) == ("ram", 0, 3)


def test_a_ram_tier_of_no_bytes_holds_on_to_nothing(store: FileStore) -> None:
    store.put([record(1)])
    reader = store.open(record(1).key)
    assert reader is not None
    keeping = MemoryTier(0).keeping(record(1).key, reader)
    assert keeping is reader
    reader.close()


def test_answers_report_their_tier_and_are_the_same_from_ram_and_disk(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    ids = engine.model.tokenizer.render(messages(*CHUNKS[:2]))
    first = prepare(engine, ids, 0.2, "hkvd")
    again = prepare(engine, ids, 0.2, "hkvd")
    assert (first.report(0.0).tier, again.report(0.0).tier) == ("disk", "ram")
    assert first.report(0.0).bytes_loaded > 0
    assert again.report(0.0).bytes_loaded == 0
    assert torch.equal(first.logits, again.logits)
    mixed = prepare(engine, engine.model.tokenizer.render(messages(*CHUNKS[1:3])), 0.2)
    assert mixed.report(0.0).tier == "mixed"
    kept = engine._ram._chunks
    ram = {key: [tuple(tensor.clone() for tensor in pair) for pair in layers] for key, (layers, *_) in kept.items()}
    for policy in ("hkvd", "query", "random"):
        prepare(engine, ids, 1.0, policy)
    for key, layers in ram.items():
        for ours, theirs in zip(engine._ram._chunks[key][0], layers, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


def test_a_forgotten_chunk_is_served_by_no_tier(engine: BlendEngine) -> None:
    engine.warm(CHUNKS, document="d")
    prompt = messages(*CHUNKS)
    assert engine.generate(prompt, max_new_tokens=1).report.tier == "disk"
    assert engine.generate(prompt, max_new_tokens=1).report.tier == "ram"
    engine.forget("d")
    report = engine.generate(prompt, max_new_tokens=1).report
    assert (report.tier, report.reused_tokens, report.bytes_loaded) == ("", 0, 0)


def test_a_new_store_is_its_owners_alone(tmp_path: Path) -> None:
    """The manifest has token ids, and the folder the texts of `kvrag warm`."""
    umask = os.umask(0o022)
    try:
        FileStore(tmp_path / "deep" / "kv", min_free_bytes=0).close()
        (tmp_path / "shared").mkdir(mode=0o750)
        FileStore(tmp_path / "shared", min_free_bytes=0).close()
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("deep", "deep/kv", "deep/kv/chunks", "shared")]
    assert modes == [0o755, 0o700, 0o700, 0o750]
