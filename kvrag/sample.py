"""The sample documents of `kvrag demo` and the web chat: an invented company's handbook, and questions about it."""

from __future__ import annotations

from pathlib import Path

from kvrag.errors import KvragError

QUESTIONS = (
    "How many days of paid holiday does a full-time employee have?",
    "When is the canteen open?",
    "Who is the head of the calibration laboratory?",
    "How much does a Gannet weigh?",
    "Where is the calibration laboratory?",
    "Who is the leader of the IT team?",
    "How long does the probation period last?",
)
"""Questions that SmolLM2-135M-Instruct answers correctly by full prefill; chosen by that alone."""

CHUNK_TOKENS, TOP_K = 256, 10
"""Chunk length and number of retrieved chunks for them: prompts of about 2,000 tokens."""


def handbook() -> Path:
    """Return the folder of the documents: in the package if installed, under examples/ in a checkout.

    Raises:
        KvragError: Both are missing.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "handbook", here.parent / "examples" / "handbook"):
        if folder.is_dir():
            return folder
    raise KvragError("the sample documents are missing from this installation: reinstall kvrag")


def documents() -> dict[str, str]:
    """Return the texts of the documents by name."""
    return {f"handbook/{path.name}": path.read_text("utf-8") for path in sorted(handbook().glob("*.md"))}
