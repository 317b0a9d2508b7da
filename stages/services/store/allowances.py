"""Allowances: amounts that refill with time, such as the requests per minute of an API key.

All servers of the store take from the same row, by the database's clock, so they never take more than there is.
"""

from __future__ import annotations

from penstock.stages.services.store.database import NOW, Statement
from penstock.stages.services.store.writer import StoreContext

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
        self._context = context

    async def take(self, owner: str, kind: str, amount: float, most: float, seconds: float) -> tuple[bool, float]:
        """Take an amount, if there is so much; return True if it was taken, and the amount that is left.

        An allowance holds ``most`` at first, and refills to that within ``seconds``.  Raises `StoreFailed`.
        """
        self._context.writer.check_available()
        rate = most / seconds
        opened = Statement(_OPEN, (owner, kind, float(most)))
        taken = Statement(_TAKE, (owner, kind, float(most), rate, float(amount)))
        counts = await self._context.writer.carry_out((opened, taken))
        for (level,) in await self._context.read(_READ, owner, kind, float(most), rate):
            return counts[1] > 0, level
        return False, 0.0
