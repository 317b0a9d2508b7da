"""BatchRunner: begins the lines of batches while there is room for them, and ends batches whose lines have results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias

import msgspec

from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.batches.batch import LineResult, StoredBatch, StoredLine
from penstock.extensions.batches.stored_batches import StoredBatches
from penstock.services.store.parts import StorePart


class LineRequest(msgspec.Struct, frozen=True):
    """A line that is to be answered: ``body`` is the JSON of a request to ``path``."""

    id: str
    owner: str
    key_name: str
    team: str
    path: str
    body: bytes


Validate: TypeAlias = Callable[[StoredBatch], Awaitable[None]]
"""Reads the input of a batch in validation: adds its lines, and lets it begin, or fail.

It may be called for one batch on several servers, one after the other; each reads the input from the start.
"""

OutputLine: TypeAlias = Callable[[StoredLine, LineResult], bytes]
"""Returns the line of a file of results, with its newline."""


class BatchRunner:
    """The batches of a store, as one server works on them."""

    def wake(self) -> None:
        """Look for work at once: a batch was created, or is to be cancelled."""
        raise NotImplementedError

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Work for the length of a block; at its end, release what has not ended."""
        raise NotImplementedError
        yield


_ = (Collection, Protocol, Scheduler, StoredBatches, StorePart)
