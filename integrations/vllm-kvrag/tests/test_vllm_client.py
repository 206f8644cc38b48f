"""kvrag's clients on vLLM's OpenAI server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from vllm_engines import checkpoint, prompt_of, reference, serving, text_of

from kvrag import ContextWindowError, RemoteEngine
from kvrag.store import FileStore

CHUNKS = [text_of(number) for number in range(6)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("client") / "store"


@pytest.fixture(scope="module")
def engine(folder: Path, store: Path) -> Iterator[RemoteEngine]:
    with serving(checkpoint("llama", folder), store, store.with_name("log.txt")) as url, RemoteEngine(url) as engine:
        engine.warm(CHUNKS[:4], document="a")
        yield engine


def test_a_document_in_parts_is_stored_as_if_it_were_sent_at_once(
    engine: RemoteEngine, store: Path, folder: Path, tmp_path: Path
) -> None:
    texts = [text_of(100 + number, sentences=12) for number in range(24)]
    report = engine.warm(texts, document="long", namespace="parts")
    assert report.tokens > engine.context_window
    assert report.new == len(texts)
    again = engine.warm([*texts[:20], *texts[21:]], document="long", namespace="parts")
    assert again.new < len(texts) / 2, "the text after the gap has another context"
    assert engine.warm([*texts[:20], *texts[21:]], document="long", namespace="parts").new == 0
    with reference(checkpoint("llama", folder), tmp_path / "store") as local:
        local.warm([*texts[:20], *texts[21:]], document="long", namespace="parts")
        wanted = local.store.documents(namespace="parts")
    with closing(FileStore(store)) as served:
        assert served.documents(namespace="parts") == wanted


def test_an_answer_has_the_report(engine: RemoteEngine) -> None:
    prompt = prompt_of(CHUNKS[2], CHUNKS[0], CHUNKS[3])
    answer = engine.generate(prompt, ratio=0.5, max_new_tokens=6, temperature=0.0)
    assert answer.num_tokens == 6
    report = answer.report
    assert len(report.runs) == 3
    assert report.prompt_tokens == engine.count_tokens(prompt)
    assert report.ratio == 0.5
    assert report.recomputed_tokens == pytest.approx(report.reused_tokens, abs=3)
    assert not report.notes


def test_a_stream_has_the_report_too(engine: RemoteEngine) -> None:
    prompt = prompt_of(CHUNKS[1], CHUNKS[3], CHUNKS[0])
    deltas = list(engine.stream(prompt, ratio=1.0, max_new_tokens=6, temperature=0.0))
    text, report = "".join(delta.text for delta in deltas), deltas[-1].report
    assert report is not None
    assert report.exact
    assert report.recomputed_tokens > report.reused_tokens == 0
    assert text == engine.generate(prompt, policy="full", max_new_tokens=6, temperature=0.0).text
    left = engine.stream(prompt, max_new_tokens=500)
    next(left)
    left.close()  # ends the work on the server
    assert engine.generate(prompt, ratio=1.0, max_new_tokens=6, temperature=0.0).text == text


def test_documents_come_and_go(engine: RemoteEngine) -> None:
    report = engine.warm(CHUNKS[4:], document="b", namespace="other")
    assert (report.chunks, report.new) == (2, 2)
    assert engine.documents() == ["a"]
    assert engine.documents(namespace="other") == ["b"]
    prompt = prompt_of(CHUNKS[5], CHUNKS[4])
    assert not engine.generate(prompt, ratio=0.15, max_new_tokens=1).report.runs
    assert len(engine.generate(prompt, ratio=0.15, max_new_tokens=1, namespace="other").report.runs) == 2
    assert engine.forget("b", namespace="other") == 2
    assert not engine.generate(prompt, ratio=0.15, max_new_tokens=1, namespace="other").report.runs


def test_documents_of_a_prompt_are_encoded_first(engine: RemoteEngine) -> None:
    texts = [text_of(number) for number in (20, 21)]
    report = engine.generate(prompt_of(*texts), documents=texts, ratio=0.15, max_new_tokens=1).report
    assert len(report.runs) == 2


def test_a_prompt_over_the_window(engine: RemoteEngine) -> None:
    with pytest.raises(ContextWindowError, match="2048"):
        engine.generate(" ".join(CHUNKS) * 20)
