"""Answers of other programs: read up to a bound, and counted before they are converted.

Every answer that comes from outside of this server is read here, from engines, search engines and web pages.  MCP
servers send messages through their SDK: `penstock.extensions.tools.mcp.incoming` counts them by the same rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from typing import Final, TypeVar

from penstock.pipeline.protocol.params.json_body import NO_JSON
from penstock.services.json_size import JsonSize, exceeds, may_exceed

LARGEST_BYTES: Final = 16 * 2**20
"""Bytes of an answer."""

LARGEST: Final = JsonSize(containers=15_000, commas=50_000)
"""The size of an answer.  Converting one of this size takes some ten milliseconds of the event loop."""

_SHORT: Final = 2**16
"""Bytes of JSON that are read at once; a thread reads longer JSON."""

Answer = TypeVar("Answer")


class Unreadable(ValueError):
    """An answer is too large, or of an unexpected form: the message says which, without any text of the answer."""


async def read_start(pieces: AsyncIterable[bytes], most: int) -> bytes:
    """Read at most ``most`` bytes of a body, counted after decompression, and leave the rest."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) >= most:
            break
    return bytes(body[:most])


async def read_whole(pieces: AsyncIterable[bytes], most: int = LARGEST_BYTES) -> bytes:
    """Read a body; raises `Unreadable` if it has more than ``most`` bytes."""
    body = await read_start(pieces, most + 1)
    if len(body) > most:
        raise Unreadable(f"too large: more than {most} bytes")
    return body


async def excess_of(json: bytes, most: JsonSize = LARGEST) -> str | None:
    """Return in which way JSON is larger than ``most``; a thread counts in JSON that looks so."""
    if may_exceed(json, most) and await asyncio.to_thread(exceeds, json, most):
        return f"more than {most.containers} objects and arrays, or {most.commas} values"
    return None


async def decoded(json: bytes, decode: Callable[[bytes], Answer], most: JsonSize = LARGEST) -> Answer:
    """Return what ``decode`` makes of JSON; raises `Unreadable` if it is larger than ``most``, or of another form."""
    if excess := await excess_of(json, most):
        raise Unreadable(f"too large: {excess}")
    try:
        if len(json) <= _SHORT:
            return decode(json)
        return await asyncio.to_thread(decode, json)
    except NO_JSON as error:
        raise Unreadable("of an unexpected form") from error
