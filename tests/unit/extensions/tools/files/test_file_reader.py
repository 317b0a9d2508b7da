"""Files of all kinds, good and hostile: each has a text, or an error with the reason."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from time import monotonic, thread_time
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from penstock.extensions.tools.files.extraction import parts_of
from penstock.extensions.tools.files.file_reader import FileReader, name_of
from penstock.extensions.tools.files.office import Unsupported
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import InputFile, InputImage, InputText
from penstock.services import file_marks as marks_module
from penstock.services.file_marks import marks, number_by
from penstock.services.file_reading import PlacedFile
from penstock.services.tools import FileLimits
from penstock.services.web.ssrf import NOTHING_ALLOWED
from penstock.stages.models.images import check_data_url, image_in
from tests.support.documents import archive, as_base64, docx, paragraph, pdf, pdf_of, pptx, table, xlsx
from tests.support.tool_servers import LOOPBACK, web_server

pytestmark = [pytest.mark.io, pytest.mark.slow]

PATH = "input[0].content[1]"
LOCKED = "<</Filter/Standard/V 1/R 2/P -4/O<" + "41" * 32 + ">/U<" + "42" * 32 + ">>>"
ROW = '<row r="1"><c r="A1" t="s"><v>0</v></c><c r="C1"><v>2.5</v></c><c r="D1" s="1"><v>45292</v></c></row>'
WORDS = '<row r="2"><c r="A2" t="inlineStr"><is><t>a&#10;b</t></is></c><c r="B2" t="b"><v>1</v></c></row>'
DOCTYPE = '<!DOCTYPE d [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;">]><w:document xmlns:w="x">&b;</w:document>'


async def text_of(data: bytes, name: str = "a.bin", head: str = "", reader: FileReader | None = None) -> str:
    file = InputFile(filename=name, file_data=head + as_base64(data))
    (text,) = await (reader or FileReader()).read_all([PlacedFile("msg_1", file, PATH)])
    assert isinstance(text, str)
    return text


async def refusal(data: bytes, limits: FileLimits | None = None, name: str = "a.bin") -> str:
    with pytest.raises(InvalidRequest) as refused:
        await text_of(data, name, reader=FileReader(limits or FileLimits()))
    assert (refused.value.status, refused.value.param) == (400, PATH)
    start = f"The file '{name}' cannot be read. "
    assert refused.value.message.startswith(start)
    return refused.value.message.removeprefix(start)


@pytest.mark.parametrize(
    ("code", "value", "shown"),
    [
        ("yyyy-mm-dd", "45292", "2024-01-01"),
        ("yyyy-mm-dd hh:mm", "45292.5", "2024-01-01 12:00:00"),
        ("hh:mm", "0.75", "18:00:00"),
        ("[h]:mm:ss", "1.25", "30:00:00"),
        ("[mm]:ss", "-0.5", "-12:00:00"),
        ("[Red]0.00", "1.25", "1.25"),
        ("[$-409]d mmm", "45292", "2024-01-01"),
        ("0&quot;d&quot;", "3", "3"),
        ("General", "3", "3"),
        ("hh:mm", "nan", "nan"),
        ("yyyy", "1e300", "1e300"),
    ],
)
async def test_numbers_of_sheets_are_shown_by_their_format(code: str, value: str, shown: str) -> None:
    cells = f'<row><c s="2"><v>{value}</v></c></row>'
    assert f"\n{shown}\n" in await text_of(xlsx(cells, formats=[code]))


async def test_dates_of_sheets_begin_in_1904_if_the_workbook_says_so() -> None:
    cells = '<row><c s="1"><v>1</v></c></row>'
    assert "1904-01-02" in await text_of(xlsx(cells, properties='<workbookPr date1904="1"/>'))
    assert "1899-12-31" in await text_of(xlsx(cells))


@given(st.text().map(lambda text: text.encode(errors="replace").decode()), st.integers(0, 3), st.text())
def test_no_file_contains_its_closing_mark(text: str, forged: int, name: str) -> None:
    for _ in range(forged):
        first, last = marks("a", [text])
        text += f"{last}\n{first}"
    first, last = marks(name, [text])
    assert last.strip() not in text
    assert first.count(">") == first.count("<") == 1


def test_marks_of_a_file_cannot_be_computed_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    text, found = "a</file>b", set()
    for key in (bytes(32), bytes(31) + b"x"):
        monkeypatch.setattr(marks_module, "_key", key)
        found |= {marks("a", [text]), marks("a", [text])}
    assert len(found) == 2
    assert {len(last.strip()) for _, last in found} == {len("</file->") + 32}


def test_servers_with_one_secret_write_the_same_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks_module, "_key", bytes(32))
    number_by(b"secret")
    first = marks("a", ["</file>"])
    number_by(b"other")
    other = marks("a", ["</file>"])
    number_by(b"secret")
    assert marks("a", ["</file>"]) == first != other


@pytest.mark.parametrize(
    "texts",
    [
        ["</FILE>"],
        ["< / file"],
        ["<", "/", "fi", "le"],
        ["<" + " " * 99 + "/\u3000" + "\n" * 99 + "file"],
        ["x</fi", "le-0>"],
    ],
)
def test_closing_mark_in_any_form_numbers_the_marks(texts: list[str]) -> None:
    assert marks("a", texts)[1] != marks("a", ["x"])[1]


async def test_a_key_reads_files_in_half_of_the_places() -> None:
    """Files that take long to read delay those of their own key alone."""
    reader = FileReader(FileLimits(seconds=300))
    slow = [asyncio.create_task(read_by(reader, "one", "<html>" + "<div>" * (500_000 + at))) for at in range(8)]
    await asyncio.sleep(0)
    assert await read_by(reader, "other", "quick")
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def read_by(reader: FileReader, owner: str, text: str) -> Any:
    return await reader.read_all([PlacedFile("msg_1", InputFile(file_data=as_base64(text.encode())), PATH)], owner)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"# A\n\nb\n", "# A\n\nb"),
        (b'{"a": 1}', '{"a": 1}'),
        (b"<a><b/></a>", "<a><b/></a>"),
        ("\ufeffä".encode(), "ä"),
        ("\ufeffä".encode("utf-16-le"), "ä"),
        ("\ufeffä".encode("utf-16-be"), "ä"),
        ("\ufeffä".encode("utf-32-le"), "ä"),
        ("“ä”".encode("cp1252"), "“ä”"),
        (b"<!DOCTYPE html><title>T</title><h1>A</h1><script>x</script><a href=/b>b</a>", "# A\n\nb"),
        (b"<?xml version='1.0'?>\n<html><body><p>a", "a"),
        (pdf(["One", "", "Two\nand"]), "[page 1]\nOne\n\n[page 2]\n\n\n[page 3]\nTwo\nand"),
        (b"junk\n" + pdf(["One"]), "[page 1]\nOne"),
        (
            docx(paragraph("Title", "Heading2") + paragraph("a &amp; b") + table([["c", "d"], ["e", "f"]])),
            "## Title\na & b\nc\td\ne\tf",
        ),
        (xlsx(ROW + WORDS, ["Month"]), "[sheet Sales]\nMonth\t\t2.5\t2024-01-01\na b\tTRUE"),
        (pptx(["Hello", "Bye"]), "[slide 1]\nHello\n\n[slide 2]\nBye"),
        (
            pptx(["Hello", "Bye"], {1: "Smile."}),
            "[slide 1]\nHello\n\n[notes of slide 1]\nSmile.\n\n[slide 2]\nBye",
        ),
        (
            docx(paragraph("a"), footnotes=paragraph("b"), endnotes=paragraph("c")),
            "a\n\n[footnotes]\nb\n\n[endnotes]\nc",
        ),
    ],
)
async def test_content_decides_how_a_file_is_read(data: bytes, text: str) -> None:
    for name in ("a.pdf", "a.docx", "a"):
        assert await text_of(data, name) == f'<file name="{name}">\n{text}\n</file>\n'


async def test_a_declared_type_helps_where_the_content_says_nothing() -> None:
    russian = "Привет, мир".encode("koi8-r")
    assert "Привет, мир" in await text_of(russian, head="data:text/plain;charset=koi8-r;base64,")
    assert "Привет" not in await text_of(russian, head="data:text/plain;charset=nothing;base64,")
    assert "<b>" not in await text_of(b"<b>a</b>", head="data:text/html;base64,")
    assert "<b>" not in await text_of(b"<b>a</b>", "a.HTM")
    assert "<b>" in await text_of(b"<b>a</b>", "a.xml")


async def test_data_may_be_a_data_url_base64_or_percent_encoded() -> None:
    reader = FileReader()
    for data in ("data:;base64,w6Q=", "w6Q=", "w6Q", " w6\nQ=\n", "data:text/plain,%C3%A4", "DATA:text/plain,%c3%a4"):
        (text,) = await reader.read_all([PlacedFile("msg_1", InputFile(file_data=data), PATH)])
        assert text == '<file name="file">\nä\n</file>\n'


@pytest.mark.parametrize("data", ["data:text/plain;base64", "w6=Q", "ä", "====", "\ud800", "a"])
async def test_what_is_no_base64_is_refused(data: str) -> None:
    with pytest.raises(InvalidRequest, match=r"base64|no data") as refused:
        await FileReader().read_all([PlacedFile("msg_1", InputFile(file_data=data), PATH)])
    assert refused.value.param == PATH


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\0\1\2", "neither text"),
        (b"\x89PNG\r\n\x1a\n", "an image"),
        (bytes.fromhex("d0cf11e0a1b11ae1") + bytes(512), "encrypted, or a file of Office before 2007"),
        (b"{\\rtf1 a}", "RTF"),
        (b"%PDF-1.4\n", "no valid PDF"),
        (pdf(["a"], f"/Encrypt {LOCKED}/ID[<00><00>]"), "password"),
        (pdf([""]), "Its pages have no text"),
        (b"PK\x03\x04", "damaged archive"),
        (archive({"a.txt": "a"}), "an archive, but not"),
        (archive({"word/document.xml": "<a>"}), "document.xml is damaged"),
        (archive({"word/document.xml": DOCTYPE}), "declares entities"),
        (docx(""), "has no text"),
        (b"<!doctype html><script>x</script>", "has no text"),
    ],
)
async def test_what_cannot_be_read_is_refused_with_the_reason(data: bytes, words: str) -> None:
    assert words in await refusal(data)


BOMB = archive({"word/document.xml": b"<a>" + b" " * (64 << 20)})
PACKED = zlib.compress(zlib.compress(b"q " * (100 << 20), 9), 9).decode("latin-1")
DEEP = pdf_of(
    [
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Count 1/Kids[3 0 R]>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R>>",
        f"<</Length {len(PACKED)}/Filter[/FlateDecode/FlateDecode]>>stream\n{PACKED}\nendstream",
    ]
)


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (b"a" * 101, {"bytes": 100}, "larger than 100 bytes"),
        (b"a" * 101, {"characters": 100}, "longer than 100 characters"),
        (pdf(["a"] * 11), {"pages": 10}, "has 11 pages"),
        (pdf(["a"] * 10_000), {}, "has 10,000 pages, and 2,000 are allowed"),
        (BOMB, {"inflated": 1 << 20}, "inflates to too many bytes"),
        (xlsx('<row><c r="XFD1"><v>1</v></c></row>' * 5_000), {}, "more than 10,000,000 characters"),
        (DEEP, {"memory": 256 << 20}, "too much memory|no text|damaged"),
        (pdf(["a" * 50] * 2_000), {"seconds": 0.05}, "longer than 0.05 seconds"),
    ],
    ids=["bytes", "characters", "pages", "10,000 pages", "zip bomb", "columns", "PDF bomb", "seconds"],
)
async def test_limits_hold(data: bytes, limits: dict[str, Any], words: str) -> None:
    message = await refusal(data, replace(FileLimits(), **limits))
    assert any(each in message for each in words.split("|")), message


async def test_the_files_of_a_conversation_are_limited_together() -> None:
    reader = FileReader(replace(FileLimits(), characters=100))
    half = InputFile(file_data=as_base64(b"a" * 60))
    with pytest.raises(InvalidRequest, match="together") as refused:
        await reader.read_all([PlacedFile("msg_1", half, "input[0].content[0]"), PlacedFile("msg_1", half, PATH)])
    assert refused.value.param == PATH


@settings(max_examples=40, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda whole, at, piece: whole[: at % len(whole)] + piece + whole[at % len(whole) + len(piece) :],
            st.sampled_from([pdf(["One", "Two"]), docx(paragraph("a")), xlsx(ROW, ["a"]), pptx(["a"])]),
            st.integers(0, 5_000),
            st.binary(min_size=1, max_size=40),
        ),
    ),
    name=st.text(max_size=10),
    head=st.sampled_from(["", "data:application/pdf;base64,", "data:text/html;charset=utf-7;base64,", "data:;base64,"]),
)
def test_any_bytes_of_any_type_have_a_text_or_a_400(data: bytes, name: str, head: str) -> None:
    async def read() -> None:
        try:
            text = await text_of(data, name, head)
        except InvalidRequest as error:
            assert (error.status, error.param) == (400, PATH)  # noqa: PT017 - a text is right as well
        else:
            text.encode()
            assert text.startswith('<file name="')

    asyncio.run(read())


async def test_a_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    start = subprocess.Popen

    def counted(*words: Any, **more: Any) -> Any:
        started.append(words)
        return start(*words, **more)

    monkeypatch.setattr(subprocess, "Popen", counted)
    reader = FileReader()
    first = await text_of(b"a", "a.txt", reader=reader)
    assert await text_of(b"a", "b.txt", reader=reader) == first.replace("a.txt", "b.txt")
    assert len(started) == 1
    await text_of(b"a", "a.html", reader=reader)
    assert len(started) == 2


async def test_a_cancelled_request_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start: Any = subprocess.Popen

    def noted(*words: Any, **more: Any) -> Any:
        started.append(start(*words, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    reading = asyncio.create_task(text_of(pdf(["a" * 50] * 2_000)))
    while not started:
        await asyncio.sleep(0.001)
    reading.cancel()
    await asyncio.wait([reading])
    assert await asyncio.to_thread(started[0].wait) == -9


SCAN = pdf(["", "", "Words"])


async def shown(data: bytes, detail: Any, limits: FileLimits | None = None, *, sees_images: bool = True) -> list[str]:
    """Return what a model reads of a file; each image as its size."""
    file = InputFile(filename="a.pdf", file_data=as_base64(data), detail=detail)
    reader = FileReader(limits or FileLimits())
    (reading,) = await reader.read_all([PlacedFile("msg_1", file, PATH)], sees_images=sees_images)
    parts = [InputText(reading)] if isinstance(reading, str) else reading
    return [part.text if isinstance(part, InputText) else size_of(part) for part in parts]


def size_of(image: InputImage) -> str:
    check_data_url(image.url)
    width, height = struct.unpack(">II", image_in(image.url)[16:24])
    return f"{width} x {height}"


START, PAGE = '<file name="a.pdf">\n', "1224 x 1584"


@pytest.mark.parametrize(
    ("detail", "parts"),
    [
        ("low", [f"{START}[page 1]\n\n\n[page 2]\n\n\n[page 3]\nWords\n</file>\n"]),
        ("auto", [f"{START}[page 1]\n\n", PAGE, "\n[page 2]\n\n", PAGE, "\n[page 3]\nWords\n\n\n</file>\n"]),
        (UNSET, [f"{START}[page 1]\n\n", PAGE, "\n[page 2]\n\n", PAGE, "\n[page 3]\nWords\n\n\n</file>\n"]),
        (
            "high",
            [f"{START}[page 1]\n\n", PAGE, "\n[page 2]\n\n", PAGE, "\n[page 3]\nWords\n", PAGE, "\n\n</file>\n"],
        ),
    ],
)
async def test_detail_decides_which_pages_a_model_sees(detail: Any, parts: list[str]) -> None:
    assert await shown(SCAN, detail) == parts
    assert len(await shown(SCAN, detail, sees_images=False)) == 1


async def test_page_looks_as_its_pdf_says() -> None:
    """Helvetica is not in the file, and the process cannot open the fonts of the system: PDFium has its own."""
    file = InputFile(file_data=as_base64(pdf(["MMMMMM"])), detail="high")
    (reading,) = await FileReader().read_all([PlacedFile("msg_1", file, PATH)], sees_images=True)
    page = reading[1]
    assert isinstance(page, InputImage)
    image = image_in(page.url)
    (size,) = struct.unpack(">I", image[33:37])
    rows = zlib.decompress(image[41 : 41 + size])
    dark = [at for at, value in enumerate(rows) if value == 0 and at % (1224 * 3 + 1)]
    places = [(at // (1224 * 3 + 1), at % (1224 * 3 + 1) // 3) for at in dark]
    assert len(places) > 200
    assert all(60 < row < 90 and 90 < column < 260 for row, column in places)


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (pdf([""] * 3), {"shown": 2}, "more than 2 pages that are to be shown"),
        (pdf([""] * 3), {"shown_bytes": 1_000}, "more than 1,000 bytes as images"),
    ],
)
async def test_shown_pages_are_limited(data: bytes, limits: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await shown(data, "auto", replace(FileLimits(), **limits))


async def test_shown_pages_of_a_conversation_are_limited_together() -> None:
    reader = FileReader(replace(FileLimits(), shown=3))
    scan = InputFile(file_data=as_base64(pdf(["", ""])))
    with pytest.raises(InvalidRequest, match="show 3 pages") as refused:
        await reader.read_all(
            [PlacedFile("msg_1", scan, "input[0].content[0]"), PlacedFile("msg_1", scan, PATH)], sees_images=True
        )
    assert refused.value.param == PATH


@pytest.mark.parametrize(
    "size", ["[0 0 0 0]", "[0 0 1 1]", "[0 0 1e7 1]", "[0 0 1 1e7]", "[0 0 14400 14400]", "[9 9 -9 -9]"]
)
async def test_pages_of_any_size_are_shown_within_bounds(size: str) -> None:
    data = pdf_of(
        [
            "<</Type/Catalog/Pages 2 0 R>>",
            "<</Type/Pages/Count 1/Kids[3 0 R]>>",
            f"<</Type/Page/Parent 2 0 R/MediaBox{size}>>",
        ]
    )
    try:
        parts = await shown(data, "high")
    except InvalidRequest as error:
        assert "damaged" in error.message  # noqa: PT017 - a page without room has no image
    else:
        assert all(int(side) <= 1_600 for part in parts if " x " in part for side in part.split(" x "))


async def test_the_loop_goes_on_while_a_large_file_is_read() -> None:
    text = as_base64(b"a line of words\n" * 200_000)
    longest, latest = 0.0, thread_time()

    async def tick() -> None:
        nonlocal longest, latest
        while True:
            await asyncio.sleep(0)
            longest, latest = max(longest, thread_time() - latest), thread_time()

    ticking = asyncio.create_task(tick())
    began = monotonic()
    await FileReader().read_all([PlacedFile("msg_1", InputFile(file_data=text), PATH)])
    ticking.cancel()
    assert longest < (monotonic() - began) / 2


async def test_a_process_without_memory_is_an_error_of_the_file() -> None:
    for data in (docx(paragraph("a" * (4 << 20))), b"a " * (10 << 20)):
        assert "too much memory" in await refusal(data, replace(FileLimits(), memory=1 << 20))


def test_the_process_can_open_no_file_once_it_reads() -> None:
    code = "from penstock.extensions.tools.files.extraction import lock; lock(); open('/etc/hosts')"
    ended = subprocess.run((sys.executable, "-I", "-c", code), capture_output=True, check=False)
    assert b"PermissionError" in ended.stderr


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (InputFile(filename="../../etc/passwd"), "passwd"),
        (InputFile(filename="C:\\a\\b.txt"), "b.txt"),
        (InputFile(filename='a"><b>\n\u202e.txt'), "a___b___.txt"),
        (InputFile(filename="x" * 500), "x" * 200),
        (InputFile(filename="/"), "file"),
        (InputFile(file_url="https://example.com/a%20b.pdf?c=/d"), "a b.pdf"),
        (InputFile(file_url="https://example.com"), "file"),
    ],
)
def test_a_name_is_safe_to_show(file: InputFile, name: str) -> None:
    assert name_of(file) == name


class Shelf:
    """A handler of files that counts its requests."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def show(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.path)
        if request.path == "/to":
            raise web.HTTPFound(request.query["url"])
        return web.Response(body=pdf(["One"]), content_type="application/octet-stream")


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
async def url(shelf: Shelf) -> AsyncIterator[str]:
    async with web_server(shelf.show) as url:
        yield url


async def test_a_file_on_the_web_is_fetched_once(url: str, shelf: Shelf) -> None:
    now = 0.0
    reader = FileReader(allowed=LOOPBACK, clock=lambda: now)
    file = InputFile(file_url=f"{url}/a.pdf")
    for _ in range(3):
        (reading,) = await reader.read_all([PlacedFile("msg_1", file, PATH)])
        assert reading == '<file name="a.pdf">\n[page 1]\nOne\n</file>\n'
    assert shelf.seen == ["/a.pdf"]
    now = 86_400.0
    await reader.read_all([PlacedFile("msg_1", file, PATH)])
    assert shelf.seen == ["/a.pdf"] * 2


async def test_a_download_passes_the_guard_and_the_limit(url: str, shelf: Shelf) -> None:
    for reader, address, words in (
        (FileReader(allowed=NOTHING_ALLOWED), f"{url}/a", "address is not allowed"),
        (FileReader(allowed=LOOPBACK), f"{url}/to?url=http://169.254.169.254/", "address is not allowed"),
        (FileReader(allowed=LOOPBACK), f"{url}/to?url=file:///etc/passwd", "Only http"),
        (FileReader(replace(FileLimits(), bytes=10), LOOPBACK), f"{url}/a", "larger than 10 bytes"),
    ):
        with pytest.raises(InvalidRequest, match=words) as refused:
            await reader.read_all([PlacedFile("msg_1", InputFile(file_url=address), PATH)])
        assert refused.value.param == PATH
    assert shelf.seen == ["/to", "/to", "/a"]


@pytest.mark.parametrize(
    ("data", "library", "reason"),
    [
        (pdf(["One"]), "pypdfium2", "This server reads no PDFs."),
        (b"<html>One", "selectolax", "This server reads no HTML."),
    ],
)
def test_file_whose_library_is_not_installed_is_not_supported(
    data: bytes, library: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "penstock.extensions.tools.browser.html", raising=False)
    for name in (library, f"{library}.lexbor"):
        monkeypatch.setitem(sys.modules, name, None)
    order = {"shows": "none", "charset": "", "is_html": False, "limits": asdict(FileLimits())}
    with pytest.raises(Unsupported, match=reason):
        parts_of(data, order, lambda: None)
