"""Images of a conversation, fetched: what an engine gets is the image itself, as a data URL."""

from __future__ import annotations

from stages.guard import NOTHING_ALLOWED, AllowedNetworks


class Images:
    """Fetches images from the web, under the rule of which addresses may be connected to."""

    def __init__(self, allowed: AllowedNetworks = NOTHING_ALLOWED) -> None:
        self._allowed = allowed

    async def resolve(self, url: str) -> str:
        """The image at a URL as a data URL, which a data URL is already; raises `InvalidRequest`."""
        return url
