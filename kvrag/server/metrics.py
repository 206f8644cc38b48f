"""Prometheus metrics, with names like vLLM's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from kvrag.server.queue import AdmissionQueue
from kvrag.types import BlendReport

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 600)


class Metrics:
    """Counters and histograms of one namespace, in their own registry."""

    def __init__(self, namespace: str, queue: AdmissionQueue, *, with_process: bool) -> None:
        """Create metrics, `with_process` with the memory and CPU time of the whole process."""
        self.registry = registry = CollectorRegistry()
        if with_process:
            ProcessCollector(registry=registry)
        running = Gauge("kvrag_num_requests_running", "Admitted requests", registry=registry)
        running.set_function(lambda: queue.running(namespace))
        waiting = Gauge("kvrag_num_requests_waiting", "Waiting requests", registry=registry)
        waiting.set_function(lambda: queue.waiting(namespace))
        prompt = "Prompt tokens: reused without being computed, recomputed although stored, or computed otherwise"
        self._prompt = Counter("kvrag_prompt_tokens", prompt, ["source"], registry=registry)
        self._generated = Counter("kvrag_generation_tokens", "Generated tokens", registry=registry)
        self._finished = Counter("kvrag_request_success", "Answers", ["finished_reason"], registry=registry)
        failed = "Failed requests by HTTP status; 499 = the client disconnected"
        self.failed = Counter("kvrag_request_failure", failed, ["status"], registry=registry)
        self.queue_time = self._histogram("request_queue_time", "Time from the request to its admission", _WHOLE)
        self._first = self._histogram("time_to_first_token", "Time from the request to the first token", _FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency", "Time between tokens", _BETWEEN)
        self._whole = self._histogram("e2e_request_latency", "Time from the request to the end of the answer", _WHOLE)
        self._prefill = self._histogram("request_prefill_time", "Time to first token within the engine", _FIRST_TOKEN)
        self._completed = self._histogram("completion_time", "Time to recompute the rest of an unsure answer", _WHOLE)
        for source in ("cached", "recomputed", "computed"):
            self._prompt.labels(source)  # zero from the start instead of missing

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvrag_{name}_seconds", about, buckets=buckets, registry=self.registry)

    def token(self, seconds: float, count: int, is_first: bool) -> None:
        """Count tokens with the time since the request (first token) or since the previous tokens."""
        (self._first if is_first else self._between).observe(seconds)
        self._generated.inc(count)

    def answered(self, report: BlendReport, finish_reason: str, seconds: float) -> None:
        """Count a complete answer."""
        self._prompt.labels("cached").inc(report.reused_tokens)
        self._prompt.labels("recomputed").inc(report.recomputed_tokens)
        self._prompt.labels("computed").inc(report.prompt_tokens - report.reused_tokens - report.recomputed_tokens)
        self._finished.labels(finish_reason).inc()
        self._whole.observe(seconds)
        self._prefill.observe(report.ttft_s)
        if report.completed:
            self._completed.observe(report.completed.seconds)
