"""BlendEngine: the public methods and their async versions. The steps are in `kvrag.prefill` and `kvrag.answer`."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

from kvrag.answer import Answering
from kvrag.backend.transformers import Model
from kvrag.config import (
    AnswerOptions,
    BlendConfig,
    EngineOptions,
    LoadingOptions,
    WarmOptions,
    check_list,
    check_names,
    check_namespace,
    check_number,
    check_type,
    checked,
    declared,
)
from kvrag.control.evidence import STARTS
from kvrag.control.plan import Planner
from kvrag.control.prompts import chunk_texts, make_prompts, search_by_words
from kvrag.errors import KvragError, SettingError
from kvrag.generate.prompt import Question
from kvrag.index.catalog import Catalog
from kvrag.ingest.ingest import Ingestion
from kvrag.inspect.explain import explain
from kvrag.inspect.explanation import Explanation
from kvrag.inspect.gate import Check, verify
from kvrag.listen.check import FEW, TOKENS, self_test
from kvrag.prefill import Pipeline
from kvrag.process import Shared, check_process, releasing_threads
from kvrag.progress import watched
from kvrag.request import Request
from kvrag.reuse.load import tiers
from kvrag.scheduling.bridge import off_loop, once, together
from kvrag.scheduling.waiting import within
from kvrag.store import KVStore, open_store
from kvrag.store.base import no_progress
from kvrag.types import Answer, BlendReport, CheckStats, Delta, Messages, Prompt, WarmReport, join

_shared: Shared[BlendEngine] = Shared()


def default_store(model: Model, codec: str) -> Path:
    """Return the folder of a model's store if none is given."""
    return Path.home() / ".cache" / "kvrag" / model.fingerprint.stored_as(codec).digest


class BlendEngine(AbstractContextManager["BlendEngine"]):
    """Answers prompts from pre-encoded chunks. Thread-safe; not for use in forked processes.

    `config` has the defaults of every answer; `ratio` and `policy` can be given per call.
    """

    @releasing_threads()
    def __init__(
        self,
        model: Model,
        store: KVStore | str | Path | None = None,
        config: BlendConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Combine a model and a store.

        Args:
            store: A store, its folder, or the URL of a shared one, see `kvrag.store.SharedStore`; None = a folder for
                this model under `~/.cache/kvrag`. KV of another model or codec raises FingerprintMismatchError.
            options: See `kvrag.config.EngineOptions`.
        """
        if isinstance(model, str | Path):
            raise SettingError(f"model must be a Model, not a name: use BlendEngine.from_pretrained({str(model)!r})")
        check_type("config", config, BlendConfig | None, "a BlendConfig")
        chosen = checked("BlendEngine", EngineOptions, options)
        codec = chosen["codec"]
        self.model, self.config, self.codec = model, config or BlendConfig(), codec
        self.fingerprint = model.fingerprint.stored_as(codec)
        self.store: KVStore = open_store(default_store(model, codec) if store is None else store, chosen["store_cache"])
        self.store.bind(self.fingerprint)
        self._planner = Planner(model, self.store, codec)
        self._ingestion = Ingestion(model, self.store, self.config, self.fingerprint)
        memory = tiers(model, chosen)
        self._lookup = Catalog(self.store, alone_only=not self.config.context_tokens)
        self._pipeline = Pipeline(model, self.store, memory, self._lookup, self._planner, codec)
        self._answering = Answering(model, self._pipeline, self._ingestion, chosen)
        self._closed, self._process = False, os.getpid()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        store: KVStore | str | Path | None = None,
        config: BlendConfig | None = None,
        **options: Unpack[LoadingOptions],
    ) -> BlendEngine:
        """Load a model and combine it with a store; see `Model.from_pretrained` and `kvrag.config.EngineOptions`."""
        known: dict[str, Any] = {**checked("from_pretrained()", LoadingOptions, options)}  # before the slow loading
        own: Any = {name: known.pop(name) for name in declared(EngineOptions)}
        return cls(Model.from_pretrained(name_or_path, **known), store, config, **own)

    @classmethod
    def shared(cls, name_or_path: str | Path, **settings: Any) -> BlendEngine:
        """Like `from_pretrained`, but equal settings share one engine while it is in use. Framework classes use it."""
        key = repr((str(name_or_path), sorted(settings.items(), key=lambda item: item[0])))
        create = partial(cls.from_pretrained, name_or_path, **settings)
        return _shared.get(key, create, lambda engine: not engine._closed)

    # ---------------------------------------------------------------- ingestion

    @releasing_threads()
    def warm(
        self,
        texts: Iterable[str],
        *,
        document: str | Sequence[str] = "",
        sources: str | Sequence[str] | None = None,
        namespace: str = "",
        progress: Callable[[int, int], None] | None = None,
        skip_invalid: bool = False,
    ) -> WarmReport:
        """Encode every chunk that the store lacks. Pass the texts as prompts will contain them, in reading order.

        Args:
            texts: The chunks.
            document: Name of the document that consists of them: its chunks from an earlier call that are not among
                them are dropped, unless another document has them. "" adds without a name. A list has one name per
                text, so that several documents are encoded together.
            sources: Names of the sources of the texts: each text is encoded with at least `config.context_tokens` of
                the preceding text of its source, except texts that several sources have. "" = no source; None =
                `document`.
            namespace: Namespace of the chunks: prompts of other namespaces never reuse them.
            progress: Called with (tokens done, tokens to do) after each portion; None = show a bar on a terminal and
                in a notebook.
            skip_invalid: Leave out texts that cannot be encoded, with a warning in the report, instead of encoding
                none.

        Raises:
            PromptError: A text cannot be encoded; its number is the error's `chunk`.
            ContextWindowError: A chunk is longer than the model's window.
            ModelError: The model overflows on a chunk, or there is not enough memory (OutOfMemoryError).
            StoreError: A chunk cannot be stored; chunks stored before are kept.
        """
        self._check_open()
        check_namespace(namespace)
        with watched(progress, "encoding", "tokens") as update:
            done = update or no_progress
            report = self._ingestion.warm(texts, document, sources, namespace, done, skip_invalid=skip_invalid)
        self._lookup.refresh()  # the next prompt finds them, whatever other threads are doing
        self._answering.forgetting.notice()  # of the chunks that these replace
        return report

    def forget(self, document: str, *, namespace: str = "") -> int:
        """Delete a document's chunks unless another document has them; return how many were deleted.

        Their files, their KV in RAM and the conversations that contain it are deleted when this returns. Answers in
        progress complete with the KV that they have read, which is not kept.
        """
        self._check_process()
        remove = partial(self._ingestion.forget, document, check_namespace(namespace))
        return self._answering.forgetting.forget(remove, namespace)

    def forget_learned(self, *, namespace: str = "") -> int:
        """Delete the chunks that prompts brought, learned or from `documents=`; return how many were deleted.

        Chunks of a warmed document stay.
        """
        self._check_process()
        return self._answering.forget_learned(check_namespace(namespace))

    def stats(self, namespace: str | None = None) -> dict[str, Any]:
        """Return statistics of the answers of a namespace, None = of all.

        `"checked"`: the answers that were compared with full prefill, and what follows, a `CheckStats`; with `learn`,
        `"learned"`: what was learned from prompts, a `LearnStats`.
        """
        self._check_process()
        return {listener.name: listener.stats(namespace) for listener in self._answering.listeners if listener.name}

    def documents(self, prefix: str = "", *, namespace: str = "") -> list[str]:
        """Return the names of the namespace's documents that start with `prefix` and have chunks, sorted."""
        self._check_process()
        check_names(prefix)
        return list(self.store.documents(prefix, check_namespace(namespace)))

    async def awarm(self, texts: Iterable[str], **options: Unpack[WarmOptions]) -> WarmReport:
        """Like `warm`, off the event loop and without a bar. Cancelling it stops the work; stored chunks are kept."""
        async with aclosing(off_loop(once(partial(self.warm, texts, progress=no_progress, **options)))) as reports:
            (report,) = await anext(reports)
            return report

    # ---------------------------------------------------------------- answers

    def stream(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Generator[Delta, None, None]:
        """Stream an answer. Work is done only when the consumer requests the next delta.

        Args:
            prompt: A string or token ids, used as they are, or messages for the chat template.
            documents: Chunks that the prompt contains; those not stored are encoded and stored now.
            namespace: Only chunks and conversations of this namespace are reused.
            ratio, policy: Override the engine's `config`; with either, the controller does not decide.
            margin, controller, edited_history, deterministic: Override the engine's `config`.
            stop: The answer ends before the first of these strings.
            tools, tool_choice: Tools that the model may or must call, in OpenAI's form; see
                `kvrag.generate.prompt.prepare`.
            parallel_tool_calls: False = tool calls after the first are left out of the answer.
            grammar: Grammar that the answer must match.
            template: Variables for the chat template, such as `enable_thinking`.
            reasoning: True or False sets the chat template's own switch for thoughts, unless `template` does.
            max_new_tokens, temperature, top_p, top_k, min_p, seed, logprobs: See `Sampling`.
            repetition_penalty, frequency_penalty, presence_penalty, logit_bias: See `Sampling`.
            timeout: Seconds that the work on the answer may take, waiting for other answers included. Checked after
                every token and, during prefill, several times per layer. None = no limit.

        Yields:
            One Delta per token; the last one has `finish_reason` and the report.

        Raises:
            PromptError, ContextWindowError: The prompt cannot be answered.
            OutOfMemoryError: There is not enough memory; the engine stays usable.
            AnswerTimeoutError: The answer takes longer than `timeout`.
            SettingError: A setting is out of range or unknown, or a grammar is invalid.
        """
        self._check_open()
        question = Question.of(self.model.tokenizer, prompt, self.config, options)
        return within(self._answering.stream(question), float(options.get("timeout") or math.inf))

    def generate(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Answer:
        """Return the complete answer; arguments as in `stream`."""
        return join(self.stream(prompt, **options))

    def stream_batch(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Generator[tuple[int, Delta], None, None]:
        """Stream the answers to several prompts, which are decoded together.

        Parallel calls of `stream`, `generate` and their async versions are decoded together as well, with the same
        tokens in float32. In half precision, a near tie may resolve the other way in a batch. An error in one of the
        answers abandons the others.

        Args:
            each: Options of the prompts, one dict per prompt; they override `options`.
            options: Options of all answers, as in `stream`.

        Yields:
            The number of a prompt and the next delta of its answer.
        """
        check_type("prompts", prompts, list | tuple, "a list of prompts")
        for options_of_one in [] if each is None else check_type("each", each, list | tuple, "a list of dicts"):
            check_type("each item of each", options_of_one, Mapping, "a dict")
        if each is not None and len(each) != len(prompts):
            raise SettingError(f"each must have one dict per prompt: got {len(each)} for {len(prompts)} prompts")
        merged = [cast(AnswerOptions, {**options, **overrides}) for overrides in each or [{}] * len(prompts)]
        return together([self.stream(prompt, **settings) for prompt, settings in zip(prompts, merged, strict=True)])

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[AnswerOptions],
    ) -> list[Answer]:
        """Return the complete answers to several prompts in their order; arguments as in `stream_batch`."""
        answers = self.stream_batch(prompts, each, **options)
        deltas: list[list[Delta]] = [[] for _ in prompts]
        for number, delta in answers:
            deltas[number].append(delta)
        return [join(answer) for answer in deltas]

    def astream(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> AsyncGenerator[Delta, None]:
        """Like `stream`, off the event loop."""
        return off_loop(self.stream(prompt, **options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Answer:
        """Like `generate`, off the event loop; cancelling it stops the work, also between two layers of the prefill."""
        async with aclosing(self.astream(prompt, **options)) as deltas:
            return join([delta async for delta in deltas])

    def as_prompt(self, text: str) -> str | Messages:
        """Return a text as one user message, or unchanged if the model has no chat template."""
        return self.model.tokenizer.as_prompt(text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a chunk's text: without BOS, control tokens as text."""
        return self.model.tokenizer.encode(text)

    @property
    def context_window(self) -> int:
        """Size of the model's context window in tokens."""
        return self.model.context_window

    def count_tokens(self, prompt: str | Messages, *, tools: Sequence[dict[str, Any]] | None = None) -> int:
        """Return the length of the prompt that `stream` would answer, in tokens; raises PromptError, SettingError."""
        return len(self.tokenize(prompt, tools=tools))

    def tokenize(self, prompt: str | Messages, *, tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Return the token ids of the prompt that `stream` would answer; raises as `count_tokens`."""
        question = Question.of(self.model.tokenizer, prompt, self.config, {"tools": tools})
        return question.prepared.render(self.model.tokenizer)

    @releasing_threads()
    def explain(
        self,
        prompt: str | Messages | BlendReport | dict[str, Any] | None = None,
        *,
        namespace: str = "",
        ratio: float | None = None,
        margin: float | None = None,
        policy: str | None = None,
        controller: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        template: dict[str, Any] | None = None,
    ) -> Explanation:
        """Explain what is reused of a prompt, what is recomputed, and why not more is reused.

        Args:
            prompt: A prompt as in `stream`, which is prefilled now; or the report of one of the last 32 answers (a
                BlendReport or the dict that framework classes return); None = the namespace's last prompt.
            ratio, margin, policy, controller, tools, template: As in `stream`, for a new prompt.

        Raises:
            PromptError: The prompt cannot be answered, or there is no such answer.
        """
        self._check_open()
        if prompt is None or isinstance(prompt, (BlendReport, dict)):
            answered = self._answering.recent.find(check_namespace(namespace), prompt)
        else:
            options: AnswerOptions = {"tools": tools, "template": template, "namespace": namespace, "ratio": ratio}
            options |= {"margin": margin, "policy": policy, "controller": controller}
            answered = self._answering.try_out(Question.of(self.model.tokenizer, prompt, self.config, options))
        find = partial(self._lookup.find_chunks, namespace=namespace)
        return explain(self.model.tokenizer, self.store, find, answered, self.config.min_run)

    @releasing_threads()
    def verify(self) -> list[Check]:
        """Run the correctness gate on this engine's model, in a temporary folder; see `kvrag.inspect.gate`."""
        return list(verify(partial(BlendEngine, self.model, codec=self.codec)))

    @releasing_threads()
    def calibrate(
        self,
        prompts: Sequence[str | Messages] | None = None,
        *,
        namespace: str = "",
        count: int = FEW,
        progress: Callable[[int, int], None] | None = None,
    ) -> CheckStats:
        """Measure how much recompute this model needs on this corpus: what its own answers would tell, but at once.

        Every prompt is answered by full prefill and compared with all starts; see `kvrag.listen.check`. The counts are
        stored beside the chunks, and followed from then on. Calls add up, also interrupted ones.

        Args:
            prompts: As in `stream`, with chunks that were warmed; None = generated from the stored chunks, see
                `kvrag.control.prompts`.
            count: Number of generated prompts.
            progress: Called with (prefills done, prefills to do); None = as in `warm`.

        Raises:
            KvragError: No prompts could be generated, or one is too long.
        """
        self._check_open()
        check_number("count", count, least=1, whole=True)
        if prompts is None:
            texts = chunk_texts(self.model, self.store, namespace)
            ids = [gap.ids for gap in make_prompts(self.model, texts, search_by_words(texts), count, room=TOKENS)]
        else:
            ids = [self.model.tokenizer.render(prompt) for prompt in check_list("prompts", prompts)]
        for each in ids:
            self.model.check_window(len(each))
        prefill, evidence = self._answering.prefill, self._planner.evidence[namespace]
        try:
            with watched(progress, "calibrating") as update:
                for done, _ in enumerate(self_test(self.model, prefill, evidence, ids, namespace), 1):
                    (update or no_progress)(done, (1 + len(STARTS)) * len(ids))
        finally:
            self._planner.evidence.keep()
        return cast(CheckStats, self.stats(namespace)["checked"])

    def wait_until_idle(self) -> None:
        """Wait until the work that is left to idle time is done; for benchmarks and tests."""
        self._answering.idle.wait()

    def reset_calibration(self) -> None:
        """Delete all counts of this model's answers in this store: start and margin are the defaults again."""
        self._check_open()
        self._planner.evidence.forget()

    @releasing_threads()
    def prefill(self, ids: list[int], config: BlendConfig | None = None) -> Request:
        """Prefill prompt ids from stored chunks; see `kvrag.prefill`."""
        self._check_process()
        request = Request(ids, config or self.config)
        self._answering.prefill(request)
        return request

    def __deepcopy__(self, memo: object) -> BlendEngine:
        return self  # copies of objects that hold an engine share it

    def __getstate__(self) -> Any:
        raise TypeError("an engine cannot be pickled: create one in each process, or pass model= instead of engine=")

    def _check_process(self) -> None:
        check_process(self._process, "this engine")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise KvragError("the engine is closed: create a new one")

    def close(self) -> None:
        """Release the store and the conversations. Pending answers end with their own KV."""
        self._check_process()
        if not self._closed:
            self._closed = True
            self._answering.close()
            self._planner.evidence.keep()
            self.store.close()

    def __exit__(self, *_: object) -> None:
        self.close()
