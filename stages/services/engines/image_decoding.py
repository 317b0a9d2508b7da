"""Decode data URLs to images for an engine.

Importing this module needs Pillow, which is installed along with vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from typing import TypeVar

from PIL import Image, UnidentifiedImageError

from penstock.pipeline.errors import InvalidPrompt
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.stages.models.images import image_in

Pixels = TypeVar("Pixels")

LARGEST = 64_000_000
"""The most pixels of an image.  Decoding takes up to eleven bytes a pixel, for one that its file may hold in a bit."""

MOST_PIXELS = 128_000_000
"""The most pixels of all images of a prompt.  A decoded pixel takes three bytes."""

MOST_PASSES = 20
"""The most passes over `MOST_PIXELS`: a progressive JPEG may have any number of scans, each a pass over its image."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_START_OF_SCAN = b"\xff\xda"


class _TooMuch(Exception):
    """An image takes too much memory or time; the message is written for the client."""


async def decoded(urls: Sequence[str], decode: Callable[[bytes], Pixels]) -> list[Pixels]:
    """Decode the images in data URLs with ``decode``, for at most two prompts at once, in threads of its own.

    Raises `InvalidPrompt` for an unreadable image, and for images that would take too much memory or time.
    """
    return await asyncio.get_running_loop().run_in_executor(_threads, _decoded, urls, decode)


_threads = ThreadPoolExecutor(2, "images")
"""Other threads must stay free for requests without images."""


def _decoded(urls: Sequence[str], decode: Callable[[bytes], Pixels]) -> list[Pixels]:
    images, budget = list[Pixels](), _Budget()
    for number, url in enumerate(urls, start=1):
        try:
            image = image_in(url)
            budget.spend(image)
            images.append(decode(image))
        except _TooMuch as error:
            raise InvalidPrompt(f"Image {number} is too large: {error}", param="input") from error
        except UnidentifiedImageError as error:
            raise InvalidPrompt(f"Image {number} cannot be read: its content is malformed.", param="input") from error
        except Exception as error:  # each image format raises errors of its own
            raise InvalidPrompt(f"Image {number} cannot be read: {shortened(str(error))}", param="input") from error
    return images


@dataclass
class _Budget:
    """The pixels that the images of one prompt may still have, and the time that decoding them may still take."""

    pixels: int = field(default_factory=lambda: MOST_PIXELS)
    passed: int = field(default_factory=lambda: MOST_PIXELS * MOST_PASSES)
    """Pixels to pass over."""

    def spend(self, image: bytes) -> None:
        """Take the need of an image, as far as the file's headers reveal it; raise `_TooMuch` if that is not left."""
        with Image.open(BytesIO(image), formats=_FORMATS) as file:
            pixels = file.width * file.height
            scans = image.count(_START_OF_SCAN) if file.format in ("JPEG", "MPO") else 1
        self.pixels -= pixels
        self.passed -= pixels * scans
        if pixels > LARGEST:
            raise _TooMuch(f"an image may have {LARGEST:,} pixels, and this one has {pixels:,}.")
        if self.pixels < 0:
            raise _TooMuch(f"all images together may have {MOST_PIXELS:,} pixels.")
        if self.passed < 0:
            raise _TooMuch(f"its {scans} scans take too long.")
