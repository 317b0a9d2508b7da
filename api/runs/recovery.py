"""Settling: what a dead server left is ended, or taken over, so that no reader waits for ever."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.api.runs.background import Background
from penstock.pipeline.errors import RunInterrupted, StoreFailed
from penstock.stages.services.runs.event_log import Block
from penstock.stages.services.runs.live import LiveResponse, LiveResponses
from penstock.stages.services.store.store import Orphan, Store, StoredResponse

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
    _found: deque[Orphan] = field(default_factory=deque)
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
        """Take over what is left.

        It is remembered, as no server would find it again; so is what may have been taken over when the store failed.
        """
        if not self._found:
            self._found.extend(await self.store.orphans())
        while self._found:
            if await self.store.claim(self._found[0]):
                self._claimed.append(self._found[0])
            self._found.popleft()

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
            self._adopted(orphan.stored, blocks).break_off(RunInterrupted())

    def _adopted(self, stored: StoredResponse, blocks: Sequence[Block]) -> LiveResponse:
        """The run, with its events; one whose events nobody can read must not keep the others from their end."""
        try:
            return self.live.adopt(stored, blocks)
        except Exception:
            logger.exception("The events of response %s cannot be read, and it ends without them", stored.response.id)
            return self.live.adopt(stored, ())

    def _run_again(self, orphan: Orphan) -> None:
        logger.info("Response %s is queued here, as its server ended", orphan.stored.response.id)
        self.background.add(self.live.queue(orphan.stored))
