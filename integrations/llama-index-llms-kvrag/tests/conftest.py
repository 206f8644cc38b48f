"""The small reader on a store of its own, offline."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from llama_index.llms.kvrag import BlendLLM
from transformers import LlamaConfig, LlamaForCausalLM

from kvrag import Model
from kvrag.answer import Answering


@pytest.fixture(scope="session", autouse=True)
def _is_measured() -> Iterator[None]:
    """Make the default ratio that of the bundled model for all: no calibration of random models finds one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrag.fingerprint.Fingerprint.is_bundled", True)
        yield


@pytest.fixture(scope="session", autouse=True)
def model() -> Model:
    """Stays loaded between tests."""
    return Model.from_pretrained("reader", dtype="float32")


@pytest.fixture(scope="session")
def tiny(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model that never generates a control token, with a chat template that names all roles."""
    tokenizer = copy.deepcopy(model.tokenizer.hf)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    hf = LlamaForCausalLM(config)
    with torch.no_grad():
        hf.lm_head.weight[tokenizer.all_special_ids] = 0  # some other token's logit is above
    folder = tmp_path_factory.mktemp("tiny")
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tests independent of how busy the machine is: nothing is ever noticeably faster."""
    monkeypatch.setattr("kvrag.control.tuning.NOTICEABLE_S", float("inf"))
    monkeypatch.setattr("kvrag.control.tuning.STEP", 1.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The reader is small: threads would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    # float32: blending in full must not meet a tie of two tokens
    return {"model": "reader", "store": tmp_path, "dtype": "float32", "temperature": 0, "max_tokens": 16}


@pytest.fixture
def llm(settings: dict[str, Any]) -> BlendLLM:
    return BlendLLM(**settings)


@pytest.fixture
def endless(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers end at max_tokens only, so that there is something to compare."""
    monkeypatch.setitem(vars(model), "eos_ids", frozenset())


@pytest.fixture
def thinking(endless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is a thought between two marks without text, and a name."""
    inner = Answering.stream
    said = [*(("", part) for part in ("", "Who ", "eats ", "it?", "")), ("Zel ", ""), ("Vinford.", "")]

    def stream(*args: Any) -> Any:
        for (text, thought), delta in zip(said + [("", "")] * 9, inner(*args), strict=True):
            yield replace(delta, text=text, reasoning=thought, reasoning_tokens=1 if thought else 0)

    monkeypatch.setattr(Answering, "stream", stream)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per forward pass."""
    passes: list[int] = []
    forward, step = Model._forward, Model.forward_each

    def counting(self: Model, ids: Any, *args: Any, **options: Any) -> Any:
        passes.append(ids.shape[1])
        return forward(self, ids, *args, **options)

    def counting_steps(self: Model, tokens: Any, *args: Any) -> Any:
        passes.append(1)
        return step(self, tokens, *args)

    monkeypatch.setattr(Model, "_forward", counting)
    monkeypatch.setattr(Model, "forward_each", counting_steps)
    return passes


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per ended answer of an engine, successful or not."""
    endings: list[str] = []
    inner = Answering.stream

    def watched(*args: Any) -> Any:
        try:
            yield from inner(*args)
        finally:
            endings.append("closed")

    monkeypatch.setattr(Answering, "stream", watched)
    return endings
