"""The splitter reads what the HTML standard says, in any pieces, and never holds more than its bound."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.pipeline.protocol.sse import EventSplitter, TooLong

Event = tuple[str, str]

BYTES = ("\n", "\r", "\r\n", "\n\n", "\r\r", "\ufeff", ":", " ", "x", "\0", "é\u2028\x0b\x0c\x85")
LINES = ("data", "data:", "data: ", "data:  x", "event", "event: ", "event: done", "data2: x", "id: 1", ": a comment")
PIECES = st.sampled_from((*BYTES, *LINES))
STREAMS = st.lists(PIECES, max_size=40).map("".join)
CUTS = st.lists(st.integers(0), max_size=20)


def standard(text: str) -> list[Event]:
    """Read a stream as https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream says."""
    events, name, data, line = list[Event](), "", "", ""
    characters = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    for character in characters:
        if character != "\n":
            line += character
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append((name, data[:-1]))
            name, data = "", ""
        elif field == "event":
            name = value
        elif field == "data":
            data += value + "\n"
        line = ""
    return events


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, *(place % (len(data) + 1) for place in cuts), len(data)})
    return [data[start:end] for start, end in pairwise(places)]


def read(pieces: list[bytes], most_bytes: int = 10_000) -> tuple[list[Event], bytes]:
    """Return the events of a stream, and the bytes of all its blocks."""
    splitter = EventSplitter(most_bytes)
    blocks = [block for piece in pieces for block in splitter.feed(piece)]
    events = [(block.name.decode(), block.data.decode()) for block in blocks if block.data is not None]
    return events, b"".join(block.raw for block in blocks)


@given(STREAMS, CUTS)
@example("data: x\r\n\r\ndata: y\r\r\n\n", list(range(30)))
@example("\ufeffdata: x\n\n\ufeffdata: y\n\n", [])
@example("data\n\ndata\ndata\n\ndata:\n", [])
def test_any_stream_is_read_as_the_standard_says_in_any_pieces(text: str, cuts: list[int]) -> None:
    data = text.encode()
    events, passed = read(cut(data, cuts))
    assert events == standard(text)
    assert data.startswith(passed)
    assert not standard(data[len(passed) :].decode())


@given(STREAMS)
def test_event_is_there_with_the_byte_that_ends_it(text: str) -> None:
    splitter, seen = EventSplitter(10_000), 0
    for end, byte in enumerate(text.encode(), 1):
        seen += sum(block.data is not None for block in splitter.feed(bytes((byte,))))
        assert seen == len(standard(text.encode()[:end].decode(errors="replace")))


@given(st.integers(8, 40), CUTS)
def test_bound_is_that_of_a_block(size: int, cuts: list[int]) -> None:
    block = b"data: " + b"x" * (size - 8) + b"\n\n"
    events, passed = read(cut(block * 3, cuts), len(block))
    assert (len(events), passed) == (3, block * 3)
    splitter, read_before = EventSplitter(len(block)), 0
    with pytest.raises(TooLong, match=f"more than {len(block)} bytes"):
        for piece in cut(block * 2 + b"x" + block, cuts):
            for _ in splitter.feed(piece):
                read_before += 1
    assert read_before == 2


@pytest.mark.parametrize("line", [b"x", b"data: x\n", b": a comment\n", b"event: x\r", b"data: x\r\n"])
def test_what_has_no_blank_line_is_bounded(line: bytes) -> None:
    splitter = EventSplitter(100)
    with pytest.raises(TooLong):
        for _ in range(101):
            assert not list(splitter.feed(line))
