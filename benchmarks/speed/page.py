"""Time to the first token on the chat page: its sample's questions over HTTP, by blending and by full prefill in turns.

    python -m benchmarks.speed.page --rounds 5

Starts `kvrag chat --web` with a new store, and waits until the sample is ready. The times include retrieval, as on the
page. The first round is left out. Every question has a system message of its own, so that blending reuses chunks only:
an equal prompt would continue the KV of the round before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

from benchmarks.speed.serve import begun_anew
from kvrag.reader import samples


def _get(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def _ask(url: str, model: str, question: str, number: int, policy: str | None) -> tuple[float, str]:
    """Return the seconds to the first text, and the answer."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": 24}
    body |= {"temperature": 0} | ({"policy": policy} if policy else {})
    data = json.dumps(begun_anew(body, number)).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    started, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and (more := choices[0]["delta"].get("content")):
                    first = first or time.perf_counter() - started
                    text += more
    return first, text


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reader")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-m", "kvrag.cli.main", "chat", "--web", "--no-browser", "--json", "--store", store]
        command += ["--model", args.model]
        offline = os.environ | {"HF_HUB_OFFLINE": "1"}
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=offline)
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            while not (documents := _get(f"{url}/v1/corpus")["data"]) or any(
                document["status"] != "ready" for document in documents
            ):
                time.sleep(0.2)
            model = next(entry["id"] for entry in _get(f"{url}/v1/models")["data"] if "rag" in entry["id"])
            blending, full, same = [], [], 0
            questions = list(samples.of(args.model).questions)
            for number in range(args.rounds * len(questions)):
                question = questions[number % len(questions)]
                ours, theirs = (_ask(url, model, question, number, policy) for policy in (None, "full"))
                if number >= len(questions):
                    blending.append(ours[0])
                    full.append(theirs[0])
                    same += ours[1] == theirs[1]
        finally:
            server.terminate()
            server.wait()
    ours_s, theirs_s = statistics.median(blending), statistics.median(full)
    print(
        f"blending {1000 * ours_s:.0f} ms, full prefill {1000 * theirs_s:.0f} ms: {theirs_s / ours_s:.2f}x faster; "
        f"{same} of {len(full)} answers the same"
    )


if __name__ == "__main__":
    main()
