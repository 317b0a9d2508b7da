"""Bytes of answers as events, in whatever pieces the bytes come, and however they are compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

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
    """Reads server-sent events; see https://html.spec.whatwg.org/multipage/server-sent-events.html.

    An event without its empty line at the end of a stream is none, as for every client.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # the pieces of a line that has not ended
        self._size = 0
        self._was_return = False
        self._is_first = True
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[WireEvent]:
        """Yield the events that end with these bytes."""
        if self._was_return:
            data = data.removeprefix(b"\n")
            self._was_return = not data
        for piece in data.splitlines(keepends=True):
            self._size += len(piece)
            if self._size > LONGEST_EVENT:
                raise Unrecordable("an event is too long")
            line = piece.rstrip(b"\r\n")
            self._line.append(line)
            if line != piece:
                yield from self._read(b"".join(self._line))
                self._line = []
        if data:
            self._was_return = data.endswith(b"\r")

    def _read(self, line: bytes) -> Iterator[WireEvent]:
        if self._is_first:
            line, self._is_first = line.removeprefix(b"\xef\xbb\xbf"), False
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if self._data:
                yield WireEvent(self._name.decode("utf-8", "replace"), **parsed(b"\n".join(self._data)))
            self._name, self._data, self._size = b"", [], 0
        elif name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value
        if not self._data and not self._name:
            self._size = 0  # a comment


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
