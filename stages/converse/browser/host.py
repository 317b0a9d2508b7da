"""The host of the ``browser`` tool: what its sessions share."""

from __future__ import annotations

from pipeline.frames import Conversation
from stages.converse.browser.backends import SearchBackend
from stages.converse.browser.fetch import Fetcher
from stages.converse.browser.reading import Reader
from stages.converse.browser.session import BrowserSession
from stages.converse.browser.visits import Visits
from stages.guard import NOTHING_ALLOWED, AllowedNetworks


class BrowserHost:
    """Searches with ``backend``, and opens pages at public addresses and at those that are ``allowed``."""

    def __init__(self, backend: SearchBackend, allowed: AllowedNetworks = NOTHING_ALLOWED) -> None:
        self._backend = backend
        self._reader = Reader(Fetcher(allowed))

    def session(self, conversation: Conversation) -> BrowserSession:
        """A browser that has seen what the model still sees."""
        return BrowserSession(self._backend, self._reader, Visits(conversation))

    async def close(self) -> None:
        """Close all connections."""
        await self._reader.close()
        await self._backend.close()
