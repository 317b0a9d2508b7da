"""The live export: the rollouts of each session that is over, as a file in a folder or as a webhook.

What was exported stands in the index of the recordings, once it has arrived.  So a server that is killed exports again
what it had begun, under the same id, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from penstock.api.settings import Settings
from penstock.extensions.rollouts.known import KnownSession, KnownSessions
from penstock.extensions.rollouts.rewards import sync_folder
from penstock.extensions.rollouts.writing import line, written
from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.tasks import beside
from penstock.services.standard_webhooks import Receiver, Signer
from penstock.services.store.webhooks import Notification
from penstock.services.web.ssrf import AllowedNetworks
from penstock.services.webhooks import Webhooks

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
More = ParamSpec("More")

POLL = 2.0
"""Seconds between two looks for sessions that are over."""

REST = 20.0
"""The shortest pause between two looks, in times of what the last one took."""

SETTLES = 2.0
"""Seconds after the reward that ends a session in which the recording of its last response may still come."""

LEAST_SILENCE = 60.0
"""Seconds without a line after which a recording counts as over, at least."""

CLAIM = 60.0
"""Seconds in which a server writes the file of a session; then another one may."""

RETRY = 5.0
"""Seconds after which a file that could not be written is tried again."""

AT_ONCE = 100
"""Sessions that are exported before others are looked for."""

MOST_BODY = 2**26
"""Bytes of the rows in a webhook; a larger one has none, and its receiver asks for them."""

MOST_NAME = 64
"""Characters of a session's id in the name of its file."""

DIGITS = 12
"""Digits of an id that tells sessions apart in the name of a file."""

KIND = "rollout.done"
"""The type of the webhooks."""


class Sessions:
    """The sessions of a folder, for the event loop: a thread of its own has the index."""

    def __init__(self, folder: Path, silence: float) -> None:
        self._folder = folder
        self._silence = silence
        self._known: KnownSessions | None = None
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._lock = asyncio.Lock()
        self._begun = 0

    async def __call__(
        self, work: Callable[Concatenate[KnownSessions, More], Result], /, *given: More.args, **named: More.kwargs
    ) -> Result:
        """Return what ``work`` makes of the sessions.  Raise `StoreFailed` if the index cannot be used."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: self._done(work, *given, **named))

    async def fresh(self) -> None:
        """Have the index know all that was recorded until now."""
        begun = self._begun
        async with self._lock:
            if begun == self._begun:  # else a later call has just done it
                self._begun += 1
                await self(KnownSessions.refresh)

    async def close(self) -> None:
        """Close the index, after what the thread is doing."""
        if self._known is not None:
            self._known.is_stopping = True
            await self(KnownSessions.close)
        self._thread.shutdown(wait=False)

    def _done(
        self, work: Callable[Concatenate[KnownSessions, More], Result], *given: More.args, **named: More.kwargs
    ) -> Result:
        try:
            if self._known is None:
                self._known = KnownSessions(self._folder, self._silence)
            return work(self._known, *given, **named)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailed(f"The recordings cannot be used: {named_error(error)}") from error
        except Exception as error:  # what goes on for other sessions must not end
            logger.exception("The recordings cannot be used")
            raise StoreFailed("The recordings cannot be used.") from error


class Export(Notification, frozen=True):
    """A session that is to be exported."""

    session: KnownSession
    digest: str

    @classmethod
    def of(cls, session: KnownSession, digest: str) -> Export:
        """Return the export of what a session has now."""
        return cls(
            f"evt_{digest}",
            shortened(session.session),
            owner="",
            kind=KIND,
            created_at=session.turned_at,
            attempts=session.attempts,
            age=0.0,
            session=session,
            digest=digest,
        )


@dataclass
class Due:
    """The sessions that are over and not exported, as the queue of webhooks."""

    sessions: Sessions
    after: float
    _looked_at: float = -inf
    _next: float = 0.0

    async def look(self) -> None:
        """Look for sessions that are over, unless that was done just now."""
        if (began := time.monotonic()) >= self._next:
            await self.sessions.fresh()
            now, self._looked_at = time.monotonic(), began
            self._next = now + max(POLL, REST * (now - began))

    async def owners(self) -> Sequence[str]:
        """Return the owner of all if a session is due."""
        await self.look()
        return [""] if await self.due("", 1) else []

    async def due(self, _: str, most: int, /) -> Sequence[Export]:
        """Return sessions that are due."""
        return await self.sessions(_due, self.after, self._looked_at, most)

    async def claim(self, notification: Notification, seconds: float, /) -> bool:
        """Have no other server export a session for some seconds."""
        export = _export(notification)
        return await self.sessions(KnownSessions.claim, export.session, export.digest, seconds)

    async def retry(self, notification: Notification, seconds: float, /) -> None:
        """Let a session be due in some seconds."""
        await self.sessions(KnownSessions.retry, _export(notification).digest, seconds)

    async def forget(self, notification: Notification, /) -> None:
        """Note that a session has arrived."""
        await self.sessions(KnownSessions.sent, _export(notification).digest)

    async def body(self, notification: Notification) -> bytes:
        """Return the body of a webhook."""
        return await self.sessions(_body, _export(notification))


def _export(notification: Notification) -> Export:
    assert isinstance(notification, Export)
    return notification


def _due(known: KnownSessions, after: float, looked_at: float, most: int) -> list[Export]:
    """Return sessions that are due; those that have nothing new, or whose recordings are gone, are done with.

    A session counts as idle as of the last look: what has begun since then is not known yet.
    """
    found = list[Export]()
    for session in known.due(after + time.monotonic() - looked_at, SETTLES, most):
        export = Export.of(session, known.digest(session))
        if session.sent != export.digest and known.has_recordings(session):
            found.append(export)
        elif known.claim(session, export.digest, CLAIM):
            known.sent(export.digest)
    return found


class _Data(msgspec.Struct, frozen=True):
    id: str
    session: str
    key: str
    model: str
    rows: list[msgspec.Raw] | None


class _Event(msgspec.Struct, frozen=True):
    id: str
    created_at: int
    data: _Data
    type: str = KIND
    object: str = "event"


def _body(known: KnownSessions, export: Export) -> bytes:
    session, size, rows = export.session, 0, list[msgspec.Raw]()
    for row in known.rows(session):
        rows.append(msgspec.Raw(line(row)))
        size += len(bytes(rows[-1]))
        if size > MOST_BODY:
            break
    fits = rows if size <= MOST_BODY else None
    data = _Data(session.id, session.session, key=session.key, model=session.model, rows=fits)
    return msgspec.json.encode(_Event(export.id, int(export.created_at), data))


def file_of(folder: Path, session: KnownSession) -> Path:
    """Return the file of a session: what is safe of its id, and the end of an id that no other session has."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", session.session)[:MOST_NAME]
    return folder / f"{safe}-{session.id[-DIGITS:]}.jsonl"


def _write(known: KnownSessions, folder: Path, export: Export) -> bool:
    """Write the file of a session, unless another server does; return True if it is there."""
    if not known.claim(export.session, export.digest, CLAIM):
        return False
    try:
        if first := next(rows := known.rows(export.session), None):
            with written(str(file_of(folder, export.session)), "penstock") as write:
                for row in chain((first,), rows):
                    write(row)
            sync_folder(folder)
    except Exception:
        known.retry(export.digest, RETRY)
        raise
    known.sent(export.digest)
    return True


@dataclass
class Files:
    """Writes a file for each session that is due."""

    due: Due
    folder: Path
    _has_failed: bool = False

    @asynccontextmanager
    async def writing(self) -> AsyncGenerator[None, None]:
        """Write what is due for the length of a block."""
        async with beside(self._keep_writing()):
            yield

    async def _keep_writing(self) -> None:
        while True:
            try:
                await self.due.look()
                while found := await self.due.due("", AT_ONCE):
                    for export in found:
                        await self.due.sessions(_write, self.folder, export)
                self._has_failed = False
            except StoreFailed as error:
                if not self._has_failed:
                    logger.warning("Rollouts wait to be written to %s: %s", self.folder, error)
                self._has_failed = True
            await asyncio.sleep(POLL)


def sessions_of(settings: Settings, folder: Path) -> Sessions:
    """Return the sessions of the folder of recordings."""
    return Sessions(folder, max(settings.rollouts_after, LEAST_SILENCE))


@asynccontextmanager
async def exporting(settings: Settings, sessions: Sessions) -> AsyncGenerator[None, None]:
    """Export the sessions that are over for the length of a block, if the settings say where to."""
    due = Due(sessions, settings.rollouts_after)
    if settings.rollouts_folder is not None:
        async with Files(due, settings.rollouts_folder).writing():
            yield
    elif settings.rollouts_to is not None and settings.webhook_secret is not None:
        receiver = Receiver(settings.rollouts_to, Signer.of(settings.webhook_secret.get_secret_value()))
        allowed = AllowedNetworks.parse(settings.allow_address)
        async with Webhooks(due, lambda _: receiver, allowed, body_of=due.body, patience=inf).delivering():
            yield
    else:
        yield
