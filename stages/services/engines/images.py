"""Images for an engine: data URLs become pixels.

Whoever imports this needs Pillow, which vLLM brings.
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
"""In all images of a prompt: each is three bytes once it is read."""


def decoded(urls: Sequence[str], decode: Callable[[bytes], Pixels]) -> list[Pixels]:
    """The images that data URLs hold, by way of ``decode``; takes time, and raises `InvalidPrompt`."""
    images, pixels = list[Pixels](), 0
    for number, url in enumerate(urls, start=1):
        try:
            image = image_in(url)
            pixels += _pixels(image)
            if pixels <= MOST_PIXELS:
                images.append(decode(image))
        except Exception as error:  # each format fails in ways of its own
            raise InvalidPrompt(f"Image {number} cannot be read: {shortened(str(error))}", param="input") from error
        if pixels > MOST_PIXELS:
            message = f"There are more than {MOST_PIXELS:,} pixels in the images up to number {number}."
            raise InvalidPrompt(message, param="input")
    return images


def _pixels(image: bytes) -> int:
    """How many an image says that it has, without reading them."""
    with Image.open(BytesIO(image)) as opened:
        return opened.width * opened.height
