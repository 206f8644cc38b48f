"""Shared state of all requests of a server, and of the requests of one namespace, with Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from kvrag.engine import BlendEngine
from kvrag.errors import SettingError
from kvrag.server.api_errors import ApiError
from kvrag.server.corpus import Corpus
from kvrag.server.guard import UPLOADS, most_requests
from kvrag.server.queue import AdmissionQueue
from kvrag.server.settings import ServerSettings
from kvrag.types import BlendReport

_READERS = 2  # concurrent readers of files
_PARSERS = 2  # of bodies
_WORKERS = 4  # on what is neither an answer nor one of these

# seconds; the names of the metrics are like vLLM's
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 600)


class Tenant:
    """One namespace of a server: its corpus and its Prometheus metrics. Requests never see another namespace's."""

    def __init__(self, namespace: str, corpus: Corpus | None, state: State) -> None:
        self.namespace, self.corpus = namespace, corpus
        self.registry = registry = CollectorRegistry()
        queue = state.answering
        if not state.is_shared:  # the process's load would reveal the activity of other namespaces
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

    def count_tokens(self, seconds: float, count: int, is_first: bool) -> None:
        """Count tokens with the time since the request (first token) or since the previous tokens."""
        (self._first if is_first else self._between).observe(seconds)
        self._generated.inc(count)

    def count_answer(self, report: BlendReport, finish_reason: str, seconds: float) -> None:
        """Count a complete answer."""
        self._prompt.labels("cached").inc(report.reused_tokens)
        self._prompt.labels("recomputed").inc(report.recomputed_tokens)
        self._prompt.labels("computed").inc(report.prompt_tokens - report.reused_tokens - report.recomputed_tokens)
        self._finished.labels(finish_reason).inc()
        self._whole.observe(seconds)
        self._prefill.observe(report.ttft_s)
        if report.completed:
            self._completed.observe(report.completed.seconds)

    def require_corpus(self) -> Corpus:
        """Return the corpus; raise ApiError without one."""
        if self.corpus is None:
            raise ApiError(404, "the server has no corpus: start it without --no-corpus", "no_corpus")
        return self.corpus


class State:
    """Engine, settings, admission queues and namespaces of one server.

    All work passes a queue: `answering`, `reading` of files, `encoding` of documents one by one, `parsing` of bodies,
    and `working` on the rest. The event loop alone answers `/health`.
    """

    def __init__(self, engine: BlendEngine, settings: ServerSettings, corpora: Iterable[Corpus]) -> None:
        self.engine, self.settings = engine, settings
        number, most = len(settings.namespaces), sum(most_requests(settings))
        self.answering = AdmissionQueue(settings.concurrency, settings.queue, "answer", number)
        self.reading = AdmissionQueue(_READERS, UPLOADS, "read", number)
        self.encoding = AdmissionQueue(1, UPLOADS, "encode", number)
        self.parsing = AdmissionQueue(_PARSERS, most, "parse", number)
        self.working = AdmissionQueue(_WORKERS, most, "work", number)
        self.queues = (self.answering, self.reading, self.encoding, self.parsing, self.working)
        found = {corpus.namespace: corpus for corpus in corpora}
        names = settings.namespaces
        if found and set(found) != set(names):
            raise SettingError(f"the corpora must match the namespaces {', '.join(map(repr, names))}")
        self.is_shared = len(names) > 1
        self.tenants = {name: Tenant(name, found.get(name), self) for name in names}
        self.corpora = [found[name] for name in names if found]  # of all namespaces, or none
        entry = {"object": "model", "created": int(time.time()), "owned_by": "kvrag"}
        entry |= {"max_model_len": engine.context_window, "has_chat_template": engine.model.tokenizer.has_chat_template}
        models = [settings.name, settings.rag_name] if found else [settings.name]
        self.models = {name: {"id": name, **entry} for name in models}  # the entries of `/v1/models`

    def check_model(self, name: str) -> None:
        """Raise ApiError unless this is a model that answers prompts."""
        if name not in self.models:
            known = ", ".join(map(repr, self.models))
            raise ApiError(404, f"unknown model {name!r:.280}: this server has {known}", "model_not_found", "model")
