"""Fetching the images of a conversation: the engine gets each image itself, as a data URL.

Fetched images are cached for five minutes, so the turns of a conversation do not fetch the same image again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.urls import shown_url
from penstock.services.foreign import Unreadable, read_whole
from penstock.services.lru_cache import LruCache
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks
from penstock.stages.models.images import MOST_IMAGE_BYTES, NoImage, as_data_url, is_data_url

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from aiohttp.abc import AbstractResolver

LARGEST_SUM = 128 << 20
"""Limit on all data URLs of a prompt together, in characters: almost five images of the largest size."""

_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; penstock)", "Accept": "image/png,image/jpeg,image/webp,image/gif"}
_AT_ONCE = 8
"""Concurrent fetches per conversation, so that slow servers in one conversation do not delay another."""
_KEPT_CHARACTERS = 64 << 20
_KEPT_SECONDS = 300.0
_TOO_LARGE = NoImage("The images of this conversation are too large together.")


class ImageCache:
    """Fetches images from public addresses and addresses that the operator allows, and caches them."""

    def __init__(
        self,
        allowed: AllowedNetworks = NOTHING_ALLOWED,
        resolver: AbstractResolver | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._allowed = allowed
        self._resolver = resolver
        self._clock = clock
        self._kept: LruCache[tuple[float, str]] = LruCache(_KEPT_CHARACTERS)
        """The time of the fetch and the data URL, by URL."""

    async def resolve_all(self, urls: Sequence[str], optional: Collection[str] = ()) -> tuple[str | NoImage, ...]:
        """Return the images at ``urls`` as data URLs, fetching each URL once.

        Raises `InvalidRequest` if an image cannot be fetched, or if all together are larger than `LARGEST_SUM`; of the
        ``optional`` ones, the reason is returned instead.
        """
        at_once = asyncio.Semaphore(_AT_ONCE)
        size, is_full = 0, False

        async def resolved(url: str, times: int) -> str | NoImage:
            nonlocal size, is_full
            async with at_once:
                image = _TOO_LARGE if is_full else await self._image(url)
            if isinstance(image, str) and size + len(image) * times > LARGEST_SUM:  # before the others take memory too
                image, is_full = _TOO_LARGE, True
            if isinstance(image, str):
                size += len(image) * times
            elif url not in optional:
                raise InvalidRequest(str(image), param="input")
            return image

        tasks = {url: asyncio.create_task(resolved(url, times)) for url, times in Counter(urls).items()}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        return tuple(tasks[url].result() for url in urls)

    async def _image(self, url: str) -> str | NoImage:
        try:
            return await self.resolve(url)
        except NoImage as error:
            return error

    async def resolve(self, url: str) -> str:
        """Return the image at ``url`` as a data URL; a data URL is returned as it is.  Raises `NoImage`."""
        if is_data_url(url):
            return url
        if (cached := self._cached(url)) is not None:
            return cached
        try:
            image = await self._fetch(url)
        except NoImage as error:
            message = f"The image at {shortened(shown_url(url, with_path=True))} could not be fetched. {error}"
            raise NoImage(message) from error
        self._kept.put(url, (self._clock(), image), len(image))
        return image

    async def _fetch(self, url: str) -> str:
        from penstock.services.web import fetch  # noqa: PLC0415 - a replay, which fetches nothing, starts sooner

        async def read(answer: ClientResponse) -> str:
            try:
                image = await read_whole(answer.content.iter_any(), MOST_IMAGE_BYTES)
            except Unreadable:
                raise NoImage(f"It is larger than {MOST_IMAGE_BYTES >> 20} MiB.") from None
            return await asyncio.to_thread(as_data_url, image)

        fetcher = fetch.Fetcher(_HEADERS, self._allowed, self._resolver)
        try:
            return await fetcher.fetch(url, read)
        except fetch.NotFetched as error:
            raise NoImage(named_error(error)) from error
        finally:
            await fetcher.close()

    def _cached(self, url: str) -> str | None:
        fetched_at, image = self._kept.get(url) or (-inf, None)
        if fetched_at + _KEPT_SECONDS < self._clock():
            self._kept.drop(url)
            return None
        return image
