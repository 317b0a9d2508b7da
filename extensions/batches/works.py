"""Works: what servers do with whole batches: validate their input, close lines that may not begin, and end them.

Each work is claimed in the store, or may be done by several servers at once, and another server goes on with it if this
one dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.extensions.batches.batch import BatchError, Kind, Status, StoredBatch
from penstock.extensions.batches.errors import GivenUp
from penstock.extensions.batches.shelving import OutputLine, Shelving
from penstock.extensions.batches.stored_batches import OpenBatch, StoredBatches, Totals
from penstock.extensions.batches.tables import COUNTS
from penstock.pipeline.errors import StageError, StoreFailed
from penstock.pipeline.logs import current_response
from penstock.pipeline.tasks import cancelled
from penstock.services.slots import Slots
from penstock.services.store.store import Store

logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Batches that a server validates, or ends, at once."""

Validate: TypeAlias = Callable[[StoredBatch], Awaitable[None]]
"""Reads the input of a batch in validation: adds its lines, and lets it begin, or fail.

It may be called for one batch on several servers, one after the other; each reads the input from the start.
"""


@dataclass(eq=False)
class Works:
    """The works of this server on batches of a store.  ``done`` is called after each."""

    store: Store
    validate: Validate
    output_line: OutputLine
    done: Callable[[], None]
    creating: set[str] = field(default_factory=set)
    """The batches of Anthropic's API whose lines a request adds here."""
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The works by the ids of their batches."""

    def __post_init__(self) -> None:
        self._stored = self.store.part(StoredBatches)
        self._shelving = Shelving(self.store, self.output_line)
        self.places = Slots(AT_ONCE)

    def begin(self, each: OpenBatch) -> None:
        """Begin what is to be done with a batch, unless this server is at it."""
        work = self._work(each)
        if work is not None and each.batch.id not in self._tasks:
            self._tasks[each.batch.id] = task = asyncio.create_task(self._run(each.batch, work))
            task.add_done_callback(lambda _: self._tasks.pop(each.batch.id))

    async def stop(self) -> None:
        """End all works in the middle."""
        await cancelled(self._tasks.values())

    def _work(self, each: OpenBatch) -> Callable[[StoredBatch], Awaitable[None]] | None:
        batch, is_elsewhere = each.batch, each.server_id not in (None, self._stored.context.server_id)
        if batch.status == "validating":
            if is_elsewhere or batch.id in self.creating:
                return None
            return self._validate if batch.api == "openai" else self.give_up
        if batch.in_progress_at is None:
            return self._end
        if each.waits and early_end(batch):
            return self._close
        return None if is_elsewhere or each.has_open else self._end

    async def _run(self, batch: StoredBatch, work: Callable[[StoredBatch], Awaitable[None]]) -> None:
        current_response.set(batch.id)
        try:
            async with self.places.slot(batch.owner):
                await work(batch)
        except GivenUp:
            logger.info("Batch %s is another server's now, or was cancelled", batch.id)
            return
        except (StoreFailed, StageError) as error:
            logger.info("The work on batch %s has to wait: %s", batch.id, error)
            return
        except Exception:
            logger.exception("A bug in the work on batch %s", batch.id)
            return
        self.done()

    async def _validate(self, batch: StoredBatch) -> None:
        if not await self._stored.claim_validation(batch.id):
            return
        if whole := await self._stored.get(batch.id, batch.owner):
            try:
                await self.validate(whole)
            except (GivenUp, StageError):
                raise
            except Exception:  # another attempt would end as this one
                logger.exception("Batch %s could not be validated", batch.id)
                await self._stored.fail(batch.id, [BatchError("server_error", "Internal error.")])

    async def give_up(self, batch: StoredBatch) -> None:
        """Delete a batch of Anthropic's API that could not be created: its client knows nothing of it."""
        if await self._stored.claim_validation(batch.id):
            await self._stored.give_up(batch.id)

    async def _close(self, batch: StoredBatch) -> None:
        kind = early_end(batch)
        while kind and await self._stored.close_lines(batch.id, kind):
            pass

    async def _end(self, batch: StoredBatch) -> None:
        if not await self._stored.claim_end(batch.id):
            return
        whole = await self._stored.get(batch.id, batch.owner)
        assert whole is not None
        totals = NONE if whole.in_progress_at is None else await self._stored.totals(batch.id)
        made = await self._shelving.shelve(whole, totals) if batch.api == "openai" else {}
        status = _status(whole)
        if await self._stored.end(batch.id, status, totals):
            results = ", ".join(f"{count} {name}" for name, count in zip(COUNTS, totals.counts, strict=True) if count)
            logger.info("Batch %s is %s: %s", batch.id, status, results or "it has no lines")
            await self._stored.drop_lines(batch.id)
        else:
            await self._shelving.withdraw(whole, made)


NONE = Totals((0, 0, 0, 0), (0, 0, 0, 0), 0)


def early_end(batch: StoredBatch) -> Kind | None:
    """Return the kind of result of the lines that may not begin any more; None if they may."""
    if batch.cancelling_at is not None:
        return "cancelled"
    return "expired" if batch.expires_at <= time.time() else None


def _status(batch: StoredBatch) -> Status:
    if batch.cancelling_at is not None:
        return "cancelled"
    return "expired" if batch.expired else "completed"
