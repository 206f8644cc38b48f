"""Life of an answer: render the question, prefill it, decode, and keep the conversation for the next turn."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from kvrag.backend.transformers import Model, Tokenizer
from kvrag.backend.transformers.tokenizer import common_prefix
from kvrag.config import (
    ANSWER_SETTINGS,
    BlendConfig,
    EngineOptions,
    Grammar,
    Sampling,
    check_list,
    check_namespace,
    check_type,
    named_texts,
)
from kvrag.errors import SettingError, StoreError
from kvrag.fingerprint import text_key
from kvrag.generate.decode import decode
from kvrag.generate.grammar import constrain
from kvrag.generate.history import Answered, History, Watch
from kvrag.generate.thoughts import Thoughts
from kvrag.generate.tools import Prepared, prepare
from kvrag.ingest.ingest import Ingestion
from kvrag.ingest.learn import Learner
from kvrag.inspect.explain import why_little
from kvrag.memory.conversation import Begun, Blended, CachedPrefix, Conversations, Turn
from kvrag.options import ANSWER_DEFAULTS, AnswerOptions, fill_options
from kvrag.request import Pipeline
from kvrag.reuse.deepen import Prefilled
from kvrag.reuse.prompt import Prompt
from kvrag.scheduling.admission import Admission
from kvrag.types import BlendReport, Delta, Messages, TokenIds


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
        options = fill_options("an answer", ANSWER_DEFAULTS, overrides)
        config = overridden(config, **{name: options[name] for name in ANSWER_SETTINGS})
        tools, choice, grammar = options["tools"], options["tool_choice"], options["grammar"]
        check_type("grammar", grammar, Grammar | None, "a Grammar")
        check_type("template", options["template"], Mapping | None, "a dict")
        check_type("tool_choice", choice, str | Mapping | None, "a name or a dict")
        prepared = prepare(tokenizer, prompt, tools, choice, grammar, options["template"], options["reasoning"])
        if isinstance(options["stop"], str):
            raise SettingError("stop must be a sequence of strings, not one string")
        sampling = Sampling(**{field.name: options[field.name] for field in fields(Sampling)})
        namespace = check_namespace(options["namespace"])
        documents = () if options["documents"] is None else check_list("documents", options["documents"])
        return cls(prepared, documents, namespace, config, sampling)


class Answering:
    """Answers questions; keeps the live conversations and the most recent answers. Thread-safe."""

    def __init__(
        self,
        model: Model,
        pipeline: Pipeline,
        ingestion: Ingestion,
        options: EngineOptions,
    ) -> None:
        self._model, self._pipeline, self._ingestion = model, pipeline, ingestion
        self._conversations = Conversations(options.conversation_bytes, model.stable_length, model.num_layers)
        self._admission = Admission(options.batch_bytes)
        self._warming = threading.Lock()
        is_busy = self._admission.is_busy
        self.learner = Learner(ingestion, pipeline.lookup, is_busy, self.notice_removals) if options.learn else None
        self._removals = pipeline.store.removals()
        self._dropping = threading.Lock()  # held while the KV of removed texts is dropped
        self._watch = Watch()
        self.history = History()

    def stream(self, question: Question) -> Generator[Delta, None, None]:
        """See `BlendEngine.stream`."""
        started = time.perf_counter()  # the consumer has asked for the first token
        tokenizer, prepared, reuses = self._model.tokenizer, question.prepared, question.config.reuses_prompts
        ids = prepared.render(tokenizer)
        self._model.check_window(len(ids))
        thoughts, parser = Thoughts.of(tokenizer, ids), prepared.parser(tokenizer, ids)
        before = thoughts.grammar(prepared.template, bool(prepared.tools)) if thoughts else ""
        constraint = constrain(self._model, prepared.grammar, before) if prepared.grammar else None
        control_tokens = {token for part in (thoughts, parser) if part for token in part.control_tokens}
        room = min(question.sampling.max_new_tokens, self._model.context_window - len(ids))
        with self._admission.admit(self._most_bytes(len(ids), room)) as admitted:
            begun = self._conversations.begin(question.namespace, ids)
            done = self._prefill_with_documents(question, ids, begun)
            # computed now, since a stream may be closed at any point; the answer may change a plain prompt's last token
            generation_prompt = 1 if prepared.is_plain else tokenizer.generation_prompt_length(**prepared.template)
            answered: Answered | None = None
            answer: list[int] = []
            num_thought = 0
            is_complete = False
            with contextlib.suppress(GeneratorExit):  # a consumer may leave a stream and continue the conversation
                start = self._model, done.ids, done.cache, done.logits, question.sampling
                alone, deepening = question.config.deterministic, done.deepening
                for delta in decode(*start, constraint, control_tokens, thoughts, alone, deepening):
                    answer += delta.token_ids
                    num_thought += delta.reasoning_tokens
                    if answered is None:
                        report = replace(_deepened(done), ttft_s=time.perf_counter() - started)
                        answered = Answered(done.ids, done.selected, report, question.namespace)
                        self.history.add(answered)
                    delta = parser.parse(delta) if parser else delta
                    admitted.is_working = False
                    if delta.finish_reason:
                        notes = _notes(delta, num_thought == len(answer), room, question.sampling.max_new_tokens)
                        last = replace(_deepened(done), ttft_s=report.ttft_s, exact=report.exact)
                        delta = replace(delta, report=replace(last, notes=(*report.notes, *notes)))
                    yield delta
                    admitted.is_working = True
                    if len(answer) == 1 and reuses:
                        self._keep(begun, done, [], 0)  # for prompts that arrive before the answer is complete
                is_complete = True
                self._finish(answered, question)
            if reuses and not sys.is_finalizing():  # torch aborts a process that computes then
                # a step that other answers share may be computing the KV of an abandoned answer's last token
                self._keep(begun, done, answer if is_complete else answer[:-1], generation_prompt)

    def _most_bytes(self, num_tokens: int, room: int) -> int:
        """Return the bytes of an answer's KV at full length, with `room` tokens after those of the prompt."""
        longest, threshold = num_tokens + room, self._model.recompute_threshold
        if threshold is not None and num_tokens <= threshold < longest:
            longest += threshold  # two caches, see `Row.recompute`
        return longest * self._model.bytes_per_token

    def _prefill_with_documents(self, question: Question, ids: list[int], begun: Begun) -> Prefilled:
        """Prefill the prompt of a question, with its documents."""
        notes: list[str] = []
        created = self._warm(question.documents, question.namespace, notes) if question.documents else {}
        done = self.prefill(ids, question.config, notes, question.namespace, begun)
        if created and begun.is_forgotten:
            self.free(self._ingestion.forget_requests({*created.values()}, question.namespace))
        if self.learner:
            self.learner.observe(question.prepared.prompt, begun, done.report.runs)
        new = [run for run in done.report.runs if run.key in created]
        created_tokens = sum(int(done.reused[run.start : run.stop].sum()) for run in new)
        return replace(done, report=replace(done.report, created_tokens=created_tokens))

    def warm_prefix(self, questions: Sequence[Question]) -> int:
        """Compute and keep what the prompts of several questions begin with; see `BlendEngine.warm_prefix`."""
        question, *others = questions
        if not question.config.reuses_prompts:
            raise SettingError("warm_prefix would have no effect: with these settings, KV of prompts is not reused")
        ids = question.prepared.render(self._model.tokenizer)
        for other in others:
            ids = common_prefix(ids, other.prepared.render(self._model.tokenizer))
        self._model.check_window(len(ids), "the beginning")
        if len(ids) > self._model.stable_length:
            raise SettingError(
                f"the beginning has {len(ids)} tokens: beyond {self._model.stable_length}, RoPE depends on the length "
                "of the whole prompt, so that no KV is kept for other prompts; shorten it"
            )
        size = len(ids) * self._model.bytes_per_token
        if size > self._conversations.max_bytes:
            raise SettingError(
                f"the KV of {len(ids)} tokens has {size:,} bytes, more than conversation_bytes="
                f"{self._conversations.max_bytes}: raise it"
            )
        if ids:
            with self._admission.admit(size):
                begun = self._conversations.begin(question.namespace, ids)
                done = self.prefill(ids, replace(question.config, ratio=1.0), (), question.namespace, begun)
                self._keep(begun, done, [], 0)
        return len(ids)

    def try_out(self, prepared: Prepared, config: BlendConfig, namespace: str) -> Answered:
        """Prefill a prompt without answering it."""
        ids = prepared.render(self._model.tokenizer)
        self._model.check_window(len(ids))
        started = time.perf_counter()
        done = self.prefill(ids, config, (), namespace)
        return Answered(done.ids, done.selected, replace(done.report, ttft_s=time.perf_counter() - started), namespace)

    def prefill(
        self, ids: list[int], config: BlendConfig, notes: Sequence[str], namespace: str, begun: Begun | None = None
    ) -> Prefilled:
        """See `BlendEngine.prefill`. Conversations are used for a prompt that has `begun`."""
        plan = self._pipeline.tuning.plan(config)  # final only if it does not depend on the chunks
        pipeline = self._pipeline
        removals = pipeline.store.removals() if config.policy == "full" else pipeline.lookup.update()
        self.notice_removals(removals)
        is_continued = begun is not None and config.reuses_prompts
        prefix = self._find_prefix(ids, plan.config, namespace) if is_continued else None
        conversations = self._conversations if is_continued and config.history == "blend" else None
        prompt = Prompt(ids, config, namespace, prefix, notes, conversations=conversations, is_full=plan.is_full)
        try:
            done = self._pipeline.prefill(prompt, matches=() if config.policy == "full" else None)
            if begun is not None:
                begun.keys = frozenset(key for _, key in done.chunks)
            return done
        finally:  # chunks removed in the meantime may have been read after they were freed
            self._free_removed(since=removals)

    def _find_prefix(self, ids: Sequence[int], config: BlendConfig, namespace: str) -> CachedPrefix | None:
        """Return a prompt's cached prefix; conversations with chunks that may no longer be used are dropped."""
        while prefix := self._conversations.find(ids, config, namespace):
            withdrawn = self._pipeline.lookup.withdrawn(prefix.with_context)
            if not withdrawn:
                return prefix
            self._conversations.drop(withdrawn)
        return None

    def free(self, keys: Collection[str]) -> None:
        """Free the KV of these chunks and the conversations that contain it; answers in progress complete with it."""
        self._pipeline.memory.drop(keys)
        self._conversations.drop(keys)

    def close(self) -> None:
        """Drop the conversations and stop learning. Answers in progress complete with their KV."""
        if self.learner:
            self.learner.close()
        self._conversations.close()

    def begin(self, namespace: str, ids: Sequence[int]) -> Begun:
        """See `Conversations.begin`."""
        return self._conversations.begin(namespace, ids)

    def notice_removals(self, removals: int | None = None) -> None:
        """Free KV that was removed from the store, possibly by another process, if its counter has changed."""
        removals = self._pipeline.store.removals() if removals is None else removals
        if removals != self._removals:
            self._free_removed()
            self._pipeline.lookup.update()
            self._removals = removals  # not before: other prompts must not find chunks that are about to be freed
        with self._dropping:
            if texts := self._pipeline.lookup.take_removed():
                self._conversations.drop_texts(texts)

    def forget(self, document: str, namespace: str) -> int:
        """See `BlendEngine.forget`."""
        lookup, min_run = self._pipeline.lookup, BlendConfig().min_run
        with lookup.removing() as texts:
            removed = self._ingestion.forget(document, namespace)
        self.free(removed)
        self.notice_removals()
        if texts:
            choose = partial(lookup.containing, texts, min_run=min_run)
            self.free(self._pipeline.store.forget_requests(namespace, choose))
        lookup.refresh()
        return len(removed)

    def _free_removed(self, since: int | None = None) -> None:
        """Free KV that is no longer stored, unless the store's counter is still `since`.

        If the store cannot be asked, all KV is freed.
        """
        store = self._pipeline.store
        try:
            if since is None or store.removals() != since:
                self.free(store.missing(sorted(self._kept_keys())))
        except StoreError:
            self.free(self._kept_keys())

    def _kept_keys(self) -> set[str]:
        return {*self._pipeline.memory.keys(), *self._conversations.keys()}

    def _warm(self, documents: Sequence[str], namespace: str, notes: list[str]) -> dict[str, str]:
        """Encode the documents that are not stored, and return their text keys by key; adds to `notes`."""
        tokenized = self._ingestion.tokenize(named_texts(documents), namespace)
        text_keys = [text_key(namespace, ids) for ids, _ in tokenized]

        def find_missing() -> dict[str, tuple[str, str]]:
            usable = self._pipeline.lookup.usable(text_keys)
            chunks = zip(documents, text_keys, tokenized, strict=True)
            return {key: (text, document) for document, text, (_, key) in chunks if key and text not in usable}

        missing: dict[str, tuple[str, str]] = {}
        try:
            if find_missing():
                with self._warming:  # parallel answers with the same documents encode them once
                    if missing := find_missing():
                        texts = [document for _, document in missing.values()]
                        self._ingestion.warm(texts, "", None, namespace, mode="on request")
                        self._pipeline.lookup.refresh()
        except StoreError as error:
            notes.append(f"documents could not be stored: {error}")  # the answer does not depend on it
        return {key: text for key, (text, _) in missing.items()}

    def _finish(self, answered: Answered | None, question: Question) -> None:
        """Do deferred work after a complete answer.

        Skipped for abandoned streams: garbage collection may end them in a thread that holds the locks taken here.
        """
        self._pipeline.tuning.keep_speed_now_and_then()
        if answered and question.config.history == "exact":  # else most text may never be warmed
            tokenizer, store, lookup = self._model.tokenizer, self._pipeline.store, self._pipeline.lookup
            find = partial(lookup.find_chunks, namespace=question.namespace)
            explain = partial(why_little, tokenizer, store, find, answered, question.config.min_run)
            self._watch.look(answered, explain)

    def _keep(self, begun: Begun, done: Prefilled, answer: list[int], generation_prompt: int) -> None:
        """Keep an answered prompt for the next turn, which contains it without the generation prompt.

        Without an answer, keep only what equals full prefill's. What was computed again counts as such only where all
        of it was, so that exact KV, which other prompts share, does not depend on the question.
        """
        prefix, num_tokens = done.prefix, len(done.ids)
        ids = np.array([*done.ids.tolist(), *answer][: done.cache.get_seq_length()])
        is_exact = done.report.exact or (done.deepening is not None and done.deepening.is_complete)
        exact = len(ids) if is_exact else done.num_exact(done.selected[:0])
        turn = Turn(done.kept, num_tokens - generation_prompt, num_tokens)
        # the prefix's variants win: if another one is usable by now, the conversation must not be continued
        blended = Blended(
            done.config,
            (*(prefix.turns if prefix else ()), turn),
            {**done.with_context, **(prefix.with_context if prefix else {})},
        )
        replaced = prefix.continued if prefix else None
        ids = ids if answer else ids[:exact]
        self._conversations.keep(begun, ids, exact, done.cache, done.chunks, blended, replaced)


def _deepened(done: Prefilled) -> BlendReport:
    """Return the report with what was recomputed while the model was unsure."""
    deepening = done.deepening
    if deepening is None or not deepening.stages:
        return done.report
    is_exact = done.report.exact or deepening.is_complete
    stages = tuple(deepening.stages)
    return replace(done.report, recomputed_tokens=deepening.recomputed, stages=stages, exact=is_exact)


def _notes(delta: Delta, is_thought: bool, room: int, max_new_tokens: int) -> Iterator[str]:
    """Yield notes if the thought left no room for an answer, or the window cut it off."""
    if delta.finish_reason == "length" and is_thought:
        yield "the answer ended within the model's thought: raise max_new_tokens, or pass reasoning=False"
    if delta.finish_reason == "length" and room < max_new_tokens:
        tokens = f"{room} of {max_new_tokens} tokens"
        yield f"the answer has {tokens}: the window has no more room, use fewer or shorter chunks"


def overridden(config: BlendConfig, **settings: Any) -> BlendConfig:
    """Return the config with those settings that are not None; a given policy is not left to the controller."""
    given = {name: value for name, value in settings.items() if value is not None}
    return replace(config, **({"controller": "off"} if "policy" in given else {}) | given)
