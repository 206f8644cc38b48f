"""A tiny random model in float32, texts for it, and the answers that it gives without kvrag."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch
from families import build
from transformers import AutoTokenizer

import kvrag
from kvrag import Answer, BlendConfig, BlendEngine, FileStore, Model, SharedStore
from kvrag.store import is_shared
from kvrag.store.shared import CACHE_BYTES

TOKENS = 5
"""Length of the answers."""

_NAMES = [
    "Mira Brel",
    "Kan Dror",
    "Zel Vinford",
    "Tran Works",
    "Florton",
    "Stelburg",
    "Grelville",
    "Ostbach",
    "Ina Kel",
]
_VERBS = ["met", "left", "saw", "paid", "taught", "painted", "drove"]


@functools.cache
def model() -> Model:
    """The tiny llama; the same weights in every process. Its answers have no end token."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(Path(kvrag.__file__).parent / "reader")
    hf = build("llama", max_position_embeddings=2048)
    hf.generation_config.suppress_tokens = [hf.config.eos_token_id]
    return Model(hf, tokenizer, "tiny")


def text(number: int) -> str:
    """Return a text of the pool, 25 to 80 tokens long."""
    rng = random.Random(number)
    return " ".join(
        f"{rng.choice(_NAMES)} {rng.choice(_VERBS)} {rng.choice(_NAMES)} in {rng.randrange(1900, 2000)}."
        for _ in range(rng.randrange(2, 7))
    )


def prompt(numbers: list[int], question: int = 0) -> list[dict[str, str]]:
    """Return a prompt of texts of the pool."""
    content = "\n\n".join([*map(text, numbers), f"Question {question}: who met {_NAMES[question % len(_NAMES)]}?"])
    return [{"role": "user", "content": content}]


def expected(messages: list[dict[str, str]]) -> tuple[int, ...]:
    """Return the tokens of the model's own greedy answer, without kvrag."""
    return generated(tuple(model().tokenizer.render(messages)))


@functools.lru_cache(4096)
@torch.inference_mode()
def generated(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that transformers generates after these."""
    hf: Any = model().hf
    made = hf.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, use_cache=True)
    return tuple(made[0, len(ids) :].tolist())


def engine(place: Path | str, max_bytes: int | None = None, cache: Path | None = None, **settings: Any) -> BlendEngine:
    """Open an engine on a store.

    Args:
        place: Folder or URL.
        max_bytes: Byte budget of the store; of a shared one, of its local copies.
        cache: Folder of the local copies of a shared store.
    """
    store: FileStore | SharedStore
    if is_shared(place):
        store = SharedStore(str(place), cache, max_bytes or CACHE_BYTES, min_free_bytes=0)
    else:
        store = FileStore(place, max_bytes=max_bytes, min_free_bytes=0)
    return BlendEngine(model(), store, BlendConfig(controller="off"), **settings)


def answer(engine: BlendEngine, messages: list[dict[str, str]], **options: Any) -> Answer:
    """Return the engine's answer, by default greedy with everything recomputed."""
    options = {"ratio": 1.0, "policy": "first_k", "temperature": 0.0, "max_new_tokens": TOKENS, **options}
    return engine.generate(messages, **options)


def check_edited_talk(engine: BlendEngine, numbers: list[int], rng: random.Random) -> None:
    """Ask, then check an answer to a prompt whose history was edited, of which stretches are moved."""
    messages = prompt(numbers)
    said = answer(engine, messages, edited_history="blend").text
    edited = messages[0]["content"].split(" ")
    start = rng.randrange(len(edited))
    edited[start : start + rng.randrange(1, 9)] = ["Ina"] * rng.randrange(3)
    history = [{"role": "user", "content": " ".join(edited)}, {"role": "assistant", "content": said}]
    check_answer(engine, [*history, *prompt(numbers[:1], 1)], edited_history="blend")


def check_answer(engine: BlendEngine, messages: list[dict[str, str]], **options: Any) -> int:
    """Raise AssertionError unless the engine's answer equals the model's; return the number of reused tokens."""
    made, wanted = answer(engine, messages, **options), expected(messages)
    assert made.token_ids == wanted, f"another answer than full prefill's: {made.token_ids} instead of {wanted}"
    return made.report.stored_tokens
