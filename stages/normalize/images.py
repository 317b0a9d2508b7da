"""Images of a request: check each one, and limit their number."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import InputImage, Item, images_of
from penstock.pipeline.protocol.params.items import ImagePart
from penstock.pipeline.protocol.params.json_body import Pace, shortened
from penstock.stages.models.images import NoImage, check_data_url, is_data_url

MOST_IMAGES = 500
"""The most images in one conversation."""


async def read_image(part: ImagePart, path: str, pace: Pace) -> InputImage:
    """Return the image of a part at ``path``; raises `InvalidRequest` if there is none that this server can read."""
    if part.file_id is not None:
        raise InvalidRequest("This server keeps no files: give the image_url.", param=f"{path}.file_id")
    url, param = part.image_url, f"{path}.image_url"
    if url is None:
        raise InvalidRequest(f"An image has an image_url (at {param})", param=param)
    if is_data_url(url):
        try:
            await check_data_url(url, pace)
        except NoImage as error:
            raise InvalidRequest(f"This is not an image that can be read. {error}", param=param) from error
    elif not url.lower().startswith(("http://", "https://")):
        message = f"An image_url begins with https://, http:// or data:, not as {shortened(url)!r} does."
        raise InvalidRequest(message, param=param)
    return InputImage(url, part.detail or "auto")


async def check_images(history: Iterable[Item], items: Iterable[Item], pace: Pace) -> None:
    """Raise `InvalidRequest` if a conversation has more than `MOST_IMAGES` images."""
    count = 0
    for item in (*history, *items):
        await pace()
        count += len(images_of(item))
    if count > MOST_IMAGES:
        raise InvalidRequest(f"A conversation has {MOST_IMAGES} images at most, and this one {count}.", param="input")
