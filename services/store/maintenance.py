"""Maintenance of the store: orphans are found and claimed, and expired rows are deleted.

An orphan is a response that has not ended, and that has no server or a dead one.  Expired rows are deleted a few
hundred at a time, so that no writer waits long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.protocol.response import Response
from penstock.services.store import rows
from penstock.services.store.database import BATCH, NOW, Row, Statement, Value, placeholders
from penstock.services.store.heartbeats import of_dead_server
from penstock.services.store.stored import Orphan, Report
from penstock.services.store.writer import StoreContext

_ABANDONED = f"ended_at is null and (server_id is null or server_id <> $1) and {of_dead_server('responses')}"

_RUNS_AGAIN = "(status = 'queued' or (request is not null and cast($3 as bigint) = 1))"
"""The condition that an orphan is to run; ``$3`` is 1 if background responses start over."""

_MODELS = f"""
    select coalesce(model, ''), count(*) from responses where {_ABANDONED} and {_RUNS_AGAIN}
    group by coalesce(model, '')
"""

_NAME_MODEL = "update responses set model = $2 where id = $1 and model is null"

MOST_UNSERVED = 10_000
"""Models whose orphans a query leaves out; a database takes no more than 32,766 parameters."""

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

_LEFT_WEBHOOKS = f"delete from webhooks where created_at < {NOW} - 172800"
"""Notifications that no server has delivered or given up, because none has a receiver any more."""

_OLD_APPROVALS = "delete from approvals where used_at < $1"

_PLACES_OF_NONE = """
    delete from places where server_id <> '' and not exists (select 1 from servers where servers.id = server_id)
"""

_SIZE_OF_EVENTS = "select coalesce(sum(length(data)), 0) from events where response_id = responses.id"

_COUNT = "select count(*), min(created_at) from responses"

_log = logging.getLogger(__name__)


async def orphaned_models(context: StoreContext, *, restarts: bool) -> dict[str, int]:
    """Return the number of orphans that are to run, by their model; "" has those of an older release.

    With ``restarts``, background responses that were running are among them.
    """
    counted = await context.read(_MODELS, context.server_id, context.stale, int(restarts))
    return {model: int(number) for model, number in counted}


async def orphans(context: StoreContext, unserved: Sequence[str] = (), *, restarts: bool = False) -> tuple[Orphan, ...]:
    """Return the oldest orphans, at most `BATCH` of them, without those that are to run on an ``unserved`` model."""
    unserved = unserved[:MOST_UNSERVED]
    names = placeholders(len(unserved), first=4)
    left = f"and not ({_RUNS_AGAIN} and coalesce(model, '') in ({names}))" if unserved else ""
    query = f"""
        select server_id, id, {rows.RESPONSE_COLUMNS} from responses where {_ABANDONED} {left}
        order by created_at limit {BATCH}
    """
    more: tuple[Value, ...] = (int(restarts), *unserved) if unserved else ()
    orphan_rows = await context.read(query, context.server_id, context.stale, *more)
    return tuple(orphan for row in orphan_rows for orphan in _readable(row))


async def name_model(context: StoreContext, response: Response) -> None:
    """Record the model of a response that an older release has stored."""
    await context.writer.carry_out(
        [Statement(_NAME_MODEL, (response.id, rows.model_column(response.model)))], response.id
    )


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
    forgotten = Statement(_OLD_APPROVALS, (now - keep_responses,))
    left = (Statement(sql, ()) for sql in (_LONG_GONE, _PLACES_OF_NONE, _LEFT_WEBHOOKS))
    await context.writer.carry_out((*left, forgotten))
    ((count, oldest),) = await context.read(_COUNT) or ((0, None),)
    return Report(count, await context.size(), max(0.0, now - oldest) if oldest else 0.0)


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
        f"update responses set logged = 0, bytes = bytes - ({_SIZE_OF_EVENTS}) where id in ({these})",
        f"delete from events where response_id in ({these})",
    )
    counts = await context.writer.carry_out(Statement(sql, tuple(ids)) for sql in steps)
    return counts[0]
