"""Rows of `kvrag bench quality`: questions from a file, or prompts made of documents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.errors import KvragError

if TYPE_CHECKING:
    from kvrag.control.prompts import GapPrompt


@dataclass(frozen=True)
class Row:
    """A question about passages, and its accepted answers.

    `kind` groups results. `across`: whether the question depends on another passage than the one with the fact; None =
    unknown. `documents` names the document of each passage; empty = unknown. `library` has all chunks of these
    documents, in reading order; empty = the passages are all there are, in reading order. `supported`: whether the
    passages contain everything that the answer needs; None = unknown. `beginning`: the sentence that the answer
    completes, in place of a question. `context`: rows with the same one are not independent; empty = the passages.
    """

    id: str
    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    kind: str = ""
    across: bool | None = None
    documents: tuple[str, ...] = ()
    library: dict[str, tuple[str, ...]] = field(default_factory=dict)
    supported: bool | None = None
    beginning: str = ""
    context: str = ""

    @property
    def key(self) -> str:
        """The id with a hash of the content, so that results of one row are never used for another."""
        content = asdict(self)
        del content["context"]
        if not self.library:  # the key selects the passages that `--missing` leaves out: keep it as it was
            del content["library"], content["supported"]
        if not self.beginning:
            del content["beginning"]
        digest = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=6)
        return f"{self.id}#{digest.hexdigest()}"


def file_rows(path: Path, count: int) -> list[Row]:
    """Read the first `count` rows of a file of JSON lines.

    Each is an object with `passages`, `question`, `answers`, and optionally `id`, `kind`, `across`, `documents`,
    `library` and `supported`; see `Row`. A document has the same chunks in the libraries of all rows.

    Raises:
        KvragError: The file or a row is invalid; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise KvragError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KvragError(f"{path} is not UTF-8 text: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    rows = [_file_row(line, f"{path}, line {number}", str(number)) for number, line in numbered]
    if not rows:
        raise KvragError(f"{path} is empty: write one JSON object per line, with passages, question and answers")
    seen: set[str] = set()
    library: dict[str, tuple[str, ...]] = {}
    for (number, _), row in zip(numbered, rows, strict=True):
        if row.id in seen:
            raise KvragError(f"{path}, line {number}: duplicate id {row.id!r}")
        seen.add(row.id)
        for name, chunks in row.library.items():
            if library.setdefault(name, chunks) != chunks:
                raise KvragError(f"{path}, line {number}: the document {name!r} has other chunks in an earlier line")
    return rows[:count]


def _file_row(line: str, where: str, number: str) -> Row:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise KvragError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise KvragError(f"{where}: expected a JSON object with passages, question and answers")
    for name in ("passages", "answers"):
        if not _texts(fields.get(name)):
            raise KvragError(f"{where}: {name!r} must be a list of non-empty strings")
    if not _texts([fields.get("question")]):
        raise KvragError(f"{where}: 'question' must be a non-empty string")
    kind, across = fields.get("kind", ""), fields.get("across")
    if not isinstance(kind, str) or not isinstance(across, (bool, type(None))):
        raise KvragError(f"{where}: 'kind' must be a string and 'across' true or false")
    documents = fields.get("documents", [])
    if documents and not (_texts(documents) and len(documents) == len(fields["passages"])):
        raise KvragError(f"{where}: 'documents' must have a name for every passage")
    library, supported = fields.get("library", {}), fields.get("supported")
    if not isinstance(library, dict) or not all(map(_texts, library.values())):
        raise KvragError(f"{where}: 'library' must be an object with a list of non-empty strings for every document")
    if library and not all(
        passage in library.get(name, ()) for name, passage in zip_longest(documents, fields["passages"])
    ):
        raise KvragError(f"{where}: 'library' must have every passage, under its name in 'documents'")
    if not isinstance(supported, (bool, type(None))):
        raise KvragError(f"{where}: 'supported' must be true or false")
    return Row(
        str(fields.get("id", number)),
        tuple(fields["passages"]),
        fields["question"],
        tuple(fields["answers"]),
        kind,
        across,
        tuple(documents),
        {name: tuple(chunks) for name, chunks in library.items()},
        supported,
    )


def document_rows(prompts: Sequence[GapPrompt]) -> list[Row]:
    """Return rows for prompts made of documents; the accepted answer is the first word of what is missing."""
    return [
        Row(
            f"{made.gap.kind}-{number}",
            made.chunks,
            "",
            (made.gap.word,),
            made.gap.kind,
            made.across,
            beginning=made.gap.beginning,
            context=made.gap.sentence,
        )
        for number, made in enumerate(prompts)
    ]


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text.strip() for text in value)


def rechunk(passages: Sequence[str], num_tokens: int, count: Callable[[str], int]) -> tuple[str, ...]:
    """Cut and join passages into chunks of about `num_tokens`, at most that many except for single words.

    Sentences stay whole where they fit; joined passages are separated by a blank line, as in the prompt.

    Args:
        count: Returns the number of tokens of a text.
    """
    chunks: list[str] = []
    current, filled = "", 0
    for passage in passages:
        start = True
        for piece in _pieces(passage.strip(), num_tokens, count):
            piece = f"\n\n{piece.lstrip()}" if start else piece
            start, size = False, count(piece)
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
