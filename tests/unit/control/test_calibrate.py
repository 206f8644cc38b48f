"""Calibration: the choice, the interval, the stored result, and its effect in the engine."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS, messages

from kvrag import BlendConfig, BlendEngine, FileStore, KvragError, Model, ModelError, SettingError, StoreError
from kvrag.cli.calibrate import calibrate_after_warming
from kvrag.config import DEFAULT_POLICY
from kvrag.control.agreement import choose, wilson
from kvrag.control.calibrate import FILE, Agreement, Calibration, settings_of
from kvrag.control.calibrate import PROMPTS as LEAST
from kvrag.control.prompts import first_word, make_prompts, search_by_words
from kvrag.errors import PromptError

PROMPT = messages(*CHUNKS)
PROMPTS = [messages(*CHUNKS[i:], *CHUNKS[:i], question=f"Question {i}: who likes curry?") for i in range(4)]
MANY = PROMPTS * 10
"""As many as a default takes."""


def _curve(*first: int, prompts: int = 100) -> tuple[Agreement, ...]:
    ratios = (0.02, 0.05, 0.1, 0.2, 0.4)
    return tuple(Agreement(r, n, prompts, *wilson(n, prompts), 0, 0) for r, n in zip(ratios, first, strict=False))


def test_wilson() -> None:
    assert wilson(99, 100) == pytest.approx((0.9455, 0.9982), abs=5e-4)  # by hand
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=5e-4)
    assert wilson(10, 10)[1] == 1.0
    assert wilson(381, 381)[0] >= 0.99 > wilson(380, 380)[0]


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ((0.8, 0.9, 0.99, 1.0, 1.0), 0.1),
        ((0.99, 0.9, 0.99, 1.0, 1.0), 0.1),  # the first was luck
        ((0.8, 0.9, 0.95, 0.98, 0.99), 0.4),
        ((0.8, 0.9, 0.95, 0.98, 0.98), None),
        ((1.0,), 0.02),
    ],
)
def test_choose(shares: tuple[float, ...], wanted: float | None) -> None:
    assert choose((0.02, 0.05, 0.1, 0.2, 0.4)[: len(shares)], shares, 0.99) == wanted


@pytest.fixture
def warmed(engine: BlendEngine) -> Iterator[BlendEngine]:
    engine.warm(CHUNKS)
    return engine


def test_a_calibration_counts_the_answers_that_it_reports(warmed: BlendEngine, endless: Model) -> None:
    steps: list[tuple[int, int]] = []
    found = warmed.calibrate(PROMPTS, ratios=(0.5, 0.1), tokens=3, progress=lambda *step: steps.append(step))
    assert [point.ratio for point in found.curve] == [0.1, 0.5]
    assert steps == [(done, 12) for done in range(13)]
    for point in found.curve:
        assert (point.prompts, point.tokens) == (4, 8)
        same = 0
        following = 0
        for prompt in PROMPTS:
            full = warmed.generate(prompt, policy="full", max_new_tokens=3, temperature=0).token_ids
            ours = warmed.generate(prompt, ratio=point.ratio, max_new_tokens=1, temperature=0).token_ids
            same += ours[0] == full[0]
            cache = warmed.prefill(endless.tokenizer.render(prompt), BlendConfig(ratio=point.ratio)).cache
            for given, wanted in pairwise(full):
                following += int(endless.forward(torch.tensor([[given]]), cache).argmax()) == wanted
        assert (point.first, point.following) == (same, following)
    (note,) = found.notes
    assert note.startswith("only 4 prompts, and a default takes 40: nothing is saved.")
    assert "--questions FILE" in note


def test_the_end_of_an_answer_is_compared(warmed: BlendEngine, endless: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = warmed.generate(PROMPT, policy="full", max_new_tokens=3, temperature=0).token_ids
    assert first != second
    for end, following in ((second, 1), (first, 0)):
        monkeypatch.setitem(endless.__dict__, "eos_ids", frozenset({end}))
        (point,) = warmed.calibrate([PROMPT], ratios=(0.999999,), tokens=3).curve
        assert (point.first, point.following, point.tokens) == (1, following, following)


def test_everything_recomputed_agrees_always(warmed: BlendEngine) -> None:
    found = warmed.calibrate(PROMPTS, ratios=(0.0, 0.999999), target=1.0)
    assert found.curve[1].share == 1.0
    assert found.curve[1].following == found.curve[1].tokens


def test_the_ratio_found_is_the_default_from_now_on(warmed: BlendEngine, model: Model) -> None:
    assert warmed.generate(PROMPT, max_new_tokens=1).report.ratio == 0.15
    found = warmed.calibrate(MANY, ratios=(0.51,), target=0.01)
    assert found.ratio == 0.51
    assert warmed.generate(PROMPT, max_new_tokens=1).report.ratio == 0.51
    assert warmed.generate(PROMPT, ratio=0.5, max_new_tokens=1).report.ratio == 0.5
    folder = Path(warmed.store.stats().path)
    assert not list(folder.rglob("*.tmp"))
    with BlendEngine(model, FileStore(folder, min_free_bytes=0)) as other:
        report = other.generate(PROMPT, max_new_tokens=1).report
        assert (report.ratio, report.notes) == (0.51, ())
        assert report.recomputed_tokens == round(0.51 * sum(len(run) for run in report.runs[1:]))
    with BlendEngine(model, FileStore(folder, min_free_bytes=0), BlendConfig(ratio=0.4)) as other:
        assert other.generate(PROMPT, max_new_tokens=1).report.ratio == 0.4


@pytest.mark.parametrize(("count", "is_saved"), [(2, False), (LEAST - 1, False), (LEAST, True)])
def test_few_prompts_change_no_default(count: int, is_saved: bool, warmed: BlendEngine) -> None:
    found = warmed.calibrate(MANY[:count], ratios=(0.9,), target=0.01)
    assert (found.ratio, found.curve[0].prompts, found.is_usable) == (0.9, count, is_saved)
    assert (Path(warmed.store.stats().path) / FILE).exists() == is_saved
    assert warmed.generate(PROMPT, max_new_tokens=1).report.ratio == (0.9 if is_saved else 0.15)


def test_a_calibration_can_be_tried_and_taken_back(warmed: BlendEngine, model: Model) -> None:
    path = Path(warmed.store.stats().path)
    found = warmed.calibrate(MANY, ratios=(0.9,), target=0.01, save=False)
    assert (found.ratio, found.is_usable) == (0.9, True)
    assert not (path / FILE).exists()
    assert warmed.generate(PROMPT, max_new_tokens=1).report.ratio == 0.15
    _kept(warmed)
    with BlendEngine(model, FileStore(path, min_free_bytes=0)) as again:
        assert again.generate(PROMPT, max_new_tokens=1).report.ratio == 0.05
        again.reset_calibration()
        report = again.generate(PROMPT, max_new_tokens=1).report
        assert (report.ratio, report.notes) == (0.15, ())
    with BlendEngine(model, FileStore(path, min_free_bytes=0)) as later:
        report = later.generate(PROMPT, max_new_tokens=1).report
        assert (report.ratio, report.notes) == (0.15, ())


@pytest.fixture
def unmeasured(warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> BlendEngine:
    """An engine of a model whose answers nobody compared with full prefill's."""
    monkeypatch.setattr("kvrag.fingerprint.Fingerprint.is_bundled", False)
    return warmed


def test_without_a_calibration_answers_come_by_full_prefill_and_this_is_said(
    unmeasured: BlendEngine, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        report = unmeasured.generate(PROMPT, max_new_tokens=1).report
        assert (report.policy, report.runs, report.exact) == ("full", (), True)
        (note,) = report.notes
        assert note.startswith("not calibrated (run `kvrag calibrate`")
        assert note.endswith("so full prefill is used")
    (record,) = caplog.records
    assert note in record.getMessage(), "once"
    assert unmeasured.calibration is None


@pytest.mark.parametrize("options", [{"policy": "query"}, {"controller": "off"}])
def test_blending_that_was_asked_for_says_that_it_is_not_calibrated(
    options: dict[str, Any], unmeasured: BlendEngine, caplog: pytest.LogCaptureFixture
) -> None:
    report = unmeasured.generate(PROMPT, max_new_tokens=1, **options).report
    assert (report.policy, report.ratio) == ("query", 0.15)
    assert "not calibrated" in report.notes[0]
    assert "not calibrated" in caplog.text
    assert unmeasured.generate(PROMPT, max_new_tokens=1, ratio=0.15, **options).report.notes == ()


def test_a_calibration_ends_the_careful_default_until_it_is_reset(unmeasured: BlendEngine) -> None:
    found = unmeasured.calibrate(MANY, ratios=(0.9,), target=0.01)
    assert unmeasured.calibration == found
    report = unmeasured.generate(PROMPT, max_new_tokens=1).report
    assert (report.ratio, report.notes) == (0.9, ())
    unmeasured.reset_calibration()
    assert unmeasured.generate(PROMPT, max_new_tokens=1).report.policy == "full"


def test_a_prompt_much_longer_than_the_calibrated_ones_is_noted(warmed: BlendEngine) -> None:
    length = warmed.generate(PROMPT, max_new_tokens=1).report.prompt_tokens
    _kept(warmed, longest=length // 2 + 1)
    assert warmed.generate(PROMPT, max_new_tokens=1).report.notes == ()
    _kept(warmed, longest=length // 2 - 1)
    with BlendEngine(warmed.model, FileStore(Path(warmed.store.stats().path), min_free_bytes=0)) as later:
        (note,) = later.generate(PROMPT, max_new_tokens=1).report.notes
    assert f"calibrated on prompts of up to {length // 2 - 1} tokens" in note
    found = warmed.calibrate(PROMPTS, ratios=(0.9,), save=False)
    assert found.longest >= length


def test_a_calibration_that_would_take_too_long_stops(warmed: BlendEngine) -> None:
    found = warmed.calibrate(MANY, ratios=(0.9,), limit_s=1e-9)
    assert (found.curve[0].prompts, found.is_usable) == (1, False)
    assert "stopped after 1 of 40 prompts" in found.notes[-2]
    assert len(warmed.calibrate(MANY, ratios=(0.9,), limit_s=1e9).notes) == 0
    with pytest.raises(PromptError, match="stopped after 0 of 8 prompts"):  # those that are left out take time, too
        warmed.calibrate(None, ratios=(0.9,), limit_s=1e-9)


def test_warming_calibrates_at_its_end(unmeasured: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(namespace="", json=True)
    calibration, outcome = calibrate_after_warming(unmeasured, [], args)
    assert calibration is None
    assert outcome.startswith("not calibrated: the model completes none of")
    assert outcome.endswith("or with --ratio")

    def with_prompts(**options: Any) -> Calibration:
        return BlendEngine.calibrate(unmeasured, MANY, **options | {"target": 0.01})

    monkeypatch.setattr(unmeasured, "calibrate", with_prompts)
    calibration, outcome = calibrate_after_warming(unmeasured, [], args)
    assert calibration is not None
    first = calibration.curve[0].first
    assert outcome.startswith(f"on these documents, 15% gives {first} of 40 first words of full prefill; ")
    assert unmeasured.generate(PROMPT, max_new_tokens=1).report.ratio == calibration.ratio
    assert calibrate_after_warming(unmeasured, [], args) == (calibration, ""), "it is not repeated"


def test_a_sure_calibration_goes_by_the_lower_end_of_the_interval(warmed: BlendEngine) -> None:
    nearly_all = {"ratios": (0.999999,), "target": 0.95, "save": False}
    assert warmed.calibrate(MANY, **nearly_all).ratio == 0.999999
    assert warmed.calibrate(MANY, **nearly_all, sure=True).ratio is None, "40 of 40 may be 91 %"


def _kept(engine: BlendEngine, **changes: Any) -> None:
    config = BlendConfig()
    made: dict[str, Any] = {
        "fingerprint": engine.model.fingerprint.digest,
        "policy": config.policy,
        "settings": settings_of(config),
        "target": 0.99,
        "sure": False,
        "curve": _curve(90, 95),
        "ratio": 0.05,
        "made": "2026-01-01T00:00:00+00:00",
    }
    engine.store.change_text(FILE, lambda _: Calibration(**(made | changes)).to_json())  # type: ignore[attr-defined]


def test_if_no_ratio_reaches_the_target_full_prefill_is_used(warmed: BlendEngine) -> None:
    _kept(warmed, ratio=None)
    report = warmed.generate(PROMPT, max_new_tokens=1).report
    assert (report.policy, report.ratio, report.exact) == ("full", 1.0, True)
    assert report.notes == ("calibration: no ratio up to 0.05 reaches the target, so full prefill is used",)
    for settings in ({"policy": DEFAULT_POLICY}, {"controller": "off"}):
        report = warmed.generate(PROMPT, max_new_tokens=1, **settings).report
        assert (report.policy, report.ratio) == (DEFAULT_POLICY, 0.15)
        assert "no ratio up to 0.05 reaches" in report.notes[0]
    report = warmed.generate(PROMPT, max_new_tokens=1, ratio=0.2).report
    assert (report.policy, report.ratio, report.notes) == (DEFAULT_POLICY, 0.2, ())


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
    report = warmed.generate(PROMPT, max_new_tokens=1).report
    assert report.ratio == 0.15
    assert report.notes == (f"the store's calibration is ignored: it was made for {why}",)
    assert warmed.generate(PROMPT, max_new_tokens=1, policy="none").report.notes == ()


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"ratio": 3}', b"null"])
def test_a_damaged_calibration_does_not_stop_answers(content: bytes, warmed: BlendEngine) -> None:
    path = Path(warmed.store.stats().path) / FILE
    path.write_bytes(content)
    report = warmed.generate(PROMPT, max_new_tokens=1).report
    assert report.ratio == 0.15
    (note,) = report.notes
    assert str(path) in note
    assert "kvrag calibrate" in note
    assert warmed.calibrate(MANY, ratios=(0.9,), target=0.01).ratio == 0.9
    assert warmed.generate(PROMPT, max_new_tokens=1).report.notes == ()


def test_a_calibration_that_cannot_be_read_is_read_again(warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    _kept(warmed, ratio=0.4)

    def gone(name: str) -> str:
        raise StoreError("the bucket cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr(warmed.store, "read_text", gone)
        report = warmed.generate(PROMPT, max_new_tokens=1).report
    assert report.notes == ("no calibration: the bucket cannot be reached; if this lasts, run `kvrag calibrate` again",)
    report = warmed.generate(PROMPT, max_new_tokens=1).report
    assert (report.ratio, report.notes) == (0.4, ())


def test_a_stored_ratio_out_of_range_is_damage(warmed: BlendEngine) -> None:
    _kept(warmed, ratio=7.0)
    assert "is damaged" in warmed.generate(PROMPT, max_new_tokens=1).report.notes[0]


def test_json_there_and_back(warmed: BlendEngine) -> None:
    found = warmed.calibrate(PROMPTS, ratios=(0.1, 0.2))
    assert Calibration.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["curve"][0]["prompts"] == 4


def test_a_store_that_cannot_be_written_costs_no_work(warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(warmed.store, "change_text", full_disk)
    found = warmed.calibrate(MANY, ratios=(0.9,), target=0.01)
    assert found.notes[-1] == "valid for this process only: the disk is full"
    assert warmed.generate(PROMPT, max_new_tokens=1).report.ratio == 0.9


# ---------------------------------------------------------------- prompts of its own


def test_prompts_are_made_of_the_chunks_and_guesses_are_left_out(
    warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_prompts(warmed.model, CHUNKS, search_by_words(CHUNKS), 6)
    words = []
    for prompt in made:
        done = warmed.prefill(prompt.ids, BlendConfig(policy="full", controller="off"))
        answer, logits = [], done.logits
        for _ in range(8):
            answer.append(int(logits.argmax()))
            logits = warmed.model.forward(torch.tensor([answer[-1:]]), done.cache)
        words.append(first_word(warmed.model.tokenizer.decode(answer)))
    wanted = [words[0], "never", words[2], *words[3:]]
    changed = [replace(one, word=word) for one, word in zip(made, wanted, strict=True)]
    asked: list[int] = []

    def remade(model: Model, texts: list[str], search: object, count: int, *_: object) -> list[Any]:
        asked.append(count)
        return changed

    monkeypatch.setattr("kvrag.engine.make_prompts", remade)
    steps: list[tuple[int, int]] = []
    found = warmed.calibrate(count=2, ratios=(0.2,), progress=lambda *step: steps.append(step))
    assert asked == [6]
    assert found.curve[0].prompts == 2
    assert "1 prompts were left out: full prefill continues them differently" in found.notes[0]
    assert steps == [(done, 4) for done in range(5)]
    changed = [replace(one, word="never") for one in made]
    with pytest.raises(PromptError, match="completes none of 6 sentences"):
        warmed.calibrate(count=2)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 1.5}, "target must be in"),
        ({"target": 0}, "target must be in"),
        ({"ratios": ()}, "ratios must be"),
        ({"ratios": (0.1, 1.0)}, "ratios must be"),
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
    found = warmed.calibrate([*PROMPTS, messages("Never warmed.")], ratios=(0.2,))
    assert found.curve[0].prompts == 4
    assert found.notes[0] == "1 prompts had nothing to recompute and were left out"


@pytest.mark.parametrize("policy", ["full", DEFAULT_POLICY])
def test_logits_that_are_nan(policy: str, warmed: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = warmed.prefill

    def overflowing(ids: list[int], config: BlendConfig, **_: Any) -> Any:
        done = prefill(ids, config)
        return replace(done, logits=done.logits * math.nan) if config.policy == policy else done

    monkeypatch.setattr(warmed, "prefill", overflowing)
    with pytest.raises(ModelError, match="dtype='bfloat16'"):
        warmed.calibrate(PROMPTS)
    assert not (Path(warmed.store.stats().path) / FILE).exists()


def _interrupt_at(step: int) -> Callable[[int, int], None]:
    def interrupt(done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return interrupt


def test_an_interrupted_calibration_reports_the_prompts_that_are_done(warmed: BlendEngine) -> None:
    _kept(warmed)
    whole = warmed.calibrate(PROMPTS[:2], ratios=(0.1, 0.5)).curve
    _kept(warmed)
    again = BlendEngine(warmed.model, Path(warmed.store.stats().path))
    with again:
        found = again.calibrate(PROMPTS, ratios=(0.1, 0.5), progress=_interrupt_at(8))  # in the third prompt
        assert (found.curve, found.interrupted, found.is_usable) == (whole, True, False)
        assert found.notes[0] == "interrupted after 2 of 4 prompts"
        assert again.generate(PROMPT, max_new_tokens=1).report.ratio == 0.05, "too few: the old one stays"
        with pytest.raises(KeyboardInterrupt):
            again.calibrate(PROMPTS, progress=_interrupt_at(3))
        found = again.calibrate(MANY * 2, ratios=(0.9,), target=0.01, progress=_interrupt_at(2 * LEAST + 1))
        assert (found.curve[0].prompts, found.interrupted, found.is_usable) == (LEAST, True, True)
        assert again.generate(PROMPT, max_new_tokens=1).report.ratio == 0.9


def test_a_calibration_is_valid_for_every_history(warmed: BlendEngine) -> None:
    """Also one that was made before histories could be blended: it does not name the setting."""
    warmed.calibrate(MANY, ratios=(0.51,), target=0.01)
    for history in ("exact", "blend"):
        report = warmed.generate(PROMPT, history=history, max_new_tokens=1).report
        assert (report.ratio, report.notes) == (0.51, ())
    assert warmed.calibration is not None
    assert "history" not in warmed.calibration.settings
