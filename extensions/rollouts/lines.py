"""The lines of recordings as JSON values, of which only some are decoded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.pipeline.recordings import older
from penstock.pipeline.recordings.format import Header, read_header

MARKED = 64
"""The bytes at the beginning of a line that have the type of its frame."""

STARTED = "GenerationStarted"
"""The type of the frame with which a turn begins."""

_KIND = re.compile(rb'"type":"([\w.]+)"')


class Unusable(Exception):
    """A recording, or a turn of one, has no exact tokens; the message says why, worded for any number of them."""


def upgraded(data: bytes, header: Header) -> bytes:
    """Return a line of an older format in today's layout."""
    changed = older.CHANGED.get(header.format, ())
    if not changed:
        return data
    frame = msgspec.json.decode(data)
    return msgspec.json.encode(older.upgraded(frame, header.format)) if frame.get("type") in changed else data


@dataclass(frozen=True)
class Line:
    """A line of a recording: only those that are of interest are decoded."""

    turn: int
    """The number of the turn that it belongs to, from 1."""
    kind: str
    """The type of its frame."""
    data: bytes
    header: Header

    @property
    def frame(self) -> dict[str, Any]:
        """The frame as JSON values."""
        frame: dict[str, Any] = msgspec.json.decode(upgraded(self.data, self.header))
        return frame


def lines_of(path: Path) -> Iterator[Line]:
    """Yield the frames of a file; none if there is no such file."""
    if not path.is_file():
        return
    header, turn = read_header(path), 0
    with path.open("rb") as file:
        file.readline()
        for data in file:
            if (found := _KIND.search(data, 0, MARKED)) and data.endswith(b"\n"):
                kind = found[1].decode()
                turn += kind == STARTED
                yield Line(turn, kind, data, header)
