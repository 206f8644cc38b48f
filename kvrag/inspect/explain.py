"""Explain what was reused of a prompt, and why a retrieved chunk was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from html import unescape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvrag.backend.transformers import Tokenizer
from kvrag.errors import SettingError
from kvrag.fingerprint import Fingerprint, text_key
from kvrag.generate.history import Answered
from kvrag.inspect.changes import CHANGES, pieces, unquoted
from kvrag.inspect.elsewhere import Elsewhere, segment_of
from kvrag.inspect.explanation import Explanation, Finding, Kind, Reason, Stretch
from kvrag.reuse.match import match
from kvrag.reuse.segment import GRAM
from kvrag.store import KVStore
from kvrag.types import BlendReport, Run

Find = Callable[[Sequence[int], int], list[tuple[Run, NDArray[np.uint32]]]]
"""Function of token ids and the shortest run; returns the runs of stored chunks, each with the ids of its chunk."""

_STRETCH = 64  # tokens of a fresh stretch that may be a chunk
_CANDIDATES = 16  # candidate chunks of a stretch; text shared by more chunks is boilerplate
_EDGES = 4  # tokens at a chunk's ends merge with neighbouring text
_RECOGNISED, _VERBATIM = 0.3, 0.95  # shares of a chunk's pieces


def explain(
    tokenizer: Tokenizer,
    store: KVStore,
    fingerprint: Fingerprint,
    find: Find,
    answered: Answered,
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
    if isinstance(retrieved, str) or not all(isinstance(text, str) for text in retrieved or ()):
        raise SettingError("retrieved must be a list of strings: the texts of the chunks")
    namespace = answered.namespace
    prompt, elsewhere = _Prompt(tokenizer, find, answered, min_run), Elsewhere(store, fingerprint, min_run, namespace)
    documents = _documents(store, {run.key: text_key(namespace, ids.tolist()) for run, ids in prompt.stored}, namespace)
    if retrieved is None:
        findings = [*prompt.recognised(shortest=GRAM), *prompt.unrecognised(elsewhere)]
    else:
        findings = [prompt.judge(text, elsewhere) for text in retrieved]
    findings = [replace(finding, documents=documents.get(finding.key, ())) for finding in findings]
    findings.sort(key=lambda finding: finding.reason == "reused")
    summary = [*_summary(answered.report)]
    if _is_empty(store, namespace) or not (findings or answered.report.reused_tokens):
        summary.append(_nothing(store, answered))
    stretches = tuple(_stretches(tokenizer, answered, documents))
    return Explanation(tuple(summary), stretches, tuple(findings), answered.report)


def _documents(store: KVStore, text_keys: dict[str, str], namespace: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the documents that hold each chunk's text, in any variant.

    Args:
        text_keys: Text key by chunk key.
    """
    holders: dict[str, list[str]] = {}
    for name, keys in store.documents(namespace=namespace).items():
        for key in keys:
            holders.setdefault(key, []).append(name)
    states = store.look_up(list(set(text_keys.values())))
    variants = {chunk_key: {*states[text_key].variants, chunk_key} for chunk_key, text_key in text_keys.items()}
    return {
        chunk_key: tuple(sorted({name for key in keys for name in holders.get(key, ())}))
        for chunk_key, keys in variants.items()
    }


def why_little(tokenizer: Tokenizer, store: KVStore, find: Find, answered: Answered, min_run: int) -> tuple[str, bool]:
    """Return why little of a prompt was reused, and whether that is because a changed chunk is in it."""
    changed = (chunk for chunk in _Prompt(tokenizer, find, answered, min_run).recognised() if chunk.detail)
    if chunk := next(changed, None):
        # without the chunk's text, which must not be logged
        return f"chunk {chunk.key[:8]} is {chunk.reason}, {chunk.detail}", True
    return _nothing(store, answered), False


def _nothing(store: KVStore, answered: Answered) -> str:
    """Return why no changed chunk was recognised in a prompt with little reuse."""
    if _is_empty(store, answered.namespace):
        where = f"the namespace {answered.namespace!r}" if answered.namespace else f"the store {store.stats().path}"
        return f"{where} is empty: warm texts for this model and codec"
    part = "the rest of it is in no warmed chunk" if answered.report.reused_tokens else "it contains no warmed chunk"
    return f"{part}: warm texts as they are pasted"


def _is_empty(store: KVStore, namespace: str) -> bool:
    return not any(share.chunks for share in store.stats().namespaces if share.namespace == namespace)


# -------------------------------------------------------------------- the prompt


def _summary(report: BlendReport) -> Iterator[str]:
    prompt, computed = report.prompt_tokens, report.fresh_tokens + report.recomputed_tokens
    kept = f", {report.conversation_tokens} of them from the conversation" if report.conversation_tokens else ""
    yield (
        f"{prompt} prompt tokens: {report.reused_tokens} reused{kept}, {report.recomputed_tokens} of them recomputed "
        f"(policy {report.policy}, ratio {report.ratio:.2f}), {report.fresh_tokens} fresh"
    )
    if computed < prompt:
        yield f"{computed / prompt:.0%} of the tokens were computed: at most {prompt / computed:.1f}x faster"
    seconds = {"matching": report.match_s, "waiting for chunks": report.load_stall_s, "stitching": report.stitch_s}
    seconds |= {"selecting": report.select_s, "computing": report.blend_s}
    yield "milliseconds: " + ", ".join(f"{name} {value * 1000:.0f}" for name, value in seconds.items())
    yield from filter(None, [report.decision, *report.notes])


def _stretches(tokenizer: Tokenizer, answered: Answered, documents: dict[str, tuple[str, ...]]) -> Iterator[Stretch]:
    ids: list[int] = answered.ids.tolist()
    recomputed = np.zeros(len(ids), bool)
    recomputed[answered.selected.numpy()] = True
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
    """One prompt, compared with chunks."""

    def __init__(self, tokenizer: Tokenizer, find: Find, answered: Answered, min_run: int) -> None:
        self._tokenizer, self._find, self._report, self._min_run = tokenizer, find, answered.report, min_run
        self._ids: list[int] = answered.ids.tolist()
        self._reused = np.zeros(len(self._ids), bool)
        for _, stop, kind, run in _parts(len(self._ids), answered.report):
            if kind != "fresh":
                self._reused[run.start if run else 0 : stop] = True
        self._explained: set[int] = set()  # starts of explained stretches

    @cached_property
    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, control_tokens=True)

    @cached_property
    def stored(self) -> list[tuple[Run, NDArray[np.uint32]]]:
        """Return the runs of the chunks that are stored now, each with the ids of its chunk."""
        return self._find(self._ids, self._min_run)

    def recognised(self, shortest: int = _STRETCH) -> list[Finding]:
        """Return the stored chunks that are in the prompt, whole, partial or changed.

        Args:
            shortest: Length of the shortest unmatched stretch in which changed chunks are looked for.
        """
        chunks = {run.key: ids for run, ids in self.stored}
        for start, stop in self._unmatched(shortest):
            candidates = self._candidates(start, stop)
            chunks |= candidates
            if any(self._change(self._tokenizer.decode(ids.tolist())) for ids in candidates.values()):
                self._explained.add(start)
        findings = (self._recognise(key, ids) for key, ids in chunks.items())
        return [finding for finding in findings if finding]

    def _unmatched(self, shortest: int = _STRETCH) -> list[tuple[int, int]]:
        """Return the stretches of this length or more that are in no stored chunk unchanged."""
        matched = self._reused.copy()
        for run, _ in self.stored:
            matched[run.start : run.stop] = True
        borders = np.flatnonzero(np.diff(np.concatenate([[True], matched, [True]]).astype(int))).tolist()
        return [pair for pair in zip(borders[::2], borders[1::2], strict=True) if pair[1] - pair[0] >= shortest]

    def _candidates(self, start: int, stop: int) -> dict[str, NDArray[np.uint32]]:
        """Return the chunks that a stretch may come from."""
        text = self._tokenizer.decode(self._ids[start:stop])
        matches = self._find(self._ids[start:stop], GRAM)
        for plain in {unescape(text), unquoted(text)} - {text}:
            matches += self._find(self._tokenizer.encode(plain), self._min_run)
        matches.sort(key=lambda match: -len(match[0]))
        return {run.key: ids for run, ids in matches[:_CANDIDATES]}

    def _recognise(self, key: str, ids: NDArray[np.uint32]) -> Finding | None:
        """Return None if the match is small enough to be chance, or if another chunk has the same text."""
        text = self._tokenizer.decode(ids.tolist())
        # its tokens, not the prompt's: a prompt may contain a chunk twice
        runs = (run for run in self._report.runs if run.key == key)
        reused = len({place for run in runs for place in range(run.offset, run.offset + len(run))})
        missed = sum(int((~self._reused[run.start : run.stop]).sum()) for run, _ in self.stored if run.key == key)
        why: tuple[Reason, str] | None = None
        if missed > _EDGES:
            why = self._not_reused()
        elif len(ids) - reused > _EDGES:
            why = self._change(text)
        if why is None and reused:
            why = "reused", ""
        if why is None and all(piece in self._text for piece in pieces(text)):
            why = self._too_few(self._runs(ids.tolist()))
        return why and Finding(text, len(ids), reused, *why, key)

    def _not_reused(self) -> tuple[Reason, str]:
        """Return why a chunk is not reused although it is in the prompt unchanged."""
        if self._report.policy == "full":
            return "full prefill", "all tokens were computed, as requested or because it was predicted to be faster"
        return "not stored then", "it was warmed after this prompt, or could not be read"

    def _too_few(self, runs: Sequence[Run]) -> tuple[Reason, str] | None:
        """Return the reason if no run of a text is long enough to be reused."""
        if any(len(run) >= self._min_run for run in runs):
            return None
        consecutive = f"fewer than {self._min_run} of its tokens are consecutive in the prompt, too few to reuse"
        return "too short", f"{consecutive}: paste it whole and unchanged, separated from the text around it"

    def unrecognised(self, elsewhere: Elsewhere) -> Iterator[Finding]:
        """Yield the long stretches in which no stored chunk was recognised."""
        for start, stop in self._unmatched():
            if start not in self._explained:
                ids = self._ids[start:stop]
                detail = "in no stored chunk: if it was retrieved, warm it as it is pasted here"
                why = elsewhere.find(ids) or ("never warmed", detail + elsewhere.not_searched)
                yield Finding(self._tokenizer.decode(ids, control_tokens=True), len(ids), 0, *why)

    def judge(self, text: str, elsewhere: Elsewhere) -> Finding:
        """Return the finding for a retrieved text."""
        ids = self._tokenizer.encode(text)
        stored = self._find(ids, self._min_run)
        key = next((run.key for run, chunk in stored if len(chunk) == len(ids) == len(run)), "")
        # a splitter may have divided it into several chunks
        is_stored = bool(key) or sum(len(run) for run, _ in stored) >= _VERBATIM * len(ids)
        runs = self._runs(ids)
        reused = min(sum(int(self._reused[run.start : run.stop].sum()) for run in runs), len(ids))  # from any chunk
        why = self._why(text, ids, runs, reused, is_stored)
        if why[0] == "never warmed":
            why = elsewhere.find(ids) or (why[0], why[1] + elsewhere.not_searched)
        return Finding(text, len(ids), reused, *why, key)

    def _runs(self, ids: list[int]) -> list[Run]:
        """Return the runs of a text in the prompt."""
        return match([segment_of(ids)], self._ids, min(self._min_run, max(len(ids), GRAM)))

    def _why(self, text: str, ids: list[int], runs: Sequence[Run], reused: int, is_stored: bool) -> tuple[Reason, str]:
        if len(ids) < self._min_run:
            return "too short", f"chunks under {self._min_run} tokens are computed with the rest of the prompt"
        if len(ids) - reused <= _EDGES:
            return "reused", ""
        change = self._change(text)
        if not change and not any(piece in self._text for piece in pieces(text)):
            return "not in the prompt", "the chain dropped or rephrased it, for example in a summary"
        if not is_stored:
            part = f"{reused} of its tokens are in stored chunks: " if reused else ""
            return "never warmed", f"{part}warm it as it is pasted, with its metadata if the prompt has them"
        if not change and reused:
            return "reused", ""  # except for a few characters, or the part that is in the prompt
        return change or self._too_few(runs) or self._not_reused()

    def _change(self, text: str) -> tuple[Reason, str] | None:
        """Return how a chunk in the prompt was changed; None if it is unchanged or absent."""
        parts = pieces(text)
        verbatim = [part in self._text for part in parts]
        shares = [(sum(verbatim) / len(parts), 0)]
        for number, change in enumerate(CHANGES, 1):
            prompt = change.on_prompt(self._text)
            shares.append((sum(change.on_chunk(part) in prompt for part in parts) / len(parts), -number))
        share, number = max(shares)  # the first on a tie
        if share < _RECOGNISED or shares[0][0] > _VERBATIM:
            return None
        if number:
            reason, detail, *_ = CHANGES[-number - 1]
            return reason, detail if share > _VERBATIM else f"{detail}; about {share:.0%} of it is there"
        first, last = verbatim.index(True), len(verbatim) - verbatim[::-1].index(True)
        if all(verbatim[first:last]):
            return "cut", f"about {share:.0%} of it is in the prompt, the rest was cut off"
        return "rewritten", f"about {share:.0%} of it is in the prompt, with other words between"
