"""Conversations for models that see no images."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.items import images_of
from penstock.pipeline.protocol.readings import TEXT_ONLY


def without_images(request: ResolvedRequest) -> ResolvedRequest:
    """Return the request with a sentence in the place of each image, which another model may have seen."""
    urls = [image.url for item in request.items for image in images_of(item)]
    return replace(request, said=(), unseen=dict.fromkeys(urls, TEXT_ONLY)) if urls else request
