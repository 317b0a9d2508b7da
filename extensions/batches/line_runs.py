"""LineRuns: the lines of batches that this server runs, each in a task of its own, until their results are stored."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.batches.batch import Kind, LineAnswer, LineResult
from penstock.extensions.batches.stored_batches import ClaimedLine, StoredBatches
from penstock.pipeline import metrics
from penstock.pipeline.errors import ServerStopping, StoreFailed
from penstock.pipeline.logs import current_response
from penstock.pipeline.tasks import cancelled
from penstock.services.store.database import DatabaseRefused
from penstock.services.use import Use

logger = logging.getLogger(__name__)

ATTEMPTS = 100
"""Attempts after which a line has the error of the last one as its result; the death of a server counts as ten."""

DEATHS = 10
"""Attempts after which a line has the death of its engine as its result, as it may be what the engine dies of."""

RESTS = (1.0, 30.0)
"""The first and the longest pause in seconds of an owner whose line met an error that may pass."""

RETRY_SECONDS = 0.5
"""Seconds before a result is written again that the store has not taken."""

STOP_SECONDS = 5.0
"""Seconds for results to be written when the server stops."""


class LineRequest(msgspec.Struct, frozen=True):
    """A line that is to be answered: ``body`` is the JSON of a request to ``path``.

    If it is cancelled, ``used`` gets what it has used by then.
    """

    id: str
    owner: str
    key_name: str
    team: str
    path: str
    body: bytes
    used: list[Use] = []


Answer: TypeAlias = Callable[[LineRequest], Awaitable[LineAnswer]]
"""Answers a line; raises `ServerStopping` if the server stops before."""


class _Rest(NamedTuple):
    """The pause of an owner."""

    seconds: float
    until: float
    """The monotonic time at which it is over."""


@dataclass(eq=False)
class LineRuns:
    """The lines that run here.  ``ended`` is called with the owner of each, when it runs no more."""

    scheduler: Scheduler
    answer: Answer
    ended: Callable[[str], None]
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The tasks of the lines, by id."""
    _batches: dict[str, str] = field(default_factory=dict)
    """The batches of the lines, by id."""
    _answering: set[str] = field(default_factory=set)
    _late: dict[str, Kind] = field(default_factory=dict)
    """The results of lines that ran on for too long."""
    _rests: dict[str, _Rest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store = self.scheduler.store
        self._stored = self._store.part(StoredBatches)

    def start(self, line: ClaimedLine) -> None:
        """Run a line that this server has claimed."""
        name = line.line.id
        self._batches[name] = line.batch.id
        self.tasks[name] = task = asyncio.create_task(self._run(line))
        task.add_done_callback(lambda _: self._end(line))

    def _end(self, line: ClaimedLine) -> None:
        del self.tasks[line.line.id], self._batches[line.line.id]
        self._late.pop(line.line.id, None)
        self.ended(line.batch.owner)

    def rests(self, owner: str) -> bool:
        """Return True if the lines of an owner have to wait after an error that may pass."""
        return owner in self._rests and time.monotonic() < self._rests[owner].until

    def end_late(self, batch_id: str, kind: Kind) -> None:
        """End the lines of a batch that still have no answer, with a result of a kind."""
        for name, of_batch in self._batches.items():
            if of_batch == batch_id and name in self._answering and name not in self._late:
                self._late[name] = kind
                self.tasks[name].cancel()

    async def stop(self) -> None:
        """End the lines without an answer, and let the others write their results."""
        for name in self._answering:
            self.tasks[name].cancel()
        left = list(self.tasks.values())
        if left:
            await asyncio.wait(left, timeout=STOP_SECONDS)
        await cancelled(left)

    async def _run(self, line: ClaimedLine) -> None:
        current_response.set(line.line.id)
        try:
            result, use = await self._result(line)
        except Exception:
            logger.exception("A bug in the answer to line %s", line.line.id)
            self._rest(line.batch.owner)
            result = use = None
        while not await self._is_written(line, result, use):
            await asyncio.sleep(RETRY_SECONDS)

    async def _result(self, line: ClaimedLine) -> tuple[LineResult | None, Use | None]:
        """Return the result of a line, and what it has used; None if it is to wait again."""
        name, owner = line.line.id, line.batch.owner
        if line.attempts > ATTEMPTS:
            return _GIVEN_UP[line.batch.api], None
        self._answering.add(name)
        request, engine = _request(line), self.scheduler.engine
        was_alive = engine.is_alive
        try:
            answer = await self.answer(request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if name not in self._late or task is None or task.uncancel():
                raise
            return LineResult(self._late[name]), next(iter(request.used), None)
        except ServerStopping:
            return None, None
        finally:
            self._answering.discard(name)
        if self.scheduler.in_flight.stopping:  # the engine may have ended it early
            return None, None
        has_died = answer.has_failed and was_alive and not engine.is_alive
        if answer.may_pass and line.attempts < (DEATHS if has_died else ATTEMPTS):
            self._rest(owner)
            return None, None
        self._rests.pop(owner, None)
        kind: Kind = "errored" if answer.has_failed or answer.status >= 400 else "succeeded"
        return LineResult(kind, answer.status, answer.request_id, answer.body), answer.use

    def _rest(self, owner: str) -> None:
        shortest, longest = RESTS
        before = self._rests.get(owner)
        seconds = min(2 * before.seconds, longest) if before else shortest
        if not self.rests(owner):  # of many lines that fail together, one counts
            self._rests[owner] = _Rest(seconds, time.monotonic() + seconds)

    async def _is_written(self, line: ClaimedLine, result: LineResult | None, use: Use | None) -> bool:
        """Store the result of a line, or let it wait again; return False if that has to be tried again."""
        try:
            if result is None:
                await self._stored.release(line.line)
            elif await self._stored.finish(line.line, result, use, self._store.statements_of(use) if use else ()):
                _count(result, use)
            else:
                logger.warning("Line %s is another server's now: this one was silent", line.line.id)
        except StoreFailed as error:
            if isinstance(error.__cause__, DatabaseRefused):  # it has been logged, and would be refused again
                return await self._is_written(line, _GIVEN_UP[line.batch.api], None) if use else True
            logger.info("The result of line %s has to wait for the store: %s", line.line.id, error)
            return False
        return True


def _request(line: ClaimedLine) -> LineRequest:
    batch = line.batch
    return LineRequest(
        line.line.id,
        owner=batch.owner,
        key_name=batch.key_name,
        team=batch.team,
        path=batch.endpoint,
        body=line.body,
    )


_MESSAGE = "This line was begun again and again, and never ended."

_BODIES = {
    "openai": {"error": {"message": _MESSAGE, "type": "server_error", "param": None, "code": "server_error"}},
    "anthropic": {"type": "error", "error": {"type": "api_error", "message": _MESSAGE}},
}
_GIVEN_UP = {api: LineResult("errored", 500, body=msgspec.json.encode(body)) for api, body in _BODIES.items()}


def _count(result: LineResult, use: Use | None) -> None:
    metrics.BATCH_LINES.labels(result.kind).inc()
    if use is not None:
        metrics.BATCH_TOKENS.labels("input").inc(use.input_tokens)
        metrics.BATCH_TOKENS.labels("output").inc(use.output_tokens)
