"""SQLiteRecordManager, compared with LangChain's record manager in memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import forked
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, RecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvrag import SQLiteRecordManager

from kvrag import SettingError, StoreError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.sqlite"


@pytest.fixture
def records(path: Path) -> Iterator[SQLiteRecordManager]:
    records = SQLiteRecordManager("here", path)
    yield records
    records.close()


@pytest.fixture(params=["sqlite", "memory"])
def either(request: pytest.FixtureRequest, records: SQLiteRecordManager) -> RecordManager:
    return records if request.param == "sqlite" else InMemoryRecordManager("here")


def at(manager: RecordManager, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "get_time", lambda: seconds)


def test_records_are_listed_by_time_group_and_number(either: RecordManager, monkeypatch: pytest.MonkeyPatch) -> None:
    either.create_schema()
    at(either, 10.0, monkeypatch)
    either.update(["a", "b"], group_ids=["g1", "g2"])
    at(either, 20.0, monkeypatch)
    either.update(["c", "d"], group_ids=["g1", None], time_at_least=20.0)
    assert either.list_keys() == ["a", "b", "c", "d"]
    assert either.list_keys(before=20.0) == ["a", "b"]
    assert either.list_keys(after=10.0) == ["c", "d"]
    assert either.list_keys(after=20.0, before=10.0) == []
    assert either.list_keys(group_ids=["g1"]) == ["a", "c"]
    assert either.list_keys(group_ids=["g1", "g2"], before=20.0) == ["a", "b"]
    assert either.list_keys(limit=3) == ["a", "b", "c"]
    assert either.exists(["a", "x", "d"]) == [True, False, True]
    at(either, 30.0, monkeypatch)
    either.update(["a"], group_ids=["g2"])
    assert either.list_keys(before=30.0, group_ids=["g1"]) == ["c"]
    assert either.list_keys(after=20.0) == ["a"]
    either.delete_keys(["a", "x"])
    assert either.exists(["a"]) == [False]
    with pytest.raises(ValueError, match="group_ids"):
        either.update(["a", "b"], group_ids=["g1"])
    with pytest.raises(ValueError, match="time_at_least must be in the past"):
        either.update(["a"], time_at_least=31.0)
    assert either.exists(["a"]) == [False]


async def test_async_methods_do_the_same(either: RecordManager) -> None:
    await either.acreate_schema()
    start = await either.aget_time()
    await either.aupdate(["a", "b"], group_ids=["g", None], time_at_least=start)
    assert await either.aexists(["a", "x"]) == [True, False]
    assert await either.alist_keys(group_ids=["g"]) == ["a"]
    assert await either.alist_keys(before=start) == []
    await either.adelete_keys(["a"])
    assert either.list_keys() == ["b"]


def test_a_renewed_record_keeps_its_group(records: SQLiteRecordManager) -> None:
    records.update(["a"], group_ids=["g"])
    start = records.get_time()
    records.update(["a"], time_at_least=start)
    assert records.list_keys(group_ids=["g"], after=start - 1e-9) == ["a"]
    records.update(["a"], group_ids=[None])
    assert records.list_keys(group_ids=["g"]) == []


def test_no_groups_are_not_all_groups(records: SQLiteRecordManager) -> None:
    records.update(["a"], group_ids=["g"])
    assert records.list_keys(group_ids=[]) == []
    assert records.list_keys(limit=0) == []


def test_time_never_goes_back(records: SQLiteRecordManager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = records.get_time()
    records.update(["a"])
    hour_ago = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: hour_ago)
    second = records.get_time()
    assert second > start
    assert records.list_keys(before=second) == ["a"]
    records.update(["b"], time_at_least=second)
    assert records.list_keys(before=second) == ["a"]
    other = SQLiteRecordManager("here", path)  # uses only the stored times
    assert other.list_keys(before=other.get_time()) == ["a", "b"]
    other.close()


def test_namespaces_do_not_see_each_other_and_files_outlive_managers(path: Path) -> None:
    for namespace in ("one", "two"):
        records = SQLiteRecordManager(namespace, path)
        records.update(["a", namespace])
        records.close()
    records = SQLiteRecordManager("one", path)
    assert records.list_keys() == ["a", "one"]
    records.delete_keys(["a"])
    records.close()
    records = SQLiteRecordManager("two", path)
    assert records.exists(["a", "one", "two"]) == [True, False, True]
    records.close()


def test_any_number_of_keys_and_any_characters(records: SQLiteRecordManager) -> None:
    keys = [f"key {i} ' \" % ü" for i in range(3000)]
    records.update(keys, group_ids=keys)
    assert records.exists([*keys, "x"]) == [True] * 3000 + [False]
    assert records.list_keys(group_ids=keys[5:]) == sorted(keys[5:])
    records.delete_keys(keys)
    assert records.list_keys() == []


CHILD = """
import sys
from langchain_kvrag import SQLiteRecordManager
records = SQLiteRecordManager("here", sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for i in range(30):
    start = records.get_time()
    records.update([f"child {i}"], group_ids=["child"], time_at_least=start)
    assert f"child {i}" not in records.list_keys(before=start)
print("done", flush=True)
"""


@pytest.mark.slow
def test_two_processes_write_one_file_at_once(records: SQLiteRecordManager, path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("go\n")
        child.stdin.flush()
        for i in range(30):
            records.update([f"parent {i}"], group_ids=["parent"], time_at_least=records.get_time())
        assert child.stdout.readline() == "done\n"
    assert records.list_keys(group_ids=["child"]) == [f"child {i}" for i in range(30)]
    assert records.list_keys(group_ids=["parent"]) == [f"parent {i}" for i in range(30)]


def test_an_update_waits_for_another_one_to_end(
    records: SQLiteRecordManager, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SQLiteRecordManager("here", path)
    late, get_time = threading.Thread(target=lambda: other.update(["late"])), records.get_time

    def meanwhile() -> float:
        late.start()
        late.join(0.3)
        return get_time()

    monkeypatch.setattr(records, "get_time", meanwhile)
    records.update(["early"])
    late.join()
    assert records.list_keys() == ["early", "late"]
    other.close()


def test_bad_files_are_named(records: SQLiteRecordManager, tmp_path: Path) -> None:
    (tmp_path / "damaged.sqlite").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(StoreError, match=r"damaged\.sqlite cannot be used: file is not a database"):
        SQLiteRecordManager("here", tmp_path / "damaged.sqlite")
    with pytest.raises(StoreError, match="unable to open"):
        SQLiteRecordManager("here", tmp_path / "no" / "folder.sqlite")
    records.close()
    with pytest.raises(StoreError, match=r"records\.sqlite is closed"):
        records.update(["a"])


def test_an_invalid_key_is_not_reported_as_a_closed_manager(records: SQLiteRecordManager) -> None:
    for keys in ([object()], ["half a \ud83d smile"]):
        with pytest.raises(StoreError, match="cannot be used"):
            records.update(keys)  # type: ignore[arg-type]
    records.update(["fine"])
    assert records.list_keys() == ["fine"]


@pytest.mark.parametrize("kind", ["ours", "langchain-classic"])
def test_stale_documents_are_found_after_an_indexing_that_failed(kind: str, records: SQLiteRecordManager) -> None:
    class Fragile(InMemoryVectorStore):
        is_failing = False

        def add_documents(self, documents: list[Document], ids: list[str] | None = None, **kwargs: object) -> list[str]:
            if self.is_failing:
                raise ConnectionError("the database is gone")
            return super().add_documents(documents, ids, **kwargs)

    manager: RecordManager = records
    if kind == "langchain-classic":
        manager = pytest.importorskip("langchain_classic.indexes").SQLRecordManager("here", db_url="sqlite://")
        manager.create_schema()
    store = Fragile(DeterministicFakeEmbedding(size=4))

    def run(*texts: str) -> None:
        documents = [Document(text, metadata={"source": "a.txt"}) for text in texts]
        index(documents, manager, store, cleanup="incremental", source_id_key="source", key_encoder="sha256")

    run("one", "two")
    store.is_failing = True
    with pytest.raises(ConnectionError):
        run("one", "two", "three")
    store.is_failing = False
    run("four")
    left = sorted(document.page_content for document in store.similarity_search("", k=9))
    # the reason for our own record manager: theirs has lost the source of the first two
    assert left == (["four"] if kind == "ours" else ["four", "one", "two"])


def test_a_forked_process_is_refused(records: SQLiteRecordManager, path: Path) -> None:
    for use in (lambda: records.list_keys(), lambda: SQLiteRecordManager("there", path).list_keys()):
        with pytest.raises(SettingError, match="was in use when this process was forked"):
            forked(use)
    assert records.list_keys() == []
