"""The speed-up that `kvrag demo` measures, on a tiny shape."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_shape import TINY

from kvrag import BlendEngine
from kvrag.cli import speed
from kvrag.types import BlendReport


def test_the_same_prompts_are_answered_in_full_and_blended(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("QWEN", TINY), ("_CHUNKS", 3), ("_CHUNK_TOKENS", 40), ("_QUESTION_TOKENS", 20)):
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
