"""The sweep: delete expired rows, a few hundred at a time, so that no writer waits long."""

from __future__ import annotations

import time

from penstock.stages.services.store.database import BATCH, NOW, Statement, placeholders
from penstock.stages.services.store.ledger import StoreContext
from penstock.stages.services.store.stored import Report

_OLD_LOGS = f"""
    select id from responses
    where ended_at is not null and logged = 1 and ended_at < $1 order by ended_at limit {BATCH}
"""

_UNCONTINUED = """
    not exists (select 1 from responses as later where later.previous_response_id = responses.id)
"""

_OLD_RESPONSES = f"""
    select id from responses
    where ended_at is not null and ended_at < $1 and {_UNCONTINUED} order by ended_at limit {BATCH}
"""

_LONG_GONE = f"delete from servers where beat_at < {NOW} - 86400"

_COUNT = "select count(*), min(created_at) from responses"


async def sweep(context: StoreContext, keep_responses: float, keep_logs: float) -> Report:
    """Delete expired responses, event logs and servers; return a report of the rest.

    A response expires ``keep_responses`` seconds after its end, unless another one continues it.  Its events expire
    ``keep_logs`` seconds after its end, and a server one day after its last heartbeat.
    """
    now = time.time()
    while ids := [name for (name,) in await context.read(_OLD_RESPONSES, now - keep_responses)]:
        if not await _forget(context, ids):
            break
    while ids := [name for (name,) in await context.read(_OLD_LOGS, now - keep_logs)]:
        if not await _forget_logs(context, ids):
            break
    await context.writer.carry_out((Statement(_LONG_GONE, ()),))
    ((count, oldest),) = await context.read(_COUNT) or ((0, None),)
    return Report(count, await context.size(), now - oldest if oldest else 0.0)


async def _forget(context: StoreContext, ids: list[str]) -> int:
    """Delete those responses that no other response continues; return their number."""
    these = placeholders(len(ids))
    gone = f"response_id in ({these}) and not exists (select 1 from responses where id = response_id)"
    steps = (
        f"delete from responses where id in ({these}) and {_UNCONTINUED}",
        f"delete from events where {gone}",
        f"delete from items where {gone}",
    )
    counts = await context.writer.carry_out(Statement(sql, tuple(ids)) for sql in steps)
    return counts[0]


async def _forget_logs(context: StoreContext, ids: list[str]) -> int:
    """Delete the events of responses; return the number of these responses."""
    these = placeholders(len(ids))
    steps = (
        f"update responses set logged = 0 where id in ({these})",
        f"delete from events where response_id in ({these})",
    )
    counts = await context.writer.carry_out(Statement(sql, tuple(ids)) for sql in steps)
    return counts[0]
