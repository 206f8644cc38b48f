"""Prometheus metrics, with names like vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrag.types import BlendReport, CheckStats, LearnStats

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 600)


class Metrics:
    """Counters and histograms of one namespace, in their own registry."""

    def __init__(self, *, with_process: bool = True) -> None:
        """Create metrics, `with_process` with the memory and CPU time of the whole process."""
        self._registry = registry = CollectorRegistry()
        if with_process:
            ProcessCollector(registry=registry)
        prompt = "Prompt tokens by source: reused, reused and recomputed, or computed without stored KV"
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
        return Histogram(f"kvrag_{name}_seconds", about, buckets=buckets, registry=self._registry)

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read at every scrape."""
        Gauge(f"kvrag_{name}", about, registry=self._registry).set_function(value)

    def watch_learning(self, stats: Callable[[], LearnStats | None]) -> None:
        """Add the counters of learning, which are read at every scrape."""
        self._registry.register(_Learning(stats))

    def watch_checks(self, stats: Callable[[], CheckStats | None]) -> None:
        """Add the counts of checked answers, which are read at every scrape."""
        self._registry.register(_Checks(stats))

    def token(self, seconds: float, count: int, is_first: bool) -> None:
        """Count tokens with the time since the request (first token) or since the previous tokens."""
        (self._first if is_first else self._between).observe(seconds)
        self._generated.inc(count)

    def answered(self, report: BlendReport, finish_reason: str, seconds: float) -> None:
        """Count a complete answer."""
        # chunks encoded for this answer were computed, even though they were then read from the store
        reused = report.reused_tokens - report.created_tokens
        recomputed = min(report.recomputed_tokens, reused)
        self._prompt.labels("cached").inc(reused - recomputed)
        self._prompt.labels("recomputed").inc(recomputed)
        self._prompt.labels("computed").inc(report.prompt_tokens - reused)
        self._finished.labels(finish_reason).inc()
        self._whole.observe(seconds)
        self._prefill.observe(report.ttft_s)
        if report.completed:
            self._completed.observe(report.completed.seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _Learning(Collector):
    """Counters of learning; none where it is off."""

    def __init__(self, stats: Callable[[], LearnStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        yield GaugeMetricFamily("kvrag_learn_remembered_texts", "Texts seen once", stats.seen)
        for name, about, value in (
            ("chunks", "Chunks learned", stats.learned),
            ("tokens", "Tokens of the chunks learned", stats.tokens),
            ("reused_tokens", "Prompt tokens that learned chunks brought, since the start", stats.reused),
            ("failure", "Prompts with an error in learning", stats.failed),
            ("ignored", "Prompts that were not looked at because too many waited", stats.ignored),
        ):
            yield CounterMetricFamily(f"kvrag_learn_{name}", about, value)


class _Checks(Collector):
    """Counts of checked answers; none where no answer is checked."""

    def __init__(self, stats: Callable[[], CheckStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for name, about, value in (
            ("recent_answers", "Checked answers that the next number is about", stats.last),
            ("recent_kept", "Of these, those that full prefill confirms", stats.last_kept),
            ("margin_factor", "Factor of the margin that follows", stats.margin_factor),
        ):
            yield GaugeMetricFamily(f"kvrag_check_{name}", about, value)
        for name, about, value in (
            ("chosen", "Answers chosen for a check", stats.chosen),
            ("kept", "Answers that full prefill confirms", stats.kept),
            ("lost", "Answers with a token that full prefill would not have chosen", stats.lost),
            ("failure", "Checks with an error", stats.failed),
        ):
            yield CounterMetricFamily(f"kvrag_check_{name}", about, value)
