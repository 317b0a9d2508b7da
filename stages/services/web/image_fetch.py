"""Fetching an image from the web.

This module is imported on first use, because an HTTP client takes a quarter of a second to import.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp.abc import AbstractResolver

from penstock.stages.models.images import LARGEST_IMAGE, NoImage, as_data_url
from penstock.stages.services.web.fetch import Fetcher, NotFetched, read_start
from penstock.stages.services.web.ssrf import AllowedNetworks

_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; penstock)", "Accept": "image/png,image/jpeg,image/webp,image/gif"}


async def fetch_image(url: str, allowed: AllowedNetworks, resolver: AbstractResolver | None) -> str:
    """Fetch the image at a URL and return it as a data URL; raises `NoImage`."""
    fetcher = Fetcher(_HEADERS, allowed, resolver)
    try:
        return await fetcher.fetch(url, _read)
    except NotFetched as error:
        raise NoImage(str(error)) from error
    finally:
        await fetcher.close()


async def _read(answer: aiohttp.ClientResponse) -> str:
    image = await read_start(answer.content, LARGEST_IMAGE + 1)
    if len(image) > LARGEST_IMAGE:
        raise NoImage(f"It is larger than {LARGEST_IMAGE >> 20} MiB.")
    return await asyncio.to_thread(as_data_url, image)
