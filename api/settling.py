"""Settling: what a dead server left is ended, or taken over, so that no reader waits for ever."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

from api.background import Background
from pipeline.errors import RunInterrupted, StoreFailed
from stages.persist.live import LiveResponses
from stages.persist.store import Orphan, Store

logger = logging.getLogger(__name__)


@dataclass
class Settling:
    """Settles the responses that nobody runs.

    Queued ones are queued here.  Those that were being made end as `failed` behind the events that they had; with
    ``restarts`` those of the background are made again.
    """

    store: Store
    live: LiveResponses
    background: Background
    restarts: bool
    _claimed: deque[Orphan] = field(default_factory=deque)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def settle(self) -> None:
        """Settle what no other server is at; where the store fails, the rest is left for the next time.

        A server that is stopping takes nothing on, least of all what it has just left to the others.
        """
        if self.background.admission.stopping:
            return
        async with self._lock:
            try:
                await self._claim()
                while self._claimed:
                    await self._settle(self._claimed[0])
                    self._claimed.popleft()
            except StoreFailed:
                logger.exception("What dead servers left could not be settled yet")

    async def _claim(self) -> None:
        """Take over what is left; it is remembered, as no server would find it again."""
        for orphan in await self.store.orphans():
            if await self.store.claim(orphan):
                self._claimed.append(orphan)

    async def _settle(self, orphan: Orphan) -> None:
        response = orphan.stored.response
        if response.status == "queued":
            self._run_again(orphan)
        elif orphan.is_background and self.restarts:
            await self.store.restart(response.id)
            self._run_again(orphan)
        else:
            logger.warning("Response %s was being made when its server ended", response.id)
            blocks = await self.store.blocks(response.id)
            self.live.adopt(orphan.stored, blocks).break_off(RunInterrupted())

    def _run_again(self, orphan: Orphan) -> None:
        logger.info("Response %s is queued here, as its server ended", orphan.stored.response.id)
        self.background.add(self.live.queue(orphan.stored))
