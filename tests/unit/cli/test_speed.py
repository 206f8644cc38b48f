"""The speed-up that `kvrag demo` and `kvrag bench` measure, on a tiny shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_shape import TINY

from kvrag import BlendEngine
from kvrag.backend.transformers.shapes import SHAPES
from kvrag.cli import speed
from kvrag.cli.main import main
from kvrag.types import BlendReport


def test_the_same_prompts_are_answered_in_full_and_blended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "qwen2.5-0.5b", TINY)
    for name, value in (("_CHUNKS", 3), ("_CHUNK_TOKENS", 40), ("_QUESTION_TOKENS", 20)):
        monkeypatch.setattr(speed, name, value)
    asked: list[tuple[str, str, BlendReport]] = []
    generate = BlendEngine.generate

    def noting(self: BlendEngine, prompt: Any, **options: Any) -> Any:
        answer = generate(self, prompt, **options)
        asked.append((options["policy"], str(prompt), answer.report))
        return answer

    monkeypatch.setattr(BlendEngine, "generate", noting)
    steps: list[tuple[int, int]] = []
    result = speed.measure(progress=lambda done, total: steps.append((done, total)))
    total = 3 * 40 + 3 * (3 * 40 + 20 + round(0.15 * 3 * 40) + 20)
    assert steps[0] == (0, total)
    assert steps[-1] == (total, total)
    assert sorted(steps) == steps
    assert len(steps) >= 8  # also while the chunks are encoded
    assert [policy for policy, *_ in asked] == ["full", "query"] * 3
    assert all(full[1] == blended[1] for full, blended in zip(asked[::2], asked[1::2], strict=True))
    assert len({prompt for _, prompt, _ in asked}) == 3
    full, blended = asked[-2][2], asked[-1][2]
    assert full.reused_tokens == 0
    assert blended.tier == "disk"
    # two chunks are inexact; 15 % of them
    assert blended.recomputed_tokens == round(0.15 * 2 * 40)
    assert result.bound == result.prompt_tokens / (blended.fresh_tokens + blended.recomputed_tokens)
    assert result.blending_s > 0
    assert result.full_s > 0


def test_the_command_prints_the_speed_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(speed, "_CHUNK_TOKENS", 20)
    assert main(["bench", "--model", "tiny", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"].startswith("tiny shape")
    assert result["prompt_tokens"] > 6 * 20
    assert main(["bench", "--model", "large"]) == 1
    assert "unknown shape 'large'; choose one of qwen2.5-0.5b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in list(SHAPES)[:-1])  # all but "tiny"
