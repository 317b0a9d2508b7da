"""Bodies of any size, read without holding up the loop.

Parsing and validating take time in proportion to a body, and hold the interpreter's lock even in a thread.  So long
work is done in pieces with an ``await pace()`` between them: a short body never waits, a long one lets others go on.
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
"""Seconds of work between two turns of the loop; the piece that is under way then comes on top."""

PIECE = 2**13
"""Bytes of JSON that are parsed at once."""

MOST_COMMAS = 1_000_000
"""In one body: as many values take a gigabyte and seconds, and no text that a model can read has as many."""

COUNTED = 2**20
"""Bytes that are looked through at once."""

DEEPEST = 100
"""Levels at which a body may be cut into pieces; each piece may be that deep again, and half more."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])
_escape = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<lone>u[dD][89a-fA-F]..)|.)", re.DOTALL)


class Pace:
    """Gives the loop a turn whenever its task has held it for some milliseconds."""

    def __init__(self) -> None:
        self._rest_at = perf_counter() + HELD

    async def __call__(self) -> None:
        """Rest, if it is time."""
        if perf_counter() >= self._rest_at:
            await asyncio.sleep(0)
            self._rest_at = perf_counter() + HELD


async def read_json(body: bytes, pace: Pace) -> Any:
    """Parse a body; a surrogate without its other half, which JavaScript lets through, becomes U+FFFD.

    Raises `InvalidRequest` for what is not JSON, and `BodyTooLarge` for too many values.
    """
    await _check_commas(body, pace)
    try:
        return await _parsed(memoryview(body.lstrip()), pace)
    except (ValueError, RecursionError):
        mended = await _mended(body, pace)
    try:
        return await _parsed(memoryview(mended.lstrip()), pace)
    except (ValueError, RecursionError) as error:
        problem = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"The body is not valid JSON: {problem}") from error


def shortened(text: str) -> str:
    """The start of a text that a client sent, to be quoted in a message to it."""
    return text if len(text) <= 100 else f"{text[:100]}..."


async def _check_commas(body: bytes, pace: Pace) -> None:
    commas = 0
    for start in range(0, len(body), COUNTED):
        commas += body.count(b",", start, start + COUNTED)
        await pace()
    if commas > MOST_COMMAS:
        raise BodyTooLarge(f"The body has more than {MOST_COMMAS:,} commas: that is more than can be read.")


async def _parsed(text: memoryview, pace: Pace, depth: int = 0) -> Any:
    await pace()
    if len(text) <= PIECE:
        return from_json(bytes(text), allow_inf_nan=False)
    if text[0] not in b"[{":
        return msgspec.json.decode(text)
    if depth == DEEPEST:
        raise ValueError("it is nested too deeply")
    if text[0] in b"[":
        return await _parsed_list(_array.decode(text), pace, depth + 1)
    return {name: await _parsed(memoryview(value), pace, depth + 1) for name, value in _object.decode(text).items()}


async def _parsed_list(texts: list[msgspec.Raw], pace: Pace, depth: int) -> list[Any]:
    """The elements of a list, short ones many at a time."""
    parsed, short, size = list[Any](), list[memoryview](), 0
    await pace()  # it took long to find very many
    for raw in texts:
        text = memoryview(raw)
        if size + len(text) > PIECE:
            parsed += from_json(b"[%b]" % b",".join(short), allow_inf_nan=False)
            short, size = [], 0
            await pace()
        if len(text) > PIECE:
            parsed.append(await _parsed(text, pace, depth))
        else:
            short.append(text)
            size += len(text) + 1
    parsed += from_json(b"[%b]" % b",".join(short), allow_inf_nan=False)
    return parsed


async def _mended(body: bytes, pace: Pace) -> bytearray:
    mended = bytearray(body)
    for escape in _escape.finditer(body):
        if escape["lone"]:
            mended[escape.start() : escape.end()] = rb"\ufffd"
        await pace()
    return mended
