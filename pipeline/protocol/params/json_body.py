"""Read the JSON of request bodies of any size.

Reading takes time in proportion to the body, and the parser holds the GIL.  So a long body is read in a thread, and
parsed in pieces, between which other threads run.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from pydantic_core import from_json

from penstock.pipeline.errors import BodyTooLarge, InvalidRequest

PIECE_BYTES = 2**15
"""Bytes of JSON to parse at once; bodies that are read on the event loop have no more."""

MOST_COMMAS = 1_000_000
"""The most commas in a body: more values would take a gigabyte and seconds, and no model reads as many."""

COUNTED = 2**20
"""Bytes to count commas in at once."""

MOST_LEVELS = 100
"""The most levels at which a body is cut into pieces; the JSON parser has its own limit for the depth of a piece."""

NO_JSON = (ValueError, RecursionError)
"""The errors that parsers raise for bytes that are no JSON, or no UTF-8."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])
_escape = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<lone>u[dD][89a-fA-F]..)|.)", re.DOTALL)


def read_json(body: bytes) -> Any:
    """Parse a body; an escaped surrogate without its other half, which JavaScript may send, becomes U+FFFD.

    Raises `InvalidRequest` if the body is not JSON, and `BodyTooLarge` if it has too many values.
    """
    check_commas(body)
    try:
        return _parsed(memoryview(body.lstrip()))
    except NO_JSON:
        mended = _mended(body)
    try:
        return _parsed(memoryview(mended.lstrip()))
    except NO_JSON as error:
        problem = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"The body is not valid JSON: {problem}") from error


def shortened(text: str, limit: int = 100) -> str:
    """Return the start of a text, for quoting it in a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def check_commas(body: bytes) -> None:
    """Raise `BodyTooLarge` for a body with more than `MOST_COMMAS`."""
    if sum(body.count(b",", start, start + COUNTED) for start in range(0, len(body), COUNTED)) > MOST_COMMAS:
        raise BodyTooLarge(f"The body has more than {MOST_COMMAS:,} commas, which is the limit.")


def _parsed(text: memoryview, depth: int = 0) -> Any:
    if len(text) <= PIECE_BYTES:
        return from_json(bytes(text), allow_inf_nan=False)
    if text[0] not in b"[{":
        return msgspec.json.decode(text)
    if depth == MOST_LEVELS:
        raise ValueError("it is nested too deeply")
    if text[0] in b"[":
        return _parsed_list(_array.decode(text), depth + 1)
    return {name: _parsed(memoryview(value), depth + 1) for name, value in _object.decode(text).items()}


def _parsed_list(texts: list[msgspec.Raw], depth: int) -> list[Any]:
    """Parse the elements of a list, many short ones at once."""
    parsed, short, size = list[Any](), list[memoryview](), 0
    for raw in texts:
        text = memoryview(raw)
        if size + len(text) > PIECE_BYTES:
            parsed += _joined(short)
            short, size = [], 0
        if len(text) > PIECE_BYTES:
            parsed.append(_parsed(text, depth))
        else:
            short.append(text)
            size += len(text) + 1
    return parsed + _joined(short)


def _joined(texts: list[memoryview]) -> list[Any]:
    values: list[Any] = from_json(b"[%b]" % b",".join(texts), allow_inf_nan=False)
    return values


def _mended(body: bytes) -> bytearray:
    mended = bytearray(body)
    for escape in _escape.finditer(body):
        if escape["lone"]:
            mended[escape.start() : escape.end()] = rb"\ufffd"
    return mended
