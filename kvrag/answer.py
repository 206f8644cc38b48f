"""Life of an answer: render the question, prefill it, decode, and keep the conversation for the next turn."""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import partial
from weakref import ref

from kvrag.backend.transformers import Model
from kvrag.config import EngineOptions
from kvrag.generate.decode import Reply
from kvrag.generate.prompt import Question
from kvrag.ingest.ingest import Ingestion
from kvrag.listen.check import Checker
from kvrag.listen.learn import Learner
from kvrag.listen.listener import Answered, Listener, RecentRequests, Watch
from kvrag.memory.conversation import Conversations
from kvrag.memory.forgetting import Forgetting
from kvrag.prefill import Pipeline
from kvrag.request import Request
from kvrag.scheduling.waiting import Admission, Idle
from kvrag.types import Delta


def _notice(forgetting: ref[Forgetting]) -> None:
    """See `Forgetting.notice`. A strong reference would be a cycle, which keeps a closed engine's model in memory."""
    if (alive := forgetting()) is not None:
        alive.notice()


class Answering:
    """Answers questions, keeps the live conversations, and tells its `listeners`. Thread-safe."""

    def __init__(self, model: Model, pipeline: Pipeline, ingestion: Ingestion, options: EngineOptions) -> None:
        self._model, self._pipeline, self._ingestion = model, pipeline, ingestion
        self._conversations = Conversations(options["conversation_bytes"], model.stable_length, model.keeps_states)
        self._admission = Admission(options["batch_bytes"])
        memory, decode = (pipeline.memory, self._conversations), model.tokenizer.decode
        self.forgetting = Forgetting(pipeline.store, pipeline.lookup, *memory, decode)
        notice, self.recent = partial(_notice, ref(self.forgetting)), RecentRequests()
        self.idle = idle = Idle(self._admission.is_busy, notice)
        checker = Checker(model, pipeline.planner, options["check"], idle)
        self.listeners: list[Listener] = [self.recent, Watch(), checker]
        if options["learn"]:
            self.listeners.append(Learner(ingestion, pipeline.lookup, idle, notice))
        self.forgetting.then += [idle.drop_forgotten, *(listener.forgotten for listener in self.listeners)]

    def stream(self, question: Question) -> Generator[Delta, None, None]:
        """See `BlendEngine.stream`."""
        started = time.perf_counter()  # the consumer has asked for the first token
        request = self._render(question)
        reply = Reply(self._model, question.prepared, question.sampling, request)
        request.question_end = len(request.ids) - reply.generation_prompt
        with self._admission.admit(reply.most_bytes) as admitted, request.kv_freed_at_end():
            request.conversations = self._conversations
            self._conversations.begin(request)  # it is marked when one of its texts is forgotten
            created: dict[str, str] = {}
            if question.documents:
                created, note = self._ingestion.warm_documents(
                    question.documents, question.namespace, self._pipeline.lookup
                )
                request.created, request.notes = created, [*request.notes, *filter(None, [note])]
            self.prefill(request)
            if created and request.is_forgotten:
                self.forgetting.free(self._ingestion.forget_requests({*created.values()}, question.namespace))
            for listener in self.listeners:
                listener.prefilled(request, question.prepared.prompt)
            deltas = admitted.pausing(reply.decode(started))
            try:
                yield next(deltas)
                request.keep()  # for prompts that arrive meanwhile; now, to delay no first token
                yield from deltas
            except GeneratorExit:  # a consumer may leave a stream and continue the conversation
                # a shared step may still be computing the last token's KV: it is left out
                request.keep(reply.tokens[:-1], reply.generation_prompt)
                raise
            request.keep(reply.tokens, reply.generation_prompt)
            # not for abandoned streams: garbage collection may end them in a thread that holds the locks taken here
            how = question.sampling, reply.tokens, reply.is_ended, question.prepared.grammar is not None
            for listener in self.listeners:
                listener.answered(Answered(request, *how, self.prefill))

    def _render(self, question: Question) -> Request:
        """Return the request that a question makes."""
        ids = question.prepared.render(self._model.tokenizer)
        self._model.check_window(len(ids))
        return Request(ids, question.config, question.namespace)

    def try_out(self, question: Question) -> Request:
        """Prefill a prompt without answering it, and without conversations."""
        started = time.perf_counter()
        request = self._render(question)
        self.prefill(request)
        request.note_first_token(time.perf_counter() - started)
        return request

    def prefill(self, request: Request) -> None:
        """See `BlendEngine.prefill`. Conversations are used for a request that has some."""
        pipeline, config = self._pipeline, request.config
        plan = pipeline.planner.plan(config, request.namespace)
        is_reference = config.policy == "full"  # no chunk is looked up for it
        with self.forgetting.reading(pipeline.store.removals() if is_reference else pipeline.lookup.update()):
            if request.conversations is not None and config.reuses_prompts:
                request.prefix = self.forgetting.find_prefix(request.token_ids, plan.config, request.namespace)
            pipeline.prefill(request, plan, matches=() if is_reference else None)

    def close(self) -> None:
        """Drop the conversations and stop all other work. Answers in progress complete with their KV."""
        self.idle.close()
        self._conversations.close()

    def forget_learned(self, namespace: str) -> int:
        """See `BlendEngine.forget_learned`."""
        for listener in self.listeners:
            listener.forget_learned(namespace)
        return self.forgetting.forget(partial(self._pipeline.store.forget_requests, namespace), namespace)
