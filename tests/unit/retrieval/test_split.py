"""Splitting texts into chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrag.backend.transformers.loading import load_tokenizer
from kvrag.retrieval import documents

HANDBOOK = Path(__file__).parents[3] / "examples" / "handbook"


@pytest.fixture(scope="module")
def count() -> Callable[[str], int]:
    tokenizer = load_tokenizer("reader")
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("size", [32, 64, 256])
def test_no_word_is_lost_and_no_chunk_is_too_long(size: int, count: Callable[[str], int]) -> None:
    split = documents.splitter(count, size, 0)
    for path in HANDBOOK.iterdir():
        text = path.read_text("utf-8")
        chunks = split([text])
        assert " ".join(chunks).split() == text.split()
        assert max(map(count, chunks)) <= size
        overlapping = documents.splitter(count, size, size // 4)([text])
        assert max(map(count, overlapping)) <= size
        assert set(text.split()) == {word for chunk in overlapping for word in chunk.split()}


def test_a_heading_begins_a_chunk() -> None:
    text = "# One\n\n" + "word " * 15 + "\n\n## Two\n\n" + "word " * 15
    assert [chunk.splitlines()[0] for chunk in documents.splitter(len, 100, 0)([text])] == ["# One", "## Two"]


def test_long_lines_without_structure_are_read_once() -> None:
    """Otherwise this takes hours."""
    text = (
        "| " * 50_000 + "\n" + "#" * 50_000 + "\n" + " \t" * 50_000 + "\n" + "-" * 50_000 + "|" * 50_000 + " " * 50_000
    )
    chunks = documents.splitter(len, 5000, 0)([text])
    assert "".join("".join(chunks).split()) == "".join(text.split())
