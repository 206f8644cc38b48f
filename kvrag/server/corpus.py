"""The corpus of a server: documents are added, encoded in the background, and can then be retrieved.

Every unfinished task is a file in a folder beside the chunks, so that a server resumes after being killed. A document's
id is a name in a database, never a path.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from kvrag.engine import BlendEngine
from kvrag.errors import KvragError, StoreError, StoreFullError, StoreReadOnlyError
from kvrag.retrieval.documents import page_numbers
from kvrag.retrieval.index import ChunkIndex, Hit
from kvrag.scheduling.waiting import check_cancelled, is_cancelled
from kvrag.server.api_errors import ApiError
from kvrag.store.durable import TEMPORARY, write_file

logger = logging.getLogger("kvrag")

_MAX_ID = 256
MAX_PENDING = 256  # documents of a namespace that may wait


@dataclass(frozen=True, slots=True)
class CorpusTask:
    """A change of a document: encode its texts, or drop its chunks.

    `texts` and `pages` are those of a `Content`. Failed tasks are kept, with their `error`, for the document's status.
    """

    number: int
    action: Literal["add", "drop"]
    document: str
    texts: Sequence[str] = field(default=(), repr=False)
    pages: Sequence[int] = field(default=(), repr=False)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a document: "queued", "encoding", "ready" or "failed".

    `tokens_done` and `tokens` are the progress of the encoding; of a ready document, the tokens of its stored chunks.
    """

    id: str
    status: str
    chunks: int = 0
    tokens_done: int = 0
    tokens: int = 0
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"object": "corpus.document", **asdict(self)}


class CorpusInUseError(StoreError):
    """Another server works on the corpus."""


class Corpus:
    """Documents of one namespace, in an engine's store and in a chunk index. Thread-safe."""

    def __init__(
        self,
        engine: BlendEngine,
        index: ChunkIndex,
        folder: Path,
        split: Callable[[Sequence[str]], list[str]],
        namespace: str = "",
    ) -> None:
        """Open a corpus, with the unfinished tasks of an earlier server.

        Args:
            folder: Folder of the tasks, created if missing.
            split: Splits texts into chunks.

        Raises:
            CorpusInUseError: Another server uses this folder.
            StoreReadOnlyError: The folder is not writable.
        """
        self.index, self.namespace = index, namespace
        self._engine, self._folder, self._split = engine, folder, split
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._serving = _lock_of(folder)
            self._serving.acquire()  # until `stop`
            self._tasks = _tasks_in(folder)
        except Timeout:
            message = f"another server uses the corpus in {folder}: use another --store, or --no-corpus"
            raise CorpusInUseError(message) from None
        except OSError as error:
            message = f"{folder} is not writable ({error.strerror}): choose another store, or use --no-corpus"
            raise StoreReadOnlyError(message) from error
        self._next = max(self._tasks, default=0) + 1
        self._active = 0  # number of the current task
        self._progress = (0, 0)
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="kvrag-corpus", daemon=True)

    def add(self, document: str, texts: Sequence[str], pages: Sequence[int] = ()) -> Status:
        """Queue a document, in the form of a `Content`, to be encoded. It replaces the document with the same id."""
        check_id(document)
        with self._changed:
            if self.count_pending() >= MAX_PENDING:
                raise ApiError(429, f"{MAX_PENDING} documents are waiting: retry later", "queue_full")
            self._put(CorpusTask(self._next, "add", document, texts, pages))
            return self.status(document)

    def remove(self, document: str) -> None:
        """Delete a document and its chunks' KV; what is being encoded at the moment, once that has ended."""
        with self._changed:
            self.status(document)  # raises if it does not exist
            self._put(CorpusTask(self._next, "drop", document))
            self.index.remove(document)
            self._engine.forget(document, namespace=self.namespace)  # before it can be added again

    def status(self, document: str) -> Status:
        """Return the status of a document; raise ApiError if it does not exist."""
        if not (found := self.statuses(document)):
            raise ApiError(404, f"unknown document {document!r:.280}: see GET /v1/corpus", "document_not_found")
        return found[0]

    def statuses(self, document: str | None = None) -> list[Status]:
        """Return the status of all documents, or of one if it exists, sorted by id."""
        with self._changed:
            counts, latest = self.index.counts(), self._latest()
            tokens = self._engine.store.count_tokens(document or "", namespace=self.namespace)
            statuses = (
                self._status(name, latest.get(name), counts.get(name, 0), tokens.get(name, 0))
                for name in (sorted({*counts, *latest} - {""}) if document is None else [document])
            )
            return [status for status in statuses if status is not None]

    def search(self, question: str, top_k: int, around: int, before: Sequence[str] = ()) -> list[Hit]:
        """Return the chunks nearest to a question, see `ChunkIndex.search`; raise ApiError if the corpus is empty."""
        hits = self.index.search(question, top_k, around, before)
        if not hits:
            how = "add documents with PUT /v1/corpus/NAME, or run `kvrag warm PATH`, and wait until they are ready"
            raise ApiError(400, f"the corpus is empty: {how}", "corpus_empty")
        return hits

    def count_pending(self) -> int:
        """Return the number of unfinished tasks."""
        return len(self._undone())

    def start(self) -> None:
        """Start the background thread."""
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Stop, at the latest after `patience` seconds; the next server resumes after the last stored chunk."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(patience)
        if not self._thread.is_alive():
            self._serving.release()

    def adopt(self) -> None:
        """Queue unfinished tasks of stopped servers in sibling folders; this server's tasks take precedence."""
        for folder in self._folder.parent.glob("corpus*/"):
            if folder == self._folder or not any(folder.glob("*.json")):
                continue
            with suppress(Timeout), _lock_of(folder):
                for number in _tasks_in(folder):
                    task = _read_task(path := folder / f"{number:012}.json")
                    with self._changed:
                        if not task.error and task.document not in self._latest():
                            self._put(replace(task, number=self._next))
                    path.unlink()

    def _work(self) -> None:
        is_cancelled.set(lambda: self._is_stopping)
        self._engine.calibrate_when_idle(self.namespace)
        while (task := self._await_task()) is not None:
            reason = ""
            try:
                self._do(task)
            except Exception as error:  # a failing document must not stop the others
                if self._is_stopping:  # while it was encoded, and the store may be closed already
                    return
                is_ours = isinstance(error, KvragError)
                reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
                logger.warning("cannot add %s: %s", task.document, reason, exc_info=None if is_ours else error)
            self._finish(task, reason)
            if not self._undone():
                self._engine.calibrate_when_idle(self.namespace)

    def _await_task(self) -> CorpusTask | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._undone())
            if self._is_stopping:
                return None
            task = self._undone()[0]
            self._active, self._progress = task.number, (0, 0)
            return task

    def _do(self, task: CorpusTask) -> None:
        if task.action == "drop":
            self.index.remove(task.document)  # again: it may have been added after it was removed
            self._engine.forget(task.document, namespace=self.namespace)
            return
        task = _read_task(self._path(task))
        chunks = self._split(task.texts)
        if not chunks:
            raise KvragError("the document contains no text")
        # KV first: every retrievable chunk has its KV
        self._engine.warm(chunks, document=task.document, namespace=self.namespace, progress=self._advance)
        pages = page_numbers(chunks, task.texts, task.pages)
        self.index.add(chunks, task.document, lambda done, total: check_cancelled(), pages)

    def _advance(self, done: int, total: int) -> None:
        self._progress = (done, total)
        check_cancelled()

    def _finish(self, task: CorpusTask, error: str = "") -> None:
        with self._changed:
            self._active = 0
            if error and task.action == "add" and self._latest().get(task.document) == task:
                self._tasks[task.number] = failed = replace(task, error=error)
                with suppress(StoreError):  # a full disk may be the cause of the error
                    self._write(failed)
            else:
                self._delete(task)

    # ---------------------------------------------------------------- tasks, with the lock held

    def _undone(self) -> list[CorpusTask]:
        return [task for task in list(self._tasks.values()) if not task.error]

    def _latest(self) -> dict[str, CorpusTask]:
        """Return the last task of each document."""
        return {task.document: task for task in self._tasks.values()}

    def _put(self, task: CorpusTask) -> None:
        """Queue a change of a document, in place of its changes that have not started."""
        before = [t for t in self._tasks.values() if t.document == task.document and t.number != self._active]
        self._write(task)  # first, because this may fail
        self._next += 1
        for old in before:
            if old.action == "add":
                self._delete(old)
        self._changed.notify_all()

    def _write(self, task: CorpusTask) -> None:
        try:
            write_file(self._path(task), json.dumps(asdict(task)).encode())
        except OSError as error:
            raise StoreFullError(f"cannot store the document in {self._folder}: {error.strerror}") from error
        self._tasks[task.number] = replace(task, texts=(), pages=())  # many long documents may wait

    def _delete(self, task: CorpusTask) -> None:
        self._path(task).unlink(missing_ok=True)
        self._tasks.pop(task.number, None)

    def _path(self, task: CorpusTask) -> Path:
        return self._folder / f"{task.number:012}.json"

    def _status(self, document: str, task: CorpusTask | None, chunks: int, tokens: int) -> Status | None:
        """Return a document's status by its last task; None if it does not exist."""
        if task is None:
            return Status(document, "ready", chunks, tokens, tokens) if chunks else None
        if task.action == "drop":
            return None
        if task.error:
            return Status(document, "failed", chunks, error=task.error)
        if task.number == self._active:
            return Status(document, "encoding", chunks, *self._progress)
        return Status(document, "queued", chunks)


def check_id(document: str) -> None:
    """Raise ApiError unless this is a valid document id."""
    if not 0 < len(document) <= _MAX_ID or not document.isprintable() or {".", ".."} & set(document.split("/")):
        allowed = f"1 to {_MAX_ID} printable characters, without '.' or '..' between slashes"
        raise ApiError(400, f"a document id needs {allowed}, got {document!r:.80}", "invalid_value", "id")


def _lock_of(folder: Path) -> FileLock:
    """Return the lock of a folder of tasks, not acquired yet; acquiring raises Timeout if another server has it."""
    return FileLock(folder.with_suffix(".lock"), blocking=False, thread_local=False)  # released by another thread


def _tasks_in(folder: Path) -> dict[int, CorpusTask]:
    """Return the tasks stored in a folder, in order."""
    tasks: dict[int, CorpusTask] = {}
    for part in folder.glob(TEMPORARY):  # a server was killed while writing this, before it responded
        part.unlink()
    for path in sorted(folder.glob("*.json")):
        try:
            task = _read_task(path)
        except (ValueError, TypeError):
            path.rename(path.with_suffix(".damaged"))
            logger.warning("%s is damaged: add the document again", path)
        else:
            tasks[task.number] = replace(task, texts=(), pages=())
    return tasks


def _read_task(path: Path) -> CorpusTask:
    return CorpusTask(**json.loads(path.read_text()))
