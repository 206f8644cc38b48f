"""Questions with accepted answers about documents: the rows of `python -m benchmarks kept`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.quality.rows import QuestionRow, file_rows
from kvrag.errors import KvragError
from kvrag.retrieval import documents
from kvrag.retrieval.index import ChunkIndex

HERE = Path(__file__).parent
QUESTIONS, CORPUS = HERE / "questions.jsonl", HERE / "corpus"
"""For numbers that are reported."""
TUNING, TUNING_CORPUS = HERE / "tuning.jsonl", HERE / "tuning"
"""For choosing settings; numbers on these are never reported."""


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text contains an accepted answer, in any case; "12" is neither in "120" nor in "3.12"."""
    return any(re.search(rf"(?<!\w)(?<!\d[.,]){re.escape(one)}(?!\w|[.,]\d)", text, re.I) for one in answers)


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines with `q`, `a` (accepted answers) and `document`; raises KvragError for a wrong one."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            is_valid = isinstance(row["a"], list) and bool(row["a"])
            is_valid = is_valid and all(isinstance(text, str) for text in (row["q"], row["document"], *row["a"]))
        except (ValueError, KeyError, TypeError):
            is_valid = False
        if not is_valid:
            raise KvragError(f"{path}, line {number}: expected q, a (a list of answers) and document")
        rows.append(row)
    return rows


def read_corpus(folder: Path, count: Callable[[str], int], chunk_tokens: int) -> dict[str, tuple[str, ...]]:
    """Return the chunks of each document of a folder; `count` returns the tokens of a text."""
    split = documents.splitter(count, chunk_tokens, 0)
    return {path.name: tuple(split(documents.read(path).texts)) for path in documents.find([folder])[0]}


def retrieve(questions: Sequence[dict[str, Any]], corpus: Mapping[str, tuple[str, ...]], k: int) -> list[QuestionRow]:
    """Return rows with the chunks that are nearest to each question, best first; `context` is its document."""
    rows = []
    with TemporaryDirectory() as folder, ChunkIndex(f"{folder}/index.sqlite") as index:
        for name, chunks in corpus.items():
            index.add(chunks, document=name)
        for row in questions:
            hits = index.search(row["q"], k)
            texts, names = tuple(hit.text for hit in hits), tuple(hit.document for hit in hits)
            library = {name: corpus[name] for name in sorted({*names})}
            one = QuestionRow(row["q"], texts, row["q"], tuple(row["a"]), "", names, library, context=row["document"])
            rows.append(one)
    return rows


def passage_rows(path: Path) -> list[QuestionRow]:
    """Read rows that have passages, each of which is a document of its own."""
    rows = []
    for row in file_rows(path, 1 << 30):
        names = tuple(f"{row.id} {number}" for number in range(len(row.passages)))
        library: dict[str, tuple[str, ...]] = {name: (text,) for name, text in zip(names, row.passages, strict=True)}
        rows.append(replace(row, documents=names, library=library))
    return rows


def nq_rows(path: Path, half: int, k: int) -> list[QuestionRow]:
    """Read NQ-open's oracle passages (lost-in-the-middle): one half of the questions, each among `k` - 1 others'."""
    rows = read_lines(path)[half::2]
    found = []
    for number, row in enumerate(rows):
        rng = random.Random(number)
        others = rng.sample([other for other in rows if other["q"] != row["q"]], k - 1)
        among = rng.sample([*others, row], k)
        passages: dict[str, tuple[str, ...]] = {f"{one['title']}: {one['q']}": (one["text"],) for one in among}
        texts = tuple(one["text"] for one in among)
        found.append(QuestionRow(row["q"], texts, row["q"], tuple(row["a"]), "", tuple(passages), passages))
    return found


def xquad_rows(path: Path, half: int, seed: int, n: int | None, k: int) -> list[QuestionRow]:
    """Return questions about one half of XQuAD's articles, with the paragraphs that a retriever finds in these."""
    articles = read_lines(path)[half::2]
    corpus = {row["title"]: tuple(part["text"] for part in row["paragraphs"]) for row in articles}
    questions = [
        {**asked, "document": row["title"]} for row in articles for part in row["paragraphs"] for asked in part["qas"]
    ]
    return retrieve(chosen(questions, seed, n), corpus, k)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chosen(items: Sequence[Any], seed: int, n: int | None) -> list[Any]:
    """Return the first `n` of the items in random order; None = all."""
    return random.Random(seed).sample(items, len(items))[:n]


def has_answer(row: QuestionRow) -> bool:
    """Return whether a passage, of the question's document if it is known, contains the answer."""
    passages = zip(row.passages, row.documents, strict=True)
    return any(is_right(text, row.answers) for text, name in passages if row.context in ("", name))
