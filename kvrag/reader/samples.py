"""The sample documents of the chat page and of `kvrag demo`, and questions about them."""

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

    folder: str
    questions: Mapping[str, str]
    chunk_tokens: int
    top_k: int
    around: int = 0  # neighbours retrieved with each chunk
    context_tokens: int = DEFAULT_CONTEXT
    is_chat: bool = True

    @property
    def path(self) -> Path:
        """Folder of the documents: in the package if installed, under examples/ in a checkout."""
        here = Path(__file__).resolve().parent.parent
        for folder in (here / self.folder, here.parent / "examples" / self.folder):
            if folder.is_dir():
                return folder
        raise KvragError("the sample documents are missing from this installation: reinstall kvrag")

    def documents(self) -> dict[str, str]:
        """Return the texts of the documents by name."""
        return {f"{self.folder}/{path.name}": path.read_text("utf-8") for path in sorted(self.path.iterdir())}


# of the bundled reader's world; prompts almost fill its window, where blending is faster even with so small a model
ARTICLES = Sample(
    folder="corpus",
    questions={
        "Which company has its offices in Grimvik?": "Finlon",
        "What does Jomouth send abroad?": "dried bread",
        "Which food is Kala fond of?": "fresh apples",
        "Who finished school in 1944?": "Wimla",
        "Where was Zanlina born?": "Branstad",
    },
    chunk_tokens=80,  # an article
    top_k=30,
    is_chat=False,
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
# of a fictional company, for other models; the questions were chosen with SmolLM2-135M-Instruct
HANDBOOK = Sample(
    folder="handbook",
    questions={
        "How many days of paid holiday does a full-time employee have?": "28",
        "When is the canteen open?": "11:30",
        "Who is the head of the calibration laboratory?": "Okafor",
        "How much does a Gannet weigh?": "31",
        "Where is the calibration laboratory?": "Danholm",
        "Who is the leader of the IT team?": "Haddad",
        "How long does the probation period last?": "six months",
    },
    chunk_tokens=256,
    top_k=10,  # prompts of about 2,000 tokens
)


def of(model: str) -> Sample:
    """Return the sample for a model."""
    return ARTICLES if model == "reader" else HANDBOOK
