"""BatchRunner: begins the lines of batches while there is room for them, and the works on batches when they are due.

Each server looks for work in the store, so that none of it belongs to one server: a line, the validation of a batch and
its end are claimed, and go to others if their server dies.  Free places go to the API key with the fewest lines for its
weight, and there to its oldest batch, whose lines run in the order of their prefixes.

A line begins only as long as its owner may go on: those of a key that was revoked or has expired, or whose budget is
used up, wait, and expire with their batch.  Owners that signed in otherwise go on, as their tokens are short-lived.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from penstock.api.http.auth import Keys
from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.batches.batch import StoredBatch
from penstock.extensions.batches.line_runs import Answer, LineRequest, LineRuns
from penstock.extensions.batches.shelving import OutputLine
from penstock.extensions.batches.stored_batches import Candidate, OpenBatch, StoredBatches
from penstock.extensions.batches.works import Validate, Works, early_end
from penstock.pipeline import metrics
from penstock.pipeline.errors import StageError, StoreFailed
from penstock.pipeline.tasks import cancelled
from penstock.services.slots import Slots

__all__ = ["Answer", "BatchRunner", "LineRequest", "OutputLine", "Validate"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Seconds between two looks for work that other servers have left."""

ROOM_SECONDS = 0.1
"""Seconds between two looks for room while lines wait."""

GATHER_SECONDS = 0.02
"""Seconds for which a look waits for more lines to end, so that more of them begin together."""

LAST_SECONDS = 600.0
"""Seconds for which lines may run on after their batch was cancelled or has expired."""

COUNT_SECONDS = 15.0
"""Seconds between two counts of the lines that wait."""


@dataclass(eq=False)
class BatchRunner:
    """The batches of a store, as one server works on them."""

    scheduler: Scheduler
    answer: Answer
    room: Callable[[str | None], int]
    """Tells how many lines may begin now, of a model if it is given by a name that is served."""
    validate: Validate
    output_line: OutputLine
    keys: Keys = field(default_factory=Keys)
    idle_share: Callable[[], float] = lambda: 0.0
    """Gives the share of the idle places of engines that lines have."""
    _found: list[Candidate] = field(default_factory=list)
    """Lines whose claim may have been committed: it is repeated until its outcome is known."""
    _counted_at: float = 0.0

    def __post_init__(self) -> None:
        self._store = self.scheduler.store
        self.stored = self._store.part(StoredBatches)
        self.places = Slots(0, weigh=lambda owner: self.scheduler.admission.of(owner).weight)
        self._woken = asyncio.Event()
        self.lines = LineRuns(self.scheduler, self.answer, self._ended)
        self.works = Works(self._store, self.validate, self.output_line, self.wake)

    def wake(self) -> None:
        """Look for work at once: a batch was created, or is to be cancelled."""
        self._woken.set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Work for the length of the block; at its end, release what has not ended."""
        looking = asyncio.create_task(self._keep_looking())
        try:
            yield
        finally:
            await cancelled([looking])
            await self.works.stop()
            await self.lines.stop()
            with suppress(StoreFailed):  # this server is about to leave the store, and then it is dead to the others
                await self.stored.release_all()

    async def _keep_looking(self) -> None:
        while True:
            waits = False
            try:
                waits = await self._look()
            except StoreFailed as error:  # the outage has a line of its own
                logger.info("Batches have to wait for the store: %s", error)
            except Exception:
                logger.exception("A bug in the work on batches")
            with suppress(TimeoutError):  # work may also come from another server, and room from clients
                async with asyncio.timeout(ROOM_SECONDS if waits else LOOK_SECONDS):
                    await self._woken.wait()
                    await asyncio.sleep(GATHER_SECONDS)
            self._woken.clear()

    async def _look(self) -> bool:
        """Begin what is to be done now; return True if lines wait."""
        if self.scheduler.in_flight.stopping:
            return False
        self._store.check()
        await self._claim()
        batches = await self.stored.look()
        for each in batches:
            self.works.begin(each)
            if (kind := early_end(each.batch)) and _is_late(each.batch):
                self.lines.end_late(each.batch.id, kind)
        waiting = [each.batch for each in batches if each.waits and each.batch.status == "in_progress"]
        may_begin = waiting and self.scheduler.engine.is_alive and not self._store.is_degraded
        if may_begin and (free := self.room(None)) > 0:
            await self._find(await self._by_owner(waiting), free)
            await self._claim()
        await self._measure(batches)
        return bool(waiting)

    async def _by_owner(self, batches: Iterable[StoredBatch]) -> dict[str, list[StoredBatch]]:
        """Return the batches of the owners that may go on, the oldest first."""
        found: dict[str, list[StoredBatch]] = {}
        for batch in batches:
            found.setdefault(batch.owner, []).append(batch)
        return {owner: of_owner for owner, of_owner in found.items() if await self._may_go_on(owner)}

    async def _may_go_on(self, owner: str) -> bool:
        if self.lines.rests(owner):
            return False
        if owner and not self.keys.may_go_on(owner):
            return False
        try:
            await self.scheduler.admission.check_gates(owner)
        except StageError:
            return False
        return True

    # Claiming lines

    async def _find(self, batches: dict[str, list[StoredBatch]], free: int) -> None:
        """Find lines for the free places; each has a place from here on."""
        rooms, found = _Rooms(self), list[Candidate]()
        given = self._shared_out(batches, free)
        try:
            for owner, places in given.items():
                found += await self._candidates(batches[owner], places, rooms)
            self._found = found
        finally:
            used = Counter(each.batch.owner for each in self._found)
            for owner, places in given.items():
                for _ in range(places - used[owner]):
                    self.places.release(owner)

    def _shared_out(self, owners: Iterable[str], free: int) -> dict[str, int]:
        """Give places to owners, and return how many each has got."""
        places, given = self.places, dict.fromkeys(owners, 0)

        def give(owner: str) -> None:
            given[owner] += 1

        places.limit = places.in_use
        for _ in range(free if given else 0):
            for owner in given:
                if not places.waiting_of(owner):
                    places.request(owner, self, partial(give, owner))
            places.limit += 1
            places.grant()
        for owner in given:
            places.withdraw(owner, self)
        return given

    async def _candidates(self, batches: Sequence[StoredBatch], most: int, rooms: _Rooms) -> list[Candidate]:
        """Return up to so many lines that wait, of the batches in turn, of models that have room."""
        found: list[Candidate] = []
        for batch in batches:
            taken = set[int]()
            while len(found) < most:
                full = rooms.full
                for number, model in await self.stored.waiting(batch, most, sorted(full)):
                    if number not in taken and len(found) < most and rooms.take(model):
                        taken.add(number)
                        found.append(Candidate(batch, number))
                if rooms.full == full:
                    break
        return found

    async def _claim(self) -> None:
        """Run the lines that were found and still wait."""
        if not self._found:
            return
        claimed = await self.stored.claim(self._found)
        begun = {(each.line.batch_id, each.line.number) for each in claimed}
        for each in self._found:
            if (each.batch.id, each.number) not in begun:
                self.places.release(each.batch.owner)
        self._found = []
        for line in claimed:
            self.lines.start(line)
        await asyncio.sleep(0)  # they count in the room from their first step on

    def _ended(self, owner: str) -> None:
        self.places.release(owner)
        self.wake()

    # Metrics

    async def _measure(self, batches: Sequence[OpenBatch]) -> None:
        metrics.BATCH_LINES_RUNNING.set(len(self.lines.tasks))
        metrics.BATCH_IDLE_SHARE.set(self.idle_share())
        if time.monotonic() - self._counted_at > COUNT_SECONDS:
            self._counted_at = time.monotonic()
            waits = any(each.waits for each in batches)
            metrics.BATCH_LINES_WAITING.set(await self.stored.count_waiting() if waits else 0)


class _Rooms:
    """The lines that may begin now, by model."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self._left: dict[str | None, int] = {}
        self.full: frozenset[str] = frozenset()
        """The models whose lines may not begin: they have no room, or are served elsewhere."""

    def take(self, model: str) -> bool:
        """Take a place for a line of a model; False if there is none."""
        served = self._runner.scheduler.served(model) if model else None
        is_elsewhere = model and served is None
        left = 0 if is_elsewhere else self._left.setdefault(served, self._runner.room(served))
        if left <= 0:
            self.full |= {model}
            return False
        self._left[served] = left - 1
        return True


def _is_late(batch: StoredBatch) -> bool:
    since = batch.expires_at if batch.cancelling_at is None else batch.cancelling_at
    return time.time() - since > LAST_SECONDS
