"""KV connector: vLLM creates one in its scheduler and one in each worker.

The scheduler side finds stored chunks in a new prompt, and reports all of the prompt's KV to vLLM as external, to be
loaded asynchronously. The worker side blends the prompt in its pages over the next steps; vLLM then computes the last
token again, samples, and decodes as usual.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvrag import FileStore, KvragError, KVStore, ModelLoadError, SharedStore, UnsupportedModelError
from kvrag.store import is_shared
from vllm_kvrag import compat
from vllm_kvrag.fingerprint import fingerprint_of, tokenizer_of
from vllm_kvrag.params import ConnectorSettings
from vllm_kvrag.runner import JobRunner
from vllm_kvrag.scheduler import RequestTracker
from vllm_kvrag.stats import KvragPromMetrics, KvragStats
from vllm_kvrag.support import caches_of, unsupported_caches, unsupported_setting
from vllm_kvrag.tasks import Task, TaskHandler, TaskOutcome

logger = logging.getLogger("vllm.kvrag")  # below vLLM's own logger, which has the handlers


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Metadata of one step, from the scheduler side to the workers.

    Attributes:
        tasks: New tasks, by request id.
        cancelled: Requests that were aborted.
        rows: Number of rows that blending may compute in this step.
        is_idle: Whether vLLM has no batch in this step.
    """

    tasks: dict[str, Task] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    rows: int = 0
    is_idle: bool = False


@dataclass
class Results(KVConnectorWorkerMetadata):
    """Outcomes of finished tasks, by request id: those of the first worker, and failures of all workers."""

    outcomes: dict[str, TaskOutcome] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Results:
        """Merge the outcomes of two workers."""
        assert isinstance(other, Results)
        failed = {name: outcome for name, outcome in other.outcomes.items() if "error" in outcome.report}
        return Results({**other.outcomes, **self.outcomes, **failed})  # a failure in one worker is the result


@dataclass
class Readiness(KVConnectorHandshakeMetadata):
    """Whether a worker can blend.

    Attributes:
        refusal: Why it cannot; "" = it can.
    """

    refusal: str = ""


class KvragConnector(KVConnectorBase_V1, SupportsHMA):
    """CacheBlend as a vLLM connector; see `docs/vllm.md`.

    `SupportsHMA` leaves vLLM's hybrid cache manager on, without which models with recurrent layers do not start.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """Open the store, unless this vLLM or model cannot be blended: vLLM then serves as usual.

        Raises:
            KvragError: Invalid settings, or a store of another model.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._vllm_config, self._cache_config = vllm_config, kv_cache_config
        self._settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._store: KVStore | None = None
        self._refusal = self._unsupported()
        if not self._refusal:
            self._open_store()
        self._tracker: RequestTracker | None = None
        self._runner: JobRunner | None = None
        self._handler: TaskHandler | None = None
        if role == KVConnectorRole.SCHEDULER:
            # compute prompts whose load failed, regardless of the configured policy
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            self._tracker = RequestTracker(self._store, self._settings, vllm_config)
            if self._refusal:
                self._tracker.decide(self._refusal, compat.untested())
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._blocks: dict[str, list[int]] = {}  # to fill, by task
        self._outcomes: dict[str, TaskOutcome] = {}
        self._stats = KvragStats.empty()

    def _unsupported(self) -> str:
        """Return why blending is off, as far as the settings and the checkpoint show; "" = they do not."""
        try:
            reason = compat.too_old() or unsupported_setting(self._vllm_config)
            if reason := reason or unsupported_caches(caches_of(self._cache_config)):
                return reason
            self._fingerprint = fingerprint_of(self._vllm_config.model_config)
        except (ModelLoadError, UnsupportedModelError) as error:
            return str(error)
        except AttributeError as error:  # the settings have other names in this version
            return f"{type(error).__name__}: {error}"
        return ""

    def _open_store(self) -> None:
        """Open the store and compare its fingerprint."""
        try:
            self._store = open_store(self._settings)
            self._store.bind(self._fingerprint.stored_as(self._settings.codec))
        except KvragError as error:
            logger.error("vLLM cannot start: %s", error)  # vLLM adds tracebacks of several processes
            raise error from None  # the message has the cause

    # ---------------------------------------------------------------- scheduler

    def on_new_request(self, request: Any) -> None:
        """Find stored chunks in a new prompt, and separate its pages from those of exact requests."""
        assert self._tracker is not None
        try:
            self._tracker.add(request)
        except AttributeError as error:
            if not compat.untested():
                raise
            self._tracker.refuse(f"{type(error).__name__}: {error}; {compat.untested()}")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens after the computed ones to be blended, and whether that is asynchronous."""
        assert self._tracker is not None
        num_tokens = self._tracker.num_external(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Create the task of a request, whose pages are now allocated."""
        assert self._tracker is not None
        if num_external_tokens:
            self._tracker.allocated(request, list(blocks.get_block_ids()[0]))

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return the workers' tasks for this step."""
        assert self._tracker is not None
        tasks, cancelled = self._tracker.take()
        num_tokens = scheduler_output.total_num_scheduled_tokens
        return StepMetadata(tasks, cancelled, self._tracker.rows_beside(num_tokens), num_tokens == 0)

    def update_connector_output(self, connector_output: Any) -> None:
        """Record the outcomes of finished tasks."""
        assert self._tracker is not None
        results = connector_output.kv_connector_worker_meta
        if isinstance(results, Results):
            self._tracker.take_outcomes(results.outcomes)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return the report for the response."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the report for the response, with any number of kinds of KV cache."""
        assert self._tracker is not None
        report = self._tracker.finish(request)
        return False, None if report is None else {"kvrag": report}

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Turn blending on if all workers can blend."""
        assert self._tracker is not None
        refusals = dict.fromkeys(each.refusal for each in metadata.values() if isinstance(each, Readiness))
        self._tracker.decide("; ".join(filter(None, refusals)), compat.untested())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, KVConnectorHandshakeMetadata]) -> None:
        """Like `set_xfer_handshake_metadata`, for all stages of a pipeline."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    # ---------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Prepare blending, and check that it is exact. Model and pages exist now."""
        if self._store is None:
            return
        config, settings = self._vllm_config, self._settings
        try:
            # here because vLLM must import its platform's worker first, and because they use vLLM's internals
            from vllm_kvrag import gate
            from vllm_kvrag.backend import VllmBackend, exchange, together
            from vllm_kvrag.worker import loaded

            if not loaded:
                raise UnsupportedModelError("kvrag needs --worker-cls vllm_kvrag.Worker")
            model, tokenizer = loaded[-1], tokenizer_of(config.model_config)
            everywhere = exchange if config.parallel_config.tensor_parallel_size > 1 else None
            backend = together(
                lambda: VllmBackend(config, self._cache_config, model, tokenizer, self._fingerprint), everywhere
            )
            is_quantised = config.model_config.quantization is not None
            gate.check(backend, self._cache_config.num_blocks, is_quantised)
            self._handler = TaskHandler(backend, self._store, settings.config, settings.codec, settings.ram_bytes)
            self._runner = JobRunner(everywhere)
        except KvragError as error:
            self._refusal = str(error)
        except Exception as error:  # an untested model, attention backend or version: vLLM must still serve it
            logger.info("kvrag's check at start-up failed", exc_info=True)
            self._refusal = f"{type(error).__name__}: {error}"

    def get_handshake_metadata(self) -> Readiness:
        """Return whether this worker can blend."""
        return Readiness(self._refusal)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's new tasks, and execute due operations of all tasks."""
        if self._runner is None or self._handler is None:
            return
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        for name, task in step.tasks.items():
            self._blocks[name] = self._handler.blocks_to_fill(task)
            self._runner.start(name, self._handler.work(task), alone=self._handler.is_alone(task))
        for name in step.cancelled:
            self._runner.cancel(name)
        for job in self._runner.run(step.rows, step.is_idle):
            blocks = self._blocks.pop(job.name)
            self._finished.add(job.name)
            if job.error is not None:
                if not job.aborted:
                    self._failed_blocks.update(blocks)
                self._outcomes[job.name] = TaskOutcome({"error": str(job.error), "type": type(job.error).__name__})
            elif job.result is not None and self._handler.is_first:  # results are equal in all processes
                self._outcomes[job.name] = job.result
                self._stats.observe(job.result.report)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: prompts are blended before they are scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: chunks are stored on request."""

    def wait_for_save(self) -> None:
        """Do nothing: see `save_kv_layer`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose tasks have finished."""
        finished, self._finished = self._finished, set()
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that vLLM must compute itself."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> Results | None:
        """Return the outcomes of finished tasks."""
        outcomes, self._outcomes = self._outcomes, {}
        return Results(outcomes) if outcomes else None

    def get_kv_connector_stats(self) -> KvragStats | None:
        """Return the counts since the last call."""
        if self.role == KVConnectorRole.SCHEDULER or self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KvragStats.empty()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvragStats:
        """Return the counts in a dict."""
        return KvragStats.empty() if data is None else KvragStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvragPromMetrics:
        """Return the metrics of kvrag on vLLM's `/metrics`."""
        return KvragPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End all tasks and close the store."""
        if self._runner is not None:
            self._runner.close()
        if self._store is not None:
            self._store.close()


def open_store(settings: ConnectorSettings) -> KVStore:
    """Open the store. An engine's processes share one local folder of a shared store, and none waits for its log.

    Raises:
        KvragError: It cannot be opened.
    """
    if not is_shared(settings.store):
        return FileStore(settings.store, max_bytes=settings.max_bytes)
    budget: dict[str, Any] = {} if settings.max_bytes is None else {"cache_bytes": settings.max_bytes}
    return SharedStore(str(settings.store), settings.store_cache, **budget)
