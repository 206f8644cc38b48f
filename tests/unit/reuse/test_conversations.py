"""Conversations: the KV that the next turn reuses, and the KV that it must not reuse."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blending import CHUNKS, full_prefill, messages, plain_logits, relative

import kvrag.answer
import kvrag.reuse.conversation
from kvrag import BlendConfig, BlendEngine, FileStore, Model, ModelError, SettingError
from kvrag.backend.transformers import BlendCache
from kvrag.control.tuning import Plan
from kvrag.reuse.conversation import Conversation, Conversations, Turn
from kvrag.reuse.prompt import Prompt
from kvrag.reuse.stitch import Prefilled
from kvrag.types import Answer, Delta, Messages

FIRST = messages(*CHUNKS[:3], question="Question: Who likes to eat curry and apples?")


@pytest.fixture
def talk(engine: BlendEngine, endless: Model) -> Talk:
    """A conversation with an engine that has warmed the chunks."""
    engine.warm(CHUNKS)
    return Talk(engine)


class Talk:
    """Greedy answers of the requested length, each with the logits of its first token."""

    def __init__(self, engine: BlendEngine) -> None:
        self.engine, self.done = engine, []
        prefill = engine._answering.prefill

        def watched(*args: Any, **settings: Any) -> Prefilled:
            self.done.append(prefill(*args, **settings))
            return self.done[-1]

        engine._answering.prefill = watched  # type: ignore[method-assign]

    def __call__(self, prompt: str | Messages, **settings: Any) -> Answer:
        return self.engine.generate(prompt, **{"max_new_tokens": 8, "temperature": 0, **settings})

    @property
    def logits(self) -> torch.Tensor:
        return self.done[-1].logits[0]

    @property
    def kept(self) -> int:
        return len(self.engine._answering._conversations)


def _next(prompt: Messages, answer: Answer | str, *chunks: str, question: str = "Question: And who is it?") -> Messages:
    text = answer if isinstance(answer, str) else answer.text
    return [*prompt, {"role": "assistant", "content": text}, *messages(*chunks, question=question)]


def _ids(engine: BlendEngine, prompt: Messages) -> list[int]:
    return engine.model.tokenizer.render(prompt)


# ---------------------------------------------------------------- the next turn


@pytest.mark.parametrize("policy", ["query", "hkvd", "query_hkvd", "first_k"])
def test_at_ratio_1_the_next_turn_has_full_prefills_logits(policy: str, talk: Talk, hf: Any) -> None:
    said = talk(FIRST, ratio=1.0, policy=policy)
    assert said.report.conversation_tokens == 0
    prompt = _next(FIRST, said, CHUNKS[3], CHUNKS[1])
    report = talk(prompt, ratio=1.0, policy=policy).report
    ids = _ids(talk.engine, prompt)
    assert relative(talk.logits, plain_logits(hf, ids)[-1]) <= 1e-5
    assert report.exact
    assert (
        report.conversation_tokens
        >= len(_ids(talk.engine, FIRST)) - talk.engine.model.tokenizer.generation_prompt_length()
    )
    assert [run.start >= report.conversation_tokens for run in report.runs] == [True, True]
    assert report.reused_tokens == report.conversation_tokens + sum(map(len, report.runs))
    assert report.reused_tokens + report.fresh_tokens == len(ids)
    assert report.recomputed_tokens == sum(map(len, report.runs)), "KV of the conversation is not computed again"


@pytest.mark.parametrize("policy", ["query", "hkvd", "first_k", "random", "none"])
def test_below_ratio_1_the_blended_chunks_and_the_answer_are_reused(policy: str, talk: Talk) -> None:
    said = talk(FIRST, ratio=0.3, policy=policy)
    before = talk.done[-1].cache
    prompt = _next(FIRST, said, CHUNKS[3])
    report = talk(prompt, ratio=0.3, policy=policy).report
    done = talk.done[-1]
    assert report.conversation_tokens > len(_ids(talk.engine, FIRST)) - 5
    assert not report.exact
    assert len(report.runs) == 1
    for number in range(talk.engine.model.num_layers):
        for old, new in zip(before.layer(number), done.cache.layer(number), strict=True):
            assert torch.equal(old[:, :, : report.conversation_tokens], new[:, :, : report.conversation_tokens]), (
                "as blended, and as decoded"
            )
            assert old.data_ptr() != new.data_ptr()


def test_a_conversation_of_ten_turns_reuses_all_but_the_last_question(talk: Talk) -> None:
    prompt, texts = FIRST, [f"{CHUNKS[i % 4]} This is the story number {i} of them all." for i in range(10)]
    talk.engine.warm(texts)
    for number in range(10):
        said = talk(prompt, ratio=0.3, max_new_tokens=4)
        if number:
            left = said.report.prompt_tokens - said.report.conversation_tokens
            assert left < 80, "a turn costs as much as the first"
            assert len(said.report.runs) == 1
        assert talk.kept == 1, "a turn replaces the previous one"
        prompt = _next(prompt, said, texts[number], question=f"Question {number}: who?")


def test_the_kv_of_the_decoded_answer_equals_full_prefills(talk: Talk, hf: Any) -> None:
    said = talk("Mira Brel was born in Florton. Question: where? Answer:", ratio=1.0, max_new_tokens=12)
    (conversation,) = talk.engine._answering._conversations._kept
    assert len(conversation.ids) == said.report.prompt_tokens + 11, "of the last token there is no KV"
    assert conversation.exact == len(conversation.ids)
    own = talk.engine.model.new_cache(len(conversation.ids))
    talk.engine.model.forward(torch.tensor(conversation.ids)[None], own)
    for number in range(talk.engine.model.num_layers):
        for ours, theirs in zip(conversation.cache.layer(number), own.layer(number), strict=True):
            torch.testing.assert_close(
                ours[:, :, : len(conversation.ids)], theirs[:, :, : len(conversation.ids)], atol=1e-4, rtol=1e-4
            )


def test_a_text_continues_a_conversation_like_messages(talk: Talk, hf: Any) -> None:
    prompt = "\n\n".join(CHUNKS[:2]) + "\n\nQuestion: Who was born in Florton?\n\nAnswer:"
    said = talk(prompt, ratio=1.0)
    longer = prompt + said.text + "\n\nQuestion: And where does she live?\n\nAnswer:"
    report = talk(longer, ratio=1.0).report
    assert report.conversation_tokens >= said.report.prompt_tokens - 1
    ids = talk.engine.model.tokenizer.render(longer)
    assert relative(talk.logits, plain_logits(hf, ids)[-1]) <= 1e-5


def test_an_answer_that_differs_in_the_history_is_cropped(talk: Talk, hf: Any) -> None:
    """Thinking is left out, tool calls are rewritten, text is tokenised differently."""
    said = talk(FIRST, ratio=1.0)
    for other in ("No, something else entirely.", said.text[: len(said.text) // 2], ""):
        prompt = _next(FIRST, other, CHUNKS[3])
        report = talk(prompt, ratio=1.0).report
        question = len(_ids(talk.engine, FIRST)) - talk.engine.model.tokenizer.generation_prompt_length()
        assert report.conversation_tokens >= question
        assert relative(talk.logits, plain_logits(talk.engine.model.hf, _ids(talk.engine, prompt))[-1]) <= 1e-5


_TEMPLATE = """{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% if no_thoughts %}<no thoughts here>{% endif %}{% endif %}"""


@pytest.mark.parametrize("template", [{}, {"no_thoughts": True}])
def test_a_templates_generation_prompt_may_be_missing_in_the_history(
    template: dict[str, Any], hf: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """As `enable_thinking=False` does with Qwen3's."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = _TEMPLATE
    model = Model(hf, tokenizer, "other template")
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS)
        talk = Talk(engine)
        question = tokenizer.apply_chat_template(FIRST, add_generation_prompt=False, return_dict=False)
        said = talk(FIRST, template=template, ratio=0.3)
        assert said.report.prompt_tokens == len(question) + model.tokenizer.generation_prompt_length(**template)
        report = talk(_next(FIRST, "Nobody does.", CHUNKS[3]), template=template, ratio=0.3).report
        opened = model.tokenizer.generation_prompt_length()
        assert report.conversation_tokens == len(question) + opened, "up to the answer, which differs"


def test_a_dropped_stream_can_be_continued(talk: Talk) -> None:
    deltas = talk.engine.stream(FIRST, ratio=0.3, max_new_tokens=50, temperature=0)
    heard = [next(deltas) for _ in range(5)]
    deltas.close()
    report = talk(_next(FIRST, "".join(delta.text for delta in heard))).report
    assert report.conversation_tokens > len(_ids(talk.engine, FIRST)) - 5


def test_a_stream_that_garbage_collection_ends_waits_for_nothing(talk: Talk) -> None:
    """It may run in any thread, also in one that is matching."""
    deltas = talk.engine.stream("Nothing of this was warmed. " * 100, max_new_tokens=50)
    next(deltas)
    cycle: list[Any] = [deltas]
    cycle.append(cycle)
    del deltas, cycle

    def match() -> None:
        with talk.engine._answering._conversations._lock:
            gc.collect()

    thread = threading.Thread(target=match, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert talk.kept == 1


# ---------------------------------------------------------------- what must not be taken over


def test_ratio_1_reuses_no_conversation_of_a_lower_ratio(talk: Talk, hf: Any) -> None:
    said = talk(FIRST, ratio=0.3)
    prompt = _next(FIRST, said, CHUNKS[3])
    report = talk(prompt, ratio=1.0).report
    exact = next(c.exact for c in talk.engine._answering._conversations._kept if len(c.ids) < report.prompt_tokens)
    assert 0 < report.conversation_tokens <= exact < report.prompt_tokens - 60
    assert relative(talk.logits, plain_logits(hf, _ids(talk.engine, prompt))[-1]) <= 1e-5
    assert report.exact


@pytest.mark.parametrize(
    ("made", "asked", "taken"),
    [
        ({"ratio": 0.3}, {"ratio": 0.3}, True),
        ({"ratio": 0.5}, {"ratio": 0.3}, True),
        ({"ratio": 0.3}, {"ratio": 0.5}, False),
        ({"ratio": 0.3}, {"ratio": 0.3, "policy": "first_k"}, False),
        ({"ratio": 0.3, "policy": "first_k"}, {"ratio": 0.1}, False),
        ({"ratio": 1.0}, {"ratio": 0.3, "policy": "first_k"}, True),
        ({"ratio": 1.0}, {}, True),
        ({"ratio": 0.0}, {"policy": "none"}, False),
    ],
)
def test_a_reused_conversation_has_at_least_the_requested_ratio(
    made: dict[str, Any], asked: dict[str, Any], taken: bool, talk: Talk
) -> None:
    said = talk(FIRST, **made)
    report = talk(_next(FIRST, said, CHUNKS[3]), **asked).report
    assert (report.conversation_tokens >= len(_ids(talk.engine, FIRST)) - 5) == taken


def test_another_question_about_the_same_chunks_is_another_conversation(talk: Talk) -> None:
    """Chunks are blended for their question: an answer must not depend on other users' questions."""
    other = messages(*CHUNKS[:3], question="Question: Who likes to eat curry and bread?")
    alone = talk(other, ratio=0.3)
    talk.engine._answering._conversations._kept.clear()
    talk(FIRST, ratio=0.3)
    for prompt in (other, FIRST):
        report = talk(prompt, ratio=0.3).report
        assert (report.conversation_tokens, len(report.runs)) == (0, 3)
        if prompt is other:
            assert torch.equal(talk.logits, talk.done[0].logits[0])
            assert report.runs == alone.report.runs


def test_a_changed_question_continues_from_the_previous_turn(talk: Talk, hf: Any) -> None:
    said = talk(FIRST, ratio=0.3)
    second = _next(FIRST, said, CHUNKS[3], question="Question: Who likes to eat curry and apples?")
    first = talk(second, ratio=0.3).report
    changed = _next(FIRST, said, CHUNKS[3], question="Question: Who likes to eat curry and bread?")
    report = talk(changed, ratio=0.3).report
    assert report.conversation_tokens == first.conversation_tokens > 0
    assert report.runs == first.runs
    assert talk.kept == 2, "both can be continued"


@pytest.mark.parametrize("policy", ["full", "query"])
def test_full_prefill_as_the_reference_ignores_conversations(policy: str, talk: Talk, hf: Any) -> None:
    said = talk(FIRST, policy=policy, ratio=1.0)
    assert talk.kept == (policy != "full")
    prompt = _next(FIRST, said, CHUNKS[3])
    report = talk(prompt, policy="full").report
    assert (report.conversation_tokens, report.reused_tokens) == (0, 0)
    ids = torch.tensor(_ids(talk.engine, prompt))
    assert torch.equal(talk.logits, full_prefill(talk.engine.model, ids, 600)[0][0])


def test_passes_that_only_need_a_cache_ignore_conversations(talk: Talk) -> None:
    """As in calibration and benchmarks."""
    said = talk(FIRST, ratio=1.0)
    done = talk.engine.prefill(_ids(talk.engine, _next(FIRST, said)), BlendConfig(ratio=0.3))
    assert done.report.conversation_tokens == 0
    assert talk.kept == 1


def test_an_answer_that_failed_leaves_nothing(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Iterator[Delta]:
        yield Delta("a", (5,))
        raise ModelError("the model's logits are NaN")

    monkeypatch.setattr(kvrag.answer, "decode", fail)
    with pytest.raises(ModelError):
        talk(FIRST)
    assert talk.kept == 0


# ---------------------------------------------------------------- the controller


def test_full_prefill_that_the_controller_chooses_continues_the_conversation(
    talk: Talk, hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = talk(FIRST, ratio=1.0)
    prompt = _next(FIRST, said, CHUNKS[3])
    ids = _ids(talk.engine, prompt)
    asked: list[int] = []

    def decide(plan: Plan, prompt: Prompt) -> Plan:
        asked.append(prompt.kept)
        return replace(plan, config=replace(plan.config, policy="full", ratio=1.0), reason="it is faster")

    monkeypatch.setattr(talk.engine._tuning, "_decide", decide)
    report = talk(prompt).report
    assert asked == [report.conversation_tokens]
    assert (report.policy, report.ratio, report.runs, report.exact) == ("full", 1.0, (), True)
    assert report.reused_tokens == report.conversation_tokens >= len(_ids(talk.engine, FIRST)) - 5
    assert relative(talk.logits, plain_logits(hf, ids)[-1]) <= 1e-5
    report = talk(_next(prompt, "Nobody."), ratio=1.0).report
    assert report.conversation_tokens >= len(ids) - 5, "and any of them can be used"


def test_copying_a_conversation_is_not_measured_as_rotating(talk: Talk) -> None:
    seen: list[int] = []
    meter = talk.engine._tuning._costs
    meter.observe_stitch = lambda tokens, seconds: seen.append(tokens)  # type: ignore[method-assign]
    said = talk(FIRST, ratio=1.0)
    talk(_next(FIRST, said, CHUNKS[3]), ratio=1.0)
    assert seen == [said.report.reused_tokens]


# ---------------------------------------------------------------- side by side


def test_two_turns_of_one_conversation_at_once_do_not_disturb_each_other(talk: Talk) -> None:
    said = talk(FIRST, ratio=0.3)
    prompts = [_next(FIRST, said, CHUNKS[3], question=f"Question {i}: who is it then?") for i in range(8)]
    engine = talk.engine
    origin = engine._answering._conversations._kept[0]
    before = [tensor.clone() for number in range(engine.model.num_layers) for tensor in origin.cache.layer(number)]
    alone = []
    for prompt in prompts:
        engine._answering._conversations._kept[:] = [origin]
        alone.append(talk(prompt, ratio=0.3))
    engine._answering._conversations._kept[:] = [origin]
    streams = [engine.stream(prompt, ratio=0.3, max_new_tokens=8, temperature=0) for prompt in prompts[:4]]
    begun = [[next(stream)] for stream in streams]  # all have begun before any ends
    together: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        deltas = begun[number] + list(streams[number])
        together[number] = tuple(token for delta in deltas for token in delta.token_ids)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert together[number] == alone[number].token_ids
    after = [tensor for number in range(engine.model.num_layers) for tensor in origin.cache.layer(number)]
    length = len(origin.ids)
    assert all(torch.equal(a[:, :, :length], b[:, :, :length]) for a, b in zip(before, after, strict=True))
    assert talk.kept == 4, "each can be continued"
    for number in range(4):
        report = talk(_next(prompts[number], alone[number]), ratio=0.3).report
        assert report.conversation_tokens >= len(_ids(engine, prompts[number])) - 5


# ---------------------------------------------------------------- bounds


def _kept(engine: BlendEngine) -> int:
    return sum(kept.cache.num_bytes for kept in engine._answering._conversations._kept)


def test_the_bound_in_bytes_is_kept(endless: Model, tmp_path: Path) -> None:
    token = endless.bytes_per_token
    with BlendEngine(endless, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=1200 * token) as engine:
        for number in range(6):
            engine.generate(messages(*CHUNKS, question=f"Question {number}?"), max_new_tokens=2)
            assert 0 < _kept(engine) <= 1200 * token
        assert 2 <= len(engine._answering._conversations) < 6
        last = engine._answering._conversations._kept[-1]
        engine.generate(messages(*CHUNKS * 12), max_new_tokens=2)
        assert engine._answering._conversations._kept[-1] is last, "one that is too large evicts no other"


def test_none_are_kept_where_none_are_wanted(endless: Model, tmp_path: Path) -> None:
    with BlendEngine(endless, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=0) as engine:
        said = engine.generate(FIRST, max_new_tokens=4)
        assert engine.generate(_next(FIRST, said), max_new_tokens=4).report.conversation_tokens == 0
        assert _kept(engine) == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, "1GB", None, True])
def test_an_invalid_bound_is_rejected(wrong: Any, model: Model, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="conversation_bytes must be an integer of at least 0"):
        BlendEngine(model, tmp_path / "kv", conversation_bytes=wrong)


def test_closing_releases_everything(endless: Model, tmp_path: Path) -> None:
    engine = BlendEngine(endless, FileStore(tmp_path, min_free_bytes=0))
    engine.generate(FIRST, max_new_tokens=2)
    under_way = engine.stream(FIRST, max_new_tokens=3)
    next(under_way)
    engine.close()
    assert len(list(under_way)) == 2
    assert (len(engine._answering._conversations), _kept(engine)) == (0, 0)


def test_a_turn_keeps_no_memory_of_earlier_turns(talk: Talk) -> None:
    said = talk(FIRST, ratio=0.3)
    old = weakref.ref(talk.done.pop().cache)
    assert old() is not None
    talk(_next(FIRST, said, CHUNKS[3]), ratio=0.3)
    talk.done.clear()
    assert talk.kept == 1
    assert old() is None


def _conversation(tokens: range, size: int = 4) -> Conversation:
    """With KV of `size` times 8 bytes."""
    cache = BlendCache(1, size)
    cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    turns = (Turn(0, len(tokens) - 5, len(tokens) - 3),)
    return Conversation(np.array(tokens), cache, 0, BlendConfig(ratio=0.3), turns)


def _keep(conversations: Conversations, conversation: Conversation) -> None:
    conversations.begin(conversation, frozenset())
    conversations.keep(conversation, conversation, None)


def test_the_least_recently_used_is_evicted_first() -> None:
    three = [_conversation(range(start, start + 40)) for start in (0, 100, 200)]
    conversations = Conversations(2 * three[0].cache.num_bytes, 1000)
    for conversation in three[:2]:
        _keep(conversations, conversation)
    found = conversations.find([*range(40), 7, 7], BlendConfig(ratio=0.3))
    assert found is not None
    assert (found.conversation, found.length) == (three[0], 40)
    _keep(conversations, three[2])
    assert conversations._kept == [three[0], three[2]]


def test_the_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.reuse.conversation, "_MOST", 3)
    conversations = Conversations(1 << 20, 1000)
    for start in range(5):
        _keep(conversations, _conversation(range(start, start + 40)))
    assert [conversation.ids[0] for conversation in conversations._kept] == [2, 3, 4]


@pytest.mark.parametrize(
    ("prompt", "length"),
    [
        ([*range(40), 7, 7], 40),
        ([*range(36), 7, 7, 7], 36),
        ([*range(35), 7, 7, 7], 35),
        ([*range(34), 7, 7, 7, 7, 7, 7], None),  # another question
        ([*range(37)], None),  # the same prompt again
        ([*range(38)], 37),
        ([7, *range(40), 7, 7], None),
        ([0], None),
    ],
)
def test_prompts_that_continue_a_conversation(prompt: list[int], length: int | None) -> None:
    conversations = Conversations(1 << 20, 1000)
    _keep(conversations, _conversation(range(40)))
    found = conversations.find(prompt, BlendConfig(ratio=0.3))
    assert (found and found.length) == length


def test_the_longest_is_taken() -> None:
    conversations = Conversations(1 << 20, 1000)
    for stop in (60, 80, 70):
        _keep(conversations, _conversation(range(stop)))
    found = conversations.find(list(range(100)), BlendConfig(ratio=0.3))
    assert found is not None
    assert found.length == 80


def test_where_rope_follows_the_length_nothing_longer_is_kept_or_taken() -> None:
    conversations = Conversations(1 << 20, 50)
    _keep(conversations, _conversation(range(51)))
    assert len(conversations) == 0
    _keep(conversations, _conversation(range(40)))
    assert conversations.find(list(range(50)), BlendConfig(ratio=0.3)) is not None
    assert conversations.find(list(range(51)), BlendConfig(ratio=0.3)) is None
