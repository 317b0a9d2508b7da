"""StoredBatches: the batches of all owners, and their lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.extensions.batches.batch import BatchError, LineResult, NewLine, StoredBatch, StoredLine
from penstock.services.store.parts import StorePart


class OpenBatches(NamedTuple):
    """What the open batches of an owner come to."""

    batches: int
    lines: int
    bytes: int


class StoredBatches(StorePart):
    """The batches in the store."""

    name = "batches"

    async def create(self, batch: StoredBatch) -> None:
        """Store a new batch, whose lines this server is going to add."""
        raise NotImplementedError

    async def add_lines(self, batch_id: str, lines: Sequence[NewLine]) -> None:
        """Add lines, some hundreds at a time; a line that is there stays.

        Raises `GivenUp` if the batch is not in validation here any more: it was cancelled, or is another server's.
        """
        raise NotImplementedError

    async def begin(self, batch_id: str) -> None:
        """Let the lines of a batch run: all have been added.  Raises `GivenUp` as `add_lines` does."""
        raise NotImplementedError

    async def fail(self, batch_id: str, errors: Sequence[BatchError]) -> None:
        """End a batch whose input is wrong.  Raises `GivenUp` as `add_lines` does."""
        raise NotImplementedError

    async def get(self, batch_id: str, owner: str) -> StoredBatch | None:
        """Return a batch; None if there is none."""
        raise NotImplementedError

    async def page(
        self, owner: str, api: str, *, limit: int, after: str | None = None, before: str | None = None
    ) -> Sequence[StoredBatch] | None:
        """Return up to ``limit`` batches of an API, the newest first: those older than the batch ``after``.

        Or those newer than the batch ``before`` that are next to it.  None if there is no such batch.
        """
        raise NotImplementedError

    async def cancel(self, batch_id: str, owner: str) -> StoredBatch | None:
        """Have a batch end early, if it has not begun to end; return it as it is then, None if there is none."""
        raise NotImplementedError

    async def delete(self, batch_id: str, owner: str) -> bool:
        """Delete a batch that has ended, with its lines; False if there is none, or it has not ended."""
        raise NotImplementedError

    async def open_of(self, owner: str | None) -> OpenBatches:
        """Return what the open batches of an owner come to, or those of all if None."""
        raise NotImplementedError

    async def results(self, batch_id: str, after: int = 0, most: int = 0) -> Sequence[tuple[StoredLine, LineResult]]:
        """Return the results of lines with higher numbers than ``after``, in order: a slice, empty at the end.

        A slice has at most ``most`` lines, and few megabytes unless a single result has more.
        """
        raise NotImplementedError
