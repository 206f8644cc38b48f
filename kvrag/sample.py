"""The sample documents of the web chat: an invented company's handbook, and questions about it."""

from __future__ import annotations

from pathlib import Path

from kvrag.errors import KvragError

QUESTIONS = {
    "How many days of paid holiday does a full-time employee have?": "28",
    "When is the canteen open?": "11:30",
    "Who is the head of the calibration laboratory?": "Okafor",
    "How much does a Gannet weigh?": "31",
    "Where is the calibration laboratory?": "Danholm",
    "Who is the leader of the IT team?": "Haddad",
    "How long does the probation period last?": "six months",
}
"""Questions -> what a right answer contains. SmolLM2-135M-Instruct answers them correctly by full prefill; they were
chosen by that alone."""

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
