"""Events are read from bytes in any pieces, compressed or not, and no answer takes more memory than is allowed."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.workbench.wiretap import streams as module
from penstock.extensions.workbench.wiretap.streams import BodyReader, Decoder, EventReader, Unrecordable, readable
from penstock.pipeline.recordings.wire import WireBody, WireEvent

Event = tuple[str, object]

ENDS = st.sampled_from(["\n", "\r\n", "\r"])
NAMES = st.from_regex(r"[a-z_.]{0,12}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.lists(st.tuples(NAMES, VALUES), max_size=6)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut bytes at some places."""
    at = sorted({place % (len(data) + 1) for place in places})
    return [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]


def written(events: list[Event], end: str) -> bytes:
    frames = [
        (f"event: {name}{end}" if name else f": a comment{end}") + f"data: {json.dumps(value)}{end}{end}"
        for name, value in events
    ]
    return "".join(frames).encode()


def read(pieces: list[bytes], coding: str = "") -> list[WireEvent]:
    decoder, reader = Decoder(coding), EventReader()
    return [event for data in pieces for piece in decoder.feed(data) for event in reader.feed(piece)]


@given(EVENTS, ENDS, st.lists(st.integers(0), max_size=20))
def test_events_are_read_from_any_pieces(events: list[Event], end: str, places: list[int]) -> None:
    data = written(events, end)
    expected = [WireEvent(name, data=value) for name, value in events]
    assert read(cut(data, places)) == expected
    assert read(cut(b"\xef\xbb\xbf" + data, places)) == expected


@given(EVENTS, st.sampled_from(["gzip", "X-GZip", "deflate"]), st.lists(st.integers(0), max_size=20))
def test_compressed_events_are_read_from_any_pieces(events: list[Event], coding: str, places: list[int]) -> None:
    data = written(events, "\n")
    half = len(data) // 2
    packed = zlib.compress(data) if coding == "deflate" else gzip.compress(data[:half]) + gzip.compress(data[half:])
    assert read(cut(packed, places), coding) == [WireEvent(name, data=value) for name, value in events]


def test_what_is_no_json_is_text() -> None:
    data = (
        b"data: [DONE]\n\ndata: a\ndata: b\n\ndata: \xff\xc3\n\ndata\n\ndata: NaN\n\ndata: " + b"[" * 100_000 + b"\n\n"
    )
    *texts, deep = read([data])
    assert texts == [WireEvent(text=text) for text in ("[DONE]", "a\nb", "\ufffd\ufffd", "", "NaN")]
    assert deep == WireEvent(text="[" * 100_000)
    assert read([b"data: 1"]) == read([b"event: a\n\n"]) == read([b": c\n\n"]) == []


def test_body_is_read_as_a_whole() -> None:
    reader = BodyReader()
    assert [*reader.feed(b'{"a":'), *reader.feed(b"1}")] == []
    assert reader.whole() == WireBody(data={"a": 1})


@pytest.mark.parametrize("data", [b"data: " + b"x" * 100, b"x" * 101, b"data: x\n" * 20, b"event: x\n" * 20])
def test_endless_event_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_EVENT", 100)
    with pytest.raises(Unrecordable, match="an event is too long"):
        list(EventReader().feed(data))
    with pytest.raises(Unrecordable, match="the answer is too long"):
        list(BodyReader().feed(b"x" * 101))


def test_comments_and_short_events_may_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_EVENT", 100)
    assert len(read([b": alive\n\n" * 50, b"data: 1\n\n" * 50])) == 50


def test_bomb_is_refused_without_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2**21)
    sizes: list[int] = []
    with pytest.raises(Unrecordable, match="the answer is too long"):
        sizes.extend(map(len, Decoder("gzip").feed(gzip.compress(bytes(2**24)))))
    assert sum(sizes) <= 2**21
    assert max(sizes) <= module.PIECE


def test_coding_that_cannot_be_read_is_not_asked_for() -> None:
    with pytest.raises(Unrecordable, match="'br' cannot be read here"):
        Decoder("br")
    with pytest.raises(Unrecordable, match="its compression is broken"):
        list(Decoder("gzip").feed(b"no gzip"))
    assert readable("gzip, deflate, br;q=1.0, zstd") == "gzip, deflate"
    assert readable("br") == "identity"
    assert readable("gzip;q=0.5,identity") == "gzip;q=0.5, identity"
