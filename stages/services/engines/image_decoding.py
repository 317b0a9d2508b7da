"""Decode data URLs to images for an engine.

Importing this module needs Pillow, which is installed along with vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import TypeVar

from PIL import Image

from penstock.pipeline.errors import InvalidPrompt
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.stages.models.images import image_in

Pixels = TypeVar("Pixels")

MOST_PIXELS = 256_000_000
"""Maximum number of pixels in all images of a prompt.  A decoded pixel takes three bytes."""


def decoded(urls: Sequence[str], decode: Callable[[bytes], Pixels]) -> list[Pixels]:
    """Decode the images in data URLs with ``decode``.

    This is slow, so run it in a thread.  Raises `InvalidPrompt` for an unreadable image, or more than `MOST_PIXELS`.
    """
    images, pixels = list[Pixels](), 0
    for number, url in enumerate(urls, start=1):
        try:
            image = image_in(url)
            pixels += _pixels(image)
            if pixels <= MOST_PIXELS:
                images.append(decode(image))
        except Exception as error:  # each image format raises errors of its own
            raise InvalidPrompt(f"Image {number} cannot be read: {shortened(str(error))}", param="input") from error
        if pixels > MOST_PIXELS:
            message = f"There are more than {MOST_PIXELS:,} pixels in the images up to number {number}."
            raise InvalidPrompt(message, param="input")
    return images


def _pixels(image: bytes) -> int:
    """Read the number of pixels from the image's header, without decoding them."""
    with Image.open(BytesIO(image)) as file:
        return file.width * file.height
