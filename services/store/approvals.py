"""The approvals of MCP calls that were used: one approval runs one call, however often a client sends it.

SDKs send a request again after a time-out, maybe to another server of the store.  So the use of an approval is written
to the store, also for a response that is not stored: an id that the server drew tells nothing.  Without a store, or
while it is away, this process alone remembers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import suppress

from penstock.pipeline.errors import StoreFailed
from penstock.services.store.database import NOW, Statement, batches, placeholders
from penstock.services.store.writer import StoreContext

_USE = f"""
    insert into approvals (owner, id, response_id, used_at) values ($1, $2, $3, {NOW})
    on conflict (owner, id) do nothing
"""

_REMEMBERED = 10_000
"""Approvals that a process remembers; the oldest go first."""


class StoredApprovals:
    """The used approvals of all owners, with the responses that used them."""

    def __init__(self, context: StoreContext) -> None:
        self.context = context
        self._here: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def use(self, owner: str, approval_id: str, response_id: str) -> str:
        """Use an approval for a response, unless another response has used it; return the one that has it now."""
        used = response_id
        if (owner, approval_id) not in self._here:
            with suppress(StoreFailed):
                await self.context.writer.carry_out([Statement(_USE, (owner, approval_id, response_id))])
                used = (await self._stored(owner, [approval_id])).get(approval_id, used)
        used = self._here.setdefault((owner, approval_id), used)  # another response may have used it meanwhile
        if len(self._here) > _REMEMBERED:
            self._here.popitem(last=False)
        return used

    async def used(self, owner: str, approval_ids: Collection[str]) -> Mapping[str, str]:
        """Return the responses that have used these approvals, by the id of the approval."""
        here = {name: used for name in approval_ids if (used := self._here.get((owner, name)))}
        with suppress(StoreFailed):
            return {**here, **await self._stored(owner, approval_ids)}
        return here

    async def _stored(self, owner: str, approval_ids: Collection[str]) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for some in batches(approval_ids):
            names = placeholders(len(some), 2)
            sql = f"select id, response_id from approvals where owner = $1 and id in ({names})"
            found.update((str(row[0]), str(row[1])) for row in await self.context.read(sql, owner, *some))
        return found
