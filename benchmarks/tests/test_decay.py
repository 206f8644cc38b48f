"""`python -m benchmarks decay` on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.speed import decay
from benchmarks.speed.decay import DecaySetup, Document, corpus, measure, steps
from kvrag import SettingError

SMALL = DecaySetup(parts=2, prompts=24, documents=12, change_every=6, full_every=12)


def test_prompts_are_of_the_current_documents() -> None:
    documents, gone = {*corpus(SMALL)}, set[str]()
    rewritten = 0
    for number, step in enumerate(steps(SMALL)):
        assert (step.warmed is not None) == (number > 0 and number % SMALL.change_every == 0)
        if step.warmed:
            old = next(document for document in documents if document.name in (step.forgotten, step.warmed.name))
            rewritten += old == Document(step.warmed.name, step.warmed.version - 1)
            documents = documents - {old} | {step.warmed}
            gone |= {step.forgotten} - {""}
        assert len({*step.chunks}) == SMALL.top_k
        assert {document for document, _ in step.chunks} <= documents
    assert len(documents) == SMALL.documents
    assert (rewritten, len(gone)) == (4, 3), "every other change"
    assert list(steps(SMALL)) == list(steps(SMALL))
    assert list(steps(SMALL)) != list(steps(replace(SMALL, seed=1)))


def test_a_store_with_room_for_everything_reuses_everything() -> None:
    result = measure(replace(SMALL, room=1.2, exponent=0.0), learn=[False])
    for row in result["rows"]:
        assert row["hit_rate"] > 0.98
        assert row["best"] == 1
        assert row["computed"] < 0.4
    assert result["lasting"] == {"off": pytest.approx(1, abs=0.02)}


def test_learning_brings_evicted_chunks_back_and_a_killed_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure(SMALL)
    rates = {learn: [row["hit_rate"] for row in whole["rows"] if row["learn"] == learn] for learn in (False, True)}
    assert rates[True][1] > rates[False][1] + 0.2
    assert rates[True][1] < whole["rows"][3]["best"] <= 1
    assert all(0 < row["chunks"] <= 20 for row in whole["rows"]), "a third of 60"
    assert [row["encoded"] > 0 for row in whole["rows"]] == [True] * 4

    def dies(setup: DecaySetup) -> Any:
        for number, step in enumerate(steps(setup)):
            if number == 30:  # in the second part
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(decay, "steps", dies)
    with pytest.raises(KeyboardInterrupt):
        measure(SMALL, [True], tmp_path)
    monkeypatch.setattr(decay, "steps", steps)
    continued = measure(SMALL, [True], tmp_path)["rows"]
    assert [row["prompts"] for row in continued] == [24, 48]
    assert continued[0]["hit_rate"] == pytest.approx(rates[True][0], abs=0.1)
    assert continued[1]["hit_rate"] > rates[False][1] + 0.2
    monkeypatch.setattr(decay, "ask", None)  # nothing is measured twice
    assert measure(SMALL, [True], tmp_path)["rows"] == continued
    with pytest.raises(SettingError, match="of a run with other settings: choose another folder"):
        measure(replace(SMALL, seed=1), [True], tmp_path)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["decay", "--documents", "12", "--parts", "2", "--prompts", "5", "--learn", "on"]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["learn"], row["prompts"]) for row in result["rows"]] == [(True, 5), (True, 10)]
    assert main(argv) == 0
    *_, heads, first, second, summary = capsys.readouterr().out.splitlines()
    assert len(heads.split()) == len(first.replace(" ms", "").split()) + 1 == 11, "'hit rate' is two words"
    assert second.split()[:2] == ["on", "10"]
    assert summary.startswith("learn on: the last hit rate is")
