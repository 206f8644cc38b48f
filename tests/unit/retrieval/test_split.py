"""Splitting texts into chunks, of Markdown above all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrag.backend.transformers.loading import load_tokenizer
from kvrag.retrieval import documents

HANDBOOK = Path(__file__).parents[3] / "examples" / "handbook"
TABLE = "| item | price |\n|:-----|------:|\n"


@pytest.fixture(scope="module")
def count() -> Callable[[str], int]:
    tokenizer = load_tokenizer("reader")
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("size", [32, 64, 256])
def test_a_heading_stays_with_its_text_and_no_word_is_lost(size: int, count: Callable[[str], int]) -> None:
    split = documents.splitter(count, size, 0)
    for path in HANDBOOK.iterdir():
        text = path.read_text("utf-8")
        chunks = split([text])
        assert " ".join(chunks).split() == text.split()
        assert max(map(count, chunks)) <= size
        assert not [chunk for chunk in chunks if chunk.splitlines()[-1].startswith("#")]
        overlapping = documents.splitter(count, size, size // 4)([text])
        assert max(map(count, overlapping)) <= size
        assert set(text.split()) == {word for chunk in overlapping for word in chunk.split()}


@pytest.mark.parametrize(
    "text",
    [
        "# Long\n\n" + "word " * 90,
        "word " * 30 + "\n\n# One\n## Two\n\n### Three\n" + "word " * 90,
        "# One\nword\n  \n    code = 1\n\n\n\t# no heading\n" + "word\n" * 90,
        "\n  \n#no heading " + "x" * 300 + "\r\n# A heading\r\n\r\nword\r\n",
        "# The end",
        "# " + "a heading of many words " * 30 + "\nword",
    ],
)
def test_headings_of_long_sections_stay_with_the_first_part(text: str) -> None:
    chunks = documents.splitter(len, 100, 0)([text])
    assert max(map(len, chunks)) <= 100
    assert "".join("".join(chunks).split()) == "".join(text.split())
    for chunk in chunks[:-1]:
        assert not re.match(r"#{1,6} (One|Two|Three|Long|A heading)", chunk.splitlines()[-1])


@pytest.mark.parametrize("after", ["", "\nMore.", "\n# More\n\nText."])
@pytest.mark.parametrize("before", ["", "## Prices\n\n", "The prices:\n\n", "Prices:\n"])
def test_every_part_of_a_table_has_its_header(before: str, after: str) -> None:
    rows = [f"| thing {number} | {number} euro |\n" for number in range(40)]
    chunks = documents.splitter(len, 200, 0)([before + TABLE + "".join(rows) + after])
    assert max(map(len, chunks)) <= 200
    assert [line for chunk in chunks for line in chunk.splitlines() if line.startswith("| thing")] == [
        row.strip() for row in rows
    ]
    assert "\n".join([*chunks, ""]).replace(TABLE, "").split() == (before + "".join(rows) + after).split()
    for chunk in chunks:
        assert chunk.count("|:-----|") == ("| thing" in chunk)
        assert TABLE + "| thing" in chunk or "| thing" not in chunk
    (whole,) = documents.splitter(len, 5000, 0)([before + TABLE + "".join(rows) + after])
    assert whole == (before + TABLE + "".join(rows) + after).strip()


def test_long_lines_without_structure_are_read_once() -> None:
    """Otherwise this takes hours."""
    text = (
        "| " * 50_000 + "\n" + "#" * 50_000 + "\n" + " \t" * 50_000 + "\n" + "-" * 50_000 + "|" * 50_000 + " " * 50_000
    )
    chunks = documents.splitter(len, 5000, 0)([text])
    assert "".join("".join(chunks).split()) == "".join(text.split())
