"""Compiled decode steps: one graph for all lengths, with the model's own logits."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from blending import CHUNKS, messages, relative
from families import FAMILIES, build
from packaging.version import Version

from kvrag import BlendEngine, FileStore, Model, SettingError, UnsupportedModelError
from kvrag.backend.protocol import KVCache
from kvrag.backend.transformers import compiled
from kvrag.backend.transformers.compiled import CompiledForward
from kvrag.cli import serve

LENGTHS = (94, 150, 60)  # windows are 48 tokens, and longrope's frequencies change at 96


@pytest.fixture
def only_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture graphs as usual and run them without a compiler, which would take half a minute."""
    monkeypatch.setattr(compiled, "_BACKEND", "eager")


def _filled(model: Model, length: int) -> KVCache:
    cache = model.new_cache(length)
    model.forward(torch.arange(5, 5 + length)[None], cache)
    return cache


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral-window",
        pytest.param(
            "phi3-longrope",
            marks=pytest.mark.skipif(
                Version(transformers.__version__) < Version("5.24"), reason="its older code looks at the lengths"
            ),
        ),
        "gemma3",
        "gemma4-shared",
        "gpt_oss",
        "qwen3_moe",
        "smollm3",
        "llama4",
    ],
)
def test_a_step_is_one_graph_for_all_lengths_and_numbers_of_rows(
    family: str, tokenizer: Any, only_captured: None
) -> None:
    model_type, changes = FAMILIES[family]
    hf = build(model_type, **changes)
    models = Model(hf, tokenizer, family), Model(hf, tokenizer, family, compile_decode=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (3, 1, 2):
            plain, fast = ([_filled(model, length) for length in LENGTHS[:rows]] for model in models)
            for token in range(7, 11):
                wanted = models[0].forward_each([token] * rows, plain)
                assert relative(models[1].forward_each([token] * rows, fast), wanted) < 1e-6
            for one, other in zip(plain, fast, strict=True):
                assert one.get_seq_length() == other.get_seq_length()
                keys, others = (cache.layer(3)[0][:, :, : cache.get_seq_length()] for cache in (one, other))
                torch.testing.assert_close(keys, others)


@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU, torch.compile needs a C++ compiler")
def test_answers_are_the_same(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real compiler, blended prompts, one answer and several at the same time, in a thread as on a GPU."""
    monkeypatch.setattr(compiled, "_own_thread", lambda device: True)
    hf = build("llama", num_hidden_layers=2)
    prompts = [messages(*CHUNKS[:count], question=f"Question {count}?") for count in (1, 3, 2)]
    answers = []
    for compile_decode in (False, True):
        model = Model(hf, tokenizer, "llama", compile_decode=compile_decode)
        model.__dict__["eos_ids"] = frozenset()
        with BlendEngine(model, FileStore(tmp_path / str(compile_decode), min_free_bytes=0)) as engine:
            engine.warm(CHUNKS)
            settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}
            alone = engine.generate(prompts[1], **settings)
            together = engine.generate_batch(prompts, **settings)
            assert together[1].token_ids == alone.token_ids
            answers.append([answer.token_ids for answer in together])
    assert answers[0] == answers[1]
    assert all(len(tokens) == 12 for tokens in answers[0])


def test_frequencies_that_follow_the_length_are_rejected(tokenizer: Any, only_captured: None) -> None:
    model_type, changes = FAMILIES["llama-dynamic"]
    hf = build(model_type, **changes)
    with pytest.raises(
        UnsupportedModelError, match=r"dynamic cannot be compiled \(.*\): load it without compile_decode"
    ):
        Model(hf, tokenizer, "dynamic", compile_decode=True)
    assert Model(hf, tokenizer, "dynamic").forward_each([5], [Model(hf, tokenizer).new_cache(1)]).shape == (1, 1536)


def test_a_name_is_loaded_compiled(only_captured: None) -> None:
    """Each of the two is a model of its own."""
    model, plain = Model.from_pretrained("reader", compile_decode=True), Model.from_pretrained("reader")
    assert model is not plain
    assert model.fingerprint == plain.fingerprint
    wanted = plain.forward_each([9], [_filled(plain, 20)])
    assert torch.equal(model.forward_each([9], [_filled(model, 20)]), wanted)


def test_serve_compiles_if_asked(only_captured: None, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    for wanted in (True, False):
        args = parser.parse_args(["--store", str(tmp_path), *(["--compile-decode"] if wanted else []), "--no-corpus"])
        with ExitStack() as stack:
            model = serve.build(args, serve.read_settings(args), {}, stack).state.kvrag.engine.model
            assert (model._compiled is not None) == wanted


def test_torch_without_partitioned_graphs_is_rejected(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.torch, "Tag", object())
    with pytest.raises(SettingError, match=r"compile_decode needs torch 2\.9 or newer"):
        CompiledForward(hf, torch.device("cpu"))


def test_steps_run_in_one_thread_for_all_consumers(hf: Any) -> None:
    """CUDA graphs belong to the thread that captured them."""
    forward = CompiledForward(hf, torch.device("cuda"))
    seen: list[str] = []

    def ask() -> None:
        seen.append(forward.run(lambda: threading.current_thread().name))

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert seen[0].startswith("kvrag-compiled")


def test_an_interrupted_consumer_waits_for_the_end_of_the_step(hf: Any) -> None:
    """Otherwise the step would continue to write to caches that are used again."""
    ended: list[bool] = []

    def step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        ended.append(True)

    forward = CompiledForward(hf, torch.device("cuda"))
    run: Callable[..., None] = forward.run
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(step)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True]
