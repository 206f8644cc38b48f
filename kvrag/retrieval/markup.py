"""Texts of HTML, and of the XML in Office documents.

Elements that are not named here are read through; only what an application is known not to show is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvrag.retrieval.content import Content

Markup = dict[str, Any]
"""Local or full name of an element -> its role, the texts around its own, "@" and an attribute that is shown, or "!"
and what is lost; "": elements in which white space is text, None for all."""

_BLOCK, _PRE, _TABLE, _ROW, _CELL, _HIDDEN = "block", "pre", "table", "row", "cell", "hidden"
_PARAGRAPH = "paragraph"  # a block in it, such as a text box, is shown elsewhere
_NOTE = "note"  # where an element refers to it
_MAX_DEPTH = 150  # of elements in each other; what is deeper is read without their roles
_ALL_ROWS = 1 << 20  # that are left of a table
_BETWEEN = {"mfrac": "/", "msup": "^", "msub": "_"}  # the parts of an element
_MERGED = ("continue", "1", "true")
PICTURES = ("pic", "blip", "img", "image", "imagedata")


def _markup(spaced: str | None, around: Markup, **roles: str) -> Markup:
    named = {name: role for role, names in roles.items() for name in names.split()}
    return {**named, **around, "": spaced and spaced.split()}


HTML = _markup(
    spaced=None,
    around={"img": "@alt", "input": "@value"},
    block="address article aside blockquote body br button caption center dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr legend li main menu nav ol optgroup option p "
    "search section select summary text textarea title ul",
    table="table",
    row="tr",
    cell="td th",
    pre="pre",
    hidden="script style noscript template annotation annotation-xml",
)
OFFICE = _markup(
    spaced="t v text",
    around=dict.fromkeys(("tab", "ptab"), ("\t", ""))
    | dict.fromkeys(("br", "cr"), ("\n", ""))
    | {"noBreakHyphen": ("-", ""), "rt": ("(", ")"), "num": ("(", ")/"), "den": ("(", ")"), "mr": ("", "; ")}
    | {
        "d": ("(", ")"),
        "sup": ("^(", ")"),
        "sub": ("_(", ")"),
        "rad": ("√(", ")"),
        "textpath": "@string",
        "chr": "@val",
    }
    | dict.fromkeys(("oleObj", "OLEObject", "oleObject", "altChunk", "subDoc"), "!embedded documents")
    | {
        "contentPart": "!drawings in ink",
        "sym": "!symbols",
        "control": "!form controls",
        "ddList": "!form controls",
    }
    | {"{http://schemas.openxmlformats.org/officeDocument/2006/math}f": None},
    paragraph="p",
    block="cm text name",
    table="tbl ser strDim numDim",  # a chart's series, too
    row="tr tx cat val xVal yVal bubbleSize lvl",
    cell="tc pt",
    note="footnote endnote comment threadedComment",
    hidden="authors del moveFrom delText delInstrText instrText fldData sdtPr tabs tabLst rPh Fallback timing f "
    "separator tableStyleId formatCode posOffset align pctWidth pctHeight pctPosHOffset pctPosVOffset from to",
)


@dataclass(eq=False)
class Reader:
    """Reads elements into blocks.

    Attributes:
        parsed: Counts what is shown and not read.
        refer: Returns the text of a part of the document that an element names.
        notes: Texts of notes and comments that nothing has referred to yet.
        is_layout: It reads a layout of slides: its placeholders are not shown.
    """

    markup: Markup
    parsed: Content
    refer: Callable[[str], str] = lambda name: ""
    notes: dict[str, str] = field(default_factory=dict)
    is_layout: bool = False
    _blocks: list[str] = field(default_factory=list)
    _line: list[str] = field(default_factory=list)
    _asides: list[str] = field(default_factory=list)
    _is_open: bool = False  # a paragraph
    _pre: int = 0
    _depth: int = 0
    _num_tables: int = 0

    def blocks(self, element: Any, is_open: bool = False) -> list[str]:
        """Return the blocks in an element."""
        outer = self._blocks, self._line, self._asides, self._is_open
        self._blocks, self._line, self._asides, self._is_open = [], [], [], is_open
        self._walk(element)
        self._end_line()
        found = self._blocks
        self._blocks, self._line, self._asides, self._is_open = outer
        return found

    def _walk(self, element: Any) -> None:
        name = _local(element.tag)
        if self._depth == _MAX_DEPTH:
            self._line.append(" ".join(element.itertext()))
            return
        self._depth += 1
        self._add_text(element.text, name)
        for number, child in enumerate(element):
            if number and name in _BETWEEN:
                self._line.append(_BETWEEN[name])
            if isinstance(child.tag, str):
                self._enter(child)
            self._add_text(child.tail, name)
        self._depth -= 1

    def _role(self, element: Any) -> Any:
        return self.markup.get(element.tag, self.markup.get(_local(element.tag)))

    def _enter(self, element: Any) -> None:
        role, name, get = self._role(element), _local(element.tag), _attributes(element).get
        if role == _HIDDEN or (name == "sp" and self.is_layout and element.find(".//{*}ph") is not None):
            return
        if (key := name.removesuffix("Reference") + get("id", "")) in self.notes:
            self._asides.append(self.notes.pop(key))
        for key, value in element.items():
            if "/relationships}" in key:
                self._add([self.refer(value)])
        if role == _TABLE:
            self._add(self._table(element))
        elif role == _NOTE:
            label = "".join(f"{each}: " for each in (get("ref"), get("author")) if each)
            if text := "\n".join(self.blocks(element)):
                self.notes[name + (get("id") or get("ref") or str(len(self.notes)))] = label + text
        elif self._is_open and role in (_BLOCK, _PARAGRAPH, _ROW, _CELL):
            self._add(self.blocks(element, role == _PARAGRAPH))
        elif isinstance(role, tuple):
            self._line.append(role[0])
            self._walk(element)
            self._line.append(role[1])
        elif role is None or role[0] in "@!":
            if role and role[0] == "!":
                self.parsed.lost[role[1:]] += 1
            elif role and get("type") not in ("hidden", "password") and (shown := get(role[1:])):
                self._line += [shown] if name == "chr" else [" "] * bool(self._line) + [shown, " "]
            self._walk(element)
        else:
            self._end_line()
            self._is_open = role == _PARAGRAPH
            self._pre += role == _PRE
            self._walk(element)
            self._end_line()
            self._is_open = False
            self._pre -= role == _PRE

    def _add(self, blocks: list[str]) -> None:
        if self._is_open:
            self._asides += filter(None, blocks)
        else:
            self._end_line()
            self._blocks += filter(None, blocks)

    def _add_text(self, text: str | None, name: str) -> None:
        spaced = self.markup[""]
        if not text or (spaced is not None and not text.strip() and name not in spaced):  # indentation
            return
        if self.markup is OFFICE:
            text = text.replace("\n", " ")
        elif not self._pre:
            text = re.sub(r"[ \t\r\n]+", " ", text)
            if text[0] == " " and (not self._line or self._line[-1][-1:].isspace()):
                text = text[1:]
        self._line.append(text)

    def _end_line(self) -> None:
        lines = [line.rstrip() for line in "".join(self._line).split("\n")]
        if self.markup is HTML and not self._pre:
            lines = [" ".join(line.split()) for line in lines]
        self._blocks += filter(None, ["\n".join(filter(None, lines + self._asides))])
        self._line, self._asides = [], []

    # ---------------------------------------------------------------- tables

    def _parts(self, element: Any, role: str, others: list[str]) -> Iterator[Any]:
        """Yield the rows of a table, or the cells of a row; add other text, such as a caption."""
        for text in (element.text, *(child.tail for child in element)):
            others += filter(None, [" ".join((text or "").split())])
        for child in element:
            if isinstance(child.tag, str) and (its := self._role(child)) != _HIDDEN:
                if its == role:
                    yield child
                elif its is None:
                    yield from self._parts(child, role, others)
                else:
                    others += self.blocks(child)

    def _table(self, element: Any) -> list[str]:
        """Return rows in lines, merged cells in all rows and columns that they cover.

        A row with a table in it is layout, one of a single cell a title; they are no lines of cells.
        """
        self._num_tables += 1
        others, rows = list[str](), list[dict[int, tuple[int, list[str], bool]]]()  # by column: its end, blocks, layout
        above = dict[int, tuple[Any, int]]()  # cells that extend to further rows, and how many
        for tr in self._parts(element, _ROW, others):
            row, below = dict[int, Any](), {}
            of_row = _attributes(tr).get
            column = _number(of_row("gridBefore"), 0)
            for cell in self._parts(tr, _CELL, others):
                while column in above:
                    column = above[column][0][0]
                get = _attributes(cell).get
                if get("hMerge") in _MERGED and row:  # the first of these cells has their number, too
                    continue
                column = max(column, _number(get("idx"), 0))
                columns = _number(get("colspan") or get("gridSpan"))
                tables = self._num_tables
                found = self.blocks(cell), self._num_tables > tables
                if get("vMerge") in _MERGED and rows and column in rows[-1]:
                    found = rows[-1][column][1:]
                row[column] = column + max(1, columns), *found
                extends = _number(get("rowspan")) or _ALL_ROWS
                if extends > 1:
                    below[column] = row[column], extends - 1
                column = row[column][0]
            if row:
                for column, (found, left) in above.items():
                    row.setdefault(column, found)
                    if left > 1:
                        below.setdefault(column, (found, left - 1))
                above = below
                rows.append(row)
        return others + list(self._lines(rows))

    def _lines(self, rows: list[dict[int, Any]]) -> Iterator[str]:
        columns, lines = sorted({start for row in rows for start in row}), list[str]()
        for row in rows:
            cells = {id(blocks): blocks for _, blocks, _ in row.values()}.values()
            is_layout = any(is_layout for *_, is_layout in row.values())
            found = [block for blocks in cells for block in blocks]
            if found and len(cells) > 1 and not is_layout:
                texts, end, stop = list[str](), max(stop for stop, *_ in row.values()), 0
                for column in columns:
                    if column in row:
                        stop, blocks, _ = row[column]
                    if column < end:
                        texts.append(" ".join(" ".join(blocks).split()) if column < stop else "")
                found = [" | ".join(texts)]
            if is_layout:
                yield "\n".join(lines)
                yield from found
                lines = []
            else:
                lines += found
        yield "\n".join(lines)


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _attributes(element: Any) -> dict[str, str]:
    """Return the attributes by local name, and Word's properties of a cell or row."""
    values = {_local(key): value for key, value in element.items()}
    for each in element if _local(element.tag) in ("tc", "tr") else ():
        for known in each if each.tag.endswith(("}tcPr", "}trPr")) else ():
            values[_local(known.tag)] = next(iter(known.values()), "continue")
    return values


def _number(value: str | None, default: int = 1) -> int:
    return int(value) if value and value.isdecimal() and len(value) < 20 else default
