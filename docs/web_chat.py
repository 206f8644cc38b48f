"""Take the screenshot of examples/web_chat.py: `python docs/web_chat.py`. Needs Chromium, as installed by `.ci/run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from shutil import which

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
PORT = 7861
QUESTIONS = ("Which company has its offices in Danvik?", "What does Holra play?")


def main() -> None:
    """Load the sample articles, ask two questions, take a screenshot."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "web_chat.py"), "--port", str(PORT)]
        chat = subprocess.Popen(command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            _wait(f"http://127.0.0.1:{PORT}/", chat)
            _take(f"http://127.0.0.1:{PORT}/", ROOT / "docs" / "images" / "web-chat.png")
        finally:
            chat.terminate()
            chat.wait(60)


def _wait(url: str, chat: subprocess.Popen[bytes]) -> None:
    while chat.poll() is None:
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    sys.exit("the web chat exited unexpectedly")


def _take(url: str, picture: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 880}, device_scale_factor=1.5)
        page.set_default_timeout(300_000)
        page.goto(url)
        page.get_by_role("button", name="Use the sample articles").click()
        page.get_by_text(re.compile("30 documents, .* chunks")).wait_for()
        for question in QUESTIONS:
            page.get_by_placeholder("Ask about the documents").fill(question)
            page.get_by_placeholder("Ask about the documents").press("Enter")
            page.locator("#prompt", has_text=question).wait_for()
        page.wait_for_timeout(1000)  # wait for fade-in animations
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main()
