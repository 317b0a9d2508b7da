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

from PIL import Image

from penstock.pipeline.errors import ImagesRefused
from penstock.services.slots import Slots
from penstock.stages.models.images import image_in

Pixels = TypeVar("Pixels")

LARGEST_BYTES = 512_000_000
"""The most bytes that decoding an image may take, whose file may hold a pixel in less than a bit."""

MOST_AT_ONCE = 2
"""Prompts whose images are decoded at once."""

MOST_PIXELS = 128_000_000
"""The most pixels of all images of a prompt.  A decoded pixel takes four bytes."""

MOST_PASSES = 20
"""The most passes over `MOST_PIXELS`: a progressive JPEG may have any number of scans, each a pass over its image."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PIXEL_BYTES = {"1": 8, "L": 8, "P": 8, "I;16": 8, "RGB": 8, "RGBA": 12, "CMYK": 12}
_MOST_PIXEL_BYTES = 16
"""Bytes that decoding takes for a pixel; the most for WebP, for other modes, and if a color is transparent."""
_START_OF_SCAN = b"\xff\xda"


class _TooMuch(Exception):
    """An image takes too much memory or time; the message is written for the client."""


async def decoded(urls: Sequence[str], decode: Callable[[bytes], Pixels], owner: str = "") -> list[Pixels]:
    """Decode the images in data URLs with ``decode``, for at most `MOST_AT_ONCE` prompts, in threads of its own.

    One owner may have half of the threads.  Raises `ImagesRefused` for unreadable images, and for images that would
    take too much memory or time.
    """
    await places.acquire(owner)
    decoding = asyncio.get_running_loop().run_in_executor(_threads, _decoded, urls, decode)
    decoding.add_done_callback(lambda _: places.release(owner))
    return await asyncio.shield(decoding)  # a client that leaves does not end the thread, which keeps its place


places = Slots(MOST_AT_ONCE, per_owner=MOST_AT_ONCE // 2)
_threads = ThreadPoolExecutor(MOST_AT_ONCE, "images")
"""Other threads must stay free for requests without images."""


def _decoded(urls: Sequence[str], decode: Callable[[bytes], Pixels]) -> list[Pixels]:
    images, budget, problems = list[Pixels](), _Budget(), dict[int, str]()
    for number, url in enumerate(urls, start=1):
        try:
            image = image_in(url)
            budget.spend(image)
            images.append(decode(image))
        except _TooMuch as error:
            problems[number] = f"is too large: {error}"
        except Exception:  # noqa: BLE001 - each image format raises errors of its own
            problems[number] = "cannot be read: its content is malformed."
    if problems:
        first, problem = next(iter(problems.items()))
        raise ImagesRefused(f"Image {first} {problem}", {urls[at - 1]: f"It {each}" for at, each in problems.items()})
    return images


@dataclass
class _Budget:
    """The pixels that the images of one prompt may still have, and the time that decoding them may still take."""

    pixels: int = field(default_factory=lambda: MOST_PIXELS)
    passed: int = field(default_factory=lambda: MOST_PIXELS * MOST_PASSES)
    """Pixels to pass over."""

    def spend(self, image: bytes) -> None:
        """Take the need of an image, as far as the file's headers reveal it; raise `_TooMuch` if that is not left."""
        need = _need(image)
        self.pixels -= need.pixels
        self.passed -= need.pixels * need.scans
        if need.bytes > LARGEST_BYTES:
            raise _TooMuch(
                f"decoding an image may take {LARGEST_BYTES:,} bytes, and this one of {need.pixels:,} pixels takes "
                f"{need.bytes:,}."
            )
        if self.pixels < 0:
            raise _TooMuch(f"all images together may have {MOST_PIXELS:,} pixels.")
        if self.passed < 0:
            raise _TooMuch(f"its {need.scans} scans take too long.")


@dataclass(frozen=True)
class _Need:
    """The cost of decoding an image: ``bytes`` of memory at its peak, and passes over its pixels."""

    pixels: int
    bytes: int
    scans: int = 1


def _need(image: bytes) -> _Need:
    if image[12:16] == b"VP8X":  # Pillow decodes the first frame of an animation to open it
        pixels = (int.from_bytes(image[24:27], "little") + 1) * (int.from_bytes(image[27:30], "little") + 1)
        return _Need(pixels, pixels * _MOST_PIXEL_BYTES)
    with Image.open(BytesIO(image), formats=_FORMATS) as file:
        pixels = file.width * file.height
        scans = image.count(_START_OF_SCAN) if file.format in ("JPEG", "MPO") else 1
        return _Need(pixels, pixels * _pixel_bytes(file), scans)


def _pixel_bytes(file: Image.Image) -> int:
    """Return the bytes that decoding takes for a pixel, the copies that vLLM makes in RGB included."""
    if file.format == "WEBP" or "transparency" in file.info:
        return _MOST_PIXEL_BYTES
    return _PIXEL_BYTES.get(file.mode, _MOST_PIXEL_BYTES)
