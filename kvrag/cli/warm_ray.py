"""`kvrag warm --ray`: workers on a Ray cluster encode whole documents into one store.

This process reads and splits the files, and hands out the documents that are not warm yet. KV never passes through it:
workers write to the store and return counts. A document whose worker died is handed out again.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from kvrag.cli.cluster import Cluster, connect, on_all_machines, say_missing
from kvrag.cli.common import folder, human_bytes, open_engine, open_index, progress, say
from kvrag.cli.warm import INTERRUPTED, TOTALS, bytes_per_token, check_room, drop, find_gone, read_chunks
from kvrag.config import BlendConfig
from kvrag.errors import KvragError, SettingError
from kvrag.fingerprint import Fingerprint, text_key
from kvrag.retrieval.documents import Problem

if TYPE_CHECKING:
    from kvrag.backend.transformers.tokenizer import Tokenizer
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex
    from kvrag.store import KVStore

_PATIENCE_S = 30.0  # without a worker, until a line says what they wait for
_SENDS = 3  # of a document whose workers die: it may be what kills them
_SETTLED = 2  # documents that hold a text, from which on it is stored alone and encoded no more


@dataclass(frozen=True)
class Facts:
    """What a worker knows of its model and store: all that choosing chunks needs besides the tokenizer.

    Attributes:
        store: Folder or URL.
        model: Display name.
        bytes_per_token: Bytes that a stored token takes.
    """

    store: str
    fingerprint: Fingerprint
    model: str
    context_window: int
    stable_length: int
    bytes_per_token: float


class Worker:
    """An actor with an engine of its own. Its methods return a failure as a text: actors' exceptions are pages long."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._args = argparse.Namespace(**options)
        self._opened: tuple[BlendEngine, ChunkIndex] | None = None

    def _open(self) -> tuple[BlendEngine, ChunkIndex]:
        if self._opened is None:
            engine = open_engine(self._args, **self._args.context_tokens)
            self._opened = engine, open_index(engine, self._args.namespace, self._args.embedder)
        return self._opened

    def open(self) -> Facts | str:
        """Load the model and open the store."""
        try:
            engine, _ = self._open()
        except (KvragError, OSError) as error:
            return str(error)
        model, store = engine.model, self._args.store or str(folder(engine).path)
        size = bytes_per_token(engine, self._args.chunk_tokens)
        return Facts(store, engine.fingerprint, model.name, model.context_window, model.stable_length, size)

    def warm(self, name: str, chunks: list[str], pages: dict[str, tuple[int, int]]) -> dict[str, Any] | str:
        """Encode a document and add it to the index."""
        from kvrag.store import SharedStore

        started = time.perf_counter()
        try:
            engine, index = self._open()
            if isinstance(engine.store, SharedStore):  # a text that another worker has just stored is not encoded again
                engine.store.sync()
            report = engine.warm(chunks, document=name, namespace=self._args.namespace)
            indexed = index.add(chunks, document=name, pages=pages)
        except (KvragError, OSError) as error:
            return str(error)
        totals = {field: getattr(report, field) for field in TOTALS}
        return totals | {"indexed": indexed, "seconds": time.perf_counter() - started}


class _Outline:
    """The model as `kvrag.backend.protocol.Outline`; its weights are the workers'."""

    def __init__(self, facts: Facts, tokenizer: Tokenizer) -> None:
        self.context_window, self.stable_length = facts.context_window, facts.stable_length
        self.preamble, self.tokenizer = facts.fingerprint.preamble, tokenizer

    def check_window(self, num_tokens: int, what: str = "the prompt") -> None:
        """Leave it to the workers, who refuse chunks that are too long."""


@dataclass
class _Opened:
    """The store as this process sees it."""

    store: KVStore


class Handout:
    """The documents to encode, in order.

    Two documents with a text in common are encoded one after the other until the text is stored alone. At the same
    time, each worker would encode it behind its own document, see the other's, and encode it once more alone.
    """

    def __init__(self, texts: Mapping[str, Iterable[str]], done: Iterable[str]) -> None:
        """Take documents with the keys of their texts, and those of them that are done."""
        self._texts = {name: set(keys) for name, keys in texts.items()}
        holders = Counter(key for keys in self._texts.values() for key in keys)
        self._left = {key: _SETTLED for key, count in holders.items() if count > 1}  # until the text is settled
        self._out: set[str] = set()  # texts being encoded that are not settled
        self._blocked: dict[str, list[str]] = defaultdict(list)  # by a text that is being encoded
        self._todo: deque[str] = deque()
        skipped = set(done)
        for name in texts:
            if name in skipped:
                self.finish(name)
            else:
                self._todo.append(name)

    def next(self) -> str | None:
        """Return a document to encode now; None = none, or not yet."""
        while self._todo:
            name = self._todo.popleft()
            unsettled = {key for key in self._texts[name] if self._left.get(key, 0) > 0}
            if taken := unsettled & self._out:
                self._blocked[min(taken)].append(name)
                continue
            self._out |= unsettled
            return name
        return None

    def finish(self, name: str) -> None:
        """Record that a document is encoded."""
        self._release(name, 1)

    def put_back(self, name: str) -> None:
        """Hand out a document again."""
        self._release(name, 0)
        self._todo.appendleft(name)

    def _release(self, name: str, count: int) -> None:
        for key in sorted(self._texts[name]):
            if key in self._left:
                self._left[key] -= count
                self._out.discard(key)
                self._todo.extendleft(reversed(self._blocked.pop(key, [])))


@dataclass
class _Hand:
    """A worker as this process sees it.

    Attributes:
        number: From 1.
        seconds: Time it has encoded.
    """

    number: int
    actor: Any
    document: str | None = None
    documents: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the throughput."""
        speed = self.tokens / self.seconds if self.seconds else 0.0
        counts = {"worker": self.number, "documents": self.documents, "tokens": self.tokens}
        return counts | {"seconds": self.seconds, "tokens_per_second": speed}


@dataclass
class Crew:
    """Workers, started as the cluster has room. Those that die are replaced."""

    cluster: Cluster
    options: dict[str, Any]
    size: int
    hands: list[_Hand] = field(default_factory=list)
    lost: int = 0
    _waiting: dict[Any, _Hand] = field(default_factory=dict)
    _idle: list[_Hand] = field(default_factory=list)
    _deaths: int = 0  # since the last result

    def start(self) -> Facts:
        """Start all workers; return the facts of the first one that is ready."""
        for _ in range(self.size):
            self._start_one()
        silent_until = time.monotonic() + _PATIENCE_S
        while True:
            for _, result in self.results():
                return cast(Facts, result)
            if silent_until and time.monotonic() > silent_until:
                say_missing(self.cluster, self._resources)
                silent_until = 0.0

    @property
    def _resources(self) -> dict[str, float]:
        return self.cluster.resources(self.options["device"], self.size)

    def _start_one(self) -> None:
        import ray

        actor = ray.remote(Worker).options(**self._resources).remote(self.options)
        self.hands.append(hand := _Hand(len(self.hands) + 1, actor))
        self._waiting[actor.open.remote()] = hand

    def hand_out(self, next_document: Callable[[], str | None], plan: Plan) -> None:
        """Give documents to idle workers."""
        while self._idle and (name := next_document()) is not None:
            hand = self._idle.pop()
            hand.document = name
            self._waiting[hand.actor.warm.remote(name, plan.chunks[name], plan.pages[name])] = hand

    def results(self, timeout: float = 1.0) -> Iterator[tuple[str | None, Any]]:
        """Yield (document, result) as workers finish, None as the result of a document whose worker died.

        The document is None for a worker that has become ready, with its `Facts`.

        Raises:
            KvragError: A worker failed, or workers die again and again.
        """
        import ray

        done, _ = ray.wait(list(self._waiting), timeout=timeout)
        for ready in done:
            hand = self._waiting.pop(ready)
            name, hand.document = hand.document, None
            try:
                result = ray.get(ready)
            except ray.exceptions.RayActorError as error:
                self._bury(error)
                if name is not None:
                    yield name, None
                continue
            if isinstance(result, str):
                raise KvragError(result)
            self._deaths = 0
            self._idle.append(hand)
            if name is not None:
                hand.documents += 1
                hand.tokens += result["tokens"]
                hand.seconds += result["seconds"]
            yield name, result

    def _bury(self, error: Exception) -> None:
        self.lost += 1
        self._deaths += 1
        if self._deaths > _SENDS * self.size:
            raise KvragError(f"workers die as soon as they start: {str(error).strip().splitlines()[0]}")
        self._start_one()

    def end(self) -> None:
        """End all workers."""
        import ray

        for hand in self.hands:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(hand.actor)


@contextmanager
def _crew(cluster: Cluster, options: dict[str, Any], size: int) -> Iterator[Crew]:
    crew = Crew(cluster, options, size)
    try:
        yield crew
    finally:
        crew.end()


@dataclass(frozen=True)
class Plan:
    """Documents with their chunks and pages, those of them that are warm, and what was skipped in the files.

    Attributes:
        texts: By document, the keys of its texts, and their tokens.
    """

    chunks: dict[str, list[str]]
    pages: dict[str, dict[str, tuple[int, int]]]
    problems: list[Problem]
    texts: dict[str, dict[str, int]]
    warm: set[str]


def warm_on_cluster(args: argparse.Namespace) -> dict[str, Any]:
    """Split the files here, and encode their chunks on the Ray cluster in `args.ray`."""
    from kvrag.store import open_store

    with ExitStack() as stack:
        cluster = stack.enter_context(connect(args.ray))
        options = on_all_machines(args, cluster)
        size = args.workers or (cluster.gpus if cluster.uses_gpus(args.device) else len(cluster.cpus)) or 1
        crew = stack.enter_context(_crew(cluster, options, size))
        facts = crew.start()
        here = _Opened(open_store(facts.store, options["store_cache"]))
        stack.enter_context(closing(here.store))
        here.store.bind(facts.fingerprint)
        index = stack.enter_context(open_index(here, args.namespace, args.embedder))
        gone = find_gone(here.store, index, args.paths, args.namespace)
        dropped = drop(here.store, index, gone, args.namespace) if args.prune else 0
        plan = _make_plan(args, facts, here.store, index)
        tokens = sum(sum(texts.values()) for texts in plan.texts.values())
        new = sum(sum(texts.values()) for name, texts in plan.texts.items() if name not in plan.warm)
        say(
            f"{len(plan.chunks)} documents, {len(plan.warm)} of them warm, {tokens} tokens, at most {new} of them new: "
            f"needs {human_bytes(new * facts.bytes_per_token)} in {folder(here).stats().path}"
        )
        check_room(here.store, new * facts.bytes_per_token)
        try:
            result = _warm(crew, plan, args.json)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(INTERRUPTED) from None
        result |= {"gone": gone, "dropped": dropped, "problems": plan.problems}
        return result | {"store": str(folder(here).stats().path), "model": facts.model}


def _make_plan(args: argparse.Namespace, facts: Facts, store: KVStore, index: ChunkIndex) -> Plan:
    """Read and split all files, and find out which documents are warm."""
    from kvrag.backend.transformers.loading import load_tokenizer
    from kvrag.backend.transformers.tokenizer import Tokenizer
    from kvrag.ingest.ingest import Choosing

    tokenizer = Tokenizer(load_tokenizer(args.model), args.model)
    if tokenizer.digest != facts.fingerprint.tokenizer:
        raise SettingError(f"the cluster has another tokenizer for {args.model!r}: install the same model everywhere")
    config = BlendConfig(**args.context_tokens)
    choosing = Choosing(_Outline(facts, tokenizer), store, config, facts.fingerprint)
    chunks, pages, problems = read_chunks(args, tokenizer.encode)
    texts: dict[str, dict[str, int]] = {}
    warm: set[str] = set()
    for name, pieces in chunks.items():
        tokenized = [ids for ids in map(tokenizer.encode, pieces) if len(ids) >= config.min_run]
        texts[name] = {text_key(args.namespace, ids): len(ids) for ids in tokenized}
        # a killed worker may have left the KV of a document and not its place in the index
        indexed = [text for text in dict.fromkeys(pieces) if text.strip()]
        if index.texts(name) == indexed and choosing.is_warm(pieces, name, args.namespace):
            warm.add(name)
    return Plan(chunks, pages, problems, texts, warm)


def _warm(crew: Crew, plan: Plan, quiet: bool) -> dict[str, Any]:
    """Hand out a plan's documents until all are done."""
    handout = Handout(plan.texts, plan.warm)
    lengths = {name: sum(texts.values()) for name, texts in plan.texts.items() if name not in plan.warm}
    totals: dict[str, Any] = dict.fromkeys((*TOTALS, "indexed"), 0)
    for name in plan.warm:
        totals["chunks"] += len(set(plan.chunks[name]))
        totals["reused"] += len(plan.texts[name])
        totals["skipped"] += len(set(plan.chunks[name])) - len(plan.texts[name])
    sent: Counter[str] = Counter()
    left = set(lengths)
    with progress("encoding", quiet) as report:
        while left:
            crew.hand_out(handout.next, plan)
            for document, result in crew.results():
                if document is None:
                    continue
                if result is None:
                    sent[document] += 1
                    if sent[document] == _SENDS:
                        why = "they may need more memory, see Ray's logs"
                        raise KvragError(f"{_SENDS} workers died while they encoded {document}: {why}")
                    handout.put_back(document)
                    continue
                handout.finish(document)
                left.discard(document)
                for each in totals:
                    totals[each] += result[each]
            report(sum(length for name, length in lengths.items() if name not in left), sum(lengths.values()))
    workers = [hand.to_dict() for hand in crew.hands if hand.documents]
    for worker in workers:
        say(
            f"worker {worker['worker']}: {worker['documents']} documents, {worker['tokens']} tokens, "
            f"{worker['tokens_per_second']:.0f} tokens/s"
        )
    warnings = []
    if totals["skipped"]:
        warnings.append(f"{totals['skipped']} chunks are too short: they can be retrieved but not reused")
    if crew.lost:
        warnings.append(f"{crew.lost} workers died and were replaced: nothing is missing")
    result = totals | {"files": len(plan.chunks), "warm": len(plan.warm), "warnings": warnings}
    return result | {"workers": workers, "lost": crew.lost}
