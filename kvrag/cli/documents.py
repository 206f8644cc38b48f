"""Reading files and splitting their texts into chunks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvrag.errors import KvragError

SUFFIXES = (".txt", ".md", ".html", ".htm", ".pdf", ".jsonl")
_LARGEST = 1 << 30  # splitting a text takes several times its size in memory


class UnreadableError(KvragError):
    """A file without readable text. The message gives the reason without the file's name."""


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files among the paths, and the files with known suffixes in the folders, except hidden ones.

    Raises:
        KvragError: A path does not exist, or no file was found.
    """
    found: dict[Path, None] = {}
    wanted = [Path(path) for path in paths]
    for path in wanted:
        if path.is_dir():
            inside = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES and file.is_file())
            found |= {
                file.resolve(): None
                for file in inside
                if not any(part.startswith(".") for part in file.relative_to(path).parts)
            }
        elif path.exists():
            found[path.resolve()] = None
        else:
            raise KvragError(f"{path} does not exist: check the path")
    if not found:
        raise KvragError(f"no files with text in {', '.join(map(str, wanted))} (looked for {' '.join(SUFFIXES)})")
    return list(found)


def read(path: Path, text_field: str = "text") -> list[str]:
    """Return the texts of a file: one, or one per line of a .jsonl file.

    Raises:
        UnreadableError: The file is not text, broken, empty, or too large.
    """
    readers: dict[str, Callable[[], list[str]]] = {
        ".html": lambda: [_html(path)],
        ".htm": lambda: [_html(path)],
        ".pdf": lambda: [_pdf(path)],
        ".jsonl": lambda: _jsonl(path, text_field),
    }
    try:
        if path.stat().st_size > _LARGEST:
            raise UnreadableError("the file is larger than 1 GiB: split it")
        texts = readers.get(path.suffix.lower(), lambda: [_text(path)])()
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UnreadableError("the file contains no text")
    return texts


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
    try:
        from langchain_text_splitters import RecursiveCharacterTextSplitter
    except ImportError as error:
        raise _missing_extra(error) from None
    split = RecursiveCharacterTextSplitter(chunk_size=chunk_tokens, chunk_overlap=overlap, length_function=count)
    return lambda texts: [chunk for text in texts for chunk in split.split_text(text)]


def _text(path: Path) -> str:
    content = path.read_bytes()
    if b"\0" in content:
        raise UnreadableError("the file is binary: convert it to .txt, .html or .pdf")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(
            f"the file is not UTF-8 text (byte {error.start}): convert it, for example with iconv"
        ) from None


def _html(path: Path) -> str:
    try:
        from bs4 import BeautifulSoup
    except ImportError as error:
        raise _missing_extra(error) from None
    soup = BeautifulSoup(_text(path), "html.parser")
    for tag in soup(["script", "style", "noscript"]):
        tag.decompose()
    return soup.get_text("\n", strip=True)


def _pdf(path: Path) -> str:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise _missing_extra(error) from None
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns about many valid PDFs
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(path).pages)
    except OSError:
        raise
    except Exception as error:  # pypdf raises various types: KeyError, RecursionError, zlib.error
        raise UnreadableError(f"it is a broken or protected PDF ({type(error).__name__}: {error})") from error


def _jsonl(path: Path, text_field: str) -> list[str]:
    texts = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[text_field]
        except (ValueError, KeyError, TypeError):
            raise UnreadableError(
                f"line {number} is not a JSON object with a field {text_field!r} (see --text-field)"
            ) from None
        if not isinstance(text, str):
            raise UnreadableError(f"{text_field!r} in line {number} must be a string, got {type(text).__name__}")
        texts.append(text)
    return texts


def _missing_extra(error: ImportError) -> KvragError:
    return KvragError(f"{error.name or error} is not installed: pip install 'kvrag[cli]'")
