"""Take the screenshot of the chat page: `python docs/web_chat.py`. Needs Chromium, as installed by `.ci/run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import which

from playwright.sync_api import sync_playwright

from kvrag.sample import QUESTIONS

PICTURE = Path(__file__).parent / "images" / "web-chat.png"


def main() -> None:
    """Ask two questions about the sample handbook, take a screenshot."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvrag.cli.main", "chat", "--web", "--json", "--store", folder]
        server = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            _take(json.loads(server.stdout.readline())["url"])
        finally:
            server.terminate()
            server.wait(60)


def _take(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1366, "height": 800}, device_scale_factor=1.5)
        page.set_default_timeout(600_000)
        page.goto(url)
        for number, question in enumerate(list(QUESTIONS)[:2]):
            page.fill("#question", question)
            page.press("#question", "Enter")
            page.locator(".verdict:not([hidden])").nth(number).wait_for()
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
