"""Conversations with the frameworks' own agents: what of each prompt is computed, and that all counts are the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from agent_frameworks import FRAMEWORKS, WAYS, Handbook, Tokens, converse
from families import build
from langchain_core.tracers import LangChainTracer
from langchain_kvrag import ChatBlend
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import ChatMessage
from llama_index.llms.kvrag import BlendLLM
from serving import NAME, serving
from templates import tokenizer_of

from kvrag import BlendConfig, BlendEngine, Model

TURNS = 5
CHUNKS = [
    f"# {name}\n\n{name} was born in {town}, plays the banjo and the harp, and sells chairs in {town} every day."
    for name, town in {"Paid holiday": "Florton", "Long breaks": "Stelburg", "Parental leave": "Stinmouth"}.items()
]
Call = tuple[Any, dict[str, Any], list[int]]
"""Prompt and options of an answer, and its tokens."""


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Model:
    """A tiny llama with tools in its chat template, which says nothing that looks like a call."""
    theirs = tokenizer_of("hermes", tokenizer)
    hf = build("llama", max_position_embeddings=16384, vocab_size=len(theirs), tie_word_embeddings=False)
    with torch.no_grad():
        hf.lm_head.weight[[*theirs.all_special_ids, *theirs.added_tokens_decoder]] = 0  # some other logit is positive
    return Model(hf, theirs, "tiny")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """One entry per answer."""
    stream, heard = BlendEngine.stream, []

    def recording(self: BlendEngine, prompt: Any, **options: Any) -> Iterator[Any]:
        heard.append((prompt, options, []))
        for delta in stream(self, prompt, **options):
            heard[-1][2].extend(delta.token_ids)
            yield delta

    monkeypatch.setattr(BlendEngine, "stream", recording)
    return heard


@pytest.mark.parametrize(("name", "way"), [*((name, "exact") for name in FRAMEWORKS), ("react-agent", "blend")])
def test_from_the_second_turn_on_few_tokens_are_computed(name: str, way: str, model: Model, tmp_path: Path) -> None:
    history, conversation_bytes = WAYS[way]
    config = BlendConfig(ratio=0.15, controller="off", edited_history=history)
    with BlendEngine(model, tmp_path, config, conversation_bytes=conversation_bytes) as engine:
        engine.warm(CHUNKS)
        handbook = Handbook(CHUNKS)
        reports = list(converse(name, engine, handbook, TURNS, max_tokens=100))
    assert handbook.calls == TURNS
    assert [len(turn) for turn in reports] == [2] * TURNS
    first, *others = map(Tokens.of, reports)
    assert min(turn.chunks for turn in (first, *others)) > 60
    # the texts of a random model are other tokens in the next prompt, so that up to 100 are computed again
    assert all(turn.computed < 0.2 * turn.prompt for turn in others)
    assert sum(turn.computed for turn in others) < 0.1 * sum(turn.prompt for turn in others)
    assert any(turn.moved for turn in others) == (way == "blend")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_with_everything_recomputed_the_last_answer_is_transformers(
    name: str, model: Model, tmp_path: Path, calls: list[Call]
) -> None:
    config = BlendConfig(ratio=1.0, edited_history="blend")
    with BlendEngine(model, tmp_path, config) as engine:
        engine.warm(CHUNKS)
        reports = list(converse(name, engine, Handbook(CHUNKS), 2, max_tokens=100))
        assert reports[-1][-1]["reused_tokens"] > 100
        prompt, options, said = calls[-1]
        ids = torch.tensor([engine.tokenize(prompt, tools=options.get("tools"))])
        if name == "react-agent":  # a grammar, which transformers does not have
            assert list(engine.generate(prompt, **{**options, "policy": "full"}).token_ids) == said
        else:
            mask = torch.ones_like(ids)
            answer = model.hf.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=len(said))
            assert answer[0, ids.shape[1] :].tolist() == said


def counted(usage: dict[str, Any]) -> list[int]:
    """Prompt, cached and generated tokens, in OpenAI's form."""
    return [usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_traces_and_usage_show_the_engines_counts(is_streamed: bool, model: Model, tmp_path: Path) -> None:
    """LangSmith's trace, LangChain's and LlamaIndex's usage, locally and from a server, whose usage is the same."""
    messages = [{"role": "system", "content": "Answer from what follows, and say that you do not know otherwise."}]
    messages.append({"role": "user", "content": "\n\n".join(CHUNKS)})
    config = BlendConfig(ratio=0.15, controller="off")
    with BlendEngine(model, tmp_path, config) as engine, serving(engine) as served:
        engine.warm(CHUNKS)
        engine.generate(messages, max_new_tokens=1)  # from here on, the counts are the same
        for settings in ({"engine": engine}, {"model": NAME, "base_url": served.url}):
            langsmith = MagicMock()
            llm = ChatBlend(**settings, temperature=0, max_tokens=4)
            asked: Any = {"input": messages, "config": {"callbacks": [LangChainTracer(client=langsmith)]}}
            message = reduce(add, llm.stream(**asked)) if is_streamed else llm.invoke(**asked)
            report, usage = message.response_metadata["kvrag"], message.usage_metadata
            cached = report["reused_tokens"]
            assert cached > report["conversation_tokens"] > 0
            counts = [report["prompt_tokens"], cached, 4]
            assert [usage["input_tokens"], usage["input_token_details"]["cache_read"], usage["output_tokens"]] == counts
            assert langsmith.update_run.call_args.kwargs["extra"]["metadata"]["usage_metadata"] == usage
            counter = TokenCountingHandler(tokenizer=engine.encode)
            index_llm = BlendLLM(**settings, temperature=0, max_tokens=4, callback_manager=CallbackManager([counter]))
            asked = [ChatMessage(**message) for message in messages]
            raw: Any = [*index_llm.stream_chat(asked)][-1].raw if is_streamed else index_llm.chat(asked).raw
            assert counted(raw["usage"]) == counts
            assert [counter.prompt_llm_token_count, counter.completion_llm_token_count] == [counts[0], counts[2]]
        assert counted(served.ask("", messages=messages, max_tokens=4).json()["usage"]) == counts
