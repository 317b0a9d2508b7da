"""Small files of the kinds that the server reads, written by hand."""

from __future__ import annotations

import base64
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO

_RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
_SLIDE = "http://schemas.openxmlformats.org/presentationml/2006/main"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def pdf(pages: Sequence[str], trailer: str = "") -> bytes:
    """A PDF with these lines of text, one on each page; ``trailer`` goes into its trailer."""
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for at, text in enumerate(pages):
        lines = "".join(f"({line}) Tj 0 -14 Td " for line in text.splitlines())
        stream = f"BT /F 11 Tf 50 750 Td {lines} ET"
        size, font = "/MediaBox[0 0 612 792]", "/Resources<</Font<</F 3 0 R>>>>"
        objects.append(f"<</Type/Page/Parent 2 0 R{size}{font}/Contents {5 + 2 * at} 0 R>>")
        objects.append(f"<</Length {len(stream)}>>stream\n{stream}\nendstream")
    return pdf_of(objects, trailer)


def pdf_of(objects: Iterable[str], trailer: str = "") -> bytes:
    written, places = bytearray(b"%PDF-1.4\n"), list[int]()
    for number, content in enumerate(objects, start=1):
        places.append(len(written))
        written += f"{number} 0 obj{content}endobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = (
        f"xref\n0 {len(places) + 1}\n0000000000 65535 f \n{table}trailer<</Size {len(places) + 1}/Root 1 0 R{trailer}>>"
    )
    return bytes(written) + f"{end}startxref\n{len(written)}\n%%EOF".encode()


def archive(parts: Mapping[str, str | bytes]) -> bytes:
    written = BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in parts.items():
            made.writestr(name, content)
    return written.getvalue()


def relations(targets: Mapping[str, str]) -> str:
    entries = "".join(f'<Relationship Id="{name}" Target="{target}"/>' for name, target in targets.items())
    return f'<Relationships xmlns="{_PACKAGE}">{entries}</Relationships>'


def docx(body: str, **notes: str) -> bytes:
    """A Word file with this XML in its body, and in its ``footnotes`` and ``endnotes``."""
    parts = {"word/document.xml": f'<w:document xmlns:w="{_WORD}"><w:body>{body}</w:body></w:document>'}
    for kind, content in notes.items():
        parts[f"word/{kind}.xml"] = f'<w:{kind} xmlns:w="{_WORD}"><w:note>{content}</w:note></w:{kind}>'
    return archive(parts)


def paragraph(text: str, style: str = "") -> str:
    named = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{named}<w:r><w:t>{text}</w:t></w:r></w:p>"


def table(rows: Iterable[Iterable[str]]) -> str:
    cells = ("".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in row) for row in rows)
    return "<w:tbl>" + "".join(f"<w:tr>{row}</w:tr>" for row in cells) + "</w:tbl>"


def xlsx(
    rows: str, strings: Iterable[str] = (), name: str = "Sales", formats: Sequence[str] = (), properties: str = ""
) -> bytes:
    """An Excel file with this XML as the rows of its sheet.

    Its second cell style is that of dates, and the next ones have the ``formats``.
    """
    codes = "".join(f'<numFmt numFmtId="{200 + at}" formatCode="{code}"/>' for at, code in enumerate(formats))
    styles = "".join(f'<xf numFmtId="{number}"/>' for number in (0, 14, *range(200, 200 + len(formats))))
    sheets = f'<sheets><sheet name="{name}" sheetId="1" r:id="rId1"/></sheets>'
    shared = "".join(f"<si><t>{text}</t></si>" for text in strings)
    return archive(
        {
            "xl/workbook.xml": f'<workbook xmlns="{_SHEET}" xmlns:r="{_RELATIONS}">{properties}{sheets}</workbook>',
            "xl/_rels/workbook.xml.rels": relations({"rId1": "worksheets/sheet1.xml"}),
            "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{_SHEET}"><sheetData>{rows}</sheetData></worksheet>',
            "xl/sharedStrings.xml": f'<sst xmlns="{_SHEET}">{shared}</sst>',
            "xl/styles.xml": f'<styleSheet xmlns="{_SHEET}"><numFmts>{codes}</numFmts><cellXfs>{styles}</cellXfs>'
            "</styleSheet>",
        }
    )


def pptx(slides: Sequence[str], notes: Mapping[int, str] | None = None) -> bytes:
    """A PowerPoint file with a line of text on each slide, and ``notes`` by the numbers of slides.

    Its parts are in reverse order.
    """
    numbers = range(1, len(slides) + 1)
    listed = "".join(f'<p:sldId id="{255 + at}" r:id="rId{at}"/>' for at in numbers)
    spaces = f'xmlns:p="{_SLIDE}" xmlns:r="{_RELATIONS}" xmlns:a="{_DRAWING}"'
    parts = {
        f"ppt/slides/slide{at}.xml": f"<p:sld {spaces}><a:p><a:r><a:t>{text}</a:t></a:r></a:p></p:sld>"
        for at, text in reversed(list(zip(numbers, slides, strict=True)))
    }
    for at, text in (notes or {}).items():
        part = f"ppt/notesSlides/notesSlide{at}.xml"
        parts[part] = f"<p:notes {spaces}><a:p><a:r><a:t>{text}</a:t></a:r></a:p></p:notes>"
        parts[f"ppt/slides/_rels/slide{at}.xml.rels"] = relations({"rId1": f"../notesSlides/notesSlide{at}.xml"})
    parts["ppt/presentation.xml"] = f"<p:presentation {spaces}><p:sldIdLst>{listed}</p:sldIdLst></p:presentation>"
    parts["ppt/_rels/presentation.xml.rels"] = relations({f"rId{at}": f"slides/slide{at}.xml" for at in numbers})
    return archive(parts)
