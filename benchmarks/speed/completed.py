"""What `complete="idle"` brings to second turns: `python -m benchmarks.speed.completed --model NAME --docs FOLDER`."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kvrag import BlendEngine, FileStore, Model
from kvrag.control.prompts import search_by_words
from kvrag.retrieval import documents

_FOLLOW_UP = "Quote the sentence of the documents that says so."


def main() -> None:
    """Ask every question, wait, and ask a second one; print the second turn's times and whether it is full prefill's.

    All ways alternate, question by question: a machine that is busy delays all of them.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--docs", required=True, type=Path)
    parser.add_argument("--questions", default="benchmarks/quality/handbook.jsonl", type=Path)
    parser.add_argument("--count", default=8, type=int)
    parser.add_argument("--tokens", default=16, type=int, help="of an answer")
    args = parser.parse_args()
    model = Model.from_pretrained(args.model)
    split = documents.splitter(lambda text: len(model.tokenizer.encode(text)), 128, 0)
    texts = {path.name: split([path.read_text("utf-8")]) for path in sorted(args.docs.glob("*.md"))}
    search = search_by_words([chunk for chunks in texts.values() for chunk in chunks])
    questions = [json.loads(line)["q"] for line in args.questions.read_text().splitlines()]
    rows: dict[str, list[Any]] = {"off": [], "idle": [], "full": []}
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: BlendEngine(model, FileStore(folder, min_free_bytes=0), complete=name) for name in ("off", "idle")
        }
        for document, chunks in texts.items():
            engines["off"].warm(chunks, document=document)
        settings: dict[str, Any] = {"max_new_tokens": args.tokens, "temperature": 0}
        for question in questions[:: max(1, len(questions) // args.count)][: args.count]:
            first = {"role": "user", "content": "\n\n".join([*search(question, 8), f"Question: {question}"])}
            for name, engine in engines.items():
                said = engine.generate([first], **settings)
                started = time.perf_counter()
                engine._answering.idle.wait()
                waited = time.perf_counter() - started
                turns = [first, {"role": "assistant", "content": said.text}, {"role": "user", "content": _FOLLOW_UP}]
                answer = engine.generate(turns, **settings)
                full = engine.generate(turns, policy="full", **settings)
                rows[name].append((answer.report, answer.token_ids == full.token_ids, waited, said.report.ttft_s))
            rows["full"].append((full.report, True, 0.0, full.report.ttft_s))
            print(question, *(f"{name} {done[-1][0].ttft_s:.2f} s" for name, done in rows.items()), flush=True)
        for engine in engines.values():
            engine.close()
    for name, done in rows.items():
        times = [other[0].ttft_s / one[0].ttft_s for one, other in zip(done, rows["full"], strict=True)]
        exact, same = sum(report.exact for report, *_ in done), sum(is_same for _, is_same, *_ in done)
        waited = statistics.median(one[2] / other[0].ttft_s for one, other in zip(done, rows["full"], strict=True))
        print(
            f"{name:5} {statistics.median(times):.2f}x as fast as full prefill (median; {min(times):.2f} to "
            f"{max(times):.2f}), exact {exact} of {len(done)}, the same {args.tokens} tokens {same} of {len(done)}; "
            f"idle work {waited:.2f} of a full prefill"
        )


if __name__ == "__main__":
    main()
