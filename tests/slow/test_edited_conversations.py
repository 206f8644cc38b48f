"""Many random conversations with edited histories: exact at ratio 1, apart by namespace, within their memory."""

from __future__ import annotations

import random
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blending import plain_logits, relative

from kvrag import BlendConfig, BlendEngine, FileStore, Model

CONVERSATIONS, TURNS, RUN = 200, 4, 16


class Author:
    """Writes the prompts of conversations, as token ids; the conversations of a namespace have texts in common."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.rng, self.vocabulary = random.Random(seed), vocabulary
        self.systems = {name: [self.text(20, 60) for _ in range(3)] for name in ("one", "two")}
        self.pages = [self.text(30, 80) for _ in range(12)]  # both namespaces have them

    def text(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(5, self.vocabulary) for _ in range(self.rng.randrange(least, most))]

    def edit(self, parts: list[list[int]]) -> list[list[int]]:
        """Drop, swap, shorten or replace parts of a history, as agents do."""
        parts, kind = list(parts), self.rng.randrange(6)
        at = self.rng.randrange(len(parts))
        if kind == 0 and len(parts) > 2:
            del parts[at]
        elif kind == 1:
            other = self.rng.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif kind == 2:
            parts[at] = parts[at][: max(1, len(parts[at]) // 2)]
        elif kind == 3:
            parts[at] = self.text(3, 20)
        elif kind == 4:
            parts[1 : at + 1] = [self.text(10, 20)]
        return parts


@pytest.mark.parametrize("history", ["blend", "exact"])
def test_random_conversations_with_edits(history: str, endless: Model, hf: Any, tmp_path: Path) -> None:
    author = Author(7, 1000)
    rng = author.rng
    budget = 6000 * endless.bytes_per_token
    seen: dict[str, set[bytes]] = {"one": set(), "two": set()}
    compared = moved = 0
    config = BlendConfig(edited_history=history, controller="off")
    store = FileStore(tmp_path, min_free_bytes=0)
    with BlendEngine(endless, store, config, conversation_bytes=budget) as engine:
        done: list[Any] = []
        prefill = engine._answering.prefill
        engine._answering.prefill = lambda request: (prefill(request), done.append(copy(request)))  # type: ignore
        for _ in range(CONVERSATIONS // (1 if history == "blend" else 5)):
            namespace = rng.choice(["one", "two"])
            parts = [rng.choice(author.systems[namespace])]
            for _ in range(rng.randrange(1, TURNS + 1)):
                parts = author.edit(parts) if rng.random() < 0.5 else parts
                parts = [*parts, rng.choice(author.pages), author.text(4, 12)]
                prompt = [token for part in parts for token in part]
                if len(prompt) > 450:
                    break
                ratio = rng.choice([0.0, 0.3, 1.0, 1.0])
                answer = engine.generate(
                    prompt, namespace=namespace, ratio=ratio, max_new_tokens=rng.randrange(1, 5), temperature=0
                )
                report = answer.report
                stored = report.conversation_tokens + report.moved_tokens
                assert stored == report.reused_tokens + report.recomputed_tokens == len(prompt) - report.fresh_tokens
                assert stored <= _known(prompt, seen[namespace]), "text of another namespace"
                if ratio == 1.0:
                    assert report.exact
                    assert relative(done[-1].logits[0], plain_logits(hf, prompt)[-1]) <= 1e-4
                    compared += 1
                assert engine._answering._conversations._num_bytes <= budget
                moved += report.moved_tokens > 0
                done.clear()
                seen[namespace] |= _grams([*prompt, *answer.token_ids])
                parts = [*parts, [token % author.vocabulary for token in answer.token_ids]]
    assert compared > CONVERSATIONS // 10
    assert (moved > CONVERSATIONS // 10) == (history == "blend")


def _grams(ids: list[int]) -> set[bytes]:
    tokens = np.asarray(ids, np.int64)
    return {tokens[start : start + RUN].tobytes() for start in range(len(ids) - RUN + 1)}


def _known(ids: list[int], grams: set[bytes]) -> int:
    """Return how many tokens are in a run that was seen."""
    tokens, known = np.asarray(ids, np.int64), np.zeros(len(ids), bool)
    for start in range(len(ids) - RUN + 1):
        if tokens[start : start + RUN].tobytes() in grams:
            known[start : start + RUN] = True
    return int(known.sum())
