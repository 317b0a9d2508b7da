"""Read request bodies of any size without blocking the event loop.

Parsing and validating take time in proportion to the body, and hold the GIL even in a thread.  So long work is done in
pieces with an ``await may_yield()`` between them: a short body never yields, and a long one lets other tasks run.
"""

from __future__ import annotations

import asyncio
import re
from time import perf_counter
from typing import Any

import msgspec
from pydantic_core import from_json

from penstock.pipeline.errors import BodyTooLarge, InvalidRequest

HELD = 0.002
"""Seconds of work after which a task yields to the loop, once its current piece is finished."""

PIECE = 2**13
"""Bytes of JSON to parse at once."""

MOST_COMMAS = 1_000_000
"""The most commas in a body: more values would take a gigabyte and seconds, and no model reads as many."""

COUNTED = 2**20
"""Bytes to count commas in at once."""

DEEPEST = 100
"""The most levels at which a body is cut into pieces; the JSON parser has its own limit for the depth of a piece."""

NO_JSON = (ValueError, RecursionError)
"""The errors that parsers raise for bytes that are no JSON, or no UTF-8."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])
_escape = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<lone>u[dD][89a-fA-F]..)|.)", re.DOTALL)


class YieldPoint:
    """A yield point for one task, which lets the event loop run after every `HELD` seconds of work."""

    def __init__(self) -> None:
        self._rest_at = perf_counter() + HELD

    async def __call__(self) -> None:
        """Yield to the event loop, if it is time."""
        if perf_counter() >= self._rest_at:
            await asyncio.sleep(0)
            self._rest_at = perf_counter() + HELD


async def read_json(body: bytes, may_yield: YieldPoint) -> Any:
    """Parse a body; an escaped surrogate without its other half, which JavaScript may send, becomes U+FFFD.

    Raises `InvalidRequest` if the body is not JSON, and `BodyTooLarge` if it has too many values.
    """
    await check_commas(body, may_yield)
    try:
        return await _parsed(memoryview(body.lstrip()), may_yield)
    except NO_JSON:
        mended = await _mended(body, may_yield)
    try:
        return await _parsed(memoryview(mended.lstrip()), may_yield)
    except NO_JSON as error:
        problem = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"The body is not valid JSON: {problem}") from error


def shortened(text: str, limit: int = 100) -> str:
    """Return the start of a text, for quoting it in a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


async def check_commas(body: bytes, may_yield: YieldPoint) -> None:
    """Raise `BodyTooLarge` for a body with more than `MOST_COMMAS`."""
    commas = 0
    for start in range(0, len(body), COUNTED):
        commas += body.count(b",", start, start + COUNTED)
        await may_yield()
    if commas > MOST_COMMAS:
        raise BodyTooLarge(f"The body has more than {MOST_COMMAS:,} commas, which is the limit.")


async def _parsed(text: memoryview, may_yield: YieldPoint, depth: int = 0) -> Any:
    await may_yield()
    if len(text) <= PIECE:
        return from_json(bytes(text), allow_inf_nan=False)
    if text[0] not in b"[{":
        return msgspec.json.decode(text)
    if depth == DEEPEST:
        raise ValueError("it is nested too deeply")
    if text[0] in b"[":
        return await _parsed_list(_array.decode(text), may_yield, depth + 1)
    return {
        name: await _parsed(memoryview(value), may_yield, depth + 1) for name, value in _object.decode(text).items()
    }


async def _parsed_list(texts: list[msgspec.Raw], may_yield: YieldPoint, depth: int) -> list[Any]:
    """Parse the elements of a list, many short ones at a time."""
    parsed, short, size = list[Any](), list[memoryview](), 0
    await may_yield()  # splitting a very long list took long already
    for raw in texts:
        text = memoryview(raw)
        if size + len(text) > PIECE:
            parsed += from_json(b"[%b]" % b",".join(short), allow_inf_nan=False)
            short, size = [], 0
            await may_yield()
        if len(text) > PIECE:
            parsed.append(await _parsed(text, may_yield, depth))
        else:
            short.append(text)
            size += len(text) + 1
    parsed += from_json(b"[%b]" % b",".join(short), allow_inf_nan=False)
    return parsed


async def _mended(body: bytes, may_yield: YieldPoint) -> bytearray:
    mended = bytearray(body)
    for escape in _escape.finditer(body):
        if escape["lone"]:
            mended[escape.start() : escape.end()] = rb"\ufffd"
        await may_yield()
    return mended
