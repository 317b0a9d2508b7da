"""Recovery: the responses of a dead server are ended or taken over, so that no client waits for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from penstock.api.runs.background import BackgroundQueue
from penstock.pipeline import metrics
from penstock.pipeline.errors import ModelGone, RunInterrupted, StoreFailed
from penstock.pipeline.logs import counted, duration
from penstock.services.model_names import in_words
from penstock.services.runs.event_log import Block
from penstock.services.runs.run import Run, RunRegistry
from penstock.services.store.rows import model_column
from penstock.services.store.store import Orphan, Server, Store, StoredResponse

logger = logging.getLogger(__name__)

UNSERVED_AFTER = 3600.0
"""Seconds after which a background response fails that waits for a server of its model."""


UNSERVED = "unserved"
"""The model in the metrics of a response whose model is not served: its name may be a text of the client."""

Served: TypeAlias = Callable[[str], str | None]
"""A function that returns the served name of the model that a request names, or None if it is not served."""


def _itself(name: str) -> str:
    return name


@dataclass
class OrphanRecovery:
    """Recovers orphans: the responses that have not ended and have no living server.

    Queued ones are queued here.  Running ones end as ``failed`` after the events that they had; with ``restarts``,
    background responses start over instead.

    A response is queued only at a server for which its model is ``served``.  At the others it waits in the store, and
    fails after ``unserved_after`` seconds in which no server has taken the responses of this model.
    """

    store: Store
    runs: RunRegistry
    background: BackgroundQueue
    restarts: bool
    served: Served = _itself
    unserved_after: float = UNSERVED_AFTER
    _found: deque[Orphan] = field(default_factory=deque)
    _claimed: deque[Orphan] = field(default_factory=deque)
    _unserved: dict[str, float] = field(default_factory=dict)
    """The models of orphans that wait for another server, and the monotonic time at which that was first seen."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def recover(self) -> None:
        """Recover all orphans, and delete dead servers' uploads; if the store fails, leave the rest to the next call.

        A stopping server recovers nothing, because it has just released its own responses to the others.
        """
        if self.background.in_flight.stopping:
            return
        async with self._lock:
            try:
                await self.store.recover_parts()
                await self._claim()
                while self._claimed:
                    await self._recover(self._claimed[0])
                    self._claimed.popleft()
            except StoreFailed as error:  # the outage has a line of its own
                logger.info("The responses of dead servers cannot be recovered yet: %s", error)

    def waits(self, stored: StoredResponse) -> bool:
        """Return True if a response without a living server waits for one that serves its model."""
        return self._is_to_run(stored) and self.served(_model(stored)) is None

    async def taken(self, stored: StoredResponse, server: Server | None) -> Run | None:
        """Take over a response that waits for a server of its model, to end it here; None if it does not wait.

        ``server`` is the dead one that had it, if there was one.
        """
        if not self.waits(stored):
            return None
        orphan = Orphan(stored, server.id if server else None, stored.response.background)
        async with self._lock:
            if run := self.runs.get(stored.response.id, stored.origin.owner):  # another request had the lock before
                return run
            return await self._adopted(stored) if await self.store.claim(orphan) else None

    def _is_to_run(self, stored: StoredResponse) -> bool:
        return stored.response.status == "queued" or (stored.response.background and self.restarts)

    async def _claim(self) -> None:
        """Claim the orphans in the store for this server.

        A claimed orphan is remembered until it is recovered, because no server would find it in the store again.  So is
        one whose claim failed: the store may have committed the claim before the connection broke.
        """
        if not self._found:
            waiting = self._note_unserved(await self.store.orphaned_models(restarts=self.restarts))
            self._found.extend(await self.store.orphans(waiting, restarts=self.restarts))
        while self._found:
            if self._must_wait(orphan := self._found[0]):
                await self.store.name_model(orphan.stored.response)
            elif await self.store.claim(orphan):
                self._claimed.append(orphan)
            self._found.popleft()

    def _note_unserved(self, orphans: Mapping[str, int]) -> Sequence[str]:
        """Note since when the models of orphans are not served; return those for which the orphans are to wait."""
        number = {model: count for model, count in orphans.items() if model and self.served(model) is None}
        if fresh := number.keys() - self._unserved.keys():
            waiting = counted(sum(number[model] for model in fresh), "background response")
            text = "%s in the store must wait for a server of %s: this one does not serve it. Those left fail in %s"
            logger.warning(text, waiting, in_words(sorted(fresh)), duration(self.unserved_after))
        now = time.monotonic()
        self._unserved = {model: self._unserved.get(model, now) for model in number}
        metrics.RESPONSES_UNSERVED.set(sum(number.values()))
        return [model for model in number if not self._is_given_up(model)]

    def _is_given_up(self, model: str) -> bool:
        since = self._unserved.get(model)
        return since is not None and time.monotonic() - since >= self.unserved_after

    def _must_wait(self, orphan: Orphan) -> bool:
        return self.waits(orphan.stored) and not self._is_given_up(_model(orphan.stored))

    async def _recover(self, orphan: Orphan) -> None:
        response = orphan.stored.response
        if self.waits(orphan.stored):
            model = in_words([response.model])
            logger.warning("Response %s fails: no server has come that serves %s", response.id, model)
            (await self._adopted(orphan.stored)).fail(ModelGone(model, duration(self.unserved_after)))
        elif response.status == "queued":
            self._run_again(orphan)
        elif orphan.is_background and self.restarts:
            await self.store.restart(response.id)
            self._run_again(orphan)
        else:
            logger.warning("Response %s was running when its server ended", response.id)
            (await self._adopted(orphan.stored)).fail(RunInterrupted())

    def _queued(self, stored: StoredResponse) -> Run:
        model = self.served(_model(stored)) or UNSERVED
        return self.runs.queue(replace(stored, origin=replace(stored.origin, model=model)))

    async def _adopted(self, stored: StoredResponse) -> Run:
        """Adopt an orphan with its events, or without them if they are unreadable: it must not block the others."""
        if stored.response.status == "queued":
            return self._queued(stored)
        blocks: Iterable[Block] = await self.store.blocks(stored.response.id)
        try:
            return self.runs.adopt(stored, blocks)
        except Exception:
            logger.exception("The events of response %s cannot be read, and it ends without them", stored.response.id)
            return self.runs.adopt(stored, ())

    def _run_again(self, orphan: Orphan) -> None:
        logger.info("Response %s is queued here, as its server ended", orphan.stored.response.id)
        self.background.add(self._queued(orphan.stored))


def _model(stored: StoredResponse) -> str:
    """Return the model of a response as the store has it in a column."""
    return model_column(stored.response.model)
