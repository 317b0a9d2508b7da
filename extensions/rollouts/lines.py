"""The lines of recordings as JSON values, of which only some are decoded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.pipeline.recordings import older
from penstock.pipeline.recordings.format import Header, read_header

MARKED = 64
"""The bytes at the beginning of a line that have the type of its frame."""


class Unusable(Exception):
    """A recording, or a turn of one, has no exact tokens; the message says why, worded for any number of them."""


def upgraded(data: bytes, header: Header) -> bytes:
    """Return a line of an older format in today's layout."""
    changed = older.CHANGED.get(header.format, ())
    if not changed:
        return data
    frame = msgspec.json.decode(data)
    return msgspec.json.encode(older.upgraded(frame, header.format)) if frame.get("type") in changed else data


def frames_of(path: Path, kind: str = "") -> Iterator[dict[str, Any]]:
    """Yield the frames of a file, or only those of a type, as JSON values; none if there is no such file."""
    if not path.is_file():
        return
    header = read_header(path)
    mark = b'"type":"%b' % kind.encode()
    with path.open("rb") as file:
        file.readline()
        for line in file:
            if mark in line[:MARKED] and line.endswith(b"\n"):
                yield msgspec.json.decode(upgraded(line, header))
