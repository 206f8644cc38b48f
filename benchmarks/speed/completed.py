"""Second turns with and without `complete="idle"`: `python -m benchmarks.speed.completed --model NAME --docs DIR`."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kvrag import BlendEngine, BlendReport, FileStore, Model
from kvrag.control.prompts import search_by_words
from kvrag.retrieval import documents

_FOLLOW_UP = "Quote the sentence of the documents that says so."


def main() -> None:
    """Ask every question, wait, and ask a second one; print what the second turn computes, and if it is exact.

    All ways alternate, question by question: a machine that is busy delays all of them.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--docs", required=True, type=Path)
    parser.add_argument("--questions", default="benchmarks/quality/tuning.jsonl", type=Path)
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
                rows[name].append((answer.report, answer.token_ids == full.token_ids, waited))
            rows["full"].append((full.report, True, 0.0))
            print(question, *(f"{name} {_rows(done[-1][0])} rows" for name, done in rows.items()), flush=True)
        for engine in engines.values():
            engine.close()
    for name, done in rows.items():
        reports = [report for report, *_ in done]
        times = statistics.median(full[0].ttft_s / one.ttft_s for one, full in zip(reports, rows["full"], strict=True))
        computed = [_rows(report) / report.prompt_tokens for report in reports]
        exact, same = sum(report.exact for report in reports), sum(is_same for _, is_same, *_ in done)
        idle = statistics.median(one[2] / full[0].ttft_s for one, full in zip(done, rows["full"], strict=True))
        print(
            f"{name:5} second turn: exact {exact} of {len(done)}, full prefill's {args.tokens} tokens {same}, rows "
            f"{statistics.mean(computed):.2f} of full prefill's in the mean, {max(computed):.2f} at most, "
            f"{times:.1f}x in the median; idle work {idle:.2f} of a full prefill"
        )


def _rows(report: BlendReport) -> int:
    """Return how many tokens were computed for an answer's prompt, those computed again included."""
    return report.fresh_tokens + (report.completed.rows if report.completed else 0)


if __name__ == "__main__":
    main()
