"""The trial on hybrids: `compute` is the model, and operators compose to its state."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
import transformers
from packaging.version import Version

from benchmarks.quality import hybrids

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="older caches keep these states in another form"
)


def _parts(states: hybrids.States, number: int, places: list[slice]) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(part[:, place] for part in states[number]) for place in places]


@pytest.mark.parametrize("name", hybrids.SETTINGS)
@torch.inference_mode()
def test_all_tokens_recomputed_is_the_models_own_prefill(name: str) -> None:
    hf = hybrids.tiny(name)
    ids, chunks = hybrids.prompt(3, 20, torch.Generator().manual_seed(0))
    own = hf(ids[None], use_cache=True)
    states = hybrids.encode(hf, ids, chunks)
    torch.testing.assert_close(hybrids.compute(hf, ids, torch.arange(len(ids)), states), own.logits[0])
    for number, net in hybrids.linear_layers(hf):
        state = own.past_key_values.layers[number].recurrent_states[0]
        torch.testing.assert_close(hybrids.scan(net, states[number])[1], state)


@torch.inference_mode()
def test_operators_compose_to_the_true_state_behind_one_chunk_and_in_the_first_layer() -> None:
    """Behind several chunks, they compose to the state that the stored inputs give, in every layer."""
    hf = hybrids.tiny("hybrid, long memory")
    ids, chunks = hybrids.prompt(3, 20, torch.Generator().manual_seed(0))
    stored, whole = hybrids.encode(hf, ids, chunks), hybrids.empty(hf, len(ids))
    hybrids.compute(hf, ids, torch.arange(len(ids)), whole)
    places = [slice(0, hybrids.BEGIN), *chunks]
    for number, net in hybrids.linear_layers(hf):
        parts = _parts(stored, number, places)
        behind = {count: slice(0, places[count - 1].stop) for count in (2, 4)}
        for count, kept in ((2, whole), (4, stored), (4, whole)):
            (together,) = _parts(kept, number, [behind[count]])
            state, ours = hybrids.scan(net, together)[1], hybrids.composed(net, parts[:count])
            is_exact = number == 0 or count == 2 or kept is stored
            assert (float((ours - state).norm() / state.norm()) < 1e-5) is is_exact
        torch.testing.assert_close(
            hybrids.composed(net, parts, torch.bfloat16), hybrids.composed(net, parts), atol=0.02, rtol=0.02
        )


@torch.inference_mode()
def test_nothing_is_missing_behind_one_chunk() -> None:
    hf = hybrids.tiny("hybrid, long memory")
    kl, errors = hybrids.measure(hf, *hybrids.prompt(1, 20, torch.Generator().manual_seed(0)))
    assert max(errors) < 1e-5
    assert abs(kl["plain reuse"]) < 1e-5


def test_the_command_reports_every_variant(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrids, "times", lambda lengths: {})  # seconds, at real sizes
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    hybrids.add_arguments(parser)
    argv = ["--json", "--samples", "1", "--models", "1", "--chunks", "2", "--chunk-tokens", "8"]
    assert hybrids.run(parser.parse_args(argv)) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"command", "sizes", "ms", *hybrids.SETTINGS}
    assert result["sizes"]["Qwen3-Next-80B-A3B"]["256"]["operators"] == pytest.approx(79.0, abs=0.1)
