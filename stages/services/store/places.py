"""Places: how many of a limited kind each server holds for an API key, such as its responses at once.

A server that is dead, or has left, holds none.
"""

from __future__ import annotations

from penstock.stages.services.store.database import NOW, Statement
from penstock.stages.services.store.writer import StoreContext

_LOCK = """
    insert into places (owner, kind, server_id, held) values ($1, $2, '', 0)
    on conflict (owner, kind, server_id) do update set held = 0
"""
"""Keeps other servers from holding places of this kind until the transaction is over."""

_OTHERS = f"""(
    select coalesce(sum(others.held), 0) from places as others
    where others.owner = $1 and others.kind = $2 and others.server_id <> $3 and exists (
        select 1 from servers where id = others.server_id and beat_at >= {NOW} - cast($6 as double precision)
    )
)"""

_HOLD = f"""
    insert into places (owner, kind, server_id, held)
    select cast($1 as text), cast($2 as text), cast($3 as text), cast($4 as bigint)
    where cast($4 as bigint) + {_OTHERS} <= cast($5 as bigint)
    on conflict (owner, kind, server_id) do update set held = excluded.held
"""

_LOWER = "update places set held = $4 where owner = $1 and kind = $2 and server_id = $3"


class StoredPlaces:
    """The places of all owners, by their kind."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    async def hold(self, owner: str, kind: str, count: int, most: int) -> bool:
        """Hold ``count`` places from now on, if all servers then hold at most ``most``; return True if this one does.

        Raises `StoreFailed`.  This server may hold more than it knows of then, until the next call that succeeds.
        """
        self._context.writer.check_available()
        held = (owner, kind, self._context.server_id, count)
        steps = (Statement(_LOCK, (owner, kind)), Statement(_HOLD, (*held, most, self._context.stale)))
        return (await self._context.writer.carry_out(steps))[1] > 0

    async def lower(self, owner: str, kind: str, count: int) -> None:
        """Hold only ``count`` places from now on; raises `StoreFailed`."""
        await self._context.writer.carry_out([Statement(_LOWER, (owner, kind, self._context.server_id, count))])
