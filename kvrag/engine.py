"""BlendEngine: joins the steps from a prompt to an answer, and does no arithmetic itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig, Grammar, Sampling, check_bytes, check_codec, check_namespace
from kvrag.control import calibrate
from kvrag.control.calibrate import Calibration
from kvrag.control.controller import Decision
from kvrag.control.cost import Busy, Clock
from kvrag.control.tuning import TimedReader, Tuning
from kvrag.errors import DamagedChunkError, KvragError, SettingError, StoreError
from kvrag.generate.decode import decode
from kvrag.generate.grammar import constrain
from kvrag.generate.tools import Prepared, prepare
from kvrag.ingest.ingest import Ingestion
from kvrag.inspect.explain import Call, Watch, explain, find_call
from kvrag.inspect.explanation import Explanation
from kvrag.inspect.verify import Check, verify
from kvrag.reuse.blend import blend, prefill, uncomputed
from kvrag.reuse.conversation import Beginning, Conversation, Conversations, Turn
from kvrag.reuse.match import MatchIndex
from kvrag.reuse.select import select
from kvrag.reuse.stitch import Stitched, stitch
from kvrag.store import ChunkReader, FileStore, KVStore, MemoryTier
from kvrag.types import Answer, BlendReport, Delta, Messages, Run, ToolCall, WarmReport

logger = logging.getLogger("kvrag")

_sharing: dict[str, threading.Lock] = {}
_shared: weakref.WeakValueDictionary[str, BlendEngine] = weakref.WeakValueDictionary()
_ROOM = 256  # positions a new cache has for the answer before it grows
_CALIBRATION_CHUNKS = 1000
_EXPLAINED = 32  # answers whose prompts are remembered, to be explained


@dataclass
class Prefilled:
    """A prompt whose cache is complete: what `kvrag.generate.decode.decode` goes on from.

    Attributes:
        ids: (T,) the prompt.
        stitched: What was reused, and the cache.
        logits: (1, V) float32, after the last token.
        selected: (S,) reused positions that were recomputed.
        exact: How many of the first positions have full prefill's KV.
        report: What it took, given the time to the first token in seconds.
        config: What was asked for, with a ratio.
    """

    ids: Tensor
    stitched: Stitched
    logits: Tensor
    selected: Tensor
    exact: int
    report: Callable[[float], BlendReport]
    config: BlendConfig = field(init=False)


class BlendEngine:
    """Answers prompts from pre-encoded chunks. Thread-safe.

    Attributes:
        model, store, codec: What it was built from.
        fingerprint: What the store's KV is filed under: the model's, and the codec.
        config: Defaults for every answer; `ratio` and `policy` can be given per call.
    """

    def __init__(
        self,
        model: Model,
        store: KVStore | str | Path | None = None,
        config: BlendConfig | None = None,
        ram_bytes: int = 2 << 30,
        codec: str = "native",
        conversation_bytes: int = 1 << 30,
    ) -> None:
        """Join a model and a store.

        Args:
            store: A store, or a folder for one; None = a folder of this model's under `~/.cache/kvrag`.
            ram_bytes: Bound of the RAM tier in front of the store; 0 switches it off.
            codec: How chunks are stored: "native" = as they are, "int8" and "int4" = in a half and less than a third
                of the bytes, so that no reused KV is exact any more.
            conversation_bytes: Bound of the KV of the latest conversations, kept where the model is for their next
                turns; 0 keeps none. Answers under way need their own besides.

        Raises:
            FingerprintMismatchError: The store holds KV of another model, or of another codec.
        """
        self.model, self.config, self.codec = model, config or BlendConfig(), check_codec(codec)
        self.fingerprint = model.fingerprint.stored_as(codec)
        conversations = Conversations(conversation_bytes, model.stable_length)
        if store is None:
            store = Path.home() / ".cache" / "kvrag" / self.fingerprint.digest
        self.store: KVStore = FileStore(store) if isinstance(store, (str, Path)) else store
        self.store.bind(self.fingerprint)
        self._conversations = conversations
        self._ram = MemoryTier(ram_bytes)
        self._index = MatchIndex()
        self._index_lock = threading.Lock()
        self._last_entry = 0
        self._removals = self.store.removals()
        self._tuning = Tuning(model, self.store)
        self._ingestion = Ingestion(model, self.store, self.config, codec, self.fingerprint, self._tuning)
        self._calls: deque[Call] = deque(maxlen=_EXPLAINED)  # the latest
        self._watch = Watch()
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        store: KVStore | str | Path | None = None,
        config: BlendConfig | None = None,
        ram_bytes: int = 2 << 30,
        codec: str = "native",
        conversation_bytes: int = 1 << 30,
        **model_settings: Any,
    ) -> BlendEngine:
        """Load a model (see `Model.from_pretrained` for its settings) and join it with a store."""
        check_codec(codec)  # loading takes a while
        check_bytes("conversation_bytes", conversation_bytes)
        try:
            model = Model.from_pretrained(name_or_path, **model_settings)
        except TypeError as error:
            raise SettingError(str(error).replace("Model.from_pretrained()", "BlendEngine.from_pretrained()")) from None
        return cls(model, store, config, ram_bytes, codec, conversation_bytes)

    @classmethod
    def shared(cls, name_or_path: str | Path, **settings: Any) -> BlendEngine:
        """Like `from_pretrained`, but equal settings give the same engine as long as anyone uses it.

        This is what the framework classes build theirs with, when they answer for the first time.
        """
        key = repr((str(name_or_path), sorted(settings.items(), key=lambda item: item[0])))
        with _sharing.setdefault(key, threading.Lock()):
            engine = _shared.get(key)
            if engine is None or engine._closed:
                engine = _shared[key] = cls.from_pretrained(name_or_path, **settings)
        return engine

    # ---------------------------------------------------------------- ingestion

    def warm(
        self,
        texts: Iterable[str],
        *,
        document: str | Sequence[str] = "",
        sources: str | Sequence[str] | None = None,
        namespace: str = "",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> WarmReport:
        """Encode every chunk that the store lacks. Give the texts as the framework will paste them, in reading order.

        Args:
            texts: The chunks.
            document: Name of the document they are the whole of: its chunks from an earlier call that are not among
                them are dropped, unless another document has them. "" adds without a name. A list has one name for
                each text, so that several documents are encoded together.
            sources: Names what the texts are pieces of: each is encoded behind up to twice `config.context_tokens` of
                what stands before it there, but for those that several sources have. "" = nothing; None = `document`.
            namespace: Where the chunks are visible: prompts of another namespace never reuse them.
            progress: Called with (tokens done, tokens to do) after each portion.

        Raises:
            PromptError: A text cannot be encoded.
            ContextWindowError: A chunk is longer than the model's window.
            ModelError: The model overflows on a chunk.
            StoreError: It cannot be stored; what was stored before stays.
        """
        self._check_open()
        check_namespace(namespace)
        return self._ingestion.warm(texts, document, sources, progress)

    def forget(self, document: str, *, namespace: str = "") -> int:
        """Drop a document's chunks unless another document has them; returns how many were dropped."""
        check_namespace(namespace)
        return self._ingestion.forget(document)

    def documents(self, prefix: str = "", *, namespace: str = "") -> list[str]:
        """Names of the namespace's documents that begin so and have chunks, sorted."""
        check_namespace(namespace)
        return list(self.store.documents(prefix))

    async def awarm(
        self,
        texts: Iterable[str],
        *,
        document: str | Sequence[str] = "",
        sources: str | Sequence[str] | None = None,
        namespace: str = "",
    ) -> WarmReport:
        """Like `warm`, off the event loop."""
        return await asyncio.to_thread(self.warm, texts, document=document, sources=sources, namespace=namespace)

    # ---------------------------------------------------------------- answers

    def stream(
        self,
        prompt: str | Messages,
        *,
        documents: Sequence[str] | None = None,
        namespace: str = "",
        ratio: float | None = None,
        policy: str | None = None,
        controller: str | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        grammar: Grammar | None = None,
        template: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Generator[Delta, None, None]:
        """Answer piece by piece. Work happens only when the consumer asks for the next piece.

        Args:
            prompt: One string, taken as it is, or messages for the chat template.
            documents: Chunks that the prompt contains; those never ingested are encoded now and kept.
            namespace: Chunks and conversations of this namespace are reused, and of no other.
            ratio, policy: Instead of the engine's `config`; what is given here is obeyed, controller or not.
            controller: "auto" or "off", instead of the engine's `config`.
            stop: The answer ends before the first of these strings.
            tools, tool_choice: What the model may or must call, in OpenAI's form; see `kvrag.generate.tools.prepare`.
            grammar: What the answer must keep to.
            template: Variables for the chat template, such as `enable_thinking`.
            sampling: Fields of `Sampling`: max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed.

        Yields:
            A Delta per token; the last one carries `finish_reason` and the report.

        Raises:
            PromptError, ContextWindowError: It cannot be answered as it is.
            SettingError: A setting is out of range or unknown, or a grammar is wrong.
        """
        self._check_open()
        check_namespace(namespace)
        config = self._configure(ratio, policy, controller)
        prepared = prepare(self.model.tokenizer, prompt, tools, tool_choice, grammar)
        if isinstance(stop, str):
            raise SettingError("stop must be a sequence of strings, not one string")
        try:
            settings = Sampling(stop=tuple(stop), **sampling)
        except TypeError as error:
            raise SettingError(str(error).replace("Sampling.__init__()", "stream()")) from None
        return self._stream(prepared, documents, config, settings, {**prepared.template, **(template or {})}, namespace)

    def _configure(
        self, ratio: float | None = None, policy: str | None = None, controller: str | None = None
    ) -> BlendConfig:
        if policy is not None and controller is None:
            controller = "off"
        changes: dict[str, Any] = {"ratio": ratio, "policy": policy, "controller": controller}
        return replace(self.config, **{name: value for name, value in changes.items() if value is not None})

    def _stream(
        self,
        prepared: Prepared,
        documents: Sequence[str] | None,
        config: BlendConfig,
        sampling: Sampling,
        template: dict[str, Any],
        namespace: str,
    ) -> Generator[Delta, None, None]:
        started = time.perf_counter()  # when the consumer asks for the first token
        notes: list[str] = []
        ids = self.model.tokenizer.render(prepared.prompt, **template)
        self.model.check_window(len(ids))
        constraint = constrain(self.model, prepared.grammar) if prepared.grammar else None
        listener = prepared.listener(self.model.tokenizer, ids)
        created = self._warm_documents(documents, notes) if documents else set()
        done = self.prefill(ids, config, notes, goes_on=True)
        # now, since a stream may be closed anywhere; the last token of a text may be another with more behind it
        is_text = isinstance(prepared.prompt, str)
        opening = 1 if is_text else self.model.tokenizer.opening(**template)
        report: BlendReport | None = None
        control_tokens = listener is not None and listener.control_tokens
        cache, logits = done.stitched.cache, done.logits
        answer: list[int] = []
        is_over = False
        with contextlib.suppress(GeneratorExit):  # who has heard enough may still go on with the conversation
            for delta in decode(self.model, done.ids, cache, logits, sampling, constraint, control_tokens):
                answer += delta.token_ids
                if report is None:
                    report = _with_created(done.report(time.perf_counter() - started), created)
                    self._calls.append(call := Call(done.ids, done.selected, report, namespace))
                delta = listener.hear(delta) if listener else delta
                yield replace(delta, report=report) if delta.finish_reason else delta
            is_over = True
        if not _is_reference(done.config):
            self._keep(done, answer, opening)
        if is_over:  # garbage collection may end a forgotten stream, in a thread that holds the locks which this takes
            self._watch.look(self.model.tokenizer, self.store, self._find, call, config.min_run)

    def _keep(self, done: Prefilled, answer: list[int], opening: int) -> None:
        """Keep an answered prompt for the next one, which will have it without the `opening` of the answer."""
        prompt, cache, beginning = len(done.ids), done.stitched.cache, done.stitched.beginning
        ids = np.array([*done.ids.tolist(), *answer][: cache.get_seq_length()])
        exact = len(ids) if done.exact == prompt else done.exact
        turn = Turn(done.stitched.kept, prompt - opening, prompt)
        turns = (*(beginning.turns if beginning else ()), turn)
        self._conversations.keep(Conversation(ids, cache, exact, done.config, turns), beginning)

    def _warm_documents(self, documents: Sequence[str], notes: list[str]) -> set[str]:
        """Keys of those that were not stored before; adds to `notes`."""
        keys = self._ingestion.tokenize(documents).keys
        missing: set[str] = set()
        try:
            missing.update(self.store.missing([key for key in keys if key]))
            self.warm(documents)
        except StoreError as error:
            notes.append(f"documents could not be kept: {error}")  # the answer does not depend on it
        return missing

    def generate(self, prompt: str | Messages, **settings: Any) -> Answer:
        """Answer at once; arguments as in `stream`."""
        return _join(self.stream(prompt, **settings))

    async def astream(self, prompt: str | Messages, **settings: Any) -> AsyncGenerator[Delta, None]:
        """Like `stream`, off the event loop."""
        deltas = self.stream(prompt, **settings)
        end = object()
        step: asyncio.Future[Any] | None = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(next, deltas, end))
                delta = await asyncio.shield(step)
                if delta is end:
                    return
                yield delta
        finally:
            if step is not None and not step.done():
                await asyncio.wait([step])  # cancelled in mid-step: a running generator cannot be closed
            deltas.close()

    async def agenerate(self, prompt: str | Messages, **settings: Any) -> Answer:
        """Like `generate`, off the event loop; cancelling it stops the work after the current step."""
        deltas = self.astream(prompt, **settings)
        try:
            return _join([delta async for delta in deltas])
        finally:
            await deltas.aclose()

    def count_tokens(self, prompt: str | Messages, *, tools: Sequence[dict[str, Any]] | None = None) -> int:
        """Length of the prompt that `stream` would answer.

        Raises:
            PromptError: It could not be answered as it is.
            SettingError: The tools are not in OpenAI's form.
        """
        prepared = prepare(self.model.tokenizer, prompt, tools)
        return len(self.model.tokenizer.render(prepared.prompt, **prepared.template))

    def explain(
        self,
        prompt: str | Messages | BlendReport | dict[str, Any] | None = None,
        *,
        retrieved: Sequence[str] | None = None,
        namespace: str = "",
        ratio: float | None = None,
        policy: str | None = None,
        controller: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        template: dict[str, Any] | None = None,
    ) -> Explanation:
        """Say what is reused of a prompt, what is recomputed, and why it is not more.

        Args:
            prompt: As in `stream`: it is prefilled now. Or the report of an answer, also as `to_dict` gives it, and as
                framework classes hand it out: that answer's prompt as it was answered, if it is among the last 32.
                None = the one answered last in the namespace.
            retrieved: What a retriever returned for it; otherwise the chunks that can be recognised are explained.
            ratio, policy, controller, tools, template: As in `stream`, for a prompt given.

        Raises:
            PromptError, ContextWindowError: It cannot be answered as it is, or there is no such answer.
            SettingError: A setting is out of range.
        """
        self._check_open()
        check_namespace(namespace)
        config = self._configure(ratio, policy, controller)
        if prompt is None or isinstance(prompt, (BlendReport, dict)):
            call = find_call(list(self._calls), prompt, namespace)
        else:
            prepared = prepare(self.model.tokenizer, prompt, tools)
            ids = self.model.tokenizer.render(prepared.prompt, **{**prepared.template, **(template or {})})
            self.model.check_window(len(ids))
            started = time.perf_counter()
            done = self.prefill(ids, config)
            call = Call(done.ids, done.selected, done.report(time.perf_counter() - started), namespace)
        return explain(self.model.tokenizer, self.store, self.fingerprint, self._find, call, config.min_run, retrieved)

    def _find(self, ids: Sequence[int], min_run: int) -> list[tuple[Run, NDArray[np.uint32]]]:
        """Runs and the ids of their chunks."""
        with self._index_lock:
            self._refresh_index()
            return [(run, self._index.ids(run.key)) for run in self._index.match(ids, min_run)]

    def verify(self) -> list[Check]:
        """Run the correctness gate on this engine's model, in a folder of its own; see `kvrag.inspect.verify`."""
        return verify(self.model, codec=self.codec)

    def calibrate(
        self,
        prompts: Sequence[str | Messages] | None = None,
        *,
        policy: str | None = None,
        target: float = 0.99,
        sure: bool = False,
        ratios: Sequence[float] = calibrate.GRID,
        count: int = 100,
        chunks: int = 4,
        tokens: int = 8,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Calibration:
        """Find the smallest ratio whose first tokens are full prefill's, and use it where none is given from now on.

        The result is kept beside the chunks, for later engines too; see `kvrag.control.calibrate`.

        Args:
            prompts: As in `stream`, with chunks that were warmed; None = made from the stored chunks.
            policy: Instead of the engine's.
            target, sure, ratios, tokens, progress: See `kvrag.control.calibrate.calibrate`.
            count: How many prompts are made at most.
            chunks: How many chunks are in each that is made.

        Raises:
            SettingError: An argument is out of range.
            StoreError: Nothing is stored that could be recomputed.
            ContextWindowError: A prompt is too long.
            ModelError: Logits are NaN.
        """
        self._check_open()
        if isinstance(prompts, str):
            raise SettingError("prompts must be a list of prompts, not one string")
        if count < 1 or chunks < 2:
            raise SettingError(f"count must be at least 1 and chunks at least 2, got {count} and {chunks}")
        if prompts is None:
            ids = calibrate.make_prompts(self.model, self._chunk_texts(), count, chunks)
        else:
            ids = [self.model.tokenizer.render(prompt) for prompt in prompts]
            for prompt in ids:
                self.model.check_window(len(prompt))
        found = calibrate.calibrate(
            self.model,
            self.prefill,
            ids,
            self._configure(policy=policy),
            target=target,
            sure=sure,
            ratios=ratios,
            tokens=tokens,
            progress=progress,
        )
        return self._tuning.keep_calibration(found)

    def _chunk_texts(self) -> list[str]:
        entries = list(self.store.entries(0))
        spread = entries[:: math.ceil(len(entries) / _CALIBRATION_CHUNKS) or 1]
        return [self.model.tokenizer.decode(entry.ids.tolist()) for entry in spread]

    # ---------------------------------------------------------------- the way of a request

    def prefill(
        self,
        ids: list[int],
        config: BlendConfig | None = None,
        notes: Sequence[str] = (),
        *,
        goes_on: bool = False,
    ) -> Prefilled:
        """From prompt ids to a cache that is ready to decode: match, load, stitch, select, blend.

        Args:
            config: Instead of the engine's.
            notes: For the report, before those that it makes itself.
            goes_on: Take over what a conversation has of the prompt.
        """
        notes = list(notes)
        config = self._tuning.settle(config or self.config, notes)
        beginning = self._conversations.find(ids, config) if goes_on and not _is_reference(config) else None
        capacity = min(len(ids) + _ROOM, self.model.context_window)
        while True:
            try:
                done = self._attempt(ids, config, capacity, notes, beginning)
                done.config = config
                return done
            except DamagedChunkError as error:
                # found while reading: without that chunk the prompt is answered all the same
                with contextlib.suppress(StoreError):  # on a full disk it stays where it is
                    self.store.quarantine(error.key)
                self._ram.drop(error.key)
                with self._index_lock:
                    self._index.remove(error.key)
                notes.append(f"{error}; recomputed")

    def _attempt(
        self, ids: list[int], config: BlendConfig, capacity: int, notes: list[str], beginning: Beginning | None
    ) -> Prefilled:
        clock = Clock(self.model.device)
        kept = beginning.length if beginning else 0
        runs, readers = ([], {}) if config.policy == "full" else self._match(ids, config.min_run, kept)
        clock.lap("match")
        opened, busy, waits = readers, Busy(), self.model.lock.waits
        decision: Decision | None = None
        try:
            if config.controller == "auto" and runs:
                decision = self._tuning.decide(config, len(ids), runs, readers, kept)
                config = replace(config, ratio=decision.ratio)
                if decision.full:
                    config, runs, readers = replace(config, policy="full"), [], {}
            if config.policy == "full" and not beginning:
                return self._full(ids, config, capacity, notes, clock, decision)
            timed = {key: TimedReader(reader, busy) for key, reader in readers.items()}
            stitched = stitch(self.model, ids, runs, timed, capacity, self.codec, beginning)
            clock.lap("stitch")
            selected = select(self.model, stitched, config)
            clock.lap("select")
            waited = stitched.load_s + stitched.stitch_s
            rows = len(uncomputed(stitched, selected))
            logits = blend(self.model, stitched, selected)
        finally:
            for reader in opened.values():
                reader.close()
        clock.lap("blend")
        self.store.touch(list(readers))
        if self.model.lock.waits == waits:
            pass_s = clock.laps["blend"] - (stitched.load_s + stitched.stitch_s - waited)
            self._tuning.saw_blend(stitched, rows, runs, readers, busy.seconds, pass_s)
        return self._done(stitched, logits, selected, readers, config, notes, clock, decision)

    def _full(
        self,
        ids: list[int],
        config: BlendConfig,
        capacity: int,
        notes: list[str],
        clock: Clock,
        decision: Decision | None,
    ) -> Prefilled:
        waits = self.model.lock.waits
        clock.lap("")  # deciding is part of no step
        logits, stitched = prefill(self.model, torch.tensor(ids), capacity)
        clock.lap("blend")
        if self.model.lock.waits == waits:
            self._tuning.saw_full(len(ids), clock.laps["blend"])
        return self._done(stitched, logits, stitched.inexact, {}, config, notes, clock, decision)

    def _done(
        self,
        stitched: Stitched,
        logits: Tensor,
        selected: Tensor,
        readers: dict[str, ChunkReader],
        config: BlendConfig,
        notes: list[str],
        clock: Clock,
        decision: Decision | None,
    ) -> Prefilled:
        assert config.ratio is not None  # settled
        prompt, reused, exact = len(stitched.ids), int(stitched.reused.sum()), stitched.num_exact(selected)
        tiers = {reader.tier for reader in readers.values()}
        base = BlendReport(
            prompt_tokens=prompt,
            reused_tokens=reused,
            recomputed_tokens=len(selected),
            fresh_tokens=prompt - reused,
            runs=tuple(stitched.runs),
            policy=config.policy,
            ratio=config.ratio,
            match_s=clock.laps.get("match", 0.0),
            load_s=stitched.load_s,
            stitch_s=clock.laps.get("stitch", 0.0) + stitched.stitch_s,
            select_s=clock.laps.get("select", 0.0),
            blend_s=clock.laps["blend"],
            ttft_s=0.0,
            bytes_loaded=sum(reader.bytes_read for reader in readers.values()),
            tier=tiers.pop() if len(tiers) == 1 else "mixed" if tiers else "",
            exact=exact == prompt,
            notes=tuple(notes),
            decision=decision.reason if decision else "",
            conversation_tokens=stitched.kept,
        )
        return Prefilled(stitched.ids, stitched, logits, selected, exact, lambda ttft_s: replace(base, ttft_s=ttft_s))

    def _match(self, ids: list[int], min_run: int, kept: int = 0) -> tuple[list[Run], dict[str, ChunkReader]]:
        """Runs behind the first `kept` tokens whose chunks could be opened, and their readers."""
        found = self._find(ids[kept:], min_run)
        runs = [replace(run, start=run.start + kept, stop=run.stop + kept) for run, _ in found]
        readers: dict[str, ChunkReader] = {}
        try:
            for key in dict.fromkeys(run.key for run in runs):
                reader = self._ram.open(key) or self.store.open(key)
                if reader is None:  # evicted since
                    with self._index_lock:
                        self._index.remove(key)
                elif reader.tier == "ram":
                    readers[key] = reader
                else:
                    readers[key] = self._ram.keeping(key, reader)
        except BaseException:
            for reader in readers.values():
                reader.close()
            raise
        return [run for run in runs if run.key in readers], readers

    def _refresh_index(self) -> None:
        """Take in what this or another process has stored or removed since the last look."""
        removals, last = self.store.removals(), self._last_entry
        if removals != self._removals:
            self._index, self._last_entry, self._removals = MatchIndex(), 0, removals
        entries = list(self.store.entries(self._last_entry))
        for entry in entries:
            if entry.number > last:
                self._ram.drop(entry.key)  # it may have been there before, behind another context
        if entries:
            self._index.add((entry.key, entry.ids, entry.anchors) for entry in entries)
            self._last_entry = entries[-1].number

    def __deepcopy__(self, memo: object) -> BlendEngine:
        return self  # copies of what holds an engine share it

    def __getstate__(self) -> Any:
        raise TypeError("an engine cannot be pickled: build one in each process, or give model= instead of engine=")

    def _check_open(self) -> None:
        if self._closed:
            raise KvragError("this engine has been closed")

    def close(self) -> None:
        """Release the store and the conversations. Answers under way end with their own."""
        if not self._closed:
            self._closed = True
            self._ingestion.close()
            self._conversations.close()
            self._tuning.keep_speed()
            self.store.close()

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_reference(config: BlendConfig) -> bool:
    """Who asks for full prefill wants what any other prefill is compared with: conversations stay out of it."""
    return config.policy == "full" and config.controller == "off"


def _with_created(report: BlendReport, created: set[str]) -> BlendReport:
    return replace(report, created_tokens=sum(len(run) for run in report.runs if run.key in created))


def _join(deltas: Iterable[Delta]) -> Answer:
    """The whole answer out of its pieces."""
    text, last = "", None
    token_ids: list[int] = []
    calls: list[ToolCall] = []
    for delta in deltas:
        text += delta.text
        token_ids += delta.token_ids
        calls += delta.tool_calls
        last = delta
    assert last is not None
    assert last.finish_reason is not None
    assert last.report is not None
    return Answer(text, tuple(token_ids), last.finish_reason, last.report, tuple(calls))
