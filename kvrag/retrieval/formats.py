"""Texts of files, by kind.

A reader takes the content of a file and its `Content`, to which it adds problems; it returns the text. Files may be
hostile: no reader trusts the numbers in a file.
"""

from __future__ import annotations

import codecs
import csv
import json
import logging
import posixpath
import re
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sized
from io import BytesIO, StringIO
from itertools import accumulate, islice, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from kvrag.errors import needing

if TYPE_CHECKING:
    from kvrag.retrieval.documents import Content

Part = TypeVar("Part", bound=Sized)

EXTRA = "kvrag[cli]"
MAX_BYTES = 1 << 30  # splitting a text takes several times its size in memory
_MAX_XML_BYTES = 64 << 20  # in an Office document: parsed XML takes about 20 times its size
_MAX_TEXT = 64 << 20  # characters or cells; repeated cells, column names and pages make a text longer than its file
_MAX_RATIO = 100  # of an archive: Office documents shrink to a tenth
_MAX_ROWS = 1 << 20  # of a sheet, as in Excel
_SAMPLE = 200  # lines to guess an encoding from
_PLAUSIBLE = 1 << 16  # characters to check a guess with
_CSV_SAMPLE = 1 << 16  # characters to guess a delimiter from

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
_DECLARED = re.compile(rb"<(?:meta|\?xml)\b[^>]{0,200}?(?:charset|encoding)\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
_ZIP, _OLD_OFFICE = b"PK\3\4", b"\xd0\xcf\x11\xe0"
_OLD = "it is protected by a password, or an old .doc, .xls or .ppt: save it as .docx without a password (.xlsx, .pptx)"

# local names of elements: HTML's, PowerPoint's (tbl, tc, fld) and OpenDocument's (table-row)
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "br", "caption", "center", "dd", "details", "dialog", "div"),
    *("dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h", "h1", "h2", "h3", "h4", "h5", "h6"),
    *("head", "header", "hr", "legend", "li", "line-break", "main", "menu", "nav", "ol", "optgroup", "option", "p"),
    *("pre", "search", "section", "select", "summary", "tbody", "tfoot", "thead", "title", "ul"),
}
_TABLES, _ROWS, _CELLS = {"table", "tbl"}, {"tr", "table-row"}, {"td", "th", "tc", "table-cell"}
_HIDDEN = {
    *("script", "style", "noscript", "template"),
    *("tracked-changes", "annotation", "timing", "Fallback", "fld", "tableStyleId"),
}


class UnreadableError(Exception):
    """A file or a line without readable text. The message gives the reason."""


# ---------------------------------------------------------------- encodings


def as_text(content: bytes, parsed: Content, declared: str | None = None) -> str:
    """Decode text. A guessed encoding is noted.

    Args:
        declared: Encoding that the file names.
    """
    if kind := _kind_of(content):
        raise UnreadableError(kind)
    bom = next(filter(content.startswith, _BOMS), None)
    for encoding in [_BOMS[bom]] if bom else ["utf-8", *filter(None, [declared])]:
        if (text := _decode_or_none(content, encoding)) is not None:
            return text
    for encoding in () if bom else _guesses(content):
        if (text := _decode_or_none(content, encoding)) is not None and _is_plausible(text):
            parsed.note(f"not in UTF-8: read as {encoding}, a guess; save it as UTF-8 if characters are wrong")
            return text
    raise UnreadableError("the file is binary: extract its text, for example with OCR from images (tesseract)")


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
    with needing(EXTRA):
        from charset_normalizer import from_bytes
    high = re.compile(rb"[\x80-\xff]")
    starts = ((line, first.start()) for line in BytesIO(content) if (first := high.search(line)))
    sample = b"".join(line[start : start + 4096] for line, start in islice(starts, _SAMPLE))
    for match in from_bytes(sample, cp_isolation=list(_ENCODINGS), enable_fallback=False):
        yield match.encoding


def without_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which tokenizers reject. JSON and PDFs may contain them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _kind_of(content: bytes) -> str:
    """Return what to do about a file that is no text and has the name of one; "" if it may be text."""
    if content.startswith(b"%PDF-"):
        return "it is a PDF: give its name the suffix .pdf"
    if content.startswith(_OLD_OFFICE):
        return _OLD
    if content.startswith(_ZIP):
        known = [suffix for suffix, (part, _) in _ZIPPED.items() if part in content]  # names are not compressed
        if len(known) == 1:
            return f"it is an Office document or a book: give its name the suffix {known[0]}"
        return f"it is an archive: extract its files ({' '.join(READERS)} and text are read)"
    return ""


# ---------------------------------------------------------------- bounds


def _within(parts: Iterable[Part], content: bytes) -> Iterator[Part]:
    """Yield texts, or rows of cells, as long as together they are not much longer than the file."""
    left = _MAX_TEXT + 8 * len(content)
    for part in parts:
        left -= len(part)
        if left < 0:
            raise UnreadableError("its text is far larger than the file, by repeated cells, names or pages: split it")
        yield part


def _unzipped(content: bytes, streamed: str = "/") -> zipfile.ZipFile:
    """Open an archive whose files unpack to a bounded size. `zipfile` stops at the sizes that the archive names.

    Args:
        streamed: Folder whose XML is not parsed as a whole.
    """
    if content.startswith(_OLD_OFFICE):
        raise UnreadableError(_OLD)
    archive = zipfile.ZipFile(BytesIO(content))
    members = archive.infolist()
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise UnreadableError("its parts are compressed in an unusual way: save it anew")  # may take gigabytes
    parts = {member.filename: member.file_size for member in members}
    xml = (size for name, size in parts.items() if name.endswith((".xml", ".rels")) and not name.startswith(streamed))
    if sum(parts.values()) > min(MAX_BYTES, _MAX_XML_BYTES + _MAX_RATIO * len(content)) or sum(xml) > _MAX_XML_BYTES:
        raise UnreadableError("the document is larger than 64 MiB of text or 1 GiB when unpacked: split it")
    return archive


# ---------------------------------------------------------------- markup


class _Lines:
    """Target of an lxml parser: blocks become lines, table rows become lines of cells. Builds no tree."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line: list[str] = []
        self._tables: list[list[list[str]]] = []  # of each open table, the lines of each cell of the open row
        self._hidden = self._pre = 0

    def start(self, tag: str, attributes: object) -> None:
        """Begin an element."""
        name = tag.rpartition("}")[2]
        if self._hidden or name in _HIDDEN:
            self._hidden += 1
        elif name in _TABLES:
            self._end_line()
            if self._tables:  # a row with a table in it is layout
                self._end_row(is_layout=True)
            self._tables.append([])
        elif name in _CELLS and self._tables:
            self._end_line()
            self._tables[-1].append([])
        elif name in _BLOCKS or name in _ROWS or name in _CELLS:
            self._end_line()
            self._pre += name == "pre"
        elif name == "tab":
            self._line.append(" ")

    def end(self, tag: str) -> None:
        """End an element."""
        name = tag.rpartition("}")[2]
        if self._hidden:
            self._hidden -= 1
        elif name in _TABLES or name in _ROWS:
            self._end_line()
            if self._tables:
                self._end_row()
            if name in _TABLES:
                self._tables.pop()
        elif name in _BLOCKS or name in _CELLS:
            self._end_line()
            self._pre -= name == "pre"

    def data(self, text: str) -> None:
        """Add text."""
        if self._hidden:
            return
        first, *lines = text.split("\n") if self._pre else [text]
        self._line.append(first)
        for line in lines:
            self._end_line()
            self._line.append(line)

    def close(self) -> str:
        """Return all lines."""
        self._end_line()
        while self._tables:
            self._end_row()
            self._tables.pop()
        return "\n".join(self._lines)

    def _end_line(self) -> None:
        line = "".join(self._line)
        line = line.rstrip() if self._pre else " ".join(line.split())
        self._line = []
        if line:
            cells = self._tables[-1] if self._tables else None
            (cells[-1] if cells else self._lines).append(line)

    def _end_row(self, is_layout: bool = False) -> None:
        cells = self._tables[-1]
        self._tables[-1] = []
        if is_layout or len(cells) == 1:
            for cell in cells:
                self._lines += cell
        elif any(cells):
            self._lines.append(" | ".join(" ".join(cell) for cell in cells))


def _html(content: bytes, parsed: Content) -> str:
    with needing(EXTRA):
        from lxml import etree
    named = _DECLARED.search(content, 0, 1 << 16)
    text = as_text(content, parsed, named.group(1).decode() if named else None)
    parser = etree.HTMLParser(target=_Lines(), huge_tree=True)
    parser.feed(text or " ")
    return parser.close()


def _xml_lines(archive: zipfile.ZipFile, name: str) -> str:
    """Return the lines of a document in an archive."""
    from lxml import etree

    with archive.open(name) as file:
        return etree.parse(file, etree.XMLParser(target=_Lines(), resolve_entities=False, no_network=True))


def _xml(archive: zipfile.ZipFile, name: str) -> Any:
    """Return the root of an XML file in an archive."""
    with needing(EXTRA):
        from lxml import etree
    return etree.fromstring(archive.read(name), etree.XMLParser(resolve_entities=False, no_network=True))


# ---------------------------------------------------------------- kinds of files


def _pdf(content: bytes, parsed: Content) -> str:
    with needing(EXTRA):
        from pypdf import PdfReader
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns about many valid PDFs
    texts = (without_surrogates(page.extract_text()) + "\n\n" for page in PdfReader(BytesIO(content)).pages)
    pages = list(_within(texts, content))
    if not any(page.strip() for page in pages):
        raise UnreadableError("the PDF has no text, only images: run OCR first, for example with ocrmypdf")
    parsed.pages = list(accumulate(map(len, pages[:-1]), initial=0))
    return "".join(pages).removesuffix("\n\n")


def _docx(content: bytes, parsed: Content) -> str:
    with needing(EXTRA):
        from docx import Document
    _unzipped(content)
    return "\n\n".join(_within(_blocks(Document(BytesIO(content)), content), content))


def _blocks(container: Any, content: bytes) -> Iterator[str]:
    """Yield the paragraphs and the tables of a Word document or of a table cell."""
    for block in container.iter_inner_content():
        yield "\n".join(_within(_table_rows(block, content), content)) if hasattr(block, "rows") else block.text


def _table_rows(table: Any, content: bytes) -> Iterator[str]:
    """Yield the rows of a Word table. A cell over several rows is repeated in each, one over several columns is not."""
    from docx.table import _Cell

    above: dict[int, str] = {}
    for row in table._tbl.tr_lst:  # row.cells has an item for each column that a cell claims to span
        column, texts = row.grid_before, dict[int, str]()
        for cell in row.tc_lst:
            is_continued = cell.vMerge == "continue" and column in above
            texts[column] = above[column] if is_continued else " ".join(_blocks(_Cell(cell, table), content))
            column += cell.grid_span
        yield " | ".join(texts.values())
        above = texts


def _pptx(content: bytes, parsed: Content) -> str:
    archive = _unzipped(content)
    slides = [part for part, kind in _related(archive, "ppt/presentation.xml", "{*}sldIdLst/{*}sldId")]
    parts = [
        part
        for slide in dict.fromkeys(slides)
        for part in (slide, *(part for part, kind in _related(archive, slide) if kind.endswith("/notesSlide")))
    ]
    return "\n\n".join(filter(None, _within((_xml_lines(archive, part) for part in parts), content)))


def _related(archive: zipfile.ZipFile, part: str, named_by: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield the parts that a part of an Office document refers to, and their kinds.

    Args:
        named_by: Path of the elements in the part that name them, in order; None = all.
    """
    folder, name = posixpath.split(part)
    if (relations := f"{folder}/_rels/{name}.rels") not in archive.namelist():
        return
    found = {
        each.get("Id"): (posixpath.normpath(posixpath.join("/", folder, each.get("Target")))[1:], each.get("Type"))
        for each in _xml(archive, relations).iter("{*}Relationship")
        if each.get("TargetMode") != "External"
    }
    elements = _xml(archive, part).iterfind(named_by) if named_by else ()
    ids = [value for each in elements for key, value in each.items() if key.endswith("}id")] if named_by else found
    yield from (found[each] for each in ids if each in found)


def _odt(content: bytes, parsed: Content) -> str:
    with needing(EXTRA):
        return _xml_lines(_unzipped(content), "content.xml")


def _epub(content: bytes, parsed: Content) -> str:
    archive = _unzipped(content)
    package = _xml(archive, "META-INF/container.xml").find(".//{*}rootfile").get("full-path")
    root = _xml(archive, package)
    files = {item.get("id"): item.get("href") for item in root.iterfind("{*}manifest/{*}item")}
    chapters = dict.fromkeys(files.get(each.get("idref")) for each in root.iterfind("{*}spine/{*}itemref"))
    names = [posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(name))) for name in chapters if name]
    texts = (_html(archive.read(name), parsed) for name in names)
    return "\n\n".join(filter(None, _within(texts, content)))


def _xlsx(content: bytes, parsed: Content) -> str:
    """Return the sheets as paragraphs: the name, then the rows as those of a CSV."""
    with needing(EXTRA):
        from openpyxl import load_workbook
    _unzipped(content, "xl/worksheets/")
    book = load_workbook(BytesIO(content), read_only=True, data_only=True, keep_links=False)

    def paragraphs() -> Iterator[str]:
        for sheet in book.worksheets:
            sheet.reset_dimensions()  # those in the file may be wrong
            values = _within(islice(sheet.iter_rows(values_only=True), _MAX_ROWS), content)
            rows = filter(any, (list(map(_shown, row)) for row in values))
            header = next(rows, None)
            if header is not None:
                records = _records(header, rows)
                yield sheet.title
                yield next(records, " | ".join(filter(None, header)))  # the header may be all that it has
                yield from records

    return "\n\n".join(_within(paragraphs(), content))


def _shown(value: object) -> str:
    """Return the value of a cell as a spreadsheet shows it, or nearly so."""
    if value is None:
        return ""
    return f"{value:.15g}" if isinstance(value, float) else str(value).strip().removesuffix(" 00:00:00")


def _csv(content: bytes, parsed: Content) -> str:
    """Return one text, in which each row is a paragraph of lines `column: value`."""
    text = as_text(content, parsed)
    named = re.match('"?sep=([^"\r\n])"?\r?\n', text)  # Excel's
    reader = csv.reader(StringIO(text, newline=None), delimiter=named[1] if named else _delimiter(text))
    if named:
        next(reader)
    rows = _rows(reader, parsed)
    return "\n\n".join(_within(_records(next(rows, []), rows), content))


_QUOTED = re.compile(r'(^|[,;\t|])"(?:[^"]|"")*+"(?=[,;\t|]|$)', re.MULTILINE)


def _delimiter(text: str) -> str:
    """Return the delimiter that divides the first rows into as many fields as the header."""
    sample = _QUOTED.sub(r"\1_", text[:_CSV_SAMPLE].replace("\r\n", "\n").replace("\r", "\n"))
    lines = [line for line in sample.split("\n") if line.strip()][:_SAMPLE]

    def score(delimiter: str) -> tuple[int, float, bool, int]:
        counts = [line.count(delimiter) for line in lines]
        if not any(counts[:1]):
            return 0, 0.0, False, 0
        in_prose = sum(line.count(delimiter + " ") for line in lines)  # a comma before a space
        return counts.count(counts[0]), 1 - in_prose / sum(counts), delimiter == "\t", counts[0]

    return max("\t;|,", key=score)


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


def _records(header: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Yield each row that is not empty as lines `column: value`."""
    for row in rows:
        fields = zip_longest(header, row, fillvalue="")
        if record := "\n".join(f"{name}: {value}" if name else value for name, value in fields if value):
            yield record


def jsonl(content: bytes, parsed: Content, text_field: str) -> list[str]:
    """Return the text of each line."""
    texts = []
    for number, line in enumerate(as_text(content, parsed).split("\n"), 1):
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


_ZIPPED: dict[str, tuple[bytes, Callable[[bytes, Content], str]]] = {
    ".docx": (b"word/document.xml", _docx),
    ".xlsx": (b"xl/workbook.xml", _xlsx),
    ".pptx": (b"ppt/presentation.xml", _pptx),
    ".odt": (b"application/vnd.oasis.opendocument.text", _odt),
    ".epub": (b"META-INF/container.xml", _epub),
}
"""Archives: what the names or the first file of each contain, and its reader."""

READERS: dict[str, Callable[[bytes, Content], str]] = {
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
    ".csv": _csv,
    **{suffix: reader for suffix, (_, reader) in _ZIPPED.items()},
}
