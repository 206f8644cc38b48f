"""Content of a file that was read: texts and problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvrag.errors import KvragError, out_of_memory, reason_of

MAX_PROBLEMS = 100  # of a file that are listed


class UnreadableError(Exception):
    """A file, a part of it or a line without readable text. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A part of a file that was skipped or guessed.

    Attributes:
        line: Line number in the file, from 1; None = the whole file.
        is_unreadable: The system refused access to the file or folder.
    """

    file: str
    message: str
    line: int | None = None
    is_unreadable: bool = False

    def __str__(self) -> str:
        return f"{self.file}{'' if self.line is None else f', line {self.line}'}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"file": self.file, "message": self.message, "line": self.line}


@dataclass(slots=True)
class Content:
    """Texts of a file, none if it could not be read, and its problems.

    Attributes:
        pages: Offsets at which the pages of a PDF begin in its text; empty for other kinds.
        lost: What is shown and not read, and how often.
    """

    file: str
    texts: list[str] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter, repr=False)
    _num_problems: int = 0
    _part: str = ""

    def note(self, message: str, line: int | None = None) -> None:
        """Add a problem. Only the first 100 are listed."""
        self._num_problems += 1
        if self._num_problems <= MAX_PROBLEMS:
            self.problems.append(Problem(self.file, f"{self._part}{message}", line))

    @contextmanager
    def part(self, name: str, what: str = "it is broken") -> Iterator[None]:
        """Name a part of the file, or "", in its problems. If it cannot be read, note that, and go on.

        Raises:
            KvragError: A package is not installed.
            MemoryError: The file is to blame, not the part.
        """
        outer, named = self._part, f"{name}: " * bool(name)
        self._part = named
        try:
            yield
        except Exception as error:  # pypdf, zipfile and lxml raise various types
            if isinstance(error, KvragError):
                raise
            if out_of_memory(error) or "ERR_NO_MEMORY" in str(getattr(error, "error_log", "")):  # lxml's
                raise MemoryError from error
            why = str(error) if isinstance(error, UnreadableError) else f"{what} ({reason_of(error)})"
            self._part = named  # that of a generator may be left
            self.note(f"skipped: {why}")
        finally:
            self._part = outer
