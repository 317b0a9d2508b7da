"""A reader of ``text/event-stream``, as the HTML standard has it, which also sees what the standard would repair."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class SentEvent:
    """One event: its ``event`` field, empty if it has none, and its data."""

    name: str
    data: str


class EventReader:
    """Split the bytes of a stream into events; raise `UnicodeDecodeError` for an event that is not UTF-8."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    @property
    def held(self) -> bytes:
        """The bytes of the last event, if no blank line has ended it yet."""
        return b"\n".join((*self._lines, self._rest)).strip()

    def feed(self, block: bytes) -> Iterator[SentEvent]:
        """Yield the events that a block of bytes completes."""
        if b"\n" not in block and b"\r" not in block:
            self._rest += block
            return
        data = self._rest + block
        # A CR at the end may be the first half of a CRLF.
        ready, self._rest = (data[:-1], data[-1:]) if data.endswith(b"\r") else (data, b"")
        *lines, last = _LINE_END.split(ready)
        self._rest = last + self._rest
        for line in lines:
            if line:
                self._lines.append(line)
                continue
            if event := _event(self._lines):
                yield event
            self._lines = []


def _event(lines: list[bytes]) -> SentEvent | None:
    name, data = "", list[str]()
    for line in lines:
        field, _, value = line.decode().partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
    return SentEvent(name, "\n".join(data)) if data else None
