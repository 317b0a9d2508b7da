"""StoredWebhooks: the notifications of ended background responses, until each is delivered.

A notification is stored together with the end of its response.  A server claims it for a time, so that it is due again
if that server dies: it is delivered at least once.  All times are by the database's clock.
"""

from __future__ import annotations

import msgspec

from penstock.services.store.database import NOW, Statement
from penstock.services.store.writer import StoreContext

_OWNERS = f"select owner from webhooks where due_at <= {NOW} group by owner order by min(due_at)"

_DUE = f"""
    select id, response_id, owner, kind, created_at, attempts, {NOW} - created_at from webhooks
    where due_at <= {NOW} and owner = $1 order by due_at limit $2
"""

_CLAIM = f"""
    update webhooks set attempts = attempts + 1, due_at = {NOW} + cast($2 as double precision)
    where id = $1 and due_at <= {NOW}
"""

_RETRY = f"update webhooks set due_at = {NOW} + cast($2 as double precision) where id = $1"

_FORGET = "delete from webhooks where id = $1"

_COUNT = "select count(*) from webhooks"


class Notification(msgspec.Struct, frozen=True):
    """The news that a response has ended; ``attempts`` is the number of deliveries that were begun before."""

    id: str
    response_id: str
    owner: str
    kind: str
    created_at: float
    attempts: int
    age: float
    """Seconds since the end of the response."""


class StoredWebhooks:
    """The notifications in the store."""

    def __init__(self, context: StoreContext) -> None:
        self.context = context

    async def owners(self) -> list[str]:
        """Return the owners of notifications that are due, the longest due first."""
        return [owner for (owner,) in await self.context.read(_OWNERS)]

    async def due(self, owner: str, most: int) -> list[Notification]:
        """Return the notifications of an owner that are due, the longest due first."""
        return [Notification(*row) for row in await self.context.read(_DUE, owner, most)]

    async def claim(self, notification: Notification, seconds: float) -> bool:
        """Claim a notification for some seconds; False if another server has claimed it."""
        return await self._write(_CLAIM, notification.id, seconds)

    async def retry(self, notification: Notification, seconds: float) -> None:
        """Let a notification be due in some seconds."""
        await self._write(_RETRY, notification.id, seconds)

    async def forget(self, notification: Notification) -> None:
        """Delete a notification that is delivered, or given up."""
        await self._write(_FORGET, notification.id)

    async def count(self) -> int:
        """Return the number of notifications that wait."""
        ((count,),) = await self.context.read(_COUNT) or ((0,),)
        return int(count)

    async def _write(self, sql: str, notification_id: str, *arguments: float) -> bool:
        statement = Statement(sql, (notification_id, *arguments))
        return (await self.context.writer.carry_out((statement,), notification_id))[0] > 0
