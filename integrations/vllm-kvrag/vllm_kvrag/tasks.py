"""Tasks of a worker: blend a prompt, encode texts, delete a document."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvrag import BlendConfig, KvragError, KVStore
from kvrag.control.plan import Planner
from kvrag.index.catalog import Catalog, Match
from kvrag.ingest.ingest import Ingestion
from kvrag.memory.conversation import CachedPrefix
from kvrag.memory.forgetting import forget
from kvrag.memory.tier import MemoryTier, Pinned
from kvrag.prefill import Pipeline
from kvrag.request import Request
from vllm_kvrag.params import RequestParams
from vllm_kvrag.runner import Job

if TYPE_CHECKING:  # the scheduler's process creates tasks without it
    from vllm_kvrag.backend import VllmBackend


@dataclass(frozen=True)
class TaskOutcome:
    """Outcome of a task.

    Attributes:
        report: For the client.
        complete: Number of leading positions of the prompt whose KV is complete; None = all.
    """

    report: dict[str, Any]
    complete: int | None = None


@dataclass(frozen=True)
class BlendTask:
    """A prompt to blend.

    Attributes:
        ids: Its token ids.
        blocks: Its block ids.
        kept: Number of leading positions whose KV is already in its pages.
        config: Blend settings.
        namespace: Namespace of the chunks.
        matches: Runs of stored chunks after the kept positions.
    """

    ids: list[int]
    blocks: list[int]
    kept: int
    config: BlendConfig
    namespace: str
    matches: list[Match]


@dataclass(frozen=True)
class WarmTask:
    """Texts to encode in the pages `blocks`, and to store."""

    texts: list[str]
    blocks: list[int]
    params: RequestParams


@dataclass(frozen=True)
class ForgetTask:
    """A document to delete."""

    document: str
    namespace: str


Task = BlendTask | WarmTask | ForgetTask


class TaskHandler:
    """Runs the tasks of one worker process."""

    def __init__(self, backend: VllmBackend, store: KVStore, config: BlendConfig, codec: str, ram_bytes: int) -> None:
        self._backend, self._store, self._config, self._codec = backend, store, config, codec
        allocate = Pinned if backend.device.type == "cuda" else None
        self._memory = MemoryTier(ram_bytes, allocate=allocate)
        self._planner = Planner(backend, store, codec)
        self._lookup = Catalog(store, alone_only=not config.context_tokens)
        self._removals = store.removals()

    @property
    def is_first(self) -> bool:
        """Whether this is the first process of its tensor-parallel group."""
        return self._backend.rank == 0

    def work(self, task: Task) -> Callable[[Job], TaskOutcome]:
        """Return the function that runs a task, for a job's thread."""
        if isinstance(task, BlendTask):
            return lambda job: self._blend(task, job)
        if isinstance(task, WarmTask):
            return lambda job: _with_errors(lambda: self._warm(task, job))
        return lambda job: _with_errors(lambda: self._forget(task, job))

    def blocks_to_fill(self, task: Task) -> list[int]:
        """Return the blocks that a task fills; earlier ones may be shared with other requests."""
        if isinstance(task, BlendTask):
            return task.blocks[task.kept // self._backend.block_size :]
        return task.blocks if isinstance(task, WarmTask) else []

    def is_alone(self, task: Task) -> bool:
        """Return whether only one such task may run at a time: encoding uses a page outside the request's."""
        return not isinstance(task, BlendTask)

    def _blend(self, task: BlendTask, job: Job) -> TaskOutcome:
        started = time.perf_counter()
        self._drop_removed()
        backend = self._backend.on(task.blocks, job)
        pipeline = Pipeline(backend, self._store, self._memory, self._lookup, self._planner, self._codec)
        plan = replace(self._planner.plan(task.config), margin=0.0)  # vLLM draws the tokens
        request = Request(task.ids, task.config, task.namespace)
        request.prefix = _prefix(task, plan.config) if task.kept else None
        pipeline.prefill(request, plan, task.matches)
        report = replace(request.report, ttft_s=time.perf_counter() - started).to_dict()
        # None: nothing was reused, so all is computed
        return TaskOutcome(report, request.tail() or None)

    def _warm(self, task: WarmTask, job: Job) -> dict[str, Any]:
        # the null block, which no request reads, has room for the preamble
        ingestion = self._ingestion([0, *task.blocks], job)
        params, before = task.params, dict(task.params.contexts or {})
        names = params.document, params.sources, params.namespace
        skip = params.skip_invalid
        report = asdict(ingestion.warm(task.texts, *names, replace=params.replace, before=before, skip_invalid=skip))
        if params.contexts is not None:
            report["contexts"] = {source: ids for source, ids in before.items() if ids}
        return report

    def _forget(self, task: ForgetTask, job: Job) -> dict[str, Any]:
        ingestion, decode = self._ingestion([], job), self._backend.tokenizer.decode
        remove = partial(ingestion.forget, task.document, task.namespace)
        store = self._agreed(self._backend.on([], job))
        return {"forgotten": forget(remove, task.namespace, store, self._lookup, decode, self._memory.drop)}

    def _ingestion(self, blocks: list[int], job: Job) -> Ingestion:
        backend = self._backend.on(blocks, job)
        fingerprint = backend.fingerprint.stored_as(self._codec)
        return Ingestion(backend, self._agreed(backend), self._config, fingerprint)

    def _agreed(self, backend: VllmBackend) -> Any:
        return AgreedStore(self._store, backend) if backend.num_processes > 1 else self._store

    def _drop_removed(self) -> None:
        """Drop from the RAM tier what was removed from the store, possibly by another process."""
        if (removals := self._store.removals()) != self._removals:
            self._removals = removals
            self._memory.drop(self._store.missing(sorted(self._memory.keys())))


class AgreedStore:
    """Store for ingestion by several processes: only the first one calls it, and the others receive its results."""

    def __init__(self, store: KVStore, backend: VllmBackend) -> None:
        self._store, self._backend = store, backend

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def agreed(*args: Any, **kwargs: Any) -> Any:
            result, error = None, None
            if self._backend.rank == 0:
                try:
                    result = method(*args, **kwargs)
                except KvragError as caught:
                    error = caught
            result, error = self._backend.gather((result, error))[0]
            if error is not None:
                raise error
            return result

        return agreed


def _prefix(task: BlendTask, config: BlendConfig) -> CachedPrefix:
    """Return the prefix whose KV is already in the pages, computed or blended with the same settings."""
    return CachedPrefix(task.kept, exact=task.kept if config.ratio == 1.0 else 0)


def _with_errors(work: Callable[[], dict[str, Any]]) -> TaskOutcome:
    """Return the outcome of `work`; an error becomes a report for the client."""
    try:
        return TaskOutcome(work())
    except KvragError as error:
        return TaskOutcome({"error": str(error), "type": type(error).__name__})
