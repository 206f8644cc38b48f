"""What a person sees in a document is in its text, or its loss is noted: every place in every format."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from datetime import datetime, time, timedelta

import hostile
import marked
import pytest
from openpyxl import Workbook

from kvrag.retrieval.documents import parse

NOTED = {  # what a format's file has that is not read
    ".docx": {"skipped: 1 embedded documents"},
    ".pdf": {
        "skipped: page 2 without readable text: of images, run OCR first (ocrmypdf)",
        "skipped: the files attached to it",
    },
}


@pytest.mark.parametrize("suffix", marked.BUILDERS)
def test_every_place_that_is_shown_is_read(suffix: str) -> None:
    places = dict[str, str]()

    def mark(place: str) -> str:
        places[word := f"marker{len(places)}x"] = place
        return word

    found = parse(f"a{suffix}", suffix, marked.BUILDERS[suffix](mark))
    text = found.texts[0]
    once = {word for word, place in places.items() if place != "name of a column"}
    assert [
        place for word, place in places.items() if word not in text or (word in once and text.count(word) > 1)
    ] == []
    assert marked.HIDDEN not in text
    assert {problem.message for problem in found.problems} == NOTED.get(suffix, set())


# ---------------------------------------------------------------- tables

WIDE = ["wide and high", "2", "5", "6", "7", "8"]  # the first covers two rows and two columns of three by three
LINES = "wide and high | wide and high | 2\nwide and high | wide and high | 5\n6 | 7 | 8"


def html_table() -> str:
    first, second, fifth, *last = WIDE
    return (
        f"<table><tr><td colspan=2 rowspan=2>{first}<td>{second}<tr><td>{fifth}"
        f"<tr>{''.join(f'<td>{each}' for each in last)}</table>"
    )


def docx_table() -> bytes:
    both = '<w:gridSpan w:val="2"/><w:vMerge{}/>'
    cell, row = hostile.cell, hostile.row
    return hostile.docx(
        hostile.table(
            row(cell(WIDE[0], both.format(' w:val="restart"')), cell(WIDE[1])),
            row(cell("", both.format("")), cell(WIDE[2])),
            row(*map(cell, WIDE[3:])),
        )
    )


def pptx_table() -> bytes:
    def row(*cells: tuple[str, str]) -> str:
        each = (
            f"<a:tc {how}><a:txBody><a:p><a:r><a:t>{text}</a:t></a:r></a:p></a:txBody></a:tc>" for text, how in cells
        )
        return f"<a:tr>{''.join(each)}</a:tr>"

    return hostile.pptx(
        "<a:tbl>"
        + row((WIDE[0], 'gridSpan="2" rowSpan="2"'), ("", 'hMerge="1"'), (WIDE[1], ""))
        + row(("", 'gridSpan="2" vMerge="1"'), ("", 'hMerge="1" vMerge="1"'), (WIDE[2], ""))
        + row(*((text, "") for text in WIDE[3:]))
        + "</a:tbl>"
    )


TABLES: dict[str, Callable[[], bytes]] = {
    ".docx": docx_table,
    ".html": lambda: html_table().encode(),
    ".epub": lambda: hostile.epub(html_table()),
    ".pptx": pptx_table,
}


@pytest.mark.parametrize("suffix", TABLES)
def test_a_merged_cell_is_in_all_rows_and_columns_that_it_covers(suffix: str) -> None:
    assert parse(f"a{suffix}", suffix, TABLES[suffix]()).texts == [LINES]


def a_sheet(*rows: Sequence[object], merged: Sequence[str] = ()) -> str:
    book, written = Workbook(), io.BytesIO()
    for row in rows:
        book.active.append(row)
    for place in merged:
        book.active.merge_cells(place)
    book.save(written)
    found = parse("a.xlsx", ".xlsx", written.getvalue())
    assert not found.problems
    return found.texts[0].removeprefix("Sheet\n\n")


def test_a_merged_cell_of_a_sheet_is_in_all_rows_and_columns_that_it_covers() -> None:
    rows = ["x", "y", "z"], [WIDE[0], None, 2], [None, None, 5], [6, 7, 8]
    assert a_sheet(*rows, merged=["A2:B3"]) == (
        "x: wide and high\ny: wide and high\nz: 2\n\nx: wide and high\ny: wide and high\nz: 5\n\nx: 6\ny: 7\nz: 8"
    )


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        ("<tr><td rowspan=3>a<td>b<tr><td>c<tr><td>d", "a | b\na | c\na | d"),
        ("<tr><td>a<td rowspan=0>b<tr><td>c<tr><td>d", "a | b\nc | b\nd | b"),
        ("<tr><th>a<th>b<th>c<tr><td colspan=100000>title<tr><td>d<td colspan=9>e", "a | b | c\ntitle\nd | e | e"),
        ("<tr><td colspan=2>a<td colspan=3>b<tr><td colspan=2>c<td>d", "a | b\nc | d"),
        ("<caption>of</caption><tr><td>a<td>b<tr><td>c", "of\na | b\nc"),
        ("<tr><td rowspan=99999999999999999999999>a<td colspan=x>b", "a | b"),
    ],
)
def test_spans_of_a_page(table: str, lines: str) -> None:
    assert parse("a.html", ".html", f"<table>{table}</table>".encode()).texts == [lines]


def test_spans_cannot_make_a_text_endless() -> None:
    cells = "".join(f"<td rowspan=65534 colspan=1000>{'x' * 100}" for _ in range(1000))
    found = parse("a.html", ".html", f"<table><tr>{cells}{'<tr><td>y' * 1000}".encode())
    assert "far larger than the file" in found.problems[0].message


@pytest.mark.parametrize(("depth", "is_all"), [(1000, True), (3000, False)])
def test_elements_in_each_other_are_read_or_noted(depth: int, is_all: bool) -> None:
    found = parse("a.html", ".html", b"<p>before" + b"<div>" * depth + b"within" + b"</div>" * depth + b"after")
    assert [word for word in ("before", "within", "after") if word in found.texts[0]][is_all:]
    assert [problem.message for problem in found.problems] == (
        [] if is_all else ["skipped: what follows 2,048 elements in each other"]
    )


HEADER, ROWS = ["City", "Units", "Revenue"], [["Oslo", 7, 410], ["Rome", 9, 380]]
RECORDS = "City: Oslo\nUnits: 7\nRevenue: 410\n\nCity: Rome\nUnits: 9\nRevenue: 380"


@pytest.mark.parametrize(
    ("above", "titles"),
    [
        ([["Sales report"]], "Sales report\n\n"),
        ([["Sales report"], []], "Sales report\n\n"),
        ([["Sales report"], ["of 2024"], [], []], "Sales report\n\nof 2024\n\n"),
        ([[], [None, "Sales report"], []], "Sales report\n\n"),
        ([["by", "Kan"], []], "by | Kan\n\n"),
        ([["Sales"], ["by", "Kan"], ["on", "Monday"], []], "Sales\n\nby | Kan\n\non | Monday\n\n"),
        ([], ""),
        ([[]], ""),
    ],
)
def test_rows_above_the_header_are_titles(above: list[list[object]], titles: str) -> None:
    rows = [*above, HEADER, *ROWS]
    assert a_sheet(*rows) == titles + RECORDS
    content = "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows)
    assert parse("a.csv", ".csv", content.encode()).texts == [titles + RECORDS]


def test_a_merged_title_is_a_title() -> None:
    assert a_sheet(["Sales report"], HEADER, *ROWS, merged=["A1:C1"]) == "Sales report\n\n" + RECORDS


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([["Name", "Age"], ["Kan", 3], ["Mira"]], "Name: Kan\nAge: 3\n\nName: Mira"),
        ([["Name", "Age", "Note"], ["Kan", 3], ["Mira", 4, "x"]], "Name: Kan\nAge: 3\n\nName: Mira\nAge: 4\nNote: x"),
        ([[None, "Age"], ["Kan", 3], ["Mira", 4]], "Kan\nAge: 3\n\nMira\nAge: 4"),
        ([[None, "Age", "Note"], ["Kan", 3, "x"]], "Kan\nAge: 3\nNote: x"),
        ([["Name"], ["Kan"], ["Mira"]], "Name: Kan\n\nName: Mira"),
        ([["Title"], HEADER], "Title\n\nCity | Units | Revenue"),
        ([HEADER], "City | Units | Revenue"),
    ],
)
def test_a_header_may_be_sparse_or_alone(rows: list[list[object]], text: str) -> None:
    assert a_sheet(*rows) == text


def test_names_in_two_rows_are_joined() -> None:
    rows = ["City", 2023, None, 2024, None], [None, "sold", "lost", "sold", "lost"], ["Oslo", 1, 2, 3, 4]
    assert a_sheet(*rows, merged=["A1:A2", "B1:C1", "D1:E1"]) == (
        "City: Oslo\n2023 sold: 1\n2023 lost: 2\n2024 sold: 3\n2024 lost: 4"
    )


def test_the_values_of_a_sheet_are_those_that_it_shows() -> None:
    values = [
        datetime(2024, 5, 1),
        datetime(2024, 5, 1, 12, 30),
        time(8, 15),
        timedelta(hours=30),
        "starts at 00:00:00",
        0.1 + 0.2,
        True,
        12345678901,
    ]
    text = a_sheet([f"column {number}" for number in range(8)], values)
    assert [line.partition(": ")[2] for line in text.split("\n")] == [
        "2024-05-01",
        "2024-05-01 12:30:00",
        "08:15:00",
        "1 day, 6:00:00",
        "starts at 00:00:00",
        "0.3",
        "True",
        "12345678901",
    ]


def test_a_formula_without_a_result_is_noted() -> None:
    cells = '<c r="A2"><f>1+1</f><v/></c><c r="B2"><f>1+1</f><v>2</v></c><c r="C2" t="str"><f>""</f><v></v></c>'
    made = hostile.xlsx(
        hostile.cells("A1", "B1", "C1", value="<is><t>n</t></is>", kind="inlineStr") + f'<row r="2">{cells}</row>'
    )
    found = parse("a.xlsx", ".xlsx", made)
    assert found.texts == ["S\n\nn: 2"]
    [problem] = found.problems
    assert problem.message == "S: skipped: formula A2: no result is stored: open it in a spreadsheet, and save it"


def test_objects_in_a_sheet_are_noted() -> None:
    made = hostile.xlsx(hostile.cells("A1"))
    sheet = "xl/worksheets/s.xml"
    with zipfile.ZipFile(io.BytesIO(made)) as archive:
        content = archive.read(sheet).replace(b"</worksheet>", b"<oleObjects><oleObject/></oleObjects></worksheet>")
    [problem] = parse("a.xlsx", ".xlsx", changed(made, **{sheet: content})).problems
    assert problem.message == "skipped: 1 embedded documents or form controls"


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<a:r><a:t>one</a:t></a:r><a:br/><a:r><a:t>two</a:t></a:r>", "one\ntwo"),
        ("<a:r><a:t>un</a:t></a:r>\n    <a:r>\n      <a:t>believable</a:t>\n    </a:r>", "unbelievable"),
        (
            "<a:r><a:t>on </a:t></a:r><a:fld type='datetime1'><a:t>Monday</a:t></a:fld><a:r><a:t>.</a:t></a:r>",
            "on Monday.",
        ),
        ("<a:r><a:t>one</a:t><a:tab/><a:t>two</a:t></a:r>", "one\ttwo"),
    ],
)
def test_words_of_a_slide_are_neither_glued_nor_torn(markup: str, text: str) -> None:
    assert parse("a.pptx", ".pptx", hostile.pptx(f"<a:p>{markup}</a:p>")).texts == [text]


def test_words_of_a_docx_are_neither_glued_nor_torn() -> None:
    run = "<w:r>{}</w:r>".format
    markup = run("<w:t>one</w:t><w:tab/><w:t>two</w:t><w:br/><w:t>x</w:t><w:noBreakHyphen/><w:t>y</w:t><w:softHyphen/>")
    made = hostile.docx(
        f"<w:p><w:pPr><w:tabs><w:tab w:val='left'/></w:tabs></w:pPr>{markup}\n{run('<w:t>z</w:t>')}</w:p>"
    )
    assert parse("a.docx", ".docx", made).texts == ["one\ttwo\nx-yz"]


def test_fractions_and_powers_are_marked() -> None:
    page = (
        "<math><mfrac><mn>1</mn><mrow><mn>2</mn><mi>a</mi></mrow></mfrac><mo>+</mo><msup><mi>b</mi><mn>3"
        "</mn></msup></math>"
    )
    assert parse("a.html", ".html", page.encode()).texts == ["1/2a+b^3"]


# ---------------------------------------------------------------- parts that cannot be read


def changed(made: bytes, **parts: bytes | None) -> bytes:
    """Return the archive with other content of some parts; None leaves one out."""
    with zipfile.ZipFile(io.BytesIO(made)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()} | parts
    return hostile.zipped({name: content for name, content in contents.items() if content is not None})


def a_book(**sheets: str) -> bytes:
    book, written = Workbook(), io.BytesIO()
    book.remove(book.active)
    for name, text in sheets.items():
        book.create_sheet(name)["A1"] = text
    book.save(written)
    return written.getvalue()


def two_chapters(first: str) -> bytes:
    opf = f'<package><manifest><item id="a" href="{first}"/><item id="c" href="c%201.xhtml"/></manifest>'
    opf += '<spine><itemref idref="a"/><itemref idref="none"/><itemref idref="c"/></spine></package>'
    return changed(hostile.epub("<p>The rest."), **{"o/a.opf": opf.encode()})


BAD = {"missing": None, "empty": b"", "cut off": b"<x><y>The rest", "binary": b"\xff\xd8\xff\xe0\0\x10JFIF\0"}
SLIDES = marked.BUILDERS[".pptx"](lambda place: "The rest.")
WORD = marked.BUILDERS[".docx"](lambda place: "The rest.")


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize(
    ("suffix", "made", "part", "named"),
    [
        (".xlsx", a_book(Bad="lost", Good="The rest."), "xl/worksheets/sheet1.xml", "Bad"),
        (".xlsx", a_book(Bad="lost", Good="The rest."), "xl/styles.xml", "xl/styles.xml"),
        (".pptx", SLIDES, "ppt/slides/slide1.xml", "slide 1"),
        (".pptx", SLIDES, "ppt/chart.xml", "ppt/chart.xml"),
        (".pptx", SLIDES, "ppt/notes.xml", "ppt/notes.xml"),
        (".docx", WORD, "word/footnotes.xml", "word/footnotes.xml"),
        (".docx", WORD, "word/header1.xml", "word/header1.xml"),
        (".epub", two_chapters("cover.xhtml"), "o/cover.xhtml", "o/cover.xhtml"),
    ],
)
def test_a_part_that_cannot_be_read_is_noted_and_the_rest_is_read(
    suffix: str, made: bytes, part: str, named: str, how: str
) -> None:
    found = parse("a", suffix, changed(made, **{part: BAD[how]}))
    assert "The rest." in found.texts[0]
    optional = (suffix, how) in ((".epub", "cut off"), (".epub", "empty"))  # as in a browser
    assert optional or [each for each in found.problems if each.message.startswith(f"{named}: skipped: ")]


def test_the_name_of_a_part_may_be_written_in_another_case() -> None:
    made = changed(two_chapters("Cover.xhtml"), **{"o/cover.XHTML": b"<p>Mira plays."})
    assert parse("a.epub", ".epub", made).texts == ["Mira plays.\n\nThe rest."]


@pytest.mark.parametrize("suffix", [".epub", ".pptx"])
def test_a_part_that_is_only_a_picture_is_noted(suffix: str) -> None:
    if suffix == ".epub":
        made = changed(two_chapters("cover.xhtml"), **{"o/cover.xhtml": b"<img src='a.jpg'>"})
    else:
        picture = b"<p:sld xmlns:p='p'><p:pic><p:blipFill/></p:pic></p:sld>"
        made = changed(SLIDES, **{"ppt/slides/slide1.xml": picture})
    messages = [problem.message for problem in parse("a", suffix, made).problems]
    assert any("skipped: it has no text, only pictures: run OCR first" in message for message in messages)


def test_a_broken_page_is_noted_and_the_others_are_read() -> None:
    page = "<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Resources<</Font<</F 5 0 R>>>>/Contents {} 0 R>>"
    made = hostile.pdf(
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R 4 0 R]/Count 2>>",
        page.format(6),
        page.format(7),
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        b"<</Filter/NoSuchFilter/Length 5>>\nstream\nxxxxx\nendstream",
        hostile.stream(b"BT /F 9 Tf (The rest.) Tj ET"),
    )
    found = parse("a.pdf", ".pdf", made)
    assert found.texts == ["\n\nThe rest."]
    assert found.pages == [0, 2]
    [problem] = found.problems
    assert problem.message.startswith("page 1: skipped: it is broken (")


def test_pages_that_are_missing_or_damaged_are_noted() -> None:
    page = "<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Resources<</Font<</F 5 0 R>>>>/Contents {} 0 R>>"
    made = hostile.pdf(
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R 4 0 R 99 0 R]/Count 3>>",
        page.format(6),
        page.format(7),
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        b"<</Filter/FlateDecode/Length 300>>\nstream\n" + b"x" * 300 + b"\nendstream",
        hostile.stream(b"BT /F 9 Tf (The rest.) Tj ET"),
    )
    found = parse("a.pdf", ".pdf", made)
    assert "The rest." in found.texts[0]
    assert [problem.message.partition(":")[2] for problem in found.problems] == [
        " page 1 without readable text: of images, run OCR first (ocrmypdf)",
        " 1 pages that are missing from the file",
    ]


def test_many_problems_are_counted() -> None:
    opf = "".join(f'<itemref idref="i{number}"/>' for number in range(500))
    opf = (
        f"<package><manifest><item id='c' href='c%201.xhtml'/></manifest><spine>{opf}<itemref idref='c'/>"
        f"</spine></package>"
    )
    found = parse("a.epub", ".epub", changed(hostile.epub("<p>The rest."), **{"o/a.opf": opf.encode()}))
    assert found.texts == ["The rest."]
    assert len(found.problems) == 101
    assert found.problems[-1].message == "skipped: 400 more parts"
