"""Shared state of all requests of a server, and of the requests of one namespace."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvrag.engine import BlendEngine
from kvrag.errors import SettingError
from kvrag.server.api_errors import ApiError
from kvrag.server.corpus import Corpus
from kvrag.server.guard import UPLOADS, most_requests
from kvrag.server.metrics import Metrics
from kvrag.server.queue import AdmissionQueue
from kvrag.server.settings import ServerSettings

_READERS = 2  # concurrent readers of files
_PARSERS = 2  # of bodies
_WORKERS = 4  # on what is neither an answer nor one of these


class Tenant:
    """One namespace of a server: its corpus and metrics. Requests never see another namespace's."""

    def __init__(self, namespace: str, corpus: Corpus | None, state: State) -> None:
        self.namespace, self.corpus = namespace, corpus
        # the process's load would reveal the activity of other namespaces
        self.metrics = Metrics(namespace, state.answering, with_process=not state.is_shared)

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
