"""Five questions about the articles of a made-up world: times and right answers of full prefill and of kvrag.

Each prompt has all articles that fit into the bundled model's window, in another order. Offline, under a minute on two
idle cores:

    python examples/demo.py
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from kvrag import Answer, BlendEngine

CORPUS = Path(__file__).parent / "corpus"
# among those that full prefill answers correctly: they show agreement with it, not accuracy
QUESTIONS = {
    "Which company has its offices in Grimvik?": "Finlon",
    "What does Jomouth send abroad?": "dried bread",
    "Which food is Kala fond of?": "fresh apples",
    "Who finished school in 1944?": "Wimla",
    "Where was Zanlina born?": "Branstad",
}
WAYS: dict[str, dict[str, Any]] = {"full prefill": {"policy": "full"}, "kvrag": {}}
ARTICLES = 28  # almost fill the window: with so small a model, blending short prompts is not faster


def ask(engine: BlendEngine, texts: list[str], question: str, **options: Any) -> Answer:
    """Answer a question by these articles."""
    messages = [{"role": "user", "content": "\n\n".join([*texts, f"Question: {question}"])}]
    return engine.generate(messages, max_new_tokens=16, temperature=0, **options)


def main() -> None:
    """Warm the articles, ask each question each way, and print the answers."""
    texts = [path.read_text("utf-8").strip() for path in sorted(CORPUS.glob("*.txt"))]
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    right = dict.fromkeys(WAYS, 0)
    with tempfile.TemporaryDirectory() as folder, BlendEngine.from_pretrained("reader", store=folder) as engine:
        warmed = engine.warm(texts)
        print(f"{warmed.chunks} articles of a made-up world: {warmed.tokens} tokens, {warmed.bytes >> 20} MiB of KV\n")
        for options in WAYS.values():
            ask(engine, texts[:ARTICLES], "What is this about?", **options)  # the first answer includes start-up costs
        print(f"{'':44}" + "".join(f"{way:16}" for way in WAYS).rstrip())
        for number, (question, expected) in enumerate(QUESTIONS.items()):
            # without the last two that do not hold the answer
            shuffled = random.Random(number).sample(texts, len(texts))
            shuffled = sorted(shuffled, key=lambda text: expected not in text)[:ARTICLES]
            random.Random(number).shuffle(shuffled)
            cells = []
            for way, options in WAYS.items():
                answer = ask(engine, shuffled, question, **options)
                is_right = answer.text.strip() == expected
                right[way] += is_right
                times[way].append(answer.report.ttft_s)
                cells.append(f"{'' if is_right else 'x '}{answer.text.strip():.13}")
            print(f"{question:44}" + "".join(f"{cell:16}" for cell in cells).rstrip())
        print(f"{'right':44}" + "".join(f"{f'{right[way]} of {len(QUESTIONS)}':16}" for way in WAYS).rstrip())
    medians = [f"{statistics.median(times[way]):.3f} s" for way in WAYS]
    print(f"{'first token, median':44}" + "".join(f"{median:16}" for median in medians).rstrip())
    print(f"\nDefault settings, 4.8 M parameters, {os.cpu_count()} cores. Of the last prompt,")
    print(f"{answer.report.reused_tokens} of {answer.report.prompt_tokens} prompt tokens were reused.")


if __name__ == "__main__":
    main()
