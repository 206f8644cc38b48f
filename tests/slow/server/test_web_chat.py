"""The chat page in a real browser: sample documents, a race, a second turn, upload and deletion; without a server."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from families import build
from pdf import pdf
from run_script import start

from kvrag.reader import samples

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'kvrag[dev]'")

BROWSER = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium, as .ci/run does")

KVRAG = Path(sys.executable).with_name("kvrag")
FLAGS = [
    "--no-sandbox",  # CI is root
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
# every text that the newest answer has had
WATCH = """() => {
    window.heard = [];
    new MutationObserver(() => {
        const text = [...document.querySelectorAll('.lane:first-child .answer')].at(-1)?.innerText ?? '';
        if (text && text !== window.heard.at(-1)) window.heard.push(text);
    }).observe(document.body, {childList: true, subtree: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that generates words until the limit, one piece of the stream for each."""
    folder = tmp_path_factory.mktemp("model")
    hf = build("llama", max_position_embeddings=2048)
    words = [re.fullmatch(" ?[a-z]+", tokenizer.decode([number])) is not None for number in range(len(tokenizer))]
    with torch.no_grad():
        others = [number for number in range(hf.vocab_size) if number >= len(words) or not words[number]]
        hf.lm_head.weight[others] = 0  # some word's logit is above
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def running(model_folder: Path, folder: Path, *options: str) -> Iterator[Any]:
    """A process of `kvrag serve --samples`, with its `url`."""
    arguments = ["--model", str(model_folder), "--store", "kv", "--top-k", "5", "--max-tokens", "12", "--json"]
    process = start(KVRAG, "serve", "--samples", "--port", "0", *arguments, *options, folder=folder)
    try:
        while not (said := folder / "stdout").exists() or "\n" not in said.read_text():
            assert process.is_alive(), (folder / "stderr").read_text()
            time.sleep(0.1)
        process.url = json.loads(said.read_text())["url"]
        yield process
    finally:
        process.terminate()
        process.join(60)


@pytest.fixture(scope="module")
def url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server for tests that script its answers."""
    with running(model_folder, tmp_path_factory.mktemp("server"), "--ratio", "0.15") as process:
        yield process.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page, with a storage of its own."""
    with browser.new_context(viewport={"width": 1366, "height": 768}) as context:
        page = context.new_page()
        page.set_default_timeout(120_000)
        yield page


def ask(page: Any, question: str, turn: int) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.locator(".verdict", has_text="; the").nth(turn - 1).wait_for()  # complete


def script(
    page: Any, *deltas: dict[str, str], error: str = "", citations: Sequence[dict[str, Any]] = (), **changes: Any
) -> list[dict[str, Any]]:
    """Answer the page with these pieces of a stream, one per token, and perhaps an error; return its requests.

    `changes` are of the report, except with full prefill.
    """
    asked: list[dict[str, Any]] = []
    report = {"prompt_tokens": 5, "reused_tokens": 2, "recomputed_tokens": 1, "policy": "query", "ratio": 0.5}
    report |= {"notes": [], "completed": None}
    events: list[dict[str, Any]] = [{"choices": [{"delta": {}}], "citations": citations}]
    for delta in deltas:
        logprobs = {"content": [{"token": "".join(delta.values())}]}
        events.append({"choices": [{"delta": delta, "logprobs": logprobs}]})

    def answer(route: Any) -> None:
        sent = route.request.post_data_json
        if "max_tokens" not in sent:  # else the page warms up
            asked.append(sent)
        changed = {"policy": "full"} if sent.get("policy") == "full" else {} if "controller" in sent else changes
        end = {"error": {"message": error}} if error else {"choices": [{"delta": {}}], "kvrag": {**report, **changed}}
        lines = [*map(json.dumps, [*events, end]), "[DONE]"]
        route.fulfill(content_type="text/event-stream", body="".join(f"data: {line}\n\n" for line in lines))

    serve_documents(page, {"id": "a.md"})
    page.route("**/v1/chat/completions", answer)
    return asked


HOSTILE = """<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script>
[a](javascript:window.hacked=1) [b](data:text/html,x) ![c](https://evil.example/?secret)
[d](https://x.example" onclick="y)
| <svg onload=window.hacked=1> |
|---|
"""


def test_an_answer_is_shown_as_text_and_an_error_below_it(page: Any, url: str) -> None:
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    script(page, *({"content": HOSTILE[at : at + 7]} for at in range(0, len(HOSTILE), 7)))
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    assert page.locator(".answer").first.inner_text() == HOSTILE.strip()
    assert page.locator(".answer *").count() == 0
    assert page.evaluate("window.hacked") is None
    assert all(address.startswith((url, "data:")) for address in addresses)
    assert page.locator(".lane .detail").first.inner_text() == (
        "5 prompt tokens: 2 reused (40 %), 1 stored but recomputed"
    )
    page.unroute("**/v1/chat/completions")
    script(page, {"content": "Half"}, error="out of memory")
    page.fill("#question", "Who else?")
    page.press("#question", "Enter")
    page.locator(".lane .problem", has_text="out of memory").wait_for()
    assert page.locator(".answer").last.inner_text() == "Half"  # what has arrived stays
    assert not page.locator(".bar").last.is_visible()  # nothing to compare
    assert page.input_value("#question") == "Who else?"


def test_a_thought_is_folded_and_not_sent_back(page: Any, url: str) -> None:
    """The stream is scripted: the random model does not think."""
    thoughts = [{"reasoning_content": text, "reasoning": text} for text in ("Who else? ", "Yusuf.")]
    asked = script(page, *thoughts, {"content": " Yusuf"}, {"content": " Demir"})
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    lane = page.locator(".lane").first
    assert lane.locator(".answer").inner_text() == "Yusuf Demir"
    assert lane.locator(".thought summary").inner_text() == "Thought"
    assert not lane.locator(".thought p").is_visible()
    lane.locator(".thought summary").click()
    assert lane.locator(".thought p").inner_text() == "Who else? Yusuf."
    ask(page, "Where does he work?", 2)
    assert asked[2]["messages"][1] == {"role": "assistant", "content": "Yusuf Demir"}


def test_an_answer_with_full_prefill_is_raced_against_blending(page: Any, url: str) -> None:
    asked = script(page, {"content": "Yusuf"}, policy="full", decision="full prefill: the context is short")
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    blended = {"policy": "query", "controller": "off", "deterministic": True, "edited_history": "exact"}
    assert "policy" not in asked[0]
    assert blended.items() <= asked[1].items()
    lanes = page.locator(".lane")
    assert lanes.locator(".name").all_inner_texts() == ["kvrag", "Blended"]
    assert lanes.locator(".detail").all_inner_texts() == [
        "5 prompt tokens: all computed; full prefill: the context is short",
        "5 prompt tokens: 2 reused (40 %), 1 stored but recomputed",
    ]
    assert lanes.evaluate_all("lanes => lanes.map((lane) => lane.classList.contains('full'))") == [True, False]
    totals = lanes.locator(".total").all_inner_texts()
    assert [re.fullmatch(r"whole answer (\d+ ms|\d+\.\d\d s)", text) is not None for text in totals] == [True, True]
    one = r"(\d+ ms|\d+\.\d\d s)"
    verdict = f"Blended: first token {one} instead of {one}; whole answer {one} instead of {one}; the same answer"
    assert (found := re.fullmatch(verdict, page.inner_text(".verdict")))
    assert [f"whole answer {found[4]}", f"whole answer {found[3]}"] == totals
    assert [found[2], found[1]] == lanes.locator(".time").all_inner_texts()
    page.uncheck("#race")
    page.fill("#question", "Who else?")
    page.press("#question", "Enter")
    page.locator(".detail", has_text="5 prompt tokens").nth(2).wait_for()
    assert page.locator("#send").inner_text() == "Ask"
    assert lanes.count() == 3


def test_a_doubt_of_the_model_is_named(page: Any, url: str) -> None:
    completed = {"token": 1, "rows": 5, "seconds": 0.1}
    script(page, {"content": "Yusuf"}, completed=completed, reused_tokens=0, recomputed_tokens=3)
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    assert page.locator(".lane .detail").first.inner_text() == (
        "5 prompt tokens: 0 reused (0 %), 3 stored but recomputed; "
        "unsure after 1 token, so the rest was recomputed first"
    )


def test_a_question_that_continues_a_kept_conversation_says_so(page: Any, url: str) -> None:
    script(page, {"content": "Yusuf"}, conversation_tokens=4, reused_tokens=4, recomputed_tokens=0)
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    assert "4 kept from the conversation" in page.locator(".lane .detail").first.inner_text()
    assert "; most of the prompt was kept from the conversation; " in page.inner_text(".verdict")


def test_names_and_words_of_any_length_stay_inside(page: Any, url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    name, word = "<img src=x onerror=window.hacked=1>" * 6 + ".md", "Donaudampfschiff" * 200
    script(page, {"content": word}, citations=[{"document": name, "text": f"<b>{word}", "pages": None}])
    serve_documents(page, {"id": name}, {"id": word[:256], "status": "failed", "chunks": 0, "error": word})
    page.goto(url)
    ask(page, word, 1)
    page.click("#sidebar > summary")
    page.click(".sources > summary")
    page.click(".sources li summary")
    assert page.locator(".sources .where").inner_text() == name
    where = page.locator(".sources .where").bounding_box()
    assert where["x"] + where["width"] <= 390
    assert page.locator(".sources p").inner_text() == f"<b>{word}"
    assert page.locator("#documents .name").first.inner_text() == name
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    overflowing = """[...document.querySelectorAll('body *')].filter((node) => node.clientWidth
        && node.scrollWidth > node.clientWidth && getComputedStyle(node).overflowX === 'visible')"""
    assert page.evaluate(f"{overflowing}.map((node) => node.className || node.id || node.tagName)") == []
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def serve_documents(page: Any, *documents: dict[str, Any]) -> None:
    """Let the page see these documents."""
    rows = [{"status": "ready", "chunks": 1, "tokens": 0, "tokens_done": 0, "error": None, **row} for row in documents]
    page.route("**/v1/corpus?*", lambda route: route.fulfill(json={"data": rows}))


def test_a_question_does_not_wait_for_an_upload(page: Any, url: str) -> None:
    script(page, {"content": "Yusuf"})
    others = [{"id": f"a{number:02}.md"} for number in range(30)]
    encoding = {"status": "encoding", "chunks": 0, "tokens_done": 42, "tokens": 100}
    serve_documents(page, *others, {"id": "waits.pdf", "status": "queued", "chunks": 0}, {"id": "z.pdf", **encoding})
    page.goto(url)
    page.locator("#summary", has_text="encoding, 2 left").wait_for()
    ask(page, "Who is the cook?", 1)
    assert "; without 2 documents still to encode" in page.locator(".lane .detail").first.inner_text()
    rows = page.locator("#documents li")
    assert [text.split("\n")[0] for text in rows.all_inner_texts()[:3]] == ["waits.pdf", "z.pdf", "a00.md"]
    assert rows.nth(1).locator("progress").evaluate("bar => bar.value") == 0.42


def test_a_question_waits_until_a_document_can_be_retrieved(page: Any, url: str) -> None:
    asked = script(page, {"content": "Yusuf"})
    name = next(iter(samples.HANDBOOK.documents()))
    serve_documents(page, {"id": name, "status": "queued", "chunks": 0})
    page.goto(url)
    page.locator("#documents li").wait_for()
    assert page.is_hidden("#questions")
    page.fill("#question", "Who is the cook?")
    page.press("#question", "Enter")
    page.locator(".answer", has_text="Waiting: 1 document left to encode").wait_for()
    assert asked == []
    serve_documents(page, {"id": name})
    page.locator(".verdict", has_text="; the").wait_for()
    assert "still to encode" not in page.locator(".lane .detail").first.inner_text()


def test_sources_have_names_and_pages(page: Any, url: str) -> None:
    hits = [{"document": f"/srv/docs/{number}.md", "text": f"Text {number}.", "pages": None} for number in range(4)]
    hits[1] |= {"pages": [3, 4]}
    hits[2] |= {"pages": [5, 5]}
    script(page, {"content": "Yusuf"}, citations=hits)
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    page.click(".sources > summary")
    assert page.inner_text(".sources > summary") == "4 chunks from 4 documents"
    names = ["docs/0.md", "docs/1.md (p. 3-4)", "docs/2.md (p. 5)", "docs/3.md"]
    assert page.locator(".sources .where").all_inner_texts() == names
    assert page.locator(".bar").evaluate_all("bars => bars.map(bar => bar.value).sort()")[1] == 1


def test_the_page_asks_for_the_key(page: Any, url: str) -> None:
    said: list[str] = []
    keys = iter(["wrong", "right"])

    def models(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            return route.fallback()
        message = "missing or wrong API key: send it as 'Authorization: Bearer KEY'"
        return route.fulfill(status=401, json={"error": {"message": message}})

    def enter(dialog: Any) -> None:
        said.append(dialog.message)
        dialog.accept(next(keys))

    page.route("**/v1/models", models)
    page.on("dialog", enter)
    page.goto(url)
    page.locator("#documents li").first.wait_for()
    assert said == ["This server requires an API key.", "The server does not know this key. Try another one."]


def test_a_chat(page: Any, model_folder: Path, tmp_path: Path) -> None:
    with running(model_folder, tmp_path, "--ratio", "0.15") as server:
        _chat(page, server, tmp_path)


def _chat(page: Any, server: Any, tmp_path: Path) -> None:
    addresses: list[str] = []
    asked: list[dict[str, Any]] = []
    failed: list[Any] = []
    page.on("request", lambda request: addresses.append(request.url))
    page.on("request", lambda request: asked.append(request.post_data_json) if "chat/" in request.url else None)
    warm_up = {"messages": [{"role": "user", "content": "What is this about?"}], "max_tokens": 1, "policy": "none"}
    page.on("pageerror", lambda error: failed.append(error))
    page.goto(server.url)
    page.evaluate(WATCH)

    # the sample documents are there, and soon encoded
    page.locator("#summary", has_text=re.compile("^16$")).wait_for()
    ask(page, "Who is the cook?", 1)
    heard = [text for text in page.evaluate("window.heard") if not text.startswith(("Waiting: ", "Warming up: "))]
    assert len(heard) > 2  # not all at once
    assert all(later.startswith(earlier) for earlier, later in pairwise(heard))
    assert not page.locator(".thought").first.is_visible()
    assert page.locator("#documents li").count() == len(samples.HANDBOOK.documents())
    lanes = page.locator(".lane")
    assert lanes.locator(".name").all_inner_texts() == ["kvrag", "Full prefill"]
    assert all(re.fullmatch(r"\d+ ms|\d+\.\d\d s", text) for text in lanes.locator(".time").all_inner_texts())
    assert re.search(r"[1-9]\d* reused \(\d+ %\), [1-9]\d* stored but recomputed", lanes.first.inner_text())
    assert re.fullmatch(
        r"First token .* instead of .*; whole answer .* instead of .*; the .*", page.inner_text(".verdict")
    )
    page.click(".sources > summary")
    page.click(".sources li:first-child summary")
    assert page.locator(".sources li").count() == 5
    named = page.inner_text(".sources > summary")
    assert re.fullmatch(r"5 chunks from \d documents", named)
    assert page.is_hidden("#tiny")  # the note about the bundled model
    assert page.inner_text(".sources li:first-child p") in "".join(samples.HANDBOOK.documents().values())
    assert warm_up.items() <= asked.pop(0).items()
    assert [body.get("policy") for body in asked] == [None, "full"]
    assert asked[0]["messages"] == asked[1]["messages"]

    # a second turn has the first in its prompt
    said = lanes.first.locator(".answer").inner_text()
    ask(page, "Where does he work?", 2)
    roles = [(message["role"], message["content"]) for message in asked[2]["messages"]]
    assert roles == [("user", "Question: Who is the cook?"), ("assistant", said), ("user", "Where does he work?")]

    # upload, and deletion
    (tmp_path / "note.md").write_text("Yusuf Demir works in the canteen, and he sings while he cooks fish soup.")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 no more than this")
    (tmp_path / "lines.jsonl").write_text('{"text": "Ada Holm works in the archive."}\nno JSON\n')
    (tmp_path / "none.jsonl").write_text("no JSON\n")
    names = ("note.md", "broken.pdf", "lines.jsonl", "none.jsonl")
    with page.expect_event("dialog") as alerted:
        page.once("dialog", lambda dialog: dialog.accept())
        page.set_input_files("#files", [tmp_path / name for name in names])
    broken, none = alerted.value.message.split("\n")
    assert broken.startswith("broken.pdf: ")
    assert "it is a broken or protected PDF" in broken
    assert "line 1: skipped: it is not JSON" in none
    page.locator("#documents li", has_text="lines.jsonl").get_by_text("line 2: skipped: it is not JSON").wait_for()
    page.locator("#documents li", has_text="note.md").get_by_text("1 chunk").wait_for()
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_label("Delete note.md").click()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_label("Delete handbook/petrel.md").click()
    page.get_by_label("Delete handbook/petrel.md").wait_for(state="detached")
    page.locator("#summary", has_text="17").wait_for()
    page.get_by_label("Delete note.md").wait_for()

    # a chunk over two pages
    (tmp_path / "choir.pdf").write_bytes(pdf("The choir meets on Mondays", "in the old fire station."))
    page.set_input_files("#files", [tmp_path / "choir.pdf"])
    page.locator("#summary", has_text="18").wait_for()
    page.locator("#documents li", has_text="choir.pdf").get_by_text("1 chunk").wait_for()
    ask(page, "Where does the choir meet?", 3)
    page.locator(".sources").last.locator("> summary").click()
    page.locator(".sources li summary", has_text="choir.pdf (p. 1-2)").wait_for()
    assert [len(body["messages"]) for body in asked[-3:]] == [3, 5, 5]

    # small and dark
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before

    # a lost server is reported
    server.terminate()
    server.join(60)
    page.fill("#question", "Is anybody there?")
    page.press("#question", "Enter")
    page.locator(".problem", has_text="The server does not answer").wait_for()
    assert page.input_value("#question") == "Is anybody there?"
    assert failed == []
    assert [address for address in addresses if not address.startswith((server.url, "data:"))] == []  # works offline
