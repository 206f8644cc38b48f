"""Random operations on one engine: every answer equals the one of a fresh engine without a store.

A Hypothesis state machine warms, forgets, asks, asks in batches, continues conversations, abandons streams, maintains
the store and reopens it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from torture import stateful, tiny
from torture.campaign import Campaign

_TEXTS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
_DOCUMENTS = st.sampled_from(["", "a", "b", "c"])
_NAMESPACES = st.sampled_from(["", "", "", "other"])
_POLICIES = st.sampled_from(["first_k", "hkvd", "query", "random", "full"])


class Machine(RuleBasedStateMachine):
    """An engine, its conversations, and its prompts."""

    done = answers = reusing = 0  # operations of all machines, exact answers, and those of them that reused KV

    @initialize(
        ram_bytes=st.sampled_from([0, 60_000, 1 << 30]),
        conversation_bytes=st.sampled_from([0, 300_000, 1 << 30]),
        max_bytes=st.sampled_from([None, None, 400_000]),
        codec=st.sampled_from(["native", "native", "int8"]),
    )
    def begin(self, **given: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvrag-torture-machine-"))
        self.settings, self.talks = given, list[tuple[str, list[dict[str, str]]]]()
        self.engine = tiny.engine(self.folder, **given)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
            shutil.rmtree(self.folder)

    def check(self, messages: list[dict[str, str]], **options: Any) -> None:
        reused = tiny.check_answer(self.engine, messages, **options)
        type(self).answers += 1
        type(self).reusing += reused > 0

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        type(self).done += 1
        super().check_invariants(*args, **kwargs)

    @rule(numbers=_TEXTS, document=_DOCUMENTS, namespace=_NAMESPACES)
    def warm(self, numbers: list[int], document: str, namespace: str) -> None:
        report = self.engine.warm(map(tiny.text, numbers), document=document, namespace=namespace)
        assert report.chunks == len({*numbers})
        if document:
            assert document in self.engine.documents(namespace=namespace)

    @rule(document=st.sampled_from("abc"), namespace=_NAMESPACES)
    def forget(self, document: str, namespace: str) -> None:
        self.engine.forget(document, namespace=namespace)
        assert document not in self.engine.documents(namespace=namespace)

    @rule(numbers=_TEXTS, question=st.integers(0, 3), policy=_POLICIES, namespace=_NAMESPACES, new=st.booleans())
    def ask(self, numbers: list[int], question: int, policy: str, namespace: str, new: bool) -> None:
        messages = tiny.prompt(numbers, question)
        documents = [tiny.text(number) for number in numbers] if new else None
        self.check(messages, policy=policy, namespace=namespace, documents=documents)
        self.talks.append((namespace, messages))

    @rule(each=st.lists(st.tuples(_TEXTS, st.integers(0, 3)), min_size=2, max_size=4), namespace=_NAMESPACES)
    def ask_in_a_batch(self, each: list[tuple[list[int], int]], namespace: str) -> None:
        prompts: list[Any] = [tiny.prompt(numbers, question) for numbers, question in each]
        options: Any = {"ratio": 1.0, "policy": "first_k", "temperature": 0.0, "max_new_tokens": tiny.TOKENS}
        answers = self.engine.generate_batch(prompts, namespace=namespace, **options)
        assert [answer.token_ids for answer in answers] == [tiny.expected(prompt) for prompt in prompts]

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), numbers=_TEXTS, is_answered=st.booleans())
    def continue_a_conversation(self, data: Any, numbers: list[int], is_answered: bool) -> None:
        namespace, messages = data.draw(st.sampled_from(self.talks[-4:]))
        said = self.engine.model.tokenizer.decode(list(tiny.expected(messages))) if is_answered else "I do not know."
        longer = [*messages, {"role": "assistant", "content": said}, *tiny.prompt(numbers, 1)]
        if self.engine.count_tokens(longer) < 1000:
            self.check(longer, namespace=namespace)
            self.talks.append((namespace, longer))

    @rule(numbers=_TEXTS, steps=st.integers(0, 3))
    def leave_a_stream(self, numbers: list[int], steps: int) -> None:
        stream = self.engine.stream(tiny.prompt(numbers), max_new_tokens=tiny.TOKENS)
        for _, _ in zip(range(steps), stream, strict=False):
            pass
        stream.close()

    @rule(numbers=_TEXTS, ratio=st.sampled_from([0.0, 0.15, 0.5]), policy=_POLICIES)
    def blend(self, numbers: list[int], ratio: float, policy: str) -> None:
        """Inexact answers must not affect a later exact one."""
        messages = tiny.prompt(numbers)
        tiny.answer(self.engine, messages, ratio=ratio, policy=policy)
        self.talks.append(("", messages))

    @rule(what=st.sampled_from(["check", "gc", "stats"]))
    def maintain(self, what: str) -> None:
        store: Any = self.engine.store
        found = getattr(store, what)()
        if what == "check":
            assert found.damaged == found.unreadable == 0, found

    @rule()
    def open_again(self) -> None:
        self.engine.close()
        self.engine = tiny.engine(self.folder, **self.settings)


def run(campaign: Campaign) -> None:
    """Run machines; the cases are operations."""
    stateful.run(campaign, Machine)
    campaign.result.figures |= {"answers compared": Machine.answers, "that reused stored KV": Machine.reusing}
