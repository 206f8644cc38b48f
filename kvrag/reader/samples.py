"""The sample documents of `kvrag demo`, and questions about them with their answers."""

from __future__ import annotations

from pathlib import Path

from kvrag.errors import KvragError

# of the bundled reader's world, and among those that it answers correctly with full prefill: they show agreement with
# full prefill, not accuracy
QUESTIONS = {
    "Which company has its offices in Grimvik?": "Finlon",
    "What does Jomouth send abroad?": "dried bread",
    "Which food is Kala fond of?": "fresh apples",
    "Who finished school in 1944?": "Wimla",
    "Where was Zanlina born?": "Branstad",
}
CHUNK_TOKENS = 80  # an article
TOP_K = 30  # prompts almost fill the reader's window, where blending is faster even with so small a model


def folder() -> Path:
    """Return the folder of the documents: in the package if installed, under examples/ in a checkout."""
    here = Path(__file__).resolve().parent.parent
    for place in (here / "corpus", here.parent / "examples" / "corpus"):
        if place.is_dir():
            return place
    raise KvragError("the sample documents are missing from this installation: reinstall kvrag")
