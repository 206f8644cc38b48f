"""The embedded store: stored chunks are returned unchanged, and a damaged folder never gives wrong KV."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from blending import CHUNKS, messages, plain_logits, prepare, relative
from processes import expect, start, tell
from records import FINGERPRINT, HELPERS, file_of, holding, opened, packed, record, same, served, text

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
)
from kvrag.cli.main import main
from kvrag.errors import ChunkUnreadableError
from kvrag.fingerprint import FORMAT, hash_weights
from kvrag.memory.tier import MemoryTier
from kvrag.store import (
    ON_REQUEST,
    ChunkReader,
    StoreCheck,
    TextState,
    files,
    schema,
    visible_variant,
)
from kvrag.store.chunkfile import ChunkFile
from kvrag.store.files import write_file
from kvrag.store.manifest import Manifest, ManifestRow
from kvrag.store.values import chunk_key, text_key


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
    assert (entry.text_key, entry.ids.tolist(), entry.namespace) == (text(wanted), wanted.ids.tolist(), "")


def test_the_file_is_a_safetensors_file_with_each_layer_in_one_piece(store: FileStore) -> None:
    wanted = record(1)
    store.put([wanted])
    from safetensors import safe_open

    with safe_open(file_of(store, wanted), "pt") as file:
        assert torch.equal(file.get_tensor("002.v"), wanted.layers[2][1])
        assert file.metadata()["key"] == wanted.key
    chunk = ChunkFile(file_of(store, wanted), wanted.key, FINGERPRINT.digest)
    for number in range(3):
        keys, values = (chunk._tensors[f"{number:03d}.{name}"]["data_offsets"] for name in "kv")
        assert keys[1] == values[0]
    chunk.close()


def test_tensors_that_are_views_are_stored_by_value(store: FileStore) -> None:
    big = torch.randn(2, 100, 8)
    wanted = replace(record(1), layers=[(big[:, 10:30, ::2], big[:, 40:60, 1::2])])
    store.put([wanted])
    assert same(store, wanted)
    assert file_of(store, wanted).stat().st_size < 4200


def test_many_keys_at_once(store: FileStore) -> None:
    keys = [record(i).key for i in range(1300)]
    store.put([record(5), record(1200)])
    assert store.missing(keys) == [key for key in keys if key not in (keys[5], keys[1200])]


def test_use_after_close_is_a_named_error(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.missing(["0" * 32])


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_a_budget_is_positive(tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(SettingError, match="max_bytes"):
        FileStore(tmp_path, max_bytes=max_bytes)


def test_readers_of_the_manifest_do_not_wait_for_writers(store: FileStore) -> None:
    with contextlib.closing(sqlite3.connect(store.path / "manifest.sqlite")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# ---------------------------------------------------------------- damage


def _write_at(path: Path, at: int, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))


@pytest.mark.parametrize(("context", "namespace"), [((), ""), ((7, 8, 9), "tenant")])
def test_every_single_flipped_bit_of_a_header_is_detected(
    store: FileStore, context: tuple[int, ...], namespace: str
) -> None:
    """Of the header with its length and padding, and of everything that opening reads."""
    wanted = record(1, tokens=16, layers=2, context=context, namespace=namespace)
    store.put([wanted])
    path = file_of(store, wanted)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    for at in range(header + 8 * (len(wanted.ids) + len(context))):
        for bit in range(8):
            _write_at(path, at, good[at] ^ 1 << bit)
            with pytest.raises(DamagedChunkError):
                store.open(wanted.key)
        _write_at(path, at, good[at])
    assert same(store, wanted)


def test_flipped_bits_of_the_payload_are_detected(store: FileStore) -> None:
    wanted = record(1, layers=1, tokens=16)
    store.put([wanted])
    path = file_of(store, wanted)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    for at in range(header + 8 * 16, len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        reader = store.open(wanted.key)
        assert reader is not None
        with pytest.raises(DamagedChunkError, match="layer 0"):
            reader.layer(0)
        reader.close()


@pytest.mark.parametrize("change", ["namespace", "context", "ids", "longer context"])
def test_an_intact_file_of_another_key_is_damaged(store: FileStore, change: str) -> None:
    """Its digests are right: only the recomputed key differs."""
    wanted = record(1, context=(7, 8))
    changes: dict[str, Any] = {
        "namespace": {"namespace": "other"},
        "context": {"context": np.asarray([7, 9], np.uint32)},
        "ids": {"ids": wanted.ids + 1},
        "longer context": {"context": np.asarray([7, 8, wanted.ids[0]], np.uint32), "ids": wanted.ids[1:]},
    }
    store.put([wanted])
    file_of(store, wanted).write_bytes(packed(replace(wanted, **changes[change])))
    with pytest.raises(DamagedChunkError, match="its content belongs to chunk"):
        store.open(wanted.key)


@pytest.mark.parametrize("left", [0, 1, 7, 8, 9, 100, -1, -1000])
def test_a_truncated_file_is_detected_when_it_is_opened(store: FileStore, left: int) -> None:
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


def test_a_file_truncated_after_it_was_opened_is_detected(store: FileStore) -> None:
    store.put([record(1)])
    reader = store.open(record(1).key)
    assert reader is not None
    os.truncate(file_of(store, record(1)), 900)
    with pytest.raises(DamagedChunkError):  # noqa: PT012
        for number in range(3):
            reader.layer(number)
    reader.close()


def test_a_temporary_fault_leaves_the_chunk_in_place(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put([record(1)])
    reader = store.open(record(1).key)
    assert reader is not None
    for name in ("EIO", "EACCES", "ENOMEM", "ESTALE"):

        def fail(*_: Any, code: int = getattr(errno, name), **__: Any) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(ChunkUnreadableError, match=os.strerror(getattr(errno, name))) as caught:
            reader.layer(0)
        assert caught.value.key == record(1).key
        monkeypatch.undo()
        for function in ("open", "preadv"):
            with monkeypatch.context() as patch:
                patch.setattr(os, function, fail)
                with pytest.raises(ChunkUnreadableError, match=os.strerror(getattr(errno, name))):
                    store.open(record(1).key)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert store.check() == StoreCheck(sound=0, damaged=0, unreadable=1)
    reader.close()
    assert same(store, record(1))
    assert store.stats().damaged == 0


def test_reads_that_return_less_are_continued(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put([record(1)])
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [views[0][:100]], offset))
    assert same(store, record(1))


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_without_memory_the_chunk_stays_where_it_is(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store.put([record(1)])
    reader = store.open(record(1).key)
    assert reader is not None

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(ChunkUnreadableError, match="out of memory"):
        reader.layer(0)
    monkeypatch.undo()
    reader.close()
    assert same(store, record(1))


MANY = """
import os, resource, sys
sys.path.insert(0, {helpers!r})
from records import *
from kvrag.errors import ChunkUnreadableError
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
store = opened(Path({folder!r}))
records = [record(i, layers=1) for i in range(1100)]
store.put(records)
readers = [store.open(record.key) for record in records]
print(len(os.listdir("/proc/self/fd")))
for _ in range(2):
    for reader, record in zip(readers, records):
        assert torch.equal(reader.layer(0)[0], record.layers[0][0])
store.remove([records[-1].key])
try:
    readers[-1].layer(0)
except ChunkUnreadableError as error:
    print(error)
for reader in readers:
    reader.close()
print(len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.slow
def test_more_chunks_are_read_at_once_than_files_may_be_open(tmp_path: Path) -> None:
    code = MANY.format(helpers=HELPERS, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    most, deleted, left = done.stdout.splitlines()
    assert int(most) < 50
    assert "its file has been deleted" in deleted
    assert int(left) < 50


def test_another_chunk_under_this_name_is_detected(store: FileStore) -> None:
    store.put([record(1), record(2)])
    shutil.copy(file_of(store, record(2)), file_of(store, record(1)))
    with pytest.raises(DamagedChunkError, match=record(2).key):
        store.open(record(1).key)


def test_a_file_of_another_model_is_detected(store: FileStore) -> None:
    store.put([record(1)])
    file_of(store, record(1)).write_bytes(packed(record(1), "f" * 32))
    with pytest.raises(DamagedChunkError, match="another model"):
        store.open(record(1).key)


def test_a_row_without_a_file_is_damage_and_a_missing_row_is_not(store: FileStore) -> None:
    store.put([record(1)])
    file_of(store, record(1)).unlink()
    with pytest.raises(DamagedChunkError, match="is missing"):
        store.open(record(1).key)
    assert store.open(record(2).key) is None


def test_damaged_chunks_are_deleted_and_counted(store: FileStore) -> None:
    store.put([record(1), record(2)])
    before = store.removals()
    for number in (1, 2, 2):
        store.discard(record(number).key)
    assert store.stats().damaged == 2
    assert store.stats().chunks == 0
    assert store.removals() != before
    assert not list(store.path.glob("chunks/*/*"))
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
    key = chunk_key(engine.model.fingerprint.digest, engine.model.tokenizer.encode(CHUNKS[2]))
    (path,) = engine.store.path.glob(f"chunks/*/{key}-*.safetensors")  # type: ignore[attr-defined]
    if how == "gone":
        path.unlink()
    else:
        _damage(path, how)
    before = len(os.listdir("/proc/self/fd"))
    done = prepare(engine, ids, 1.0, "random")
    report = done.report
    assert len(os.listdir("/proc/self/fd")) <= before  # other threads may close some
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
    assert len(report.runs) == 3
    assert key not in {run.key for run in report.runs}
    assert "recomputed" in report.notes[0]
    assert engine.store.stats().damaged == 1
    assert engine.store.stats().chunks == 3
    assert "is damaged: deleted" in caplog.text
    warmed = engine.warm(CHUNKS)
    assert (warmed.new, warmed.reused) == (1, 3)
    done = prepare(engine, ids, 1.0, "random")
    assert len(done.report.runs) == 4
    assert done.report.notes == ()
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5


def test_every_chunk_damaged_at_once(engine: BlendEngine, hf: Any) -> None:
    engine.warm(CHUNKS)
    ids = engine.model.tokenizer.render(messages(*CHUNKS))
    for path in engine.store.path.glob("chunks/*/*"):  # type: ignore[attr-defined]
        _damage(path, "flipped")
    done = prepare(engine, ids, 0.15, "query")
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
    assert done.report.stored_tokens == 0
    assert done.report.exact
    assert engine.store.stats().damaged == 4


def test_a_damaged_chunk_that_cannot_be_deleted_does_not_fail_the_answer(
    engine: BlendEngine, hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.warm(CHUNKS)
    folder: Path = engine.store.path  # type: ignore[attr-defined]
    for path in folder.glob("chunks/*/*"):
        _damage(path, "flipped")

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    ids = engine.model.tokenizer.render(messages(*CHUNKS))
    done = prepare(engine, ids, 0.0, "none")
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
    assert len(done.report.notes) == 4


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


@pytest.mark.parametrize("how", ["garbage", "header", "truncated"])
def test_a_damaged_manifest_is_named_in_one_line(how: str, tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([record(i) for i in range(40)])
    store.close()
    _spoil(tmp_path / "manifest.sqlite", how)
    with pytest.raises(StoreError, match="it is damaged: delete it and warm again") as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["emptied", "deleted"])
def test_chunks_of_a_lost_manifest_are_collected(how: str, tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([record(i) for i in range(4)])
    store.close()
    _spoil(tmp_path / "manifest.sqlite", how)
    again = opened(tmp_path)
    again.put([record(1)])
    again.set_document("a", [holding(record(1), "a")])
    assert again.gc() == (0, 4)
    assert [path.name for path in tmp_path.glob("chunks/*/*")] == [file_of(again, record(1)).name]
    assert same(again, record(1))
    again.close()


def test_random_damage_to_the_manifest_is_named_or_harmless(tmp_path: Path) -> None:
    """No exception but StoreError, and no wrong KV."""
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
        with contextlib.suppress(StoreError):
            broken.check()
            entries = {entry.text_key: entry.ids.tolist() for entry in broken.entries(0)}
            for i in range(60):
                assert entries.get(text(record(i))) in (None, record(i).ids.tolist()), trial
        for i in range(60):
            with contextlib.suppress(StoreError):
                assert broken.open(record(i).key) is None or same(broken, record(i))
        broken.close()
        shutil.rmtree(folder)


def test_a_manifest_that_cannot_be_read_at_the_moment_is_kept(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put([record(1)])
    store.set_document("report", [holding(record(1), "source")])

    def fail(*_: Any) -> NoReturn:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(schema, "SQLiteFile", fail)
        store._manifest._close_idle()
        with pytest.raises(StoreError, match="disk I/O error"):
            store.check()
    assert store.check() == StoreCheck(1, 0, 0)
    assert list(store.documents()) == ["report"]


@pytest.mark.parametrize("table", ["chunks", "holders"])
def test_a_damaged_index_leads_to_no_other_text(table: str, tmp_path: Path) -> None:
    records = sorted((record(number) for number in range(3)), key=text)
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(records)
        store.set_document("report", [holding(each, "source") for each in records])
    # with its entries in the wrong order, a search that has found a text continues to another text
    with contextlib.closing(sqlite3.connect(tmp_path / "manifest.sqlite")) as manifest:
        manifest.execute("PRAGMA writable_schema=ON")
        changed = manifest.execute(
            "UPDATE sqlite_master SET sql = replace(sql, '(text,', '(text DESC,') WHERE name = ?", (f"{table}_text",)
        )
        assert changed.rowcount == 1
        manifest.commit()
    with contextlib.closing(opened(tmp_path)) as store:
        wanted = text(records[1])
        states = store.look_up([wanted])
        assert states == {wanted: TextState({records[1].key: 0}, {"source": records[1].key})}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"x"', '{"model": 3}', "\xff"])
def test_a_damaged_owner_file_is_named(content: str, tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "fingerprint.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(StoreError, match=r"fingerprint\.json is damaged"):
        FileStore(tmp_path, min_free_bytes=0)


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
        with pytest.raises(StoreError, match=r"cannot use .*: choose another store folder"):
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


def test_uses_are_recorded_without_a_later_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_TOUCH_EVERY", 0.01)
    store = opened(tmp_path)
    store.put([record(1)])
    for _ in range(3):
        store.touch([record(1).key])
        store.touch([record(1).key])
        deadline = time.monotonic() + 60
        while store._touched:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    store.close()


def test_a_read_only_folder_is_refused(read_only: Path) -> None:
    with pytest.raises(StoreReadOnlyError, match="another store folder"):
        opened(read_only)


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


def test_check_leaves_alone_what_was_stored_again_meanwhile(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([record(0)])
    (row,) = store._manifest.rows()
    store.remove([record(0).key])
    store.put([record(0)])
    assert store._check_chunk(row) == "removed"
    assert store.stats().damaged == 0
    assert same(store, record(0))
    store.close()


def test_a_folder_that_was_deleted(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    with pytest.raises(StoreError, match="cannot use"):
        store.put([record(1)])
    store.close()


@pytest.mark.parametrize("name", ["../../../victim", "/victim", "..", ".", "", "../manifest.sqlite"])
def test_a_file_name_in_the_manifest_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"somebody's")
    store = opened(tmp_path / "kv")
    store.put([record(0), record(1)])
    with store._manifest.transaction() as connection:
        connection.execute("UPDATE chunks SET file = ?", (name.replace("/victim", str(tmp_path / "victim")),))
        if name.startswith("../../"):
            connection.execute("UPDATE chunks SET file = ?", (name,))
    for use in (store.open, store.discard, lambda key: store.remove([key])):
        with contextlib.suppress(DamagedChunkError):
            assert not use(record(0).key)
    store.remove([record(1).key])
    store.gc()
    assert (tmp_path / "victim").exists()
    assert (tmp_path / "kv" / "manifest.sqlite").exists()
    store.close()


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
    assert "could not be stored" in answer.report.notes[0]
    assert len(answer.report.runs) == 1
    monkeypatch.setattr(os, "fsync", real)
    assert engine.warm(CHUNKS).new == 3


LIMITED = """
import resource, signal, sys
sys.path.insert(0, {helpers!r})
from records import *
from kvrag import StoreFullError
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


@pytest.mark.slow
def test_a_real_file_size_limit(tmp_path: Path) -> None:
    code = LIMITED.format(helpers=HELPERS, folder=str(tmp_path))
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
        done = prepare(engine, ids, 1.0)
        assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
        assert len(done.report.runs) == 4
        _damage(next(small_disk.glob("kv/chunks/*/*.safetensors")), "header")
        object.__setattr__(engine._pipeline, "memory", MemoryTier(0))
        done = prepare(engine, ids, 1.0)
        assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
        filler.unlink()
        assert engine.warm([" ".join(CHUNKS)]).new == 1


def test_a_disk_with_less_than_the_reserved_space_is_full(tmp_path: Path) -> None:
    store = opened(tmp_path, min_free_bytes=1 << 60)
    with pytest.raises(StoreFullError, match="must stay free"):
        store.put([record(1)])
    assert store.stats().chunks == 0
    store.close()


# ---------------------------------------------------------------- budget, documents, gc, check


def test_least_recently_used_chunks_make_room(tmp_path: Path) -> None:
    size = len(packed(record(0)))
    store = opened(tmp_path, max_bytes=10 * size + 1000)
    for i in range(10):
        store.put([record(i)])
    store.touch([record(0).key, record(3).key])
    removals = store.removals()
    store.put([record(10)])
    left = {i for i in range(11) if not store.missing([record(i).key])}
    assert store.stats().bytes <= 0.95 * store.max_bytes  # type: ignore[operator]
    assert {0, 3, 9, 10} <= left
    assert left.isdisjoint({1, 2})
    assert store.removals() > removals
    assert {path.name.split("-")[0] for path in tmp_path.glob("chunks/*/*")} == {record(i).key for i in left}
    with pytest.raises(StoreFullError, match="raise max_bytes"):
        store.put([record(i) for i in range(20, 40)])
    assert {i for i in range(11) if not store.missing([record(i).key])} == left
    store.close()


@pytest.mark.parametrize("of_namespace", [False, True])
def test_a_corpus_larger_than_the_budget_is_reported(model: Model, tmp_path: Path, of_namespace: bool) -> None:
    texts = [f"{CHUNKS[i % 4]} Number {i} of the series is the {i * 7}th of its kind." for i in range(12)]
    with BlendEngine(model, FileStore(tmp_path / "a", min_free_bytes=0)) as engine:
        assert engine.warm(texts).warnings == ()
        size = engine.store.stats().bytes
    store = FileStore(tmp_path / "b", max_bytes=None if of_namespace else size // 2, min_free_bytes=0)
    if of_namespace:
        store.set_budget("", size // 2)
    with BlendEngine(model, store) as engine:
        warnings: list[str] = []
        for half in (texts[:3], texts[3:6], texts[:6] + texts[6:9]):
            warnings += engine.warm(half).warnings
        assert engine.store.stats().bytes <= size // 2
        assert any("budget" in warning for warning in warnings)


def test_documents_share_chunks_and_forgetting_one_leaves_the_other(store: FileStore) -> None:
    records = [record(i) for i in range(4)]
    keys = [wanted.key for wanted in records]
    store.put(records)
    assert store.set_document("a", [holding(wanted, "a") for wanted in records[:3]]) == []
    assert store.set_document("b", [holding(wanted, "b") for wanted in records[2:]]) == []
    assert store.stats().documents == 2
    assert store.set_document("a", [holding(records[1], "a")]) == [keys[0]]  # keys[2] is b's too
    assert store.missing(keys) == [keys[0]]
    assert sorted(store.set_document("b", [])) == sorted(keys[2:])
    assert store.missing(keys) == [keys[0], keys[2], keys[3]]
    assert store.stats().documents == 1
    assert store.set_document("never heard of", []) == []


def test_removed_chunks_free_the_disk_at_once(store: FileStore) -> None:
    store.put([record(1), record(2)])
    store.set_document("a", [holding(record(1), "a"), holding(record(2), "a")])
    assert len(list(store.path.glob("chunks/*/*"))) == 2
    assert len(store.set_document("a", [])) == 2
    assert list(store.path.glob("chunks/*/*")) == []
    assert store.stats().bytes == 0


def test_a_variant_without_documents_is_removed(store: FileStore) -> None:
    behind, alone = record(1, context=(7, 8)), record(1)
    store.put([behind])
    store.set_document("a", [holding(behind, "a")])
    assert served(store, alone) == behind.key
    store.put([alone])
    assert store.set_document("a", [holding(alone, "a")]) == [behind.key]
    assert [entry.text_key for entry in store.entries(0)] == [text(alone)], "the text was stored all the time"
    assert served(store, alone) == alone.key


# ---------------------------------------------------------------- what a prompt gets

B0, B1, B2 = "alone", "behind a", "behind b"


@pytest.mark.parametrize(
    ("variants", "sources", "wanted", "wanted_alone"),
    [
        ({B1: 5}, {"a": B1}, B1, None),
        ({B0: 0, B1: 5}, {"a": B1}, B1, B0),
        ({B0: 0, B1: 5}, {"a": B0}, B0, B0),
        ({B0: 0}, {"a": B1}, B0, B0),  # evicted
        ({B2: 5}, {"a": B1}, None, None),
        ({B1: 5, B2: 5}, {"a": B1, "b": B2}, None, None),
        ({B0: 0, B1: 5, B2: 5}, {"a": B1, "b": B2}, B0, B0),
        ({B0: 0, B1: 5}, {"a": B1, "": B0}, B0, B0),
        ({B1: 5}, {"": B1}, None, None),
        ({B1: 5}, {}, None, None),
        ({B0: 0, B1: 5}, {}, B0, B0),
        ({}, {"a": B1}, None, None),
    ],
)
def test_one_documents_words_never_reach_the_readers_of_another(
    variants: dict[str, int], sources: dict[str, str], wanted: str | None, wanted_alone: str | None
) -> None:
    assert visible_variant(TextState(variants, sources), alone_only=False) == wanted
    assert visible_variant(TextState(variants, sources), alone_only=True) == wanted_alone


def test_record_of_a_text(store: FileStore) -> None:
    alone, behind, other = record(1), record(1, context=(7, 8)), record(2)
    store.put([alone, behind, other])
    store.set_document("one", [holding(behind, "a")])
    store.set_document("two", [holding(behind, "a"), holding(other, "a")])
    store.set_document("three", [holding(alone, "b")])
    states = store.look_up([text(other), text(alone), "unknown"])
    assert states == {
        text(other): TextState({other.key: 0}, {"a": other.key}),
        text(alone): TextState({alone.key: 0, behind.key: 2}, {"a": behind.key, "b": alone.key}),
        "unknown": TextState({}, {}),
    }


def test_eviction_does_not_forget_who_holds_a_text(store: FileStore) -> None:
    """Otherwise the next encoded variant would count as the only holder's."""
    behind = record(1, context=(7, 8))
    store.put([record(1), behind])
    store.set_document("a", [holding(behind, "a")])
    store.set_document("b", [holding(record(1), "b")])
    store.remove([record(1).key])
    assert served(store, behind) is None, "not the variant with a's context"
    store.remove([behind.key])
    assert store.look_up([text(behind)])[text(behind)].sources == {"a": behind.key, "b": record(1).key}
    store.put([behind])
    assert served(store, behind) is None
    store.put([record(1)])
    assert served(store, behind) == record(1).key


def test_of_several_pieces_of_a_source_the_text_alone_is_served(store: FileStore) -> None:
    """A document that names a source must not choose the KV that the source's readers get."""
    one, other, alone = record(1, context=(7, 8)), record(1, context=(9,)), record(1)
    store.put([one, other])
    store.set_document("1", [holding(one, "a")])
    assert served(store, one) == one.key
    store.set_document("2", [holding(other, "a")])
    assert served(store, one) is None
    store.put([alone])
    assert served(store, one) == alone.key


def test_looking_up_waits_for_no_writer(store: FileStore) -> None:
    store.put([record(1)])
    with store._manifest.transaction() as connection, ThreadPoolExecutor(1) as pool:
        connection.execute("DELETE FROM chunks")

        def ask() -> tuple[Any, ...]:
            reader = store.open(record(1).key)
            assert reader is not None
            reader.close()
            store.touch([record(1).key])
            return served(store, record(1)), len(list(store.entries(0))), len(store.numbers()), store.removals()

        assert pool.submit(ask).result(timeout=60)[:2] == (record(1).key, 1)
        connection.execute("ROLLBACK")
        connection.execute("BEGIN")


def test_touching_never_writes_in_the_callers_thread(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put([record(1), record(2)])
    monkeypatch.setattr(files, "_TOUCH_EVERY", 0.01)
    threads: list[str] = []
    written, real = threading.Event(), Manifest.touch

    def touch(manifest: Manifest, keys: Sequence[str], uses: Sequence[int]) -> None:
        threads.append(threading.current_thread().name)
        real(manifest, keys, uses)
        written.set()

    monkeypatch.setattr(Manifest, "touch", touch)
    store.touch([record(1).key])
    store.touch([record(1).key])
    assert written.wait(60)
    assert threads
    assert threading.current_thread().name not in threads
    monkeypatch.setattr(files, "_TOUCH_EVERY", 1000.0)
    store.touch([record(2).key])
    store.close()  # writes what is pending
    assert threads[-1] == threading.current_thread().name


def test_the_numbers_of_a_manifest_that_was_lost_are_not_used_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([record(i) for i in range(5)])
    last, removals = max(store.numbers()), store.removals()
    store.close()
    _spoil(tmp_path / "manifest.sqlite", "deleted")
    again = opened(tmp_path)
    assert again.removals() != removals
    again.put([record(1)])
    assert min(again.numbers()) > last
    again.close()


# ---------------------------------------------------------------- namespaces


def test_keys_of_different_things_differ() -> None:
    keys = [
        chunk_key(FINGERPRINT.digest, [1, 2, 3]),
        chunk_key(FINGERPRINT.digest, [2, 3], [1]),
        chunk_key(FINGERPRINT.digest, [3], [1, 2]),
        chunk_key(FINGERPRINT.digest, [1, 2, 3], [], "a"),
        chunk_key(FINGERPRINT.digest, [1, 2, 3], [ord("a")], ""),
        chunk_key(replace(FINGERPRINT, weights="x").digest, [1, 2, 3]),
        text_key("", [1, 2, 3]),
        text_key("a", [1, 2, 3]),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}


def test_two_models_that_differ_in_a_buffer_alone_differ() -> None:
    """Quantised layers keep their weights there."""

    class Quantised(torch.nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("qweight", torch.full((5, 7), value, dtype=torch.int32))
            self.register_buffer("cos", torch.rand(9), persistent=False)

    one, same_one, other = (hash_weights(Quantised(value).state_dict().items()) for value in (1, 1, 2))
    assert one == same_one
    assert one != other


def test_nothing_of_a_forgotten_text_is_left_after_gc(model: Model, tmp_path: Path) -> None:
    """Its token ids are in its chunk file, in the manifest and SQLite's log."""
    ids = np.asarray(model.tokenizer.encode(CHUNKS[1]), np.uint32)[3:19]
    forms = [ids.astype(kind).tobytes() for kind in ("<u4", "<i8")]

    def left() -> set[str]:
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {path.parent.name for path in files if any(form in path.read_bytes() for form in forms)}

    with BlendEngine(model, FileStore(tmp_path / "kv", min_free_bytes=0)) as engine:
        engine.warm(CHUNKS[:1], document="kept")
        engine.warm(CHUNKS[1:2], document="secret")
        assert "kv" in left()
        engine.forget("secret")
        engine.store.gc()  # type: ignore[attr-defined]
        assert not left()
        assert len(engine.generate(messages(*CHUNKS), max_new_tokens=1).report.runs) == 1


# ---------------------------------------------------------------- documents of an engine


def test_engine_documents(engine: BlendEngine) -> None:
    engine.warm(CHUNKS[:3], document="one")
    engine.warm(CHUNKS[2:], document="two")
    assert engine.store.stats().chunks == 5, "the one that both have is stored with the first one's context and alone"
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
    assert engine.documents() == ["a", "b/1", "b/2", "b/3"], "the short one can be forgotten, too"
    assert engine.documents("b/") == ["b/1", "b/2", "b/3"]
    assert engine.documents("c") == []
    assert engine.forget("b/3") == 1
    assert engine.forget("b/1") == 0  # b/2 has it too
    assert engine.forget("b/2") == 1
    assert engine.documents() == ["a"]
    with pytest.raises(SettingError, match="2 document names for 1 texts"):
        engine.warm(CHUNKS[2:3], document=["c", "d"])
    assert engine.store.stats().chunks == 1


def test_a_chunk_that_a_document_begins_to_hold_is_not_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process records the document after this one has looked."""
    one, two = opened(tmp_path), opened(tmp_path)
    chunk, other = record(1), record(2)
    one.put([chunk, other])
    real = one._changes.change

    def late(op: str, **fields: Any) -> Any:
        monkeypatch.undo()
        two.set_document("doc", [holding(chunk, "doc")])
        return real(op, **fields)

    monkeypatch.setattr(one._changes, "change", late)
    assert one.gc()[0] == 1
    assert same(two, chunk)
    assert not same(two, other)
    for store in (one, two):
        store.close()


def test_gc_rewrites_the_manifest_after_removals_only(store: FileStore) -> None:
    store.put([record(0)])
    statements: list[str] = []
    store._manifest._writer.set_trace_callback(statements.append)
    assert store.gc() == (1, 0)
    assert statements.count("VACUUM") == 1
    assert store.gc() == (0, 0)
    assert statements.count("VACUUM") == 1


def test_gc_deletes_chunks_without_holders_and_leftovers(store: FileStore) -> None:
    store.put([record(i) for i in range(3)])
    store.set_document("a", [holding(record(0), "a")])
    write_file(store._file(f"{record(7).key}-0.safetensors"), packed(record(7)))
    with store._locked():
        assert store.gc() == (2, 0), "its writer may be about to enter it"
    assert store.gc() == (0, 1)
    assert store.missing([record(i).key for i in range(3)]) == [record(1).key, record(2).key]
    assert same(store, record(0))
    assert {path.name.split("-")[0] for path in store.path.glob("chunks/*/*")} == {record(0).key}


def test_check_deletes_damaged_chunks(store: FileStore) -> None:
    store.put([record(i) for i in range(4)])
    _damage(file_of(store, record(1)), "flipped")
    file_of(store, record(2)).unlink()
    seen: list[tuple[int, int]] = []
    found = store.check(lambda done, total: seen.append((done, total)))
    assert found == StoreCheck(sound=2, damaged=2, unreadable=0)
    assert seen[-1] == (4, 4)
    assert {entry.text_key for entry in store.entries(0)} == {text(wanted) for wanted in (record(0), record(3))}
    assert store.check() == StoreCheck(sound=2, damaged=0, unreadable=0)
    assert len(list(store.path.glob("chunks/*/*"))) == 2


@pytest.mark.parametrize("spoil", ["ids", "context", "namespace", "size"])
def test_check_deletes_chunks_with_a_wrong_row(store: FileStore, spoil: str) -> None:
    one, two = record(1), record(2)
    store.put([one, two])
    with store._manifest.transaction() as connection:
        if spoil == "ids":
            (first, second) = (row[0] for row in connection.execute("SELECT ids FROM texts ORDER BY number"))
            connection.execute("UPDATE texts SET ids = ? WHERE number = (SELECT min(number) FROM texts)", (second,))
            connection.execute("UPDATE texts SET ids = ? WHERE number = (SELECT max(number) FROM texts)", (first,))
        else:
            column = {"context": "context_tokens = 7", "size": "num_bytes = 1"}.get(spoil)
            connection.execute(f"UPDATE chunks SET {column}" if column else "UPDATE texts SET namespace = 'other'")
    if spoil == "ids":
        entry, reader = next(iter(store.entries(0))), store.open(one.key)
        assert reader is not None
        assert (entry.text_key, entry.ids.tolist()) == (text(one), two.ids.tolist())
        assert reader.ids.tolist() == one.ids.tolist(), "a comparison shows it"
        reader.close()
    assert store.check().damaged == 2
    store.put([one, two])
    assert {entry.text_key: entry.ids.tolist() for entry in store.entries(0)} == {
        text(wanted): wanted.ids.tolist() for wanted in (one, two)
    }
    assert store.check() == StoreCheck(sound=2, damaged=0, unreadable=0)


def test_unused_texts_of_requests_are_collected(store: FileStore) -> None:
    store.put([record(i) for i in range(4)])
    for i in range(3):
        store.set_document(ON_REQUEST, [holding(record(i), "")], "tenant" if i == 2 else "")
    store.set_document("a", [holding(record(0), "a")])
    store.set_document("", [holding(record(3), "")])
    assert store.documents() == {"a": [record(0).key]}
    assert store.stats().documents == 1
    assert store.gc(unused_days=7) == (0, 0)
    with store._manifest.transaction() as connection:
        connection.execute("UPDATE chunks SET used = used - 8 * 86400")
    store.touch([record(2).key])
    assert store.gc(unused_days=7) == (1, 0)
    assert store.missing([record(i).key for i in range(4)]) == [record(1).key]
    assert store.look_up([text(record(0))])[text(record(0))].sources == {"a": record(0).key}


def test_temporary_files_of_killed_writers_are_swept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([record(1)])
    store.close()
    folder = tmp_path / "chunks"
    left = folder / ".1.abc.tmp"
    left.write_bytes(b"half a chunk")
    writer = opened(tmp_path)
    left.write_bytes(b"half a chunk")
    with writer._locked():
        opened(tmp_path).close()
        assert left.exists(), "its writer may be at work"
    again = opened(tmp_path)
    assert not left.exists()
    assert same(again, record(1))
    assert again.stats().chunks == 1
    again.close()
    writer.close()


# ---------------------------------------------------------------- several at once


def test_a_chunk_removed_and_stored_again_at_the_same_time_has_its_file(tmp_path: Path) -> None:
    """One side removes the row, then the file. Meanwhile the other has stored the chunk again, in its own file."""
    remover, writer = opened(tmp_path), opened(tmp_path)
    remover.put([record(1)])
    unlink = remover._delete

    def late(names: Any) -> None:
        names = list(names)
        writer.put([record(1)])
        unlink(names)

    remover._delete = late  # type: ignore[method-assign]
    remover.remove([record(1).key])
    assert same(writer, record(1)), "a row has a file"
    assert len(list(tmp_path.glob("chunks/*/*"))) == 1
    remover.close()
    writer.close()


def test_a_second_writer_of_a_chunk_deletes_its_own_file(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    add, kept = one._manifest.add, []

    def late(rows: Any) -> list[ManifestRow]:
        other.put([record(1)])
        kept.append(file_of(other, record(1)) if len(list(tmp_path.glob("chunks/*/*"))) == 1 else None)
        return add(rows)

    one._manifest.add = late  # type: ignore[method-assign]
    assert one.put([record(1)]) == 0
    assert other.put([record(1)]) == 0
    assert len(list(tmp_path.glob("chunks/*/*"))) == 1
    assert same(one, record(1))
    one.close()
    other.close()


def test_a_chunk_that_moves_to_another_file_while_it_is_opened_is_found(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put([record(1)])
    real, looks = store._manifest.file, []

    def file(key: str) -> str | None:
        name = real(key)
        if not looks:
            store.remove([key])
            store.put([record(1)])
        looks.append(name)
        return name

    monkeypatch.setattr(store._manifest, "file", file)
    assert same(store, record(1))
    assert len(set(looks)) == 2
    looks.clear()
    monkeypatch.undo()
    store.remove([record(1).key])
    assert store.open(record(1).key) is None


def test_gc_evicts_what_a_killed_writer_left_over_budget(tmp_path: Path) -> None:
    size = len(packed(record(0)))
    with contextlib.closing(opened(tmp_path)) as killed:  # right before it would have evicted
        records = [record(i) for i in range(8)]
        killed.put(records)
        killed.set_document("a", [holding(each, "a") for each in records])
    store = opened(tmp_path, max_bytes=5 * size + 2000)
    assert store.stats().bytes > store.max_bytes  # type: ignore[operator]
    store.gc()
    assert 0 < store.stats().bytes <= store.max_bytes  # type: ignore[operator]
    store.close()


def test_evicting_deletes_files_outside_of_any_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, max_bytes=5 * len(packed(record(0))) + 2000)
    for i in range(5):
        store.put([record(i)])
    real, states = Path.unlink, []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".safetensors":
            states.append(store._manifest._writer.in_transaction)
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    store.put([record(9)])
    assert states
    assert not any(states)
    store.close()


def test_counts_of_several_processes_add_up(tmp_path: Path) -> None:
    stores = [opened(tmp_path), opened(tmp_path)]

    def add(number: int) -> None:
        for turn in range(8):
            stores[number].count({"a both": 1, f"a {number}": turn})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add, (0, 1)))
    assert stores[0].counts("a ") == stores[1].counts("a ") == {"both": 16, "0": 28, "1": 28}
    assert stores[0].counts("b ") == {}
    for store in stores:
        store.close()


def test_a_budget_that_cannot_be_written_reports_a_full_disk_and_changes_nothing(store: FileStore) -> None:
    store.put([record(i) for i in range(4)])
    pages = store._manifest._writer.execute("PRAGMA page_count").fetchone()[0]
    store._manifest._writer.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFullError, match=r"disk of .* is full: free space"):
        list(map(store.set_budget, (f"{i:0200d}" for i in range(12_500)), repeat(1000)))
    assert all(same(store, record(i)) for i in range(4))
    store._manifest._writer.execute("PRAGMA max_page_count = 100000")
    assert store.set_budget("", 1) == 4


@pytest.mark.parametrize("pages", [1, 4, 9])
def test_a_disk_that_is_full_while_the_manifest_is_created(
    pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(*args: Any, connect: Any = schema.SQLiteFile, **options: Any) -> Any:
        connection = connect(*args, **options)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(schema, "SQLiteFile", limited)
        for _ in range(2):
            with pytest.raises(StoreFullError, match=r"disk of .* is full: free space"):
                opened(tmp_path)
    with contextlib.closing(opened(tmp_path)) as again:
        again.put([record(1)])
        assert same(again, record(1))


def test_a_disk_without_room_for_the_index_of_the_log_is_full(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([record(1)])
    store.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # the index has 32 KiB
    try:
        with pytest.raises(StoreFullError, match=r"disk of .* is full: free space"):
            opened(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with contextlib.closing(opened(tmp_path)) as again:
        assert same(again, record(1))


OPEN = """
import sys
from pathlib import Path
from kvrag.store.manifest import Manifest
print("ready", flush=True)
for line in sys.stdin:
    manifest = Manifest(Path(line.strip()))
    print(int(manifest.num_bytes()), flush=True)
    manifest.close()
"""


@pytest.mark.slow
def test_several_processes_open_a_folder_at_once(tmp_path: Path) -> None:
    processes = [start(OPEN, tmp_path) for _ in range(3)]
    try:
        for process in processes:
            expect(process, "ready")
        for number in range(60):
            path = tmp_path / f"{number}.sqlite"
            for process in processes:
                tell(process, str(path))
            assert [process.stdout.readline().strip() for process in processes] == ["0"] * 3
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_text_that_two_writers_add_keeps_its_number(store: FileStore) -> None:
    store.put([record(1), record(2)])
    (entry, _) = store.entries(0)
    row = ManifestRow(record(1).key, entry.text_key, "", entry.ids.tobytes(), 0, "another file", 1)
    assert store._manifest.add([row]) == [row]
    assert next((e.number, e.text_key) for e in store.entries(0)) == (entry.number, entry.text_key)
    assert same(store, record(1))


def test_a_failed_transaction_does_not_block_the_next(store: FileStore) -> None:
    good = ManifestRow("k", "t", "", b"", 0, "f", 1)
    with pytest.raises((sqlite3.Error, StoreError)):
        store._manifest.add([good, good._replace(key="broken", file=object())])  # type: ignore[arg-type]
    assert store.stats().chunks == 0
    assert list(store.entries(0)) == []
    store.put([record(1)])
    assert same(store, record(1))


# ---------------------------------------------------------------- another version


def test_a_store_of_an_older_version_is_refused_in_one_line(tmp_path: Path) -> None:
    opened(tmp_path / "claimed").close()
    owner = tmp_path / "claimed" / "fingerprint.json"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "format": "3"}))
    (tmp_path / "unclaimed").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "unclaimed" / "manifest.sqlite")) as connection:
        connection.execute("CREATE TABLE chunks (number INTEGER PRIMARY KEY, key TEXT, ids BLOB, anchors BLOB)")
    for folder in (tmp_path / "claimed", tmp_path / "unclaimed"):
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        with pytest.raises(StoreError) as caught:
            FileStore(folder)
        message = str(caught.value)
        assert "\n" not in message
        assert f"{folder} has another version's format, which this version cannot read" in message
        assert "`kvrag warm --store NEW_FOLDER DOCS`" in message
        assert {path: path.stat().st_mtime_ns for path in before} == before
    assert FORMAT == 4


# ---------------------------------------------------------------- the command line


def test_the_command_line_looks_into_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = opened(tmp_path / "kv")
    store.put([record(1), record(2, namespace="them")])
    store.set_document("a", [holding(record(1), "a")])
    store.set_document(ON_REQUEST, [holding(record(2, namespace="them"), "")], "them")
    store.close()
    folder = ["--store", str(tmp_path / "kv")]
    assert main(["store", "stats", *folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" of ")[0] for line in lines[-2:]] == ["(default): 1 chunk", "them: 1 chunk"]
    assert main(["store", "stats", *folder, "--json"]) == 0
    assert [part["namespace"] for part in json.loads(capsys.readouterr().out)["namespaces"]] == ["", "them"]
    assert main(["store", "gc", *folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"chunks": 0, "files": 0}
    assert main(["store", "gc", *folder, "--unused-days", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"chunks": 1, "files": 0}
    path = next((tmp_path / "kv").glob("chunks/*/*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 8] ^= 1
    path.write_bytes(content)
    assert main(["store", "check", *folder]) == 1
    assert "0 sound chunks, 1 damaged" in capsys.readouterr().out


# ---------------------------------------------------------------- the RAM tier


def _kept(memory: MemoryTier, key: str, kilobytes: int) -> ChunkReader:
    """Read a chunk whole, through the tier."""

    class Reader:
        namespace, ids, context_tokens = "", np.zeros(0, np.uint32), 0
        tier, num_layers, bytes_read = "disk", 1, 0

        def __init__(self) -> None:
            self.key = key

        def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
            half = torch.zeros(kilobytes * 512, dtype=torch.uint8)
            return half, half.clone()

        def close(self) -> None:
            pass

    reader = memory.keeping(Reader())
    reader.layer(0)
    return reader


def test_the_ram_tier_is_bounded_and_drops_the_least_recently_used() -> None:
    memory = MemoryTier(10 * 1024)
    for name in "abc":
        _kept(memory, name, 3).close()
    assert memory.open("a") is not None
    _kept(memory, "d", 3).close()
    assert [name for name in "abcd" if memory.open(name)] == ["a", "c", "d"]
    assert sorted(memory.keys()) == ["a", "c", "d"]
    assert memory._chunks.currsize == 9 * 1024
    _kept(memory, "huge", 11).close()
    assert memory.open("huge") is None
    _kept(memory, "a", 3).close()
    assert memory._chunks.currsize == 9 * 1024
    memory.drop(["a", "unknown"])
    memory.drop(["a"])
    assert (memory._chunks.currsize, len(memory.keys())) == (6 * 1024, 2)


def test_a_chunk_dropped_while_it_is_read_does_not_come_back() -> None:
    memory = MemoryTier(10 * 1024)
    reader, other = _kept(memory, "a", 3), _kept(memory, "b", 3)
    memory.drop(["a"])
    reader.close()
    other.close()
    assert memory.keys() == ["b"]
    _kept(memory, "a", 3).close()
    assert sorted(memory.keys()) == ["a", "b"]


def test_the_ram_tier_takes_only_what_was_read_whole(store: FileStore) -> None:
    wanted = record(1, context=(7, 8))
    store.put([wanted])
    memory = MemoryTier(1 << 20)
    for layers in ([0], [1, 2], [0, 1]):  # the last one may be states: it is read to complete the others
        reader = store.open(wanted.key)
        assert reader is not None
        keeping = memory.keeping(reader)
        for number in layers:
            keeping.layer(number)
        keeping.close()
        assert (memory.open(wanted.key) is not None) == (layers == [0, 1])
    kept = memory.open(wanted.key)
    assert kept is not None
    assert torch.equal(kept.layer(2)[0], wanted.layers[2][0])
    assert (kept.key, kept.tier, kept.bytes_read, kept.num_layers) == (wanted.key, "ram", 0, 3)
    assert (kept.ids.tolist(), kept.context_tokens) == (wanted.ids.tolist(), 2)
    assert memory.keeping(kept) is kept


def test_a_ram_tier_of_no_bytes_keeps_nothing(store: FileStore) -> None:
    store.put([record(1)])
    reader = store.open(record(1).key)
    assert reader is not None
    keeping = MemoryTier(0).keeping(reader)
    assert keeping is reader
    reader.close()


def test_answers_report_their_tier_and_are_the_same_from_ram_and_disk(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    ids = engine.model.tokenizer.render(messages(*CHUNKS[:2]))
    first = prepare(engine, ids, 0.2, "hkvd")
    again = prepare(engine, ids, 0.2, "hkvd")
    assert (first.report.tier, again.report.tier) == ("disk", "ram")
    assert first.report.bytes_loaded > 0
    assert again.report.bytes_loaded == 0
    assert torch.equal(first.logits, again.logits)
    mixed = prepare(engine, engine.model.tokenizer.render(messages(*CHUNKS[1:3])), 0.2)
    assert mixed.report.tier == "mixed"
    kept = engine._pipeline.memory._chunks
    ram = {key: [tuple(tensor.clone() for tensor in pair) for pair in kept[key].layers.values()] for key in kept}
    for policy in ("hkvd", "query", "random"):
        prepare(engine, ids, 1.0, policy)
    for key, layers in ram.items():
        for ours, theirs in zip(kept[key].layers.values(), layers, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("codec", ["native", "int8"])
@pytest.mark.parametrize("ram_bytes", [0, 1 << 30])
def test_chunks_in_frequent_use_come_from_the_device(
    codec: str, ram_bytes: int, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BlendEngine(model, tmp_path, ram_bytes=ram_bytes, codec=codec, device_bytes=1 << 30) as engine:
        engine.warm(CHUNKS, document="d")
        ids = engine.model.tokenizer.render(messages(*CHUNKS[:2]))
        prompts = [prepare(engine, ids, 0.2, "query") for _ in range(4)]
        second = "ram" if ram_bytes else "device"
        assert [each.report.tier for each in prompts] == ["disk", second, "device", "device"]
        for each in prompts[1:]:
            assert torch.equal(each.logits, prompts[0].logits)
        mixed = prepare(engine, engine.model.tokenizer.render(messages(*CHUNKS[1:3])), 0.2, "query")
        assert mixed.report.tier == "mixed"
        unpacked: list[str] = []
        monkeypatch.setattr("kvrag.store.values._unpack", lambda *_: unpacked.append("") or 1 / 0)
        assert torch.equal(prepare(engine, ids, 0.2, "query").logits, prompts[0].logits)  # its KV is kept unpacked
        engine.forget("d")
        assert engine.generate(messages(*CHUNKS[:2]), max_new_tokens=1).report.stored_tokens == 0


def test_a_forgotten_chunk_is_served_by_no_tier(engine: BlendEngine) -> None:
    engine.warm(CHUNKS, document="d")
    prompt = messages(*CHUNKS)
    assert engine.generate(prompt, max_new_tokens=1).report.tier == "disk"
    assert engine.generate(prompt, max_new_tokens=1).report.tier == "ram"
    engine.forget("d")
    report = engine.generate(prompt, max_new_tokens=1).report
    assert (report.tier, report.stored_tokens, report.bytes_loaded) == ("", 0, 0)


def test_only_the_owner_can_read_a_new_store(tmp_path: Path) -> None:
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


def test_uses_that_cannot_be_recorded_give_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, min_free_bytes=0)

    def fail(op: str, **_: Any) -> None:
        raise StoreFullError("the disk is full")

    monkeypatch.setattr(store._changes, "change", fail)
    for _ in range(3):
        store.touch(["a"])
        store._record_uses()
    assert [record.levelname for record in caplog.records if "uses" in record.message].count("WARNING") == 1
