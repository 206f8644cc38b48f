"""Write questions about long contexts for `kvrag bench quality --data`: `python -m kvrag.reader.rows FILE`."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from kvrag.reader.world import draw, gather


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
            documents = [f"{number} {article}" for article in drawn.articles]
            library: dict[str, list[str]] = {}  # several questions share it: its chunks are encoded once
            for name, passage in zip(documents, drawn.passages, strict=True):
                library.setdefault(name, []).append(passage)
            for turn, question in enumerate(draw(rng, drawn.questions, args.questions)):
                row = {
                    "id": f"{number}-{turn}",
                    "passages": drawn.passages,
                    "question": question.text,
                    "answers": [question.answer],
                    "kind": question.kind,
                    "across": question.across,
                    "documents": documents,
                    "library": library,
                }
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
