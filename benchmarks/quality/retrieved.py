"""Rows of retrieved chunks: each question's nearest chunks in an index over a world's articles.

Every chunk of a retrieved document is part of the row's `library`, so that chunks are warmed as in ingestion: with
their whole document. The asked-about contexts use names of the split "test" that no other context of the index uses,
and only questions that contain such a name are asked. So each question has one answer in the whole index. The other
articles are drawn from the split "train", whose names are others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

from benchmarks.quality.worlds import WorldRow
from benchmarks.readers.first import world as first
from benchmarks.readers.second import world as second
from kvrag.errors import SettingError
from kvrag.retrieval.index import ChunkIndex

_ASKED = {1: 42, 2: 30}  # contexts that are asked about: more would use up the names of the test split
_PER_CONTEXT = {1: 5, 2: 1}  # articles
_SCALE = second.Scale(context=(1 << 30, 1 << 30), chunk=(64, 160), chunks=(8, 16), documents=(1, 1))  # whole documents


@dataclass(frozen=True)
class Asked:
    """A question with its only answer in the corpus.

    Attributes:
        support: Chunks that answer it, all of them needed.
        context: Number of the context that it is about.
    """

    text: str
    answer: str
    kind: str
    across: bool
    support: tuple[str, ...]
    context: int


@dataclass(frozen=True)
class Corpus:
    """Documents by name, each with its chunks in reading order, and questions by kind, in the order of asking."""

    documents: dict[str, tuple[str, ...]]
    questions: dict[str, list[Asked]]

    @property
    def chunks(self) -> dict[str, str]:
        """Different chunks, each with the first document that has it."""
        return {chunk: name for name in reversed(self.documents) for chunk in reversed(self.documents[name])}

    @property
    def digest(self) -> str:
        """Hash of the documents."""
        return blake2b(repr(self.documents).encode(), digest_size=8).hexdigest()


def draw_corpus(world: int, num_articles: int, seed: int) -> Corpus:
    """Draw a corpus of about `num_articles` articles of a world.

    Args:
        world: A key of `WORLDS`.
        num_articles: Rounded up to whole contexts.
    """
    rng = random.Random(f"corpus {seed}")
    draw = {1: _first_world, 2: _second_world}[world]
    corpus = Corpus({}, {})
    contexts = -(-num_articles // _PER_CONTEXT[world])
    for drawn, questions in draw(rng, min(contexts, _ASKED[world]), contexts):
        for title, chunks in drawn:
            name = title if title not in corpus.documents else f"{title}, part {len(corpus.documents)}"
            corpus.documents[name] = chunks
        for question in questions:
            corpus.questions.setdefault(question.kind, []).append(question)
    for group in corpus.questions.values():
        rng.shuffle(group)
    return corpus


_Context = tuple[list[tuple[str, tuple[str, ...]]], list[Asked]]  # documents with titles, and questions


def _first_world(rng: random.Random, num_asked: int, num_contexts: int) -> Iterator[_Context]:
    taken: set[str] = set()
    for number in range(num_contexts):
        asked = number < num_asked
        before = set(taken)
        drawn = first.sample(rng, "test" if asked else "train", _PER_CONTEXT[1], taken if asked else None)
        documents = []
        for _, group in groupby(zip(drawn.articles, drawn.passages, drawn.subjects, strict=True), lambda row: row[0]):
            _, chunks, subjects = zip(*group, strict=True)
            documents.append((subjects[0] or ("List" if len(chunks) > 1 else "Glossary"), chunks))
        names = taken - before
        questions = [
            Asked(question.text, question.answer, question.kind, question.across, _support(drawn, question), number)
            for question in drawn.questions
            if not names.isdisjoint(re.findall(r"\w+", question.text))
        ]
        yield documents, questions


def _support(drawn: first.Sample, question: first.Question) -> tuple[str, ...]:
    """Return the chunks with the question's facts and, where these only have "she", those with her name."""
    needed: dict[str, None] = {}
    for _, sentence in question.facts:
        at = next(number for number, passage in enumerate(drawn.passages) if sentence in passage)
        needed[drawn.passages[at]] = None
        subject = drawn.subjects[at]
        if subject and subject not in drawn.passages[at]:
            needed[next(passage for passage in reversed(drawn.passages[:at]) if subject in passage)] = None
    return tuple(needed)


def _second_world(rng: random.Random, num_asked: int, num_contexts: int) -> Iterator[_Context]:
    taken: list[str] = []
    for number in range(num_contexts):
        asked = number < num_asked
        known = len(taken)
        drawn = second.sample(rng, "test" if asked else "train", _SCALE, taken if asked else None)
        names = taken[known:]
        questions = []
        for question in drawn.questions if asked else ():
            if any(name in question.text for name in names):
                support = tuple(dict.fromkeys(drawn.passages[passage] for passage in question.support))
                questions.append(Asked(question.text, question.answer, question.kind, question.across, support, number))
        yield (
            [(f"{title.split(',')[0]}, part {number + 1}", chunks) for title, chunks in drawn.library.items()],
            questions,
        )


def open_index(
    corpus: Corpus, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> ChunkIndex:
    """Open the corpus's index in `folder`, and embed what it lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    index = ChunkIndex(folder / f"index-{corpus.digest}.sqlite")
    index.add(list(corpus.chunks), progress=progress)
    return index


def check_size(corpus: Corpus, count: int, k: int) -> None:
    """Raise SettingError if the corpus has fewer than `k` chunks, or too few questions to ask `count`."""
    if not 1 <= k <= len(corpus.chunks):
        raise SettingError(f"--top-k must be from 1 to the {len(corpus.chunks)} chunks of the index, got {k}")
    kinds = sorted(corpus.questions)
    most, turn = min((len(kinds) * len(corpus.questions[kind]) + turn, turn) for turn, kind in enumerate(kinds))
    if count > most:
        raise SettingError(
            f"the index has {len(corpus.questions[kinds[turn]])} questions of kind {kinds[turn]!r} with one answer: "
            f"set --samples to at most {most}, or choose other articles by --seed"
        )


def retrieved_rows(corpus: Corpus, index: ChunkIndex, count: int, k: int, around: int = 0) -> list[WorldRow]:
    """Ask `count` questions, each kind equally often; a larger `count` appends rows.

    Args:
        k: Number of chunks to retrieve for each question.
        around: Number of neighbours to retrieve with each of them, before and after it.

    Raises:
        SettingError: There are fewer chunks or questions.
    """
    check_size(corpus, count, k)
    home, kinds = corpus.chunks, sorted(corpus.questions)
    rows = []
    for number in range(count):
        round_, turn = divmod(number, len(kinds))
        question = corpus.questions[kinds[turn]][round_]
        retrieved: dict[str, None] = {}
        for hit in index.search(question.text, k):
            chunks = corpus.documents[home[hit.text]]
            at = chunks.index(hit.text)
            retrieved |= dict.fromkeys(chunks[max(0, at - around) : at + around + 1])
        passages = tuple(retrieved)
        documents = tuple(home[passage] for passage in passages)
        rows.append(
            WorldRow(
                f"retrieved-{number}",
                passages,
                question.text,
                (question.answer,),
                question.kind,
                documents,
                {name: corpus.documents[name] for name in dict.fromkeys(documents)},
                context=str(question.context),
                across=question.across,
                supported=set(question.support) <= set(passages),
            )
        )
    return rows
