"""Write questions about the second world to a file for `python -m benchmarks answers --data`.

python -m benchmarks.readers.second.rows FILE

Several questions about each context: its chunks are encoded once for all of them. `python -m benchmarks
quality --world 2` draws longer contexts, with one question each.

`--documents FOLDER` writes documents and `questions.txt` for `kvrag adapt` instead, from the split `train`: its names
and numbers are not in the rows.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from benchmarks.readers.first.rows import rows
from benchmarks.readers.second.world import Scale, draw, sample


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("file", type=Path, nargs="?", help="file to write, JSON lines")
    target.add_argument("--documents", type=Path, metavar="FOLDER", help="write documents to adapt to instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contexts", type=int, default=60, help="default: 60")
    parser.add_argument("--questions", type=int, default=5, help="questions about each context (default: 5)")
    parser.add_argument(
        "--words", type=int, nargs=2, default=(500, 1100), help="words of a context (default: 500 1100)"
    )
    args = parser.parse_args()
    scale = Scale(tuple(args.words), (48, 192), (6, 14), (2, 4))
    if args.documents:
        write_documents(args.documents, scale, args.seed, args.contexts, args.questions)
        return
    with args.file.open("w", encoding="utf-8") as file:
        for number in range(args.contexts):
            rng = random.Random(f"rows {args.seed} {number}")
            drawn = sample(rng, "test", scale)
            questions = draw(rng, drawn.questions, args.questions)
            file.writelines(rows(number, drawn.passages, drawn.documents, questions))


def write_documents(folder: Path, scale: Scale, seed: int, contexts: int, questions: int) -> None:
    """Write the documents of contexts as Markdown files to `folder/documents`, and `folder/questions.txt`."""
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    asked: list[str] = []
    names: list[str] = []
    for number in range(contexts):
        rng = random.Random(f"documents {seed} {number}")
        drawn = sample(rng, "train", scale, names)
        asked += [question.text for question in draw(rng, drawn.questions, questions)]
        texts: dict[str, list[str]] = {}
        for title, passage in zip(drawn.documents, drawn.passages, strict=True):
            texts.setdefault(title, []).append(passage)
        for turn, passages in enumerate(texts.values()):
            path = folder / "documents" / f"{number:03}-{turn}.md"
            path.write_text("\n\n".join(passages) + "\n", encoding="utf-8")
    (folder / "questions.txt").write_text("\n".join(asked) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
