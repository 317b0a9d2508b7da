"""The text of Word, Excel and PowerPoint files, which are XML in a zip archive.

Text alone needs little of these formats.  python-docx, openpyxl and python-pptx bound neither the bytes that an archive
inflates to nor the cells of a sheet, two of them have had no release since 2024, and markitdown wraps them beside an
ONNX runtime.  Expat reads the XML in pieces, so that memory does not grow with a part.
"""

from __future__ import annotations

import posixpath
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from io import BytesIO
from typing import TypeAlias
from xml.parsers import expat

_PIECE = 1 << 16
_NO_MEMORY = 1
"""Expat's number for this error."""
_Z_MEM_ERROR = -4
"""Zlib's number for the same."""
_MOST_PARTS = 10_000
_MOST_COLUMNS = 16_384
_RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships id"
_STRICT_RELATION = "http://purl.oclc.org/ooxml/officeDocument/relationships id"

Attributes: TypeAlias = Mapping[str, str]


class Unreadable(Exception):
    """The file cannot be read; the message is written for the client."""


class Unsupported(Unreadable):
    """No file of this kind is read."""


class Archive:
    """The parts of an Office file, which may inflate to ``most`` bytes together."""

    def __init__(self, data: bytes, most: int) -> None:
        self._left = most
        try:
            self._zip = zipfile.ZipFile(BytesIO(data))
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
            raise Unreadable("It is a damaged archive.") from None
        self._names = {info.filename: info for info in self._zip.infolist()}
        if len(self._names) > _MOST_PARTS:
            raise Unreadable(f"It has more than {_MOST_PARTS:,} parts.")

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def reader(self) -> Callable[[Archive], Iterator[str]]:
        """Return the function that reads this kind of file; raises `Unreadable` for another archive."""
        for main, read in _READERS.items():
            if main in self:
                return read
        raise Unsupported(f"It is an archive, but not {', '.join(KINDS)}.")

    def parse(
        self,
        name: str,
        start: Callable[[str, Attributes], None],
        end: Callable[[str], None] = lambda _: None,
        text: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Parse a part with these handlers, which get names of elements without their namespaces."""
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = _refuse_doctype
        parser.StartElementHandler = lambda tag, attributes: start(_local(tag), attributes)
        parser.EndElementHandler = lambda tag: end(_local(tag))
        parser.CharacterDataHandler = text
        try:
            for piece in self._pieces(name):
                parser.Parse(piece)
            parser.Parse(b"", True)
        except (expat.ExpatError, ValueError) as error:
            if isinstance(error, expat.ExpatError) and error.code == _NO_MEMORY:
                raise MemoryError from None
            raise Unreadable(f"Its part {name} is damaged.") from None

    def related(self, name: str) -> Mapping[str, str]:
        """Return the names of the parts that a part refers to, by the ids in it."""
        folder, file = posixpath.split(name)
        relations, targets = f"{folder}/_rels/{file}.rels", dict[str, str]()

        def start(tag: str, attributes: Attributes) -> None:
            if tag == "Relationship" and attributes.get("TargetMode") != "External":
                target = attributes.get("Target", "")
                place = posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
                targets[attributes.get("Id", "")] = place

        if relations in self:
            self.parse(relations, start)
        return targets

    def listed(self, name: str, tag: str) -> Iterator[tuple[str, Attributes]]:
        """Yield the parts that the elements ``tag`` of a part refer to, in order, with the attributes of these."""
        found = list[Attributes]()
        self.parse(name, lambda each, attributes: found.append(attributes) if each == tag else None)
        related = self.related(name)
        for attributes in found:
            relation = attributes.get(_RELATION) or attributes.get(_STRICT_RELATION) or ""
            if (part := related.get(relation, "")) in self:
                yield part, attributes

    def _pieces(self, name: str) -> Iterator[bytes]:
        info = self._names[name]
        if info.flag_bits & 1:
            raise Unreadable("It is encrypted.")
        try:
            with self._zip.open(info) as part:
                while piece := part.read(_PIECE):
                    self._left -= len(piece)
                    if self._left < 0:
                        raise Unreadable("It inflates to too many bytes.")
                    yield piece
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, zlib.error) and f"Error {_Z_MEM_ERROR}" in str(error):
                raise MemoryError from None
            raise Unreadable(f"Its part {name} is damaged.") from None


def _refuse_doctype(*_: object) -> None:
    raise Unreadable("It declares entities, as no Office program does.")


def _local(tag: str) -> str:
    return tag.rpartition(" ")[2]


# Word


def _word(archive: Archive) -> Iterator[str]:
    for name in ("document", "footnotes", "endnotes"):
        if (part := f"word/{name}.xml") in archive:
            yield _paragraphs(archive, part, f"\n[{name}]\n" if name != "document" else "")


def _paragraphs(archive: Archive, part: str, title: str = "") -> str:
    """Return the paragraphs of a part of Word or PowerPoint; a row of a table is a line with tabs between its cells."""
    written, is_text, in_cell, skipped = list[str](), False, 0, 0

    def start(tag: str, attributes: Attributes) -> None:
        nonlocal is_text, in_cell, skipped
        skipped += tag == "Fallback"  # the same content again, for older programs
        is_text = tag == "t" and not skipped
        in_cell += tag == "tc"
        if tag == "pStyle" and (heading := re.fullmatch(r"[Hh]eading ?([1-6])", _value(attributes))):
            written.append("#" * int(heading[1]) + " ")
        elif tag in _BREAKS and not skipped:
            written.append(_BREAKS[tag])

    def end(tag: str) -> None:
        nonlocal is_text, in_cell, skipped
        skipped -= tag == "Fallback"
        is_text = False
        in_cell -= tag == "tc"
        if tag == "p" and not skipped:
            written.append(" " if in_cell else "\n")
        elif tag in ("tc", "tr") and not skipped:
            written.append("\t" if tag == "tc" else "\n")

    archive.parse(part, start, end, lambda text: written.append(text) if is_text else None)
    text = re.sub(r" ?\t\n", "\n", "".join(written).replace(" \t", "\t"))
    return title + text if text.strip() else ""


_BREAKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def _value(attributes: Attributes) -> str:
    return next((value for name, value in attributes.items() if _local(name) == "val"), "")


# PowerPoint


def _slides(archive: Archive) -> Iterator[str]:
    for number, (part, _) in enumerate(archive.listed("ppt/presentation.xml", "sldId"), start=1):
        yield f"[slide {number}]\n{_paragraphs(archive, part)}\n"
        for other in archive.related(part).values():
            if "notesSlide" in other and other in archive and (notes := _paragraphs(archive, other)):
                yield f"[notes of slide {number}]\n{notes}\n"


# Excel


def _sheets(archive: Archive) -> Iterator[str]:
    strings, times = _shared_strings(archive), _Times(archive)
    for part, attributes in archive.listed("xl/workbook.xml", "sheet"):
        yield f"[sheet {attributes.get('name', '')}]\n"
        yield from _Sheet(strings, times).rows(archive, part)
        yield "\n"


def _shared_strings(archive: Archive) -> list[str]:
    strings, parts, is_text, in_hint = list[str](), list[str](), False, False

    def start(tag: str, _: Attributes) -> None:
        nonlocal is_text, in_hint
        in_hint = in_hint or tag == "rPh"  # how a word in Japanese is pronounced
        is_text = tag == "t" and not in_hint

    def end(tag: str) -> None:
        nonlocal is_text, in_hint
        is_text, in_hint = False, in_hint and tag != "rPh"
        if tag == "si":
            strings.append("".join(parts))
            parts.clear()

    if "xl/sharedStrings.xml" in archive:
        archive.parse("xl/sharedStrings.xml", start, end, lambda text: parts.append(text) if is_text else None)
    return strings


class _Times:
    """The cell styles of a workbook that show a number of days as a date, a time or a duration."""

    def __init__(self, archive: Archive) -> None:
        self._formats = {str(number): _MOMENT for number in (*range(14, 23), 45, 47)} | {"46": _DURATION}
        self._styles: list[str] = []
        self._in_cells = False
        self._origin = datetime(1899, 12, 30)
        archive.parse("xl/workbook.xml", self._set_origin)
        if "xl/styles.xml" in archive:
            archive.parse("xl/styles.xml", self._start, self._end)

    def shown(self, style: int, days: str) -> str | None:
        """Return the text of a number; None if its style does not show it as a time."""
        shows = self._formats.get(self._styles[style]) if style < len(self._styles) else None
        if shows is None:
            return None
        seconds = timedelta(seconds=round(float(days) * 86_400))
        return _duration(seconds) if shows == _DURATION else _moment(self._origin, seconds)

    def _set_origin(self, tag: str, attributes: Attributes) -> None:
        if tag == "workbookPr" and attributes.get("date1904") in ("1", "true"):
            self._origin = datetime(1904, 1, 1)

    def _start(self, tag: str, attributes: Attributes) -> None:
        if tag == "numFmt" and (shows := _shows(attributes.get("formatCode", "").lower())):
            self._formats[attributes.get("numFmtId", "")] = shows
        self._in_cells = self._in_cells or tag == "cellXfs"
        if self._in_cells and tag == "xf":
            self._styles.append(attributes.get("numFmtId", ""))

    def _end(self, tag: str) -> None:
        self._in_cells = self._in_cells and tag != "cellXfs"


_MOMENT, _DURATION = "moment", "duration"


def _shows(code: str) -> str | None:
    """Return what a format in lower case shows; None for a number."""
    code = re.sub(r'"[^"]*"|\\.', "", code)
    if re.search(r"\[(?:h+|m+|s+)\]", code):
        return _DURATION
    return _MOMENT if code != "general" and re.search(r"[dmyhs]", re.sub(r"\[[^]]*\]", "", code)) else None


class _Sheet:
    """The rows of a sheet as lines, with tabs between cells.

    A cell with a formula has the value that the program has saved.
    """

    def __init__(self, strings: list[str], times: _Times) -> None:
        self._strings = strings
        self._times = times
        self._lines: list[str] = []
        self._cells: list[str] = []
        self._text: list[str] = []
        self._cell: Attributes = {}
        self._is_value = False
        self._size = 0

    def rows(self, archive: Archive, part: str) -> list[str]:
        archive.parse(part, self._start, self._end, self._add)
        return self._lines

    def _start(self, tag: str, attributes: Attributes) -> None:
        if tag == "c":
            self._cell = attributes
            self._text.clear()
        self._is_value = tag in ("v", "t")

    def _add(self, text: str) -> None:
        if self._is_value:
            self._text.append(text)

    def _end(self, tag: str) -> None:
        self._is_value = False
        if tag == "c":
            column = _column(self._cell.get("r", ""))
            if column is not None and column >= len(self._cells):
                self._cells += [""] * (column - len(self._cells))
            self._cells.append(self._shown().replace("\t", " ").replace("\n", " "))
        elif tag == "row":
            if line := "\t".join(self._cells).rstrip("\t"):
                self._size += len(line)
                if self._size > _MOST_SHEET:
                    raise Unreadable(f"A sheet has more than {_MOST_SHEET:,} characters.")
                self._lines.append(line + "\n")
            self._cells = []

    def _shown(self) -> str:
        text, kind = "".join(self._text), self._cell.get("t", "n")
        try:
            if kind == "s":
                return self._strings[int(text)]
            if kind == "b":
                return "TRUE" if text == "1" else "FALSE"
            if kind == "n" and text:
                return self._times.shown(int(self._cell.get("s", 0)), text) or text
        except (ValueError, IndexError, OverflowError):
            pass
        return text


_MOST_SHEET = 10_000_000


def _column(reference: str) -> int | None:
    """Return the position of the column in a reference such as ``AB12``."""
    letters = re.match(r"[A-Z]{1,3}", reference)
    if not letters:
        return None
    position = 0
    for letter in letters[0]:
        position = position * 26 + ord(letter) - ord("A") + 1
    return min(position, _MOST_COLUMNS) - 1


def _moment(origin: datetime, since: timedelta) -> str:
    moment = origin + since
    if not since.days:
        return moment.time().isoformat()
    return moment.isoformat(" ") if since.seconds else moment.date().isoformat()


def _duration(length: timedelta) -> str:
    sign, seconds = "-" if length.days < 0 else "", abs(round(length.total_seconds()))
    return f"{sign}{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


_READERS: Mapping[str, Callable[[Archive], Iterator[str]]] = {
    "word/document.xml": _word,
    "xl/workbook.xml": _sheets,
    "ppt/presentation.xml": _slides,
}
KINDS = ("docx", "xlsx", "pptx")
