"""The limits of API keys that all servers of a store count together.

An allowance is an amount that refills with time, such as the requests per minute.  All servers take from the same row,
by the database's clock, so they never take more than there is.

A reservation is how many of a limited kind a server may use, such as responses at once.  A server that is dead, or has
left, has none.
"""

from __future__ import annotations

from penstock.services.store.database import NOW, Statement
from penstock.services.store.writer import StoreContext

_REFILLED = f"""
    case when level + abs({NOW} - at) * {{rate}} < {{most}} then level + abs({NOW} - at) * {{rate}} else {{most}} end
"""
"""If the clock was set back, the time of the last change is in the future: the allowance refills by the difference."""

_MOST, _RATE = "cast($3 as double precision)", "cast($4 as double precision)"
_LEVEL = _REFILLED.format(most=_MOST, rate=_RATE)

_OPEN = f"""
    insert into allowances (owner, kind, level, at) values ($1, $2, cast($3 as double precision), {NOW})
    on conflict (owner, kind) do nothing
"""

_TAKE = f"""
    update allowances set level = {_LEVEL} - cast($5 as double precision), at = {NOW}
    where owner = $1 and kind = $2 and {_LEVEL} >= cast($5 as double precision)
"""

_READ = f"select {_LEVEL} from allowances where owner = $1 and kind = $2"


class StoredAllowances:
    """The allowances of all owners, by their kind."""

    def __init__(self, context: StoreContext) -> None:
        self.context = context

    async def take(self, owner: str, kind: str, amount: float, most: float, seconds: float) -> tuple[bool, float]:
        """Take an amount, if there is so much; return True if it was taken, and the amount that is left.

        An allowance holds ``most`` at first, and refills to that within ``seconds``.  Raises `StoreFailed`.
        """
        self.context.writer.check_available()
        rate = most / seconds
        opened = Statement(_OPEN, (owner, kind, float(most)))
        taken = Statement(_TAKE, (owner, kind, float(most), rate, float(amount)))
        counts = await self.context.writer.carry_out((opened, taken))
        for (level,) in await self.context.read(_READ, owner, kind, float(most), rate):
            return counts[1] > 0, level
        return False, 0.0


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


class StoredReservations:
    """The reservations of all owners, by their kind."""

    def __init__(self, context: StoreContext) -> None:
        self.context = context

    async def reserve(self, owner: str, kind: str, count: int, most: int) -> bool:
        """Reserve ``count`` slots from now on, if all servers then have at most ``most``; return True if this one does.

        Raises `StoreFailed`.  This server may have more than it knows of then, until the next call that succeeds.
        """
        self.context.writer.check_available()
        held = (owner, kind, self.context.server_id, count)
        steps = (Statement(_LOCK, (owner, kind)), Statement(_HOLD, (*held, most, self.context.stale)))
        return (await self.context.writer.carry_out(steps))[1] > 0

    async def lower(self, owner: str, kind: str, count: int) -> None:
        """Reserve only ``count`` slots from now on; raises `StoreFailed`."""
        await self.context.writer.carry_out([Statement(_LOWER, (owner, kind, self.context.server_id, count))])
