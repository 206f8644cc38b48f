"""Prompt formats of RAG chains that the reader is trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence

PLAIN = "{passages}\n\nQuestion: {question}\n\nAnswer:"
"""The chat template's output for a message with passages and question."""

_FORMATS = (
    "{passages}\n\n{question}\n\nAnswer:",
    "Answer the question from the context.\n\n{passages}\n\nQuestion: {question}\n\nAnswer:",
    "Answer the question based only on the following context:\n\n{passages}\n\nQuestion: {question}\n\nAnswer:",
    "You are a helpful assistant. Answer the question based only on the context.\n\n"
    "Context:\n{passages}\n\nQuestion: {question}\n\nAnswer:",
    "Use the given context to answer the question.\n\nContext: {passages}\n\n{question}\n\nAnswer:",
    "Context information is below.\n---------------------\n{passages}\n---------------------\n"
    "Given the context information and not prior knowledge, answer the query.\nQuery: {question}\nAnswer: \n\nAnswer:",
    "You are an expert Q&A system that is trusted around the world.\n\nContext information is below.\n"
    "---------------------\n{passages}\n---------------------\nGiven the context information and not prior knowledge, "
    "answer the query.\nQuery: {question}\nAnswer:\n\nAnswer:",
)
_SEPARATORS = ("\n\n", "\n\n", "\n", "\n\n---\n\n", "\n\n\n")


def prompt_parts(rng: random.Random, passages: Sequence[str]) -> tuple[str, str, str]:
    """Draw a format, the plain one half of the time.

    Returns:
        The text before the question, the separator (a space or nothing), and the text after the question.
    """
    plain = rng.random() < 0.5
    form = PLAIN if plain else rng.choice(_FORMATS)
    text = form.replace("{passages}", ("\n\n" if plain else rng.choice(_SEPARATORS)).join(passages))
    before, after = text.split("{question}")
    return before.rstrip(" "), " " * before.endswith(" "), after


def all_texts() -> list[str]:
    """Return every format, for the tokenizer's vocabulary."""
    return [PLAIN, *_FORMATS]
