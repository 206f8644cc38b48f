"""Reading files: every kind, every encoding, and the reported problems of malformed files."""

from __future__ import annotations

import io
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from pathlib import Path

import hostile
import pytest
from docx import Document
from openpyxl import Workbook

from kvrag import KvragError
from kvrag.retrieval import documents, sandbox
from kvrag.retrieval.content import Content
from kvrag.retrieval.documents import find, page_numbers, parse, read
from kvrag.retrieval.sandbox import Sandbox

GERMAN = "Die Straße nach München führt über Österreich."
OTHERS = {
    "cp1251": "Привет, мир! Это обычный русский текст о погоде.",  # noqa: RUF001
    "koi8_r": "Привет, мир! Это обычный русский текст о погоде.",  # noqa: RUF001
    "cp1250": "Zażółć gęślą jaźń. Łódź i Kraków są piękne.",
    "cp932": "吾輩は猫である。名前はまだ無い。どこで生れたか",
    "gb18030": "今天天气很好,我们去公园散步吧。",
    "latin-1": "café ü",
}


def said(found: Content) -> list[str]:
    return [str(problem) for problem in found.problems]


def a_docx() -> bytes:
    document = Document()
    document.add_paragraph("Mira plays the harp.")
    table = document.add_table(2, 2)
    for row, texts in zip(table.rows, (("name", "owns"), ("Kan", "a goat")), strict=True):
        row.cells[0].text, row.cells[1].text = texts
    wide = document.add_table(1, 2)
    wide.cell(0, 0).merge(wide.cell(0, 1)).text = "merged"
    document.add_paragraph("The end.")
    written = io.BytesIO()
    document.save(written)
    return written.getvalue()


# ---------------------------------------------------------------- encodings


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("kind", [".txt", ".csv", ".jsonl", ".html"])
def test_unicode_is_read(encoding: str, kind: str) -> None:
    content = {".csv": "a,b\nx,ä\n", ".jsonl": '{"text": "ä"}', ".html": "<p>ä</p>"}.get(kind, "ä")
    found = parse("a", kind, content.encode(encoding))
    assert found.texts == [{".csv": "a: x\nb: ä"}.get(kind, "ä")]
    assert not found.problems


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", *OTHERS])
def test_a_guessed_encoding_is_reported(encoding: str) -> None:
    text = OTHERS.get(encoding, GERMAN)
    found = parse("a.txt", ".txt", text.encode(encoding))
    assert found.texts == [text]
    [problem] = said(found)
    assert problem.startswith("a.txt: not in UTF-8: read as ")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [("a.csv", b"a,b\nx,\0y\n" + b"z,w\n" * 20, "a: x\nb: y"), ("a.txt", GERMAN.encode() + b"\0", GERMAN)],
)
def test_a_stray_nul_is_left_out(name: str, content: bytes, text: str) -> None:
    found = parse(name, Path(name).suffix, content)
    assert found.texts[0].startswith(text)
    assert "\0" not in found.texts[0]
    for encoding in ("cp1252", "utf-8-sig", "utf-16"):
        assert parse("a.txt", ".txt", f"{GERMAN}\0".encode(encoding)).texts == [GERMAN]


def test_a_page_that_names_its_encoding_needs_no_guess() -> None:
    page = f'<meta charset="iso-8859-2"><p>{OTHERS["cp1250"]}</p>'
    found = parse("a.html", ".html", page.encode("iso-8859-2"))
    assert found == Content("a.html", [OTHERS["cp1250"]])
    wrong = f'<meta charset="no-such"><p>{GERMAN}</p>'.encode("cp1252")
    assert parse("a.html", ".html", wrong).texts == [GERMAN]


def test_a_guess_does_not_read_all_of_a_large_file() -> None:
    text = "word\n" * 200_000 + OTHERS["cp1251"]
    assert parse("a.txt", ".txt", text.encode("cp1251")).texts == [text]


# ---------------------------------------------------------------- kinds of files


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_is_read_row_by_row(delimiter: str) -> None:
    quoted = '"two\n\nlines and ""quotes"""'
    rows = [["name", "note", ""], ["Mira", '"a, b; c"', "more"], ["Kan", quoted], [""], ["Zel"]]
    content = "\r\n".join(delimiter.join(row) for row in rows).encode()
    found = parse("a.csv", ".csv", content)
    assert found.texts == ['name: Mira\nnote: a, b; c\nmore\n\nname: Kan\nnote: two\n\nlines and "quotes"\n\nname: Zel']
    assert not found.problems
    assert parse("a.csv", ".csv", b"a,b\rc,d\re,f\r").texts == ["a: c\nb: d\n\na: e\nb: f"]


def test_an_unclosed_quote_affects_one_field() -> None:
    content = b'a,b\n1,2\n3,"' + b"x,\n" * 60_000 + b"4,5\n"
    found = parse("a.csv", ".csv", content)
    assert found.texts[0].startswith("a: 1\nb: 2")
    assert found.texts[0].endswith("a: 4\nb: 5")
    assert said(found) == [
        "a.csv, line 3: skipped: the row cannot be read (field larger than field limit (131072)): check its quotes"
    ]


def test_a_malformed_line_is_skipped_alone() -> None:
    bad = ["broken", "[1]", '{"body": "x"}', '{"text": 5}', "[" * 100_000]
    lines = ['{"text": "a\u2028b"}', "", *bad, '{"text": "c"}']
    found = parse("a.jsonl", ".jsonl", "\n".join(lines).encode())
    assert found.texts == ["a\u2028b", "c"]  # a line separator is part of a string
    assert [problem.line for problem in found.problems] == [3, 4, 5, 6, 7]
    reasons = [problem.message for problem in found.problems]
    assert "not JSON" in reasons[0]
    for reason in reasons[1:4]:
        assert (
            reason == "skipped: it is not a JSON object with a text in the field 'text'"
        )  # and no option: it may be an upload
    assert "not JSON" in reasons[4]
    many = parse("a.jsonl", ".jsonl", b"[]\n" * 5000)
    assert not many.texts
    assert len(many.problems) == 101
    assert many.problems[-1].message == "skipped: 4900 more lines"


def test_lone_surrogates_do_not_reach_the_tokenizer() -> None:
    [text] = parse("a.jsonl", ".jsonl", rb'{"text": "a \ud800 b \ud83d\ude00"}').texts
    assert text == "a \ufffd b \U0001f600"


def test_a_word_document_is_read_with_its_tables() -> None:
    found = parse("a.docx", ".docx", a_docx())
    assert found == Content("a.docx", ["Mira plays the harp.\n\nname | owns\nKan | a goat\n\nmerged\n\nThe end."])


def test_chunks_of_a_pdf_have_pages() -> None:
    texts, pages = ["7\n\nZel owns\n\na snake.\n\n7\n\nZel plays."], [0, 3, 13, 23, 26]
    assert page_numbers(["7", "Zel owns\n\na snake.", "7\n\nZel plays."], texts, pages) == {
        "7": (1, 1),
        "Zel owns\n\na snake.": (2, 3),
        "7\n\nZel plays.": (4, 5),
    }
    overlapping = ["7\n\nZel owns", "owns\n\na snake.", "snake.\n\n7", "7\n\nZel plays."]
    assert list(page_numbers(overlapping, texts, pages).values()) == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert page_numbers(["Zel owns"], texts, []) == {}


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>Hello <b>world</b>! See <a href='#'>this</a>.</p>", "Hello world! See this."),
        ("<p>H<sub>2</sub>O is un<em>believ</em>able</p>", "H2O is unbelievable"),
        ("<h1>Title</h1>one\n <i>line</i><br>two<ul><li>a<li>b</ul>end", "Title\none line\ntwo\na\nb\nend"),
        ("<p>a<script>if (a < b) {}</script>b<!-- c --><style>p {}</style>", "ab"),
        ("<pre>def f():\n    <b>return</b> 1\n</pre>done", "def f():\n    return 1\ndone"),
        ("<table><tr><th>a<th>b<tr><td>1<td></table>", "a | b\n1 | "),
        ("<table><tr><td><p>a</p><p>b</p><td><ul><li>c<li>d</ul></table>", "a b | c d"),
        ("<table><tr><td><p>layout</p><p>page</p></table>", "layout\npage"),
        ("<table><tr><td>menu<td><p>x</p><table><tr><td>a<td>b</table>y</table>", "menu\nx\na | b\ny"),
        ("<![if !IE]>a<![endif]>&lt;b&gt; &auml;&nbsp;&#xd800;", "a<b> ä \ufffd"),
    ],
)
def test_blocks_of_a_page_are_lines_and_inline_tags_are_not(page: str, text: str) -> None:
    assert parse("a.html", ".html", page.encode()).texts == [text]


@pytest.mark.parametrize("suffix", [".xlsx", ".pptx", ".epub"])
def test_office_documents_and_books_are_read(suffix: str) -> None:
    made, text = OFFICE[suffix]
    assert parse(f"a{suffix}", suffix, made()) == Content(f"a{suffix}", [text])


def a_sheet() -> bytes:
    book = Workbook()
    for values in (["name", "born", "share"], ["Mira", date(1990, 5, 1), 0.1 + 0.2], [], ["Kan", None, True]):
        book.active.append(values)
    book.create_sheet("Empty")
    book.create_sheet("Note")["B3"] = "alone"
    written = io.BytesIO()
    book.save(written)
    return written.getvalue()


SLIDE = (
    "<a:p><a:r><a:t>Mira </a:t></a:r><a:r><a:t>plays.</a:t></a:r><a:fld><a:t> (7)</a:t></a:fld></a:p>"
    "<a:tbl><a:tableStyleId>{1}</a:tableStyleId><a:tr><a:tc><a:p><a:r><a:t>Kan</a:t></a:r></a:p></a:tc>"
    "<a:tc><a:p><a:r><a:t>a goat</a:t></a:r></a:p></a:tc></a:tr></a:tbl>"
)
OFFICE: dict[str, tuple[Callable[[], bytes], str]] = {
    ".xlsx": (
        a_sheet,
        "Sheet\n\nname: Mira\nborn: 1990-05-01\nshare: 0.3\n\nname: Kan\nshare: True\n\nNote\n\nalone",
    ),
    ".pptx": (lambda: hostile.pptx(SLIDE), "Mira plays. (7)\nKan | a goat"),
    ".epub": (lambda: hostile.epub("<h1>One</h1><p>Mira <i>plays</i>.</p>"), "One\nMira plays."),
}


def test_a_cell_over_several_rows_of_a_word_table_is_in_each() -> None:
    document = Document()
    table = document.add_table(3, 3)
    for number, each in enumerate(table._cells):
        each.text = str(number)
    table.cell(0, 0).merge(table.cell(1, 1)).text = "wide and high"
    written = io.BytesIO()
    document.save(written)
    assert parse("a.docx", ".docx", written.getvalue()).texts == [
        "wide and high | wide and high | 2\nwide and high | wide and high | 5\n6 | 7 | 8"
    ]


# ---------------------------------------------------------------- hostile files


SLOW = {each for each in hostile.FILES if "200 MiB" in each[1] or "times" in each[1] or "parts" in each[1]}
"""Those that take seconds to generate or to read; the torture campaign reads them."""


def zipped(name: str, size: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as file:
        for _ in range(size >> 20):
            file.write(b" " * (1 << 20))
    return made.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "the file is binary: extract its text, for example with OCR"),
        ("a.csv", b"\xff\xd8\xff\xe0\0\x10JFIF", "the file is binary"),
        ("a.md", b"RIFF\0\0\0\0WEBPVP8 ", "the file is binary"),
        ("a.txt", b"\0\1\2", "the file is binary"),
        ("a.txt", b"%PDF-1.4\n\0\xff\xfe", "it is no text: name it by its kind (.html .htm .pdf .csv .docx"),
        ("upload", hostile.xlsx(""), "it is no text: name it by its kind"),
        ("a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "or save it as one of these"),
        ("a.txt", b"\xff\xfe\0", "the file is binary"),
        ("a.txt", b"\x7fELF\2\1\1\0\1\2\3\4\5\6\7\x08", "the file is binary"),
        ("a.txt", bytes(range(1, 256)), "the file is binary"),
        ("a.txt", b"", "the file contains no text"),
        ("a.csv", b"", "the file contains no text"),
        ("a.jsonl", b"\n\n", "the file contains no text"),
        ("a.html", b"<p></p>", "the file contains no text"),
        ("a.docx", b"", "it is a broken or protected DOCX file (BadZipFile"),
        ("a.docx", b"no zip at all", "it is a broken or protected DOCX file (BadZipFile"),
        ("a.docx", a_docx()[:-200], "it is a broken or protected DOCX file"),
        ("a.docx", zipped("a.txt", 1 << 20), "it is a broken or protected DOCX file"),
        ("a.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "save it as .docx without a password"),
    ],
)
def test_unreadable_files_are_reported_with_a_remedy(name: str, content: bytes, reason: str) -> None:
    found = parse(name, Path(name).suffix, content)
    assert not found.texts
    [problem] = said(found)
    assert problem.startswith(f"{name}: skipped: ")
    assert reason in problem
    assert "iconv" not in problem


@pytest.fixture(scope="module")
def child() -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch, closing(Sandbox()) as child:
        patch.setattr(sandbox, "_SECONDS", 1)
        patch.setattr(sandbox, "_SECONDS_PER_MIB", 0)
        patch.setattr(sandbox, "_BYTES", 500 << 20)
        yield child


@pytest.mark.parametrize(("suffix", "name"), sorted(hostile.FILES.keys() - hostile.ENDLESS - SLOW))
def test_hostile_files_are_read_or_skipped_with_a_reason(suffix: str, name: str, child: Sandbox) -> None:
    content = hostile.FILES[suffix, name]()
    found = child.parse("a", suffix, content)
    assert found.texts or found.problems
    assert sum(map(len, found.texts)) <= (64 << 20) + 8 * len(content)
    assert "root:" not in "".join(found.texts)
    assert not any("\n" in problem for problem in said(found))


def test_a_word_of_a_long_line_is_measured_once() -> None:
    measured = Counter[str]()

    def count(text: str) -> int:
        measured[text] += 1
        return len(text.split())

    words = [f"word{number % 50}" for number in range(4000)]
    chunks = documents.splitter(count, 20, 0)([" ".join(words)])
    assert " ".join(chunks).split() == words
    assert max(map(count, chunks)) <= 20
    assert max(measured[word] for word in words) == 1


def test_a_text_that_begins_like_an_image_is_text() -> None:
    assert parse("a.txt", ".txt", b"BMW and GIF89 are names.").texts == ["BMW and GIF89 are names."]


def test_folders_list_skipped_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "photo.jpeg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "other.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.png").write_bytes(b"\x89PNG")
    (tmp_path / "broken.md").symlink_to(tmp_path / "nowhere.md")
    (tmp_path / "loop.md").symlink_to(tmp_path / "loop.md")
    os.mkfifo(tmp_path / "pipe.txt")
    found, problems = find([tmp_path])
    assert found == [tmp_path / "a.txt", tmp_path / "pipe.txt"]
    assert [str(problem) for problem in problems] == [
        f"{tmp_path / 'broken.md'}: skipped: the link is broken",
        f"{tmp_path / 'loop.md'}: skipped: the link is broken",
        f"{tmp_path}: skipped: files of other kinds (2 .png, 1 .jpeg): to read one as text, name the file itself",
    ]
    assert said(read(tmp_path / "pipe.txt")) == [f"{tmp_path / 'pipe.txt'}: skipped: it is not a regular file"]
    with pytest.raises(KvragError, match="is a broken link: check"):
        find([tmp_path / "broken.md"])
    with pytest.raises(KvragError, match="does not exist"):
        find([tmp_path / "nowhere.md"])


def test_a_file_without_read_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("text")

    def forbidden(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)  # tests may run as root
    assert said(read(secret)) == [f"{secret}: skipped: Permission denied"]


def test_folders_and_files_that_cannot_be_read_are_reported(tmp_path: Path, forbid: Callable[[Path], None]) -> None:
    for name in ("a.txt", "closed/b.txt", "listed/c.txt", ".hidden/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    for name in ("closed", "listed/c.txt", ".hidden"):
        forbid(tmp_path / name)
    found, problems = find([tmp_path])
    assert found == [tmp_path / "a.txt"]
    assert {(str(problem), problem.is_unreadable) for problem in problems} == {
        (f"{tmp_path / 'closed'}: skipped: Permission denied", True),
        (f"{tmp_path / 'listed' / 'c.txt'}: skipped: Permission denied", True),
    }
    assert "is_unreadable" not in problems[0].to_dict()
    with pytest.raises(KvragError, match="closed: skipped: Permission denied"):
        find([tmp_path / "closed"])


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lxml", None)
    with pytest.raises(KvragError, match=r"lxml is not installed: pip install 'kvrag\[cli\]'"):
        parse("a.docx", ".docx", a_docx())


def test_suffixes_are_those_that_are_read() -> None:
    assert set(documents.SUFFIXES) >= {".csv", ".docx", ".jsonl", ".pdf"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'"Name, first";"Age"\n"Doe, J";3', "Name, first: Doe, J\nAge: 3"),
        (b'"a|b|c",d\n1,2', "a|b|c: 1\nd: 2"),
        (b'"a\nb, c, e";d\n1;2', "a\nb, c, e: 1\nd: 2"),
        (b'id,"colour (red; green; blue)"\n1,red\n', "id: 1\ncolour (red; green; blue): red"),
        (b"STRUCTURE,freq|unit|geo: label\nx,1\n", "STRUCTURE: x\nfreq|unit|geo: label: 1"),
        (b"name;price, EUR\nA;1,5\nB;2,5\n", "name: A\nprice, EUR: 1,5\n\nname: B\nprice, EUR: 2,5"),
        (b"a,b; c\nx,y; z\n", "a: x\nb; c: y; z"),
        (b"a,b\tc,d\n1,2\t3,4\n", "a,b: 1,2\nc,d: 3,4"),
        (b'a,b\n1,"2;3;4"\n5,"6;7;8"\n', "a: 1\nb: 2;3;4\n\na: 5\nb: 6;7;8"),
        (b"sep=;\r\nname;age\r\nAlice;30\r\n", "name: Alice\nage: 30"),
        (b"sep=|\na,b,c|d\n1|2\n", "a,b,c: 1\nd: 2"),
    ],
)
def test_the_delimiter_of_a_csv_is_that_of_its_rows(content: bytes, text: str) -> None:
    assert documents.parse("a.csv", ".csv", content).texts == [text]
