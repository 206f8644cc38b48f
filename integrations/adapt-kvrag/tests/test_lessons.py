"""Lessons that ask the user's questions, and the part of the loss that is on the prompt's end."""

from __future__ import annotations

import torch
from adapt_kvrag.distill import answer_over, divergences, loss_of, teach, write
from adapt_kvrag.lessons import Lessons

from kvrag import Model
from kvrag.control.prompts import ask, search_by_words


def _documents() -> dict[str, list[str]]:
    return {
        f"{letter}.md": [
            f"In the year {number}, the town of {letter}name{number} sold its old harbour to the company C{number}. "
            f"Since then the ships of {letter}name{number} have landed at the northern pier of the island."
            for number in range(6)
        ]
        for letter in "AB"
    }


def _lessons(model: Model, questions: list[str]) -> Lessons:
    documents = _documents()
    search = search_by_words([chunk for texts in documents.values() for chunk in texts])
    return Lessons(model, documents, search, questions, context_tokens=16, most_tokens=300)


def test_questions_are_asked_about_the_chunks_that_retrieval_finds_for_them(model: Model) -> None:
    questions = [f"Who bought the harbour of Aname{number}?" for number in range(6)]
    lessons, found, answerable = _lessons(model, questions), set(), []
    texts = {question: ask(model.tokenizer, [], question) for question in questions}
    for number in range(30):
        lesson = lessons.draw(number)
        for end in lesson.ends:
            for question, ids in texts.items():
                if end[-len(ids) // 2 :] == ids[-len(ids) // 2 :]:
                    found.add(question)
                    chunks = [model.tokenizer.decode(chunk) for _, chunk in lesson.rows]
                    answerable.append(any(question[-7:-1] in chunk for chunk in chunks))
    assert found == set(questions)
    assert sum(answerable) > len(answerable) / 2


def test_the_loss_covers_the_end_of_the_prompt_with_less_weight(model: Model) -> None:
    lesson = _lessons(model, []).draw(1)
    targets = teach(model, lesson, 2)
    with torch.no_grad():
        written, where = write(model, None, lesson)
        expected = []
        for end, target in zip(lesson.ends, targets, strict=True):
            ids = torch.tensor([*lesson.beginning, *end])
            assert len(target.before) == len(end) - 1
            logits = answer_over(model, ids, target, written, where, where[:0], len(target.before))
            each = divergences(torch.cat([target.before, target.logits]), logits)
            expected.append(each[len(end) - 1 :].mean() + 0.3 * each[: len(end) - 1].mean())
        loss = loss_of(model, None, lesson, targets, None)
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    assert loss > 0
