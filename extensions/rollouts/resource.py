"""The routes of rollouts, for the operator alone: what sessions were worth, and the rows of one as they are now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from aiohttp import hdrs, web
from pydantic import Field, StringConstraints

from penstock.api.http.auth import for_operators
from penstock.api.http.bodies import Page
from penstock.api.http.errors import STREAMING, as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.pagination import AFTER, LIMIT, ends
from penstock.api.http.request_body import off_loop, receive
from penstock.api.resources.resources import BASE, ServerParts, checked
from penstock.api.settings import Settings
from penstock.extensions.rollouts.known import KnownSession, KnownSessions
from penstock.extensions.rollouts.live import Sessions, exporting, sessions_of
from penstock.extensions.rollouts.rewards import RewardLine, write_reward
from penstock.extensions.rollouts.writing import line
from penstock.pipeline.audit import decided
from penstock.pipeline.errors import (
    CannotStart,
    InvalidRequest,
    RolloutNotFound,
    ServerBusy,
    StoreFailed,
    UnsupportedParameter,
)
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.recordings.writer import make_folder
from penstock.pipeline.tasks import uncut
from penstock.stages.normalize.facts import recorded_session

MOST_NAME = 256
"""Characters of the name of a reward, and of the id of its response."""

MOST_READ = 4
"""Sessions that this process sends at once."""

KNOWN_WAIT = 5.0
"""Seconds that a reward waits for the index to know its session."""

JSON_LINES = "application/x-jsonl"

_Name = Annotated[str, StringConstraints(max_length=MOST_NAME)]
_REFUSALS = (InvalidRequest, StoreFailed)


class CreateReward(Body):
    """The worth of a session, or of one of its responses."""

    required = "reward"

    reward: Annotated[float, Field(allow_inf_nan=False)]
    """The reward, a finite number."""
    name: _Name = ""
    """The name of what it rewards, such as `style`; the reward of a row is the one without a name."""
    response: _Name = ""
    """The id of the response that it is for; without it, it is for the whole session."""
    key: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16})?$")] = ""
    """The digest of the API key of the session, needed if sessions of several keys have this id."""
    done: bool = False
    """True if the session is over, so that `--rollouts-to` gets it."""


class RolloutReward(msgspec.Struct, frozen=True):
    """A reward that is on the disk."""

    session: str
    reward: float
    name: str
    response: str
    key: str
    done: bool
    responses: int | None
    """The recorded responses that have the session's id by now: a reward may come first; null if not known in time."""
    object: Literal["rollout.reward"] = "rollout.reward"


class RolloutSession(msgspec.Struct, frozen=True):
    """A session with a recorded response that has ended."""

    id: str
    session: str
    """The client's own id of it, or else that of its conversation or of its first response."""
    key: str
    """The digest of its API key; empty without keys."""
    model: str
    responses: int
    turned_at: float
    """The time of the end of its latest response, or of its latest reward, in seconds since 1970."""
    done: bool
    """True if a reward has ended it, and no response has begun since."""
    object: Literal["rollout.session"] = "rollout.session"


class RolloutSessions(Page[RolloutSession], frozen=True):
    """A page of sessions."""


@dataclass
class RolloutRoutes:
    """The routes over the sessions of a folder of recordings; None if the server records nothing."""

    folder: Path | None
    sessions: Sessions | None
    reading: int = 0

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        one = f"{base}/rollouts/{{session:[^/]+}}"
        return (
            web.get(f"{base}/rollouts", self.list_sessions),
            web.get(one, self.retrieve),
            web.post(f"{one}/reward", self.reward),
        )

    @for_operators
    @operation(Operation(RolloutReward, body=CreateReward, refusals=_REFUSALS))
    async def reward(self, request: web.Request) -> web.Response:
        """Say what a session was worth; the last reward of a name and a response counts."""
        folder, sessions = self._recorded()
        name = recorded_session(request.match_info["session"])
        given = await off_loop(read_body, await receive(request), CreateReward)
        found = await _known(sessions, name)
        if found and not (given.key or given.response) and len(keys := sorted({each.key for each, _ in found})) > 1:
            message = f"Sessions of {len(keys)} API keys have this id. Name one by its digest: {', '.join(keys[:9])}."
            raise InvalidRequest(message, param="key", code="missing_required_parameter")
        written = RewardLine(
            name, given.reward, name=given.name, response=given.response, key=given.key, done=given.done
        )
        try:
            await uncut(lambda: write_reward(folder, written))
        except OSError as error:
            raise StoreFailed(f"The reward cannot be written: {named_error(error)}.") from error
        decided("rewards", "changed", shortened(name), reward=given.reward, name=given.name)
        count = None if found is None else sum(count for _, count in found)
        return as_json(
            RolloutReward(
                name,
                reward=given.reward,
                name=given.name,
                response=given.response,
                key=given.key,
                done=given.done,
                responses=count,
            )
        )

    @for_operators
    @operation(Operation(RolloutSessions, query=(LIMIT, AFTER), refusals=(*_REFUSALS, RolloutNotFound)))
    async def list_sessions(self, request: web.Request) -> web.Response:
        """List the sessions with recorded responses that have ended, the newest first, page by page."""
        _, sessions = self._recorded()
        limit, after = LIMIT.read(request), AFTER.read(request)
        await sessions.fresh()
        found = await sessions(_page, after or "", limit + 1)
        if found is None:
            raise RolloutNotFound(shortened(after or ""), param="after")
        data = tuple(found[:limit])
        return as_json(RolloutSessions(data, *ends(data), len(found) > limit))

    @for_operators
    @operation(Operation(bytes, answer_type=JSON_LINES, refusals=(*_REFUSALS, RolloutNotFound, ServerBusy)))
    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """Retrieve the rollouts of a session as they are now, a path in each line."""
        _, sessions = self._recorded()
        name = recorded_session(request.match_info["session"])
        await sessions.fresh()
        found = [each for each, _ in await sessions(_named, name)]
        if self.reading >= MOST_READ:
            raise ServerBusy(f"This server already sends {MOST_READ} sessions.")
        self.reading += 1
        try:
            return await self._sent(request, sessions, name, found)
        finally:
            self.reading -= 1

    async def _sent(
        self, request: web.Request, sessions: Sessions, name: str, found: Sequence[KnownSession]
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={hdrs.CONTENT_TYPE: JSON_LINES, "X-Content-Type-Options": "nosniff"})
        if found and request.method == hdrs.METH_HEAD:
            return answer
        for each in found:
            rows = await sessions(KnownSessions.rows, each)
            while row := await sessions(_next_line, rows):
                if not answer.prepared:
                    request[STREAMING] = True
                    await answer.prepare(request)
                await answer.write(row)
        if not answer.prepared:
            raise RolloutNotFound(shortened(name))
        await answer.write_eof()
        return answer

    def _recorded(self) -> tuple[Path, Sessions]:
        if self.folder is None or self.sessions is None:
            raise UnsupportedParameter("This server records nothing (--record), so it has no rollouts.")
        return self.folder, self.sessions


async def _known(sessions: Sessions, name: str) -> list[tuple[KnownSession, int]] | None:
    """Return the sessions with an id, and their responses; None if that is not known in time."""
    with suppress(TimeoutError, StoreFailed):
        async with asyncio.timeout(KNOWN_WAIT):
            await sessions.fresh()
            return await sessions(_named, name)
    return None


def _named(known: KnownSessions, name: str) -> list[tuple[KnownSession, int]]:
    return [(each, known.responses(each)) for each in known.named(name)]


def _page(known: KnownSessions, after: str, most: int) -> list[RolloutSession] | None:
    found = known.page(after, most)
    return (
        None
        if found is None
        else [
            RolloutSession(
                each.id,
                session=each.session,
                key=each.key,
                model=each.model,
                responses=known.responses(each),
                turned_at=each.turned_at,
                done=each.done_at >= each.began_at,
            )
            for each in found
        ]
    )


def _next_line(_: KnownSessions, rows: Iterator[msgspec.Struct]) -> bytes:
    return b"".join(line(row) + b"\n" for row in islice(rows, 1))


def check_export(settings: Settings) -> None:
    """Raise `CannotStart` if rollouts cannot be written."""
    folder, recordings = settings.rollouts_folder, settings.record
    if folder is None or recordings is None:
        return
    if folder.resolve().is_relative_to(recordings.resolve()):
        raise CannotStart(f"--rollouts-to {folder}: it is in the folder of --record: name another one")
    try:
        make_folder(folder)
    except OSError as error:
        raise CannotStart(f"--rollouts-to {folder}: no file can be written there") from error


@checked(check_export)
@asynccontextmanager
async def rollouts(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Open the routes of rollouts, and export those of sessions that are over, for the length of a block."""
    settings = parts.settings
    if settings.record is None:
        yield RolloutRoutes(None, None).routes(BASE)
        return
    check_export(settings)
    sessions = sessions_of(settings, settings.record)
    try:
        async with exporting(settings, sessions):
            yield RolloutRoutes(settings.record, sessions).routes(BASE)
    finally:
        await sessions.close()
