"""Numbers in messages: one of a thing has no plural, and sizes have one kind of unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvrag
from kvrag.words import counted, human_bytes

PLURALS = "chunks|documents|files|tokens|answers|prompts|rows|texts"


@pytest.mark.parametrize(("number", "said"), [(0, "0 chunks"), (1, "1 chunk"), (2, "2 chunks")])
def test_a_number_has_its_noun(number: int, said: str) -> None:
    assert counted(number, "chunk") == said


def test_sizes_are_in_powers_of_two_everywhere() -> None:
    assert [human_bytes(size) for size in (1, 1 << 10, 3 << 19, 1 << 30)] == ["1 B", "1.0 KiB", "1.5 MiB", "1.0 GiB"]
    folder = Path(kvrag.__file__).parent
    lines = [line for path in folder.rglob("*.py") for line in path.read_text().splitlines()]
    assert [line for line in lines if re.search(r'".*\b[KMGT]B\b', line)] == []


@pytest.mark.parametrize("name", ["warm", "store", "serve"])
def test_commands_count_with_the_noun(name: str) -> None:
    said = (Path(kvrag.__file__).parent / "cli" / f"{name}.py").read_text()
    assert re.findall(rf'f".*\}} (?:{PLURALS})\b', said) == []
