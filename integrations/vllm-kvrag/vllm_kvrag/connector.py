"""The KV connector: what vLLM calls in its scheduler and in its workers.

The scheduler side finds stored chunks in a new prompt, and tells vLLM that all of the prompt's KV comes from outside,
asynchronously. The worker side blends the prompt in its pages over the next steps; vLLM then computes the last token
again, samples, and decodes as usual.
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
)

from kvrag.errors import KvragError, UnsupportedModelError
from kvrag.store import FileStore, KVStore, SharedStore, is_shared
from kvrag.store.shared import CACHE_BYTES
from vllm_kvrag import gate
from vllm_kvrag.backend import VllmBackend, exchange
from vllm_kvrag.compat import check_version
from vllm_kvrag.fingerprint import fingerprint_of, tokenizer_of
from vllm_kvrag.jobs import JobOutcome, Jobs, Task
from vllm_kvrag.params import ConnectorSettings
from vllm_kvrag.scheduler import Matching
from vllm_kvrag.stats import KvragPromMetrics, KvragStats
from vllm_kvrag.turns import Turns

logger = logging.getLogger("vllm.kvrag")  # below vLLM's own logger, which has the handlers


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler side sends to the workers with one step.

    Attributes:
        tasks: New tasks, by request id.
        cancelled: Requests that were aborted.
        rows: Number of rows that blending may compute in this step.
        is_idle: The step has no batch of its own.
    """

    tasks: dict[str, Task] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    rows: int = 0
    is_idle: bool = False


@dataclass
class Results(KVConnectorWorkerMetadata):
    """Outcomes of finished tasks, by request id; from the first worker, and failures from any."""

    outcomes: dict[str, JobOutcome] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Results:
        """Join the outcomes of two workers."""
        assert isinstance(other, Results)
        outcomes = {**other.outcomes, **self.outcomes}
        failed = {name: outcome for name, outcome in other.outcomes.items() if "error" in outcome.report}
        return Results({**outcomes, **failed})  # a task that failed anywhere has failed


@dataclass
class Readiness(KVConnectorHandshakeMetadata):
    """Whether a worker can blend.

    Attributes:
        refusal: Why not; "" = it can.
    """

    refusal: str = ""


class KvragConnector(KVConnectorBase_V1):
    """CacheBlend as a vLLM connector; see `docs/vllm.md`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """Open the store.

        Raises:
            KvragError: A wrong setting, an unknown vLLM, or a store of another model.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_version()
        self._vllm_config, self._cache_config = vllm_config, kv_cache_config
        self._settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._fingerprint = fingerprint_of(vllm_config.model_config)
        try:
            self._store = open_store(self._settings)
            self._store.bind(self._fingerprint.stored_as(self._settings.codec))
        except KvragError as error:
            logger.error("vLLM cannot start: %s", error)  # vLLM adds tracebacks of several processes
            raise error from None  # the message has the cause
        self._matching: Matching | None = None
        self._turns: Turns | None = None
        self._jobs: Jobs | None = None
        self._refusal = ""
        if role == KVConnectorRole.SCHEDULER:
            # a failed load falls back to computing, whatever the default is
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            self._matching = Matching(self._store, self._settings, vllm_config)
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._blocks: dict[str, list[int]] = {}  # those that a task fills
        self._outcomes: dict[str, JobOutcome] = {}
        self._stats = KvragStats.empty()

    # ---------------------------------------------------------------- scheduler

    def on_new_request(self, request: Any) -> None:
        """Find stored chunks in a new prompt, and keep its pages apart from those of exact requests."""
        assert self._matching is not None
        self._matching.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens behind the computed ones that come from blending, and that it takes steps."""
        assert self._matching is not None
        num_tokens = self._matching.num_external(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Hand a request to the workers, now that it has pages."""
        assert self._matching is not None
        if num_external_tokens:
            self._matching.allocated(request, list(blocks.get_block_ids()[0]))

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return what the workers do beside this step's batch."""
        assert self._matching is not None
        tasks, cancelled = self._matching.take()
        num_tokens = scheduler_output.total_num_scheduled_tokens
        return StepMetadata(tasks, cancelled, self._matching.rows_beside(num_tokens), num_tokens == 0)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the outcomes of finished tasks."""
        assert self._matching is not None
        results = connector_output.kv_connector_worker_meta
        if isinstance(results, Results):
            self._matching.take_outcomes(results.outcomes)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return the report for the response."""
        assert self._matching is not None
        report = self._matching.finish(request)
        return False, None if report is None else {"kvrag": report}

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Take what the workers said at start-up: blend, or serve as vLLM does."""
        assert self._matching is not None
        for each in metadata.values():
            if isinstance(each, Readiness) and each.refusal:
                self._matching.refuse(each.refusal)

    # ---------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Prepare blending, now that model and pages exist, and check that it is exact."""
        from vllm_kvrag.worker import loaded  # its platform's worker is imported by vLLM first

        config = self._vllm_config
        parallel = config.parallel_config.tensor_parallel_size > 1
        self._turns = Turns(exchange if parallel else None)
        refusal = ""
        try:
            if not loaded:
                raise UnsupportedModelError("kvrag needs --worker-cls vllm_kvrag.Worker")
            tokenizer = tokenizer_of(config.model_config)
            backend = VllmBackend(config, self._cache_config, loaded[-1], tokenizer, self._fingerprint, self._turns)
            gate.check(backend, self._cache_config.num_blocks)
            settings = self._settings
            self._jobs = Jobs(backend, self._store, settings.config, settings.codec, settings.ram_bytes)
        except KvragError as error:
            refusal = str(error)
        except Exception as error:  # a model or backend that nobody tried: vLLM must serve it all the same
            logger.exception("the gate of kvrag failed")
            refusal = f"{type(error).__name__}: {error}"
        self._refusal = refusal
        if refusal:
            logger.warning("blending is off, vLLM serves as usual: %s", refusal)
        else:
            logger.info("blending is exact on this model and attention backend")

    def get_handshake_metadata(self) -> Readiness:
        """Return whether this worker can blend."""
        return Readiness(self._refusal)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's new tasks, and do what is due of all tasks."""
        if self._turns is None or self._jobs is None:
            return
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        for name, task in step.tasks.items():
            self._blocks[name] = self._jobs.own_blocks(task)
            self._turns.start(name, self._jobs.work(task), alone=self._jobs.is_alone(task))
        for name in step.cancelled:
            self._turns.cancel(name)
        for job in self._turns.run(step.rows, step.is_idle):
            blocks = self._blocks.pop(job.name)
            self._finished.add(job.name)
            if job.error is not None:
                if not job.aborted:
                    self._failed_blocks.update(blocks)
                self._outcomes[job.name] = JobOutcome({"error": str(job.error), "type": type(job.error).__name__})
            elif job.result is not None and self._jobs.is_first:  # the others did the same
                self._outcomes[job.name] = job.result
                self._stats.observe(job.result.report)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests are complete before they are scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: chunks are stored on request."""

    def wait_for_save(self) -> None:
        """Do nothing: see `save_kv_layer`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose prompts are complete."""
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
        """Return counts since the last call."""
        if self.role == KVConnectorRole.SCHEDULER or self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KvragStats.empty()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvragStats:
        """Return the counts that were sent as a dict."""
        return KvragStats.empty() if data is None else KvragStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvragPromMetrics:
        """Return the metrics of kvrag on vLLM's `/metrics`."""
        return KvragPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End all tasks and close the store."""
        if self._turns is not None:
            self._turns.close()
        self._store.close()


def open_store(settings: ConnectorSettings) -> KVStore:
    """Open the store. All processes of an engine share one local folder of a shared store, and none waits for its log.

    Raises:
        KvragError: It cannot be opened.
    """
    if not is_shared(settings.store):
        return FileStore(settings.store, max_bytes=settings.max_bytes)
    budget = CACHE_BYTES if settings.max_bytes is None else settings.max_bytes
    return SharedStore(str(settings.store), settings.store_cache, budget, always_follow=True)
