"""Recovery: the responses of a dead server are ended or taken over, so that no client waits for ever."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.api.runs.background import BackgroundQueue
from penstock.pipeline.errors import RunInterrupted, StoreFailed
from penstock.stages.services.runs.event_log import Block
from penstock.stages.services.runs.run import Run, RunRegistry
from penstock.stages.services.store.store import Orphan, Store, StoredResponse

logger = logging.getLogger(__name__)


@dataclass
class OrphanRecovery:
    """Recovers orphans: the responses that have not ended and have no living server.

    Queued ones are queued here.  Running ones end as ``failed`` after the events that they had; with ``restarts``,
    background responses start over instead.
    """

    store: Store
    runs: RunRegistry
    background: BackgroundQueue
    restarts: bool
    _found: deque[Orphan] = field(default_factory=deque)
    _claimed: deque[Orphan] = field(default_factory=deque)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def recover(self) -> None:
        """Recover all orphans, and delete dead servers' uploads; if the store fails, leave the rest to the next call.

        A stopping server recovers nothing, because it has just released its own responses to the others.
        """
        if self.background.in_flight.stopping:
            return
        async with self._lock:
            try:
                await self.store.files.withdraw_abandoned()
                await self._claim()
                while self._claimed:
                    await self._recover(self._claimed[0])
                    self._claimed.popleft()
            except StoreFailed as error:  # the outage has a line of its own
                logger.info("The responses of dead servers cannot be recovered yet: %s", error)

    async def _claim(self) -> None:
        """Claim the orphans in the store for this server.

        A claimed orphan is remembered until it is recovered, because no server would find it in the store again.  So is
        one whose claim failed: the store may have committed the claim before the connection broke.
        """
        if not self._found:
            self._found.extend(await self.store.orphans())
        while self._found:
            if await self.store.claim(self._found[0]):
                self._claimed.append(self._found[0])
            self._found.popleft()

    async def _recover(self, orphan: Orphan) -> None:
        response = orphan.stored.response
        if response.status == "queued":
            self._run_again(orphan)
        elif orphan.is_background and self.restarts:
            await self.store.restart(response.id)
            self._run_again(orphan)
        else:
            logger.warning("Response %s was running when its server ended", response.id)
            blocks = await self.store.blocks(response.id)
            self._adopted(orphan.stored, blocks).fail(RunInterrupted())

    def _adopted(self, stored: StoredResponse, blocks: Sequence[Block]) -> Run:
        """Adopt an orphan with its events, or without them if they are unreadable: it must not block the others."""
        try:
            return self.runs.adopt(stored, blocks)
        except Exception:
            logger.exception("The events of response %s cannot be read, and it ends without them", stored.response.id)
            return self.runs.adopt(stored, ())

    def _run_again(self, orphan: Orphan) -> None:
        logger.info("Response %s is queued here, as its server ended", orphan.stored.response.id)
        self.background.add(self.runs.queue(orphan.stored))
