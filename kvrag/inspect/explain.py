"""Explain what was reused of a prompt, and why a chunk was not.

Every text in question gets one verdict by the same rules: a retrieved text, a stored chunk that is recognised in the
prompt, or a stretch of the prompt that is in no stored chunk. What chains do to chunks before they paste them, such as
escaping, is found by undoing it in the prompt.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from html import unescape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvrag.backend.transformers import Tokenizer
from kvrag.config import check_list
from kvrag.errors import SettingError, StoreError
from kvrag.fingerprint import Fingerprint, text_key
from kvrag.index.match import match
from kvrag.index.segment import GRAM, Segment
from kvrag.inspect.explanation import Explanation, Finding, Kind, Reason, Stretch, summary_of
from kvrag.reuse.request_state import RequestState
from kvrag.store import Entry, FileStore, KVStore, entries_of, other_stores, read_owner
from kvrag.types import BlendReport, Run

logger = logging.getLogger("kvrag")

Ids = NDArray[np.uint32]
Find = Callable[[Sequence[int], int], list[tuple[Run, Ids]]]
"""Function of token ids and the shortest run; returns the runs of stored chunks, each with the ids of its chunk."""

_STRETCH = 64  # tokens of a stretch that may be a chunk
_CANDIDATES = 16  # chunks that a stretch may come from; text shared by more is boilerplate
_EDGES = 4  # tokens at a chunk's ends merge with neighbouring text
_PIECE = 32  # characters of a chunk that are looked for at once
_RECOGNISED, _VERBATIM = 0.3, 0.95  # shares of a chunk's pieces
_BEGINNING = (
    "the beginning of the prompt: KV of a system message and tools is kept without warming; "
    "warm what it has of a document, as it is pasted"
)
_UNESCAPED = "only text between the escaped characters is reused: paste it unescaped, or warm the escaped text too"


def explain(
    tokenizer: Tokenizer,
    store: KVStore,
    fingerprint: Fingerprint,
    find: Find,
    answered: RequestState,
    min_run: int,
    retrieved: Sequence[str] | None = None,
) -> Explanation:
    """Explain what was reused and why not more. Writes nothing.

    Args:
        find: See `Find`; must search the prompt's namespace.
        retrieved: Texts that a retriever returned for this prompt. None = explain the stored chunks recognised in the
            prompt, and the stretches that are in no stored chunk.

    Raises:
        SettingError: `retrieved` is not a list of strings.
    """
    texts = () if retrieved is None else check_list("retrieved", retrieved)
    if not all(isinstance(text, str) for text in texts):
        raise SettingError("retrieved must be a list of strings: the texts of the chunks")
    namespace, prompt = answered.namespace, _Prompt(tokenizer, find, answered, min_run)
    findings = list(prompt.recognised() if retrieved is None else map(prompt.judge, texts))
    missing = {number: one for number, one in enumerate(findings) if one.reason == "never warmed"}
    for name, segment in _others(store, fingerprint) if missing else ():
        for number, finding in list(missing.items()):
            ids = tokenizer.encode(finding.text)
            if 2 * sum(map(len, match([segment], ids, min_run, namespace))) >= len(ids):
                detail = f"in {name}: open that store with its settings, or warm the text here too"
                findings[number] = replace(finding, reason="warmed elsewhere", detail=detail)
                del missing[number]
    documents = _documents(store, prompt.chunks, namespace)
    findings = [replace(finding, documents=documents.get(finding.key, ())) for finding in findings]
    findings.sort(key=lambda finding: finding.reason == "reused")
    summary = list(summary_of(answered.report))
    if _is_empty(store, namespace) or not (findings or answered.report.reused_tokens):
        summary.append(_nothing(store, answered, find, min_run))
    stretches = tuple(_stretches(tokenizer, answered, documents))
    return Explanation(tuple(summary), stretches, tuple(findings), answered.report)


def why_little(
    tokenizer: Tokenizer, store: KVStore, find: Find, answered: RequestState, min_run: int
) -> tuple[str, bool]:
    """Return why little of a prompt was reused, and whether that is because a changed chunk is in it."""
    for chunk in _Prompt(tokenizer, find, answered, min_run).recognised():
        if chunk.key and chunk.detail:
            # without the chunk's text, which must not be logged
            return f"chunk {chunk.key[:8]} is {chunk.reason}, {chunk.detail}", True
    return _nothing(store, answered, find, min_run), False


def _nothing(store: KVStore, answered: RequestState, find: Find, min_run: int) -> str:
    """Return why no changed chunk was recognised in a prompt with little reuse."""
    if _is_empty(store, answered.namespace):
        where = f"the namespace {answered.namespace!r}" if answered.namespace else f"the store {store.stats().path}"
        return f"{where} is empty: warm texts for this model and codec"
    longest = max((len(run) for run, _ in find(answered.ids.tolist(), GRAM)), default=0)
    if 0 < longest < min_run:
        return f"at most {longest} of its tokens in a row are in a warmed chunk, and {min_run} are needed"
    part = "the rest of it is in no warmed chunk" if answered.report.reused_tokens else "it contains no warmed chunk"
    return f"{part}: warm texts as they are pasted"


def _is_empty(store: KVStore, namespace: str) -> bool:
    return not any(share.chunks for share in store.stats().namespaces if share.namespace == namespace)


def _documents(store: KVStore, chunks: dict[str, Ids], namespace: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the documents that hold each chunk's text, in any variant."""
    held = [(name, set(keys)) for name, keys in store.documents(namespace=namespace).items()]
    texts = {key: text_key(namespace, ids.tolist()) for key, ids in chunks.items()}
    states = store.look_up(list(set(texts.values())))
    variants = {key: {*states[text].variants, key} for key, text in texts.items()}
    return {key: tuple(sorted(name for name, keys in held if keys & same)) for key, same in variants.items()}


def _others(store: KVStore, fingerprint: Fingerprint) -> Iterator[tuple[str, Segment]]:
    """Yield the texts of the stores nearby for another model, dtype or codec, each with a description."""
    mine = fingerprint.parts()
    for path in other_stores(store.path) if isinstance(store, FileStore) else ():
        try:
            parts = read_owner(path)
            if parts.get("tokenizer") != mine["tokenizer"]:
                continue
            theirs = {name: str(json.loads(parts[name]) or "none") for name in mine}
            different = [name for name in mine if name != "model" and mine[name] != parts[name]]
            settings = [theirs["model"], *(f"{name} {theirs[name]:.12}" for name in different)]
            yield f"{path}, for {', '.join(settings)}", Segment.of(entries_of(path))
        except StoreError as error:
            logger.warning("%s is skipped: %s", path, error)


# -------------------------------------------------------------------- the prompt


def _stretches(
    tokenizer: Tokenizer, answered: RequestState, documents: dict[str, tuple[str, ...]]
) -> Iterator[Stretch]:
    ids: list[int] = answered.ids.tolist()
    recomputed = np.zeros(len(ids), bool)
    recomputed[answered.recomputed.numpy()] = True
    parts = list(_parts(len(ids), answered.report))
    cuts = sorted({start for start, *_ in parts} | {*(np.flatnonzero(np.diff(recomputed)) + 1).tolist(), len(ids)})
    texts = dict(zip(cuts, _texts(tokenizer, ids, cuts), strict=False))
    for start, stop, kind, run in parts:
        pieces = tuple((texts[cut], bool(recomputed[cut])) for cut in cuts if start <= cut < stop)
        chunk = (run.key, run.offset, documents.get(run.key, ())) if run else ()
        yield Stretch(start, stop, kind, pieces, int(recomputed[start:stop].sum()), *chunk)


def _parts(prompt: int, report: BlendReport) -> Iterator[tuple[int, int, Kind, Run | None]]:
    """Yield the whole prompt as (start, stop, kind, run), in order."""
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
    """Yield the text between consecutive cuts. A character with tokens on both sides belongs to the later text."""
    shown = cuts[0]
    for _, stop in pairwise(cuts):
        before = ids[max(shown - _EDGES, 0) : shown]  # some tokenizers drop a leading space when decoding
        known = tokenizer.decode(before, control_tokens=True)
        text = tokenizer.decode([*before, *ids[shown:stop]], control_tokens=True)[len(known) :]
        if text.endswith("\ufffd") and stop < cuts[-1]:
            yield ""
        else:
            yield text
            shown = stop


# -------------------------------------------------------------------- its chunks


class _Prompt:
    """One prompt, compared with chunks.

    Attributes:
        chunks: Token ids of the stored chunks that are in the prompt, by key.
    """

    def __init__(self, tokenizer: Tokenizer, find: Find, answered: RequestState, min_run: int) -> None:
        self._tokenizer, self._find, self._report, self._min_run = tokenizer, find, answered.report, min_run
        self._ids: list[int] = answered.ids.tolist()
        self._reused, self._stored = np.zeros((2, len(self._ids)), bool)
        for start, stop, kind, _ in _parts(len(self._ids), answered.report):
            self._reused[start:stop] = kind != "fresh"
        self.chunks: dict[str, Ids] = {}
        for run, ids in find(self._ids, min_run):  # stored now
            self._stored[run.start : run.stop] = True
            self.chunks[run.key] = ids

    @cached_property
    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, control_tokens=True)

    @cached_property
    def _undone(self) -> list[tuple[str, Reason, str]]:
        """Return the prompt after undoing each change that chains make to chunks, with reason and advice."""
        return [
            (_folded(self._text), "rewritten", "its white space or its case differs: warm it as it is pasted"),
            (_folded(unescape(self._text)), "escaped", f"for HTML or XML: {_UNESCAPED}"),
            (
                _folded(unquoted(self._text)),
                "escaped",
                f"as JSON, or by Python's repr as when a list of documents is not joined into one text: {_UNESCAPED}",
            ),
        ]

    def recognised(self) -> Iterator[Finding]:
        """Yield findings about the chunks in the prompt, changed ones too, and then about its other long stretches."""
        strange = []
        for start, stop in self._unmatched():
            changed = False
            for key, ids in self._candidates(start, stop).items():
                if change := self._change(self._tokenizer.decode(ids.tolist())):
                    self.chunks[key] = ids
                    changed |= change[0] != "reused"
            if not changed and stop - start >= _STRETCH:
                strange.append((start, self._ids[start:stop]))
        for key, ids in self.chunks.items():
            yield self.judge(self._tokenizer.decode(ids.tolist()), ids.tolist(), key)
        for start, stretch in strange:
            finding = self.judge(self._tokenizer.decode(stretch, control_tokens=True), stretch)
            yield finding if start else replace(finding, detail=_BEGINNING)

    def _unmatched(self) -> list[tuple[int, int]]:
        """Return the stretches that are in no stored chunk unchanged."""
        matched = np.concatenate([[True], self._reused | self._stored, [True]])
        borders = np.flatnonzero(np.diff(matched)).tolist()
        return [pair for pair in zip(borders[::2], borders[1::2], strict=True) if pair[1] - pair[0] >= GRAM]

    def _candidates(self, start: int, stop: int) -> dict[str, Ids]:
        """Return the chunks that a stretch may come from."""
        text = self._tokenizer.decode(self._ids[start:stop])
        matches = self._find(self._ids[start:stop], GRAM)
        for plain in {unescape(text), unquoted(text)} - {text}:
            matches += self._find(self._tokenizer.encode(plain), self._min_run)
        matches.sort(key=lambda match: -len(match[0]))
        return {run.key: ids for run, ids in matches[:_CANDIDATES]}

    def judge(self, text: str, ids: list[int] | None = None, key: str = "") -> Finding:
        """Return the finding about a text.

        Args:
            ids: Its token ids, if they are known.
            key: Its key, if it is a stored chunk of the prompt.
        """
        ids = self._tokenizer.encode(text) if ids is None else ids
        if len(ids) < self._min_run:
            detail = f"chunks under {self._min_run} tokens are computed with the rest of the prompt"
            return Finding(text, len(ids), 0, "too short", detail)
        stored = [] if key else self._find(ids, self._min_run)
        for run, chunk in stored:
            if len(run) == len(chunk) == len(ids):
                key, self.chunks[run.key] = run.key, chunk
        # a splitter may have divided it into several chunks
        is_stored = bool(key) or sum(len(run) for run, _ in stored) >= _VERBATIM * len(ids)
        reused, missed, longest = self._compared(ids)
        reason, detail = self._why(text, len(ids) - reused, reused, missed, longest, is_stored)
        return Finding(text, len(ids), reused, reason, detail, key)

    def _compared(self, ids: list[int]) -> tuple[int, int, int]:
        """Return how many of a text's tokens were reused, how many others are in runs long enough to be reused, and the
        length of the longest run, 0 if none has `GRAM` tokens.
        """
        reused, found = np.zeros((2, len(ids)), bool)  # by its tokens: a prompt may contain a text twice
        longest = 0
        for run in match([Segment.of([Entry(1, "", "", np.asarray(ids, np.uint32))])], self._ids, GRAM):
            place, longest = slice(run.offset, run.offset + len(run)), max(longest, len(run))
            if len(run) >= self._min_run:
                reused[place] |= self._reused[run.start : run.stop]
                found[place] = True
        return int(reused.sum()), int((found & ~reused).sum()), longest

    def _why(self, text: str, rest: int, reused: int, missed: int, longest: int, is_stored: bool) -> tuple[Reason, str]:
        """Return why the `rest` of a text's tokens was not reused; see `_compared`."""
        if rest <= _EDGES:
            return "reused", ""
        change = self._change(text)
        if not change and not longest and not any(piece in self._text for piece in pieces(text)):
            return "not in the prompt", "the chain dropped or rephrased it, for example in a summary"
        if not is_stored:
            part = f"{reused} of its tokens are in stored chunks" if reused else "in no stored chunk"
            return "never warmed", f"{part}: warm it as it is pasted, with its metadata if the prompt has them"
        if missed > _EDGES and self._report.policy == "full":
            return "full prefill", "all tokens were computed, as requested or because it was predicted to be faster"
        if missed > _EDGES:
            return "not stored then", "it was warmed after this prompt, or could not be read"
        if change and change[0] != "reused":
            return change
        if reused:  # except for a few characters, or the part that is in the prompt
            return "reused", ""
        few = f"at most {longest or GRAM - 1} of its tokens are consecutive in the prompt, fewer than {self._min_run}"
        return "too short", f"{few}: paste it whole and unchanged, separated from the text around it"

    def _change(self, text: str) -> tuple[Reason, str] | None:
        """Return how a text in the prompt was changed, "reused" if it is whole; None if it is not recognised."""
        parts = pieces(text)
        verbatim = [part in self._text for part in parts]
        share = sum(verbatim) / len(parts)
        if share > _VERBATIM:
            return "reused", ""
        shares = [sum(_folded(part) in undone for part in parts) / len(parts) for undone, *_ in self._undone]
        largest = max(share, *shares)
        if largest < _RECOGNISED:
            return None
        if largest > share:
            _, reason, detail = self._undone[shares.index(largest)]
            return reason, detail if largest > _VERBATIM else f"{detail}; about {largest:.0%} of it is there"
        first, last = verbatim.index(True), len(verbatim) - verbatim[::-1].index(True)
        if all(verbatim[first:last]):
            return "cut", f"about {share:.0%} of it is in the prompt, the rest was cut off"
        return "rewritten", f"about {share:.0%} of it is in the prompt, with other words between"


def pieces(text: str) -> list[str]:
    """Return a text in pieces of equal length; a shorter rest is dropped unless it is the whole text."""
    text = text.strip()
    return [text[start : start + _PIECE] for start in range(0, len(text) - _PIECE + 1, _PIECE)] or [text]


def _folded(text: str) -> str:
    return " ".join(text.split()).lower()


def unquoted(text: str) -> str:
    """Return the text that a JSON or Python string literal contains."""
    controls = {"n": "\n", "r": "\r", "t": "\t"}

    def replacement(escape_sequence: re.Match[str]) -> str:
        code: str = escape_sequence[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else controls.get(code, code)

    text = re.sub(r"\\(u[0-9a-fA-F]{4}|.)", replacement, text)
    # JSON encodes some characters as two surrogates
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
