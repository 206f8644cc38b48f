"""The explanation of a prompt matches its computation."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS, QUESTION, messages, prepare
from bs4 import BeautifulSoup

from kvrag import BlendEngine, Explanation, Model, PromptError
from kvrag.cli.main import main
from kvrag.inspect.explain import _texts
from kvrag.inspect.explanation import summary_of
from kvrag.types import BlendReport, Completed

TEXT = (
    'The museum\'s "quiet room" opens at ten & closes at <six>; children & dogs pay <nothing>.\n'
    'Its keeper, Orla Finch, says: "Don\'t touch the glass."\n\n'
    "- The harp in the hall was built in Stelburg.\n- The clock above it runs 4 minutes fast.\n"
    "- The bridge is closed.\n- The goats may be fed.\n- Dogs stay outside.\n\n"
    'On Mondays the hall stays shut, for "the dust must settle", as her father used to say when he kept the keys.'
)
OTHER = (
    "Grelville lies on two rivers that meet below the castle. The older bridge was built of wood and burned twice. "
    "The newer one carries the road to Florton, along which the salt was brought until the railway came to the valley."
)


def told(engine: BlendEngine, *chunks: str, **settings: Any) -> Explanation:
    return engine.explain(messages(*chunks), **settings)


def answered(engine: BlendEngine, *chunks: str, **settings: Any) -> Any:
    return engine.generate(messages(*chunks), max_new_tokens=1, **settings)


# -------------------------------------------------------------------- the prompt


def test_a_chunk_without_a_document_is_named_by_its_key(engine: BlendEngine) -> None:
    engine.warm(CHUNKS[:1])
    stretch = next(stretch for stretch in told(engine, CHUNKS[0]).stretches if stretch.kind == "stored")
    assert stretch.source.startswith(f"chunk {stretch.key[:8]} from token ")


@pytest.mark.parametrize(("policy", "ratio"), [("query", 0.2), ("first_k", 0.3), ("none", None), ("full", None)])
def test_every_token_is_explained_by_how_it_was_computed(engine: BlendEngine, policy: str, ratio: float | None) -> None:
    engine.warm(CHUNKS[:2], document="a.txt")
    engine.warm(CHUNKS[1:3], document="b.txt")
    ids = engine.model.tokenizer.render(messages(*CHUNKS))
    explanation = told(engine, *CHUNKS, policy=policy, ratio=ratio)
    done = prepare(engine, ids, ratio, policy)
    stretches = explanation.stretches
    assert [stretch.start for stretch in stretches] == [0, *(stretch.stop for stretch in stretches[:-1])]
    assert stretches[-1].stop == len(ids)
    assert "".join(stretch.text for stretch in stretches) == engine.model.tokenizer.decode(ids, control_tokens=True)
    reused = [stretch for stretch in stretches if stretch.kind == "stored"]
    positions = {position for stretch in reused for position in range(stretch.start, stretch.stop)}
    assert positions == set(done.reused.nonzero().flatten().tolist())
    assert sum(stretch.recomputed for stretch in stretches) == done.report.recomputed_tokens
    assert (len(reused) >= 3) == (policy != "full")
    for stretch in reused:
        again = "".join(text for text, recomputed in stretch.pieces if recomputed)
        chosen = [position for position in done.selected.tolist() if stretch.start <= position < stretch.stop]
        assert again == "".join(engine.model.tokenizer.decode([ids[position]]) for position in chosen)
        number = next(number for number, chunk in enumerate(CHUNKS) if stretch.text.strip() in chunk)
        assert stretch.documents == (("a.txt",), ("a.txt", "b.txt"), ("b.txt",))[number]


def test_a_character_of_several_tokens_stays_whole(model: Model) -> None:
    text = "Ab 東京 — 🎻🎻 ü."
    ids = model.tokenizer.encode(text)
    assert len(ids) > len(text)
    pieces = list(_texts(model.tokenizer, ids, list(range(len(ids) + 1))))
    assert "".join(pieces) == text
    assert set("".join(pieces)) == {character for piece in pieces for character in piece}
    assert "🎻" in pieces
    assert "\ufffd" not in "".join(pieces)


def test_the_last_answer_is_explained_without_computing_it_again(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.warm(CHUNKS)
    with pytest.raises(PromptError, match="no such answer"):
        engine.explain()
    report = answered(engine, *CHUNKS[:2], policy="first_k", ratio=0.25).report
    monkeypatch.setattr(engine.model, "forward", None)
    explanation = engine.explain()
    assert explanation.report == report
    assert report.recomputed_tokens == sum(stretch.recomputed for stretch in explanation.stretches) > 0
    assert {chunk.reason for chunk in explanation.chunks} == {"stored"}
    assert {chunk.text for chunk in explanation.chunks} == set(CHUNKS[:2])


def test_another_namespaces_answers_are_not_explained(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    mine = answered(engine, CHUNKS[0]).report
    with pytest.raises(PromptError, match="no such answer"):
        engine.explain(namespace="bob")
    theirs = answered(engine, CHUNKS[1], namespace="bob").report
    assert engine.explain().report == engine.explain(mine).report == mine
    assert engine.explain(namespace="bob").report == theirs
    for report in (mine, mine.to_dict()):
        with pytest.raises(PromptError, match="no such answer among the last 32"):
            engine.explain(report, namespace="bob")


def test_another_namespaces_chunks_are_not_named(engine: BlendEngine) -> None:
    engine.warm([OTHER], document="secret.txt")
    explanation = told(engine, OTHER, namespace="bob")
    assert {chunk.reason for chunk in explanation.chunks} == {"never warmed"}
    assert "secret.txt" not in explanation.html()


def test_an_abandoned_stream_is_explained_too(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    deltas = engine.stream(messages(CHUNKS[3]), max_new_tokens=5, ratio=0.1)
    next(deltas)
    deltas.close()
    assert CHUNKS[3] in "".join(stretch.text for stretch in engine.explain().stretches)


def test_an_answer_is_explained_by_its_report_after_other_answers(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    first, second = (answered(engine, chunk).report for chunk in CHUNKS[:2])
    as_json = json.loads(json.dumps(first.to_dict()))
    for given, chunk, report in ((first, CHUNKS[0], first), (second, CHUNKS[1], second), (as_json, CHUNKS[0], first)):
        explanation = engine.explain(given)
        assert chunk in "".join(stretch.text for stretch in explanation.stretches)
        assert explanation.report == report
    with pytest.raises(PromptError, match="no such answer among the last 32"):
        engine.explain(dataclasses.replace(first, ttft_s=-1.0))
    for _ in range(32):
        answered(engine, CHUNKS[2])
    with pytest.raises(PromptError, match="no such answer among the last 32"):
        engine.explain(first)


@pytest.mark.parametrize(
    "name", ["langchain_kvrag:ChatBlend", "langchain_kvrag:BlendLLM", "llama_index.llms.kvrag:BlendLLM"]
)
def test_the_framework_classes_explain_their_last_call_or_a_prompt(name: str, engine: BlendEngine) -> None:
    module, _, class_name = name.partition(":")
    llm = getattr(pytest.importorskip(module), class_name)(engine=engine, max_tokens=1, ratio=0.2, policy="first_k")
    llm.warm(CHUNKS, document="people.txt")
    prompt = "\n\n".join([*CHUNKS[1:3], QUESTION])
    said = llm.complete(prompt) if module.startswith("llama") else llm.invoke(prompt)
    last, again = llm.explain(), llm.explain(prompt)
    if not isinstance(said, str):
        llm.invoke(QUESTION) if module.startswith("langchain") else llm.complete(QUESTION)
        report = said.response_metadata["kvrag"] if module.startswith("langchain") else said.raw["kvrag"]
        assert llm.explain(report) == last
        llm.invoke(prompt) if module.startswith("langchain") else llm.complete(prompt)
    assert last.report.ttft_s > 0
    assert last.stretches == again.stretches
    assert sum(stretch.recomputed for stretch in last.stretches) > 0
    (told,) = [chunk for chunk in last.chunks if chunk.text == CHUNKS[1]]
    assert (told.reason, told.documents) == ("stored", ("people.txt",))


# -------------------------------------------------------------------- chunks

WAYS: dict[str, Callable[[str], str]] = {
    "html": html.escape,
    "xml": lambda text: html.escape(text, quote=False),
    "json": json.dumps,
    "list": lambda text: str([text, "..."]),
    "one line": lambda text: " ".join(text.split()),
    "cut": lambda text: text[: len(text) // 2],
    "second half": lambda text: text[len(text) // 2 :],
    "edited": lambda text: text.replace("Orla Finch", "Mr Ben Dror, who is new").replace("built", "strung"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_chunk_is_recognised(engine: BlendEngine, way: str) -> None:
    engine.warm([TEXT, OTHER], document="museum.txt")
    changed = WAYS[way](TEXT)
    explanation = told(engine, OTHER, changed)
    assert [chunk.text for chunk in explanation.chunks if chunk.reason == "stored"] == [OTHER]
    (found,) = [chunk for chunk in explanation.chunks if chunk.reason != "stored"]
    assert (found.text, found.reason) == (TEXT, "changed")
    in_prompt = int(found.detail.split(" of its tokens are in the prompt")[0].split()[-1])
    assert found.reused <= in_prompt < found.tokens
    assert found.documents == ("museum.txt",)
    assert 0 <= found.reused < found.tokens - 4


def test_a_chunk_that_a_prompt_contains_twice_is_not_counted_twice(engine: BlendEngine) -> None:
    engine.warm([OTHER])
    explanation = told(engine, OTHER, OTHER[OTHER.index("The newer") :])
    (found,) = explanation.chunks
    assert sum(stretch.kind == "stored" for stretch in explanation.stretches) == 2
    assert found.tokens - 4 <= found.reused <= found.tokens


def test_a_changed_chunk_has_too_few_tokens_in_a_row_to_be_reused(engine: BlendEngine) -> None:
    text = " The harp in the hall was built in Stelburg by the elder Vorlan"
    ids = engine.model.tokenizer.encode(text)[:16]
    text = engine.model.tokenizer.decode(ids)
    assert engine.model.tokenizer.encode(text) == ids
    engine.warm([text])
    prompt = engine.model.tokenizer.encode(f"Read:{text}s. Go.")  # the chunk's last token merges with the "s"
    explanation = engine.explain(prompt)
    assert explanation.report.reused_tokens == 0
    (finding,) = explanation.chunks
    assert finding.reason == "changed"
    assert "15 of its tokens are in the prompt, at most 15 in a row, and 16 are needed" in finding.detail


@pytest.mark.parametrize("write", [repr, json.dumps, lambda text: str([{"page_content": text}]), str])
def test_a_chunk_that_the_prompt_has_escaped_is_said_to_be(engine: BlendEngine, write: Callable[[str], str]) -> None:
    text = "\n".join([f'The museum\'s "{room}" room has {number} old clocks.' for number, room in enumerate("abcdef")])
    engine.warm([text])
    (finding, *_) = engine.explain(f"Read this: {write(text)} Who?").chunks
    is_escaped = write is not str
    assert (finding.reason == "changed") == is_escaped
    assert ("the prompt has it escaped, as str() or JSON writes it" in finding.detail) == is_escaped


def test_a_chunk_of_which_every_character_is_escaped_is_not_called_unknown(engine: BlendEngine) -> None:
    text = "ミラ・ブレルはフロートンで生まれ、グレルヴィルに住んでいます。😀 赤い車を運転し、毎日ハープを弾きます。"
    engine.warm([text])
    (finding,) = engine.explain(f"Read this: {json.dumps(text)} Who?").chunks
    assert "the prompt has it escaped" in finding.detail


def test_a_text_with_a_few_tokens_in_the_prompt_is_not_called_absent(engine: BlendEngine) -> None:
    ids = engine.model.tokenizer.encode(OTHER)
    engine.warm([OTHER])
    for num in (12, 17):
        prompt = [5, 6, 7, *ids[20 : 20 + num], 8, 9]
        explanation = engine.explain(prompt)
        assert [chunk.reason for chunk in explanation.chunks] == ["changed"] * (num > 16)
        if num < 16:
            assert "at most 12 of its tokens in a row are in a warmed chunk" in explanation.summary[-1]
        else:
            assert explanation.chunks[0].reused == explanation.report.reused_tokens
            assert f"{num} of its tokens are in the prompt" in explanation.chunks[0].detail


def test_a_prompt_in_which_no_chunk_is_recognised_is_explained_in_the_summary(engine: BlendEngine) -> None:
    engine.warm([OTHER])
    explanation = engine.explain("Where is the harp?")
    assert explanation.chunks == ()
    assert any("it contains no warmed chunk" in line for line in explanation.summary)


def test_text_that_was_never_warmed_is_reported_automatically(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    (known, strange) = sorted(told(engine, CHUNKS[0], TEXT).chunks, key=lambda chunk: chunk.text != CHUNKS[0])
    assert (known.text, known.reason) == (CHUNKS[0], "stored")
    assert (strange.reason, strange.reused, strange.key) == ("never warmed", 0, "")
    assert TEXT in strange.text


def test_nobody_is_advised_to_warm_a_system_message(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    system = {"role": "system", "content": OTHER}
    (finding,) = [one for one in engine.explain([system, *messages(CHUNKS[0])]).chunks if one.reason != "stored"]
    assert OTHER in finding.text
    assert finding.detail.startswith("the beginning of the prompt: KV of a system message and tools is kept")


def test_full_prefill_and_chunks_that_came_later_are_distinguished(engine: BlendEngine) -> None:
    engine.warm([OTHER], document="grelville.txt")
    explanation = told(engine, OTHER, policy="full")
    assert any(line.startswith("full prefill was used") for line in explanation.summary)
    (finding,) = explanation.chunks
    assert (finding.reason, finding.documents) == ("never warmed", ("grelville.txt",))
    assert "it is stored, but full prefill" in finding.detail
    answered(engine, OTHER, TEXT)
    engine.warm([TEXT])
    later, other = engine.explain().chunks
    assert (later.text, later.reason, other.text, other.reason) == (TEXT, "never warmed", OTHER, "stored")
    assert "warmed after this prompt" in later.detail


# -------------------------------------------------------------------- how it looks


def test_the_page_is_complete_and_shows_the_prompt_without_running_it(engine: BlendEngine) -> None:
    evil = "<script>alert('1')</script> & <mark>no</mark> </pre></span> " + OTHER
    engine.warm([evil], document='"><img src=x onerror=alert(1)>')
    explanation = told(engine, TEXT, evil, ratio=0.3, policy="random")
    page = explanation.html()
    assert page.startswith("<!doctype html>")
    soup = BeautifulSoup(page, "html.parser")
    pre = soup.find("pre")
    assert pre is not None
    assert pre.get_text() == "".join(stretch.text for stretch in explanation.stretches)
    again = "".join(text for stretch in explanation.stretches for text, recomputed in stretch.pieces if recomputed)
    assert "".join(mark.get_text() for mark in pre.find_all("mark")) == again != ""
    assert not soup.find_all(["script", "img", "link"])
    assert explanation._repr_html_() in page


def test_a_prefill_made_for_the_explanation_says_what_an_answer_may_add(engine: BlendEngine) -> None:
    engine.warm([OTHER])
    doubtful: dict[str, Any] = {"margin": 1e8, "controller": "off"}
    assert "this was the prefill alone" in str(told(engine, "Hello.", OTHER, **doubtful))
    assert "this was the prefill alone" not in str(told(engine, "Hello.", OTHER, ratio=0.2))
    answered(engine, "Hello.", OTHER, **doubtful)
    assert "this was the prefill alone" not in str(engine.explain())


def test_doubts_are_counted_by_the_tokens_before_them() -> None:
    steps: dict[str, Any] = {"deepened": Completed(1, 20, 0.1), "completed": Completed(3, 90, 0.25)}
    said = "\n".join(summary_of(dataclasses.replace(BlendReport.unblended(100, 0), **steps)))
    assert "(at first policy" in said
    assert "the model was unsure after 1 token: 20 tokens computed in 100 ms, one more share" in said
    assert "the model was unsure after 3 tokens: 90 tokens computed in 250 ms, and it went on" in said


def test_the_text_and_the_json_have_the_same_content(engine: BlendEngine) -> None:
    engine.warm([OTHER], document="grelville.txt")
    explanation = told(engine, OTHER, TEXT, ratio=0.2)
    report = explanation.report
    said, plain = str(explanation), json.loads(json.dumps(explanation.to_dict()))
    assert f"{report.prompt_tokens} prompt tokens: {report.reused_tokens} reused" in said
    assert "grelville.txt" in said
    assert "never warmed" in said
    assert plain["report"]["reused_tokens"] == report.reused_tokens
    assert [part["kind"] for part in plain["stretches"]] == [part.kind for part in explanation.stretches]
    assert {chunk["reason"] for chunk in plain["chunks"]} == {"stored", "never warmed"}
    pieces = [piece for part in plain["stretches"] for piece in part["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == "".join(part.text for part in explanation.stretches)


def test_an_empty_store_is_reported_first(engine: BlendEngine) -> None:
    assert any("is empty" in line for line in told(engine, OTHER).summary)


# -------------------------------------------------------------------- the one warning


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings of the engine since the last call."""
    caplog.set_level(logging.WARNING, "kvrag")

    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "of a prompt are stored" in record.getMessage()]
        caplog.clear()
        return found

    return said


LONG = [f"{number}. {OTHER[number:]}" for number in range(8)]


def test_two_prompts_in_a_row_without_warmed_text_cause_a_warning(
    engine: BlendEngine, warnings: Callable[[], list[str]]
) -> None:
    engine.warm(CHUNKS)
    engine._answering.close()  # the same prompt again begins like an earlier one
    answered(engine, *LONG)
    answered(engine, *CHUNKS, *CHUNKS, *CHUNKS, *CHUNKS)  # reuse works: the earlier prompt had no retrieved text
    answered(engine, *LONG)
    assert warnings() == []
    answered(engine, *LONG)
    (warning,) = warnings()
    assert warning.startswith("only 0 of ")
    assert "explain()" in warning
    assert "`kvrag explain PROMPT`" in warning
    answered(engine, *LONG)
    assert warnings() == []


def test_the_warning_counts_the_chunk_that_was_reused(engine: BlendEngine, warnings: Callable[[], list[str]]) -> None:
    engine.warm(CHUNKS)
    engine._answering.close()
    prompt = [*LONG[:4], CHUNKS[0], *LONG[4:]]
    for _ in range(2):
        report = answered(engine, *prompt).report
        stored = report.stored_tokens
        assert 0 < stored < 0.1 * report.prompt_tokens
    (warning,) = warnings()
    assert f"only {stored} of {report.prompt_tokens} tokens" in warning


def test_an_empty_store_causes_a_warning(engine: BlendEngine, warnings: Callable[[], list[str]]) -> None:
    engine._answering.close()
    for _ in range(2):
        answered(engine, *LONG)
    assert len(warnings()) == 1
    assert any(f"{engine.store.stats().path} is empty" in line for line in engine.explain().summary)


def test_no_warning_for_intended_settings(engine: BlendEngine, warnings: Callable[[], list[str]]) -> None:
    engine.warm([OTHER, *CHUNKS])
    for _ in range(3):
        answered(engine, TEXT)  # short
        answered(engine, *LONG, policy="full")
        answered(engine, *CHUNKS, *CHUNKS, *CHUNKS, *CHUNKS)
    assert warnings() == []


# -------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def reader() -> Model:
    """Stays loaded."""
    return Model.from_pretrained("reader")


@pytest.fixture(scope="module")
def store(reader: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OTHER and CHUNKS, warmed for the reader."""
    path = tmp_path_factory.mktemp("warmed") / "kv"
    with BlendEngine(reader, path) as engine:
        engine.warm([OTHER], document="grelville.txt")
        engine.warm(CHUNKS, document="people.txt")
    return path


@pytest.fixture
def explained(store: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run `kvrag explain --json`; return its result."""

    def call(*argv: object) -> Any:
        assert main(["explain", *map(str, argv), "--store", str(store), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_a_prompt_may_be_a_text_a_file_messages_a_request_or_stdin(
    explained: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{OTHER}\n\n{QUESTION}"
    spoken = [{"role": "user", "content": text}]
    plain = f"{text}\n\nAnswer:"  # rendered by the reader's template, without the BOS
    forms = {"a.txt": text, "b.json": json.dumps(spoken), "c.json": json.dumps({"messages": spoken, "model": "x"})}
    forms["d.json"] = json.dumps({"prompt": plain, "max_tokens": 1})
    results = [explained(text)]
    for name, content in forms.items():
        (tmp_path / name).write_text(content)
        results.append(explained(tmp_path / name))
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    results.append(explained("-"))
    for result in results:
        assert [chunk["reason"] for chunk in result["chunks"]] == ["stored"]
        assert result["chunks"][0]["documents"] == ["grelville.txt"]
        assert result["stretches"] == results[0]["stretches"]


def test_the_settings_are_used(explained: Callable[..., Any]) -> None:
    result = explained(f"Hello.\n\n{OTHER}\n\nWho?", "--ratio", 0.5, "--policy", "hkvd")
    assert result["report"]["policy"] == "hkvd"
    assert result["report"]["recomputed_tokens"] == pytest.approx(result["report"]["reused_tokens"], abs=1)


def test_text_and_a_page(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "why.html"
    command = ["explain", f"{OTHER} [bold]{TEXT}", "--store", str(store), "--html", str(page), "--ratio", "0.3"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "prompt tokens:" in said.out
    assert "never warmed" in said.out
    assert str(page) in said.err
    assert "grelville.txt" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["  "], "the prompt is empty"),
        (["[]"], "at least one message"),
        (["nothing.txt"], "nothing.txt does not exist"),
        (["documents.json"], "documents"),
        (["prompts.json"], "one string"),
        (["message.json"], "must be a list"),
        (["binary.txt"], "not UTF-8"),
        (["text", "--html", "no/such/folder/why.html"], "no/such/folder"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    argv: list[str],
    reason: str,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documents.json").write_text('{"messages": [{"role": "user", "content": "Who?"}], "documents": ["A."]}')
    (tmp_path / "message.json").write_text('{"messages": {"role": "user", "content": "Who?"}}')
    (tmp_path / "prompts.json").write_text('{"prompt": ["Who?", "What?"]}')
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert main(["explain", *argv, "--store", str(store)]) == 1
    captured = capsys.readouterr()
    assert reason in captured.err.splitlines()[-1]
    assert captured.err.splitlines()[-1].startswith("kvrag: ")
    assert captured.out == ""
