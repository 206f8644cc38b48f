"""Passages warmed one by one are found in the prompts that chains build of them, with a real BPE vocabulary."""

from __future__ import annotations

import html
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from kvrag.backend.transformers import Tokenizer
from kvrag.index.match import match
from kvrag.index.segment import Segment
from kvrag.store.values import Entry

MIN_RUN = 16
DATA = Path(__file__).parents[3] / "shared" / "data" / "musique_100.jsonl"
SAMPLE = [
    "The Brel Harbour Company was founded in 1897 by two brothers who had sailed together since they were boys. "
    "Its first ship, the Anna, carried slate; by 1912 there were eleven, among them three steamers.",
    "Ingredients (serves 4): 250 g flour, 3 eggs, ½ l milk — preheat to 180 °C. Don't open the oven's door "
    "before 25 minutes have passed; “patience”, as grandmother used to say, “is a spice”.",
    "def area(r):\n    # in square metres\n    return 3.14159 * r ** 2\n\nprint(area(2))\n\n"
    "The function above ignores units; callers convert them beforehand, see section 4.2.1 of the manual.",
    "Die Straße führt über den Pass nach Süden. Im Winter ist sie gesperrt, und wer dennoch hinüber will, "
    "nimmt die Bahn. 東京から大阪まで新幹線で二時間半かかります。",
]

FORMATS: dict[str, Callable[[list[str], str], str]] = {
    "stuff": lambda docs, q: (
        "Answer any use questions based solely on the context below:\n\n<context>\n"
        + "\n\n".join(docs)
        + f"\n</context>\n\nHuman: {q}"
    ),
    "stuff-default-prompt": lambda docs, q: (
        "System: Use the following pieces of context to answer the user's question. \nIf you don't know the answer, "
        "just say that you don't know, don't try to make up an answer.\n----------------\n"
        + "\n\n".join(docs)
        + f"\nHuman: {q}"
    ),
    "numbered": lambda docs, q: (
        "\n".join(f"[{i}] {doc}" for i, doc in enumerate(docs, 1)) + f"\n\nQuestion: {q}\nAnswer:"
    ),
    "xml": lambda docs, q: "".join(f"<doc id='{i}'>{doc}</doc>" for i, doc in enumerate(docs)) + q,
    "bullets": lambda docs, q: "Context:\n" + "\n".join(f"- {doc}" for doc in docs) + f"\nQ: {q}",
    "with-sources": lambda docs, q: (
        "\n\n".join(f"Content: {doc}\nSource: {i}-pl" for i, doc in enumerate(docs)) + f"\nQUESTION: {q}"
    ),
    "markdown": lambda docs, q: "\n\n---\n\n".join(f"## Passage\n\n{doc}\n" for doc in docs) + f"\n> {q}",
    "llamaindex": lambda docs, q: (
        "Context information is below.\n---------------------\n"
        + "\n\n".join(docs)
        + "\n---------------------\nGiven the context information and not prior knowledge, answer the query.\n"
        + f"Query: {q}\nAnswer: "
    ),
    "glued": lambda docs, q: " ".join(docs) + " " + q,
}

ESCAPES: dict[str, Callable[[str], str]] = {
    "html": html.escape,
    "mustache": lambda text: html.escape(text, quote=False).replace('"', "&quot;"),
    "jinja": lambda text: html.escape(text, quote=False).replace('"', "&#34;").replace("'", "&#39;"),
    "json": lambda text: json.dumps(text)[1:-1],
    "tojson": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "repr": lambda text: repr(text)[1:-1],
}


@pytest.fixture(scope="module")
def cl100k() -> Any:
    """GPT-4's vocabulary, which comes with llama-index-core, as a tokenizer of transformers."""
    core = pytest.importorskip("llama_index.core")
    pytest.importorskip("tiktoken")
    cache = Path(core.__file__).parent / "_static" / "tiktoken_cache"
    ranks = next(
        path for path in cache.iterdir() if path.is_file() and path.read_bytes()[:2] == b"IQ" and _lines(path) > 100_000
    )
    backend = TikTokenConverter(str(ranks)).converted()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "cl100k")


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@pytest.fixture(scope="module")
def reader(tokenizer: Any) -> Any:
    return Tokenizer(tokenizer, "reader")


def _warm(tokenizer: Any, passages: list[str]) -> tuple[list[Segment], dict[str, list[int]]]:
    chunks = {f"{i}": tokenizer.encode(passage) for i, passage in enumerate(dict.fromkeys(passages))}
    entries = [Entry(int(key), key, "", np.asarray(ids, np.uint32)) for key, ids in chunks.items()]
    return [Segment.of(entries[::2]), Segment.of(entries[1::2])], chunks


def _coverage(
    tokenizer: Any, segments: list[Segment], chunks: dict[str, list[int]], docs: list[str], question: str, chain: str
) -> tuple[int, int]:
    ids = tokenizer.render(FORMATS[chain](docs, question))
    runs = match(segments, ids, MIN_RUN)
    for run in runs:
        assert ids[run.start : run.stop] == chunks[run.key][run.offset : run.offset + len(run)]
    return sum(map(len, runs)), sum(len(tokenizer.encode(doc)) for doc in docs)


def _musique(step: int) -> list[Any]:
    if not DATA.exists():
        pytest.skip(f"{DATA} is not there (MuSiQue is not part of this repository)")
    with DATA.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file][::step]


@pytest.mark.parametrize("chain", FORMATS)
def test_musique_passages_are_reused(chain: str, cl100k: Any) -> None:
    rng = random.Random(0)
    questions = _musique(20 if chain != "stuff" else 5)
    segments, chunks = _warm(cl100k, [passage for question in questions for passage in question["passages"]])
    found = total = 0
    for question in questions:
        docs = question["passages"]
        rng.shuffle(docs)
        a, b = _coverage(cl100k, segments, chunks, docs[: rng.randrange(3, 11)], question["question"], chain)
        found, total = found + a, total + b
    assert total > 5000
    assert found >= 0.99 * total


@pytest.mark.parametrize("escape", ESCAPES)
def test_escaped_musique_passages_are_reused(escape: str, cl100k: Any) -> None:
    """In the frameworks' own prompts; only the escaped characters themselves are not reused."""
    questions = _musique(20)
    segments, _ = _warm(cl100k, [passage for question in questions for passage in question["passages"]])
    for chain in ("stuff", "numbered", "llamaindex"):
        found = total = 0
        for question in questions:
            docs = question["passages"][:6]
            ids = cl100k.render(FORMATS[chain]([ESCAPES[escape](doc) for doc in docs], question["question"]))
            found += sum(map(len, match(segments, ids, MIN_RUN)))
            total += sum(len(cl100k.encode(doc)) for doc in docs)
        assert total > 5000
        assert found >= 0.97 * total


def test_text_with_lines_is_reused_when_it_is_escaped(cl100k: Any) -> None:
    """Escaped line breaks and quotes leave few stretches of `MIN_RUN` tokens."""
    page = Path(__file__).parents[1] / "helpers" / "data" / "page.md"
    docs = [part for part in page.read_text("utf-8").split("\n## ") if len(part) > 500]
    segments, _ = _warm(cl100k, docs)
    total = sum(len(cl100k.encode(doc)) for doc in docs)
    assert total > 1000
    for escape in ("html", "json", "repr"):
        ids = cl100k.render(FORMATS["stuff"]([ESCAPES[escape](doc) for doc in docs], "Why?"))
        assert sum(map(len, match(segments, ids, MIN_RUN))) >= 0.94 * total


def test_text_that_escaping_changes_throughout_is_reused_if_it_was_warmed_escaped(cl100k: Any) -> None:
    docs = [
        f"{town}から大阪まで新幹線で{hours}時間半かかります。駅の近くには古い市場があり、毎朝多くの人が魚や野菜を買いに来ます。"
        for town, hours in (("東京", "二"), ("京都", "一"), ("福岡", "三"))
    ]
    escaped = [ESCAPES["json"](doc) for doc in docs]
    pasted = {"escaped": json.dumps(docs), "plain": json.dumps(docs, ensure_ascii=False)}
    for name, warmed in {"escaped": escaped, "plain": docs}.items():
        segments, _ = _warm(cl100k, warmed)
        total = sum(len(cl100k.encode(text)) for text in warmed)
        found = {
            how: sum(map(len, match(segments, cl100k.render(FORMATS["stuff"]([text], "Why?")), MIN_RUN)))
            for how, text in pasted.items()
        }
        assert found.pop(name) >= 0.95 * total
        assert [*found.values()] == [0]


@pytest.mark.parametrize("chain", FORMATS)
@pytest.mark.parametrize("name", ["cl100k", "reader"])
def test_a_mixed_sample_is_reused(name: str, chain: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    segments, chunks = _warm(tokenizer, SAMPLE)
    found = total = 0
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        docs = [SAMPLE[number] for number in order]
        a, b = _coverage(tokenizer, segments, chunks, docs, "Who founded the company?", chain)
        found, total = found + a, total + b
    # the first and the last token of a chunk may merge with their neighbours, and these chunks are short
    assert found >= total - 2 * 3 * len(SAMPLE)


def test_text_that_was_never_warmed_is_not_reused(reader: Any) -> None:
    segments, chunks = _warm(reader, SAMPLE[:2])
    found, _ = _coverage(reader, segments, chunks, SAMPLE[2:], "Who?", "stuff")
    assert found == 0
