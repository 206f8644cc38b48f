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
    """A process of `kvrag chat --web`, with its `url`."""
    arguments = ["--model", str(model_folder), "--store", "kv", "--top-k", "5", "--max-tokens", "12", "--json"]
    process = start(KVRAG, "chat", "--web", *arguments, *options, folder=folder)
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

    page.route("**/v1/chat/completions", answer)
    return asked


MARKDOWN = """The **cook** is *Yusuf* `Demir`:

1. soup

2. a dish
   - with <b>fish</b>

| Day | Dish |
|---|---:|
| Monday | **Soup** `a|b` |

2*3*4 f(**kwargs) and **2**

> a quotation
> with *stress*
---
```python
x = "**not bold**"
```
"""
HOSTILE = """<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script>
[a](javascript:window.hacked=1) [b](data:text/html,x) ![c](https://evil.example/?secret)
[d](https://x.example" onclick="y)
| <svg onload=window.hacked=1> |
|---|
"""


def test_an_answer_is_shown_as_markdown(page: Any, url: str) -> None:
    script(page, *({"content": MARKDOWN[at : at + 7]} for at in range(0, len(MARKDOWN), 7)))
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    answer = page.locator(".answer").first
    shown = {
        tag: answer.locator(tag).all_inner_texts()
        for tag in ("strong", "em", "blockquote", "p code", "ol > li", "ul > li")
    }
    assert shown == {
        "strong": ["cook", "Soup", "2"],
        "em": ["Yusuf", "stress"],
        "blockquote": ["a quotation\nwith stress"],
        "p code": ["Demir"],
        "ol > li": ["soup", "a dish\n\nwith <b>fish</b>"],
        "ul > li": ["with <b>fish</b>"],
    }
    assert answer.locator("th, td").all_inner_texts() == ["Day", "Dish", "Monday", "Soup a|b"]
    assert answer.locator("hr").count() == 1
    assert answer.locator("pre").inner_text() == 'x = "**not bold**"'
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


@pytest.mark.parametrize(
    "hostile",
    [
        HOSTILE,
        "- " * 9000,
        "1. " * 9000,
        "*a **b [c" * 2000,
        "a|b\n|" + " " * 60_000 + "x",
        "|`" * 30_000 + "\n|-|",
        "> " * 9000,
    ],
)
def test_hostile_markdown_stays_text(page: Any, url: str, hostile: str) -> None:
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    script(page, {"content": hostile})
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    assert page.locator(".answer :is(img, svg, script, iframe, [onclick], [onerror], [onload])").count() == 0
    hrefs = [link.get_attribute("href") for link in page.locator(".answer a").all()]
    assert all(href == "https://evil.example/?secret" for href in hrefs)  # a link, never loaded as a picture
    assert page.evaluate("window.hacked") is None
    assert all(address.startswith((url, "data:")) for address in addresses)


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


def test_what_is_recomputed_can_be_chosen_and_is_kept(page: Any, url: str) -> None:
    asked = script(page, {"content": "Yusuf"})
    page.goto(url)
    page.select_option("#recompute", "30 %")
    ask(page, "Who is the cook?", 1)
    page.reload()
    page.locator(".turn").wait_for()
    assert page.input_value("#recompute") == "0.3"
    page.select_option("#recompute", "everything (full prefill)")
    ask(page, "Who is the cook?", 2)
    page.uncheck("#race")
    page.reload()
    page.locator(".turn").nth(1).wait_for()
    assert not page.is_checked("#race")
    page.select_option("#recompute", "")
    page.fill("#question", "Who else?")
    page.press("#question", "Enter")
    page.locator(".detail", has_text="5 prompt tokens").nth(4).wait_for()
    assert page.locator("#send").inner_text() == "Ask"
    blended = {"policy": "query", "controller": "off", "deterministic": True, "edited_history": "exact"}
    names = ("ratio", "policy", "controller", "deterministic", "edited_history")
    settings = [{name: body[name] for name in names if name in body} for body in asked]
    assert settings == [{"ratio": 0.3}, {"policy": "full"}, {"policy": "full"}, blended, {}]


def test_an_answer_with_full_prefill_is_raced_against_blending(page: Any, url: str) -> None:
    script(page, {"content": "Yusuf"}, policy="full", decision="full prefill: the context is short")
    page.goto(url)
    ask(page, "Who is the cook?", 1)
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
    assert page.locator(".verdict").evaluate("verdict => getComputedStyle(verdict).fontWeight") == "400"
    before = page.evaluate("document.querySelector('.turn').innerText")
    page.reload()
    page.locator(".turn").wait_for()
    assert page.evaluate("document.querySelector('.turn').innerText") == before


@pytest.mark.parametrize(
    ("pieces", "token", "marked"),
    [
        ([" The", " cook", " is", " *Yus", "uf*"], 1, "cook"),
        ([" The", " cook", " is", " *Yus", "uf", "*"], 4, "uf"),
        ([" The", " cook", " is", " **", "Yusuf", "**"], 3, None),  # Markdown's own
        (["1", ".", " soup"], 0, None),
        (["```\n", "soup", "\n```"], 1, None),
        (["\ue000<b>", "soup", "\ue001"], 1, None),  # marks in a text are not the page's
        (["So", "<img src=x onerror=window.hacked=1>"], 1, "<img src=x onerror=window.hacked=1>"),
    ],
)
def test_the_token_of_which_the_model_was_unsure_is_marked(
    page: Any, url: str, pieces: list[str], token: int, marked: str | None
) -> None:
    completed = {"token": token, "rows": 5, "seconds": 0.1}
    asked = script(
        page, *({"content": piece} for piece in pieces), completed=completed, reused_tokens=0, recomputed_tokens=3
    )
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    assert asked[0]["logprobs"] is True
    detail = page.locator(".lane .detail").first.inner_text()
    assert detail == (
        "5 prompt tokens: 0 reused (0 %), 3 stored but recomputed; "
        f"unsure after {token} token{'s' * (token != 1)}, so the rest was recomputed first"
    )
    for _ in range(2):  # also after a reload
        answers = page.locator(".answer")
        assert answers.nth(0).locator("mark").all_inner_texts() == ([] if marked is None else [marked])
        assert answers.nth(1).locator("mark").count() == 0
        assert answers.nth(0).inner_text() == answers.nth(1).inner_text()
        page.reload()
        page.locator(".turn").wait_for()
    assert page.evaluate("window.hacked") is None


def test_the_server_names_the_unsure_token(page: Any, model_folder: Path, tmp_path: Path) -> None:
    with running(model_folder, tmp_path, "--controller", "off") as server:  # the random model is never sure
        page.goto(server.url)
        ask(page, "Who is the cook?", 1)
        assert page.locator("#recompute option").first.inner_text() == "adaptive (default)"
        lane = page.locator(".lane").first
        doubt = r"unsure after \d tokens?, so the rest was recomputed first"
        assert re.search(doubt, lane.locator(".detail").inner_text())
        mark = lane.locator("mark").inner_text()
        assert mark
        assert mark in lane.locator(".answer").inner_text()
        page.select_option("#recompute", "full")
        ask(page, "Where does he work?", 2)
        assert page.locator(".lane .name").all_inner_texts() == ["kvrag", "Full prefill", "kvrag", "Blended"]
        assert re.match(
            r"\d+ prompt tokens: 0 reused \(0 %\), [1-9]\d* stored but recomputed",
            page.locator(".lane .detail").last.inner_text(),
        )


def test_a_question_survives_a_reload_before_its_answer(page: Any, url: str) -> None:
    page.route("**/v1/chat/completions", lambda route: None)  # never answered
    page.goto(url)
    page.fill("#question", "Who is the cook?")
    page.press("#question", "Enter")
    page.locator(".turn .asked").wait_for()
    page.reload()
    page.wait_for_function("document.getElementById('question').value")
    assert page.input_value("#question") == "Who is the cook?"
    page.unroute("**/v1/chat/completions")
    script(page, {"content": "Yusuf"})
    ask(page, "Who is the cook?", 1)
    page.reload()
    page.locator(".turn").wait_for()
    assert page.input_value("#question") == ""


def test_a_question_that_continues_a_kept_conversation_says_so(page: Any, url: str) -> None:
    script(page, {"content": "Yusuf"}, conversation_tokens=4, reused_tokens=4, recomputed_tokens=0)
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    assert "4 kept from the conversation" in page.locator(".lane .detail").first.inner_text()
    assert "; most of the prompt was kept from the conversation; " in page.inner_text(".verdict")


def test_an_answer_that_pauses_says_so(page: Any, url: str) -> None:
    script(page, {"content": "Yusuf"})
    page.goto(url)
    page.evaluate("""() => {
        const answer = window.fetch;
        window.fetch = async (path, options) => {
            const response = await answer(path, options);
            if (!path.endsWith("chat/completions")) return response;
            const lines = (await response.text()).split("\\n\\n");
            const body = new ReadableStream({ async start(controller) {
                const send = (text) => controller.enqueue(new TextEncoder().encode(text + "\\n\\n"));
                send(lines[0]); send(lines[1]);
                await new Promise((resolve) => (window.goOn = resolve));
                lines.slice(2).forEach(send);
                controller.close();
            } });
            return new Response(body);
        };
    }""")
    page.uncheck("#race")
    page.fill("#question", "Who is the cook?")
    page.press("#question", "Enter")
    page.locator(".detail", has_text="Computing the next token").wait_for()
    page.evaluate("window.goOn()")
    page.locator(".detail", has_text="5 prompt tokens: 2 reused").wait_for()
    assert "Computing" not in page.inner_text(".detail")


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
    assert not page.locator(".sources .start").is_visible()  # the text is below, and the name is shown in full
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
    assert [text.split("\n")[0] for text in rows.all_inner_texts()[:3]] == ["z.pdf", "waits.pdf", "a00.md"]
    assert "encoding, 42 %" in rows.first.inner_text()

    # a new upload comes first, also when it is ready, and the list is scrolled to it
    page.evaluate("document.getElementById('sidebar').scrollTop = 1000")
    page.route("**/v1/corpus/a17.md", lambda route: route.fulfill(json={"problems": []}))
    serve_documents(page, *others)
    page.set_input_files("#files", [{"name": "a17.md", "mimeType": "text/plain", "buffer": b"new"}])
    page.locator("#summary", has_text=re.compile("^30$")).wait_for()
    assert rows.first.inner_text().startswith("a17.md")
    assert page.evaluate("document.getElementById('sidebar').scrollTop") == 0


def test_a_question_waits_for_the_sample_documents(page: Any, url: str) -> None:
    asked = script(page, {"content": "Yusuf"})
    name = next(iter(samples.HANDBOOK.documents()))
    serve_documents(page, {"id": "a.md"}, {"id": name, "status": "queued", "chunks": 0})
    page.goto(url)
    page.fill("#question", "Who is the cook?")
    page.press("#question", "Enter")
    page.locator(".answer", has_text="Waiting: 1 document left to encode").wait_for()
    assert asked == []
    serve_documents(page, {"id": "a.md"}, {"id": name})
    page.locator(".verdict", has_text="; the").wait_for()
    assert "still to encode" not in page.locator(".lane .detail").first.inner_text()


def test_at_most_eight_sources_are_shown_and_all_survives_a_reload(page: Any, url: str) -> None:
    hits = [{"document": f"{number}.md", "text": f"Text {number}.", "pages": None} for number in range(28)]
    hits[1] |= {"pages": [3, 4]}
    script(page, {"reasoning_content": "Hm."}, {"content": "**Yusuf**"}, citations=hits)
    page.goto(url)
    ask(page, "Who is the cook?", 1)
    page.click(".sources > summary")
    assert page.inner_text(".sources > summary") == "28 chunks from 28 documents, the 8 most similar"
    assert page.locator(".sources .where").all_inner_texts() == [
        "0.md",
        "1.md (pages 3-4)",
        *(f"{n}.md" for n in range(2, 8)),
    ]
    shown = "document.getElementById('turns').querySelector('.turn').innerText"
    before = page.evaluate(shown)
    assert re.search(r"\d+ ms|\d\.\d\d s", before)
    page.reload()
    page.locator(".turn").wait_for()
    page.click(".sources > summary")
    assert page.evaluate(shown) == before
    assert page.locator(".bar").evaluate_all("bars => bars.map(bar => bar.value).sort()")[1] == 1
    assert page.inner_text(".answer strong >> nth=0") == "Yusuf"
    page.locator(".thought summary").first.click()
    assert page.locator(".thought p").first.inner_text() == "Hm."


def test_the_key_dialog_speaks_to_a_person(page: Any, url: str) -> None:
    def models(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            return route.fallback()
        message = "missing or wrong API key: send it as 'Authorization: Bearer KEY'"
        return route.fulfill(status=401, json={"error": {"message": message}})

    page.route("**/v1/models", models)
    page.goto(url)
    reason = page.locator("#key-reason")
    page.locator("#key-dialog[open]").wait_for()
    assert reason.inner_text() == "This server requires an API key."
    for key in ("wrong", "right"):
        page.fill("#key", key)
        page.press("#key", "Enter")
        if key == "wrong":
            page.get_by_text("The server does not know this key. Try another one.").wait_for()
    page.locator("#documents li").first.wait_for()


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

    # the sample documents are there; a question waits for them
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
    assert page.locator("#recompute option").first.inner_text() == "as the server is set"
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

    # it survives a reload
    turn = page.locator(".turn").first
    page.click(".sources > summary")  # closed, as after the reload
    before = turn.inner_text()
    page.reload()
    page.locator(".turn").nth(1).wait_for()
    assert turn.inner_text() == before
    assert page.is_hidden("#welcome")
    page.locator("#documents li").nth(len(samples.HANDBOOK.documents()) - 1).wait_for()

    # upload, and deletion
    (tmp_path / "note.md").write_text("Yusuf Demir works in the canteen, and he sings while he cooks fish soup.")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 no more than this")
    (tmp_path / "lines.jsonl").write_text('{"text": "Ada Holm works in the archive."}\nno JSON\n')
    (tmp_path / "none.jsonl").write_text("no JSON\n")
    names = ("note.md", "broken.pdf", "lines.jsonl", "none.jsonl")
    page.set_input_files("#files", [tmp_path / name for name in names])
    page.locator("#documents li", has_text="it is a broken or protected PDF").wait_for()
    page.locator("#documents .failed").get_by_text(re.compile("^line 1: skipped: it is not JSON")).wait_for()
    page.locator("#documents li", has_text="lines.jsonl").get_by_text("line 2: skipped: it is not JSON").wait_for()
    page.locator("#documents li", has_text="note.md").get_by_text("1 chunk").wait_for()
    for name in ("handbook/petrel.md", "broken.pdf", "note.md"):
        page.get_by_label(f"Delete {name}").click()
    page.get_by_label("Keep note.md").click()  # undo
    page.get_by_label("Keep handbook/petrel.md").wait_for(state="detached")
    page.get_by_label("Keep broken.pdf").wait_for(state="detached")
    assert page.get_by_label("Delete handbook/petrel.md").count() == 0
    page.locator("#summary", has_text="17").wait_for()
    page.get_by_label("Delete note.md").wait_for()

    # dropped beside the box
    page.evaluate("""() => {
        const dropped = new DataTransfer();
        dropped.items.add(new File(["Ada Holm keeps bees."], "bees.md"));
        document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: dropped, bubbles: true, cancelable: true }));
    }""")
    page.locator("#documents li", has_text="bees.md").get_by_text("1 chunk").wait_for()
    page.locator("#summary", has_text="18").wait_for()

    # a chunk over two pages
    (tmp_path / "choir.pdf").write_bytes(pdf("The choir meets on Mondays", "in the old fire station."))
    page.set_input_files("#files", [tmp_path / "choir.pdf"])
    page.locator("#summary", has_text="19").wait_for()
    page.locator("#documents li", has_text="choir.pdf").get_by_text("1 chunk").wait_for()
    ask(page, "Where does the choir meet?", 3)
    page.locator(".sources").last.locator("> summary").click()
    page.locator(".sources li summary", has_text="choir.pdf (pages 1-2)").wait_for()
    assert [len(body["messages"]) for body in asked[-3:]] == [3, 5, 5], "with the turns from before the reload"

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
