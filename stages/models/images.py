"""Media types of images, and the data URLs that carry them."""

from __future__ import annotations

import base64
import re
from binascii import a2b_base64

from penstock.pipeline.protocol.params.json_body import shortened

MOST_IMAGE_BYTES = 20 << 20
"""Limit on the size of an encoded image, in bytes."""

_PIECE_BYTES = 1 << 16  # a multiple of four characters, so that each piece of base64 can be decoded alone
_SIGNATURES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
)
_head = re.compile(r"data:(?P<kind>[^;,]{0,80})(?:;[^;,]{0,80}){0,4}?;base64,", re.IGNORECASE)
_alias = {"image/jpg": "image/jpeg"}


class NoImage(Exception):
    """The input is not a readable image; the message is written for the client."""


def kind_of(start: bytes) -> str:
    """Return the media type of an image from its first bytes; raises `NoImage` for an unknown one."""
    for signature, kind in _SIGNATURES:
        if signature.match(start):
            return kind
    raise NoImage("It is not a PNG, JPEG, WebP or GIF.")


def as_data_url(image: bytes) -> str:
    """Return an image as a data URL; raises `NoImage` for an unknown media type."""
    return f"data:{kind_of(image)};base64,{base64.b64encode(image).decode()}"


def is_data_url(url: str) -> bool:
    """True if ``url`` has the ``data:`` scheme."""
    return url[:5].lower() == "data:"


def check_url(url: str) -> None:
    """Check the URL of an image, of which that on the web is not fetched; raises `NoImage`."""
    if is_data_url(url):
        check_data_url(url)
    elif not url.lower().startswith(("http://", "https://")):
        raise NoImage(f"An image_url begins with https://, http:// or data:, and {shortened(url)!r} does not.")


def check_data_url(url: str) -> None:
    """Check that a data URL holds an image of an accepted type and size; raises `NoImage`.

    It is decoded in pieces, because decoding holds the GIL.
    """
    payload = _payload_at(url)
    if (len(url) - payload) // 4 * 3 > MOST_IMAGE_BYTES:
        raise NoImage(f"It is larger than {MOST_IMAGE_BYTES >> 20} MiB.")
    last = max(payload, len(url) - 4)  # only the last four characters may hold padding
    for start in range(payload, last, _PIECE_BYTES):
        piece = url[start : min(start + _PIECE_BYTES, last)]
        if "=" in piece:
            raise NoImage("It is not valid base64.")
        decoded = _decoded(piece)
        if start == payload:
            kind_of(decoded)
    _decoded(url[last:])
    if last == payload:
        raise NoImage("It is empty.")


def image_in(data_url: str) -> bytes:
    """Decode the image of a data URL that `check_data_url` has accepted."""
    return a2b_base64(data_url[_payload_at(data_url) :])


def _payload_at(url: str) -> int:
    """Return the position of the base64 data; raises `NoImage` for an unknown header or type."""
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
