"""Documents with a marker word in every place where an application shows text.

Each builder returns a file, given a function that returns a new marker for a place; `HIDDEN` is in none of them shown.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping

from hostile import pdf, stream, zipped
from openpyxl import Workbook
from openpyxl.chart import BarChart, Reference
from openpyxl.comments import Comment

Mark = Callable[[str], str]
HIDDEN = "hiddenword"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
_NAMES = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "r": f"{_OFFICE}/relationships",
    "m": f"{_OFFICE}/math",
    "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
    "p": "http://schemas.openxmlformats.org/presentationml/2006/main",
    "c": "http://schemas.openxmlformats.org/drawingml/2006/chart",
    "dgm": "http://schemas.openxmlformats.org/drawingml/2006/diagram",
    "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
    "wp": "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing",
    "xdr": "http://schemas.openxmlformats.org/drawingml/2006/spreadsheetDrawing",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    "v": "urn:schemas-microsoft-com:vml",
}
_XMLNS = " ".join(f'xmlns:{name}="{uri}"' for name, uri in _NAMES.items())


def _rels(**targets: str) -> str:
    """Return the relations of a part: kind and number -> target. They are named like that."""
    rows = (
        f'<Relationship Id="{id}" Type="{_OFFICE}/relationships/{id.rstrip("0123456789")}" Target="{target}"/>'
        for id, target in targets.items()
    )
    return f"<Relationships xmlns='http://schemas.openxmlformats.org/package/2006/relationships'>{''.join(rows)}</Relationships>"


def _root(tag: str, content: str) -> str:
    return f"<{tag} {_XMLNS}>{content}</{tag}>"


def _drawn(text: str) -> str:
    return f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>"


def _chart(mark: Mark) -> str:
    def cached(tag: str, kind: str, *values: str) -> str:
        points = "".join(f'<c:pt idx="{number}"><c:v>{value}</c:v></c:pt>' for number, value in enumerate(values))
        cache = f"<c:formatCode>{HIDDEN}</c:formatCode>" * (kind == "num")
        return (
            f"<c:{tag}><c:{kind}Ref><c:f>Sheet1!{HIDDEN}</c:f><c:{kind}Cache>{cache}{points}</c:{kind}Cache>"
            f"</c:{kind}Ref></c:{tag}>"
        )

    series = cached("tx", "str", mark("series of a chart")) + cached("cat", "str", mark("category of a chart"), "b")
    label = f"<c:dLbls><c:dLbl><c:tx><c:rich>{_drawn(mark('label in a chart'))}</c:rich></c:tx></c:dLbl></c:dLbls>"
    return _root(
        "c:chartSpace",
        f"<c:chart><c:title><c:tx><c:rich>{_drawn(mark('title of a chart'))}</c:rich></c:tx></c:title><c:plotArea>"
        f"<c:ser>{label}{series}{cached('val', 'num', '4711', '4712')}</c:ser><c:valAx><c:title><c:tx><c:rich>"
        f"{_drawn(mark('axis of a chart'))}</c:rich></c:tx></c:title></c:valAx></c:plotArea></c:chart>",
    )


def _diagram(mark: Mark) -> str:
    points = "".join(f"<dgm:pt><dgm:t>{_drawn(mark(f'SmartArt {number}'))}</dgm:t></dgm:pt>" for number in (1, 2))
    return _root("dgm:dataModel", f"<dgm:ptLst>{points}</dgm:ptLst>")


def _graphics() -> str:
    return (
        '<a:graphic><a:graphicData><c:chart r:id="chart1"/></a:graphicData></a:graphic>'
        '<a:graphic><a:graphicData><dgm:relIds r:dm="diagramData1" r:lo="x" r:qs="x" r:cs="x"/></a:graphicData>'
        "</a:graphic>"
    )


def docx(mark: Mark) -> bytes:
    def run(text: str) -> str:
        return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'

    def paragraph(text: str) -> str:
        return f"<w:p>{run(text)}</w:p>"

    def sdt(content: str) -> str:
        return f"<w:sdt><w:sdtPr><w:alias w:val='{HIDDEN}'/></w:sdtPr><w:sdtContent>{content}</w:sdtContent></w:sdt>"

    def cell(content: str) -> str:
        return f"<w:tc><w:tcPr/>{content}</w:tc>"

    def table(*rows: str) -> str:
        return f"<w:tbl><w:tblPr/><w:tblGrid><w:gridCol/></w:tblGrid>{''.join(rows)}</w:tbl>"

    def row(*cells: str) -> str:
        return f"<w:tr>{''.join(cells)}</w:tr>"

    inner = table(row(cell(paragraph(mark("table in a table"))), cell(paragraph("x"))))
    shape = (
        "<mc:AlternateContent><mc:Choice Requires='wps'><w:drawing><wp:anchor><wp:positionH><wp:posOffset>123456"
        f"</wp:posOffset></wp:positionH><wps:txbx><w:txbxContent>{paragraph(mark('text box'))}</w:txbxContent>"
        f"</wps:txbx>"
        f"</wp:anchor></w:drawing></mc:Choice><mc:Fallback><w:pict><v:textbox><w:txbxContent>{paragraph(HIDDEN)}"
        "</w:txbxContent></v:textbox></w:pict></mc:Fallback></mc:AlternateContent>"
    )
    body = [
        paragraph(mark("body")),
        f"<w:p>{run('in ')}<w:ins w:id='1' w:author='a'>{run(mark('tracked insertion'))}</w:ins>"
        f"<w:del w:id='2' w:author='a'><w:r><w:delText>{HIDDEN}</w:delText></w:r></w:del></w:p>",
        f"<w:p><w:moveFrom w:id='3'>{run(HIDDEN)}</w:moveFrom></w:p>",
        f"<w:p><w:moveTo w:id='3'>{run(mark('moved text'))}</w:moveTo></w:p>",
        sdt(paragraph(mark("paragraph in a content control"))),
        f"<w:p>{sdt(run(mark('words in a content control')))}</w:p>",
        table(
            sdt(row(cell(paragraph(mark("row in a content control"))), cell(paragraph("x")))),
            row(
                sdt(cell(paragraph(mark("cell in a content control")))), cell(sdt(paragraph(mark("control in a cell"))))
            ),
            row(cell(inner + "<w:p/>"), cell(paragraph("y"))),
        ),
        f"<w:p><w:smartTag w:uri='u' w:element='e'>{run(mark('smart tag'))}</w:smartTag></w:p>",
        f"<w:p><w:customXml w:element='e'>{run(mark('custom XML'))}</w:customXml></w:p>",
        f"<w:p><w:fldSimple w:instr='{HIDDEN}'>{run(mark('simple field'))}</w:fldSimple></w:p>",
        "<w:p><w:r><w:fldChar w:fldCharType='begin'/></w:r>"
        f"<w:r><w:instrText>{HIDDEN}</w:instrText></w:r><w:r><w:fldChar w:fldCharType='separate'/></w:r>"
        f"{run(mark('field'))}<w:r><w:fldChar w:fldCharType='end'/></w:r></w:p>",
        f"<w:p><w:hyperlink w:anchor='x'>{run(mark('link'))}</w:hyperlink></w:p>",
        f"<w:p>{run('before ')}<w:r>{shape}</w:r>{run('and behind')}</w:p>",
        f"<w:p><w:r><w:pict><v:textbox><w:txbxContent>{paragraph(mark('old text box'))}</w:txbxContent>"
        f"</v:textbox></w:pict></w:r></w:p>",
        f"<w:p><w:r><w:pict><v:shape><v:textpath string='{mark('word art')}'/></v:shape></w:pict></w:r></w:p>",
        f"<w:p><m:oMath><m:f><m:num><m:r><m:t>{mark('equation')}</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t>"
        f"</m:r></m:den></m:f></m:oMath></w:p>",
        f"<w:p>{run('The rent')}<w:r><w:footnoteReference w:id='2'/></w:r>{run(' is')}<w:r>"
        f"<w:endnoteReference w:id='3'/></w:r>"
        f"{run(' 900')}<w:r><w:commentReference w:id='4'/></w:r>{run(' euros.')}</w:p>",
        f"<w:p><w:r><w:rPr><w:vanish/></w:rPr><w:t>x</w:t></w:r><w:r><w:ruby><w:rt>{run(mark('ruby'))}</w:rt>"
        f"<w:rubyBase>{run('漢')}</w:rubyBase></w:ruby></w:r></w:p>",
        f"<w:p><w:r><w:drawing>{_graphics()}</w:drawing></w:r></w:p>",
        f"<w:p><w:unknown><w:new>{run(mark('element of the future'))}</w:new></w:unknown></w:p>",
        "<w:p><w:r><w:object><v:shape/>"
        "<o:OLEObject xmlns:o='urn:schemas-microsoft-com:office:office' Type='Embed'/></w:object></w:r></w:p>",
        "<w:sectPr><w:headerReference w:type='first' r:id='header1'/>"
        "<w:footerReference w:type='default' r:id='footer1'/></w:sectPr>",
    ]
    names = ("header1", "footer1", "footnotes", "endnotes", "comments", "chart1", "diagramData1")
    return zipped(
        {
            "_rels/.rels": _rels(officeDocument="word/document.xml"),
            "word/document.xml": _root("w:document", f"<w:body>{''.join(body)}</w:body>"),
            "word/_rels/document.xml.rels": _rels(**{name: f"{name}.xml" for name in names}),
            "word/header1.xml": _root("w:hdr", paragraph(mark("header"))),
            "word/footer1.xml": _root("w:ftr", paragraph(mark("footer"))),
            "word/footnotes.xml": _root(
                "w:footnotes", f"<w:footnote w:id='2'>{paragraph(mark('footnote'))}</w:footnote>"
            ),
            "word/endnotes.xml": _root("w:endnotes", f"<w:endnote w:id='3'>{paragraph(mark('endnote'))}</w:endnote>"),
            "word/comments.xml": _root(
                "w:comments",
                f"<w:comment w:id='4' w:author='{mark('author of a comment')}'>{paragraph(mark('comment'))}</w:comment>"
                f"<w:comment w:id='5' w:author='b'>{paragraph(mark('comment on nothing'))}</w:comment>",
            ),
            "word/chart1.xml": _chart(mark),
            "word/diagramData1.xml": _diagram(mark),
        }
    )


def xlsx(mark: Mark) -> bytes:
    book = Workbook()
    sheet = book.active
    sheet.title = mark("name of a sheet")
    sheet["A1"] = mark("title")
    for row in (
        [],
        [mark("name of a column"), "b"],
        [mark("cell"), 1],
        [mark("hidden row"), 2],
        ["x", 3, mark("hidden column")],
    ):
        sheet.append(row)
    sheet.row_dimensions[5].hidden = True
    sheet.column_dimensions["C"].hidden = True
    sheet["A4"].comment = Comment(mark("comment"), "a")
    sheet.oddHeader.center.text = mark("header of the print")
    sheet.oddFooter.left.text = mark("footer of the print")
    chart = BarChart()
    chart.title = mark("title of a chart")
    chart.add_data(Reference(sheet, 2, 3, 2, 5), titles_from_data=True)
    sheet.add_chart(chart, "E5")
    other = book.create_sheet("Other")
    other.sheet_state = "hidden"
    other["B2"] = mark("hidden sheet")
    alone = book.create_chartsheet("Alone")
    more = BarChart()
    more.title = mark("chart in a sheet of its own")
    more.add_data(Reference(sheet, 2, 3, 2, 5))
    alone.add_chart(more)
    written = io.BytesIO()
    book.save(written)
    with zipfile.ZipFile(written) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    shape = (
        f"<xdr:twoCellAnchor><xdr:from><xdr:col>98765</xdr:col></xdr:from><xdr:sp>"
        f"<xdr:txBody>{_drawn(mark('text box'))}</xdr:txBody></xdr:sp></xdr:twoCellAnchor>"
    )
    drawing = parts["xl/drawings/drawing1.xml"].decode()
    parts["xl/drawings/drawing1.xml"] = drawing.replace("</wsDr>", f"<x {_XMLNS}>{shape}</x></wsDr>").encode()
    return zipped(parts)


def pptx(mark: Mark) -> bytes:
    def shape(content: str, placeholder: str = "") -> str:
        kind = f'<p:ph type="{placeholder}"/>' if placeholder else ""
        return f"<p:sp><p:nvSpPr><p:nvPr>{kind}</p:nvPr></p:nvSpPr><p:txBody>{content}</p:txBody></p:sp>"

    def slide(content: str, tag: str = "p:sld") -> str:
        return _root(tag, f"<p:cSld><p:spTree>{content}</p:spTree></p:cSld>")

    table = (
        f"<a:tbl><a:tableStyleId>{HIDDEN}</a:tableStyleId><a:tr><a:tc><a:txBody>{_drawn(mark('cell'))}"
        f"</a:txBody></a:tc>"
        f"<a:tc><a:txBody>{_drawn('x')}</a:txBody></a:tc></a:tr></a:tbl>"
    )
    math = f"<a:p><m:oMath><m:r><m:t>{mark('equation')}</m:t></m:r></m:oMath></a:p>"
    field = f"<a:p><a:r><a:t>in </a:t></a:r><a:fld type='datetime1'><a:t>{mark('field')}</a:t></a:fld></a:p>"
    timing = f"<p:timing><p:attrName>{HIDDEN}</p:attrName></p:timing>"
    content = "".join(
        [
            shape(_drawn(mark("title")), "title"),
            shape(_drawn(mark("text box"))),
            shape(_drawn(mark("footer")), "ftr"),
            f"<p:grpSp>{shape(_drawn(mark('shape in a group')))}</p:grpSp>",
            f"<p:graphicFrame>{table}</p:graphicFrame><p:graphicFrame>{_graphics()}</p:graphicFrame>",
            shape(math + field),
            f"<p:new>{shape(_drawn(mark('element of the future')))}</p:new>",
        ]
    )
    related = {"notesSlide1": "../notes.xml", "comments1": "../comments.xml", "slideLayout1": "../layout.xml"}
    related |= {"chart1": "../chart.xml", "diagramData1": "../data.xml"}
    return zipped(
        {
            "ppt/presentation.xml": _root(
                "p:presentation",
                '<p:sldIdLst><p:sldId id="256" r:id="slide1"/><p:sldId id="257" r:id="slide2"/></p:sldIdLst>',
            ),
            "ppt/_rels/presentation.xml.rels": _rels(slide1="slides/slide1.xml", slide2="slides/slide2.xml"),
            "ppt/slides/slide1.xml": slide(content + timing),
            "ppt/slides/_rels/slide1.xml.rels": _rels(**related),
            "ppt/slides/slide2.xml": _root(
                "p:sld", f"<p:cSld><p:spTree>{shape(_drawn(mark('hidden slide')))}</p:spTree></p:cSld>"
            ).replace("<p:sld ", "<p:sld show='0' "),
            "ppt/notes.xml": slide(shape(_drawn(mark("speaker notes")), "body"), "p:notes"),
            "ppt/comments.xml": _root("p:cmLst", f"<p:cm><p:text>{mark('comment')}</p:text></p:cm>"),
            "ppt/layout.xml": slide(
                shape(_drawn(mark("text of the layout"))) + shape(_drawn(HIDDEN), "body"), "p:sldLayout"
            ),
            "ppt/_rels/layout.xml.rels": _rels(slideMaster1="master.xml"),
            "ppt/master.xml": slide(
                shape(_drawn(HIDDEN), "title") + shape(_drawn(mark("text of the master"))), "p:sldMaster"
            ),
            "ppt/chart.xml": _chart(mark),
            "ppt/data.xml": _diagram(mark),
        }
    )


def html(mark: Mark) -> bytes:
    return (
        f"<title>{mark('title')}</title><style>{HIDDEN}</style><script>{HIDDEN}</script><body>{mark('body')}"
        f"<header>{mark('header')}</header><p>a<b>{mark('bold')}</b><del>{mark('struck text')}</del>"
        f"<ins>{mark('insertion')}</ins>"
        f"<table><caption>{mark('caption')}</caption><tr><th>{mark('header of a table')}<th>b<tr><td>{mark('cell')}<td>"
        f"<table><tr><td>{mark('table in a table')}<td>x</table></table>"
        f"<form><input value='{mark('value in a form')}'><input type=hidden value={HIDDEN}>"
        f"<textarea>{mark('text area')}</textarea>"
        f"<select><option>{mark('option')}</select><button>{mark('button')}</button></form>"
        f"<details><summary>{mark('summary')}</summary>{mark('details')}</details><img alt='{mark('alt text')}'>"
        f"<svg><text>{mark('drawing')}</text></svg><math><mi>{mark('equation')}</mi></math><ruby>漢"
        f"<rt>{mark('ruby')}</rt></ruby>"
        f"<my-card>{mark('element of the future')}</my-card><pre>{mark('code')}</pre><footer>{mark('footer')}</footer>"
    ).encode()


def epub(mark: Mark) -> bytes:
    items = [*("a.xhtml", "b.xhtml", "c.svg")]
    manifest = "".join(f'<item id="i{number}" href="{name}"/>' for number, name in enumerate(items))
    spine = "".join(f'<itemref idref="i{number}" linear="no"/>' for number in range(len(items)))
    return zipped(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": '<container><rootfiles><rootfile full-path="o/a.opf"/></rootfiles></container>',
            "o/a.opf": f"<package><manifest>{manifest}</manifest><spine>{spine}</spine></package>",
            "o/a.xhtml": html(mark),
            "o/b.xhtml": f"<html><body><aside epub:type='footnote'>{mark('footnote')}</aside></body></html>",
            "o/c.svg": f"<svg xmlns='http://www.w3.org/2000/svg'><text>{mark('page that is a drawing')}</text></svg>",
        }
    )


FIRST = 9
"""Number of the first of a PDF's annotations."""


def pdf_(mark: Mark) -> bytes:
    """Pages: text, fields and comments; an image; a stream that is broken."""

    def field(names: str) -> str:
        return f"<</Type/Annot/Subtype/Widget/Rect[0 0 9 9]/FT{names}>>"

    fields = [
        field(f"/Tx/T(name)/V({mark('field of a form')})"),
        field(f"/Ch/T(city)/Opt[[(o)({mark('choice in a form')})]]/V(o)"),
        field(f"/Btn/T({mark('name of a checked box')})/V/Yes/AS/Yes"),
        field(f"/Btn/T({HIDDEN})/V/Off"),
        field(f"/Tx/T({HIDDEN})/V()"),
        f"<</Type/Annot/Subtype/Widget/Parent<</FT/Tx/T(parent)/V {FIRST + 10} 0 R>>>>",
        field(f"/Tx/T(secret)/Ff 8192/V({HIDDEN})"),
        f"<</Type/Annot/Subtype/FreeText/Contents({mark('text box')})>>",
        f"<</Type/Annot/Subtype/Text/Contents({mark('comment')})>>",
        f"<</Type/Annot/Subtype/Link/Contents({HIDDEN})>>",
        f"({mark('value of a field above')})",
    ]
    annotations = " ".join(f"{FIRST + number} 0 R" for number in range(len(fields) - 1))
    page = "<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Resources<</Font<</F 6 0 R>>/XObject<</I 8 0 R>>>>"
    return pdf(
        "<</Type/Catalog/Pages 2 0 R/Names<</EmbeddedFiles<</Names[]>>>>>>",
        "<</Type/Pages/Kids[3 0 R 4 0 R 5 0 R]/Count 3>>",
        f"{page}/Contents 7 0 R/Annots[{annotations}]>>",
        f"{page}/Contents {FIRST + len(fields)} 0 R>>",
        f"{page}/Contents {FIRST + len(fields) + 1} 0 R>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        stream(f"BT /F 9 Tf 9 9 Td ({mark('page')}) Tj ET".encode()),
        stream(b"\0", "/Type/XObject/Subtype/Image/Width 1/Height 1/BitsPerComponent 8/ColorSpace/DeviceGray"),
        *fields,
        stream(b"q 9 0 0 9 0 0 cm /I Do Q"),
        stream(f"BT /F 9 Tf 9 9 Td ({mark('last page')}) Tj ET".encode()),
    )


BUILDERS: Mapping[str, Callable[[Mark], bytes]] = {
    ".docx": docx,
    ".xlsx": xlsx,
    ".pptx": pptx,
    ".html": html,
    ".epub": epub,
    ".pdf": pdf_,
    ".csv": lambda mark: (
        f"{mark('title')}\n\n{mark('name of a column')},b\n{mark('cell')},x\n,,{mark('cell without a name')}\n".encode()
    ),
}
