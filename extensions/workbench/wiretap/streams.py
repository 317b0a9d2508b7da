"""Bytes of answers as events, in whatever pieces the bytes come, and however they are compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.pipeline.protocol.sse import EventSplitter, TooLong
from penstock.pipeline.recordings.wire import WireBody, WireEvent

LONGEST_EVENT = 8 * 2**20
"""Bytes of an event, or of an answer that is no stream, from which on a recording is cut."""

MOST_BYTES = 256 * 2**20
"""Bytes of an answer, without compression, from which on a recording is cut."""

PIECE = 2**20
"""Bytes that are decompressed at once."""

_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Unrecordable(Exception):
    """An answer cannot be recorded; the message continues a sentence."""


def parsed(data: bytes) -> dict[str, Any]:
    """Return the fields of a frame with these bytes: their JSON, or else their text."""
    try:
        return {"data": msgspec.json.decode(data)}
    except _NO_JSON:
        return {"text": data.decode("utf-8", "replace")}


class EventReader:
    """Reads server-sent events."""

    def __init__(self) -> None:
        self._blocks = EventSplitter(LONGEST_EVENT)

    def feed(self, data: bytes) -> Iterator[WireEvent]:
        """Yield the events that end with these bytes."""
        try:
            for block in self._blocks.feed(data):
                if block.data is not None:
                    yield WireEvent(block.name.decode("utf-8", "replace"), **parsed(block.data))
        except TooLong as error:
            raise Unrecordable("an event is too long") from error


class BodyReader:
    """Reads a whole body as one frame."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[WireBody]:
        """Keep the bytes; nothing ends with them."""
        self._size += len(data)
        if self._size > LONGEST_EVENT:
            raise Unrecordable("the answer is too long")
        self._pieces.append(data)
        return iter(())

    def whole(self) -> WireBody:
        """Return the body."""
        return WireBody(**parsed(b"".join(self._pieces)))


PLAIN = frozenset({"", "identity"})

READABLE = PLAIN | {"gzip", "x-gzip", "deflate"}
"""The codings of a body that can be undone."""


class Decoder:
    """Undoes a ``Content-Encoding``, without more memory than a piece takes."""

    def __init__(self, coding: str) -> None:
        if coding.strip().lower() not in READABLE:
            raise Unrecordable(f"the Content-Encoding {coding!r} cannot be read here")
        self._is_plain = coding.strip().lower() in PLAIN
        self._left = MOST_BYTES
        self._inflating = _inflating()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the plain bytes."""
        for piece in (data,) if self._is_plain else self._inflated(data):
            self._left -= len(piece)
            if self._left < 0:
                raise Unrecordable("the answer is too long")
            yield piece

    def _inflated(self, data: bytes) -> Iterator[bytes]:
        try:
            while data:
                if self._inflating.eof:  # another member follows
                    self._inflating = _inflating()
                yield self._inflating.decompress(data, PIECE)
                data = self._inflating.unconsumed_tail or self._inflating.unused_data
        except zlib.error as error:
            raise Unrecordable("its compression is broken") from error


def _inflating() -> zlib._Decompress:
    return zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or deflate, as its first bytes say


def readable(accepted: str) -> str:
    """Return the codings of an ``Accept-Encoding`` that can be undone; without any, that the answer is to be plain."""
    codings = [coding.strip() for coding in accepted.split(",")]
    return ", ".join(coding for coding in codings if coding.partition(";")[0].strip().lower() in READABLE) or "identity"
