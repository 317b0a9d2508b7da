"""The text of a file: a separate program, run once per file.

A file is hostile input for a parser, so it is read in a process with limits, which can be killed.  The process cannot
open any file once its libraries are loaded, where the kernel has Landlock.  It takes one line of JSON with the limits,
then the file, and writes one line of JSON, then the text.

The content decides how a file is read, as names and declared types are often wrong.  PDFium reads PDFs, by pypdfium2
(4 MB, BSD and Apache): pypdf is slow and loses the layout, and PyMuPDF has another kind of licence.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from penstock.stages.services.files.office import KINDS, Archive, Unreadable, Unsupported
from penstock.stages.services.sandbox.confined import LIBC, landlock, limit

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


def text_of(data: bytes, charset: str, is_html: bool, limits: dict[str, int], ready: Callable[[], None]) -> str:
    """Return the text of a file; raises `Unreadable`.

    ``charset`` and ``is_html`` are what its sender declares.  ``ready`` is called once all libraries are loaded.
    """
    if not data.strip():
        raise Unreadable("It is empty.")
    if b"%PDF-" in data[:1024]:
        parts: Iterable[str] = _pages(data, limits["pages"], ready)
    elif data.startswith(b"PK\x03\x04"):
        ready()
        archive = Archive(data, limits["inflated"])
        parts = archive.reader()(archive)
    else:
        parts = [_plain(data, charset, is_html, ready)]
    text = _joined(parts, limits["characters"])
    if not text.strip():
        raise Unreadable("It has no text.")
    return text.encode("utf-8", "replace").decode()


def _joined(parts: Iterable[str], most: int) -> str:
    kept, size = list[str](), 0
    for part in parts:
        size += len(part)
        if size > most:
            raise Unreadable(f"Its text is longer than {most:,} characters.")
        kept.append(part)
    return "".join(kept).strip("\n")


def _pages(data: bytes, most: int, ready: Callable[[], None]) -> Iterator[str]:
    import pypdfium2  # noqa: PLC0415 - most files need no PDFium, which takes long to load

    ready()
    try:
        document = pypdfium2.PdfDocument(data)
        count = len(document)
    except pypdfium2.PdfiumError as error:
        is_locked = error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD
        raise Unreadable("It needs a password." if is_locked else "It is no valid PDF.") from None
    if count > most:
        raise Unreadable(f"It has {count:,} pages, and {most:,} are allowed.")
    has_text = False
    for number in range(count):
        try:
            page = document[number]
            content = page.get_textpage()
            text = content.get_text_range().replace("\r\n", "\n").replace(_BROKEN_WORD, "-").strip()
            content.close()
            page.close()
        except pypdfium2.PdfiumError:
            raise Unreadable(f"Its page {number + 1} is damaged.") from None
        has_text = has_text or bool(text)
        yield f"[page {number + 1}]\n{text}\n\n"
    if not has_text:
        raise Unsupported("Its pages have no text: send them as images.")


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
    from penstock.stages.services.browser.html import LONGEST_TEXT, converted  # noqa: PLC0415 - most files are no HTML

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
    with suppress(OSError, RuntimeError):
        LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: Landlock requires it
        landlock([], [])


def main() -> None:
    """Read the file on standard input."""
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    limits = order["limits"]
    os.nice(10)  # the server comes first
    limit({"AS": limits["memory"], "CPU": int(limits["seconds"]) + 1, "FSIZE": 0, "CORE": 0})
    with suppress(LookupError):
        codecs.lookup(order["charset"])
    for name in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1", "cp437", _FALLBACK):
        codecs.lookup(name)
    text = problem = ""
    is_unsupported = False
    try:
        text = text_of(sys.stdin.buffer.read(), order["charset"], order["is_html"], limits, lock)
    except Unreadable as error:
        problem, is_unsupported = str(error), isinstance(error, Unsupported)
    except MemoryError:
        problem = "Reading it takes too much memory."
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    head = json.dumps({"problem": problem, "memory": used, "is_unsupported": is_unsupported})
    sys.stdout.buffer.write(head.encode() + b"\n" + text.encode())


if __name__ == "__main__":
    main()
