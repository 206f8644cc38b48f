"""How often the CPU waits for a GPU, and that no operation mixes their tensors, on a simulated GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from blending import CHUNKS, messages, prepare, relative
from families import FAMILIES, HYBRIDS, build, stacked
from simulated_gpu import counts, launches, simulated_gpu, to_gpu
from torch import Tensor

import kvrag
from kvrag import BlendEngine, FileStore, Model
from kvrag.backend.transformers.rows import FixedPlace, JoinedRows
from kvrag.config import Sampling
from kvrag.generate.decode import Row, decode
from kvrag.process import log_once
from kvrag.request import Request

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates the GPU that this machine has")


def _waits(family: str, num_layers: int, num_chunks: int, policy: str, tokenizer: Any, folder: Path) -> Counter[str]:
    """Counts of one blended prefill on the GPU, whose logits are those of the CPU."""
    expected = None
    for on_gpu in (False, True):
        with simulated_gpu(on_gpu):
            hf = stacked(family, num_layers)
            model = Model(to_gpu(hf) if on_gpu else hf, tokenizer, family)
            with BlendEngine(model, FileStore(folder / str(on_gpu), min_free_bytes=0)) as engine:
                engine.warm(CHUNKS)
                ids = model.tokenizer.render(messages(*CHUNKS[:num_chunks]))
                counts.clear()
                done = prepare(engine, ids, 0.3, policy)
                counted = counts.copy()
                assert done.report.recomputed_tokens > 0
                logits = done.logits.cpu()
        expected = logits if expected is None else expected
        assert relative(logits, expected) < 1e-4
    return counted


@pytest.mark.parametrize(
    ("family", "policy"),
    [("llama", "query"), ("llama", "hkvd"), ("gemma3", "query"), ("llama4", "hkvd"), ("phi3", "query")],
)
def test_a_prefill_waits_for_the_gpu_a_few_times_whatever_its_size(
    family: str, policy: str, tokenizer: Any, tmp_path: Path
) -> None:
    few = _waits(family, 4, 2, policy, tokenizer, tmp_path / "4")
    many = _waits(family, 8, 4, policy, tokenizer, tmp_path / "8")
    # read into pinned memory, of which a chunk has a piece or two, and copied while nobody waits
    for counted, num_layers, num_chunks in ((few, 4, 2), (many, 8, 4)):
        assert counted.pop("pinned") <= 2 * num_chunks
        assert counted.pop("to_gpu_async") <= num_layers * num_chunks
    assert few == many
    assert many.total() <= 12, many
    assert many.keys() <= {"to_cpu", "to_gpu", "synchronize"}


@pytest.mark.parametrize(("family", "temperature"), [("llama", 0.0), ("llama", 1.0), ("llama4", 0.0), ("youtu", 1.0)])
def test_a_decode_step_waits_for_the_gpu_once_for_all_its_answers(
    family: str, temperature: float, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated_gpu():
        model = Model(to_gpu(stacked(family, 4)), tokenizer, family)
        monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
        sampling = Sampling(max_new_tokens=30, temperature=temperature, frequency_penalty=0.5, top_p=0.9)
        for num_rows in (1, 4):
            answers = []
            for row in range(num_rows):
                ids = torch.arange(5 + row, 25)
                cache = model.new_cache(40)
                answers.append(decode(Row(model, ids, cache, model.forward(ids[None], cache), sampling)))
            for step in range(6):
                if step == 3:
                    counts.clear()
                for answer in answers:
                    next(answer)
            assert counts == {"to_gpu": 3, "to_cpu": 3}, num_rows
            for answer in answers:
                answer.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4", "youtu"])
def test_a_step_launches_hardly_more_for_16_answers_than_for_one(family: str, tokenizer: Any) -> None:
    with simulated_gpu():
        model = Model(to_gpu(stacked(family, 4)), tokenizer, family)
        launched = []
        for num_rows in (1, 16):
            rows = [torch.arange(5, 30 + row) for row in range(num_rows)]
            caches = [model.new_cache(len(row)) for row in rows]
            for row, cache in zip(rows, caches, strict=True):
                model.forward(row[None], cache)
            for _ in range(2):  # the first one joins the rows; later ones are graphs
                launches.clear()
                model.forward_each([7] * num_rows, caches)
            launched.append(launches.total())
        assert launched[1] <= 1.1 * launched[0]


@pytest.mark.parametrize(
    ("policy", "first", "later"), [("none", 1.3, 0.35), ("first_k", 1.3, 0.35), ("query", 2.2, 1.3)]
)
def test_a_blended_prefill_launches_fewer_operations_than_a_plain_one(
    policy: str, first: float, later: float, tokenizer: Any, tmp_path: Path
) -> None:
    with simulated_gpu():
        model = Model(to_gpu(stacked("llama", 8)), tokenizer, "llama")
        with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
            engine.warm(CHUNKS)
            ids, launched = model.tokenizer.render(messages(*CHUNKS)), []
            for name, ratio in (("full", 1.0), *[(policy, 0.3)] * 4):
                launches.clear()
                with prepare(engine, ids, ratio, name).kv_freed_at_end():
                    launched.append(launches.total())
        assert launched[1] <= first * launched[0]
        assert launched[-1] <= later * launched[0], launched


def _answers(model: Model, num_rows: int, steps: int) -> tuple[list[torch.Tensor], list[Counter[str]]]:
    """Logits and launches of steps with so many rows, of which the last one leaves after half of the steps."""
    rows = [torch.arange(5, 30 + row) for row in range(num_rows)]
    caches = [model.new_cache(len(row)) for row in rows]
    for row, cache in zip(rows, caches, strict=True):
        model.forward(row[None], cache)
    logits, launched = [], []
    for step in range(steps):
        if num_rows > 1 and step == steps // 2:
            caches.pop()
        launches.clear()
        logits.append(model.forward_each([7 + step + row for row in range(len(caches))], caches).cpu())
        launched.append(launches.copy())
    return logits, launched


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4", "youtu", "qwen3", "hunyuan_v1_dense"])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_steps_are_replayed_as_a_graph(
    num_rows: int, family: str, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = _answers(Model(stacked(family, 4), tokenizer, family), num_rows, 12)
    with simulated_gpu():
        found, launched = _answers(Model(to_gpu(stacked(family, 4)), tokenizer, family), num_rows, 12)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-4)
    replayed = [step for step, counted in enumerate(launched) if counted["replay"]]
    captured = {2} if num_rows == 1 else {2, 8}  # other rows are another graph
    assert replayed == ([*range(2, 12)] if num_rows == 1 else [*range(2, 6), *range(8, 12)]), caplog.text
    assert all(launched[step].total() <= 4 for step in {*replayed} - captured)


def test_steps_that_cannot_be_captured_are_computed_as_before(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    hf = stacked("llama", 4)
    expected, _ = _answers(Model(hf, tokenizer, "llama"), 3, 8)
    with simulated_gpu():
        hf = to_gpu(stacked("llama", 4))
        model = Model(hf, tokenizer, "llama")
        hf.register_forward_pre_hook(lambda module, _: print((module.lm_head.weight == 0).all().item()))
        for _ in range(2):
            found, launched = _answers(model, 3, 8)
            for own, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-4)
            assert not any(counted["replay"] for counted in launched)
    assert caplog.text.count("passes are launched one operation at a time") == 1


def test_states_and_lengths_of_the_host_are_not_captured(tokenizer: Any) -> None:
    with simulated_gpu():
        for model_type, changes in (HYBRIDS["lfm2"], FAMILIES["llama-dynamic"]):
            model = Model(to_gpu(build(model_type, **changes)), tokenizer, model_type)
            _, launched = _answers(model, 2, 4)
            assert not any(counted["replay"] for counted in launched)


def _blended(engine: BlendEngine, chunks: list[str], policy: str, **changes: Any) -> tuple[Request, Counter[str]]:
    """A blended prefill and its launches."""
    launches.clear()
    done = prepare(engine, engine.model.tokenizer.render(messages(*chunks)), 0.3, policy, **changes)
    return done, launches.copy()


def _logits(model: Model, folder: Path, policy: str, prompts: list[list[str]]) -> tuple[list[Tensor], list[bool]]:
    """Logits after blended prefills and after three steps each, and whether the pass was replayed."""
    logits, replayed = [], []
    with BlendEngine(model, FileStore(folder, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        for chunks in prompts:
            done, launched = _blended(engine, chunks, policy)
            with done.kv_freed_at_end():
                replayed.append(launched["replay"] == 1)
                logits.append(done.logits.cpu())
                logits += [model.forward_each([7 + step], [done.cache]).cpu() for step in range(3)]
            del done
    return logits, replayed


@pytest.mark.parametrize(
    ("family", "policy"),
    [("llama", "none"), ("llama", "query"), ("gemma3", "first_k"), ("llama4", "none"), ("youtu", "none")],
)
def test_a_pass_on_few_rows_is_replayed_for_other_prompts(
    family: str, policy: str, tokenizer: Any, tmp_path: Path
) -> None:
    prompts = [CHUNKS[: 2 + number % 2] for number in range(8)]
    expected, _ = _logits(Model(stacked(family, 4), tokenizer, family), tmp_path / "cpu", policy, prompts)
    with simulated_gpu():
        model = Model(to_gpu(stacked(family, 4)), tokenizer, family)
        found, replayed = _logits(model, tmp_path / "gpu", policy, prompts)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-4)
    assert (replayed[:2], replayed[-2:]) == ([False] * 2, [True] * 2)


def test_prompts_of_other_lengths_and_broken_ones_leave_no_trace(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place is made anew for a longer prompt, and has nothing of the last one, not even what is not a number."""
    monkeypatch.setattr(kvrag.backend.transformers.rows, "_GROWTH", 16)
    monkeypatch.setattr(kvrag.prefill, "_ROOM", 16)
    prompts = [*[CHUNKS[:1]] * 3, *[CHUNKS * 3] * 3, *[CHUNKS[:1]] * 3, CHUNKS]
    expected, _ = _logits(Model(stacked("llama", 4), tokenizer, "llama"), tmp_path / "cpu", "none", prompts)
    take = FixedPlace.take

    def after_nan(place: FixedPlace, caches: Any) -> None:
        for side in (side for layer in place._layers for side in layer):
            side.fill_(torch.nan)
        take(place, caches)

    with simulated_gpu(), patch.object(FixedPlace, "take", after_nan):
        model = Model(to_gpu(stacked("llama", 4)), tokenizer, "llama")
        found, replayed = _logits(model, tmp_path / "gpu", "none", prompts)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-4)
    assert replayed == [False, False, True] * 3 + [False], "not of a place that was left"


def test_a_place_is_left_to_its_prompt_until_that_is_freed(tokenizer: Any, tmp_path: Path) -> None:
    with simulated_gpu():
        model = Model(to_gpu(stacked("llama", 4)), tokenizer, "llama")
        with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
            engine.warm(CHUNKS)
            for _ in range(2):
                with _blended(engine, CHUNKS, "none")[0].kv_freed_at_end():
                    pass
            first, launched = _blended(engine, CHUNKS[:2], "none")
            assert launched["replay"] == 1
            kept = [side.cpu() for side in first.cache.layer(2)]
            other, launched = _blended(engine, CHUNKS[2:], "none")
            assert launched["replay"] == 0
            for before, now in zip(kept, first.cache.layer(2), strict=True):
                assert torch.equal(before, now.cpu())
            both = model.forward_each([7, 8], [first.cache, other.cache])
            with first.kv_freed_at_end(), other.kv_freed_at_end():
                pass
            third, launched = _blended(engine, CHUNKS[2:], "none")
            assert launched["replay"] == 1
            alone = model.forward_each([8], [third.cache])
            torch.testing.assert_close(alone.cpu()[0], both.cpu()[1], atol=1e-4, rtol=1e-4)
            with third.kv_freed_at_end():
                pass
            assert _blended(engine, CHUNKS[:2], "none", deterministic=True)[1]["replay"] == 0, "others decide of it"


def test_without_memory_for_a_place_passes_are_computed_as_before(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    prompts = [CHUNKS[:2]] * 3
    expected, _ = _logits(Model(stacked("llama", 4), tokenizer, "llama"), tmp_path / "cpu", "none", prompts)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with simulated_gpu(), patch.object(FixedPlace, "__init__", side_effect=full):
        model = Model(to_gpu(stacked("llama", 4)), tokenizer, "llama")
        found, replayed = _logits(model, tmp_path / "gpu", "none", prompts)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-4)
    assert not any(replayed)
    assert caplog.text.count("passes are launched one operation at a time (CUDA out of memory") == 1


def test_a_step_whose_rows_were_joined_in_part_is_computed_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = _answers(Model(stacked("llama", 4), tokenizer, "llama"), 3, 4)
    add, calls, step = JoinedRows._add, [], Model._step

    def failing(rows: JoinedRows, like: Any) -> Any:
        calls.append(0)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return add(rows, like)

    def repeated(model: Model, tokens: Any, caches: Any) -> Tensor:
        lengths = [cache.get_seq_length() for cache in caches]
        try:
            return step(model, tokens, caches)
        except kvrag.OutOfMemoryError:
            for cache, length in zip(caches, lengths, strict=True):
                cache.set_length(length)
            return step(model, tokens, caches)

    with simulated_gpu():
        model = Model(to_gpu(stacked("llama", 4)), tokenizer, "llama")
        monkeypatch.setattr(JoinedRows, "_add", failing)
        monkeypatch.setattr(Model, "_step", repeated)
        found, _ = _answers(model, 3, 4)
    assert len(calls) > 3
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-4)


def test_the_place_is_given_up_when_memory_runs_out_and_the_next_one_is_smaller(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvrag.backend.transformers.rows, "_GROWTH", 16)
    monkeypatch.setattr(kvrag.prefill, "_ROOM", 16)
    blend, left = kvrag.prefill.blend, [0]

    def full(*args: Any) -> Tensor:
        result = blend(*args)
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    monkeypatch.setattr(kvrag.prefill, "blend", full)
    with simulated_gpu():
        model = Model(to_gpu(stacked("llama", 4)), tokenizer, "llama")
        with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), device_bytes=0) as engine:
            engine.warm(CHUNKS)

            def place_after(chunks: list[str], errors: int = 0) -> FixedPlace | None:
                left[0] = errors
                with _blended(engine, chunks, "none")[0].kv_freed_at_end():
                    return model._place

            place = place_after(CHUNKS * 2)
            assert place is not None
            assert place_after(CHUNKS * 2, errors=1) is None, "repeated without one"
            assert place_after(CHUNKS * 2) is None, "as large a one is not made again"
            smaller = place_after(CHUNKS[:1])
            assert smaller is not None
            assert smaller.capacity <= place.capacity // 2
            with pytest.raises(kvrag.OutOfMemoryError):
                place_after(CHUNKS[:1], errors=2)
            assert model._place is None


def test_after_a_capture_that_failed_tokens_are_drawn(tokenizer: Any) -> None:
    with simulated_gpu():
        hf = to_gpu(stacked("llama", 4))
        model = Model(hf, tokenizer, "llama")
        hf.register_forward_pre_hook(lambda module, _: print((module.lm_head.weight == 0).all().item()))
        _answers(model, 1, 4)
        assert not model.captures
        ids, cache = torch.arange(5, 25), model.new_cache(40)
        sampling = Sampling(max_new_tokens=4, temperature=1.0)
        answer = decode(Row(model, ids, cache, model.forward(ids[None], cache), sampling))
        assert next(answer).token_ids


def test_threads_that_take_turns_within_a_pass_wait_for_no_other_models_stream(tokenizer: Any) -> None:
    with simulated_gpu():
        model = Model(to_gpu(stacked("llama", 4)), tokenizer, "llama")
        counts.clear()
        with model._suspended():
            assert counts == {"synchronize": 1}
