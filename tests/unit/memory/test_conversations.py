"""Conversations: the KV that the next turn reuses, and the KV that it must not reuse."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blending import CHUNKS, endings, full_prefill, messages, plain_logits, relative

import kvrag.memory.conversation
from kvrag import BlendConfig, BlendEngine, FileStore, Model, ModelError, SettingError
from kvrag.backend.transformers import BlendCache
from kvrag.control.plan import Plan
from kvrag.index.match import DeletedTexts
from kvrag.memory.conversation import Blended, CachedPrefix, Conversations, KeptStretch, Turn
from kvrag.request import Request
from kvrag.store.values import Entry
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

        def watched(request: Request) -> None:
            prefill(request)
            self.done.append(copy.copy(request))  # its KV is freed after the answer

        engine._answering.prefill = watched  # type: ignore[method-assign]

    def __call__(self, prompt: str | Messages, **settings: Any) -> Answer:
        return self.engine.generate(prompt, **{"max_new_tokens": 8, "temperature": 0, **settings})

    @property
    def logits(self) -> torch.Tensor:
        return self.done[-1].logits[0]

    @property
    def kept(self) -> int:
        return endings(self.engine._answering._conversations)


def _next(prompt: Messages, answer: Answer | str, *chunks: str, question: str = "Question: And who is it?") -> Messages:
    text = answer if isinstance(answer, str) else answer.text
    return [*prompt, {"role": "assistant", "content": text}, *messages(*chunks, question=question)]


def _ids(engine: BlendEngine, prompt: Messages) -> list[int]:
    return engine.model.tokenizer.render(prompt)


# ---------------------------------------------------------------- the next turn


@pytest.mark.parametrize("policy", ["query", "hkvd", "first_k"])
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
    assert report.reused_tokens == report.conversation_tokens
    assert report.reused_tokens + report.recomputed_tokens + report.fresh_tokens == len(ids)
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
    stretches = sorted(talk.engine._answering._conversations._kept, key=lambda kept: kept.start)
    ids = torch.tensor(np.concatenate([kept.ids for kept in stretches]))
    assert len(ids) == said.report.prompt_tokens + 11, "of the last token there is no KV"
    assert not any(kept.blended for kept in stretches)
    own = talk.engine.model.new_cache(len(ids))
    talk.engine.model.forward(ids[None], own)
    for kept in stretches:
        for number in range(talk.engine.model.num_layers):
            for ours, theirs in zip(kept.layers[number], own.layer(number), strict=True):
                torch.testing.assert_close(ours, theirs[:, :, kept.start : kept.stop], atol=1e-4, rtol=1e-4)


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
    blended = next(kept.start for kept in talk.engine._answering._conversations._kept if kept.blended)
    assert 0 < report.conversation_tokens <= blended < report.prompt_tokens - 60
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
        ({"ratio": 0.3}, {"ratio": 0.3, "edited_history": "blend"}, True),
        ({"ratio": 0.0}, {"policy": "none"}, True),
        ({}, {}, True),
        ({}, {"ratio": 0.3}, False),
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
    exact = alone.report.runs[0].stop
    talk.engine._answering._conversations._roots.clear()
    talk(FIRST, ratio=0.3)
    for prompt in (other, FIRST):
        report = talk(prompt, ratio=0.3).report
        assert report.conversation_tokens <= exact + 4, "what is exact in either"
        if prompt is other:
            assert relative(talk.logits, talk.done[0].logits[0]) <= 1e-5
            assert report.runs[-2:] == alone.report.runs[-2:]


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
    assert (report.conversation_tokens, report.stored_tokens) == (0, 0)
    ids = torch.tensor(_ids(talk.engine, prompt))
    assert torch.equal(talk.logits, full_prefill(talk.engine.model, ids, 600)[0][0])


def test_passes_that_only_need_a_cache_ignore_conversations(talk: Talk) -> None:
    """As in calibration and benchmarks."""
    said = talk(FIRST, ratio=1.0)
    done = talk.engine.prefill(_ids(talk.engine, _next(FIRST, said)), BlendConfig(ratio=0.3))
    assert done.report.conversation_tokens == 0
    assert talk.kept == 1


def test_an_answer_that_failed_leaves_nothing(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Iterator[Delta]:
        yield Delta("a", (5,))
        raise ModelError("the model's logits are NaN")

    monkeypatch.setattr("kvrag.generate.decode.decode", fail)
    with pytest.raises(ModelError):
        talk(FIRST, ratio=0.3)
    kept = list(talk.engine._answering._conversations._kept)
    assert all(stretch.blended is None and stretch.stop < talk.done[0].report.runs[-1].start for stretch in kept)


# ---------------------------------------------------------------- the controller


def test_full_prefill_that_the_controller_chooses_continues_the_conversation(
    talk: Talk, hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = talk(FIRST, ratio=1.0)
    prompt = _next(FIRST, said, CHUNKS[3])
    ids = _ids(talk.engine, prompt)
    asked: list[int] = []

    def decide(plan: Plan, config: BlendConfig, request: Request, *_: Any) -> Plan:
        asked.append(request.kept)
        return replace(plan, config=replace(config, policy="full", ratio=1.0), reason="it is faster")

    monkeypatch.setattr(talk.engine._planner, "_with_chunks", decide)
    report = talk(prompt).report
    assert asked == [report.conversation_tokens]
    assert (report.policy, report.ratio, report.runs, report.exact) == ("full", 1.0, (), True)
    assert report.reused_tokens == report.conversation_tokens >= len(_ids(talk.engine, FIRST)) - 5
    assert relative(talk.logits, plain_logits(hf, ids)[-1]) <= 1e-5
    report = talk(_next(prompt, "Nobody."), ratio=1.0).report
    assert report.conversation_tokens >= len(ids) - 5, "and any of them can be used"


def test_copying_a_conversation_is_not_measured_as_rotating(talk: Talk) -> None:
    seen: list[int] = []
    meter = talk.engine._planner._costs
    meter.observe_stitch = lambda tokens, seconds: seen.append(tokens)  # type: ignore[method-assign]
    said = talk(FIRST, ratio=1.0)
    talk(_next(FIRST, said, CHUNKS[3]), ratio=1.0)
    assert seen == [said.report.stored_tokens]


# ---------------------------------------------------------------- side by side


def test_two_turns_of_one_conversation_at_once_do_not_disturb_each_other(talk: Talk) -> None:
    said = talk(FIRST, ratio=0.3)
    prompts = [_next(FIRST, said, CHUNKS[3], question=f"Question {i}: who is it then?") for i in range(8)]
    engine = talk.engine
    conversations = engine._answering._conversations
    origins = sorted(conversations._kept, key=lambda kept: kept.start)
    before = [tensor.clone() for origin in origins for layer in origin.layers for tensor in layer]

    def only_the_origin() -> None:
        conversations._roots.clear()
        conversations._kept.clear()
        root = conversations._roots[""] = KeptStretch("", 0, origins[0].ids[:0], ())
        for origin in origins:
            origin.children = []
            conversations._add(root, origin)
            root = origin

    alone = []
    for prompt in prompts:
        only_the_origin()
        alone.append(talk(prompt, ratio=0.3))
    only_the_origin()
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
    after = [tensor for origin in origins for layer in origin.layers for tensor in layer]
    assert all(map(torch.equal, before, after))
    assert talk.kept == 4, "each can be continued"
    for number in range(4):
        report = talk(_next(prompts[number], alone[number]), ratio=0.3).report
        assert report.conversation_tokens >= len(_ids(engine, prompts[number])) - 5


# ---------------------------------------------------------------- bounds


def _kept(engine: BlendEngine) -> int:
    return engine._answering._conversations._num_bytes


def test_the_bound_in_bytes_is_kept(endless: Model, tmp_path: Path) -> None:
    token = endless.bytes_per_token
    with BlendEngine(endless, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=600 * token) as engine:
        for number in range(6):
            engine.generate(f"{number} stories: {CHUNKS}", max_new_tokens=2)
            assert 0 < _kept(engine) <= 600 * token
        assert 2 <= endings(engine._answering._conversations) < 6
        kept = list(engine._answering._conversations._kept)
        engine.generate(messages(*CHUNKS * 12), max_new_tokens=2)
        assert list(engine._answering._conversations._kept) == kept, "one that is too large evicts no other"


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
    assert (endings(engine._answering._conversations), _kept(engine)) == (0, 0)


def test_a_turn_keeps_no_memory_of_earlier_turns(talk: Talk) -> None:
    said = talk(FIRST, ratio=0.3)
    old = weakref.ref(talk.done.pop().cache)
    assert old() is None, "what is kept has no room to grow, and no copy of what it shares"
    talk(_next(FIRST, said, CHUNKS[3]), ratio=0.3)
    assert talk.kept == 1


def _keep(conversations: Conversations, ids: Sequence[int], exact: int = 0, of: int = 0, **chunks: int) -> None:
    """Keep an answer with four bytes of KV per token, to a prompt of `of` tokens; `chunks` are positions by key."""
    cache = BlendCache(range(1), len(ids))
    cache.update(torch.zeros(1, 1, len(ids), 1), torch.zeros(1, 1, len(ids), 0), 0)
    request = Request([*ids, *range(len(ids), of)])
    conversations.begin(request)
    request.chunks = tuple((position, key) for key, position in chunks.items())
    blended = Blended(BlendConfig(ratio=0.3), (Turn(0, len(ids) - 5, len(ids) - 3),), {})
    placed = [(position, key) for key, position in chunks.items()]
    conversations.keep(request, np.array(ids), exact, cache, placed, blended, None)


def _find(conversations: Conversations, prompt: Sequence[int]) -> CachedPrefix | None:
    return conversations.find(prompt, BlendConfig(ratio=0.3))


def _lengths(conversations: Conversations) -> list[tuple[int, int]]:
    return sorted((kept.start, kept.stop) for kept in conversations._kept)


def test_the_least_recently_used_is_evicted_first() -> None:
    conversations = Conversations(2 * 40 * 4, 1000)
    for start in (0, 100):
        _keep(conversations, range(start, start + 40))
    found = _find(conversations, [*range(40), 7, 7])
    assert found is not None
    assert found.length == 40
    _keep(conversations, range(200, 240))
    assert sorted(kept.ids[0] for kept in conversations._kept) == [0, 200]


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
    _keep(conversations, range(40), a=0)
    found = _find(conversations, prompt)
    assert (found and found.length) == length


def test_the_longest_is_taken() -> None:
    conversations = Conversations(1 << 20, 1000)
    for stop in (60, 80, 70):
        _keep(conversations, range(stop), a=0)
    found = _find(conversations, range(100))
    assert found is not None
    assert found.length == 80


def test_a_history_blended_without_chunks_is_reused_up_to_the_next_edit() -> None:
    conversations = Conversations(1 << 20, 1000)
    _keep(conversations, range(100), exact=20)
    found = _find(conversations, [*range(60), 7, 7])
    assert found is not None
    assert (found.length, found.exact, found.turns, found.continued) == (60, 20, (), None)
    found = _find(conversations, [*range(100), 7, 7])
    assert found is not None
    assert found.continued is not None, "the next turn takes its place"


def test_where_rope_follows_the_length_nothing_longer_is_kept_or_taken() -> None:
    conversations = Conversations(1 << 20, 50)
    _keep(conversations, range(51))
    _keep(conversations, range(40), of=51)  # the exact first tokens of a longer prompt
    assert endings(conversations) == 0
    _keep(conversations, range(40))
    assert _find(conversations, range(50)) is not None
    assert _find(conversations, range(51)) is None


# ---------------------------------------------------------------- common beginnings


def test_what_prompts_begin_with_is_kept_once() -> None:
    conversations = Conversations(1 << 20, 1000)
    for end in (500, 600, 700):
        _keep(conversations, [*range(100), *range(end, end + 20)], exact=120)
    assert _lengths(conversations) == [(0, 100), (100, 120), (100, 120), (100, 120)]
    assert conversations._num_bytes == 4 * 160
    found = _find(conversations, [*range(100), *range(800, 850)])
    assert found is not None
    assert (found.length, found.exact) == (100, 100)
    found = _find(conversations, [*range(70), 7, 7])
    assert found is not None
    assert (found.length, sum(keys.shape[2] for keys, _ in found.layer(0))) == (70, 70)


def test_forgetting_a_chunk_leaves_the_stretches_before_it() -> None:
    conversations = Conversations(1 << 20, 1000)
    _keep(conversations, range(100), exact=100, a=60)
    _keep(conversations, [*range(40), *range(500, 560)], exact=50, b=45, c=70)
    assert _lengths(conversations) == [(0, 40), (40, 50), (40, 100), (50, 100)]
    conversations.drop(["a"])
    assert _lengths(conversations) == [(0, 40), (40, 50), (50, 100)]
    conversations.drop(["c"])
    assert _lengths(conversations) == [(0, 40), (40, 50)]
    conversations.drop(["b"])
    assert _lengths(conversations) == [(0, 40)]
    assert conversations.keys() == set()


def test_without_memory_for_a_copy_nothing_is_kept_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = Conversations(1 << 20, 1000)
    _keep(conversations, range(100), exact=100)
    copied, left = kvrag.memory.conversation._copied, iter([1, 0])

    def fail(*args: Any) -> Any:
        if next(left, 0):
            return copied(*args)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(kvrag.memory.conversation, "_copied", fail)
        _keep(conversations, [*range(60), *range(500, 560)], exact=120)
    assert _lengths(conversations) == [(0, 100)]
    _keep(conversations, [*range(60), *range(500, 560)], exact=120)
    assert _lengths(conversations) == [(0, 60), (60, 100), (60, 120)]
    parents = [child.parent() for child in conversations._kept if child.start]
    assert [parent.stop for parent in parents if parent] == [60, 60]


@pytest.mark.parametrize("drop", [lambda kept: kept.drop(["a"]), Conversations.close])
def test_dropped_kv_is_freed_without_a_garbage_collection(drop: Callable[[Conversations], None]) -> None:
    conversations = Conversations(1 << 20, 1000)
    for middle in range(200, 203):
        _keep(conversations, [*range(100), *[middle] * 60], exact=160, a=0)
    kept = [*map(weakref.ref, conversations._kept)]
    assert len(kept) == 4
    gc.disable()
    try:
        drop(conversations)
        assert not [reference for reference in kept if reference()]
    finally:
        gc.enable()


def test_a_chunk_that_was_stored_later_is_known_in_kv_computed_before() -> None:
    conversations = Conversations(1 << 20, 1000)
    _keep(conversations, range(100), exact=100)
    _keep(conversations, range(100), exact=100, a=60)
    assert conversations.keys() == {"a"}
    conversations.drop(["a"])
    assert _lengths(conversations) == []


def test_random_prompts_are_found_as_far_as_they_are_kept_and_nothing_twice() -> None:
    rng = random.Random(0)
    conversations = Conversations(1 << 20, 1000)
    prompts: list[list[int]] = []
    for _ in range(300):
        base = rng.choice(prompts)[: rng.randrange(1, 90)] if prompts and rng.random() < 0.8 else []
        prompts.append([*base, *(rng.randrange(3) for _ in range(rng.randrange(20, 60)))])
        _keep(conversations, prompts[-1], exact=len(prompts[-1]))
    for prompt in prompts:
        query = [*prompt[: rng.randrange(len(prompt))], 9, 9]
        pairs = [zip(query, other, strict=False) for other in prompts]
        common = max(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs)
        found = _find(conversations, query)
        assert (found.length if found else 0) == (common if common >= 16 else 0)
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert conversations._num_bytes == 4 * len(prefixes)


def test_the_work_for_a_prompt_does_not_grow_with_the_number_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    conversations, looked_at = Conversations(300 * 40 * 4, 1000), list[int]()
    size, turns = KeptStretch.num_bytes, kvrag.memory.conversation._turns

    def counted(stretch: KeptStretch) -> Any:
        looked_at.append(stretch.start)
        return size.__get__(stretch)

    def counted_turns(prompt: Any, stretch: KeptStretch) -> Any:
        looked_at.append(stretch.start)
        return turns(prompt, stretch)

    monkeypatch.setattr(KeptStretch, "num_bytes", property(counted))
    monkeypatch.setattr(kvrag.memory.conversation, "_turns", counted_turns)
    for number in range(310):
        looked_at.clear()
        _keep(conversations, range(50 * number, 50 * number + 40), exact=40 * (number % 2))
        found = _find(conversations, [*range(50 * number, 50 * number + 40), 7, 7])
        assert found is not None
        assert len(looked_at) <= 4
    assert endings(conversations) == 300
    assert conversations._num_bytes == 300 * 40 * 4


@pytest.mark.parametrize("seed", range(5))
def test_after_any_changes_the_total_is_that_of_the_tree_and_the_oldest_is_an_ending(seed: int) -> None:
    rng, conversations = random.Random(seed), Conversations(6000, 1000)
    for number in range(300):
        ids = [*range(rng.randrange(1, 4) * 20), *(rng.randrange(3) for _ in range(rng.randrange(60))), number]
        what = rng.random()
        if what < 0.6:
            chunks = {f"{number}": rng.randrange(len(ids)), f"{number % 7}": rng.randrange(len(ids))}
            _keep(conversations, ids, exact=rng.choice([0, len(ids) // 2, len(ids)]), **chunks)
        elif what < 0.8:
            _find(conversations, ids)
        elif what < 0.9:
            conversations.drop([f"{number % 7}"])
        else:
            conversations.drop_texts(DeletedTexts([Entry(1, "", "", np.array(ids[:20], np.uint32))], str))
        tree, left = list[KeptStretch](), [*conversations._roots.values()]
        while left:
            children = left.pop().children
            tree += children
            left += children
        assert {*tree} == {*conversations._kept}
        assert conversations._num_bytes == sum(kept.num_bytes for kept in tree) <= 6000
        places = {kept: place for place, kept in enumerate(conversations._kept)}
        assert all(places[kept] < places.get(kept.parent(), len(places)) for kept in tree)


def test_a_second_conversation_shares_the_system_prompt(talk: Talk, hf: Any) -> None:
    system = {"role": "system", "content": "You answer questions about people. " * 8}
    talk([system, *messages(CHUNKS[0], question="Who?")], ratio=1.0)
    prompt = [system, *messages(CHUNKS[2], question="Where is it?")]
    report = talk(prompt, ratio=1.0).report
    ids = _ids(talk.engine, prompt)
    assert report.conversation_tokens > 60
    assert [run.start >= report.conversation_tokens for run in report.runs] == [True]
    assert relative(talk.logits, plain_logits(hf, ids)[-1]) <= 1e-5
    assert report.exact


def test_streams_at_the_same_time_share_what_the_first_has_computed(talk: Talk) -> None:
    system = {"role": "system", "content": "You answer questions about people. " * 8}
    stream = talk.engine.stream([system, *messages(CHUNKS[0], question="Who?")], max_new_tokens=20)
    next(stream), next(stream)
    report = talk([system, *messages(CHUNKS[2], question="Where is it?")]).report
    assert report.conversation_tokens > 60


def test_an_answer_of_one_token_computes_a_system_prompt_with_its_tools(talk: Talk, hf: Any) -> None:
    system = {"role": "system", "content": "You answer questions about people. " * 8}
    tool = {"type": "function", "function": {"name": "search", "description": "Searches people. " * 20}}
    talk([system, *messages(question="Hello.")], tools=[tool], max_new_tokens=1)
    prompt = [system, *messages(CHUNKS[2], question="Where is it?")]
    report = talk(prompt, tools=[tool], ratio=1.0).report
    assert report.conversation_tokens > 120
    assert talk(prompt, tools=[tool], namespace="other").report.conversation_tokens == 0


# ---------------------------------------------------------------- edited histories


def _edited(prompt: Messages, thought: str) -> Messages:
    return [{**message, "content": message["content"].replace(thought, "")} for message in prompt]


def _talked(talk: Talk, **settings: Any) -> tuple[Messages, str]:
    """Return a prompt of three turns, whose first answer has a thought, and the thought."""
    thought = "<think>Who was it? I remember a man who liked bread and lived by the sea, or was it his sister?</think>"
    answer = thought + "It was Mira Brel, who was born in Florton, and she likes to eat curry with apples every day."
    prompt = _next(FIRST, answer, CHUNKS[3])
    said = talk(prompt, **settings)
    prompt = _next(prompt, said.text + " So it was somebody else, a person of whom nothing at all is known today.")
    talk(prompt, **settings)
    prompt = _next(prompt, "Nobody knows.", question="Question: Who of them likes it best, and where is it eaten?")
    return prompt, thought


@pytest.fixture
def blending(model: Model, tmp_path: Path) -> Iterator[Talk]:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), BlendConfig(edited_history="blend")) as engine:
        engine.warm(CHUNKS)
        yield Talk(engine)


def test_a_deterministic_answer_does_not_depend_on_earlier_prompts(talk: Talk) -> None:
    prompt, options = messages(*CHUNKS), {"ratio": 0.3, "deterministic": True}
    first = talk(prompt, **options)
    logits = talk.logits
    assert talk.kept == 0, "nothing reads it"
    talk(prompt, ratio=1.0)
    follow_up = [*prompt, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    assert talk(follow_up, ratio=0.3).report.conversation_tokens > 0
    for asked in (prompt, prompt):
        assert talk(asked, **options).report.conversation_tokens == 0
        assert torch.equal(talk.logits, logits)
    assert talk(follow_up, **options).report.conversation_tokens == 0
    with pytest.raises(
        SettingError, match='deterministic=True reuses nothing of earlier prompts: leave edited_history at "exa'
    ):
        talk(prompt, edited_history="blend", deterministic=True)
    with pytest.raises(SettingError, match="deterministic must be True or False, got 'yes'"):
        talk(prompt, deterministic="yes")


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_behind_a_dropped_thought_the_history_is_blended(ratio: float, blending: Talk, hf: Any) -> None:
    prompt, thought = _talked(blending, ratio=ratio)
    edited = _edited(prompt, thought)
    assert edited != prompt
    report = blending(edited, ratio=ratio).report
    ids = _ids(blending.engine, edited)
    assert report.moved_tokens > 80
    stored = report.conversation_tokens + report.moved_tokens + sum(map(len, report.runs))
    assert stored == report.reused_tokens + report.recomputed_tokens == len(ids) - report.fresh_tokens
    assert report.fresh_tokens < 80, "about what is new"
    assert report.exact == (ratio == 1.0)
    if report.exact:
        assert relative(blending.logits, plain_logits(hf, ids)[-1]) <= 1e-5
        assert report.reused_tokens == report.conversation_tokens
    follows = blending(_next(edited, "Nobody."), ratio=ratio).report
    assert follows.conversation_tokens > len(ids) - 5, "the edited conversation goes on like any other"


def test_without_blending_of_histories_what_follows_an_edit_is_computed(talk: Talk) -> None:
    prompt, thought = _talked(talk, ratio=0.3)
    report = talk(_edited(prompt, thought), ratio=0.3).report
    assert report.moved_tokens == 0


def test_the_history_of_other_namespaces_is_not_found(blending: Talk) -> None:
    prompt, thought = _talked(blending, ratio=0.3)
    report = blending(_edited(prompt, thought), ratio=0.3, namespace="other").report
    assert (report.conversation_tokens, report.stored_tokens) == (0, 0)


def test_a_forgotten_chunk_is_not_found_in_the_history(blending: Talk) -> None:
    blending.engine.warm(CHUNKS[:3], document="a")
    prompt, thought = _talked(blending, ratio=0.3)
    assert blending(_edited(prompt, thought), ratio=0.3).report.moved_tokens > 80
    assert blending.engine.forget("a") == 0, "another document has them"
    blending.engine.warm([], document="a")
    for chunk in CHUNKS:
        blending.engine.warm([chunk], document="all of them")
    blending.engine.forget("all of them")
    assert blending.engine._answering._conversations.keys() <= set(blending.engine._pipeline.memory.keys())


def test_the_end_of_a_prompt_is_never_taken_from_elsewhere(blending: Talk) -> None:
    """The tokens of the question choose what is recomputed: one that was asked before is computed again."""
    question = "Question: Who likes to eat curry and apples, and where do they live, and since when, and with whom?"
    blending([{"role": "user", "content": question}], ratio=0.3)
    report = blending(messages(CHUNKS[0], question=question), ratio=0.3).report
    assert report.fresh_tokens >= 32


def test_full_prefill_reuses_no_history_behind_an_edit(blending: Talk, hf: Any) -> None:
    prompt, thought = _talked(blending, ratio=0.3)
    edited = _edited(prompt, thought)
    report = blending(edited, policy="full").report
    assert (report.stored_tokens, report.exact) == (0, True)


def test_histories_can_be_blended_per_answer(talk: Talk) -> None:
    prompt, thought = _talked(talk, ratio=0.3)
    assert talk(_edited(prompt, thought), ratio=0.3, edited_history="blend").report.moved_tokens > 80
    with pytest.raises(SettingError, match="unknown edited_history 'all'; choose one of exact, blend"):
        talk(prompt, edited_history="all")
