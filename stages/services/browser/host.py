"""The host of the ``browser`` tool: the resources that its sessions share."""

from __future__ import annotations

from penstock.pipeline.frames import ResolvedRequest
from penstock.stages.services.browser.fetch import Fetcher
from penstock.stages.services.browser.page_stack import PageStack
from penstock.stages.services.browser.reading import Reader
from penstock.stages.services.browser.search_engines import SearchBackend
from penstock.stages.services.browser.session import BrowserSession
from penstock.stages.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks


class BrowserHost:
    """Searches with ``backend``, and opens pages at public and ``allowed`` addresses."""

    def __init__(self, backend: SearchBackend, allowed: AllowedNetworks = NOTHING_ALLOWED) -> None:
        self._backend = backend
        self._reader = Reader(Fetcher(allowed))

    def session(self, conversation: ResolvedRequest) -> BrowserSession:
        """Return a session whose cursors include the pages that the model still has in its context."""
        return BrowserSession(self._backend, self._reader, PageStack(conversation))

    async def close(self) -> None:
        """Close all connections."""
        await self._reader.close()
        await self._backend.close()
