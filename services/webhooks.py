"""Webhooks: the URL of the operator, or of an API key, learns of the end of each background response.

They are signed as Standard Webhooks are.  A delivery that fails is tried again for a day, by any server of the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import aiohttp
import msgspec
from yarl import URL

from penstock.pipeline import metrics
from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.logs import duration
from penstock.pipeline.tasks import cancelled
from penstock.services.slots import Slots
from penstock.services.standard_webhooks import Receiver
from penstock.services.store.webhooks import Notification
from penstock.services.web.fetch import guarded_connector
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks, Blocked

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""Deliveries of one process at once."""

MOST_TO_ONE = 4
"""Deliveries to one receiver among them, so that one that hangs delays no other."""

TIMEOUT = 15.0
"""Seconds in which the receiver must have answered."""

CLAIM = 2 * TIMEOUT
"""Seconds after which another server may deliver what this one has begun to deliver."""

PAUSES = (5.0, 3600.0)
"""The first and the longest pause in seconds before another attempt.  Each pause is twice the one before."""

PATIENCE = 86_400.0
"""Seconds after the end of a response in which its notification is tried."""

POLL = 2.0
"""Seconds between two looks for notifications that are due."""

_SUCCESS = range(200, 300)

_NO_RECEIVER = "none"
"""The place of owners that have no receiver any more: their notifications are forgotten."""


class _Data(msgspec.Struct, frozen=True):
    id: str


class _Event(msgspec.Struct, frozen=True):
    id: str
    type: str
    created_at: int
    data: _Data
    object: str = "event"


def body_of(notification: Notification) -> bytes:
    """Return the body that the receiver gets: an event with the id of the response."""
    data = _Data(notification.response_id)
    return msgspec.json.encode(_Event(notification.id, notification.kind, int(notification.created_at), data))


async def _body_of(notification: Notification) -> bytes:
    return body_of(notification)


def pause_after(attempts: int) -> float:
    """Return the seconds before the next attempt, after a number of attempts."""
    first, longest = PAUSES
    return min(first * 2.0 ** min(attempts - 1, 30), longest)


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    timeout, jar = aiohttp.ClientTimeout(total=TIMEOUT), aiohttp.DummyCookieJar()
    headers = {"Content-Type": "application/json", "User-Agent": "penstock"}
    return aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar, headers=headers)


class _Sessions(NamedTuple):
    """A session for hosts that the operator names, and one for all others."""

    trusted: aiohttp.ClientSession
    guarded: aiohttp.ClientSession


class _Refused(Exception):
    """The receiver has not taken a webhook."""


class Queue(Protocol):
    """The notifications that wait, with the methods of `StoredWebhooks`."""

    async def owners(self) -> Sequence[str]: ...
    async def due(self, owner: str, most: int, /) -> Sequence[Notification]: ...
    async def claim(self, notification: Notification, seconds: float, /) -> bool: ...
    async def retry(self, notification: Notification, seconds: float, /) -> None: ...
    async def forget(self, notification: Notification, /) -> None: ...


@dataclass
class Webhooks:
    """Delivers the notifications of a queue, at most `MOST_AT_ONCE` at a time, and `MOST_TO_ONE` to one receiver.

    ``receiver_of`` gives the receiver of an owner; None if it has none.  ``body_of`` makes the body that it gets.  A
    notification is given up after the seconds of its ``patience``.
    """

    stored: Queue
    receiver_of: Callable[[str], Receiver | None]
    allowed: AllowedNetworks = NOTHING_ALLOWED
    body_of: Callable[[Notification], Awaitable[bytes]] = _body_of
    patience: float = field(default_factory=lambda: PATIENCE)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    places: Slots = field(default_factory=lambda: Slots(MOST_AT_ONCE, per_owner=MOST_TO_ONE))
    """The deliveries by the URL of their receiver."""

    @asynccontextmanager
    async def delivering(self) -> AsyncGenerator[None, None]:
        """Deliver what is due for the length of a block; what is on its way at the end is delivered again."""
        connectors = aiohttp.TCPConnector(limit=0), guarded_connector(self.allowed)
        async with _session(connectors[0]) as trusted, _session(connectors[1]) as guarded:
            looking = asyncio.create_task(self._keep_looking(_Sessions(trusted, guarded)))
            try:
                yield
            finally:
                await cancelled([looking, *self._tasks.values()])

    async def _keep_looking(self, sessions: _Sessions) -> None:
        while True:
            with suppress(StoreFailed):  # the store logs its faults; the notifications stay
                while any([await self._begin_one(sessions, owner) for owner in await self.stored.owners()]):
                    pass
            await asyncio.sleep(POLL)

    async def _begin_one(self, sessions: _Sessions, owner: str) -> bool:
        """Begin to deliver the notification of an owner that is due longest, if there is a place for its receiver."""
        receiver = self.receiver_of(owner)
        url = receiver.url if receiver else _NO_RECEIVER
        if not self.places.acquire_now(url):
            return False
        begun = False
        try:
            for notification in await self.stored.due(owner, 1):
                # A delivery whose claim is over may still wait here for a slow store.
                if notification.id not in self._tasks and await self.stored.claim(notification, CLAIM):
                    task = asyncio.create_task(self._deliver(sessions, receiver, notification))
                    task.add_done_callback(lambda _: self.places.release(url))  # also if it never begins
                    self._tasks[notification.id], begun = task, True
        finally:
            if not begun:
                self.places.release(url)
        return begun

    async def _deliver(self, sessions: _Sessions, receiver: Receiver | None, notification: Notification) -> None:
        """Deliver a claimed notification, and record what became of it: in the metrics first, then in the store."""
        try:
            if receiver is None:
                await self._forget(notification)
                return
            is_trusted = self.allowed.names(URL(receiver.url).host or "")
            await self._post(sessions.trusted if is_trusted else sessions.guarded, receiver, notification)
        except _Refused as error:
            await self._failed(notification, str(error))
        else:
            metrics.WEBHOOKS.labels("delivered").inc()
            await self._forget(notification)
        finally:
            del self._tasks[notification.id]

    async def _forget(self, notification: Notification) -> None:
        with suppress(StoreFailed):  # then it is delivered again
            await self.stored.forget(notification)

    async def _post(self, session: aiohttp.ClientSession, receiver: Receiver, notification: Notification) -> None:
        body = await self.body_of(notification)
        headers = receiver.signer.headers(notification.id, body, int(time.time()))
        try:
            async with session.post(receiver.url, data=body, headers=headers, allow_redirects=False) as answer:
                if answer.status not in _SUCCESS:
                    raise _Refused(f"the receiver answered with status {answer.status}")
        except TimeoutError:
            raise _Refused(f"the receiver did not answer within {duration(TIMEOUT)}") from None
        except aiohttp.ClientConnectorError as error:
            is_blocked = isinstance(error.os_error, Blocked)
            why = f"{error.os_error}: see --allow-address" if is_blocked else "no connection could be made"
            raise _Refused(why) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Refused(f"no answer came ({type(error).__name__})") from None

    async def _failed(self, notification: Notification, why: str) -> None:
        """Have a notification delivered later, or give it up."""
        attempts = notification.attempts + 1
        pause = pause_after(attempts)
        news = f"{notification.kind} of {notification.response_id}"
        if notification.age + pause > self.patience:
            metrics.WEBHOOKS.labels("given_up").inc()
            logger.warning("The webhook %s is given up after %d attempts: %s", news, attempts, why)
            await self._forget(notification)
            return
        metrics.WEBHOOKS.labels("failed").inc()
        logger.info("The webhook %s has failed and is tried again in %s: %s", news, duration(pause), why)
        with suppress(StoreFailed):  # then it is due again when the claim is over
            await self.stored.retry(notification, pause)
