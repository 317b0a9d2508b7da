"""The size of foreign JSON, counted in its bytes before it is parsed: objects and arrays, and values.

A parser takes time for each of them, and a text counts as one value, however long it is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PIECE_BYTES: Final = 2**16


class JsonSize(NamedTuple):
    """The number of objects and arrays in JSON, and of commas, which bounds its values."""

    containers: int = 0
    commas: int = 0


def at_most(json: bytes) -> JsonSize:
    """Return a bound of the size, in a microsecond for a kilobyte; marks in texts count too."""
    return JsonSize(json.count(b"{") + json.count(b"["), json.count(b","))


def exactly(json: bytes) -> JsonSize:
    """Return the size without the marks in texts; it takes ten times as long as `at_most`."""
    containers = commas = 0
    in_text = False
    rest = b""
    for start in range(0, len(json), PIECE_BYTES):
        piece = rest + json[start : start + PIECE_BYTES]
        body = piece.rstrip(b"\\")
        rest = b"\\" * ((len(piece) - len(body)) % 2)  # half an escape
        segments = piece[: len(piece) - len(rest)].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(segments[in_text::2])
        containers += outside.count(b"{") + outside.count(b"[")
        commas += outside.count(b",")
        in_text ^= len(segments) % 2 == 0
    return JsonSize(containers, commas)


def may_exceed(json: bytes, most: JsonSize) -> bool:
    """Return True unless its length, or `at_most`, shows that the JSON is no larger than ``most``."""
    return len(json) > min(most) and _is_over(at_most(json), most)


def exceeds(json: bytes, most: JsonSize) -> bool:
    """Return True if the JSON is larger than ``most`` in either way; most texts are not counted exactly."""
    return may_exceed(json, most) and _is_over(exactly(json), most)


def _is_over(size: JsonSize, most: JsonSize) -> bool:
    return size.containers > most.containers or size.commas > most.commas
