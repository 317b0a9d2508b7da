"""The counts of what a server sends, before anything is converted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.stages.services.mcp import incoming
from penstock.stages.services.mcp.incoming import TooMuch, bound, containers

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a{}[],:"\\\n '),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='a{["\\'), inner, max_size=5),
    max_leaves=30,
)


def containers_in(value: Any) -> int:
    match value:
        case dict():
            return 1 + sum(map(containers_in, value.values()))
        case list():
            return 1 + sum(map(containers_in, value))
        case _:
            return 0


@given(VALUES, st.sampled_from([None, 0, 2]))
def test_containers_are_never_counted_too_low(value: Any, indent: int | None) -> None:
    assert containers(json.dumps(value, indent=indent).encode()) >= containers_in(value)


@given(st.integers(1, 50), st.sampled_from([None, 2]))
def test_json_in_a_text_counts_as_a_text(count: int, indent: int | None) -> None:
    """A tool may well return a long JSON document as its text."""
    document = json.dumps([{"name": "a", "inner": {"b": 1}}] * count, indent=indent)
    assert containers(json.dumps({"text": document}).encode()) <= 2 + (indent is None)


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
        patched.setattr(incoming, "MOST_CONTAINERS", 20)
        stream = b"".join(event(size, end) for size in sizes)
        expected = stream if max(sizes) <= 20 else "more than 20 objects and arrays"
        assert await passed(stream, cuts, "text/event-stream; charset=utf-8") == expected


@given(st.integers(1, 40), CUTS)
async def test_body_is_one_message_in_any_pieces(size: int, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(incoming, "MOST_CONTAINERS", 20)
        body = json.dumps([{}] * (size - 1)).encode()
        assert await passed(body, cuts, "application/json") == (
            body if size <= 20 else "more than 20 objects and arrays"
        )


@pytest.mark.parametrize(
    ("limit", "body"), [("LARGEST_BYTES", b" " * 21), ("MOST_COMMAS", b"," * 21), ("MOST_CONTAINERS", b"[" * 21)]
)
async def test_each_limit_holds(monkeypatch: pytest.MonkeyPatch, limit: str, body: bytes) -> None:
    monkeypatch.setattr(incoming, limit, 20)
    assert str(await passed(body, [7, 14], "application/json")).startswith("more than 20")
    assert await passed(body[:20], [7, 14], "application/json") == body[:20]
