"""The text of a file, and images of its pages: a separate program, run once per file.

A file is hostile input for a parser, so it is read in a process with limits, which can be killed.  The process cannot
open any file once its libraries are loaded, where the kernel has Landlock.  It takes one line of JSON with the limits,
then the file, and writes one line of JSON, then the texts and images.

The content decides how a file is read, as names and declared types are often wrong.  PDFium reads PDFs, by pypdfium2
(4 MB, BSD and Apache): pypdf is slow and loses the layout, and PyMuPDF has another kind of licence.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import resource
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from penstock.extensions.tools.files.office import KINDS, Archive, Unreadable, Unsupported
from penstock.extensions.tools.sandbox.confined import LIBC, landlock, limit

LONGEST_SIDE = 1_600
"""The most pixels of a side of a page that is shown."""

MOST_SCALE = 2.0
"""The most pixels of a point, of which an inch has 72: small print can be read."""

_FEW_SHADES = bytes(min(255, (shade + 8) // 16 * 17) for shade in range(256))
"""The 16 shades of each color that are left, so that the noise of a scan takes a third of the bytes."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_FALLBACK = "cp1252"
_OLD_OFFICE = bytes.fromhex("d0cf11e0a1b11ae1")
"""The beginning of Office files before 2007, and of encrypted ones since then."""
_IMAGES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8")
_HTML = re.compile(r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_LINK = re.compile(r"【\d+†([^】†]*)(?:†[^】]*)?】")
_BROKEN_WORD = "\ufffe"
"""PDFium's mark for a hyphen at the end of a line."""


def parts_of(data: bytes, order: Mapping[str, Any], ready: Callable[[], None]) -> list[str | bytes]:
    """Return the texts of a file, and images of its pages; raises `Unreadable`.

    The ``order`` has the limits, what the sender declares, and the pages to show.  ``ready`` is called once all
    libraries are loaded.
    """
    limits = order["limits"]
    if not data.strip():
        raise Unreadable("It is empty.")
    if b"%PDF-" in data[:1024]:
        parts: Iterable[str | bytes] = _Pdf(data, order["shows"], limits).parts(ready)
    elif data.startswith(b"PK\x03\x04"):
        ready()
        archive = Archive(data, limits["inflated"])
        parts = archive.reader()(archive)
    else:
        parts = [_plain(data, order["charset"], order["is_html"], ready)]
    joined = _joined(parts, limits)
    if not any(part.strip() for part in joined):
        raise Unreadable("It has no text.")
    return joined


def _joined(parts: Iterable[str | bytes], limits: Mapping[str, int]) -> list[str | bytes]:
    """Join the texts between two images; raises `Unreadable` if texts or images are too much."""
    joined, text = list[str | bytes](), list[str]()
    most, characters, size = limits["characters"], 0, 0
    for part in parts:
        if isinstance(part, str):
            characters += len(part)
            text.append(part)
        else:
            size += len(part)
            joined += ["".join(text), part]
            text.clear()
        if characters > most:
            raise Unreadable(f"Its text is longer than {most:,} characters.")
        if size > limits["shown_bytes"]:
            raise Unreadable(f"Its pages take more than {limits['shown_bytes']:,} bytes as images.")
    joined.append("".join(text))
    if len(joined) == 1:
        joined = ["".join(text).strip("\n")]
    return [part.encode("utf-8", "replace").decode() if isinstance(part, str) else part for part in joined]


class _Pdf:
    """A PDF, of which ``shows`` are the pages to show as images: ``all``, the ``scans`` without text, or ``none``."""

    def __init__(self, data: bytes, shows: str, limits: Mapping[str, int]) -> None:
        self._data = data
        self._shows = shows
        self._most, self._most_shown = limits["pages"], limits["shown"]

    def parts(self, ready: Callable[[], None]) -> Iterator[str | bytes]:
        """Yield the text of each page, and its image if it is to be shown."""
        try:
            import pypdfium2  # noqa: PLC0415 - most files need no PDFium, which takes long to load
        except ModuleNotFoundError:
            raise Unsupported("This server reads no PDFs.") from None
        ready()
        try:
            document = pypdfium2.PdfDocument(self._data)
            count = len(document)
        except pypdfium2.PdfiumError as error:
            is_locked = error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD
            raise Unreadable("It needs a password." if is_locked else "It is no valid PDF.") from None
        if count > self._most:
            raise Unreadable(f"It has {count:,} pages, and {self._most:,} are allowed.")
        found = shown = 0
        for number in range(count):
            try:
                page = document[number]
                text = _text_on(page)
                is_shown = self._shows == "all" or (self._shows == "scans" and not text)
                shown += is_shown
                if shown > self._most_shown:
                    raise Unreadable(f"It has more than {self._most_shown:,} pages that are to be shown as images.")
                image = _image_of(page) if is_shown else b""
                page.close()
            except pypdfium2.PdfiumError:
                raise Unreadable(f"Its page {number + 1} is damaged.") from None
            found += bool(text or image)
            yield f"[page {number + 1}]\n{text}\n" + "\n" * (not image)
            if image:
                yield image
                yield "\n"
        if not found:
            raise Unsupported("Its pages have no text: send them as images.")


def _text_on(page: Any) -> str:
    content = page.get_textpage()
    text: str = content.get_text_range().replace("\r\n", "\n").replace(_BROKEN_WORD, "-").strip()
    content.close()
    return text


def _image_of(page: Any) -> bytes:
    """Return a page as a PNG, written here, because Pillow only comes with vLLM."""
    scale = min(MOST_SCALE, LONGEST_SIDE / max(*page.get_size(), 1.0))
    bitmap = page.render(scale=scale, rev_byteorder=True)
    width, height, channels = bitmap.width, bitmap.height, bitmap.n_channels
    pixels = bytes(bitmap.buffer).translate(_FEW_SHADES)
    rows = (pixels[at : at + width * channels] for at in range(0, height * bitmap.stride, bitmap.stride))
    color = {1: 0, 3: 2, 4: 6}[channels]
    bitmap.close()
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows), 3)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _plain(data: bytes, charset: str, is_html: bool, ready: Callable[[], None]) -> str:
    if data.startswith(_OLD_OFFICE):
        raise Unsupported("It is encrypted, or a file of Office before 2007.")
    if data.startswith(b"{\\rtf"):
        raise Unsupported("It is RTF.")
    if data.startswith(_IMAGES):
        raise Unsupported("It is an image: send it as such.")
    text = _decoded(data, charset)
    if not is_html and not _HTML.match(text[:4096]):
        ready()
        return text
    try:
        from penstock.extensions.tools.browser.html import LONGEST_TEXT, converted  # noqa: PLC0415 - most files are no HTML
    except ModuleNotFoundError:  # its parser is not installed
        raise Unsupported("This server reads no HTML.") from None
    ready()
    _, shown, _ = converted(text, "")
    if len(shown) > LONGEST_TEXT:
        raise Unreadable(f"Its text is longer than {LONGEST_TEXT:,} characters.")
    return _LINK.sub(r"\1", shown)


def _decoded(data: bytes, charset: str) -> str:
    """Decode text: by its mark, as UTF-8, as its sender declares, or as Windows-1252, the usual one in older files."""
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    for name in (marked,) if marked else ("utf-8", charset, _FALLBACK):
        try:
            text = data.decode(name or _FALLBACK)
        except (LookupError, ValueError):
            continue
        if not _CONTROL.search(text):
            return text
    raise Unsupported(f"It is neither text, nor a PDF, {', '.join(KINDS)}.")


def lock() -> None:
    """Take away the right to open files, where the kernel can; all modules are loaded by now."""
    with suppress(OSError, RuntimeError):  # a kernel without Landlock
        LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: Landlock requires it
        landlock([], [])


def main() -> None:
    """Read the file on standard input."""
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    limits = order["limits"]
    os.nice(10)  # the server comes first
    limit({"AS": limits["memory"], "CPU": int(limits["seconds"]) + 1, "FSIZE": 0, "CORE": 0})
    with suppress(LookupError):  # its sender may declare anything; `_decoded` then tries others
        codecs.lookup(order["charset"])
    for name in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1", "cp437", _FALLBACK):
        codecs.lookup(name)
    parts, problem, is_unsupported = list[str | bytes](), "", False
    try:
        parts = parts_of(sys.stdin.buffer.read(), order, lock)
    except Unreadable as error:
        problem, is_unsupported = str(error), isinstance(error, Unsupported)
    except MemoryError:
        problem = "Reading it takes too much memory."
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    written = [part.encode() if isinstance(part, str) else part for part in parts]
    sizes = [len(data) * (1 if isinstance(part, str) else -1) for part, data in zip(parts, written, strict=True)]
    head = json.dumps({"problem": problem, "memory": used, "parts": sizes, "is_unsupported": is_unsupported})
    sys.stdout.buffer.write(head.encode() + b"\n" + b"".join(written))


if __name__ == "__main__":
    main()
