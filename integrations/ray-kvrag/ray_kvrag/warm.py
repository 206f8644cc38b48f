"""`ray-kvrag warm`: workers on a Ray cluster encode whole documents into one store.

This process reads and splits the files, and sends the documents that are not warm yet to the workers. These write KV to
the store and return counts only. A document whose worker died is sent again.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayActorError, RayError

from kvrag import BlendConfig, KvragError, SettingError
from kvrag.cli.common import at_least, open_engine, open_index, progress, say
from kvrag.cli.warm import add_local_arguments, drop, find_gone, read_chunks, run_with
from kvrag.fingerprint import Fingerprint
from kvrag.retrieval.content import Problem
from kvrag.store.values import text_key
from kvrag.words import counted, human_bytes
from ray_kvrag.cluster import Cluster, connect, on_all_machines, report_missing
from ray_kvrag.command import add_address

if TYPE_CHECKING:
    from kvrag import BlendEngine, KVStore
    from kvrag.backend.protocol import ChunkTokenizer
    from kvrag.backend.transformers.tokenizer import Tokenizer
    from kvrag.retrieval.index import ChunkIndex

_REPORT_AFTER_S = 30.0  # without any worker: report the missing resources
_TRIES = 3  # per document whose workers die: it may be the cause
_TOTALS = ("chunks", "new", "reused", "skipped", "tokens", "bytes")
_HOLDERS = 2  # documents that must contain a text before it is stored alone and not encoded again


@dataclass(frozen=True)
class Facts:
    """Model and store of a worker: together with the tokenizer, sufficient to choose the chunks to encode.

    Attributes:
        store: Folder or URL.
        model: Display name.
        bytes_per_token: Stored bytes per token.
    """

    store: str
    fingerprint: Fingerprint
    model: str
    context_window: int
    stable_length: int
    bytes_per_token: float


class EncodingWorker:
    """Ray actor with its own engine. Methods return errors as strings, because Ray's exceptions are pages long."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._args = argparse.Namespace(**options)
        self._opened: BlendEngine | None = None

    def _open(self) -> BlendEngine:
        if self._opened is None:
            self._opened = open_engine(self._args)
        return self._opened

    def open(self) -> Facts | str:
        """Load the model and open the store."""
        try:
            engine = self._open()
        except (KvragError, OSError) as error:
            return str(error)
        model, store = engine.model, self._args.store or str(engine.store.path)
        width = model.dtype.itemsize
        # bytes of a stored number, with those of its group's scale
        stored = {"native": width, "int8": 1 + width / 64, "int4": 0.5 + width / 32}[engine.codec]
        size = model.bytes_per_token * stored / width + model.bytes_per_chunk / self._args.chunk_tokens
        return Facts(store, engine.fingerprint, model.name, model.context_window, model.stable_length, size)

    def warm(self, name: str, chunks: list[str]) -> dict[str, Any] | str:
        """Encode a document."""
        from kvrag import SharedStore

        started = time.perf_counter()
        try:
            engine = self._open()
            if isinstance(engine.store, SharedStore):  # so that texts stored by other workers are not encoded again
                engine.store.sync()
            report = engine.warm(chunks, document=name, namespace=self._args.namespace)
        except (KvragError, OSError) as error:
            return str(error)
        totals = {name: getattr(report, name) for name in _TOTALS}
        return totals | {"seconds": time.perf_counter() - started}


class _ModelOutline:
    """`kvrag.backend.protocol.Outline` of a model whose weights are loaded by the workers only."""

    def __init__(self, facts: Facts, tokenizer: ChunkTokenizer) -> None:
        self.context_window, self.stable_length = facts.context_window, facts.stable_length
        self.preamble = facts.fingerprint.preamble
        self.tokenizer: ChunkTokenizer = tokenizer

    def check_window(self, num_tokens: int, what: str = "the prompt") -> None:
        """Do nothing: the workers reject chunks that are too long."""


class DocumentQueue:
    """Documents to encode, in order.

    Documents with a common text are encoded one after the other until the text is stored alone. Otherwise, each worker
    would encode the text with the preceding context of its own document, then find the other variant, and encode the
    text again alone.
    """

    def __init__(self, texts: Mapping[str, Iterable[str]], done: Iterable[str]) -> None:
        """Create a queue from the keys of each document's texts, without the documents that are done."""
        self._texts = {name: set(keys) for name, keys in texts.items()}
        holders = Counter(key for keys in self._texts.values() for key in keys)
        # by common text: number of documents to encode before it is stored alone
        self._left = {key: _HOLDERS for key, count in holders.items() if count > 1}
        self._encoding: set[str] = set()  # common texts that are being encoded
        self._blocked: dict[str, list[str]] = defaultdict(list)  # waiting documents, by text being encoded
        self._todo: deque[str] = deque()
        skipped = set(done)
        for name in texts:
            if name in skipped:
                self.finish(name)
            else:
                self._todo.append(name)

    def next(self) -> str | None:
        """Return the next document to encode; None if none is left, or all must wait."""
        while self._todo:
            name = self._todo.popleft()
            shared = {key for key in self._texts[name] if self._left.get(key, 0) > 0}
            if busy := shared & self._encoding:
                self._blocked[min(busy)].append(name)
                continue
            self._encoding |= shared
            return name
        return None

    def finish(self, name: str) -> None:
        """Record that a document is encoded."""
        self._release(name, 1)

    def put_back(self, name: str) -> None:
        """Make a document available again."""
        self._release(name, 0)
        self._todo.appendleft(name)

    def _release(self, name: str, count: int) -> None:
        for key in sorted(self._texts[name]):
            if key in self._left:
                self._left[key] -= count
                self._encoding.discard(key)
                self._todo.extendleft(reversed(self._blocked.pop(key, [])))


@dataclass
class _WorkerState:
    """A worker and its counts.

    Attributes:
        number: From 1.
        seconds: Time spent encoding.
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
class WorkerPool:
    """Workers, started when the cluster has free resources. Dead workers are replaced."""

    cluster: Cluster
    options: dict[str, Any]
    size: int
    workers: list[_WorkerState] = field(default_factory=list)
    lost: int = 0
    _waiting: dict[Any, _WorkerState] = field(default_factory=dict)
    _idle: list[_WorkerState] = field(default_factory=list)
    _deaths: int = 0  # since the last result

    def start(self) -> Facts:
        """Start all workers; return the facts of the first one that is ready."""
        for _ in range(self.size):
            self._start_one()
        report_at = time.monotonic() + _REPORT_AFTER_S
        while True:
            for _, result in self.results():
                return cast(Facts, result)
            if time.monotonic() > report_at:
                report_missing(self.cluster, self._resources)
                report_at = float("inf")

    @property
    def _resources(self) -> dict[str, float]:
        return self.cluster.resources(self.options["device"], self.size)

    def _start_one(self) -> None:
        actor = ray.remote(EncodingWorker).options(**self._resources).remote(self.options)
        self.workers.append(worker := _WorkerState(len(self.workers) + 1, actor))
        self._waiting[actor.open.remote()] = worker

    def assign(self, next_document: Callable[[], str | None], plan: ClusterPlan) -> None:
        """Give documents to idle workers."""
        while self._idle and (name := next_document()) is not None:
            worker = self._idle.pop()
            worker.document = name
            self._waiting[worker.actor.warm.remote(name, plan.chunks[name])] = worker

    def results(self, timeout: float = 1.0) -> Iterator[tuple[str | None, Any]]:
        """Yield (document, result) as workers finish, None as the result of a document whose worker died.

        The document is None and the result `Facts` when a worker becomes ready.

        Raises:
            KvragError: A worker reported an error, or workers die as soon as they start.
        """
        done, _ = ray.wait(list(self._waiting), timeout=timeout)
        for ready in done:
            worker = self._waiting.pop(ready)
            name, worker.document = worker.document, None
            try:
                result = ray.get(ready)
            except RayActorError as error:
                self._replace(error)
                if name is not None:
                    yield name, None
                continue
            if isinstance(result, str):
                raise KvragError(result)
            self._deaths = 0
            self._idle.append(worker)
            if name is not None:
                worker.documents += 1
                worker.tokens += result["tokens"]
                worker.seconds += result["seconds"]
            yield name, result

    def _replace(self, error: Exception) -> None:
        self.lost += 1
        self._deaths += 1
        if self._deaths > _TRIES * self.size:
            raise KvragError(f"workers die as soon as they start: {str(error).strip().splitlines()[0]}")
        self._start_one()

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(worker.actor)


@contextmanager
def _worker_pool(cluster: Cluster, options: dict[str, Any], size: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(cluster, options, size)
    try:
        yield pool
    finally:
        pool.end()


@dataclass(frozen=True)
class ClusterPlan:
    """Documents with their chunks and pages, and problems in the files.

    Attributes:
        texts: Number of tokens of each text, by document and text key.
        warm: Documents that need no encoding.
    """

    chunks: dict[str, list[str]]
    pages: dict[str, dict[str, tuple[int, int]]]
    problems: list[Problem]
    texts: dict[str, dict[str, int]]
    warm: set[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ray-kvrag warm`."""
    add_local_arguments(parser)
    workers = "number of workers (default: the number of GPUs, or of machines if there are none)"
    parser.add_argument("--workers", type=at_least(1), metavar="N", help=workers)
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Encode the chunks that the store lacks; returns as `kvrag warm`."""
    return run_with(warm_on_cluster, args)


def warm_on_cluster(args: argparse.Namespace) -> dict[str, Any]:
    """Split the files in this process, and encode their chunks on the Ray cluster in `args.address`."""
    from kvrag.store import open_store

    with ExitStack() as stack:
        cluster = stack.enter_context(connect(args.address))
        options = on_all_machines(args, cluster)
        size = args.workers or (cluster.gpus if cluster.uses_gpus(args.device) else len(cluster.cpus)) or 1
        pool = stack.enter_context(_worker_pool(cluster, options, size))
        facts = pool.start()
        store, namespace = open_store(facts.store, options["store_cache"]), args.namespace
        stack.enter_context(closing(store))
        store.bind(facts.fingerprint)
        index = stack.enter_context(open_index(store, namespace, args.embedder))
        gone = find_gone(args.paths, lambda prefix: [*index.counts(), *store.documents(prefix, namespace)])
        tokenizer = _load_tokenizer(args, facts)
        dropped = _prune(store, index, gone, namespace, tokenizer) if args.prune and gone else 0
        plan = _make_plan(args, facts, store, index, tokenizer)
        tokens = sum(sum(texts.values()) for texts in plan.texts.values())
        new = sum(sum(texts.values()) for name, texts in plan.texts.items() if name not in plan.warm)
        say(
            f"{counted(len(plan.chunks), 'document')}, {len(plan.warm)} of them warm, {counted(tokens, 'token')}, "
            f"at most {new} of them new: needs {human_bytes(new * facts.bytes_per_token)} in {store.stats().path}"
        )
        store.check_room(new * facts.bytes_per_token)
        result = _warm(pool, plan, index, args.json)
        result |= {"gone": gone, "dropped": dropped, "problems": plan.problems}
        return result | {"store": str(store.stats().path), "model": facts.model}


def _load_tokenizer(args: argparse.Namespace, facts: Facts) -> Tokenizer:
    """Load the tokenizer of the cluster's model in this process."""
    from kvrag.backend.transformers.loading import load_tokenizer
    from kvrag.backend.transformers.tokenizer import Tokenizer

    tokenizer = Tokenizer(load_tokenizer(args.model), args.model)
    if tokenizer.digest != facts.fingerprint.tokenizer:
        raise SettingError(f"the cluster has another tokenizer for {args.model!r}: install the same model everywhere")
    return tokenizer


def _prune(store: KVStore, index: ChunkIndex, gone: Sequence[str], namespace: str, tokenizer: Tokenizer) -> int:
    """Drop the documents that are gone; see `drop`."""
    from kvrag.index.catalog import Catalog
    from kvrag.memory.forgetting import forget

    where = namespace, store, Catalog(store), tokenizer.decode, lambda keys: None
    return drop(index, gone, lambda name: forget(partial(store.set_document, name, [], namespace), *where))


def _make_plan(
    args: argparse.Namespace, facts: Facts, store: KVStore, index: ChunkIndex, tokenizer: Tokenizer
) -> ClusterPlan:
    """Read and split all files, and determine which documents are warm."""
    from kvrag.ingest.ingest import Choosing

    config = BlendConfig(context_tokens=args.context_tokens)
    choosing = Choosing(_ModelOutline(facts, tokenizer), store, config, facts.fingerprint)
    chunks, pages, problems = read_chunks(args, tokenizer.encode)
    texts: dict[str, dict[str, int]] = {}
    warm: set[str] = set()
    for name, pieces in chunks.items():
        tokenized = list(filter(None, map(tokenizer.encode, pieces)))
        texts[name] = {text_key(args.namespace, ids): len(ids) for ids in tokenized}
        # this process may have been killed after a document's KV was stored, before it was indexed
        indexed = [text for text in dict.fromkeys(pieces) if text.strip()]
        if index.texts(name) == indexed and choosing.is_warm(pieces, name, args.namespace):
            warm.add(name)
    return ClusterPlan(chunks, pages, problems, texts, warm)


def _warm(pool: WorkerPool, plan: ClusterPlan, index: ChunkIndex, quiet: bool) -> dict[str, Any]:
    """Send a plan's documents to the workers, and index those that are encoded, until all are done."""
    queue = DocumentQueue(plan.texts, plan.warm)
    lengths = {name: sum(texts.values()) for name, texts in plan.texts.items() if name not in plan.warm}
    totals: dict[str, Any] = dict.fromkeys(_TOTALS, 0)
    indexed = 0
    for name in plan.warm:
        totals["chunks"] += len(set(plan.chunks[name]))
        reused = sum(length >= BlendConfig().min_run for length in plan.texts[name].values())
        totals["reused"] += reused
        totals["skipped"] += len(set(plan.chunks[name])) - reused
    sent: Counter[str] = Counter()
    left = set(lengths)
    with progress("encoding", quiet) as report:
        while left:
            pool.assign(queue.next, plan)
            for document, result in pool.results():
                if document is None:
                    continue
                if result is None:
                    sent[document] += 1
                    if sent[document] == _TRIES:
                        hint = "they may need more memory, see Ray's logs"
                        raise KvragError(f"{_TRIES} workers died while they encoded {document}: {hint}")
                    queue.put_back(document)
                    continue
                queue.finish(document)
                left.discard(document)
                for count in totals:
                    totals[count] += result[count]
                indexed += index.add(plan.chunks[document], document=document, pages=plan.pages[document])
            report(sum(length for name, length in lengths.items() if name not in left), sum(lengths.values()))
    workers = [worker.to_dict() for worker in pool.workers if worker.documents]
    for worker in workers:
        say(
            f"worker {worker['worker']}: {counted(worker['documents'], 'document')}, "
            f"{counted(worker['tokens'], 'token')}, {worker['tokens_per_second']:.0f} tokens/s"
        )
    warnings = []
    if totals["skipped"]:
        warnings.append(f"{counted(totals['skipped'], 'short chunk')} can be retrieved but not reused")
    if pool.lost:
        warnings.append(f"{pool.lost} workers died and were replaced: nothing is missing")
    result = totals | {"indexed": indexed, "files": len(plan.chunks), "warm": len(plan.warm), "warnings": warnings}
    return result | {"workers": workers, "lost": pool.lost}
