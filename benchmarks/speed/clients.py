"""Requests per second of several clients at once: `python -m benchmarks.speed.clients --model FOLDER --clients 8`.

Every client asks its questions about the documents of `kept` one after the other: with full prefill, then with the
defaults. Each setting answers other questions than those that warm it up.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.quality.arms import INSTRUCTION
from benchmarks.quality.questions import CORPUS, QUESTIONS, chosen, read_corpus, read_questions, retrieve
from benchmarks.settings import run_settings
from kvrag import BlendEngine, Model


def main() -> None:
    """Measure, and print a line per setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.clients", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--n", type=int, default=3, help="questions per client (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = Model.from_pretrained(args.model, dtype="bfloat16")
    corpus = read_corpus(CORPUS, lambda text: len(model.tokenizer.encode(text)), 128)
    rows = retrieve(chosen(read_questions(QUESTIONS), 1, args.clients * (args.n + 1)), corpus, 8)
    with TemporaryDirectory() as folder, BlendEngine(model, folder, conversation_bytes=0) as engine:
        for name in {name for row in rows for name in row.all_documents()}:
            engine.warm(corpus[name], document=name)
        prompts = [
            engine.as_prompt("\n\n".join([INSTRUCTION, *row.passages, f"Question: {row.question}"])) for row in rows
        ]
        for prompt in prompts[: args.clients]:  # their evidence counts
            engine.generate(prompt, temperature=0, max_new_tokens=32)
            engine.wait_until_idle()
        found = {
            name: load(engine, prompts[args.clients :], args.clients, options) for name, options in _SETTINGS.items()
        }
    print(json.dumps({"environment": run_settings(model), "clients": args.clients, **found}))


_SETTINGS: dict[str, dict[str, Any]] = {"full": {"policy": "full"}, "default": {}}


def load(engine: BlendEngine, prompts: list[Any], clients: int, options: dict[str, Any]) -> dict[str, float]:
    """Let several clients ask all prompts; return the number of answers, seconds, and the median of the first token."""
    first, started = list[float](), time.perf_counter()

    def ask(client: int) -> int:
        asked = 0
        for prompt in prompts[client::clients]:
            answer = engine.generate(prompt, temperature=0, max_new_tokens=32, **options)
            first.append(answer.report.ttft_s)
            asked += 1
        return asked

    with ThreadPoolExecutor(clients) as pool:
        asked = sum(pool.map(ask, range(clients)))
    seconds = time.perf_counter() - started
    print(f"{options or 'default'}: {asked} answers in {seconds:.1f} s, first token {median(first):.2f} s", flush=True)
    return {"answers": asked, "seconds": seconds, "requests_per_s": asked / seconds, "ttft_s": median(first)}


if __name__ == "__main__":
    main()
