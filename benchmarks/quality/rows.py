"""Rows of `python -m benchmarks answers`: questions from a file, or prompts made from documents."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.errors import KvragError

if TYPE_CHECKING:
    from kvrag.control.prompts import Gap


def existing_path(text: str) -> Path:
    """Type for argparse: the path of an existing file or folder."""
    if not Path(text).expanduser().exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist: check the path")
    return Path(text).expanduser()


@dataclass(frozen=True)
class QuestionRow:
    """A question about passages, and its accepted answers.

    Attributes:
        kind: Groups results.
        documents: The document of each passage; empty = unknown.
        library: All chunks of these documents, in reading order; empty = the passages are all there are, in reading
            order.
        beginning: The sentence that the answer completes, instead of a question.
        context: Rows with the same context are not independent; empty = the passages.
    """

    id: str
    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    kind: str = ""
    documents: tuple[str, ...] = ()
    library: dict[str, tuple[str, ...]] = field(default_factory=dict)
    beginning: str = ""
    context: str = ""

    @property
    def key(self) -> str:
        """The id with a hash of the content, so that results of one row are never used for another."""
        content = asdict(self)
        del content["context"]  # it changes intervals, not answers
        return f"{self.id}#{blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=6).hexdigest()}"

    def all_documents(self) -> dict[str, tuple[str, ...]]:
        """Return all chunks of the row's documents by name, in reading order."""
        if self.library:
            return self.library
        chunks: dict[str, tuple[str, ...]] = {}
        for passage, document in zip(self.passages, self.documents or [""] * len(self.passages), strict=True):
            name = f"{self.key} {document}"
            chunks[name] = (*chunks.get(name, ()), passage)
        return chunks


def file_rows(path: Path, count: int) -> list[QuestionRow]:
    """Read the first `count` rows of a file of JSON lines.

    Each is an object with `passages`, `question`, `answers`, and optionally `id`, `kind`, `documents` and `library`;
    see `QuestionRow`. Those of KVShareArena's files (`_id`, `chunks`, `input`, `answers`) are read, too.

    Raises:
        KvragError: The file or a row is invalid; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise KvragError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KvragError(f"{path} is not UTF-8 text: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_file_row(line, str(number)))
            except KvragError as error:
                raise KvragError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise KvragError(f"{path} is empty: write one JSON object per line, with passages, question and answers")
    return rows[:count]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


_FIELDS: dict[str, tuple[Callable[[Any], bool], str, Any]] = {  # check, what it must be, default
    "passages": (_are_texts, "a list of non-empty strings", None),
    "question": (_is_text, "a non-empty string", None),
    "answers": (_are_texts, "a list of non-empty strings", None),
    "kind": (lambda value: isinstance(value, str), "a string", ""),
    "documents": (lambda value: value == [] or _are_texts(value), "a list of non-empty strings", []),
    "library": (
        lambda value: isinstance(value, dict) and all(map(_are_texts, value.values())),
        "an object with a list of non-empty strings for every document",
        {},
    ),
}
_ARENA = {"_id": "id", "chunks": "passages", "input": "question"}


def _file_row(line: str, number: str) -> QuestionRow:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise KvragError(f"not JSON ({error})") from error
    if not isinstance(content, dict):
        raise KvragError("expected a JSON object with passages, question and answers")
    content = {_ARENA.get(name, name): value for name, value in content.items()}
    fields = {name: content.get(name, default) for name, (_, _, default) in _FIELDS.items()}
    for name, (is_valid, what, _) in _FIELDS.items():
        if not is_valid(fields[name]):
            raise KvragError(f"{name!r} must be {what}")
    passages, documents, library = fields["passages"], fields["documents"], fields["library"]
    if documents and len(documents) != len(passages):
        raise KvragError("'documents' must have a name for every passage")
    if library and not all(text in library.get(name, ()) for name, text in zip_longest(documents, passages)):
        raise KvragError("'library' must have every passage, under its name in 'documents'")
    return QuestionRow(
        id=str(content.get("id", number)),
        passages=tuple(passages),
        question=fields["question"],
        answers=tuple(fields["answers"]),
        kind=fields["kind"],
        documents=tuple(documents),
        library={name: tuple(chunks) for name, chunks in library.items()},
    )


def document_rows(prompts: Sequence[Gap]) -> list[QuestionRow]:
    """Return rows for prompts made from documents; the accepted answer is the first word of what is missing."""
    return [
        QuestionRow(
            f"{prompt.kind}-{number}",
            prompt.chunks,
            "",
            (prompt.word,),
            prompt.kind,
            beginning=prompt.beginning,
            context=prompt.sentence,
        )
        for number, prompt in enumerate(prompts)
    ]
