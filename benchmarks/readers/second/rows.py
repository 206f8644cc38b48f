"""Write questions about the second world to a file for `kvrag bench quality --data`.

python -m benchmarks.readers.second.rows FILE

Several questions about each context: its chunks are encoded once for all of them. `python -m benchmarks
quality --world 2` draws longer contexts, with one question each.
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
    parser.add_argument("file", type=Path, help="file to write, JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contexts", type=int, default=60, help="default: 60")
    parser.add_argument("--questions", type=int, default=5, help="questions about each context (default: 5)")
    parser.add_argument(
        "--words", type=int, nargs=2, default=(500, 1100), help="words of a context (default: 500 1100)"
    )
    args = parser.parse_args()
    scale = Scale(tuple(args.words), (48, 192), (6, 14), (2, 4))
    with args.file.open("w", encoding="utf-8") as file:
        for number in range(args.contexts):
            rng = random.Random(f"rows {args.seed} {number}")
            drawn = sample(rng, "test", scale)
            questions = draw(rng, drawn.questions, args.questions)
            file.writelines(rows(number, drawn.passages, drawn.documents, questions))


if __name__ == "__main__":
    main()
