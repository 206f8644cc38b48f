"""Variants of rows and policies that only the study of blending needs: chunk lengths, missing passages, settings."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path

from benchmarks.quality.rows import QuestionRow
from kvrag.config import BlendConfig

_CODE = ("backend", "control", "reuse", "ingest", "store", "generate", "request.py", "answer.py", "config.py")


def code_digest() -> str:
    """Return a hash of the source of every step: other code may answer differently."""
    digest = blake2b(digest_size=8)
    for name in _CODE:
        path = Path(str(files("kvrag") / name))
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(source.read_bytes())
    return digest.hexdigest()


def make_configs(labels: Iterable[str]) -> dict[str, BlendConfig]:
    """Return settings by policy; raises SettingError for one that does not exist."""
    return {label: BlendConfig(policy=label) for label in labels}


# -------------------------------------------------------------------- rows


def leave_out(row: QuestionRow, share: float) -> QuestionRow:
    """Return the row without a random share of its passages, which stay in its documents; at least one is kept."""
    rng = random.Random(f"{row.id} {row.question}")
    numbers = range(len(row.passages))
    kept = [number for number in numbers if rng.random() >= share] or [rng.choice(numbers)]
    names = row.documents or ("",) * len(row.passages)
    return replace(
        row,
        passages=tuple(row.passages[number] for number in kept),
        documents=tuple(names[number] if row.library else f"{row.key} {names[number]}" for number in kept),
        library=row.all_documents(),
    )


def rechunk(passages: Sequence[str], num_tokens: int, count: Callable[[str], int]) -> tuple[str, ...]:
    """Cut and join passages into chunks of about `num_tokens`, at most that many except for single words.

    Sentences stay whole where they fit; joined passages are separated by a blank line, as in the prompt.

    Args:
        count: Returns the number of tokens of a text.
    """
    chunks: list[str] = []
    current, filled = "", 0
    for passage in passages:
        is_first = True
        for piece in _pieces(passage.strip(), num_tokens, count):
            piece = f"\n\n{piece.lstrip()}" if is_first else piece
            is_first, size = False, count(piece)
            if current and filled + size > num_tokens:
                chunks.append(current)
                current, filled = "", 0
            current += piece if current else piece.lstrip()
            filled += size
    return tuple([*chunks, current] if current else chunks)


def _pieces(passage: str, num_tokens: int, count: Callable[[str], int]) -> list[str]:
    """Return sentences, or words where a sentence is too long; joined they are the passage."""
    pieces: list[str] = []
    for sentence in re.split(r"(?<=[.!?])(?=\s)", passage):
        pieces += [sentence] if count(sentence) <= num_tokens else re.findall(r"\s*\S+", sentence)
    return pieces
