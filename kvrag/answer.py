"""Life of an answer: render the question, prefill it, decode, and keep the conversation for the next turn."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import ref

import numpy as np

from kvrag.backend.transformers import Model, Tokenizer
from kvrag.config import (
    AnswerOptions,
    BlendConfig,
    EngineOptions,
    Sampling,
    checked_answer,
    named_texts,
)
from kvrag.errors import StoreError
from kvrag.generate.decode import Reply
from kvrag.generate.prompt import Prepared, prepare
from kvrag.ingest.ingest import Ingestion
from kvrag.listen.check import Checker
from kvrag.listen.learn import Learner
from kvrag.listen.listener import Answered, Listener
from kvrag.listen.recent import RecentRequests
from kvrag.listen.watch import Watch
from kvrag.memory.conversation import Blended, Conversations, Turn
from kvrag.memory.forgetting import Forgetting
from kvrag.request import Pipeline
from kvrag.reuse.request_state import RequestState
from kvrag.scheduling.idle import Idle
from kvrag.scheduling.waiting import Admission
from kvrag.store.values import text_key
from kvrag.types import Delta, Messages, TokenIds


@dataclass(frozen=True)
class Question:
    """A question and the settings of its answer."""

    prepared: Prepared  # the prompt, with tools and grammar
    documents: Sequence[str]  # chunks in the prompt; those not stored are encoded first
    namespace: str  # of the chunks and conversations to reuse
    config: BlendConfig
    sampling: Sampling

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, prompt: str | Messages | TokenIds, config: BlendConfig, overrides: AnswerOptions
    ) -> Question:
        """Return the question that a prompt and its options ask; raises the errors of `BlendEngine.stream`."""
        options, config, sampling = checked_answer(overrides, config)
        names = ("tools", "tool_choice", "grammar", "template", "reasoning")
        prepared = prepare(tokenizer, prompt, **{name: options[name] for name in names})
        prepared = replace(prepared, has_one_call=options["parallel_tool_calls"] is False)
        return cls(prepared, options["documents"], options["namespace"], config, sampling)


def _notice(forgetting: ref[Forgetting]) -> None:
    """See `Forgetting.notice`. A strong reference would be a cycle, which keeps a closed engine's model in memory."""
    if (alive := forgetting()) is not None:
        alive.notice()


class Answering:
    """Answers questions, keeps the live conversations, and tells its `listeners`. Thread-safe."""

    def __init__(
        self,
        model: Model,
        pipeline: Pipeline,
        ingestion: Ingestion,
        options: EngineOptions,
    ) -> None:
        self._model, self._pipeline, self._ingestion = model, pipeline, ingestion
        kept = options["conversation_bytes"], model.stable_length, model.num_layers, model.keeps_states
        self._conversations = Conversations(*kept)
        self._admission = Admission(options["batch_bytes"])
        self._warming = threading.Lock()
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
            self.begin(request)
            self._prefill_with_documents(request, question)
            for listener in self.listeners:
                listener.prefilled(request, question.prepared.prompt)
            deltas = admitted.pausing(reply.decode(started))
            try:
                yield next(deltas)
                self._keep(request)  # for prompts that arrive meanwhile; now, to delay no first token
                yield from deltas
            except GeneratorExit:  # a consumer may leave a stream and continue the conversation
                # a shared step may still be computing the last token's KV: it is left out
                self._keep(request, reply.tokens[:-1], reply.generation_prompt)
                raise
            self._keep(request, reply.tokens, reply.generation_prompt)
            # not for abandoned streams: garbage collection may end them in a thread that holds the locks taken here
            how = question.sampling, reply.tokens, reply.is_ended, question.prepared.grammar is not None
            for listener in self.listeners:
                listener.answered(Answered(request, *how, self.prefill))

    def _render(self, question: Question) -> RequestState:
        """Return the request that a question makes."""
        ids = question.prepared.render(self._model.tokenizer)
        self._model.check_window(len(ids))
        return RequestState(ids, question.config, question.namespace)

    def _prefill_with_documents(self, request: RequestState, question: Question) -> None:
        """Prefill the request of a question, with its documents."""
        request.created = created = self._warm(question.documents, request) if question.documents else {}
        self.prefill(request)
        if created and request.is_forgotten:
            self.forgetting.free(self._ingestion.forget_requests({*created.values()}, question.namespace))

    def try_out(self, question: Question) -> RequestState:
        """Prefill a prompt without answering it, and without conversations."""
        started = time.perf_counter()
        request = self._render(question)
        self.prefill(request)
        request.note_first_token(time.perf_counter() - started)
        return request

    def begin(self, request: RequestState) -> None:
        """Register a request: it may use conversations, and is marked when one of its texts is forgotten."""
        request.conversations = self._conversations
        self._conversations.begin(request)

    def prefill(self, request: RequestState) -> None:
        """See `BlendEngine.prefill`. Conversations are used for a request that has begun."""
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
        for listener in self.listeners:
            listener.close()
        self._conversations.close()

    def forget_learned(self, namespace: str) -> int:
        """See `BlendEngine.forget_learned`."""
        for listener in self.listeners:
            listener.forget_learned(namespace)
        return self.forgetting.forget(partial(self._pipeline.store.forget_requests, namespace), namespace)

    def _warm(self, documents: Sequence[str], request: RequestState) -> dict[str, str]:
        """Encode the documents of a request that are not stored; it gets a note if they cannot be stored.

        Returns their text keys by chunk key, also of those that could not be stored.
        """
        namespace = request.namespace
        tokenized = self._ingestion.tokenize(named_texts(documents), namespace)
        text_keys = [text_key(namespace, ids) for ids, _ in tokenized]

        def find_missing() -> dict[str, tuple[str, str]]:
            usable = self._pipeline.lookup.usable(text_keys)
            chunks = zip(documents, text_keys, tokenized, strict=True)
            # a text that is too short to be reused has no key
            return {key: (name, text) for text, name, (_, key) in chunks if key and name not in usable}

        missing: dict[str, tuple[str, str]] = {}
        try:
            if find_missing():
                with self._warming:  # parallel answers with the same documents encode them once
                    if missing := find_missing():
                        texts = [text for _, text in missing.values()]
                        self._ingestion.warm(texts, "", None, namespace, mode="on request")
                        self._pipeline.lookup.refresh()
        except StoreError as error:  # the answer does not depend on it
            request.notes = [*request.notes, f"documents could not be stored: {error}"]
        return {key: name for key, (name, _) in missing.items()}

    def _keep(self, request: RequestState, answer: Sequence[int] = (), generation_prompt: int = 0) -> None:
        """Keep an answered prompt for the next turn, which contains it without the generation prompt.

        Without an answer, keep only what equals full prefill's: other prompts may share that. Blended KV depends on the
        question, so only this conversation may continue from it.
        """
        if not request.config.reuses_prompts or sys.is_finalizing():  # torch would abort the process
            return
        prefix, num_tokens = request.prefix, len(request.ids)
        ids = np.array([*request.token_ids, *answer][: request.cache.get_seq_length()])
        exact = len(ids) if request.is_exact else request.num_exact(request.selected[:0])
        turn = Turn(request.kept, num_tokens - generation_prompt, num_tokens)
        # the variants that the prefix was blended from are recorded: once one of these texts gets another variant, the
        # conversation must not be continued
        blended = Blended(
            request.planned,
            (*(prefix.turns if prefix else ()), turn),
            {**request.with_context, **(prefix.with_context if prefix else {})},
        )
        replaced = prefix.continued if prefix else None
        ids = ids if answer and not self._model.keeps_states else ids[:exact]
        self._conversations.keep(request, ids, exact, request.cache, request.chunks, blended, replaced)
