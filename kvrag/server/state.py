"""What the requests of a server share, and what only those of one namespace share."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from kvrag.engine import BlendEngine
from kvrag.errors import SettingError
from kvrag.server.admission import AdmissionQueue
from kvrag.server.corpus import Corpus
from kvrag.server.errors import ApiError
from kvrag.server.metrics import Metrics
from kvrag.server.settings import ServerSettings

_READERS = 2  # files read at a time
UPLOADS = 16  # files of a namespace received or waiting to be read


class Tenant:
    """One namespace of a server: its corpus, its metrics, its uploads. No request sees another namespace's."""

    def __init__(self, namespace: str, corpus: Corpus | None, metrics: Metrics) -> None:
        self.namespace, self.corpus, self.metrics = namespace, corpus, metrics
        self.uploads = 0

    def require_corpus(self) -> Corpus:
        """Return the corpus; raise ApiError if the server has none."""
        if self.corpus is None:
            raise ApiError(404, "this server has no corpus: start it without --no-corpus", "no_corpus")
        return self.corpus


class State:
    """The engine, the settings, the admission queues and the namespaces of one server.

    Attributes:
        answering: Admits requests to the model.
        reading: Admits uploads to the file readers.
    """

    def __init__(self, engine: BlendEngine, settings: ServerSettings, corpora: Iterable[Corpus]) -> None:
        self.engine, self.settings = engine, settings
        self.answering = AdmissionQueue(settings.concurrency, settings.queue, "answer")
        self.reading = AdmissionQueue(_READERS, UPLOADS, "read")
        self.started = int(time.time())
        by_namespace = {corpus.namespace: corpus for corpus in corpora}
        if by_namespace and set(by_namespace) != set(settings.namespaces):
            raise SettingError(
                f"the corpora must be those of the namespaces {', '.join(map(repr, settings.namespaces))}"
            )
        self.is_shared = len(settings.namespaces) > 1
        self.tenants = {name: self._tenant(name, by_namespace.get(name)) for name in settings.namespaces}

    def _tenant(self, namespace: str, corpus: Corpus | None) -> Tenant:
        # the process' load would show one namespace how busy the others are
        metrics = Metrics(with_process=not self.is_shared)
        metrics.watch("num_requests_running", "Requests admitted", partial(self.answering.running, namespace))
        metrics.watch("num_requests_waiting", "Requests that wait", partial(self.answering.waiting, namespace))
        if corpus is not None:
            metrics.watch("corpus_pending", "Documents that wait to be encoded or dropped", corpus.count_pending)
        return Tenant(namespace, corpus, metrics)

    @property
    def corpora(self) -> list[Corpus]:
        """The corpora of all namespaces; empty if the server has none."""
        return [tenant.corpus for tenant in self.tenants.values() if tenant.corpus is not None]

    @property
    def embedder(self) -> str | None:
        """Name of the embedder, which all corpora share; None without corpora."""
        return next((corpus.embedder for corpus in self.corpora), None)

    @property
    def answering_models(self) -> list[str]:
        """Names of the models that answer prompts."""
        return [self.settings.name, self.settings.rag_name] if self.corpora else [self.settings.name]

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the entries of `/v1/models` by name."""
        entry = {"object": "model", "created": self.started, "owned_by": "kvrag"}
        window = {"max_model_len": self.engine.model.context_window}
        facts: dict[str, dict[str, Any]] = dict.fromkeys(self.answering_models, window)
        if self.embedder is not None:
            facts[self.embedder] = {}
        return {name: {"id": name, **entry, **more} for name, more in facts.items()}

    def check_model(self, name: str) -> None:
        """Raise ApiError unless this model answers prompts."""
        if name not in self.answering_models:
            known = ", ".join(map(repr, self.answering_models))
            raise ApiError(404, f"there is no model {name!r:.280}: this server has {known}", "model_not_found", "model")
