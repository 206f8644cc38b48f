"""Stored KV that equals full prefill's without recomputing."""

from __future__ import annotations

from pathlib import Path

from blending import CHUNKS, messages

from kvrag import BlendConfig, BlendEngine, FileStore, Model


def test_only_a_chunk_encoded_alone_is_exact_after_the_preamble(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, FileStore(tmp_path), BlendConfig(context_tokens=64)) as engine:
        engine.warm(CHUNKS[:2], document="a")
        alone, behind = (
            engine.generate(messages(chunk), ratio=0.0, policy="none", max_new_tokens=1).report for chunk in CHUNKS[:2]
        )
    assert [run.start for report in (alone, behind) for run in report.runs] == [len(model.preamble)] * 2
    assert alone.exact
    assert not behind.exact, "it was encoded with another context"
