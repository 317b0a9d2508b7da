"""The parts of the room of batches, as its routes use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from penstock.api.http.auth import OWNER
from penstock.api.limits.admission import PAUSE, Admission
from penstock.api.resources.resources import ServerParts
from penstock.extensions.batches.answering import Answering
from penstock.extensions.batches.batch import StoredBatch
from penstock.extensions.batches.runner import BatchRunner
from penstock.extensions.batches.stored_batches import StoredBatches
from penstock.pipeline.errors import BatchNotFound, LimitReached
from penstock.pipeline.protocol.params.json_body import shortened


@dataclass
class Bounds:
    """The batches and lines that owners may have that have not ended."""

    admission: Admission
    stored: StoredBatches
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def within(self, owner: str, lines: int, *, batches: int = 0) -> AsyncGenerator[None, None]:
        """Let a block store these numbers of batches and lines beside what there is.

        Raises `LimitReached` if an owner, or all owners together, may not have them.  The blocks run one after another,
        as those of `Admission.queueing` do.
        """
        async with self._turn:
            await self._check(owner, lines, batches)
            yield

    async def _check(self, owner: str, lines: int, batches: int) -> None:
        of_owner, of_all = self.admission.of(owner), self.admission.of_all
        for payer, limits in ((owner, of_owner), (None, of_all)):
            if limits.batches is None and limits.batch_lines is None:
                continue
            now = await self.stored.open_of(payer)
            for kind, most, count in (
                ("batches", limits.batches, now.batches + batches),
                ("lines of batches", limits.batch_lines, now.lines + lines),
            ):
                if most is not None and count > most:
                    who = "all API keys together" if payer is None else "this API key"
                    message = f"Limit reached for {who}: {most} {kind} that have not ended. Try again later."
                    raise LimitReached(message, PAUSE)


@dataclass(frozen=True)
class Room:
    """The parts of the room, which its routes use: ``openai_routes(room)`` and ``anthropic_routes(room)``."""

    parts: ServerParts
    stored: StoredBatches
    bounds: Bounds
    runner: BatchRunner
    answering: Answering

    @property
    def paths(self) -> frozenset[str]:
        """The paths to which lines may be requests."""
        return self.answering.paths

    def check_store(self) -> None:
        """Raise `UnsupportedParameter` if nothing is stored."""
        self.parts.scheduler.store.check_keeps("batches")

    async def found(self, request: web.Request, param: str, api: str) -> StoredBatch:
        """Return the batch of an API whose id a parameter of the path has; raise `BatchNotFound` if there is none."""
        self.check_store()
        batch_id = request.match_info[param]
        batch = await self.stored.get(batch_id, request[OWNER])
        if batch is None or batch.api != api:
            raise BatchNotFound(shortened(batch_id), param=param)
        return batch
