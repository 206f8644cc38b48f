"""Reading files and splitting their texts into chunks."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from kvrag.errors import KvragError, needing
from kvrag.retrieval import formats
from kvrag.retrieval.content import MAX_PROBLEMS, Content, Problem, UnreadableError
from kvrag.retrieval.formats import EXTRA, READERS, without_surrogates

SUFFIXES = (".txt", ".md", *READERS, ".jsonl")
_MAX_TEXT = 64 << 20  # characters; repeated cells, column names and pages make a text longer than its file
_MAX_BYTES = 1 << 30  # splitting a text takes several times its size in memory
_WORD = 32  # characters of a word whose length in tokens is remembered


def find(paths: Iterable[str | Path]) -> tuple[list[Path], list[Problem]]:
    """Return the files among the paths, and the files with known suffixes in the folders, except hidden ones.

    The problems list the files that were left out.

    Raises:
        KvragError: A path does not exist, or no file was found.
    """
    files: dict[Path, None] = {}
    problems: list[Problem] = []
    empty: list[Problem] = []
    roots = [Path(path) for path in paths]
    for path in roots:
        if path.is_dir():
            if not (found := _find_in(path, problems)):
                why = "skipped: it has no files with text: is a disk not mounted? Else forget its documents"
                empty.append(Problem(str(path.absolute()), why, is_unreadable=True))
            files |= dict.fromkeys(found)
        elif path.exists():
            files[path.resolve()] = None
        else:
            raise KvragError(f"{path} does not exist{' or is a broken link' * path.is_symlink()}: check the path")
    if not files:
        why = "".join(f"; {problem}" for problem in problems if problem.is_unreadable)
        raise KvragError(f"no files with text in {', '.join(map(str, roots))} (looked for {' '.join(SUFFIXES)}){why}")
    return list(files), problems + empty


def _find_in(folder: Path, problems: list[Problem]) -> list[Path]:
    """Return the files with known suffixes in a folder; add those left out to `problems`."""
    names: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=lambda error: problems.append(_unreadable(error))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [Path(parent, name) for name in files if not name.startswith(".")]
    found, others = [], Counter[str]()
    for file in sorted(names):
        suffix = file.suffix.lower()
        try:
            if suffix not in SUFFIXES:
                others[suffix or "without suffix"] += 1
            elif file.is_symlink() and not file.exists():
                problems.append(Problem(str(file.absolute()), "skipped: the link is broken"))
            elif file.stat():
                found.append(file.resolve())
        except OSError as error:
            problems.append(_unreadable(error))
    if others:
        kinds = ", ".join(f"{number} {suffix}" for suffix, number in others.most_common())
        reason = f"skipped: files of other kinds ({kinds}): to read one as text, name the file itself"
        problems.append(Problem(str(folder.resolve()), reason))
    return found


def _unreadable(error: OSError) -> Problem:
    return Problem(os.path.abspath(error.filename), f"skipped: {error.strerror or error}", is_unreadable=True)


def parse(name: str, kind: str, content: bytes) -> Content:
    """Read the content of a file. Its problems are listed, not raised.

    Args:
        name: Its name in the list of problems.
        kind: Its suffix, such as ".pdf". Unknown kinds are read as text.

    Raises:
        KvragError: A package for its kind is not installed.
        MemoryError: Reading it takes too much.
    """
    parsed = Content(name)
    kind = kind.lower()
    with parsed.part("", f"it is a broken or protected {kind[1:].upper()} file"):
        if kind == ".jsonl":
            texts = formats.jsonl(content, parsed)
        else:
            texts = [READERS.get(kind, formats.as_text)(content, parsed)]
        if sum(map(len, texts)) > _MAX_TEXT + 8 * len(content):
            raise UnreadableError("its text is far larger than the file, by repeated cells, names or pages: split it")
        parsed.texts = [without_surrogates(text) for text in texts if text.strip()]
        for what, number in parsed.lost.items():
            parsed.note(f"skipped: {number} {what}")
        if not parsed.texts and not any("skipped" in problem.message for problem in parsed.problems):
            raise UnreadableError("the file contains no text")
    if (more := parsed._num_problems - MAX_PROBLEMS) > 0:
        what = "parts" if parsed.problems[-1].line is None else "lines"
        parsed.problems.append(Problem(name, f"skipped: {more} more {what}"))
    return parsed


def read(path: Path, parse: Callable[[str, str, bytes], Content] = parse) -> Content:
    """Read a file; see `parse`.

    Args:
        parse: Reads its content: `parse` in this process, `Sandbox.parse` in a child process with limits.
    """
    content = Content(without_surrogates(str(path)))
    try:
        if not path.is_file():  # reading a device or a pipe may never end
            content.note("skipped: it is not a regular file")
        elif content.file != str(path):
            content.note("skipped: its name is not valid in this locale's encoding: rename it, or set LC_ALL=C.UTF-8")
        elif path.stat().st_size > _MAX_BYTES:
            content.note("skipped: the file is larger than 1 GiB: split it")
        else:
            return parse(str(path), path.suffix, path.read_bytes())
    except OSError as error:
        content.problems.append(_unreadable(error))
    return content


def check_lengths(chunk_tokens: int, overlap: int) -> None:
    """Raise KvragError if chunks cannot have this length and overlap."""
    if chunk_tokens < 1 or not 0 <= overlap < chunk_tokens:
        raise KvragError(f"chunks of {chunk_tokens} tokens cannot overlap by {overlap}: raise --chunk-tokens")


def splitter(count: Callable[[str], int], chunk_tokens: int, overlap: int) -> Callable[[Sequence[str]], list[str]]:
    """Return a function that splits texts into chunks of at most `chunk_tokens`, measured by `count`.

    Raises:
        KvragError: The lengths are contradictory, or the splitter is not installed.
    """
    check_lengths(chunk_tokens, overlap)
    with needing(EXTRA):
        from kvrag.retrieval.split import MarkdownSplitter
    of_word = lru_cache(1 << 16)(count)  # a long line is measured word by word

    def length(text: str) -> int:
        return of_word(text) if len(text) <= _WORD else count(text)

    def split(text: str, size: int) -> list[str]:
        chunks = MarkdownSplitter(chunk_size=size, chunk_overlap=min(overlap, size - 1), length_function=length)
        found = chunks.split_text(text)
        excess = max(map(length, found), default=0) - chunk_tokens
        return found if excess <= 0 or excess >= size else split(text, size - excess)

    return lambda texts: [chunk for text in texts for chunk in split(text, chunk_tokens)]


def page_numbers(chunks: Sequence[str], texts: Sequence[str], pages: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return the first and the last page of each chunk, from 1; for a repeated chunk, of its first occurrence.

    Args:
        chunks: The chunks of `texts`, in order.
        texts, pages: Of a `Content`.
    """
    numbers: dict[str, tuple[int, int]] = {}
    start, stop = -1, 0
    for chunk in chunks if pages else ():
        # chunks may overlap, but each ends after the previous one
        at = texts[0].find(chunk, max(start + 1, stop - len(chunk) + 1))
        if at >= 0:
            start, stop = at, at + len(chunk)
            numbers.setdefault(chunk, (bisect_right(pages, start), bisect_right(pages, stop - 1)))
    return numbers
