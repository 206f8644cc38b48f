"""Write articles of the reader's world to files: `python -m benchmarks.readers.first.corpus DIR`.

Questions with answers are written to stdout as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.readers.first.world import Question, Sample, sample


def articles(drawn: Sample) -> Iterator[tuple[str, str]]:
    """Yield (subject, text) of every article about a single subject, with blank lines between passages."""
    name, passages = "", list[str]()
    for passage, subject in zip(drawn.passages, drawn.subjects, strict=True):
        if not subject or subject in passage:  # only an article's first passage names its subject
            if name:
                yield name, "\n\n".join(passages)
            name, passages = subject, []
        passages.append(passage)
    if name:
        yield name, "\n\n".join(passages)


def corpus(seed: int, num_articles: int, split: str = "test") -> tuple[dict[str, str], list[Question]]:
    """Return articles of a split by subject, and the questions about them."""
    rng = random.Random(seed)
    texts: dict[str, str] = {}
    questions: list[Question] = []
    while len(texts) < num_articles:
        drawn = sample(rng, split, 5)
        new = dict(articles(drawn))
        if len(new) == 5 and not {name[:3] for name in new} & {name[:3] for name in texts}:
            texts |= new
            questions += drawn.questions
    return texts, questions


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--articles", type=int, default=30, help="number of articles, in steps of five (default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("test", "train"), default="test", help="`train` to adapt to; default: test")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    texts, questions = corpus(args.seed, args.articles, args.split)
    for name, text in texts.items():
        (args.folder / f"{name.lower()}.txt").write_text(text + "\n")
    for question in questions:
        print(json.dumps({name: getattr(question, name) for name in ("text", "answer", "kind")}))


if __name__ == "__main__":
    main()
