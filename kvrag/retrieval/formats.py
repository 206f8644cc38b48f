"""Texts of files, by kind.

A reader takes the content of a file and its `Content`, to which it adds problems; it returns the text. Files may be
hostile: the sandbox bounds the memory and the time that reading one takes.
"""

from __future__ import annotations

import codecs
import csv
import json
import logging
import posixpath
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial
from io import BytesIO, StringIO
from itertools import accumulate, chain, islice, pairwise
from statistics import median_high
from typing import IO, Any
from urllib.parse import unquote

from kvrag.errors import needing
from kvrag.retrieval.content import Content, UnreadableError
from kvrag.retrieval.markup import HTML, OFFICE, PICTURES, Reader

EXTRA = "kvrag[cli]"
_SAMPLE = 200  # lines to guess an encoding or the header of a table from
_MAX_NAMED = 20  # pages or cells
_IN_UTF_16 = 0.02  # share of NULs that UTF-16 has at least
_CSV_SAMPLE = 1 << 16  # characters to guess a delimiter from

_ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r", "mac_roman"),
    *("cp932", "euc_jp", "gb18030", "big5", "euc_kr", "utf_16", "utf_16_le", "utf_16_be", "utf_32"),
)
_WIDE = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE  # UTF-32-LE's begins with UTF-16-LE's
_DECLARED = re.compile(rb"<(?:meta|\?xml)\b[^>]{0,200}?(?:charset|encoding)\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
_CONTROLS = re.compile(rb"[\x01-\x08\x0e-\x1f]")  # in binary files
_OLD_OFFICE = b"\xd0\xcf\x11\xe0"
_OLD = "it is protected by a password, or an old .doc, .xls or .ppt: save it as .docx without a password (.xlsx, .pptx)"


# ---------------------------------------------------------------- encodings


def as_text(content: bytes, parsed: Content, declared: str | None = None) -> str:
    """Decode text. A guessed encoding is noted.

    Args:
        declared: Encoding that the file names.
    """
    if content.startswith((b"%PDF-", b"PK\3\4", _OLD_OFFICE)):
        raise UnreadableError(f"it is no text: name it by its kind ({' '.join(READERS)}), or save it as one of these")
    is_wide = content.startswith(_WIDE) or content.count(0) > max(1, _IN_UTF_16 * len(content))
    if not is_wide and not _CONTROLS.search(content):
        content = content.replace(b"\0", b"")  # stray ones
    for encoding in filter(None, () if 0 in content else ("utf-8-sig", declared)):
        with suppress(UnicodeError, LookupError):
            return content.decode(encoding)
    with needing(EXTRA):
        from charset_normalizer import from_bytes
    lines = (line for line in BytesIO(content) if not line.isascii())
    sample = content if 0 in content else b"".join(islice(lines, _SAMPLE))
    found = from_bytes(sample, cp_isolation=[*_ENCODINGS], enable_fallback=False).best()
    if found is None or (0 in content and not is_wide):
        raise UnreadableError("the file is binary: extract its text, for example with OCR from images (tesseract)")
    if not found.bom:
        parsed.note(f"not in UTF-8: read as {found.encoding}, a guess; save it as UTF-8 if characters are wrong")
    return content.decode(found.encoding, "replace").replace("\0", "")


def without_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which tokenizers reject. JSON and PDFs may contain them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---------------------------------------------------------------- documents of several parts


class _Archive:
    """The parts of a document. One that cannot be read is noted, and the others are read."""

    def __init__(self, content: bytes, parsed: Content) -> None:
        with needing(EXTRA):
            from lxml import etree
        self._etree, self.parsed = etree, parsed
        if content.startswith(_OLD_OFFICE):
            raise UnreadableError(_OLD)
        self._zip = zipfile.ZipFile(BytesIO(content))
        self._names = {name.casefold(): name for name in self._zip.namelist()}
        self._read = set[str]()

    def __contains__(self, part: str) -> bool:
        return part.casefold() in self._names

    def open(self, part: str) -> IO[bytes]:
        """Open a part, whatever the case of its name."""
        if part not in self:
            raise zipfile.BadZipFile(f"{part} is missing")
        return self._zip.open(self._names[part.casefold()])

    def elements(self, part: str, *names: str) -> Iterator[Any]:
        """Yield the elements with these names; each is gone when the next is read."""
        with self.open(part) as file:
            tags = [f"{{*}}{name}" for name in names]
            for _, element in self._etree.iterparse(file, tag=tags, resolve_entities=False, no_network=True):
                yield element
                element.clear()
                while element.getprevious() is not None:
                    del element.getparent()[0]

    def root(self, part: str) -> Any:
        """Return the root of an XML part."""
        options = {"resolve_entities": False, "no_network": True, "remove_comments": True, "remove_pis": True}
        with self.open(part) as file:
            return self._etree.parse(file, self._etree.XMLParser(**options)).getroot()

    def lines(self, part: str, between: str = "\n", **options: Any) -> str:
        """Return the text of an XML part of an Office document."""
        return _text(self.root(part), Reader(OFFICE, self.parsed, **options), between)

    def related(self, part: str) -> dict[str, tuple[str, str]]:
        """Return the parts that a part of an Office document refers to, and their kinds, by the names it gives them."""
        folder, name = posixpath.split(part)
        relations, found = posixpath.join(folder, "_rels", f"{name}.rels"), {}
        if relations in self:
            with self.parsed.part(relations):
                for each in self.root(relations).iter("{*}Relationship"):
                    if each.get("TargetMode") != "External":
                        target = posixpath.normpath(posixpath.join("/", folder, each.get("Target")))[1:]
                        found[each.get("Id")] = target, posixpath.basename(each.get("Type"))
        return found

    def main(self, part: str) -> str:
        """Return the name of the part with the text, which is mostly `part`."""
        return next((target for target, kind in self.related("").values() if kind == "officeDocument"), part)

    def office(self, part: str, kind: str, name: str = "", between: str = "\n") -> Iterator[str]:
        """Yield the text of a part of an Office document, and of those that belong to it, unless they have been read.

        Args:
            kind: Of its relation; that of the main part is not caught if it cannot be read.
        """
        if part in self._read:
            return
        self._read.add(part)
        related, notes = self.related(part), dict[str, str]()

        def refer(id: str) -> str:
            target, its_kind = related.get(id, ("", ""))
            return "\n".join(self.office(target, its_kind)) if its_kind in _REFERRED else ""

        comments = []
        for target, its_kind in related.values():
            if its_kind in _NOTES:
                with self.parsed.part(target):
                    comments.append(self.lines(target, notes=notes))
        with self.parsed.part(name or part) if kind else nullcontext():
            if kind != "worksheet":
                is_layout = kind in ("slideLayout", "slideMaster")
                yield self.lines(part, refer=refer, notes=notes, between=between, is_layout=is_layout)
        yield from (*notes.values(), *comments)
        for target, its_kind in related.values():
            if its_kind in _BELONGING and kind != "slideMaster":
                yield from self.office(target, its_kind)


_REFERRED = {"chart", "chartEx", "chartUserShapes", "diagramData", "header", "footer"}
_NOTES = {"footnotes", "endnotes", "comments", "threadedComment"}
_BELONGING = {"notesSlide", "slideLayout", "slideMaster", "drawing"}


def _docx(content: bytes, parsed: Content) -> str:
    archive = _Archive(content, parsed)
    return "\n\n".join(filter(None, archive.office(archive.main("word/document.xml"), "", between="\n\n")))


def _pptx(content: bytes, parsed: Content) -> str:
    archive, texts = _Archive(content, parsed), list[str]()
    show = archive.main("ppt/presentation.xml")
    slides = archive.related(show)
    named = archive.root(show).xpath("//*[local-name()='sldId']/@*[namespace-uri()]")
    for number, id in enumerate(dict.fromkeys(named), 1):
        texts += archive.office(slides.get(id, (id, ""))[0], "slide", f"slide {number}")
    return "\n\n".join(filter(None, texts))


def _epub(content: bytes, parsed: Content) -> str:
    archive, texts = _Archive(content, parsed), list[str]()
    package = archive.root("META-INF/container.xml").find(".//{*}rootfile").get("full-path")
    root = archive.root(package)
    files = {item.get("id"): item.get("href") for item in root.iterfind("{*}manifest/{*}item")}
    for id in dict.fromkeys(each.get("idref") for each in root.iterfind("{*}spine/{*}itemref")):
        name = posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(files.get(id) or str(id))))
        with parsed.part(name), archive.open(name) as chapter:
            texts.append(_html(chapter.read(), parsed))
    return "\n\n".join(filter(None, texts))


def _html(content: bytes, parsed: Content) -> str:
    with needing(EXTRA):
        from lxml import etree
    named = _DECLARED.search(content, 0, 1 << 16)
    text = as_text(content, parsed, named.group(1).decode() if named else None)
    parser = etree.HTMLParser(huge_tree=True)
    parser.feed(f"<html>{text}")
    root = parser.close()
    if parser.feed_error_log.filter_from_fatals():
        parsed.note("skipped: what follows 2,048 elements in each other")
    return _text(root, Reader(HTML, parsed))


def _text(root: Any, reader: Reader, between: str = "\n") -> str:
    text = between.join(reader.blocks(root))
    if not text and next(root.iter(*(f"{{*}}{name}" for name in PICTURES)), None) is not None:
        raise UnreadableError("it has no text, only pictures: run OCR first")
    return text


# ---------------------------------------------------------------- PDF


def _pdf(content: bytes, parsed: Content) -> str:
    with needing(EXTRA):
        from pypdf import PdfReader
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns about many valid PDFs
    reader, pages, blank = PdfReader(BytesIO(content)), list[str](), list[int]()
    root: Any = reader.root_object
    for number, page in enumerate(reader.pages, 1):
        text = ""
        with parsed.part(f"page {number}"):
            text = page.extract_text()
            text = "\n".join(filter(None, [text, *dict.fromkeys(_entries(page))]))
            if not text.strip():
                blank.append(number)
        pages.append(without_surrogates(text) + "\n\n")
    if blank and not any(page.strip() for page in pages):
        raise UnreadableError("the PDF has no text, only images: run OCR first, for example with ocrmypdf")
    if blank:
        parsed.note(f"skipped: {_listed('page', blank)} without readable text: of images, run OCR first (ocrmypdf)")
    if (missing := int(root["/Pages"].get("/Count", 0)) - len(pages)) > 0:
        parsed.note(f"skipped: {missing} pages that are missing from the file")
    if "/EmbeddedFiles" in root.get("/Names", {}):
        parsed.note("skipped: the files attached to it")
    parsed.pages = list(accumulate(map(len, pages[:-1]), initial=0))
    return "".join(pages).removesuffix("\n\n")


def _entries(page: Any) -> Iterator[str]:
    """Yield what was typed into the fields of a page's form, and its comments."""
    for each in page.annotations or ():
        field = each.get_object()
        if (kind := field.get("/Subtype")) != "/Widget":
            yield "" if kind in ("/Link", "/Popup") else str(field.get("/Contents", ""))
            continue
        found = dict[str, Any]()
        for _ in range(_MAX_PARENTS):
            found = {key: field[key] for key in field} | found  # [] follows references
            field = found.pop("/Parent", {})
        is_secret = found.get("/FT") == "/Sig" or (found.get("/FT") == "/Tx" and int(found.get("/Ff", 0)) & _PASSWORD)
        if not is_secret and (value := found.get("/V", "")) not in ("", "/Off"):
            shown = {str(pair[0]): str(pair[1]) for pair in found.get("/Opt", ()) if isinstance(pair, list)}
            texts = [str(each) for each in (value if isinstance(value, list) else [value])]
            name = found.get("/TU") or found.get("/T", "")
            yield f"{name}: {', '.join(shown.get(text, text).removeprefix('/') for text in texts)}"


_MAX_PARENTS, _PASSWORD = 8, 1 << 13  # of a field


def _listed(what: str, numbers: Sequence[object]) -> str:
    """Return "page 3", or "pages 3, 4, 9"; of many, the first."""
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_MAX_NAMED]))}{more}"


# ---------------------------------------------------------------- tables with names of columns


def _xlsx(content: bytes, parsed: Content) -> str:
    """Return the sheets as paragraphs: the name, then the rows as those of a CSV."""
    archive = _Archive(content, parsed)
    main = archive.main("xl/workbook.xml")
    sheets, root = archive.related(main), archive.root(main)
    parts = {kind: target for target, kind in sheets.values()}
    is_1904 = root.xpath("string(*[local-name()='workbookPr']/@date1904)") in ("1", "true")
    epoch = datetime(1904, 1, 1) if is_1904 else datetime(1899, 12, 30)
    cells, paragraphs = _Cells(archive, epoch, parts.get("sharedStrings"), parts.get("styles")), list[str]()
    for sheet in root.iterfind("{*}sheets/{*}sheet"):
        name = sheet.get("name", "")
        part = sheets.get(next((value for key, value in sheet.items() if key.endswith("}id")), ""), ("", ""))[0]
        with parsed.part(name):
            found = chain(_records(cells.rows(part)), archive.office(part, "worksheet"), cells.end())
            for number, text in enumerate(filter(None, found)):
                paragraphs += (text,) if number else (name, text)
    return "\n\n".join(paragraphs)


class _Cells:
    """The cells of sheets as a spreadsheet shows them, or nearly so."""

    def __init__(self, archive: _Archive, epoch: datetime, strings: str | None, styles: str | None) -> None:
        with needing(EXTRA):
            from openpyxl.styles import numbers
            from openpyxl.utils.cell import range_boundaries
            from openpyxl.utils.datetime import from_excel
        self._bounds = range_boundaries
        self._archive, self._moment, self._strings = archive, partial(from_excel, epoch=epoch), list[str]()
        self._dates = dict[int, bool]()  # styles of dates, and whether they show a length of time
        if strings:
            with archive.parsed.part(strings):
                self._strings = [_rich(each) for each in archive.elements(strings, "si")]
        if styles:
            with archive.parsed.part(styles):
                root = archive.root(styles)
                codes = {int(each.get("numFmtId")): each.get("formatCode") for each in root.iter("{*}numFmt")}
                for style, each in enumerate(root.iterfind("{*}cellXfs/{*}xf")):
                    id = int(each.get("numFmtId", 0))
                    if numbers.is_date_format(code := codes.get(id) or numbers.BUILTIN_FORMATS.get(id, "")):
                        self._dates[style] = numbers.is_timedelta_format(code)

    def rows(self, part: str) -> Iterator[dict[int, str]]:
        """Yield the cells of each row by column, merged cells in all that they cover; {} for empty rows."""
        rows, number, width, self._unknown, self._margins = dict[int, dict[int, str]](), 0, 0, list[str](), list[str]()
        for each in self._archive.elements(part, "row", "mergeCell", "oleObject", "control", *_MARGINS):
            if each.tag.endswith("}row"):
                number, column = int(each.get("r") or number + 1), 0
                cells = rows[number] = {}
                for cell in each.iterchildren("{*}c"):
                    column = self._bounds(cell.get("r"))[0] if cell.get("r") else column + 1
                    cells[column] = self._shown(cell)
                    width = max(width, column if len(cell) else 0)
            elif each.tag.endswith("}mergeCell"):
                left, top, right, bottom = self._bounds(each.get("ref"))
                text = rows.get(top, {}).get(left, "")
                for covered in (row for row in rows if top <= row <= bottom):
                    rows[covered] |= dict.fromkeys(range(left, min(right, width) + 1), text)
            elif each.tag.endswith(("}oleObject", "}control")):
                self._archive.parsed.lost["embedded documents or form controls"] += 1
            elif text := " ".join(_MARGIN_CODE.sub(" ", each.text or "").split()):
                self._margins.append(text)
        last = 0
        for number, cells in rows.items():
            yield from [{}] * (number > last + 1)
            yield {column: cells[column] for column in sorted(cells) if cells[column]}
            last = number

    def end(self) -> Iterator[str]:
        """Yield the sheet's headers and footers, and note its formulas without a result."""
        yield from dict.fromkeys(self._margins)
        if self._unknown:
            why = "no result is stored: open it in a spreadsheet, and save it"
            self._archive.parsed.note(f"skipped: {_listed('formula', self._unknown)}: {why}")

    def _shown(self, cell: Any) -> str:
        kind, value = cell.get("t", "n"), (cell.findtext("{*}v") or "").strip()
        if kind == "inlineStr":
            return "".join(map(_rich, cell.iterfind("{*}is"))).strip()
        if kind == "n" and not value and cell.find("{*}f") is not None:
            self._unknown.append(cell.get("r", "without a place"))
        if kind == "s" and value:
            return self._strings[int(value)].strip() if self._strings else ""
        if kind != "n" or not value:  # a formula's text, an error
            return str(value == "1") if kind == "b" else value
        try:
            if (is_length := self._dates.get(int(cell.get("s", 0)))) is not None:
                return str(self._moment(float(value), timedelta=is_length)).removesuffix(" 00:00:00")
            return f"{float(value):.15g}"
        except (ValueError, OverflowError):  # such as a date before 1900
            return value


_MARGINS = "oddHeader", "oddFooter", "evenHeader", "evenFooter", "firstHeader", "firstFooter"
_MARGIN_CODE = re.compile(r'&(?:"[^"]*"|\d+|K[\dA-Fa-f+-]{6}|[A-Za-z])')


def _rich(element: Any) -> str:
    return "".join(each.text or "" for path in ("{*}t", "{*}r/{*}t") for each in element.iterfind(path))


def _csv(content: bytes, parsed: Content) -> str:
    """Return one text, in which each row is a paragraph of lines `column: value`."""
    text = as_text(content, parsed)
    named = re.match('"?sep=([^"\r\n])"?\r?\n', text)  # Excel's
    reader = csv.reader(StringIO(text, newline=None), delimiter=named[1] if named else _delimiter(text))
    if named:
        next(reader)
    return "\n\n".join(_records(_rows(reader, parsed)))


_QUOTED = re.compile(r'(^|[,;\t|])"(?:[^"]|"")*+"(?=[,;\t|]|$)', re.MULTILINE)


def _delimiter(text: str) -> str:
    """Return the delimiter that divides most of the first rows into the same number of fields."""
    sample = _QUOTED.sub(r"\1_", text[:_CSV_SAMPLE].replace("\r\n", "\n").replace("\r", "\n"))
    lines = [line for line in sample.split("\n") if line.strip()][:_SAMPLE]

    def score(delimiter: str) -> tuple[int, float, bool, int]:
        counts = [line.count(delimiter) for line in lines]
        [(number, times)] = Counter(filter(None, counts)).most_common(1) or [(0, 0)]  # a title has none
        in_prose = sum(line.count(delimiter + " ") for line in lines)  # a comma before a space
        return times, 1 - in_prose / max(1, sum(counts)), delimiter == "\t", number

    return max("\t;|,", key=score)


def _rows(reader: Any, parsed: Content) -> Iterator[dict[int, str]]:
    """Yield the values of each row by column. A row that cannot be read is noted."""
    while True:
        start = reader.line_num + 1
        try:
            yield {column: text for column, value in enumerate(next(reader)) if (text := value.strip())}
        except StopIteration:
            return
        except csv.Error as error:  # a field is too long, mostly because of a quote that is not closed
            parsed.note(f"skipped: the row cannot be read ({error}): check its quotes", start)


def _records(rows: Iterator[dict[int, str]]) -> Iterator[str]:
    """Yield the titles above a table, then each row that is not empty as lines `column: value`."""
    first = list(islice(rows, _SAMPLE))
    at = _header(first)
    yield from (" | ".join(dict.fromkeys(row.values())) for row in first[:at] if row)
    names = dict(first[at]) if at < len(first) else {}
    while at + 1 < len(first) and _is_grouped(names, first[at + 1]):  # such as years above quarters
        at += 1
        both = ((column, (names.get(column), first[at].get(column))) for column in sorted({*names, *first[at]}))
        names = {column: " ".join(dict.fromkeys(filter(None, each))) for column, each in both}
    has_rows = False
    for row in chain(first[at + 1 :], rows):
        if row:
            has_rows = True
            yield "\n".join(f"{names[column]}: {value}" if column in names else value for column, value in row.items())
    if not has_rows and names:
        yield " | ".join(names.values())


def _header(rows: list[dict[int, str]]) -> int:
    """Return the index of the row with the names of columns: titles above it have fewer values than the table."""
    widths = [len(set(row.values())) for row in rows]  # a merged title is one value
    filled = [index for index, width in enumerate(widths) if width]
    if not (wide := [width for width in widths if width > 1]):
        return filled[0] if filled else len(rows)
    typical, left = median_high(wide), min(min(row) for row in rows if row)
    full = next(index for index in filled if widths[index] >= typical)
    for index in filled:
        is_label = typical == 2 and min(rows[index]) > left  # rows have names, and their column has none
        if is_label or index == full or (widths[index] * 2 > typical and all(widths[index:full])):
            return index
    return full


def _is_grouped(names: dict[int, str], row: dict[int, str]) -> bool:
    """Return whether names stand above several columns, whose own names are in the next row."""
    is_wide = any(left + 1 == right and names[left] == names[right] for left, right in pairwise(names))
    are_names = not any(re.fullmatch(r"[\d.,:/ %-]+", value) for value in row.values())
    return is_wide and are_names and len(set(row.values())) >= 2


def jsonl(content: bytes, parsed: Content) -> list[str]:
    """Return the text in the field `text` of each line."""
    texts = []
    for number, line in enumerate(as_text(content, parsed).split("\n"), 1):
        try:
            value = json.loads(line) if line.strip() else {"text": ""}
        except (ValueError, RecursionError) as error:
            parsed.note(f"skipped: it is not JSON ({error})", number)
            continue
        text = value.get("text") if isinstance(value, dict) else None
        if isinstance(text, str):
            texts.append(text)
        else:
            parsed.note("skipped: it is not a JSON object with a text in the field 'text'", number)
    return texts


READERS: dict[str, Callable[[bytes, Content], str]] = {
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
    ".csv": _csv,
    ".docx": _docx,
    ".xlsx": _xlsx,
    ".pptx": _pptx,
    ".epub": _epub,
}
