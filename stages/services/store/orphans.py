"""Orphans: responses that have not ended, and that have no server or a dead one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from msgspec.structs import replace

from penstock.pipeline.errors import StoreFailed
from penstock.stages.services.store import rows
from penstock.stages.services.store.database import BATCH, NOW, Row, Statement
from penstock.stages.services.store.ledger import StoreContext
from penstock.stages.services.store.stored import Orphan

_ABANDONED = f"""
    ended_at is null and (server_id is null or server_id <> $1) and not exists (
        select 1 from servers
        where servers.id = responses.server_id and beat_at >= {NOW} - cast($2 as double precision)
    )
"""

_ORPHANS = f"""
    select server_id, id, {rows.RESPONSE_COLUMNS} from responses where {_ABANDONED} order by created_at limit {BATCH}
"""

_CLAIM = f"""
    update responses set server_id = $1
    where id = $3 and ended_at is null and (server_id = $1 or ({_ABANDONED} and coalesce(server_id, '') = $4))
"""

_TAKE_LOCK = """
    update conversations set server_id = $1
    where response_id = $2 and exists (select 1 from responses where id = $2 and server_id = $1)
"""

_WAIT_AGAIN = "update responses set status = 'queued', response = $3 where id = $1 and server_id = $2"

_FORGET_EVENTS = """
    delete from events
    where response_id = $1 and exists (select 1 from responses where id = $1 and server_id = $2)
"""

_OWN = f"select {rows.RESPONSE_COLUMNS} from responses where id = $1 and server_id = $2"

_log = logging.getLogger(__name__)


async def orphans(context: StoreContext) -> tuple[Orphan, ...]:
    """Return the oldest orphans, at most `BATCH` of them."""
    orphan_rows = await context.read(_ORPHANS, context.server_id, context.stale)
    return tuple(orphan for row in orphan_rows for orphan in _readable(row))


def _readable(row: Row) -> Iterator[Orphan]:
    """Yield the orphan of a row, or nothing if the row cannot be read: it must not block the other orphans."""
    server_id, response_id, *columns = row
    try:
        stored = rows.stored_response(columns)
    except StoreFailed:
        _log.exception("the response %s cannot be read, and is left as it is", response_id)
    else:
        yield Orphan(stored, server_id, stored.response.background)


async def claim(context: StoreContext, orphan: Orphan) -> bool:
    """Take over an orphan and its conversation's lock; False if it has ended or another server has it by now.

    A claim may be repeated if the outcome of its commit is unknown: a response that this server has is claimed again.
    """
    own, response_id = context.server_id, orphan.stored.response.id
    taken = Statement(_CLAIM, (own, context.stale, response_id, orphan.server_id or ""))
    counts = await context.writer.carry_out((taken, Statement(_TAKE_LOCK, (own, response_id))), response_id)
    return counts[0] > 0


async def restart(context: StoreContext, response_id: str) -> None:
    """Put a response of this server back to ``queued``, and delete its events."""
    own = (response_id, context.server_id)
    for row in await context.read(_OWN, *own):
        response = replace(rows.stored_response(row).response, status="queued")
        waiting = Statement(_WAIT_AGAIN, (*own, rows.to_json(response)))
        await context.writer.carry_out((waiting, Statement(_FORGET_EVENTS, own)), response_id)
