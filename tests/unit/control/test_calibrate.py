"""Calibration: the measure, the choice, the stored result, and its effect in the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS, messages

from kvrag import BlendConfig, BlendEngine, FileStore, KvragError, Model, ModelError, SettingError, StoreError
from kvrag.config import DEFAULT_POLICY
from kvrag.control.agreement import Record, choose, is_kept, wilson
from kvrag.control.calibrate import FILE, TRIALS, Agreement, Calibration, choose_setting, settings_of
from kvrag.control.calibrate import PROMPTS as LEAST
from kvrag.control.trial import Cell, Trial
from kvrag.reuse.select import Passes

PROMPT = messages(*CHUNKS)
PROMPTS = [messages(*CHUNKS[i:], *CHUNKS[:i], question=f"Question {i}: who likes curry?") for i in range(4)]
MANY = [messages(*CHUNKS, question=f"Question {i}: who likes curry?") for i in range(40)]
"""As many as a default takes."""


def _point(ratio: float, kept: int, rows: float = 0.0, margin: float | None = None, prompts: int = 40) -> Agreement:
    return Agreement(ratio, margin, kept, prompts, *wilson(kept, prompts), kept, rows)


def test_wilson() -> None:
    assert wilson(99, 100) == pytest.approx((0.9455, 0.9982), abs=5e-4)  # by hand
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=5e-4)
    assert wilson(10, 10)[1] == 1.0
    assert wilson(381, 381)[0] >= 0.99 > wilson(380, 380)[0]


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [((0.8, 0.9, 0.98, 0.97, 1.0), 0.1), ((0.8, 0.9, 0.95, 0.97, 0.97), None), ((1.0,), 0.02)],
)
def test_choose(shares: tuple[float, ...], wanted: float | None) -> None:
    assert choose((0.02, 0.05, 0.1, 0.2, 0.4)[: len(shares)], shares, 0.98) == wanted


def test_an_answer_is_kept_if_no_decided_token_changed() -> None:
    assert is_kept([True, False], [5.0, 0.99])
    assert not is_kept([True, False], [0.1, 1.0])


def test_the_fastest_setting_that_reaches_the_target_is_chosen() -> None:
    settings = [
        _point(0.05, 38, 0.12, 1.0),
        _point(0.15, 40, 0.30, 1.0),
        _point(0.15, 40, 0.301, 1.5),
        _point(0.3, 40, 0.5, 1.0),
    ]
    assert choose_setting(settings, 0.98) == settings[2], "about as fast as the one before, and more careful"
    assert choose_setting(settings, 0.95) == settings[0]
    assert choose_setting(settings, 0.98, sure=True) == settings[2], "none: of those that keep most, the most careful"
    assert choose_setting([_point(0.05, 39, 0.1, 0.5), _point(0.5, 39, 0.9, 3.0)], 0.98).ratio == 0.5
    fixed = _point(0.3, 40, 0.25, 0.0)
    assert choose_setting([*settings, fixed], 0.98) == fixed, "faster than to start lower and to complete many"
    assert choose_setting([*settings, replace(fixed, rows=0.301)], 0.98) == settings[2], "as fast, and more careful"


def _record(tokens: Sequence[int], margins: Sequence[float], recomputed: int) -> Record:
    return Record(list(tokens), list(margins), "", 0.1, 1000, 900, 800, recomputed, 0.0)


def _trial(full: Sequence[float], *cells: tuple[Sequence[int], Sequence[float], int]) -> Trial:
    """A trial at ratios of 0, 0.15, 0.3 and 0.5; the tokens of full prefill are 7."""
    records = [_record(tokens, margins, recomputed) for tokens, margins, recomputed in cells]
    return Trial.of(_record([7] * len(full), full, 0), records)


RATIOS = (0.0, 0.15, 0.3, 0.5)
PASSES = Passes(query=0.8)
SURE = [9.0, 9.0]


def test_a_table_that_says_40_of_40_at_a_ratio_chooses_it() -> None:
    """Below it the model is sure and wrong, so that no margin helps."""
    wrong, right = ([7, 8], SURE), ([7, 7], SURE)
    trial = _trial(SURE, (*wrong, 0), (*wrong, 120), (*right, 240), (*wrong, 400))
    assert [trial.at(number, PASSES).kept for number in range(4)] == [False, False, True, False]
    assert trial.adaptive(2, 0.5, PASSES).kept
    assert not trial.adaptive(1, 3.0, PASSES).kept
    assert trial.at(2, PASSES).rows == pytest.approx((100 * 1.8 + 240) / 1000)
    assert trial.at(0, PASSES).rows == pytest.approx(0.1), "plain reuse selects nothing"


def test_what_a_doubt_costs_and_brings() -> None:
    start = (100 * 1.8 + 120) / 1000
    cells = ([7, 7], [0.9, 9], 0), ([9, 7], [0.9, 9], 120), ([7, 9], [9, 2.9], 240), ([9, 7], [9, 9], 400)
    doubtful = _trial([0.4, 9.0], *cells)
    assert doubtful.near_ties == 1
    # at the first token, which needs a third of the margin
    outcome = doubtful.adaptive(1, 3.0, PASSES)
    assert (outcome.kept, outcome.identical, outcome.rows) == (True, True, pytest.approx(start + (800 + 100) / 1000))
    outcome = doubtful.adaptive(1, 2.0, PASSES)
    assert (outcome.kept, outcome.identical, outcome.rows) == (True, False, pytest.approx(start)), "a near tie"
    assert doubtful.adaptive(0, 3.0, PASSES).rows == pytest.approx(0.1 + 0.9)
    # at a later one
    outcome = doubtful.adaptive(2, 3.0, PASSES)
    assert (outcome.kept, outcome.rows) == (True, pytest.approx((100 * 1.8 + 240) / 1000))
    assert not doubtful.adaptive(2, 2.0, PASSES).kept
    assert not _trial(SURE, *cells).adaptive(3, 3.0, PASSES).kept, "sure and wrong"


def test_a_trial_holds_no_tokens() -> None:
    trial = _trial(SURE, ([7, 12345], [math.inf, 0.123456], 0))
    assert trial.cells == [Cell([0, 1], [99.0, 0.12], 0, 0.1)]
    assert Trial.from_dict(json.loads(json.dumps(asdict(trial)))) == trial


@pytest.fixture
def warmed(engine: BlendEngine) -> Iterator[BlendEngine]:
    engine.warm(CHUNKS)
    return engine


def test_a_calibration_counts_the_answers_that_it_reports(warmed: BlendEngine, endless: Model) -> None:
    steps: list[tuple[int, int]] = []
    found = warmed.calibrate(PROMPTS, ratios=(0.5, 0.1), tokens=3, progress=lambda *step: steps.append(step))
    assert [point.ratio for point in found.curve] == [0.0, 0.1, 0.5]
    assert steps[0] == (0, 16)
    assert dict.fromkeys(steps) == dict.fromkeys((done, 16) for done in range(17))
    for point in found.curve:
        same = kept = 0
        for prompt in PROMPTS:
            ids = endless.tokenizer.render(prompt)
            full = warmed.generate(prompt, policy="full", max_new_tokens=3, temperature=0).token_ids
            caches = [warmed.prefill(ids, BlendConfig(ratio=ratio)) for ratio in (point.ratio, 1.0)]
            logits = [done.logits for done in caches]
            agrees, margins = [], []
            for given, wanted in pairwise((*full, None)):
                ours, theirs = (each[0].topk(2) for each in logits)
                agrees.append(int(ours.indices[0]) == given)
                margins.append(float(theirs.values[0] - theirs.values[1]))
                if wanted is not None:
                    logits = [endless.forward(torch.tensor([[given]]), done.cache) for done in caches]
            same += all(agrees)
            kept += is_kept(agrees, margins)
        assert (point.identical, point.kept, point.prompts) == (same, kept, 4)
    assert found.tokens == 12
    (note,) = found.notes
    assert note.startswith("only 4 prompts, and a default takes 40: nothing is saved.")
    assert "--questions FILE" in note


def test_the_models_own_penalties_count(warmed: BlendEngine, endless: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full prefill answers with them, so that without them it would not agree with itself."""
    monkeypatch.setattr(endless.hf.generation_config, "repetition_penalty", 3.0)
    (*_, point) = warmed.calibrate(PROMPTS, ratios=(0.999999,), tokens=8).curve
    assert (point.identical, point.prompts) == (4, 4)


def test_the_end_of_an_answer_is_compared(warmed: BlendEngine, endless: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = warmed.generate(PROMPT, policy="full", max_new_tokens=3, temperature=0).token_ids
    assert first != second
    for end, number in ((second, 2), (first, 1)):
        monkeypatch.setitem(endless.__dict__, "eos_ids", frozenset({end}))
        found = warmed.calibrate([PROMPT], ratios=(0.999999,), tokens=3)
        assert (found.curve[1].identical, found.tokens) == (1, number)
        warmed.reset_calibration()


def test_the_start_and_margin_found_are_the_default_from_now_on(warmed: BlendEngine, model: Model) -> None:
    assert warmed.generate(PROMPT, controller="off", max_new_tokens=1).report.ratio == 0.15
    found = warmed.calibrate(MANY, ratios=(0.51,), target=0.01, tokens=2)
    assert (found.start, found.ratio) == (0.51, 0.0)
    assert found.margin in (0.5, 1.0, 1.5, 2.0, 3.0)
    assert warmed._tuning.plan(BlendConfig()).margin == found.margin
    assert warmed.generate(PROMPT, controller="off", max_new_tokens=1).report.ratio == 0.51
    assert warmed.generate(PROMPT, ratio=0.5, max_new_tokens=1).report.ratio == 0.5
    folder = Path(warmed.store.stats().path)
    assert not list(folder.rglob("*.tmp"))
    with BlendEngine(model, FileStore(folder, min_free_bytes=0)) as other:
        report = other.generate(PROMPT, controller="off", max_new_tokens=1).report
        assert (report.ratio, report.notes) == (0.51, ())
        assert other.calibration == found
    with BlendEngine(model, FileStore(folder, min_free_bytes=0), BlendConfig(ratio=0.4)) as other:
        assert other.generate(PROMPT, controller="off", max_new_tokens=1).report.ratio == 0.4
    with BlendEngine(model, FileStore(folder, min_free_bytes=0), BlendConfig(margin=0.25)) as other:
        assert other._tuning.plan(other.config).margin == 0.25


def test_without_deepening_the_ratio_is_one_that_keeps_the_answers_alone(warmed: BlendEngine) -> None:
    _kept(warmed, ratio=0.4, start=0.05, margin=2.0)
    plan = warmed._tuning.plan
    assert (plan(BlendConfig()).ratio, plan(BlendConfig(margin=0)).ratio) == (0.05, 0.4)


def test_a_fixed_ratio_is_the_default_where_it_was_chosen_and_until_a_check_finds_lost_answers(
    warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _kept(warmed, ratio=0.3, start=0.4, margin=0.0)
    monkeypatch.setattr("kvrag.control.tuning.MARGIN", 3.0)
    plan = warmed._tuning.plan
    assert (plan(BlendConfig()).ratio, plan(BlendConfig()).margin) == (0.4, 0.0)
    report = warmed.generate(PROMPT, controller="off", max_new_tokens=1).report
    assert (report.ratio, report.completed) == (0.4, None)
    assert (plan(BlendConfig(), 1.1).ratio, plan(BlendConfig(), 1.1).margin) == (0.4, pytest.approx(3.3))
    assert (plan(BlendConfig(margin=0), 1.1).ratio, plan(BlendConfig(margin=0), 1.1).margin) == (0.3, 0.0)
    assert plan(BlendConfig(margin=2)).margin == 2


@pytest.mark.parametrize(("count", "is_saved"), [(2, False), (LEAST - 1, False), (LEAST, True)])
def test_few_prompts_change_no_default(count: int, is_saved: bool, warmed: BlendEngine) -> None:
    found = warmed.calibrate(MANY[:count], ratios=(0.9,), target=0.01, tokens=2)
    assert (found.start, found.curve[0].prompts, found.is_usable) == (0.9, count, is_saved)
    assert (Path(warmed.store.stats().path) / FILE).exists() == is_saved
    assert warmed.generate(PROMPT, controller="off", max_new_tokens=1).report.ratio == (0.9 if is_saved else 0.15)


def test_a_calibration_can_be_tried_and_taken_back(warmed: BlendEngine, model: Model) -> None:
    path = Path(warmed.store.stats().path)
    found = warmed.calibrate(MANY, ratios=(0.9,), target=0.01, tokens=2, save=False)
    assert (found.start, found.is_usable) == (0.9, True)
    assert not (path / FILE).exists()
    assert warmed.generate(PROMPT, controller="off", max_new_tokens=1).report.ratio == 0.15
    _kept(warmed)
    with BlendEngine(model, FileStore(path, min_free_bytes=0)) as again:
        assert again.generate(PROMPT, controller="off", max_new_tokens=1).report.ratio == 0.05
        again.reset_calibration()
        report = again.generate(PROMPT, controller="off", max_new_tokens=1).report
        assert (report.ratio, report.notes) == (0.15, ())
    with BlendEngine(model, FileStore(path, min_free_bytes=0)) as later:
        report = later.generate(PROMPT, controller="off", max_new_tokens=1).report
        assert (report.ratio, report.notes) == (0.15, ())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that were measured."""
    from kvrag.control import calibrate

    asked: list[list[int]] = []

    def compare(model: Model, prefill: Any, ids: list[int], **options: Any) -> Iterator[Record]:
        asked.append(ids)
        return measure(model, prefill, ids, **options)

    measure = calibrate.compare
    monkeypatch.setattr("kvrag.control.calibrate.compare", compare)
    return asked


def test_a_time_limit_ends_it_and_the_next_call_goes_on(warmed: BlendEngine, measured: list[list[int]]) -> None:
    short: dict[str, Any] = {"ratios": (0.9,), "tokens": 2, "save": False}
    found = warmed.calibrate(PROMPTS, limit_s=0, **short)
    assert (len(measured), found.curve[0].prompts) == (1, 1)
    assert found.notes == ("the time limit of 0 minutes ended it after 1 of 4 prompts: run it again to go on",)
    with BlendEngine(warmed.model, FileStore(Path(warmed.store.stats().path), min_free_bytes=0)) as later:
        found = later.calibrate(PROMPTS, **short)
        assert (len(measured), found.curve[0].prompts) == (4, 4), "the first prompt is not measured again"
    again = warmed.calibrate(PROMPTS, limit_s=0, **short)
    assert (len(measured), again.curve, again.adaptive) == (4, found.curve, found.adaptive)
    with pytest.raises(SettingError, match="limit_s"):
        warmed.calibrate(PROMPTS, limit_s=-1)


def test_what_was_measured_is_used_on_the_same_chunks_and_settings_only(
    warmed: BlendEngine, measured: list[list[int]]
) -> None:
    short: dict[str, Any] = {"ratios": (0.9,), "tokens": 2, "save": False}
    folder = Path(warmed.store.stats().path)
    for changes in ({}, {"tokens": 3}, {"ratios": (0.8,)}, {"policy": "first_k"}):
        warmed.calibrate(PROMPTS[:1], **short | changes)
    assert len(measured) == 4
    warmed.calibrate(PROMPTS[:1], **short | {"target": 0.5, "sure": True})
    assert len(measured) == 4, "what is accepted changes nothing of what was measured"
    warmed.warm(["Another document, which says that Mira Brel moved to Grelville a long time ago, in a red car."])
    warmed.calibrate(PROMPTS[:1], **short)
    assert len(measured) == 5
    (folder / TRIALS).write_text('{"x": 1')
    warmed.calibrate(PROMPTS[:1], **short)
    assert len(measured) == 6, "damaged"
    kept = json.loads((folder / TRIALS).read_text())
    (folder / TRIALS).write_text(json.dumps({setup: [] for setup in kept}))
    warmed.calibrate(PROMPTS[:1], **short)
    assert len(measured) == 7, "damaged"
    warmed.reset_calibration()
    warmed.calibrate(PROMPTS[:1], **short)
    assert len(measured) == 8


def test_prompts_without_anything_to_recompute_are_remembered(warmed: BlendEngine, measured: list[list[int]]) -> None:
    for _ in range(2):
        with pytest.raises(StoreError, match="nothing to recompute"):
            warmed.calibrate([messages("Never warmed.")])
    assert len(measured) == 1


def test_a_document_deleted_meanwhile_is_measured_once_it_is_back(engine: BlendEngine) -> None:
    short: dict[str, Any] = {"ratios": (0.9,), "tokens": 2, "save": False}
    engine.warm(CHUNKS, document="a")

    def forget(done: int, total: int) -> None:
        if done == total // 2:
            engine.forget("a")

    assert engine.calibrate(PROMPTS[:2], progress=forget, **short).curve[0].prompts == 1
    engine.warm(CHUNKS, document="a")
    assert engine.calibrate(PROMPTS[:2], **short).curve[0].prompts == 2


def test_a_readable_result(warmed: BlendEngine) -> None:
    found = warmed.calibrate(PROMPTS, ratios=(0.15,), tokens=2, target=0.01)
    lines = str(found).splitlines()
    assert lines[0] == "4 prompts, policy query"
    assert lines[1].endswith("of 8 are near ties)")
    marked = [line for line in lines if "<-" in line]
    assert len(marked) == 1
    assert (f"0.15, margin {found.margin:g}" if found.margin else "  0.15    ") in marked[0]
    fixed = str(replace(found, margin=0.0, adaptive=(_point(0.15, 4, 0.3, 0.0, 4),)))
    assert [line.split()[0] for line in fixed.splitlines() if "<-" in line] == ["0.15"]
    assert lines[-2].startswith("only 4 prompts")
    assert lines[-1] == found.verdict
    assert max(map(len, lines[:-2])) <= 90


def test_the_verdict() -> None:
    config = BlendConfig()
    made = Calibration("", config.policy, {}, 0.98, False, (), 0.3, "", start=0.15, margin=1.0)
    found = replace(made, adaptive=(_point(0.15, 40, 0.21, 1.0),))
    assert found.verdict == (
        "adaptive recompute (start 0.15, margin 1) keeps 40 of 40 answers (91% to 100%), with 0.21 of full prefill's "
        "rows before the first token, and reaches the target of 0.98"
    )
    fixed = replace(made, margin=0.0, adaptive=(_point(0.15, 40, 0.21, 0.0),))
    assert fixed.verdict.startswith("a fixed ratio of 0.15 keeps 40 of 40 answers (91% to 100%), with 0.21 of")
    verdict = replace(found, sure=True).verdict
    assert "reaches the target of 0.98 with 95 % confidence: the most careful one" in verdict
    assert "`kvrag calibrate --target 0.912 --sure` accepts" in verdict
    verdict = replace(made, adaptive=(_point(0.5, 37, 0.6, 3.0),)).verdict
    assert verdict.startswith(
        "no setting reaches the target of 0.98: the most careful one (start 0.5, margin 3) keeps 37"
    )
    assert "`kvrag calibrate --target 0.925` accepts the fastest that keeps as many" in verdict
    assert "--target" not in replace(made, adaptive=(_point(0.5, 0, 0.6, 3.0),)).verdict


def test_a_bar_is_shown_on_a_terminal_only(
    warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short: dict[str, Any] = {"ratios": (0.9,), "tokens": 1, "save": False}
    warmed.calibrate(PROMPTS[:1], **short)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    warmed.calibrate(PROMPTS[:1], **short)
    assert "calibrating: 0%|" in capsys.readouterr().err


def test_a_sure_calibration_goes_by_the_lower_end_of_the_interval(warmed: BlendEngine) -> None:
    nearly_all: dict[str, Any] = {"ratios": (0.999999,), "target": 0.95, "tokens": 2, "save": False}
    assert "and reaches the target" in warmed.calibrate(MANY, **nearly_all).verdict
    found = warmed.calibrate(MANY, **nearly_all, sure=True)
    assert found.ratio is None, "40 of 40 may be 91 %"
    assert "no setting reaches" in found.verdict


def _kept(engine: BlendEngine, **changes: Any) -> None:
    config = BlendConfig()
    made: dict[str, Any] = {
        "fingerprint": engine.model.fingerprint.digest,
        "policy": config.policy,
        "settings": settings_of(config),
        "target": 0.98,
        "sure": False,
        "curve": (_point(0.05, 40),),
        "adaptive": (_point(0.05, 40),),
        "ratio": 0.05,
        "start": 0.05,
        "made": "2026-01-01T00:00:00+00:00",
    }
    engine.store.change_text(FILE, lambda _: Calibration(**(made | changes)).to_json())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fingerprint": "0" * 32}, "another model or other load settings"),
        ({"policy": "hkvd"}, "policy hkvd, not query"),
        ({"settings": settings_of(BlendConfig(min_run=20))}, "other settings (min_run)"),
        ({"policy": "query:first_tokens=4"}, "policy query:first_tokens=4, not query"),
    ],
)
def test_a_calibration_for_something_else_is_ignored(changes: dict[str, Any], why: str, warmed: BlendEngine) -> None:
    _kept(warmed, **changes)
    report = warmed.generate(PROMPT, controller="off", max_new_tokens=1).report
    assert report.ratio == 0.15
    assert report.notes == (f"the store's calibration is ignored: it was made for {why}",)
    assert warmed.generate(PROMPT, max_new_tokens=1, policy="none").report.notes == ()


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"ratio": 3}', b"null", b"5"])
def test_a_damaged_calibration_does_not_stop_answers(content: bytes, warmed: BlendEngine) -> None:
    path = Path(warmed.store.stats().path) / FILE
    path.write_bytes(content)
    report = warmed.generate(PROMPT, controller="off", max_new_tokens=1).report
    assert report.ratio == 0.15
    (note,) = report.notes
    assert str(path) in note
    assert "kvrag calibrate" in note
    assert warmed.calibrate(MANY, ratios=(0.9,), target=0.01, tokens=2).start == 0.9
    assert warmed.generate(PROMPT, controller="off", max_new_tokens=1).report.notes == ()


def test_a_calibration_that_cannot_be_read_is_read_again(warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    _kept(warmed, ratio=0.4, start=0.4)

    def gone(name: str) -> str:
        raise StoreError("the bucket cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr(warmed.store, "read_text", gone)
        report = warmed.generate(PROMPT, controller="off", max_new_tokens=1).report
    assert report.notes == ("no calibration: the bucket cannot be reached; if this lasts, run `kvrag calibrate` again",)
    report = warmed.generate(PROMPT, controller="off", max_new_tokens=1).report
    assert (report.ratio, report.notes) == (0.4, ())


@pytest.mark.parametrize(
    "changes",
    [{"ratio": 7.0}, {"start": -1.0}, {"margin": -0.5}, {"margin": math.nan}, {"adaptive": ()}, {"curve": ()}],
    ids=str,
)
def test_a_stored_number_out_of_range_is_damage(changes: dict[str, Any], warmed: BlendEngine) -> None:
    _kept(warmed, **changes)
    assert "is damaged" in warmed.generate(PROMPT, controller="off", max_new_tokens=1).report.notes[0]


def test_json_there_and_back(warmed: BlendEngine) -> None:
    found = warmed.calibrate(PROMPTS, ratios=(0.1, 0.2), tokens=2)
    assert Calibration.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["curve"][0]["prompts"] == 4


def test_a_store_that_cannot_be_written_costs_no_work(warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(warmed.store, "change_text", full_disk)
    found = warmed.calibrate(MANY, ratios=(0.9,), target=0.01, tokens=2)
    assert found.notes[-1] == "valid for this process only: the disk is full"
    assert warmed.generate(PROMPT, controller="off", max_new_tokens=1).report.ratio == 0.9


def test_prompts_are_made_of_the_chunks(warmed: BlendEngine, measured: list[list[int]]) -> None:
    found = warmed.calibrate(count=3, ratios=(0.9,), tokens=2)
    assert (found.curve[0].prompts, len(measured)) == (3, 3)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 1.5}, "target must be in"),
        ({"target": 0}, "target must be in"),
        ({"ratios": ()}, "ratios must be"),
        ({"ratios": (0.1, 1.0)}, "ratios must be"),
        ({"ratios": (-0.1,)}, "ratio must be"),
        ({"ratios": (0.1, -1.0)}, "ratio must be"),
        ({"policy": "full"}, "no ratio"),
        ({"policy": "none"}, "no ratio"),
        ({"tokens": 0}, "tokens"),
        ({"count": 0}, "count"),
        ({"chunks": 1}, "chunks"),
        ({"prompts": "one string"}, "not one string"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str, warmed: BlendEngine) -> None:
    with pytest.raises(SettingError, match=message):
        warmed.calibrate(**({"prompts": PROMPTS} | settings))
    assert not (Path(warmed.store.stats().path) / FILE).exists()


def test_an_empty_store(engine: BlendEngine) -> None:
    with pytest.raises(StoreError, match="there are none: warm the corpus"):
        engine.calibrate()
    with pytest.raises(StoreError, match="nothing to recompute"):
        engine.calibrate(PROMPTS)
    engine.warm(CHUNKS[:1])
    with pytest.raises(StoreError, match="there is one: warm the corpus"):
        engine.calibrate()
    with pytest.raises(StoreError, match="nothing to recompute"):
        engine.calibrate([messages(CHUNKS[0])])


def test_chunks_without_sentences(engine: BlendEngine) -> None:
    engine.warm(["==".join(f"{n}{i}" for i in range(40)) for n in "ab"])
    with pytest.raises(KvragError, match="none of 2 chunks has a complete sentence"):
        engine.calibrate()


def test_prompts_with_nothing_to_recompute_are_left_out_and_reported(warmed: BlendEngine) -> None:
    found = warmed.calibrate([*PROMPTS, messages("Never warmed.")], ratios=(0.2,), tokens=2)
    assert found.curve[0].prompts == 4
    assert found.notes[0] == "1 prompts had nothing to recompute and were left out"


@pytest.mark.parametrize("policy", ["full", DEFAULT_POLICY])
def test_logits_that_are_nan(policy: str, warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = warmed.prefill

    def overflowing(ids: list[int], config: BlendConfig, **_: Any) -> Any:
        done = prefill(ids, config)
        if config.policy == policy:
            done.logits = done.logits * math.nan
        return done

    monkeypatch.setattr(warmed, "prefill", overflowing)
    with pytest.raises(ModelError, match="dtype='bfloat16'"):
        warmed.calibrate(PROMPTS)
    assert not (Path(warmed.store.stats().path) / FILE).exists()


def _interrupt_at(step: int) -> Callable[[int, int], None]:
    def interrupt(done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return interrupt


def test_an_interrupted_calibration_reports_the_prompts_that_are_done_and_goes_on(
    warmed: BlendEngine, measured: list[list[int]]
) -> None:
    short: dict[str, Any] = {"ratios": (0.9,), "target": 0.01, "tokens": 2}
    with pytest.raises(KeyboardInterrupt):
        warmed.calibrate(PROMPTS, progress=_interrupt_at(2), **short)
    found = warmed.calibrate(PROMPTS, progress=_interrupt_at(8), **short)  # in the third prompt
    assert (found.curve[0].prompts, found.interrupted, found.is_usable) == (2, True, False)
    assert found.notes == ("interrupted after 2 of 4 prompts: run it again to go on",)
    assert warmed.generate(PROMPT, controller="off", max_new_tokens=1).report.ratio == 0.15
    assert len(measured) == 4, "one of them twice"
    found = warmed.calibrate(PROMPTS, **short)
    assert (found.curve[0].prompts, len(measured)) == (4, 6)
    found = warmed.calibrate(
        [*MANY, messages(*CHUNKS, question="Who?")], progress=_interrupt_at(3 * LEAST + 1), **short
    )
    assert (found.curve[0].prompts, found.interrupted, found.is_usable) == (LEAST, True, True)
    assert warmed.generate(PROMPT, controller="off", max_new_tokens=1).report.ratio == 0.9


def test_a_calibration_is_valid_for_every_history(warmed: BlendEngine) -> None:
    """Also one that was made before histories could be blended: it does not name the setting."""
    warmed.calibrate(MANY, ratios=(0.51,), target=0.01, tokens=2)
    for history in ("exact", "blend"):
        report = warmed.generate(PROMPT, history=history, controller="off", max_new_tokens=1).report
        assert (report.ratio, report.notes) == (0.51, ())
    assert warmed.calibration is not None
    assert "history" not in warmed.calibration.settings
