"""Streams abandoned while other answers decode them ahead, and documents forgotten meanwhile.

The models have every type of RoPE, and layers that keep a state.

Every next turn is compared with the model's own logits: some prompts begin like another one, before or beyond the
length at which the frequencies of RoPE change, some contain stored chunks that are blended, and some next turns have an
edited history, of which stretches are moved. After a forget, nothing of the document is kept anywhere: also not in
conversations from before it was warmed, nor in learned chunks.
"""

from __future__ import annotations

import functools
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blending import prefilled
from families import FAMILIES, HYBRIDS, build
from transformers import AutoTokenizer

import kvrag
from kvrag import BlendConfig, BlendEngine, FileStore, Model
from kvrag.index.match import match
from kvrag.index.segment import Segment
from kvrag.store.values import Entry
from torture import tiny
from torture.campaign import Campaign

_ROPES = ["llama", "llama-llama3", "llama-yarn", "llama-linear", "llama-dynamic", "llama-longrope", "phi3-longrope"]
_WITH_STATES = ["lfm2", "qwen3_next"]
_EXACT = BlendConfig(ratio=1.0, controller="off")
_TOLERANCE = 1e-4


def run(campaign: Campaign) -> None:
    """Abandon streams in every case, and forget documents in every second case."""
    for number in campaign.numbers():
        rng = campaign.random(number)
        with campaign.case(number):
            if number % 2:
                _forget_in_flight(campaign.folder / str(number), rng)
                campaign.kinds["documents forgotten"] += 1
            else:
                campaign.kinds[_abandon(campaign.folder / str(number), rng)] += 1


@functools.cache
def _model(family: str) -> Model:
    torch.set_num_threads(1)
    model_type, changes = (FAMILIES | HYBRIDS)[family]
    tokenizer = AutoTokenizer.from_pretrained(Path(kvrag.__file__).parent / "reader")
    model = Model(build(model_type, **changes), tokenizer, family)
    model.__dict__["eos_ids"] = frozenset()
    return model


def _abandon(folder: Path, rng: random.Random) -> str:
    """Read some tokens of two to four streams in turn, close them, and check the next turn of each."""
    family = rng.choice([*_ROPES, *_WITH_STATES])
    model, told = _model(family), list[list[int]]()
    config = replace(_EXACT, edited_history=rng.choice(["exact", "blend"]))
    with BlendEngine(model, FileStore(folder, min_free_bytes=0), config) as engine:
        prompts = [[rng.randrange(5, 1000) for _ in range(rng.randint(40, 95))] for _ in range(rng.randint(2, 4))]
        for number in range(1, len(prompts)):
            if rng.random() < 0.4:
                shared = rng.randint(1, 90)
                prompts[number][:shared] = prompts[0][:shared]
        texts = [tiny.text(number) for number in range(3)]
        engine.warm(texts)
        for ids in prompts:
            if rng.random() < 0.4:
                for text in rng.sample(texts, rng.randint(1, 3)):
                    ids += [*engine.encode(text), rng.randrange(5, 1000)]
        options: dict[str, Any] = {"ratio": rng.choice([0.3, 1.0]), "max_new_tokens": 60, "temperature": 0.0}
        streams = [engine.stream(ids, **options) for ids in prompts]
        told = [[] for _ in prompts]
        for _ in range(rng.randint(2, 60)):
            number = rng.randrange(len(prompts))
            if len(told[number]) < 50:
                told[number] += next(streams[number]).token_ids
        for stream in streams:
            stream.close()
        for ids, said in zip(prompts, told, strict=True):
            following = [*ids, *said, *(rng.randrange(5, 1000) for _ in range(rng.choice([1, 1, 40])))]
            if rng.random() < 0.4:  # an edited history
                start = rng.randrange(len(ids))
                following[start : start + rng.randrange(20)] = [rng.randrange(5, 1000) for _ in range(rng.randrange(9))]
            done = prefilled(engine, following, goes_on=True)
            with torch.inference_mode():
                wanted = model.hf(torch.tensor([following])).logits[0, -1].float()
            error = float((done.logits[0] - wanted).abs().max() / wanted.abs().max())
            assert done.report.exact
            assert error <= _TOLERANCE, f"{family}: {len(ids)} + {len(said)} tokens, off by {error}"
    return family


def _forget_in_flight(folder: Path, rng: random.Random) -> None:
    """Forget documents, in this engine or in another one, while threads answer prompts with their texts."""
    numbers = list(range(rng.randint(2, 5)))
    learns = rng.random() < 0.5
    idle: Any = {"check": rng.choice([0.0, 1.0])}
    with tiny.engine(folder, learn=learns, **idle) as engine, tiny.engine(folder) as other:
        if rng.random() < 0.5:
            engine.warm(map(tiny.text, numbers), document="a")
        stops, errors = threading.Event(), list[Exception]()

        def answer(seed: int) -> None:
            own = random.Random(seed)
            try:
                while not stops.is_set():
                    asked = own.sample(numbers, own.randint(1, len(numbers)))
                    options: dict[str, Any] = {"documents": list(map(tiny.text, asked))} if own.random() < 0.2 else {}
                    options |= {"edited_history": own.choice(["exact", "blend"]), "max_new_tokens": tiny.TOKENS}
                    options |= {"margin": own.choice([None, 0.0])}  # with 0, KV is not exact: there is idle work
                    stream = engine.stream(tiny.prompt(asked, own.randrange(3)), **options)
                    for _ in zip(range(own.randint(1, 9)), stream, strict=False):
                        pass
                    stream.close()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=answer, args=(rng.random(),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(rng.randint(1, 4)):
                rng.choice([engine, other]).forget("a")
                engine.warm(map(tiny.text, numbers), document="a")
            rng.choice([engine, other]).forget("a")
        finally:
            stops.set()
            for thread in threads:
                thread.join()
        assert not errors, errors
        engine._answering.idle.wait()
        engine.warm(map(tiny.text, numbers), document="a")  # prompts after the last forget have brought texts again
        rng.choice([engine, other]).forget("a")
        tiny.check_answer(engine, tiny.prompt([9]))
        _check_nothing_is_left(engine, numbers)


def _check_nothing_is_left(engine: Any, numbers: list[int]) -> None:
    conversations = engine._answering._conversations
    left = {*engine._pipeline.memory.keys(), *conversations.keys()}
    assert not left, f"KV of {len(left)} forgotten chunks is kept"
    assert engine.store.stats().chunks == 0
    assert not any(segment.alive.sum() for segment in engine._lookup._snapshot.segments)
    texts = [Entry(i, str(i), "", np.array(engine.encode(tiny.text(i)), np.uint32)) for i in numbers]
    for stretch in conversations._kept:
        found = match([Segment.of(texts)], stretch.ids.astype(np.uint32), 16)
        assert not found, f"{len(found[0])} tokens of a forgotten text are kept in a conversation"
