"""A splitter of ``text/event-stream``: blocks of whole events out of bytes in any pieces.

It follows https://html.spec.whatwg.org/multipage/server-sent-events.html: lines end in LF, CR or CRLF, a byte order
mark may come first, and an event that no blank line ends is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_BLANK = frozenset((b"\n", b"\r", b"\r\n"))
_ENDS = (b"\n", b"\r")
_MARK = b"\xef\xbb\xbf"


class TooLong(ValueError):
    """A block has more bytes than its reader allows."""


class Block(NamedTuple):
    """The bytes up to a blank line: an event, or only comments and other fields."""

    raw: bytes
    name: bytes = b""
    data: bytes | None = None
    """The data lines, joined by LF; None if there are none, so that the block is no event."""


class EventSplitter:
    """Splits a stream into blocks, in time linear in its bytes, and holds at most ``most_bytes`` of one."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: list[bytes] = []
        self._size = 0
        self._last = b"\n"
        """The last byte of all: a line begins after CR and LF."""
        self._is_first = True

    def feed(self, data: bytes) -> Iterator[Block]:
        """Yield the blocks that end in ``data``; raise `TooLong` for a longer one, after the blocks before it."""
        if self._last == b"\r" and data.startswith(b"\n"):  # the second half of a line end
            if self._held:
                self._held.append(b"\n")
                self._size += 1
            else:
                yield Block(b"\n")
            self._last, data = b"\n", data[1:]
        for line in data.splitlines(keepends=True):
            self._held.append(line)
            self._size += len(line)
            if self._size > self._most_bytes:
                raise TooLong(f"more than {self._most_bytes} bytes")
            if line in _BLANK and self._last in _ENDS:
                yield self._block()
            self._last = line[-1:]

    def _block(self) -> Block:
        raw = b"".join(self._held)
        self._held.clear()
        self._size = 0
        name, values = b"", list[bytes]()
        lines = (raw.removeprefix(_MARK) if self._is_first else raw).splitlines()
        self._is_first = False
        for line in lines:
            field, _, value = line.partition(b":")
            if field == b"data":
                values.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.removeprefix(b" ")
        return Block(raw, name, b"\n".join(values) if values else None)
