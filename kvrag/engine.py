"""BlendEngine: joins the steps from a prompt to an answer, and does no arithmetic itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrag import calibrate
from kvrag.blend import blend, prefill
from kvrag.calibrate import Calibration
from kvrag.codec import pack
from kvrag.config import BlendConfig, Grammar, Sampling, check_codec
from kvrag.controller import Decision
from kvrag.decode import decode
from kvrag.encode import encode
from kvrag.errors import DamagedChunkError, KvragError, SettingError, StoreError
from kvrag.grammar import constrain
from kvrag.match import MatchIndex, anchors
from kvrag.model import Model
from kvrag.select import select
from kvrag.speed import Busy
from kvrag.stitch import Stitched, stitch
from kvrag.store import ChunkReader, ChunkRecord, DroppedChunks, FileStore, KVStore, MemoryTier
from kvrag.tools import Prepared, prepare
from kvrag.tuning import TimedReader, Tuning
from kvrag.types import Answer, BlendReport, Delta, Messages, Run, ToolCall, WarmReport
from kvrag.verify import Check, verify

logger = logging.getLogger("kvrag")

_PUT_TOKENS = 32768  # chunks are stored in portions of about this many tokens: what a killed ingestion may lose
_sharing: dict[str, threading.Lock] = {}
_shared: weakref.WeakValueDictionary[str, BlendEngine] = weakref.WeakValueDictionary()
_ROOM = 256  # positions a new cache has for the answer before it grows
_CALIBRATION_CHUNKS = 1000
_LEAST_OVERLAP = 8  # fewer common tokens are chance


@dataclass
class Prefilled:
    """A prompt whose cache is complete: what `kvrag.decode.decode` goes on from.

    Attributes:
        ids: (T,) the prompt.
        stitched: What was reused, and the cache.
        logits: (1, V) float32, after the last token.
        report: What it took, given the time to the first token in seconds.
    """

    ids: Tensor
    stitched: Stitched
    logits: Tensor
    report: Callable[[float], BlendReport]


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
    ) -> None:
        """Join a model and a store.

        Args:
            store: A store, or a folder for one; None = a folder of this model's under `~/.cache/kvrag`.
            ram_bytes: Bound of the RAM tier in front of the store; 0 switches it off.
            codec: How chunks are stored: "native" = as they are, "int8" and "int4" = in a half and less than a third
                of the bytes, so that no reused KV is exact any more.

        Raises:
            FingerprintMismatchError: The store holds KV of another model, or of another codec.
        """
        self.model, self.config, self.codec = model, config or BlendConfig(), check_codec(codec)
        self.fingerprint = model.fingerprint.stored_as(codec)
        if store is None:
            store = Path.home() / ".cache" / "kvrag" / self.fingerprint.digest
        self.store: KVStore = FileStore(store) if isinstance(store, (str, Path)) else store
        self.store.bind(self.fingerprint)
        self._ram = MemoryTier(ram_bytes)
        self._dropped = DroppedChunks()
        self._index = MatchIndex()
        self._index_lock = threading.Lock()
        self._last_entry = 0
        self._removals = self.store.removals()
        self._tuning = Tuning(model, self.store)
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
        **model_settings: Any,
    ) -> BlendEngine:
        """Load a model (see `Model.from_pretrained` for its settings) and join it with a store."""
        check_codec(codec)  # loading takes a while
        try:
            model = Model.from_pretrained(name_or_path, **model_settings)
        except TypeError as error:
            raise SettingError(str(error).replace("Model.from_pretrained()", "BlendEngine.from_pretrained()")) from None
        return cls(model, store, config, ram_bytes, codec)

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
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> WarmReport:
        """Encode every chunk that the store lacks. Give the texts as the framework will paste them.

        Args:
            texts: The chunks.
            document: Name of the document they are the whole of: its chunks from an earlier call that are not among
                them are dropped, unless another document has them. "" adds without a name. A list has one name for
                each text, so that several documents are encoded together.
            progress: Called with (tokens done, tokens to do) after each portion.

        Raises:
            PromptError: A text cannot be encoded.
            ContextWindowError: A chunk is longer than the model's window.
            ModelError: The model overflows on a chunk.
            StoreError: It cannot be stored; what was stored before stays.
        """
        self._check_open()
        started = time.perf_counter()
        tokens, keys, skipped, warnings = self._tokenize(texts)
        chunks = {key: ids for key, ids in zip(keys, tokens, strict=True) if key}
        names = [document] * len(keys) if isinstance(document, str) else document
        if len(names) != len(keys):
            raise SettingError(
                f"{len(names)} names of documents for {len(keys)} texts: give one for each, or one string"
            )
        contexts = self._contexts(names, tokens, keys)
        self._bring_back(chunks)
        missing = self.store.missing(list(chunks))
        lengths = [len(chunks[key]) for key in missing]
        size = done = new = encoded = 0
        progress(0, sum(lengths))
        for portion in _portions(missing, lengths, _PUT_TOKENS):
            # another process may be warming the same corpus
            now = self.store.missing(portion)
            size += self._encode_and_put({key: chunks[key] for key in now}, contexts)
            new, encoded = new + len(now), encoded + sum(len(chunks[key]) for key in now)
            done += sum(len(chunks[key]) for key in portion)
            progress(done, sum(lengths))
        whole = {document: list[str]()} if isinstance(document, str) else {}  # also if nothing is left of it
        for name, held in (whole | _by_document(names, keys)).items():
            self.store.set_document(name, held)
        self._dropped.clear()
        self._tuning.keep_speed()
        if lost := self.store.missing(list(chunks)):
            warnings.append(
                f"{len(lost)} of these chunks were evicted at once: the store's byte budget is too small for them all"
            )
        return WarmReport(
            chunks=len(chunks) + skipped,
            tokens=encoded,
            bytes=size,
            new=new,
            reused=len(chunks) - new,
            skipped=skipped,
            seconds=time.perf_counter() - started,
            warnings=tuple(warnings),
        )

    def _tokenize(self, texts: Iterable[str]) -> tuple[list[list[int]], list[str | None], int, list[str]]:
        """Each text's ids and key (None if it is too short), how many are too short, warnings."""
        if isinstance(texts, str):
            raise SettingError("texts must be a list of chunks, not one string")
        tokens: list[list[int]] = []
        keys: list[str | None] = []
        short: set[str] = set()
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise SettingError(f"chunk {number} is a {type(text).__name__}, not a string")
            ids = self.model.tokenizer.encode(text)
            self.model.check_window(len(ids) + len(self.model.tokenizer.preamble), f"chunk {number}")
            tokens.append(ids)
            if len(ids) < self.config.min_run:
                short.add(text)
                keys.append(None)
            else:
                keys.append(self.fingerprint.chunk_key(ids))
        warnings = []
        if short:
            warnings.append(
                f"{len(short)} chunks have fewer than {self.config.min_run} tokens and will not be reused: "
                "they are computed with the rest of the prompt"
            )
        return tokens, keys, len(short), warnings

    def _bring_back(self, chunks: dict[str, list[int]]) -> None:
        """Store again what was dropped a moment ago."""
        for key, ids in chunks.items():
            if reader := self._dropped.take(key):
                try:
                    layers = [reader.layer(number) for number in range(reader.num_layers)]
                    record = ChunkRecord(key, np.asarray(ids, np.uint32), anchors(ids), layers, reader.context)
                    self.store.put([record])
                except DamagedChunkError:
                    pass  # it is encoded again
                finally:
                    reader.close()

    def _contexts(
        self, names: Sequence[str], tokens: Sequence[list[int]], keys: Sequence[str | None]
    ) -> dict[str, list[int]]:
        """What stands before a chunk in the first document that has it, as far as it is wanted and fits."""
        contexts: dict[str, list[int]] = {}
        before: dict[str, list[int]] = {}
        blank = self.model.tokenizer.encode("\n\n")
        limit, window = self.config.context_tokens, self.model.context_window - len(self.model.tokenizer.preamble)
        for name, ids, key in zip(names, tokens, keys, strict=True):
            context = before.get(name, [])
            if shared := _overlap(context, ids):
                context = context[:-shared]
            elif context:
                context = [*context, *blank]
            before[name] = [*context, *ids][-limit - len(ids) :] if name and limit else []
            if key:
                contexts.setdefault(key, context[max(0, len(context) - min(limit, window - len(ids))) :])
        return contexts

    def _encode_and_put(self, chunks: dict[str, list[int]], contexts: dict[str, list[int]]) -> int:
        keys, records = list(chunks), []
        started, waits = time.perf_counter(), self.model.lock.waits
        encoded = list(encode(self.model, list(chunks.values()), [contexts[key] for key in keys]))
        if self.model.lock.waits == waits:  # what others computed meanwhile would count as ours
            lengths = [len(contexts[key]) + len(chunks[key]) for key in keys]
            self._tuning.saw_encoding(lengths, time.perf_counter() - started)
        for number, layers in encoded:
            ids = chunks[keys[number]]
            packed = pack(layers, self.codec, f"{self.model.tokenizer.decode(ids[:12])}...")
            context = len(contexts[keys[number]])
            records.append(ChunkRecord(keys[number], np.asarray(ids, np.uint32), anchors(ids), packed, context))
        return self.store.put(records) if records else 0

    def forget(self, document: str) -> int:
        """Drop a document's chunks unless another document has them; returns how many were dropped."""
        if not document:
            raise SettingError("forget needs a document's name")
        for key in self.store.documents(document).get(document, []):
            with contextlib.suppress(StoreError):  # what cannot be read need not come back
                if reader := self.store.open(key):
                    self._dropped.keep(key, reader)
        return self.store.set_document(document, [])

    def documents(self, prefix: str = "") -> list[str]:
        """Names of the documents that begin so and have chunks, sorted."""
        return list(self.store.documents(prefix))

    async def awarm(self, texts: Iterable[str], *, document: str | Sequence[str] = "") -> WarmReport:
        """Like `warm`, off the event loop."""
        return await asyncio.to_thread(self.warm, texts, document=document)

    # ---------------------------------------------------------------- answers

    def stream(
        self,
        prompt: str | Messages,
        *,
        documents: Sequence[str] | None = None,
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
            ratio, policy: Instead of the engine's `config`; what is given here is obeyed, controller or not.
            controller: "auto" or "off", instead of the engine's `config`.
            stop: The answer ends before the first of these strings.
            tools, tool_choice: What the model may or must call, in OpenAI's form; see `kvrag.tools.prepare`.
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
        config = self._configure(ratio, policy, controller)
        prepared = prepare(self.model.tokenizer, prompt, tools, tool_choice, grammar)
        if isinstance(stop, str):
            raise SettingError("stop must be a sequence of strings, not one string")
        try:
            settings = Sampling(stop=tuple(stop), **sampling)
        except TypeError as error:
            raise SettingError(str(error).replace("Sampling.__init__()", "stream()")) from None
        return self._stream(prepared, documents, config, settings, template or {})

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
    ) -> Generator[Delta, None, None]:
        started = time.perf_counter()  # when the consumer asks for the first token
        notes: list[str] = []
        ids = self.model.tokenizer.render(prepared.prompt, **{**prepared.template, **template})
        self.model.check_window(len(ids))
        constraint = constrain(self.model, prepared.grammar) if prepared.grammar else None
        listener = prepared.listener(self.model.tokenizer, ids)
        created = self._warm_documents(documents, notes) if documents else set()
        done = self.prefill(ids, config, notes)
        report: BlendReport | None = None
        control_tokens = listener is not None and listener.control_tokens
        cache, logits = done.stitched.cache, done.logits
        for delta in decode(self.model, done.ids, cache, logits, sampling, constraint, control_tokens):
            report = report or _with_created(done.report(time.perf_counter() - started), created)
            delta = listener.hear(delta) if listener else delta
            yield replace(delta, report=report) if delta.finish_reason else delta

    def _warm_documents(self, documents: Sequence[str], notes: list[str]) -> set[str]:
        """Keys of those that were not stored before; adds to `notes`."""
        _, keys, *_ = self._tokenize(documents)
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

    def verify(self) -> list[Check]:
        """Run the correctness gate on this engine's model, in a folder of its own; see `kvrag.verify`."""
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

        The result is kept beside the chunks, for later engines too; see `kvrag.calibrate`.

        Args:
            prompts: As in `stream`, with chunks that were warmed; None = made from the stored chunks.
            policy: Instead of the engine's.
            target, sure, ratios, tokens, progress: See `kvrag.calibrate.calibrate`.
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

    def prefill(self, ids: list[int], config: BlendConfig | None = None, notes: Sequence[str] = ()) -> Prefilled:
        """From prompt ids to a cache that is ready to decode: match, load, stitch, select, blend.

        Args:
            config: Instead of the engine's.
            notes: For the report, before those that it makes itself.
        """
        notes = list(notes)
        config = self._tuning.settle(config or self.config, notes)
        capacity = min(len(ids) + _ROOM, self.model.context_window)
        while True:
            try:
                return self._attempt(ids, config, capacity, notes)
            except DamagedChunkError as error:
                # found while reading: without that chunk the prompt is answered all the same
                with contextlib.suppress(StoreError):  # on a full disk it stays where it is
                    self.store.quarantine(error.key)
                self._ram.drop(error.key)
                with self._index_lock:
                    self._index.remove(error.key)
                notes.append(f"{error}; recomputed")

    def _attempt(self, ids: list[int], config: BlendConfig, capacity: int, notes: list[str]) -> Prefilled:
        clock = _Clock(self.model.device)
        if config.policy == "full":
            return self._full(ids, config, capacity, notes, clock)
        runs, readers = self._match(ids, config.min_run)
        match_s = clock.lap()
        busy, waits = Busy(), self.model.lock.waits
        decision: Decision | None = None
        try:
            if config.controller == "auto" and runs:
                decision = self._tuning.decide(config, len(ids), runs, readers)
                if decision.full:
                    full = replace(config, policy="full", ratio=1.0)
                    return self._full(ids, full, capacity, notes, clock, match_s, decision.reason)
                config = replace(config, ratio=decision.ratio)
            timed = {key: TimedReader(reader, busy) for key, reader in readers.items()}
            stitched = stitch(self.model, ids, runs, timed, capacity, self.codec)
            stitch_s = clock.lap()
            selected = select(self.model, stitched, config)
            select_s, waited = clock.lap(), stitched.load_s + stitched.stitch_s
            logits = blend(self.model, stitched, selected)
        finally:
            for reader in readers.values():
                reader.close()
        blend_s = clock.lap()
        self.store.touch(list(readers))
        if self.model.lock.waits == waits:
            pass_s = blend_s - (stitched.load_s + stitched.stitch_s - waited)
            self._tuning.saw_blend(stitched, len(selected), runs, readers, busy.seconds, pass_s)
        reason = decision.reason if decision else ""
        return self._done(
            stitched, logits, readers, config, len(selected), notes, match_s, stitch_s, select_s, blend_s, reason
        )

    def _full(
        self,
        ids: list[int],
        config: BlendConfig,
        capacity: int,
        notes: list[str],
        clock: _Clock,
        match_s: float = 0.0,
        reason: str = "",
    ) -> Prefilled:
        clock.lap()
        waits = self.model.lock.waits
        logits, stitched = prefill(self.model, torch.tensor(ids), capacity)
        blend_s = clock.lap()
        if self.model.lock.waits == waits:
            self._tuning.saw_full(len(ids), blend_s)
        return self._done(stitched, logits, {}, config, 0, notes, match_s, 0.0, 0.0, blend_s, reason)

    def _done(
        self,
        stitched: Stitched,
        logits: Tensor,
        readers: dict[str, ChunkReader],
        config: BlendConfig,
        num_selected: int,
        notes: list[str],
        match_s: float,
        stitch_s: float,
        select_s: float,
        blend_s: float,
        decision: str = "",
    ) -> Prefilled:
        assert config.ratio is not None  # settled
        reused, inexact = int(stitched.reused.sum()), len(stitched.inexact)
        tiers = {reader.tier for reader in readers.values()}
        base = BlendReport(
            prompt_tokens=len(stitched.ids),
            reused_tokens=reused,
            recomputed_tokens=num_selected,
            fresh_tokens=len(stitched.ids) - reused,
            runs=tuple(stitched.runs),
            policy=config.policy,
            ratio=config.ratio,
            match_s=match_s,
            load_s=stitched.load_s,
            stitch_s=stitch_s + stitched.stitch_s,
            select_s=select_s,
            blend_s=blend_s,
            ttft_s=0.0,
            bytes_loaded=sum(reader.bytes_read for reader in readers.values()),
            tier=tiers.pop() if len(tiers) == 1 else "mixed" if tiers else "",
            exact=num_selected == inexact,
            notes=tuple(notes),
            decision=decision,
        )
        return Prefilled(stitched.ids, stitched, logits, lambda ttft_s: replace(base, ttft_s=ttft_s))

    def _match(self, ids: list[int], min_run: int) -> tuple[list[Run], dict[str, ChunkReader]]:
        """Runs whose chunks could be opened, and their readers."""
        with self._index_lock:
            self._refresh_index()
            runs = self._index.match(ids, min_run)
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
        removals = self.store.removals()
        if removals != self._removals:
            self._index, self._last_entry, self._removals = MatchIndex(), 0, removals
        entries = list(self.store.entries(self._last_entry))
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
        """Release the store. Answers under way end with their own."""
        if not self._closed:
            self._closed = True
            self._dropped.clear()
            self._tuning.keep_speed()
            self.store.close()

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Clock:
    """Seconds between laps, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()

    def lap(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        return passed


def _by_document(names: Sequence[str], keys: Sequence[str | None]) -> dict[str, list[str]]:
    """Each document's keys."""
    held: dict[str, list[str]] = {name: [] for name in names}
    for name, key in zip(names, keys, strict=True):
        if key is not None:
            held[name].append(key)
    return held


def _overlap(before: list[int], ids: list[int]) -> int:
    """How many tokens at the end of a text are the beginning of the next one, which a splitter made overlap with it.

    The first of them may be another there, for want of the space before it.
    """
    for num in range(min(len(before), len(ids)), _LEAST_OVERLAP - 1, -1):
        if before[-num + 1 :] == ids[1:num]:
            return num
    return 0


def _portions(keys: Sequence[str], tokens: Sequence[int], size: int) -> Iterator[list[str]]:
    """Keys in portions of about `size` tokens, similar lengths together so that batches pad little."""
    portion: list[str] = []
    total = 0
    for number in sorted(range(len(keys)), key=tokens.__getitem__):
        portion.append(keys[number])
        total += tokens[number]
        if total >= size:
            yield portion
            portion, total = [], 0
    if portion:
        yield portion


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
