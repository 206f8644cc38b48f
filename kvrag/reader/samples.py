"""The sample documents of `kvrag demo`, and questions about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvrag.config import DEFAULT_CONTEXT
from kvrag.errors import KvragError


@dataclass(frozen=True)
class Sample:
    """Documents, and questions about them with a text that a correct answer contains.

    The questions are among those that the model answers correctly with full prefill, so they show agreement with full
    prefill, not accuracy.
    """

    questions: Mapping[str, str]
    chunk_tokens: int
    top_k: int
    around: int = 0  # neighbours retrieved with each chunk
    context_tokens: int = DEFAULT_CONTEXT

    @property
    def path(self) -> Path:
        """Folder of the documents: in the package if installed, under examples/ in a checkout."""
        here = Path(__file__).resolve().parent.parent
        for folder in (here / "corpus", here.parent / "examples" / "corpus"):
            if folder.is_dir():
                return folder
        raise KvragError("the sample documents are missing from this installation: reinstall kvrag")


# of the bundled reader's world; prompts almost fill its window, where blending is faster even with so small a model
ARTICLES = Sample(
    questions={
        "Which company has its offices in Grimvik?": "Finlon",
        "What does Jomouth send abroad?": "dried bread",
        "Which food is Kala fond of?": "fresh apples",
        "Who finished school in 1944?": "Wimla",
        "Where was Zanlina born?": "Branstad",
    },
    chunk_tokens=80,  # an article
    top_k=30,
)
# in short chunks, most of which say "she" or "the town" and lack the name: plain reuse answers these questions wrongly
ENCODED_ALONE = replace(
    ARTICLES,
    questions={
        "Where was Alla born?": "Murham",
        "Which food is Nadvi fond of?": "cold apples",
        "What is on the flag of Eldale?": "blue tree",
        "Who finished school in 1944?": "Wimla",
        "Where is Grennova based?": "Norwick",
    },
    chunk_tokens=40,  # a few sentences
    top_k=3,
    around=2,
    context_tokens=0,
)
