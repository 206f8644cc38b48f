"""Explain what was reused of a prompt, and why not more.

Each stored chunk that the prompt has token runs of gets a verdict, and each long stretch of the prompt that is in none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvrag.backend.transformers import Tokenizer
from kvrag.index.match import match
from kvrag.index.segment import GRAM, Segment
from kvrag.inspect.explanation import Explanation, Finding, Kind, Stretch, summary_of
from kvrag.request import Request
from kvrag.store import Entry, KVStore
from kvrag.store.values import text_key
from kvrag.types import BlendReport, Run

Ids = NDArray[np.uint32]
Find = Callable[[Sequence[int], int], list[tuple[Run, Ids]]]
"""Function of token ids and the shortest run; returns the runs of stored chunks, each with the ids of its chunk."""

_STRETCH = 64  # tokens of a stretch that may be a chunk
_EDGES = 4  # tokens at a chunk's ends merge with neighbouring text
_RECOGNISED = 0.3  # share of a chunk's tokens
_NEVER = "in no stored chunk: warm it as it is pasted, with its metadata if the prompt has them"
_BEGINNING = (
    "the beginning of the prompt: KV of a system message and tools is kept without warming; "
    "warm what it has of a document, as it is pasted"
)
_LATER = "it was warmed after this prompt, or could not be read: ask again, or run `kvrag store check`"
_ESCAPED = "the prompt has it escaped, as str() or JSON writes it: paste the text itself, such as `page_content`"
_ESCAPE = re.compile(r"""\\(u[0-9a-f]{4}|[nrt"'\\])""")
_CHARACTERS = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\"}


def explain(tokenizer: Tokenizer, store: KVStore, find: Find, answered: Request, min_run: int) -> Explanation:
    """Explain what was reused and why not more. Writes nothing.

    Args:
        find: See `Find`; must search the prompt's namespace.
    """
    prompt = _Prompt(tokenizer, find, answered, min_run)
    documents = _documents(store, prompt.chunks, answered.namespace)
    findings = sorted(prompt.findings(documents), key=lambda finding: finding.reason == "stored")
    summary = list(summary_of(answered.report))
    longest = max((len(run) for runs in prompt.runs.values() for run in runs), default=0)
    if not any(share.chunks for share in store.stats().namespaces if share.namespace == answered.namespace):
        where = f"namespace {answered.namespace!r}" if answered.namespace else f"store {store.stats().path}"
        summary.append(f"the {where} is empty: warm texts for this model and codec")
    elif not (findings or answered.report.stored_tokens):
        few = f"at most {longest} of its tokens in a row are in a warmed chunk, and {min_run} are needed"
        summary.append(few if 0 < longest < min_run else "it contains no warmed chunk: warm texts as they are pasted")
    if answered.late:
        summary.append("this was the prefill alone: once the model is unsure of a token, an answer recomputes more")
    stretches = tuple(_stretches(tokenizer, answered, documents))
    return Explanation(tuple(summary), stretches, tuple(findings), answered.report)


def _documents(store: KVStore, chunks: dict[str, Ids], namespace: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the documents that hold each chunk's text, in any variant."""
    held = [(name, set(keys)) for name, keys in store.documents(namespace=namespace).items()]
    texts = {key: text_key(namespace, ids.tolist()) for key, ids in chunks.items()}
    states = store.look_up(list(set(texts.values())))
    variants = {key: {*states[text].variants, key} for key, text in texts.items()}
    return {key: tuple(sorted(name for name, keys in held if keys & same)) for key, same in variants.items()}


# -------------------------------------------------------------------- the prompt


def _stretches(tokenizer: Tokenizer, answered: Request, documents: dict[str, tuple[str, ...]]) -> Iterator[Stretch]:
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
        yield run.start, end, "stored", run
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
        chunks: Token ids of the stored chunks of which the prompt has at least `GRAM` tokens in a row, by key.
        runs: The runs of each of them.
    """

    def __init__(self, tokenizer: Tokenizer, find: Find, answered: Request, min_run: int) -> None:
        self._tokenizer, self._find, self._report, self._min_run = tokenizer, find, answered.report, min_run
        self._ids: list[int] = answered.ids.tolist()
        self._stored = answered.reused.numpy()
        self._reused = answered.reused.index_fill(0, answered.recomputed, False).numpy()
        self.chunks: dict[str, Ids] = {}
        self.runs: dict[str, list[Run]] = {}
        for run, chunk in find(self._ids, GRAM):
            self.chunks[run.key] = chunk
            self.runs.setdefault(run.key, []).append(run)

    def findings(self, documents: dict[str, tuple[str, ...]]) -> Iterator[Finding]:
        """Yield findings about the stored chunks in the prompt, and then about its long stretches that are in none.

        A chunk is recognised by a run of at least `min_run` tokens, or by a large share of its tokens.
        """
        known = self._stored.copy()
        for key, runs in self.runs.items():
            size = len(self.chunks[key])
            if max(map(len, runs)) >= self._min_run or sum(map(len, runs)) >= _RECOGNISED * size:
                for run in runs:
                    known[run.start : run.stop] = True
                yield replace(self._judge(key), documents=documents[key])
        borders = np.flatnonzero(np.diff(np.concatenate([[True], known, [True]]))).tolist()
        for start, stop in zip(borders[::2], borders[1::2], strict=True):
            if stop - start >= _STRETCH:
                text = self._tokenizer.decode(self._ids[start:stop], control_tokens=True)
                detail = _NEVER if start else _BEGINNING
                plain = self._tokenizer.encode(_unescaped(text))
                found = sum(len(run) for run, _ in self._find(plain, self._min_run)) if "\\" in text else 0
                yield Finding(text, stop - start, 0, "never warmed", _ESCAPED if 2 * found > len(plain) else detail)

    def _judge(self, key: str) -> Finding:
        """Return the finding about a stored chunk, of which the prompt has some tokens."""
        ids = self.chunks[key]
        size, text = len(ids), self._tokenizer.decode(ids.tolist())
        runs = match([Segment.of([Entry(1, "", "", ids)])], self._ids, GRAM)
        found, stored, reused, long = np.zeros((4, size), bool)  # by its tokens: a prompt may contain a text twice
        for run in runs:
            place = slice(run.offset, run.offset + len(run))
            found[place] = True
            stored[place] |= self._stored[run.start : run.stop]
            reused[place] |= self._reused[run.start : run.stop]
            long[place] |= len(run) >= self._min_run
        num_stored, missed = int(stored.sum()), int((long & ~stored).sum())
        finding = Finding(text, size, int(reused.sum()), "never warmed", key=key)
        if size < self._min_run:
            detail = f"chunks under {self._min_run} tokens are computed with the rest of the prompt"
        elif size - num_stored <= _EDGES:
            return replace(finding, reason="stored")
        elif size - found.sum() > _EDGES or missed <= _EDGES:
            prompt, longest = self._tokenizer.decode(self._ids), max(map(len, runs))
            few = f", at most {longest} in a row, and {self._min_run} are needed" if longest < self._min_run else ""
            detail = f"{found.sum()} of its tokens are in the prompt{few}"
            if text not in prompt and text in _unescaped(prompt):
                detail = f"{_ESCAPED}; {detail}"
            return replace(finding, reason="changed", detail=detail)
        else:
            is_full = self._report.policy == "full"
            detail = "it is stored, but full prefill computed all tokens" if is_full else _LATER
        return replace(finding, detail=detail)


def _unescaped(text: str) -> str:
    """Return a text without the escapes of Python and JSON."""
    plain = _ESCAPE.sub(lambda found: _CHARACTERS.get(found[1]) or chr(int(found[1][1:], 16)), text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON has pairs of surrogates
