"""What aiohttp's reader of forms loops over without yielding is bounded: lines outside of the fields."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from multidict import CIMultiDict, CIMultiDictProxy

from penstock.extensions.tools.resources.upload_form import LONGEST_LINE, MOST_LINES, UploadForm
from penstock.pipeline.errors import BodyTooLarge, InvalidRequest
from tests.support.clock import counting_turns

BUFFERED = 1 << 16
LONGEST_TURN = 60_000
"""Instructions of a turn: a few milliseconds' work."""

FIELD = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'
FLOODS = {
    "line breaks": (b"", b"\n"),
    "carriage returns": (b"", b"\r\n"),
    "blanks": (b"", b" "),
    "near boundaries": (b"", b"--bb\r\n"),
    "boundaries without a line break": (b"", b"--b"),
    "words": (b"", b"preamble\r\n"),
    "lines of NUL": (b"", b"\0\n"),
    "headers": (FILE, b"x: y\r\n"),
    "empty headers": (FILE, b":\r\n"),
    "a long header": (FILE, b"x: y"),
    "folded headers": (FILE, b"x: y\r\n y\r\n"),
    "parts without a name": (b"", b"--b\r\n\r\n\r\n"),
    "empty parts": (b"", FIELD % (b"x", b"")),
    "a charset and headers": (FIELD % (b"_charset_", b"utf-8"), b"x: y\r\n"),
    "many charsets": (b"", FIELD % (b"_charset_", b"utf-8")),
    "forms in forms": (b"", b"--b\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n"),
    "a field of line breaks": (FIELD % (b"x", b"y"), b"\n"),
    "fields of line breaks": (b"", FIELD % (b"x", b"\n" * 100)),
}
"""The start of a form, and what then follows again and again."""

SOUND = FIELD % (b"purpose", b"user_data") + FILE + b"\r\nHello\r\n"
AFTER = {
    "an epilogue of line breaks": b"\n",
    "an epilogue of boundaries": b"--b--\r\n",
    "an epilogue of words": b"x\r\n",
}


def form(body: bytes) -> UploadForm:
    content = StreamReader(BaseProtocol(asyncio.get_running_loop()), 1 << 30)
    content.feed_data(body)
    content.feed_eof()
    headers = CIMultiDictProxy(CIMultiDict({"Content-Type": "multipart/form-data; boundary=b"}))
    request: Any = SimpleNamespace(
        headers=headers, content=content, content_type="multipart/form-data", content_length=None
    )
    return UploadForm(request, 1 << 30)


async def receive(body: bytes) -> bytes:
    written: list[bytes] = []

    async def write(piece: bytes) -> None:
        written.append(piece)
        await asyncio.sleep(0)  # as the store does

    await form(body).receive(write)
    return b"".join(written)


@pytest.mark.parametrize("which", FLOODS)
async def test_flood_is_refused_after_a_short_turn(which: str) -> None:
    start, repeated = FLOODS[which]
    body = start + repeated * (BUFFERED // len(repeated))
    with counting_turns() as turns, pytest.raises((InvalidRequest, BodyTooLarge)) as refused:
        await receive(body)
    assert turns.longest < LONGEST_TURN
    assert refused.value.param in (None, "x")


@pytest.mark.parametrize("which", AFTER)
async def test_what_follows_the_form_is_left_unread(which: str) -> None:
    with counting_turns() as turns:
        assert await receive(SOUND + b"--b--\r\n" + AFTER[which] * (BUFFERED // 8)) == b"Hello"
    assert turns.longest < LONGEST_TURN


async def test_short_preamble_is_skipped() -> None:
    assert await receive(b"This is a form.\r\n" + SOUND + b"--b--\r\n") == b"Hello"
    with pytest.raises(InvalidRequest, match=f"more than {MOST_LINES} lines outside of its fields"):
        await receive(b"\r\n" * MOST_LINES + SOUND + b"--b--\r\n")
    assert await receive(b"\r\n" * (MOST_LINES - 20) + SOUND + b"--b--\r\n") == b"Hello"


async def test_lines_within_the_file_are_not_counted() -> None:
    content = b"\n" * 10 * MOST_LINES + b"y" * 3 * LONGEST_LINE
    assert await receive(SOUND.replace(b"Hello", content) + b"--b--\r\n") == content
