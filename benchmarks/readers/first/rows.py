"""Write questions about long contexts to a file for `python -m benchmarks answers --data`.

python -m benchmarks.readers.first.rows FILE
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readers.first.world import draw, gather


def rows(number: int, passages: Sequence[str], titles: Sequence[str], questions: Sequence[Any]) -> Iterator[str]:
    """Yield a line for each question about context `number`; its chunks are encoded once for all of them.

    Args:
        titles: Title of each passage's document.
        questions: Of either world.
    """
    documents = [f"{number} {title}" for title in titles]
    library: dict[str, list[str]] = {}
    for name, passage in zip(documents, passages, strict=True):
        library.setdefault(name, []).append(passage)
    for turn, question in enumerate(questions):
        row = {
            "id": f"{number}-{turn}",
            "passages": passages,
            "question": question.text,
            "answers": [question.answer],
            "kind": question.kind,
            "across": question.across,
            "documents": documents,
            "library": library,
        }
        yield json.dumps(row) + "\n"


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="file to write, JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contexts", type=int, default=100, help="default: 100")
    parser.add_argument("--questions", type=int, default=5, help="questions about each context (default: 5)")
    parser.add_argument("--articles", type=int, default=26, help="articles of a context (default: 26)")
    args = parser.parse_args()
    with args.file.open("w", encoding="utf-8") as file:
        for number in range(args.contexts):
            rng = random.Random(f"rows {args.seed} {number}")
            drawn = gather(rng, "test", args.articles)
            questions = draw(rng, drawn.questions, args.questions)
            file.writelines(rows(number, drawn.passages, drawn.articles, questions))


if __name__ == "__main__":
    main()
