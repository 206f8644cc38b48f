"""Prompts to train on, from documents alone: chunks as retrieval brings them or as they follow each other.

A lesson has several prompts of the same chunks, which are then encoded once for all of them. Their ends are sentences
of the documents that break off, and questions of the user.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from adapt_kvrag.distill import Lesson, locate
from kvrag import KvragError, Model
from kvrag.ext import CONTINUATION, Gap, Search, ask, find_gaps, render

_ENDS = 4  # of one lesson
_LEFT_OUT = 0.3  # share of a document's chunks that are missing from half of the lessons, as if not retrieved
_LEAST = 20  # sentences
_RETRIEVED = 16  # chunks for a sentence or a question, of which a lesson has the first
_ABOUT = 2  # of them, those that a question is probably about


class Lessons:
    """Draws lessons from documents."""

    def __init__(
        self,
        model: Model,
        documents: Mapping[str, Sequence[str]],
        search: Search,
        questions: Sequence[str] = (),
        context_tokens: int = 256,
        most_tokens: int = 1024,
        seed: int = 0,
        withheld: frozenset[str] = frozenset(),
    ) -> None:
        """Prepare documents.

        Args:
            documents: The chunks of each document, in reading order.
            search: Retrieves the chunks of a prompt.
            questions: Questions about the documents, asked beside the broken sentences.
            context_tokens: Preceding tokens of a document that chunks are encoded with: up to as many in half of the
                lessons, none in the others.
            most_tokens: Maximum size of a lesson's chunks together.
            withheld: Sentences that are not asked about.

        Raises:
            KvragError: The documents have too little text.
        """
        self._model, self._search, self._seed = model, search, seed
        self._questions, self._most_tokens, self._context_tokens = list(questions), most_tokens, context_tokens
        self._documents = {name: list(chunks) for name, chunks in documents.items() if chunks}
        chunks = [chunk for chunks in self._documents.values() for chunk in chunks]
        self._gaps = [gap for gap in find_gaps(list(dict.fromkeys(chunks)), seed) if gap.sentence not in withheld]
        if len(self._gaps) < _LEAST or len(set(chunks)) < 4:
            raise KvragError(
                f"too little text to adapt to: {len(set(chunks))} chunks with {len(self._gaps)} sentences to complete, "
                f"at least 4 and {_LEAST} are needed: give more documents"
            )
        self._gaps_of: dict[str, list[Gap]] = defaultdict(list)
        for gap in self._gaps:
            for chunk in chunks:
                if gap.kind == CONTINUATION and gap.sentence in chunk:
                    self._gaps_of[chunk].append(gap)
        self._retrieved_for = {question: list(search(question, _RETRIEVED)) for question in self._questions}
        self._questions_of: dict[str, list[str]] = defaultdict(list)
        for question, texts in self._retrieved_for.items():
            for text in texts[:_ABOUT]:
                self._questions_of[text].append(question)
        self._ids = {chunk: model.tokenizer.encode(chunk) for chunk in chunks}
        self._contexts = self._preceding(model.tokenizer.encode("\n\n"))

    def _preceding(self, blank: list[int]) -> dict[str, list[int]]:
        """Return the tokens before each chunk in its document, as many as it may be encoded with."""
        contexts: dict[str, list[int]] = {}
        for texts in self._documents.values():
            before: list[int] = []  # as in ingestion: each of the preceding chunks, and a blank line
            for text in texts:
                contexts.setdefault(text, before[max(0, len(before) - self._context_tokens) :])
                before = [*before, *self._ids[text], *blank]
        return contexts

    def draw(self, number: int) -> Lesson:
        """Return one lesson; the same number gives the same lesson."""
        rng = random.Random(f"{self._seed} {number}")
        while True:
            kind = rng.random()
            if kind < 0.4:
                texts, asked = self._fitting(self._stretch(rng), rng), list[str]()
            else:
                question = rng.choice(self._questions) if kind < 0.7 and self._questions else ""
                found, end = (self._retrieved_for[question], question) if question else self._retrieved(rng)
                texts, asked = self._fitting(found, rng), [end]
                rng.shuffle(texts)
            lesson = self._lesson(texts, self._ends(texts, asked, rng), rng)
            if lesson is not None:
                return lesson

    def _ends(self, texts: Sequence[str], asked: Sequence[str], rng: random.Random) -> list[list[int]]:
        """Return the ids of prompts of these chunks, first the one that they were retrieved for."""
        gaps = [gap.beginning for text in texts for gap in self._gaps_of[text]]
        about = [question for text in texts for question in self._questions_of[text]]
        pairs = zip_longest(*(rng.sample(ends, min(len(ends), _ENDS)) for ends in (about, gaps)))
        ends = list(dict.fromkeys([*asked, *(end for pair in pairs for end in pair if end)]))[:_ENDS]
        tokenizer, questions = self._model.tokenizer, self._retrieved_for
        return [(ask if end in questions else render)(tokenizer, texts, end) for end in ends]

    def _retrieved(self, rng: random.Random) -> tuple[list[str], str]:
        """Return the chunks that retrieval brings for a broken sentence, and the sentence."""
        gap = rng.choice(self._gaps)
        texts = self._search(gap.beginning, _RETRIEVED)
        return [text for text in texts if gap.kind == CONTINUATION or gap.sentence not in text], gap.beginning

    def _stretch(self, rng: random.Random) -> list[str]:
        """Return a stretch of a document and one of another, in half of the cases with gaps."""
        texts = list[str]()
        for name in rng.sample(list(self._documents), min(2, len(self._documents))):
            chunks = self._documents[name]
            start = rng.randrange(len(chunks))
            texts += chunks[start : start + rng.randint(2, 8)]
        if rng.random() < 0.5:
            texts = [text for text in texts if rng.random() >= _LEFT_OUT]
        return texts

    def _fitting(self, texts: Sequence[str], rng: random.Random) -> list[str]:
        """Return the first texts, as many as a random size has room for."""
        room, fitting = rng.randint(self._most_tokens // 3, self._most_tokens), list[str]()
        for text in dict.fromkeys(texts):
            room -= len(self._ids[text])
            if room < 0 and len(fitting) > 1:
                break
            fitting.append(text)
        return fitting

    def _lesson(self, texts: Sequence[str], prompts: Sequence[list[int]], rng: random.Random) -> Lesson | None:
        """Return prompts of these chunks as a lesson; None if they share too little."""
        if len(texts) < 2 or not prompts:
            return None
        chunks = [self._ids[text] for text in texts]
        runs = locate(prompts[0], chunks)
        end = runs[-1].stop if runs else 0
        if len(runs) < 2 or any(prompt[:end] != prompts[0][:end] for prompt in prompts):
            return None
        most = rng.randint(1, self._context_tokens) if self._context_tokens and rng.random() < 0.5 else 0
        rows = [(self._contexts[text][-most:] if most else [], ids) for text, ids in zip(texts, chunks, strict=True)]
        return Lesson(prompts[0][:end], [prompt[end:] for prompt in prompts], rows, runs)
