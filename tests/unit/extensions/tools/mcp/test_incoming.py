"""The counts of what a server sends, before anything is converted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

import httpx2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.extensions.tools.mcp import incoming
from penstock.extensions.tools.mcp.incoming import TooMuch, bound
from penstock.services.json_size import JsonSize


class Body(httpx2.AsyncByteStream):
    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


async def passed(body: bytes, cuts: Sequence[int], kind: str) -> bytes | str:
    """Return what passes of a body that arrives in pieces, or the reason why not all of it does."""
    places = sorted({cut % (len(body) + 1) for cut in cuts})
    chunks = [body[start:end] for start, end in zip([0, *places], [*places, len(body)], strict=True)]
    response = httpx2.Response(200, headers={"Content-Type": kind}, stream=Body([each for each in chunks if each]))
    await bound(response)
    try:
        return b"".join([chunk async for chunk in response.stream])  # type: ignore[union-attr]
    except TooMuch as error:
        return str(error)


def event(size: int, end: str) -> bytes:
    return f"data: {json.dumps([{}] * (size - 1))}{end}".encode()


CUTS = st.lists(st.integers(0, 10_000), max_size=12)
ENDS = st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"])


@given(st.lists(st.integers(1, 24), min_size=1, max_size=8), ENDS, CUTS)
@example([20, 20, 20], "\n\n", [62, 63, 124, 125])
async def test_each_event_is_counted_by_itself_in_any_pieces(sizes: list[int], end: str, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(incoming, "LARGEST", JsonSize(20, 1_000))
        stream = b"".join(event(size, end) for size in sizes)
        expected: bytes | str = stream if max(sizes) <= 20 else "more than 20 objects and arrays, or 1000 values"
        assert await passed(stream, cuts, "text/event-stream; charset=utf-8") == expected


@given(st.integers(1, 40), CUTS)
async def test_body_is_one_message_in_any_pieces(size: int, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(incoming, "LARGEST", JsonSize(20, 1_000))
        body = json.dumps([{}] * (size - 1)).encode()
        assert await passed(body, cuts, "application/json") == (
            body if size <= 20 else "more than 20 objects and arrays, or 1000 values"
        )


@pytest.mark.parametrize("body", [b"," * 21, b"[" * 21, b"{" * 21])
async def test_each_count_has_a_limit(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(incoming, "LARGEST", JsonSize(20, 20))
    assert str(await passed(body, [7, 14], "application/json")).startswith("more than 20")
    assert await passed(body[:20], [7, 14], "application/json") == body[:20]


async def test_stray_quotes_of_a_stream_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "LARGEST", JsonSize(20, 20))
    hidden = b'id: "\ndata: ' + b"[" * 21 + b'\n: "\n\n'
    assert str(await passed(hidden, [], "text/event-stream")).startswith("more than 20")


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_bytes_have_a_limit(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(incoming, "LARGEST_BYTES", 20)
    assert await passed(b" " * 21, [7, 14], kind) == "more than 20 bytes"
