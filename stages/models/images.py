"""Images as they come: which kind some bytes are, and data URLs, in which they travel."""

from __future__ import annotations

import base64
import re
from binascii import a2b_base64

from penstock.pipeline.protocol.params.json_body import Pace

LARGEST_IMAGE = 20 << 20
"""Bytes of an image, as it came."""

_PIECE = 1 << 16
_SIGNATURES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
)
_head = re.compile(r"data:(?P<kind>[^;,]{0,80})(?:;[^;,]{0,80}){0,4}?;base64,", re.IGNORECASE)
_alias = {"image/jpg": "image/jpeg"}


class NoImage(Exception):
    """Why something is no image that could be read, in words for whoever sent it."""


def kind_of(start: bytes) -> str:
    """The media type of the image that begins like this; raises `NoImage`."""
    for signature, kind in _SIGNATURES:
        if signature.match(start):
            return kind
    raise NoImage("It is no PNG, JPEG, WebP or GIF.")


def as_data_url(image: bytes) -> str:
    """An image as a data URL; raises `NoImage`."""
    return f"data:{kind_of(image)};base64,{base64.b64encode(image).decode()}"


def is_data_url(url: str) -> bool:
    """Whether it says that it is one."""
    return url[:5].lower() == "data:"


async def check_data_url(url: str, pace: Pace) -> None:
    """Raise `NoImage` for a data URL that has none, or one that is too large."""
    payload = _payload_at(url)
    if (len(url) - payload) // 4 * 3 > LARGEST_IMAGE:
        raise NoImage(f"It is larger than {LARGEST_IMAGE >> 20} MiB.")
    last = max(payload, len(url) - 4)
    for start in range(payload, last, _PIECE):
        await pace()
        piece = url[start : min(start + _PIECE, last)]
        if "=" in piece:
            raise NoImage("It is not valid base64.")
        decoded = _decoded(piece)
        if start == payload:
            kind_of(decoded)
    _decoded(url[last:])
    if last == payload:
        raise NoImage("It is empty.")


def image_in(data_url: str) -> bytes:
    """The image of a data URL that was checked."""
    return a2b_base64(data_url[_payload_at(data_url) :])


def _payload_at(url: str) -> int:
    """Where the base64 begins."""
    head = _head.match(url)
    if head is None:
        raise NoImage("A data URL of an image begins with data:image/...;base64,")
    kind = head["kind"].lower()
    if _alias.get(kind, kind) not in (known for _, known in _SIGNATURES):
        raise NoImage("Its type is not image/png, image/jpeg, image/webp or image/gif.")
    return head.end()


def _decoded(piece: str) -> bytes:
    try:
        return a2b_base64(piece, strict_mode=True)
    except ValueError:
        raise NoImage("It is not valid base64.") from None
