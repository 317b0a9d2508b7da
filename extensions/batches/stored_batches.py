"""StoredBatches: the batches of all owners, and their lines.

A line has at most one result.  Its row names the server that runs it, and the result is written only as long as it
does: in one unit with what the line has used.  The lines of a server that has died wait again, and so does the work on
its batches.  All changes are urgent (see ``writer.py``): the runner repeats those that fail, so that an outage slows it
down, and nothing waits in memory but the results of the lines that run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from penstock.extensions.batches import tables as sql
from penstock.extensions.batches.batch import (
    BatchError,
    Kind,
    LineResult,
    NewLine,
    Status,
    StoredBatch,
    StoredLine,
)
from penstock.extensions.batches.errors import GivenUp
from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.store import rows
from penstock.services.store.database import BATCH, Row, Statement, Value, placeholders
from penstock.services.store.parts import StorePart
from penstock.services.use import Use

ROWS: Final = 80
"""Lines that one statement adds."""

PREFIX: Final = 256
"""Characters of the text that lines sort by."""

SLICE: Final = 2 << 20
"""Bytes of results that are read together, unless one result has more."""

KEPT: Final = 30 * 86_400.0
"""Seconds for which an ended batch is kept by default."""

_TEXT = msgspec.json.Decoder(str)
_METADATA = msgspec.json.Decoder(dict[str, str])
_ERRORS = msgspec.json.Decoder(tuple[BatchError, ...])

_ENDS = {"completed": "completed_at", "failed": "failed_at", "expired": "expired_at", "cancelled": "cancelled_at"}
"""The field with the time of the end, by the status that a batch ends with."""


class OpenBatches(NamedTuple):
    """The sums of the open batches of an owner."""

    batches: int
    lines: int
    bytes: int


class OpenBatch(NamedTuple):
    """A batch that has not ended, without the counts of its lines."""

    batch: StoredBatch
    server_id: str | None
    """The server that validates or ends it."""
    waits: bool
    """True if lines wait."""
    has_open: bool
    """True if lines have no result."""


class Candidate(NamedTuple):
    """A line that waits."""

    batch: StoredBatch
    number: int


class ClaimedLine(NamedTuple):
    """A line that this server runs."""

    batch: StoredBatch
    line: StoredLine
    attempts: int
    """The times that a server has begun it, with this one."""
    body: bytes


class Totals(NamedTuple):
    """The sums of the lines of a batch that all have results."""

    counts: tuple[int, ...]
    """The numbers of results, by `tables.COUNTS`."""
    tokens: tuple[int, ...]
    """The tokens, by `tables.TOKENS`."""
    bytes: int


class StoredBatches(StorePart):
    """The batches in the store."""

    name = "batches"
    tables = sql.TABLES
    counted = ("batches",)

    keep: float = KEPT
    """Seconds for which an ended batch is kept."""
    notifies: bool = False
    """True if the ends of batches of OpenAI's API leave notifications."""

    # The life of a batch

    async def create(self, batch: StoredBatch) -> None:
        """Store a new batch in validation, whose lines this server is going to add."""
        metadata = None if batch.metadata is None else rows.to_json(batch.metadata)
        row = (*_plain(batch).values(), *(0 for _ in sql.COUNTS), metadata, 0, self.context.server_id)
        await self._write(Statement(sql.CREATE, row))

    async def add_lines(self, batch_id: str, lines: Sequence[NewLine]) -> None:
        """Add lines, some hundreds at a time; a line that is there stays.

        Raises `GivenUp` if the batch is not in validation here any more: it was cancelled, or is another server's.
        """
        fence = Statement(sql.KEEP_VALIDATING, self._own(batch_id))
        added = [_added(batch_id, lines[first : first + ROWS]) for first in range(0, len(lines), ROWS)]
        await self._fenced(fence, *added)

    async def begin(self, batch_id: str, model: str = "") -> None:
        """Let the lines of a batch run: all have been added.  Raises `GivenUp` as `add_lines` does."""
        await self._fenced(Statement(sql.BEGIN, (*self._own(batch_id), time.time(), rows.model_column(model))))

    async def fail(self, batch_id: str, errors: Sequence[BatchError]) -> None:
        """End a batch whose input is wrong.  Raises `GivenUp` as `add_lines` does."""
        failed = (*self._own(batch_id), time.time(), rows.to_json(errors))
        await self._fenced(Statement(sql.FAIL, failed), *self._notes(batch_id, "failed"))
        await self.drop_lines(batch_id)

    async def give_up(self, batch_id: str) -> None:
        """Delete a batch whose client does not know of it.  Raises `GivenUp` as `add_lines` does."""
        await self._fenced(Statement(sql.GIVE_UP, self._own(batch_id)))
        await self.drop_lines(batch_id)

    async def get(self, batch_id: str, owner: str) -> StoredBatch | None:
        """Return a batch; None if there is none."""
        if not rows.can_exist(batch_id):
            return None
        for row in await self.context.read(f"{sql.GET} and {sql.IS_SHOWN}", batch_id, owner):
            return _batch(row)
        return None

    async def page(
        self, owner: str, api: str, *, limit: int, after: str | None = None, before: str | None = None
    ) -> Sequence[StoredBatch] | None:
        """Return up to ``limit`` batches of an API, the newest first: those older than the batch ``after``.

        Or those newer than the batch ``before`` that are next to it.  None if there is no such batch.
        """
        arguments: tuple[Value, ...] = (owner, api, limit)
        sign, order = (">", "asc") if before is not None else ("<", "desc")
        place = ""
        if (beside := before if before is not None else after) is not None:
            if (found := await self.get(beside, owner)) is None:
                return None
            arguments += (found.created_at, found.id)
            place = f"and (created_at, id) {sign} ($4, $5)"
        query = sql.PAGE.format(columns=sql.COLUMNS, shown=sql.IS_SHOWN, place=place, order=order)
        read = [_batch(row) for row in await self.context.read(query, *arguments)]
        return read[::-1] if before is not None else read

    async def cancel(self, batch_id: str, owner: str) -> StoredBatch | None:
        """Have a batch end early, if it has not begun to end; return it as it is then, None if there is none."""
        if rows.can_exist(batch_id):
            await self._write(Statement(sql.CANCEL, (batch_id, owner, time.time())))
        return await self.get(batch_id, owner)

    async def delete(self, batch_id: str, owner: str) -> bool:
        """Delete a batch that has ended, with its lines; False if there is none, or it has not ended."""
        if not rows.can_exist(batch_id) or not await self._write(Statement(sql.DELETE, (batch_id, owner))):
            return False
        await self.drop_lines(batch_id)
        return True

    async def open_of(self, owner: str | None) -> OpenBatches:
        """Return what the open batches of an owner come to, or those of all if None."""
        ((count, lines, size),) = await self.context.read(sql.OPEN_OF, owner) or ((0, 0, 0),)
        return OpenBatches(int(count), int(lines), int(size))

    async def results(self, batch_id: str, after: int = 0, most: int = BATCH) -> list[tuple[StoredLine, LineResult]]:
        """Return the results of lines with higher numbers than ``after``, in order: a slice, empty at the end.

        It has at most ``most`` lines, and `SLICE` bytes unless a single result has more.
        """
        last, size = 0, 0
        for number, count in await self.context.read(sql.RESULT_SIZES, batch_id, after, most):
            size += count
            if last and size > SLICE:
                break
            last = number
        if not last:
            return []
        return [_result(batch_id, row) for row in await self.context.read(sql.RESULTS, batch_id, after, last)]

    # What servers do

    async def look(self) -> list[OpenBatch]:
        """Return all open batches, the oldest first."""
        read = await self.context.read(sql.LOOK)
        return await apart(len(read) > MANY_VALUES, list, map(_open, read))

    async def claim_validation(self, batch_id: str) -> bool:
        """Become the server that validates a batch; False if another one does."""
        return await self._write(Statement(sql.CLAIM_VALIDATION, self._own(batch_id))) > 0

    async def waiting(self, batch: StoredBatch, most: int, unserved: Sequence[str] = ()) -> list[tuple[int, str]]:
        """Return the numbers and models of lines that wait, those of ``unserved`` models left out."""
        names = placeholders(len(unserved), first=3)
        query = sql.WAITING.format(left_out=f"and model not in ({names})" if unserved else "")
        return [(int(number), model) for number, model in await self.context.read(query, batch.id, most, *unserved)]

    async def claim(self, candidates: Sequence[Candidate]) -> list[ClaimedLine]:
        """Become the server of lines that still wait, unless their batch has ended to begin lines; return these.

        A line that this server has is claimed again: the outcome of the commit before may be unknown.
        """
        now, own = time.time(), self.context.server_id
        claims = [Statement(sql.CLAIM, (each.batch.id, each.number, own, now)) for each in candidates]
        counts = await self.context.writer.carry_out(claims)
        numbers: dict[str, tuple[StoredBatch, list[int]]] = {}
        for candidate, count in zip(candidates, counts, strict=True):
            if count:
                numbers.setdefault(candidate.batch.id, (candidate.batch, []))[1].append(candidate.number)
        claimed: list[ClaimedLine] = []
        for batch, of_batch in numbers.values():
            query = sql.CLAIMED.format(numbers=placeholders(len(of_batch), first=3))
            for number, custom_id, attempts, body in await self.context.read(query, batch.id, own, *of_batch):
                line = StoredLine(batch.id, int(number), rows.from_json(custom_id, _TEXT))
                claimed.append(ClaimedLine(batch, line, int(attempts), bytes(body)))
        return claimed

    async def finish(self, line: StoredLine, result: LineResult, use: Use | None, notes: Iterable[Statement]) -> bool:
        """Give a line its result, with the ``notes`` of what it has used; False if it is another server's by now.

        It may be called again if the outcome of the commit is unknown.
        """
        tokens: Sequence[Value] = [0 if use is None else getattr(use, name) for name in sql.TOKENS]
        answer = (result.kind, result.status, result.request_id, *tokens, len(result.body), result.body)
        finished = Statement(sql.FINISH, (line.batch_id, line.number, self.context.server_id, *answer))
        return (await self.context.writer.carry_out([finished, *notes], line.id, is_fenced=True))[0] > 0

    async def count_waiting(self) -> int:
        """Return the number of lines that wait, of all owners."""
        ((number,),) = await self.context.read(sql.COUNT_WAITING) or ((0,),)
        return int(number)

    async def release(self, line: StoredLine) -> None:
        """Let a line wait again."""
        await self._write(Statement(sql.RELEASE_LINE, (line.batch_id, line.number, self.context.server_id)))

    async def release_all(self) -> None:
        """Let all lines wait again that this server runs, and others go on with its batches."""
        own = (self.context.server_id,)
        await self.context.writer.carry_out(
            [Statement(sql.RELEASE_LINES, own), Statement(sql.RELEASE_BATCHES, own)], *own
        )

    async def close_lines(self, batch_id: str, kind: Kind) -> bool:
        """Give some of the lines that wait a result without an answer; return True if more may wait."""
        return await self._write(Statement(sql.CLOSE, (batch_id, kind, BATCH, b""))) == BATCH

    async def claim_end(self, batch_id: str) -> bool:
        """Become the server that ends a batch whose lines all have results; False if another one does."""
        return await self._write(Statement(sql.CLAIM_END, (*self._own(batch_id), time.time()))) > 0

    async def name_files(self, batch_id: str, output: str | None, errors: str | None) -> bool:
        """Record the files that get the results, before they are found; False if another server ends the batch."""
        return await self._write(Statement(sql.NAME_FILES, (*self._own(batch_id), output, errors))) > 0

    async def totals(self, batch_id: str) -> Totals:
        """Return what the lines of a batch come to that all have results."""
        (read,) = await self.context.read(sql.TOTALS, batch_id) or ((0,) * 9,)
        counts = len(sql.COUNTS)
        return Totals(tuple(map(int, read[:counts])), tuple(map(int, read[counts:-1])), int(read[-1]))

    async def end(self, batch_id: str, status: Status, totals: Totals) -> bool:
        """End a batch; False if another server does, or has."""
        ended = Statement(
            sql.END,
            (*self._own(batch_id), status, time.time(), *totals.counts, *totals.tokens, totals.bytes),
        )
        notes = self._notes(batch_id, status)
        return (await self.context.writer.carry_out([ended, *notes], batch_id, is_fenced=True))[0] > 0

    def _notes(self, batch_id: str, status: Status) -> list[Statement]:
        """Return the statement by which the owner of a batch learns of its end, in one unit with it."""
        name = f"evt_{batch_id.removeprefix('batch_')}"
        return [Statement(sql.NOTIFY, (batch_id, name, f"batch.{status}"))] if self.notifies else []

    async def drop_lines(self, batch_id: str) -> None:
        """Delete the lines of a batch that is gone, or has its results in files, in steps."""
        while await self._write(Statement(sql.DROP, (batch_id, BATCH))) == BATCH:
            pass

    # What all stores do

    async def recover(self) -> None:
        """Let the lines of dead servers wait again, and others go on with their batches."""
        dead = (self.context.server_id, self.context.stale)
        if await self.context.read(sql.HAS_DEAD, *dead):
            await self.context.writer.carry_out([Statement(each, dead) for each in sql.RECOVER])

    async def sweep(self) -> None:
        """Delete the batches that ended long ago, and lines that have no reader."""
        await self.recover()
        since = time.time() - self.keep
        while ids := [name for (name,) in await self.context.read(sql.EXPIRED.format(most=BATCH), since)]:
            if not sum(await self.context.writer.carry_out([Statement(sql.FORGET, (name, since)) for name in ids])):
                break
        for (batch_id,) in await self.context.read(sql.LEFT.format(most=BATCH)):
            await self.drop_lines(batch_id)

    def _own(self, batch_id: str) -> tuple[str, str]:
        return batch_id, self.context.server_id

    async def _write(self, statement: Statement) -> int:
        return (await self.context.writer.carry_out([statement], str(statement.arguments[0])))[0]

    async def _fenced(self, fence: Statement, *others: Statement) -> None:
        counts = await self.context.writer.carry_out([fence, *others], str(fence.arguments[0]), is_fenced=True)
        if not counts[0]:
            raise GivenUp


def _plain(batch: StoredBatch) -> dict[str, Any]:
    texts = {"model": rows.model_column(batch.model)}
    return {name: texts.get(name, getattr(batch, name)) for name in sql.PLAIN}


def _added(batch_id: str, lines: Sequence[NewLine]) -> Statement:
    arguments: list[Value] = [batch_id]
    for line in lines:
        texts = rows.to_json(line.custom_id), rows.model_column(line.model), rows.model_column(line.prefix)[:PREFIX]
        arguments += (line.number, *texts, len(line.body), line.body)
    return Statement(sql.add_lines(len(lines)), tuple(arguments))


def _batch(row: Row) -> StoredBatch:
    fields: dict[str, Any] = dict(zip((*sql.PLAIN, *sql.COUNTS), row, strict=False))
    ended_at, metadata, errors = row[-3:]
    if ended_at is not None:
        fields[_ENDS[fields["status"]]] = ended_at
    return StoredBatch(
        **fields,
        metadata=None if metadata is None else rows.from_json(metadata, _METADATA),
        errors=rows.from_json(errors, _ERRORS) if errors else (),
    )


def _open(row: Row) -> OpenBatch:
    server_id, waits, has_open = row[-3:]
    fields: dict[str, Any] = dict(zip(sql.PLAIN, row, strict=False))
    return OpenBatch(StoredBatch(**fields), server_id, bool(waits), bool(has_open))


def _result(batch_id: str, row: Row) -> tuple[StoredLine, LineResult]:
    number, custom_id, kind, status, request_id, body = row
    line = StoredLine(batch_id, int(number), rows.from_json(custom_id, _TEXT))
    return line, LineResult(kind, int(status), request_id, bytes(body))
