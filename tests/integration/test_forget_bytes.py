"""After a document is forgotten, none of its text is in a file of the store or in this process's records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blending import CHUNKS, messages
from processes import COMMON, Process, expect, start, tell

from kvrag import BlendConfig, BlendEngine, FileStore, Model
from kvrag.errors import PromptError
from kvrag.inspect.explanation import Explanation
from kvrag.request import Request
from kvrag.retrieval.index import ChunkIndex
from kvrag.store.manifest import Manifest, ManifestRow

SECRET = (
    "Ora Vint hid the seventh amber key below the old mill in Stelburg. Nobody but Kan Dror has ever seen it there."
)
SHORT = "The code is 4711."
OTHER = "Nobody likes curry. " * 8

WRITER = (
    COMMON
    + f"""
import kvrag, os, records
engine = kvrag.BlendEngine(here.fresh_model(), kvrag.FileStore({{folder!r}}, min_free_bytes=0))
fsync, add, places = os.fsync, engine.store._manifest.add, ["PLACE"]
def wait(place):
    if place in places:
        places.remove(place)
        print("waiting", flush=True)
        sys.stdin.readline()
def waiting(descriptor):
    wait(sys._getframe(1).f_globals["__name__"])
    fsync(descriptor)
def added(rows):
    wait("row")
    return add(rows)
os.fsync, engine.store._manifest.add = waiting, added
engine.warm([{SECRET!r}], document="secret")
"""
)


@pytest.fixture
def engine(endless: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(endless, FileStore(tmp_path, min_free_bytes=0), BlendConfig(controller="off")) as engine:
        engine.warm([OTHER], document="kept")
        yield engine


@pytest.fixture(params=["kvrag.store.files", "row"])
def writer(request: pytest.FixtureRequest, engine: BlendEngine, tmp_path: Path) -> Iterator[Process]:
    """A process that has stopped before the chunk's file or the chunk's row is complete."""
    process = start(WRITER.replace("PLACE", request.param), tmp_path)
    try:
        expect(process, "waiting")
        yield process
    finally:
        process.kill()
        process.wait()


def containing(engine: BlendEngine, text: str) -> list[str]:
    """Return the files of the store that contain a text or its token ids."""
    ids = np.asarray(engine.model.tokenizer.encode(text))[1:-1][:12]
    forms = [text.encode(), *(ids.astype(kind).tobytes() for kind in ("<u4", "<i8"))]
    files = sorted(path for path in Path(engine.store.path).rglob("*") if path.is_file())
    return [path.name for path in files if any(form in path.read_bytes() for form in forms)]


def shown(explanation: Explanation) -> str:
    return "".join(stretch.text for stretch in explanation.stretches)


def collect(engine: BlendEngine) -> None:
    engine.store.gc()  # type: ignore[attr-defined]


def test_what_a_killed_writer_leaves_is_deleted(writer: Process, engine: BlendEngine) -> None:
    assert containing(engine, SECRET)
    writer.kill()
    writer.wait()
    engine.forget("secret")
    assert not [name for name in containing(engine, SECRET) if name.endswith(".tmp")], "forgetting is enough"
    collect(engine)
    assert not containing(engine, SECRET)


def test_what_a_live_writer_has_not_completed_stays(writer: Process, engine: BlendEngine) -> None:
    before = containing(engine, SECRET)
    assert before
    for path in Path(engine.store.path).rglob(".*.tmp"):
        os.utime(path, (0, 0))  # it may have waited for hours
    engine.forget("kept")
    collect(engine)
    with BlendEngine(engine.model, FileStore(engine.store.path, min_free_bytes=0)):
        assert containing(engine, SECRET) == before
    tell(writer, "")
    writer.wait()
    assert engine.documents() == ["secret"]
    assert engine.store.check().sound == 1  # type: ignore[attr-defined]


def test_damaged_files_are_deleted(engine: BlendEngine) -> None:
    engine.warm([SECRET], document="secret")
    (key,) = engine.store.documents("secret")["secret"]
    engine.store.discard(key)
    collect(engine)
    assert not containing(engine, SECRET)


def test_rows_that_sqlite_has_moved_are_overwritten(tmp_path: Path) -> None:
    """It leaves copies of rows when it moves them to other pages: here, of one."""
    rng, manifest = np.random.default_rng(0), Manifest(tmp_path / "manifest.sqlite")
    keys = [f"{number:032x}" for number in range(600)]
    texts = [rng.integers(1 << 20, 1 << 30, int(rng.choice([4, 50, 180, 380])), np.uint32).tobytes() for _ in keys]
    manifest.add([ManifestRow(key, key, "", text, 0, key, 9) for key, text in zip(keys, texts, strict=True)])
    order = rng.permutation(600).tolist()
    for number in order[100:]:
        manifest.remove([keys[number]])
    manifest.purge()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert [number for number in range(600) if texts[number][:16] in content] == sorted(order[:100])
    manifest.close()


def test_a_removed_document_is_not_in_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkIndex, "embed", lambda self, texts: np.ones((len(texts), 3), np.float32))
    with ChunkIndex(tmp_path / "index.sqlite") as index:
        assert index._read("PRAGMA secure_delete") == [(1,)], "whatever SQLite's default"
        index.add([OTHER], "kept")
        index.add([SECRET], "secret")
        index.remove("secret")
        assert SECRET.encode() not in (tmp_path / "index.sqlite").read_bytes()


# ---------------------------------------------------------------- in memory


@pytest.mark.parametrize("text", [SECRET, SHORT])
@pytest.mark.parametrize("order", ["warmed first", "asked first"])
@pytest.mark.parametrize("where", ["here", "in another engine"])
def test_explanations_and_conversations_end_with_a_text(text: str, order: str, where: str, engine: BlendEngine) -> None:
    prompt = messages(OTHER, f"Note: {text}")
    with BlendEngine(engine.model, FileStore(engine.store.path, min_free_bytes=0)) as other:
        if order == "warmed first":
            engine.warm([text], document="secret")
        kept = engine.generate(messages(OTHER, question="Is it?"), max_new_tokens=2).report
        said = engine.generate(prompt, ratio=0.3, max_new_tokens=2)
        if order == "asked first":
            engine.warm([text], document="secret")
            engine._lookup.refresh()
        assert text in shown(engine.explain())
        assert engine.documents() == ["kept", "secret"]
        if where == "here":
            assert engine.forget("secret") == 1
        else:
            assert other.forget("secret") == 1
            engine.generate("Something else.", policy="full", max_new_tokens=1)
        with pytest.raises(PromptError, match="or a text in it was deleted"):
            engine.explain(said.report)
        assert text not in shown(engine.explain())
        assert engine.explain(kept)
    following = [*prompt, {"role": "assistant", "content": said.text}, {"role": "user", "content": "Why?"}]
    tokenizer = engine.model.tokenizer
    ids = tokenizer.render(following)
    before = len(tokenizer.render(messages(OTHER, f"Note: {text}"))) - len(tokenizer.encode(text))
    assert engine.generate(following, max_new_tokens=1).report.conversation_tokens < before < len(ids)


def test_an_answer_in_progress_leaves_no_explanation(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.warm([SECRET], document="secret")
    add = engine._answering.recent.prefilled

    def late(answered: Request, prompt: Any) -> None:
        engine.forget("secret")
        add(answered, prompt)

    monkeypatch.setattr(engine._answering.recent, "prefilled", late)
    engine.generate(messages(OTHER, SECRET), ratio=0.3, max_new_tokens=2)
    with pytest.raises(PromptError, match="no such answer among the last 32"):
        engine.explain()


def test_a_learned_copy_of_a_short_text_is_deleted(endless: Model, tmp_path: Path) -> None:
    page = " ".join([*CHUNKS, SHORT])
    with BlendEngine(endless, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=0, learn=True) as engine:
        engine.warm([SHORT], document="secret")
        for number in range(2):
            engine.generate(messages(page, question=f"{number}?"), max_new_tokens=1)
            engine.wait_until_idle()
        assert engine.store.stats().chunks == 2
        assert engine.forget("secret") == 1
        assert engine.store.stats().chunks == 0


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_shortest_text_can_be_stored_and_forgotten(codec: str, endless: Model, tmp_path: Path) -> None:
    with BlendEngine(endless, FileStore(tmp_path, min_free_bytes=0), codec=codec) as engine:
        report = engine.warm(["a", ""], document="tiny")
        assert (report.new, report.skipped, report.tokens) == (0, 2, 0)
        assert engine.store.check().sound == 1  # type: ignore[attr-defined]
        assert engine.forget("tiny") == 1
