"""A twin of shared stores: several machines on one remote that fails, compared with a dictionary.

`Fleet` is a Hypothesis state machine. Each step is an operation of one machine. Faults are injected into its calls of
the remote and of its own folder; before or after one of these calls, another machine may perform a whole operation. The
dictionary has what documents hold. An operation that fails may have taken effect, or not, or up to some point.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from places import names_in
from records import FINGERPRINT, has, record, text

from kvrag import ChunkUnreadableError, SharedStore, StoreError
from kvrag.store import ON_REQUEST, ChunkRecord, Holding, chunkfile, log, shared
from kvrag.store.manifest import Manifest
from kvrag.store.objects import ObjectStore
from kvrag.store.shared import connect

NAMES = {"one": "one", "two": "two", "three": "three", "three, again": "three"}
"""Each machine's folder: two of them are processes of one computer."""

NAMESPACES, DOCUMENTS, TEXTS = ["", "other"], ["a", "b"], range(3)
_LOCAL = ("drop", "copy")  # calls that are not of the remote: only a kill can interrupt them
_WRITES = ("swap", "write", "delete", "rename")
_CALLS = 12  # of one operation, among which a fault happens


def chunk(namespace: str, number: int, is_behind: bool) -> ChunkRecord:
    """A text's variant encoded alone, or behind other text."""
    return record(number, tokens=4, layers=1, context=[9, 9] * is_behind, namespace=namespace)


CHUNKS = {made.key: made for made in (chunk(*each) for each in product(NAMESPACES, TEXTS, (False, True)))}
BYTES = {key: sum(map(len, map(bytes, chunkfile.serialise(made, FINGERPRINT.digest)))) for key, made in CHUNKS.items()}


# ---------------------------------------------------------------- a remote that fails


class Killed(BaseException):
    """The process was killed at this point."""


class Fault(NamedTuple):
    """What happens at the call after so many others: see `Calls`."""

    after: int
    kind: str

    def __repr__(self) -> str:
        return f"<{self.after}: {self.kind}>"


FAULTS = st.tuples(
    st.integers(0, _CALLS),
    st.sampled_from(
        ["error before", "error after", "late", "twice", "half", "down", "killed before", "killed after"]
        + ["another before", "another after"] * 3
    ),
).map(lambda pair: Fault(*pair))


class Calls:
    """The calls of one machine, some of which fail.

    "error before" and "error after" the call takes effect; "late": it takes effect when its caller has given up;
    "twice": the answer was lost, and the client tried again; "half": of several names; "down": from now on.
    """

    def __init__(self) -> None:
        self.late: list[Callable[[], object]] = []
        self.is_dead = False
        self.begin([], lambda: None)

    def begin(self, faults: Sequence[Fault], another: Callable[[], None]) -> None:
        """Begin an operation; `another` is one of another machine."""
        self._faults, self._another, self._count = list(faults), another, -1
        self.fired: set[str] = set()
        self.happened: list[str] = []

    def call(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        if self.is_dead:
            raise Killed(name)
        self._count += 1
        kinds = {fault.kind for fault in self._faults if fault.after == self._count}
        if name in _LOCAL:
            kinds = {kind for kind in kinds if kind.startswith(("killed", "another"))}
        if "down" in self.fired and name not in _LOCAL:
            raise StoreError(f"the network is down ({name})")
        self.fired |= kinds
        self.happened += [f"{kind} {name}" for kind in sorted(kinds)]
        if "killed before" in kinds:
            self._die(name)
        if "another before" in kinds:
            self._interrupt()
        if kinds & {"error before", "down"}:
            raise StoreError(f"no answer ({name})")
        if "late" in kinds and name in _WRITES:
            self.late.append(partial(work, *args))
            raise StoreError(f"no answer yet ({name})")
        if "half" in kinds and args and isinstance(args[0], (list, tuple)):
            work(args[0][: len(args[0]) // 2])
            raise StoreError(f"no answer to half of it ({name})")
        result = work(*args)
        if "twice" in kinds:
            result = work(*args)
        if "another after" in kinds:
            self._interrupt()
        if "killed after" in kinds:
            self._die(name)
        if kinds & {"error after", "half"}:
            raise StoreError(f"the answer was lost ({name})")
        return result

    def _interrupt(self) -> None:
        another, self._another = self._another, lambda: None
        another()

    def _die(self, name: str) -> None:
        self.is_dead = True
        raise Killed(name)


class Unreliable:
    """A remote, through the calls of one machine."""

    def __init__(self, remote: ObjectStore, calls: Calls) -> None:
        self.url, self._remote, self.calls = remote.url, remote, calls

    def __getattribute__(self, name: str) -> Any:
        if name in ("url", "calls", "_remote") or name.startswith("__"):
            return object.__getattribute__(self, name)
        method = getattr(self._remote, name)
        if name == "listed":
            return lambda *prefixes: iter(self.calls.call(name, lambda: list(method(*prefixes))))
        return partial(self.calls.call, name, method)


# ---------------------------------------------------------------- operations, and the dictionary

Row = tuple[str, str, str, str]
"""Namespace, document, text and source."""

Held = dict[Row, str]
"""The chunk that each relies on."""

Effect = Callable[[Held], Held]


def hold(namespace: str, document: str, holdings: Sequence[Holding], replace: bool, held: Held) -> Held:
    """Return what documents hold after `set_document`."""
    mine = {(namespace, document, one.text_key, one.source): one.key for one in holdings}
    replaces = replace and document != ON_REQUEST
    let_go = {row for row in held if row[:2] == (namespace, document) and (replaces or row in mine)}
    lost = {row[2] for row in let_go} - {row[2] for row in mine}
    others = {row for row in held if row[:2] == (namespace, ON_REQUEST) and row[2] in lost}
    return {row: key for row, key in held.items() if row not in let_go | others} | mine


def release(namespaces: Sequence[str], held: Held) -> Held:
    """Return what documents hold when these namespaces' texts of requests are released."""
    return {row: key for row, key in held.items() if row[0] not in namespaces or row[1] != ON_REQUEST}


@dataclass(frozen=True)
class Operation:
    """What a machine does. `chunks`: number of a text, and whether it is encoded behind others."""

    kind: str
    namespace: str = ""
    document: str = "a"
    chunks: tuple[tuple[int, bool], ...] = ()
    replace: bool = True

    def __repr__(self) -> str:
        chunks = " ".join(f"{number}{'+' * is_behind}" for number, is_behind in self.chunks)
        return f"<{self.kind} {self.namespace}/{self.document} [{chunks}]{'' if self.replace else ' adds'}>"

    @property
    def records(self) -> list[ChunkRecord]:
        wanted = {number: chunk(self.namespace, number, is_behind) for number, is_behind in self.chunks}
        return list(wanted.values())

    @property
    def keys(self) -> list[str]:
        return [made.key for made in self.records]

    @property
    def holdings(self) -> list[Holding]:
        source = "" if self.document == ON_REQUEST else f"source of {self.document}"
        return [Holding(text(made), made.key, source) for made in self.records]

    def perform(self, store: Any) -> None:
        """Do as the engine and the command line do."""
        match self.kind:
            case "warm":
                for _ in range(4):
                    store.put(self.records)
                    store.set_document(self.document, self.holdings, self.namespace, self.replace)
                    if not store.missing(self.keys):
                        return
                raise AssertionError("its chunks are removed again and again")
            case "forget":
                store.set_document(self.document, [], self.namespace)
            case "forget namespace":
                store.sync()
                for document in store.documents(namespace=self.namespace):
                    store.set_document(document, [], self.namespace)
                store.forget_requests(self.namespace)
            case "forget requests":
                store.sync()
                store.forget_requests(self.namespace)
            case "gc" | "gc of requests":
                store.gc(7 if self.kind == "gc" else -1)
            case "remove":
                store.remove(self.keys)
            case "use":
                store.touch(self.keys)
                store._record_uses()
            case "compact":
                store._log.compact()
            case "check":
                assert store.check().damaged == 0
            case "sync":
                store.sync()
            case "ask":
                store.read_ahead(self.keys)
                for download in list(store._opening.values()):
                    with suppress(StoreError, FileNotFoundError, Killed):
                        download.read(0, 1)
                for key in self.keys:
                    ask(store, key)

    def effects(self) -> list[Effect]:
        """Return its effects on the dictionary, in order."""
        one = partial(hold, self.namespace, self.document, self.holdings, self.replace)
        match self.kind:
            case "warm":
                return [one]
            case "forget":
                return [partial(hold, self.namespace, self.document, [], True)]
            case "forget namespace":
                each = [partial(hold, self.namespace, document, [], True) for document in DOCUMENTS]
                return [*each, partial(release, [self.namespace])]
            case "forget requests":
                return [partial(release, [self.namespace])]
            case "gc of requests":
                return [partial(release, NAMESPACES)]
        return []


def contents(store: Any) -> dict[str, list[Any]]:
    """Return what all machines must agree on."""
    queries = {
        "texts": "SELECT text, namespace, ids FROM texts ORDER BY text",
        "scores": "SELECT key, text, context_tokens, file, num_bytes, score FROM chunks ORDER BY key",
        "holders": "SELECT namespace, document, text, source, key FROM holders ORDER BY 1, 2, 3, 4",
        "counters": "SELECT * FROM counters WHERE name IN ('log last', 'damaged', 'clock') AND value > 0 ORDER BY name",
    }
    return {name: store._manifest._all(query) for name, query in queries.items()}


def ask(store: Any, key: str) -> bool:
    """Return whether a machine serves a chunk; its KV must be that of its key."""
    try:
        return has(store, CHUNKS[key])
    except ChunkUnreadableError:
        assert store._is_failing
        return False
    finally:
        store._promoter.wait()


_CHOICES = {
    "namespace": st.sampled_from(NAMESPACES),
    "document": st.sampled_from(DOCUMENTS),
    "chunks": st.lists(st.tuples(st.sampled_from(TEXTS), st.booleans()), min_size=1, max_size=2).map(tuple),
}
OPERATIONS = st.one_of(
    st.builds(Operation, st.just("warm"), replace=st.booleans(), **_CHOICES),
    st.builds(Operation, st.just("warm"), **_CHOICES | {"document": st.just(ON_REQUEST)}),
    st.builds(Operation, st.just("forget"), **_CHOICES),
    st.builds(Operation, st.sampled_from(["remove", "use", "ask"]), **_CHOICES),
    st.builds(Operation, st.sampled_from(["forget namespace", "forget requests"]), **_CHOICES),
    st.builds(Operation, st.sampled_from(["gc", "gc of requests", "compact", "check", "sync"])),
    st.builds(Operation, st.sampled_from(["restart", "start anew"])),
)


# ---------------------------------------------------------------- the machines


class Fleet(RuleBasedStateMachine):
    """Machines on a remote of their own, and what their documents hold."""

    url: str
    """Of the remote; PLACE stands for a prefix."""

    done = 0  # operations of all fleets

    @initialize(every=st.sampled_from([3, 1000]))
    def begin(self, every: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvrag-fleet-"))
        self.place = self.url.replace("PLACE", self.folder.name)
        self.stack = ExitStack()
        self.calls: dict[str, Calls] = {}
        self.stores: dict[str, Any] = {}
        self.held: Held = {}
        self.stored: set[str] = set()
        self.unsettled: set[Row] = set()  # their chunks may be missing
        self.loose: set[str] = set()  # chunks that may be stored although nothing holds them
        self.opening = Calls()
        drop = SharedStore._drop_removed

        def at_once(store: SharedStore, work: Callable[[], object]) -> None:
            with suppress(StoreError):
                work()

        def dropping(store: Any, keys: Sequence[str]) -> None:
            store._remote.calls.call("drop", drop, store, keys)

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
        for target, name, value in (
            (shared, "connect", lambda url: Unreliable(connect(url), self.opening)),
            (shared.logger, "disabled", True),
            (shared, "_TRUST_S", math.inf),
            (shared, "_COMPACT_EVERY", every),
            (shared, "_KEPT", 1),
            (SharedStore, "_in_background", at_once),
            (SharedStore, "_drop_removed", dropping),
            (log, "time", clock),
        ):
            self.stack.enter_context(patch.object(target, name, value))
        self.observer = self._open("observer")

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            try:
                if sys.exc_info()[0] is None:
                    self._converge()
            finally:
                for name in list(self.stores):
                    self._close(name)
                self.stack.close()
                shutil.rmtree(self.folder)

    # ------------------------------------------------------------ opening and killing

    def _open(self, name: str) -> Any:
        if name not in self.stores:
            self.opening = self.calls.setdefault(name, Calls())
            # machines follow the log when they are told to
            with patch.object(SharedStore, "_follow", lambda self: None):
                store: Any = SharedStore(self.place, self.folder / NAMES.get(name, name), min_free_bytes=0)
                try:
                    store.bind(FINGERPRINT)
                except BaseException:
                    store.close()
                    raise
            store._writers = ThreadPoolExecutor(1)  # so that faults hit the same call each time
            store._local.put = partial(self.calls[name].call, "copy", store._local.put)
            self.stores[name] = store
        return self.stores[name]

    def _start_anew(self, name: str) -> None:
        """Lose a machine's folder."""
        for process in [process for process, folder in NAMES.items() if folder == NAMES.get(name)] or [name]:
            self._close(process)
        shutil.rmtree(self.folder / NAMES.get(name, name), ignore_errors=True)

    def _close(self, name: str) -> None:
        """End a process as it is."""
        store = self.stores.pop(name, None)
        calls = self.calls.pop(name, Calls())
        if store is not None:
            calls.is_dead = True
            with suppress(Killed):
                store._touched.clear()
                store.close()

    # ------------------------------------------------------------ rules

    @rule(
        name=st.sampled_from(sorted(NAMES)),
        operation=OPERATIONS,
        faults=st.lists(FAULTS, max_size=2),
        other=st.sampled_from(sorted(NAMES)),
        another=OPERATIONS,
        retries=st.booleans(),
    )
    def operate(
        self,
        name: str,
        operation: Operation,
        faults: Sequence[Fault],
        other: str,
        another: Operation,
        retries: bool,
    ) -> None:
        """Let a machine do something, and another one something else meanwhile."""
        interrupting, problems = list[Operation](), list[BaseException]()

        def interrupt() -> None:
            interrupting.append(another)
            try:
                another.perform(self.stores[other])
            except BaseException as error:
                problems.append(error)

        is_alone = NAMES[other] == NAMES[name]  # a process of the same computer would wait for this one
        if not is_alone:
            self._open(other)
        if operation.kind == "restart":
            self._close(name)
        elif operation.kind == "start anew":
            self._start_anew(name)
        else:
            self._open(name)
        calls = self.calls.setdefault(name, Calls())
        calls.begin(faults, (lambda: None) if is_alone else interrupt)
        is_undisturbed, failed = not faults, False
        with patch.object(shared, "_STALE_S", -5.0 if is_undisturbed else math.inf):
            try:
                operation.perform(self._open(name))
            except (StoreError, Killed) as error:
                calls.happened.append(f"{error!r}")
                failed = True
                if isinstance(error, StoreError) and calls.fired <= {"another before", "another after", "twice"}:
                    raise
        note(f"  {name}: {operation}, {faults}; {calls.happened}, meanwhile {other}: {interrupting}")
        for problem in problems:
            raise problem
        if calls.is_dead:
            failed = True
            self._close(name)
        else:
            calls.begin([], lambda: None)
        if retries and failed:
            operation.perform(self._open(name))
        for late in calls.late:
            with suppress(StoreError):
                late()
        calls.late.clear()
        self._observe(operation, interrupting, failed, retries)
        if is_undisturbed and operation.kind.startswith("gc"):
            self._check_collected()

    # ------------------------------------------------------------ what must hold

    def _observe(self, operation: Operation, interrupting: Sequence[Operation], failed: bool, retries: bool) -> None:
        """Compare the record with the dictionary, which then follows it."""
        # `warm` records what it holds until its chunks are there
        effects = operation.effects() * (2 if operation.kind == "warm" else 1)
        again = operation.effects() if failed and retries else []
        nested = [effect for each in interrupting for effect in each.effects()]
        possible: list[Held] = []
        for end in range(len(effects) + 1) if failed else [len(effects)]:
            for at in range(end + 1):
                held = self.held
                for effect in [*effects[:at], *nested, *effects[at:end], *again]:
                    held = effect(held)
                possible.append(held)
        self.observer.sync()
        held = self._held(self.observer)
        stored = {row.key for row in self.observer._manifest.rows()}

        def documents(held: Held) -> Held:
            return {row: key for row, key in held.items() if row[1] != ON_REQUEST}

        assert documents(held) in map(documents, possible), f"documents hold {held} instead of one of {possible}"
        # each text of requests is released or not, and `gc` also releases those whose chunks are missing
        is_collected = any(each.kind.startswith("gc") for each in (operation, *interrupting))
        missing = {None} if is_collected else set[str | None]()
        for row in {row for each in (held, *possible) for row in each if row[1] == ON_REQUEST}:
            keys = {each.get(row) for each in possible}
            keys |= missing if not {*keys} <= stored & self.stored else set()
            assert held.get(row) in keys, f"requests hold {held} instead of one of {possible}"
        before, self.held, self.stored = self.held, held, stored
        self.unsettled &= held.keys()
        for each in sorted((operation, *interrupting), key=lambda each: each.kind == "remove"):  # as if at last
            rows = {row for row, key in held.items() if key in each.keys}
            if each.kind == "remove":
                self.unsettled |= rows
            elif each.kind == "warm":
                rows = {row for row in rows if row[:2] == (each.namespace, each.document)}
                self.unsettled = self.unsettled | rows if failed and not retries else self.unsettled - rows
        lost = {row: key for row, key in held.items() if row not in self.unsettled and key not in stored}
        assert not lost, f"documents have lost {lost}"

        if failed:
            self.loose |= {*operation.keys, *before.values()}
        self.loose -= {*held.values()}
        kept = stored - {*held.values()} - self.loose
        assert not kept, f"nothing holds {[text(CHUNKS[key]) for key in kept]}"
        assert self.observer._manifest.counter("damaged") == 0
        self._check_counts(self.observer, stored)
        type(self).done += 1

    def _held(self, store: Any) -> Held:
        return {tuple(row[:4]): row[4] for row in contents(store)["holders"]}

    def _check_counts(self, store: Any, stored: set[str]) -> None:
        """A synced machine counts what is stored, and what documents hold."""
        stats = store.stats()
        assert (stats.chunks, stats.bytes) == (len(stored), sum(BYTES[key] for key in stored))
        for namespace in NAMESPACES:
            chunks = [CHUNKS[key] for key in stored if CHUNKS[key].namespace == namespace]
            rows = {row: key for row, key in self.held.items() if row[0] == namespace and row[1] != ON_REQUEST}
            documents: dict[str, set[str]] = {}
            for row, key in rows.items():
                documents.setdefault(row[1], set()).add(key)
            assert store.documents(namespace=namespace) == {name: sorted(documents[name]) for name in sorted(documents)}
            (part,) = [each for each in stats.namespaces if each.namespace == namespace] or [None]
            counts = (part.texts, part.chunks, part.tokens, part.documents) if part else (0, 0, 0, 0)
            assert counts == (len({*map(text, chunks)}), len(chunks), 4 * len(chunks), len(documents))
        for name, state in store.look_up([*{text(made) for made in CHUNKS.values()}]).items():
            assert state.variants == {k: len(CHUNKS[k].context) for k in stored if text(CHUNKS[k]) == name}
            assert set(state.sources) == {row[3] for row in self.held if row[2] == name}

    def _check_collected(self) -> None:
        """After a `gc` that nothing disturbed, only what is held is there, and no id of another text."""
        stored = {row.key: row for row in self.observer._manifest.rows()}
        assert stored.keys() <= {*self.held.values()}, "gc leaves chunks that nothing holds"
        self.loose.clear()
        remote = self.observer._remote._remote
        assert {name.rpartition("/")[2] for name in names_in(remote, "chunks/")} == {
            row.file for row in stored.values()
        }
        keys = {row.text_key for row in stored.values()}
        named = [*names_in(remote, "bases/"), *names_in(remote, "changes/")]
        head = self.observer._log._head()
        assert named == [log._base(head.base)], "gc leaves changes and former bases"
        assert head.changes == []
        base = Manifest(self.folder / "base")
        base.restore(log._unpacked(*remote.read(named), "base"))
        assert set(base._all("SELECT text FROM texts")) == {(key,) for key in keys}, "the base has ids of other texts"
        base.close()

    def _converge(self) -> None:
        """All machines that sync are the same, serve what is stored, and keep nothing else."""
        self._start_anew("new")
        self._open("new")
        wanted = None
        for name, store in self.stores.items():
            store.sync()
            state = contents(store)
            wanted = wanted or state
            for kind, content in state.items():
                assert content == wanted[kind], f"{name} has {kind} {content} instead of {wanted[kind]}"
            stored = {row[0] for row in state["scores"]}
            self._check_counts(store, stored)
            copies = set(store._local.keys())
            assert copies <= stored, f"{name} keeps KV of {[text(CHUNKS[key]) for key in copies - stored]}"
            assert {key for key in CHUNKS if ask(store, key)} == stored
