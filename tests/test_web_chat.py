"""examples/web_chat.py in a real browser: upload, ask, stream, a second turn."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from families import build
from run_script import start

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'kvrag[dev]'")

SCRIPT = Path(__file__).parents[1] / "examples" / "web_chat.py"
BROWSER = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium, as .ci/run does")

ANSWER_TOKENS = 12
# every text that the newest answer has had
WATCH = """() => {
    window.heard = [];
    new MutationObserver(() => {
        const answers = document.querySelectorAll('#chat [data-testid=bot]');
        const text = answers.length ? answers[answers.length - 1].innerText.trim() : '';
        if (text && text !== window.heard.at(-1)) window.heard.push(text);
    }).observe(document.body, {childList: true, subtree: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that says words until the limit is reached: a piece of the stream for each."""
    folder = tmp_path_factory.mktemp("model")
    hf = build("llama", max_position_embeddings=2048)
    words = [re.fullmatch(" ?[a-z]+", tokenizer.decode([number])) is not None for number in range(len(tokenizer))]
    with torch.no_grad():
        others = [number for number in range(hf.vocab_size) if number >= len(words) or not words[number]]
        hf.lm_head.weight[others] = 0  # some word's logit is above
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def url(model_folder: Path, tmp_path: Path) -> Iterator[str]:
    """Where the page is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--model", str(model_folder), "--max-tokens", str(ANSWER_TOKENS), "--port", str(port)]
    process = start(SCRIPT, *arguments, folder=tmp_path)
    try:
        for _ in range(1200):
            assert process.is_alive(), (tmp_path / "stderr").read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.25)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.join(30)


@pytest.fixture
def page(url: str) -> Iterator[Any]:
    """The page, open."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])  # CI is root
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(url)
        yield page
        browser.close()


def number(page: Any, selector: str) -> int:
    """The first one in the text of the report's parts."""
    return int("".join(filter(str.isdigit, page.inner_text(f"#report {selector}").split()[0])))


def test_upload_ask_stream_and_a_second_turn(page: Any, url: str, tmp_path: Path) -> None:
    asked, failed = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(error))
    page.reload()
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "mira.txt").write_text(CHUNKS[0])
    (folder / "works.html").write_text(f"<p>{CHUNKS[1]}</p>")
    (folder / "kan.md").write_text("\n\n".join(CHUNKS[2:]))
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 no more than this")
    page.set_input_files("input[type=file]", sorted(folder.iterdir()))
    page.get_by_text("broken.pdf: skipped: it is a broken or protected PDF").wait_for()
    page.get_by_text("3 documents, 3 chunks").wait_for()

    page.evaluate(WATCH)
    question = page.get_by_placeholder("Ask about the documents")
    said = ""
    for turn, text in enumerate(["Who likes curry?", "Who founded Tran Works?"], 1):
        page.evaluate("window.heard = []")
        question.fill(text)
        question.press("Enter")
        page.locator("#prompt", has_text=text).wait_for()
        page.locator("#report .bar").nth(1).wait_for()  # full prefill's, which comes last
        # the page also changes while the answer of the turn before is still the newest
        heard = [answer for answer in page.evaluate("window.heard") if answer != said]
        assert len(heard) > 2  # not all at once
        assert all(later.startswith(earlier) for earlier, later in pairwise(heard))
        said = heard[-1]
        assert page.get_by_test_id("user").count() == page.get_by_test_id("bot").count() == turn
        passages = page.locator("#report .passage")
        sources = passages.locator("b").evaluate_all("all => all.map(one => one.firstChild.textContent)")
        assert {*sources} == {"kan.md", "mira.txt", "works.html"}
        reused, recomputed = number(page, ".key .reused"), number(page, ".key .recomputed")
        assert reused > 3 * 16
        assert 0 < recomputed < reused
        assert passages.locator("mark").count() > 0
        assert page.locator("#report .bar b").count() == 2
        assert all(time.endswith(" ms") for time in page.locator("#report .bar b").all_inner_texts())
    assert "Question: Who likes curry?" in page.inner_text("#prompt")  # what was said before is in the prompt
    assert failed == []
    assert [address for address in asked if not address.startswith((url, "data:", "blob:"))] == []  # works offline
