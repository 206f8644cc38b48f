"""Counts of tokens by margin: what they predict, and how several processes store them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrag import FileStore, StoreError
from kvrag.control.evidence import EDGES, MARGINS, EvidenceStore, forecast, rung, scaled, tally

NAME = rung("query", 0.3, False, False)


def _table(seen: list[float], wrong: dict[float, int] | None = None) -> NDArray[np.float64]:
    judged = [(margin, False) for margin in seen] + [
        (margin, True) for margin, n in (wrong or {}).items() for _ in range(n)
    ]
    return tally(seen, judged)


def test_tokens_are_counted_by_margin() -> None:
    table = tally([0.1, scaled(0, 0.2), 7.0, float("nan")], [(0.3, True), (0.4, False)])
    assert table.sum(axis=1).tolist() == [4, 2, 1]
    assert table[0, 0] == 1
    assert table[0, EDGES.index(1.0)] == 1, "0.2 of a first token is 0.6"
    assert table[:, 1].tolist() == [0, 2, 1]
    assert len({rung("query", 0.3, deep, alone) for deep in (False, True) for alone in (False, True)}) == 4


def test_a_larger_margin_loses_less_and_doubts_more() -> None:
    seen = [edge - 0.01 for edge in EDGES] * 3 + [9.0] * 100
    found = [forecast(_table(seen, {1.2: 3}), margin, 12, True) for margin in MARGINS]
    assert all(one.lost >= other.lost for one, other in pairwise(found))
    assert all(one.doubts <= other.doubts for one, other in pairwise(found))
    assert found[0].doubts == 0
    assert all(0 <= share <= 1 for one in found for share in one)


def test_judged_tokens_outweigh_what_is_expected() -> None:
    seen = [0.3] * 20 + [9.0] * 180
    nothing = forecast(tally(seen), 0, 12, True).lost
    assert forecast(_table(seen), 0, 12, True).lost < nothing / 2
    assert forecast(_table(seen, {0.3: 20}), 0, 12, True).lost > nothing
    assert forecast(_table(seen * 10), 0, 12, True).lost < 0.02
    assert forecast(tally([]), 0, 12, False).lost > forecast(tally([]), 0, 12, True).lost, "plain reuse loses more"


def test_two_processes_add_up_and_a_restart_keeps_them(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    one, other = EvidenceStore(store), EvidenceStore(store)
    for evidence, number in ((one, 3), (other, 4)):
        evidence["a"].add(NAME, _table([1.0] * number))
        evidence["a"].count(answers=number, tokens=10 * number)
    one.keep()
    other.keep()
    one["a"].count(answers=1)
    assert one["a"].answers.answers == 4
    one.keep()
    one.keep()
    for again in (one, EvidenceStore(store)):
        assert again["a"].of(NAME)[0].sum() == 7
        assert again["a"].of(NAME)[0, EDGES.index(1.0) + 1] == 7
        assert again["a"].answers[:2] == (8, 70)
    assert EvidenceStore(store)["b"].answers.answers == 0
    one.forget()
    assert one["a"].answers.answers == EvidenceStore(store)["a"].answers.answers == 0


def test_what_is_counted_while_it_is_stored_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    evidence = EvidenceStore(store)
    evidence["a"].count(answers=1)

    def slow(numbers: dict[str, int]) -> None:
        evidence["a"].count(answers=1)
        FileStore.count(store, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(store, "count", slow)
        evidence.keep()
    assert evidence["a"].answers.answers == 2
    evidence.keep()
    assert EvidenceStore(store)["a"].answers.answers == 2


def test_what_cannot_be_stored_is_kept_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    evidence = EvidenceStore(store)
    evidence["a"].count(answers=1)

    def fail(numbers: dict[str, int]) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "count", fail)
        evidence.keep()
    assert EvidenceStore(store)["a"].answers.answers == 0
    evidence.keep()
    assert EvidenceStore(store)["a"].answers.answers == 1


def test_old_counts_fade(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    evidence, other = EvidenceStore(store), EvidenceStore(store)
    for _ in range(40):
        for each in (evidence, other):
            each["a"].add(NAME, _table([1.0] * 500))
            each.keep()
    assert 2000 < evidence["a"].of(NAME)[0].sum() < 6000
    assert (EvidenceStore(store)["a"].of(NAME) >= 0).all()
