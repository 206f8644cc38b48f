"""Prompts made of documents: sentences, retrieved chunks, and unsuitable documents."""

from __future__ import annotations

import pytest

from kvrag import ContextWindowError, KvragError, Model
from kvrag.control.prompts import CLOZE, CONTINUATION, find_gaps, make_prompts, render, search_by_words

CHUNKS = [
    "The harbour of Selmunde was built by the engineer Tarvik in those years. It is still used by small boats today.",
    "After the war the bridge over the river was also designed by Tarvik and his brother. It carries two tracks.",
    "Most of the fish that is sold on the market comes from the cold lakes in the north. Prices rise every winter.",
    "The old railway station has a roof of glass and a clock that is always late. It was painted green last year.",
]


def test_a_cloze_asks_for_a_rare_word_that_another_chunk_has(model: Model) -> None:
    prompts = make_prompts(model, CHUNKS, search_by_words(CHUNKS), 100, top_k=3)
    clozes = [made for made in prompts if made.kind == CLOZE]
    assert "Tarvik" in {made.word for made in clozes}
    for made in clozes:
        own = [chunk for chunk in CHUNKS if made.sentence in chunk]
        assert made.word not in made.beginning.split()
        assert any(made.word in chunk for chunk in CHUNKS if chunk not in own)
        assert not set(own) & set(made.chunks), "the word must come from another chunk"


def test_a_continuation_may_be_in_its_own_chunk(model: Model) -> None:
    prompts = [
        made for made in make_prompts(model, CHUNKS, search_by_words(CHUNKS), 100, top_k=2) if made.kind == CONTINUATION
    ]
    assert len(prompts) == 6, "two sentences are too short"
    for made in prompts:
        assert made.sentence.startswith(made.beginning)
        rest = made.sentence[len(made.beginning) :].strip()
        assert rest.startswith(made.word)
        text = model.tokenizer.decode(made.ids)
        assert text.endswith(made.beginning)
        assert all(chunk in text for chunk in made.chunks)


def test_the_seed_decides_and_more_prompts_append(model: Model) -> None:
    search = search_by_words(CHUNKS)
    prompts = make_prompts(model, CHUNKS, search, 6, seed=1)
    assert prompts == make_prompts(model, CHUNKS, search, 6, seed=1)
    assert prompts[:3] == make_prompts(model, CHUNKS, search, 3, seed=1)
    assert prompts != make_prompts(model, CHUNKS, search, 6, seed=2)
    orders = {tuple(CHUNKS.index(chunk) for chunk in made.chunks) for made in prompts}
    assert any(list(order) != sorted(order) for order in orders), "the retrieved chunks are shuffled"
    assert [gap.kind for gap in find_gaps(CHUNKS, 1)[:4]] == [CLOZE, CONTINUATION] * 2


def test_no_prompts_are_made_of_tables_code_and_repeated_text() -> None:
    chunks = ["| a | b | c | d | e | f | g | h |", "x = f(a, b)[c] + {d: e} // g ** (h - 1)", CHUNKS[0], CHUNKS[0]]
    sentences = [gap.sentence for gap in find_gaps(chunks, 0)]
    assert sentences
    assert all(sentence in CHUNKS[0] for sentence in sentences)
    assert len([gap for gap in find_gaps(chunks, 0) if gap.kind == CONTINUATION]) == 2


def test_scripts_without_spaces_are_continued() -> None:
    gaps = find_gaps(["\u6771\u4eac\u306f\u5927\u304d\u306a\u90fd\u5e02\u3067\u3059\u3002"], 0)
    assert [(gap.beginning, gap.word) for gap in gaps] == [("\u6771\u4eac\u306f\u5927\u304d\u306a", "\u90fd")]


def test_a_model_without_a_chat_template_continues_the_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = model.tokenizer.decode(render(model.tokenizer, CHUNKS[:2], "The harbour"))
    monkeypatch.setattr(model.tokenizer.hf, "chat_template", None)
    plain = model.tokenizer.decode(render(model.tokenizer, CHUNKS[:2], "The harbour"))
    assert plain == "\n\n".join([*CHUNKS[:2], "The harbour"])
    assert chat != plain


@pytest.mark.parametrize(
    ("chunks", "error", "message"),
    [
        (["one two", "three"], KvragError, "none of 2 chunks has a complete sentence"),
        ([chunk * 100 for chunk in CHUNKS], ContextWindowError, "use fewer or shorter chunks"),
    ],
)
def test_impossible_prompts_are_reported(
    chunks: list[str], error: type[KvragError], message: str, model: Model
) -> None:
    with pytest.raises(error) as caught:
        make_prompts(model, chunks, search_by_words(chunks), 3)
    assert message in str(caught.value)
