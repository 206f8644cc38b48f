"""`kvrag bench ttft`, on a tiny shape."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_shape import TINY

from kvrag.backend.transformers.shapes import SHAPES
from kvrag.bench import ttft
from kvrag.bench.ttft import TtftSetup
from kvrag.cli.main import main


def _arguments(**changes: Any) -> argparse.Namespace:
    setup = {"chunks": 3, "chunk_tokens": 40, "question_tokens": 20, "policies": ["none", "first_k"], "repeats": 1}
    given = {name: getattr(TtftSetup, name) for name in TtftSetup.__dataclass_fields__}
    return argparse.Namespace(**given | setup | {"model": "tiny", "json": True} | changes)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)


def test_every_blended_row_has_its_stall_and_computed_tokens(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped: list[str] = []
    advise = os.posix_fadvise

    def note(descriptor: int, *arguments: int) -> None:
        dropped.append(Path(f"/proc/self/fd/{descriptor}").resolve().suffix)
        advise(descriptor, *arguments)

    monkeypatch.setattr(os, "posix_fadvise", note)
    assert ttft.run(_arguments(cold=True)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["settings"]["cold"] is True
    assert set(dropped) == {".safetensors"}
    full, prefix, *blended = result["rows"]
    assert full["load_stall_s"] is prefix["load_stall_s"] is None
    assert [row["name"] for row in blended] == ["none", "first_k"]
    for row in blended:
        assert row["load_stall_s"] > 0
    # two chunks are inexact; 15 % of them
    assert blended[1]["computed_tokens"] - blended[0]["computed_tokens"] == round(0.15 * 2 * 40)


def test_the_table_has_the_stall(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert ttft.run(_arguments(policies=["first_k"], ram_bytes=1 << 30, json=False)) == 0
    *_, heads, _, _, row = capsys.readouterr().out.splitlines()
    assert heads.split()[-2:] == ["computed", "stall"]
    assert row.startswith("first_k")


def test_cold_chunks_and_a_tier_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ttft", "--cold", "--ram-bytes", "1000"]) != 0
    assert "pass either --cold or --ram-bytes" in capsys.readouterr().err
