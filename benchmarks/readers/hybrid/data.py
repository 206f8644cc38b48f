"""Batches of contexts and questions of the first world."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.readers.first.world import KINDS, Sample, draw, gather, sample

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
LENGTH = 22  # maximum of a question with its answer
_SHORT = 6  # articles drawn as one context, whose values differ


@dataclass(frozen=True)
class Shape:
    """Shape of a batch: articles and maximum tokens per context, questions per context."""

    articles: tuple[int, int]
    rows: int
    context: int
    questions: int


@dataclass
class Batch:
    """A batch, shapes as in `Net.forward`. Kinds are indices of `KINDS`, -1 without a question."""

    context: Tensor  # (B, C)
    lengths: Tensor  # (B,)
    questions: Tensor  # (B, Q, L)
    answers: Tensor  # (B, Q, L) bool, tokens of answers
    kinds: Tensor  # (B, Q)
    subjects: Tensor  # (B, C) first token of the name that the passage is about, -1 for none
    pointers: Tensor  # (4, P) row, token within its questions, index in POINTING, head
    places: Tensor  # (P, C) bool, target positions of the head's attention in the context
    padding: int


def make_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, split: str, shape: Shape) -> Batch:
    """Draw contexts that fit."""
    rows: list[_Row] = []
    num_articles = rng.randint(*shape.articles)
    while len(rows) < 2 * shape.rows:
        row = _make_row(tokenizer, rng, split, num_articles, shape.questions)
        if len(row.context) <= shape.context and row.branches:
            rows.append(row)
    # similar lengths, for little padding
    rows.sort(key=lambda row: len(row.context))
    rows = rows[: shape.rows] if rng.random() < 0.5 else rows[shape.rows :]
    step = 64 if shape.context < 1024 else 512  # every width is compiled
    width = -(-len(rows[-1].context) // step) * step
    batch = Batch(
        torch.full((shape.rows, width), tokenizer.pad_token_id),
        torch.tensor([len(row.context) for row in rows]),
        torch.full((shape.rows, shape.questions, LENGTH), tokenizer.pad_token_id),
        torch.zeros((shape.rows, shape.questions, LENGTH), dtype=torch.bool),
        torch.full((shape.rows, shape.questions), -1),
        torch.full((shape.rows, width), -1),
        *_pointers(rows, width),
        tokenizer.pad_token_id,
    )
    for number, row in enumerate(rows):
        batch.context[number, : len(row.context)] = torch.tensor(row.context)
        batch.subjects[number, : len(row.context)] = torch.tensor(row.subjects)
        for branch, (asks, answer, kind, _) in enumerate(row.branches):
            ids = torch.tensor(asks + answer)
            batch.questions[number, branch, : len(ids)] = ids
            batch.answers[number, branch, len(asks) : len(ids)] = True
            batch.kinds[number, branch] = kind
    return batch


@dataclass
class _Row:
    """A context and its questions: ids of the question and the answer, kind, position of the fact in the context."""

    context: list[int]
    subjects: list[int]
    branches: list[tuple[list[int], list[int], int, list[list[int]]]]


def _make_row(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, split: str, num_articles: int, num_questions: int
) -> _Row:
    drawn = (sample if num_articles <= _SHORT else gather)(rng, split, num_articles)
    questions = draw(rng, drawn.questions, num_questions)
    before, joint, after = prompt_parts(rng, drawn.passages)
    texts = [before]
    for question in questions:
        texts += [f"{joint}{question.text}{after}", f" {question.answer}"]
    encoded, *rest = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    branches = []
    for question, asks, answer in zip(questions, rest[::2], rest[1::2], strict=True):
        if len(asks.ids) + len(answer.ids) < LENGTH:
            facts = [_place(*fact, before, encoded.offsets) for fact in question.facts]
            branches.append((asks.ids, [*answer.ids, tokenizer.eos_token_id], KINDS.index(question.kind), facts))
    subjects = _subjects(tokenizer, drawn, before, encoded.offsets)
    return _Row([tokenizer.bos_token_id, *encoded.ids], [-1, *subjects], branches)


def _pointers(rows: Sequence[_Row], width: int) -> tuple[Tensor, Tensor]:
    """Return attention targets: the fact for a question's last tokens, the copied tokens for an answer's.

    Returns:
        `Batch.pointers` and `Batch.places`.
    """
    pointers: list[tuple[int, int, int, int]] = []
    places: list[list[int]] = []
    for number, row in enumerate(rows):
        for branch, (asks, answer, _, facts) in enumerate(row.branches):
            end = branch * LENGTH + len(asks)
            for depth, fact in enumerate((facts[0], facts[-1])):
                pointers += [(number, end - back, depth, 0) for back in (1, 2, 3)]
                places += [fact] * 3
            for num in range(2, len(answer)):
                pointers.append((number, end + num - 2, 1, 1))
                places.append(_copied(row.context, answer[:num]))
    targets = torch.zeros(len(places), width, dtype=torch.bool)
    for index, place in enumerate(places):
        targets[index, place] = True
    return torch.tensor(pointers).T, targets


def _copied(context: list[int], tokens: list[int]) -> list[int]:
    """Return the positions of the last token after the others."""
    first, num = tokens[0], len(tokens)
    return [
        at + num - 1
        for at in range(len(context) - num + 1)
        if context[at] == first and context[at : at + num] == tokens
    ]


def _place(value: str, sentence: str, text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Return the context tokens of the value in the sentence."""
    start = text.index(sentence) + sentence.rindex(value)
    return [number + 1 for number, (low, high) in enumerate(offsets) if high > start and low < start + len(value)]


def _subjects(
    tokenizer: PreTrainedTokenizerFast, drawn: Sample, text: str, offsets: list[tuple[int, int]]
) -> list[int]:
    """Return, per token, the first token of the name that its passage is about; -1 before the name is known."""
    labels, at, token = [-1] * len(offsets), 0, 0
    for passage, name in zip(drawn.passages, drawn.subjects, strict=True):
        start = text.index(passage, at)
        at = start + len(passage)
        if name:
            start += 0 if name in text[:start] else passage.index(name)
            first = tokenizer.backend_tokenizer.encode(f" {name}", add_special_tokens=False).ids[0]
            while offsets[token][1] <= start:
                token += 1
            while token < len(offsets) and offsets[token][1] <= at:
                labels[token] = first
                token += 1
    for sentence, name in drawn.defined:
        start = text.index(sentence)
        known, stop = start + sentence.index(name), start + len(sentence)
        first = tokenizer.backend_tokenizer.encode(f" {name}", add_special_tokens=False).ids[0]
        for token, (low, high) in enumerate(offsets):
            if high > known and low < stop:
                labels[token] = first
    return labels


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
