"""Why a prompt was reused as it was: what stands where in it, and why a chunk that was retrieved was not found.

What a chain did to a chunk is found out by trying: the chunk is escaped, put on one line, written in small letters as
chains do it, and the way whose result stands in the prompt is the one.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape, unescape
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvrag.backend.transformers import Tokenizer
from kvrag.errors import KvragError, SettingError, StoreError
from kvrag.fingerprint import Fingerprint
from kvrag.inspect.explanation import Explanation, Finding, Kind, Reason, Stretch
from kvrag.reuse.match import GRAM, match
from kvrag.reuse.segment import Segment
from kvrag.store import Entry, FileStore, KVStore, other_stores
from kvrag.types import BlendReport, Run

logger = logging.getLogger("kvrag")

Find = Callable[[Sequence[int], int], list[tuple[Run, NDArray[np.uint32]]]]
"""Token ids and the shortest run -> the runs of stored chunks in them, each with the ids of its chunk."""

_LONG = 512  # tokens of a prompt that looks as if something had been retrieved for it
_LITTLE = 0.1  # of it reused
_STRETCH = 64  # tokens of a fresh stretch that may be a chunk
_CANDIDATES = 16  # chunks that it may come from: what more of them share with it is boilerplate
_EDGES = 4  # tokens at a chunk's ends merge with what stands beside it
_PIECE = 32  # characters of a chunk that are looked for at once
_RECOGNISED, _VERBATIM = 0.3, 0.95  # shares of a chunk's pieces


@dataclass(frozen=True, slots=True)
class Call:
    """A prompt that was prefilled.

    Attributes:
        ids: (T,) the prompt.
        selected: (S,) reused positions that were recomputed.
        report: About it.
    """

    ids: Tensor
    selected: Tensor
    report: BlendReport


def explain(
    tokenizer: Tokenizer,
    store: KVStore,
    fingerprint: Fingerprint,
    find: Find,
    call: Call,
    min_run: int,
    retrieved: Sequence[str] | None = None,
    namespace: str = "",
) -> Explanation:
    """Say what was reused and why it was not more.

    Args:
        retrieved: What a retriever returned for this prompt. Without it, the stored chunks that can be recognised in
            the prompt are explained, and the stretches that no stored chunk has.

    Raises:
        SettingError: `retrieved` is not a list of strings.
    """
    if isinstance(retrieved, str) or not all(isinstance(text, str) for text in retrieved or ()):
        raise SettingError("retrieved must be a list of strings: the texts of the chunks")
    documents: dict[str, tuple[str, ...]] = {}
    for name, keys in store.documents(namespace=namespace).items():
        for key in keys:
            documents[key] = (*documents.get(key, ()), name)
    prompt, elsewhere = _Prompt(tokenizer, find, call, min_run), _Elsewhere(store, fingerprint, min_run, namespace)
    if retrieved is None:
        found = [*prompt.recognised(), *prompt.unknown(elsewhere)]
    else:
        found = [prompt.judge(text, elsewhere) for text in retrieved]
    found = [replace(chunk, documents=documents.get(chunk.key, ())) for chunk in found]
    found.sort(key=lambda chunk: chunk.reason == "reused")
    stretches = tuple(_stretches(tokenizer, call, documents))
    return Explanation(tuple(_summary(call.report, store)), stretches, tuple(found), call.report)


class Watch:
    """Looks at answers and says once, in the log, that reuse does not work as it seems to be meant. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_warned = False
        self._misses = 0

    def look(self, tokenizer: Tokenizer, store: KVStore, find: Find, call: Call, min_run: int) -> None:
        """Look at an answered prompt.

        A long one of which little was reused is worth the warning if a changed chunk is recognised in it. If none is,
        it may be one without retrieved text, as agents begin with: two in a row are worth it.
        """
        report = call.report
        if self._has_warned or report.policy == "full" or report.prompt_tokens < _LONG:
            return
        if report.reused_tokens >= _LITTLE * report.prompt_tokens:
            self._misses = 0
            return
        try:
            changed = [chunk for chunk in _Prompt(tokenizer, find, call, min_run).recognised() if chunk.detail]
            # not its text, which is nothing for logs
            said = [f"chunk {chunk.key[:8]} is {chunk.reason}, {chunk.detail}" for chunk in changed[:1]]
            reason = said[0] if said else _nothing(store)
        except KvragError:
            return  # the store was closed or has become unreadable: that is not what this answer is about
        with self._lock:
            self._misses += 1
            if self._has_warned or not (changed or self._misses > 1):
                return
            self._has_warned = True
        logger.warning(
            "%d of %d tokens of a prompt were reused: %s. `print(engine.explain())`, or `explain()` of the LLM class, "
            "shows the last prompt part by part, `kvrag explain PROMPT` any other. (This is said once.)",
            report.reused_tokens,
            report.prompt_tokens,
            reason,
        )


def _nothing(store: KVStore) -> str:
    stats = store.stats()
    if not stats.chunks:
        return f"the store {stats.path} is empty, nothing was warmed for this model and codec"
    return f"none of the {stats.chunks} warmed chunks stands in it, warm texts as they are pasted"


# -------------------------------------------------------------------- the prompt


def _summary(report: BlendReport, store: KVStore) -> Iterator[str]:
    prompt, computed = report.prompt_tokens, report.fresh_tokens + report.recomputed_tokens
    kept = f", {report.conversation_tokens} of them from the conversation" if report.conversation_tokens else ""
    yield (
        f"{prompt} prompt tokens: {report.reused_tokens} reused{kept}, {report.recomputed_tokens} of them recomputed "
        f"(policy {report.policy}, ratio {report.ratio:.2f}), {report.fresh_tokens} fresh"
    )
    if computed < prompt:
        yield f"{computed / prompt:.0%} of the tokens were computed: at best {prompt / computed:.1f} times sooner"
    seconds = {"matching": report.match_s, "loading": report.load_s, "stitching": report.stitch_s}
    seconds |= {"selecting": report.select_s, "computing": report.blend_s}
    yield "milliseconds: " + ", ".join(f"{name} {value * 1000:.0f}" for name, value in seconds.items())
    yield from filter(None, [report.decision, *report.notes])
    stats = store.stats()
    if not stats.chunks:
        yield _nothing(store)


def _stretches(tokenizer: Tokenizer, call: Call, documents: dict[str, tuple[str, ...]]) -> Iterator[Stretch]:
    ids: list[int] = call.ids.tolist()
    again = np.zeros(len(ids), bool)
    again[call.selected.numpy()] = True
    parts = list(_parts(len(ids), call.report))
    starts = {start for start, *_ in parts} | set((np.flatnonzero(np.diff(again)) + 1).tolist())
    cuts = sorted(starts | {len(ids)})
    texts = dict(zip(cuts, _texts(tokenizer, ids, cuts), strict=False))
    for start, stop, kind, run in parts:
        pieces = tuple((texts[cut], bool(again[cut])) for cut in cuts if start <= cut < stop)
        recomputed = int(again[start:stop].sum())
        if run is None:
            yield Stretch(start, stop, kind, pieces, recomputed)
        else:
            yield Stretch(start, stop, kind, pieces, recomputed, run.key, run.offset, documents.get(run.key, ()))


def _parts(prompt: int, report: BlendReport) -> Iterator[tuple[int, int, Kind, Run | None]]:
    """The whole prompt as (start, stop, kind, run), in order."""
    end = min(report.conversation_tokens, prompt - 1)
    if end:
        yield 0, end, "conversation", None
    for run in report.runs:
        if end < run.start:
            yield end, run.start, "fresh", None
        end = min(run.stop, prompt - 1)  # the last token is never reused
        yield run.start, end, "reused", run
    yield end, prompt, "fresh", None


def _texts(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> Iterator[str]:
    """Text between each cut and the next. A character whose tokens lie on both sides is on the later one."""
    shown = cuts[0]
    for _, stop in pairwise(cuts):
        before = ids[max(shown - _EDGES, 0) : shown]  # some tokenizers drop the space at the head of what they decode
        known = tokenizer.decode(before, control_tokens=True)
        text = tokenizer.decode([*before, *ids[shown:stop]], control_tokens=True)[len(known) :]
        if text.endswith("\ufffd") and stop < cuts[-1]:
            yield ""
        else:
            yield text
            shown = stop


# -------------------------------------------------------------------- its chunks


class _Prompt:
    """One prompt, asked about chunks."""

    def __init__(self, tokenizer: Tokenizer, find: Find, call: Call, min_run: int) -> None:
        self._tokenizer, self._find, self._report, self._min_run = tokenizer, find, call.report, min_run
        self._ids: list[int] = call.ids.tolist()
        self._reused = np.zeros(len(self._ids), bool)
        for _, stop, kind, run in _parts(len(self._ids), call.report):
            if kind != "fresh":
                self._reused[run.start if run else 0 : stop] = True
        self._explained: set[int] = set()  # stretches, by where they begin

    @cached_property
    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, control_tokens=True)

    @cached_property
    def _stored(self) -> list[tuple[Run, NDArray[np.uint32]]]:
        return self._find(self._ids, self._min_run)

    def recognised(self) -> list[Finding]:
        """The stored chunks that stand in the prompt, whole, in part or changed."""
        chunks = {run.key: ids for run, ids in self._stored}
        for start, stop in self._unmatched():
            here = self._changed(start, stop)
            chunks |= here
            if any(self._way(self._tokenizer.decode(ids.tolist())) for ids in here.values()):
                self._explained.add(start)
        found = (self._recognise(key, ids) for key, ids in chunks.items())
        return [finding for finding in found if finding]

    def _unmatched(self) -> list[tuple[int, int]]:
        """Long stretches that no stored chunk has as they are."""
        matched = self._reused.copy()
        for run, _ in self._stored:
            matched[run.start : run.stop] = True
        borders = np.flatnonzero(np.diff(np.concatenate([[True], matched, [True]]).astype(int))).tolist()
        return [pair for pair in zip(borders[::2], borders[1::2], strict=True) if pair[1] - pair[0] >= _STRETCH]

    def _changed(self, start: int, stop: int) -> dict[str, NDArray[np.uint32]]:
        """Chunks that a stretch may come from."""
        text = self._tokenizer.decode(self._ids[start:stop])
        found = self._find(self._ids[start:stop], GRAM)
        for plain in {unescape(text), _unquoted(text)} - {text}:
            found += self._find(self._tokenizer.encode(plain), self._min_run)
        found.sort(key=lambda pair: -len(pair[0]))
        return {run.key: ids for run, ids in found[:_CANDIDATES]}

    def _recognise(self, key: str, ids: NDArray[np.uint32]) -> Finding | None:
        """None if so little of it is in the prompt that it is chance, or if another chunk has the same text."""
        text = self._tokenizer.decode(ids.tolist())
        reused = sum(len(run) for run in self._report.runs if run.key == key)
        missed = sum(int((~self._reused[run.start : run.stop]).sum()) for run, _ in self._stored if run.key == key)
        why: tuple[Reason, str] | None = None
        if missed > _EDGES:
            why = self._passed_over()
        elif len(ids) - reused > _EDGES:
            why = self._way(text)
        if why is None and reused:
            why = "reused", ""
        return why and Finding(text, len(ids), reused, *why, key)

    def _passed_over(self) -> tuple[Reason, str]:
        """Why a chunk is not reused that the prompt has as it is stored."""
        if self._report.policy == "full":
            return "full prefill", "all was computed, since that was asked for or predicted to be sooner"
        return "not stored then", "it was warmed after this prompt was answered, or could not be read"

    def unknown(self, elsewhere: _Elsewhere) -> Iterator[Finding]:
        """The long stretches in which no stored chunk was recognised."""
        for start, stop in self._unmatched():
            if start not in self._explained:
                ids = self._ids[start:stop]
                why = elsewhere.look(ids) or (
                    "never warmed",
                    f"no stored chunk has this: if it was retrieved, warm it as it stands here{elsewhere.not_searched}",
                )
                yield Finding(self._tokenizer.decode(ids, control_tokens=True), len(ids), 0, *why)

    def judge(self, text: str, elsewhere: _Elsewhere) -> Finding:
        """What became of a retrieved text."""
        ids = self._tokenizer.encode(text)
        found = self._find(ids, self._min_run)
        key = next((run.key for run, chunk in found if len(chunk) == len(ids) == len(run)), "")
        # a splitter may have made several chunks of it
        is_stored = bool(key) or sum(len(run) for run, _ in found) >= _VERBATIM * len(ids)
        reused = self._reused_of(ids)
        why = self._why(text, ids, reused, is_stored)
        if why[0] == "never warmed":
            why = elsewhere.look(ids) or (why[0], why[1] + elsewhere.not_searched)
        return Finding(text, len(ids), reused, *why, key)

    def _reused_of(self, ids: list[int]) -> int:
        """How many tokens of a text the prompt has and reused, of whatever chunk."""
        segment = Segment.of([Entry(1, "", "", np.asarray(ids, np.uint32))])
        runs = match([segment], self._ids, min(self._min_run, max(len(ids), GRAM)))
        return min(sum(int(self._reused[run.start : run.stop].sum()) for run in runs), len(ids))

    def _why(self, text: str, ids: list[int], reused: int, is_stored: bool) -> tuple[Reason, str]:
        if len(ids) < self._min_run:
            return "too short", f"chunks under {self._min_run} tokens are computed with the rest of the prompt"
        if len(ids) - reused <= _EDGES:
            return "reused", ""
        way = self._way(text)
        if not way and not any(piece in self._text for piece in _pieces(text)):
            return "not in the prompt", "the chain left it out or says it in other words, such as a summary's"
        if not is_stored:
            part = f"{reused} of its tokens stand in stored chunks, " if reused else ""
            return "never warmed", f"{part}warm it as it is pasted, with its metadata if the prompt has them"
        if not way and reused:
            return "reused", ""  # but for some characters, or as far as it is there
        return way or self._passed_over()

    def _way(self, text: str) -> tuple[Reason, str] | None:
        """What was done to a chunk that stands in the prompt changed; None if nothing, or if it does not."""
        pieces = _pieces(text)
        plain = [piece in self._text for piece in pieces]
        shares = [(sum(plain) / len(pieces), 0)]
        for number, (_, _, on_chunk, on_prompt) in enumerate(_WAYS, 1):
            prompt = on_prompt(self._text)
            shares.append((sum(on_chunk(piece) in prompt for piece in pieces) / len(pieces), -number))
        (share, number), as_it_is = max(shares), shares[0][0]  # of equals the first
        if share < _RECOGNISED or as_it_is > _VERBATIM:
            return None
        if number:
            reason, detail, *_ = _WAYS[-number - 1]
            return reason, detail if share > _VERBATIM else f"{detail}; about {share:.0%} of it is there"
        first, last = plain.index(True), len(plain) - plain[::-1].index(True)
        if all(plain[first:last]):
            return "cut", f"about {share:.0%} of it stands in the prompt, the rest was cut off"
        return "rewritten", f"about {share:.0%} of it stands in the prompt, with other words between"


def _pieces(text: str) -> list[str]:
    """Of equal length, the rest at the end left out unless it is all there is."""
    text = text.strip()
    return [text[start : start + _PIECE] for start in range(0, len(text) - _PIECE + 1, _PIECE)] or [text]


def _unquoted(text: str) -> str:
    """Text out of a JSON or Python string."""
    meant = {"n": "\n", "r": "\r", "t": "\t"}

    def plain(found: re.Match[str]) -> str:
        code: str = found[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else meant.get(code, code)

    text = re.sub(r"\\(u[0-9a-fA-F]{4}|.)", plain, text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # characters that JSON wrote in halves


def _as_it_is(text: str) -> str:
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _small(text: str) -> str:
    return _one_line(text).lower()


_ESCAPED = "what stands between the escaped characters is reused; paste it as it is, or warm it escaped as well"
_HTML, _JSON = f"for HTML or XML: {_ESCAPED}", f"as JSON: {_ESCAPED}"
_REPR = f"by Python's repr, as of a list or of documents that were not joined to one text: {_ESCAPED}"

# what is said of it, what was done to the chunk, what makes the prompt comparable
_WAYS: list[tuple[Reason, str, Callable[[str], str], Callable[[str], str]]] = [
    ("escaped", _HTML, lambda text: escape(text, quote=False), _as_it_is),
    ("escaped", _HTML, lambda text: escape(text, quote=False).replace('"', "&quot;"), _as_it_is),
    ("escaped", _HTML, escape, _as_it_is),
    ("escaped", _HTML, lambda text: escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;"), _as_it_is),
    ("escaped", _JSON, lambda text: json.dumps(text, ensure_ascii=False)[1:-1], _as_it_is),
    ("escaped", _JSON, lambda text: json.dumps(text)[1:-1], _as_it_is),
    ("escaped", _REPR, lambda text: repr(text)[1:-1], _as_it_is),
    ("escaped", _REPR, lambda text: repr('"' + text)[2:-1], _as_it_is),  # as a piece of a chunk that has both quotes
    ("rewritten", "its white space is another, warm it as it is pasted", _one_line, _one_line),
    ("rewritten", "capital letters are small or the other way round, warm it as it is pasted", _small, _small),
]


# -------------------------------------------------------------------- other stores


class _Elsewhere:
    """The stores around ours, which may be of other models, dtypes or codecs. Looked into when they are first asked."""

    def __init__(self, store: KVStore, fingerprint: Fingerprint, min_run: int, namespace: str) -> None:
        self._namespace = namespace
        self._path = store.path if isinstance(store, FileStore) else None
        self._mine, self._min_run = fingerprint.parts(), min_run
        self._strange: list[Path] = []

    @cached_property
    def _stores(self) -> list[tuple[str, Segment]]:
        """Those whose tokenizer is ours: what they are, and their chunks."""
        found = []
        for other in other_stores(self._path) if self._path else ():
            try:
                if other.parts.get("tokenizer") != self._mine["tokenizer"]:
                    self._strange.append(other.path)
                    continue
                segment = Segment.of(other.entries())
            except StoreError as error:
                logger.warning("%s is left out of the search: %s", other.path, error)
                continue
            different = [name for name in self._mine if name != "model" and self._mine[name] != other.parts.get(name)]
            settings = ", ".join(f"{name} {_short(other.parts, name)}" for name in different)
            how = f"with {settings}" if settings else "as it is loaded now"
            found.append((f"{other.path}, for {_short(other.parts, 'model')} {how}", segment))
        return found

    @property
    def not_searched(self) -> str:
        """A clause about stores that could not be searched, or ""."""
        if not self._strange:
            return ""
        return f" (not searched, another tokenizer: {', '.join(map(str, self._strange))})"

    def look(self, ids: Sequence[int]) -> tuple[Reason, str] | None:
        """Where else at least half of a text was warmed."""
        for name, segment in self._stores:
            if 2 * sum(map(len, match([segment], ids, self._min_run, self._namespace))) >= len(ids):
                return "warmed elsewhere", f"in {name}: open that store as it was made, or warm it here too"
        return None


def _short(parts: dict[str, str], name: str) -> str:
    value = str(json.loads(parts.get(name, '"?"')))
    return value if name == "model" or len(value) <= 12 else f"{value[:8]}..."
