"""Reading files and splitting their texts into chunks."""

from __future__ import annotations

import codecs
import csv
import json
import logging
import os
import re
import unicodedata
import zipfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO, StringIO
from itertools import accumulate, groupby, islice, zip_longest
from pathlib import Path
from typing import Any

from kvrag.errors import KvragError, needing

_EXTRA = "kvrag[cli]"
SUFFIXES = (".txt", ".md", ".html", ".htm", ".pdf", ".docx", ".csv", ".jsonl")
_MAX_BYTES = 1 << 30  # splitting a text takes several times its size in memory
_MAX_XML_BYTES = 64 << 20  # in a .docx: parsed XML takes about 20 times its size
_MAX_LINES = 100  # skipped lines of a file that are listed
_SAMPLE = 200  # lines to guess an encoding from
_PLAUSIBLE = 1 << 16  # characters to check a guess with
_WORD = 32  # characters of a word whose length in tokens is remembered

_ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r", "mac_roman"),
    *("cp932", "euc_jp", "gb18030", "big5", "euc_kr"),
)
_BOMS = {  # UTF-32's begin with UTF-16's
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_OLD_OFFICE = b"\xd0\xcf\x11\xe0"
_NOT_TEXT = (b"%PDF-", b"PK\3\4", _OLD_OFFICE)


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
    """

    file: str
    texts: list[str] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _num_lines: int = 0

    def note(self, message: str, line: int | None = None) -> None:
        """Add a problem. Only the first 100 lines are listed."""
        self._num_lines += line is not None
        if line is None or self._num_lines <= _MAX_LINES:
            self.problems.append(Problem(self.file, message, line))


class _UnreadableError(Exception):
    """A file or a line without readable text. The message gives the reason."""


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


def read(path: Path, text_field: str = "text") -> Content:
    """Read a file. Its problems are listed, not raised.

    Args:
        text_field: Field with the text, in the objects of .jsonl files.

    Raises:
        KvragError: A package for its kind is not installed.
    """
    content = Content(_without_surrogates(str(path)))
    try:
        if not path.is_file():  # reading a device or a pipe may never end
            content.note("skipped: it is not a regular file")
        elif content.file != str(path):
            content.note("skipped: its name is not valid in this locale's encoding: rename it, or set LC_ALL=C.UTF-8")
        elif path.stat().st_size > _MAX_BYTES:
            content.note("skipped: the file is larger than 1 GiB: split it")
        else:
            return parse(str(path), path.suffix, path.read_bytes(), text_field)
    except OSError as error:
        content.problems.append(_unreadable(error))
    return content


def parse(name: str, kind: str, content: bytes, text_field: str = "text") -> Content:
    """Read the content of a file; see `read`.

    Args:
        name: Its name in the list of problems.
        kind: Its suffix, such as ".pdf". Unknown kinds are read as text.
    """
    parsed = Content(name)
    try:
        kind = kind.lower()
        texts = (
            _jsonl(content, parsed, text_field) if kind == ".jsonl" else [_READERS.get(kind, _text)(content, parsed)]
        )
        parsed.texts = [_without_surrogates(text) for text in texts if text.strip()]
        if not parsed.texts and not parsed._num_lines:
            raise _UnreadableError("the file contains no text")
    except _UnreadableError as error:
        parsed.note(f"skipped: {error}")
    except KvragError:  # a package is not installed
        raise
    except Exception as error:  # pypdf, python-docx, zipfile, lxml and html.parser raise various types
        parsed.note(f"skipped: it is a broken or protected {kind[1:].upper()} file ({type(error).__name__}: {error})")
    if parsed._num_lines > _MAX_LINES:
        parsed.note(f"skipped: {parsed._num_lines - _MAX_LINES} more lines")
    return parsed


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
    with needing(_EXTRA):
        from langchain_text_splitters import RecursiveCharacterTextSplitter
    of_word = lru_cache(1 << 16)(count)  # a long line is measured word by word
    split = RecursiveCharacterTextSplitter(
        chunk_size=chunk_tokens,
        chunk_overlap=overlap,
        length_function=lambda text: of_word(text) if len(text) <= _WORD else count(text),
    )
    return lambda texts: [chunk for text in texts for chunk in split.split_text(text)]


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


# ---------------------------------------------------------------- encodings


def _text(content: bytes, parsed: Content, declared: str | None = None) -> str:
    """Decode text. A guessed encoding is noted.

    Args:
        declared: Encoding that the file names.
    """
    if content.startswith(_NOT_TEXT):
        raise _UnreadableError("it is a PDF, an archive or an Office document: give its name the suffix .pdf or .docx")
    bom = next(filter(content.startswith, _BOMS), None)
    for encoding in [_BOMS[bom]] if bom else ["utf-8", *filter(None, [declared])]:
        if (text := _decode_or_none(content, encoding)) is not None:
            return text
    for encoding in () if bom else _guesses(content):
        if (text := _decode_or_none(content, encoding)) is not None and _is_plausible(text):
            parsed.note(f"not in UTF-8: read as {encoding}, a guess; save it as UTF-8 if characters are wrong")
            return text
    raise _UnreadableError("the file is binary: extract its text, for example with OCR from images (tesseract)")


def _is_plausible(text: str) -> bool:
    """Return whether the text has no control characters and no characters that do not exist."""
    letters = set(text[:_PLAUSIBLE])
    return not any(unicodedata.category(letter) in ("Cc", "Cn", "Co") and not letter.isspace() for letter in letters)


def _decode_or_none(content: bytes, encoding: str) -> str | None:
    try:
        text = content.decode(encoding)
    except (UnicodeError, LookupError):
        return None
    return None if "\0" in text else text


def _guesses(content: bytes) -> Iterator[str]:
    """Yield likely encodings of text that is not UTF-8, the likeliest first."""
    if b"\0" in content:
        # in UTF-16, one half of every ASCII character is 0
        is_little = content[1::2].count(0) > content[::2].count(0)
        yield "utf-16-le" if is_little else "utf-16-be"
        return
    with needing(_EXTRA):
        from charset_normalizer import from_bytes
    high = re.compile(rb"[\x80-\xff]")
    starts = ((line, first.start()) for line in BytesIO(content) if (first := high.search(line)))
    sample = b"".join(line[start : start + 4096] for line, start in islice(starts, _SAMPLE))
    for match in from_bytes(sample, cp_isolation=list(_ENCODINGS), enable_fallback=False):
        yield match.encoding


def _without_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which tokenizers reject. JSON and PDFs may contain them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# ---------------------------------------------------------------- kinds of files


def _html(content: bytes, parsed: Content) -> str:
    with needing(_EXTRA):
        from bs4 import BeautifulSoup
        from bs4.dammit import EncodingDetector
    text = _text(content, parsed, EncodingDetector.find_declared_encoding(content, is_html=True))
    soup = BeautifulSoup(text, "html.parser")
    for tag in soup(["script", "style", "noscript"]):
        tag.decompose()
    return str(soup.get_text("\n", strip=True))


def _pdf(content: bytes, parsed: Content) -> str:
    with needing(_EXTRA):
        from pypdf import PdfReader
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns about many valid PDFs
    pages = [_without_surrogates(page.extract_text()) + "\n\n" for page in PdfReader(BytesIO(content)).pages]
    if not any(page.strip() for page in pages):
        raise _UnreadableError("the PDF has no text, only images: run OCR first, for example with ocrmypdf")
    parsed.pages = list(accumulate(map(len, pages[:-1]), initial=0))
    return "".join(pages).removesuffix("\n\n")


def _docx(content: bytes, parsed: Content) -> str:
    with needing(_EXTRA):
        from docx import Document
    if content.startswith(_OLD_OFFICE):
        raise _UnreadableError("it is protected by a password, or a .doc file: save it as .docx without a password")
    # unpacking stops at these sizes
    sizes = {info.filename: info.file_size for info in zipfile.ZipFile(BytesIO(content)).infolist()}
    xml = sum(size for name, size in sizes.items() if name.endswith((".xml", ".rels")))
    if sum(sizes.values()) > _MAX_BYTES or xml > _MAX_XML_BYTES:
        raise _UnreadableError("the document is larger than 64 MiB of text or 1 GiB when unpacked: split it")
    return "\n\n".join(_blocks(Document(BytesIO(content))))


def _blocks(container: Any) -> Iterator[str]:
    """Yield the paragraphs and the tables of a Word document or of a table cell."""
    for block in container.iter_inner_content():
        if not hasattr(block, "rows"):
            yield block.text
            continue
        rows = []
        for row in block.rows:
            cells = [next(same) for _, same in groupby(row.cells, key=lambda cell: cell._tc)]  # merged cells repeat
            rows.append(" | ".join(" ".join(_blocks(cell)) for cell in cells))
        yield "\n".join(rows)


def _csv(content: bytes, parsed: Content) -> str:
    """Return one text, in which each row is a paragraph of lines `column: value`."""
    lines = StringIO(_text(content, parsed), newline=None)

    def columns(delimiter: str) -> int:
        lines.seek(0)
        with suppress(csv.Error):
            return len(next((row for row in csv.reader(lines, delimiter=delimiter) if any(row)), []))
        return 0

    delimiter = max(",;\t|", key=columns)  # of the header, which contains few of the others outside of quotes
    lines.seek(0)
    rows = _rows(csv.reader(lines, delimiter=delimiter), parsed)
    header = next(rows, [])
    paragraphs = []
    for row in rows:
        fields = zip_longest(header, row, fillvalue="")
        paragraphs.append("\n".join(f"{name}: {value}" if name else value for name, value in fields if value))
    return "\n\n".join(filter(None, paragraphs))


def _rows(reader: Any, parsed: Content) -> Iterator[list[str]]:
    """Yield the rows that are not empty. A row that cannot be read is noted."""
    while True:
        start = reader.line_num + 1
        try:
            row = [value.strip() for value in next(reader)]
        except StopIteration:
            return
        except csv.Error as error:  # a field is too long, mostly because of a quote that is not closed
            parsed.note(f"skipped: the row cannot be read ({error}): check its quotes", start)
            continue
        if any(row):
            yield row


def _jsonl(content: bytes, parsed: Content, text_field: str) -> list[str]:
    texts = []
    for number, line in enumerate(_text(content, parsed).split("\n"), 1):
        try:
            value = json.loads(line) if line.strip() else {text_field: ""}
        except (ValueError, RecursionError) as error:
            parsed.note(f"skipped: it is not JSON ({error})", number)
            continue
        text = value.get(text_field) if isinstance(value, dict) else None
        if isinstance(text, str):
            texts.append(text)
        else:
            parsed.note(f"skipped: it is not a JSON object with a text in the field {text_field!r}", number)
    return texts


_READERS: dict[str, Callable[[bytes, Content], str]] = {
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
    ".docx": _docx,
    ".csv": _csv,
}
