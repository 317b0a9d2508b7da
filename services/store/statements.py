"""The statements of runs.  They wait in the queue, and are executed for many runs at once.

Each statement is fenced: it changes only rows that belong to the calling server.  So a server that seemed dead cannot
overwrite the rows that others have taken over.  A change may be executed twice without further effect: after a lost
connection it is unknown if the last commit succeeded, so its changes are executed again.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.services.store.database import NOW, SHARED, Statement, Unit, Value
from penstock.services.store.parts import installed_parts

BEGIN = """
    insert into responses (id, owner, previous_response_id, conversation_id, position, created_at, status, server_id,
                           response, input, request, logged, tokens, bytes, model, line)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, 1, $12, $13, $14, $15)
    on conflict (id) do nothing
"""

START = "update responses set status = $2, response = $3 where id = $1 and server_id = $4"

INDEX = f"""
    insert into items (owner, id, stored_at, response_id)
    select owner, cast($2 as text), cast($3 as double precision), id
    from responses where id = $1 and server_id = $4 {SHARED}
    on conflict do nothing
"""
"""Records that a response contains an item."""

APPEND = f"""
    insert into events (response_id, first, count, data)
    select id, cast($2 as bigint), cast($3 as bigint), $4
    from responses where id = $1 and server_id = $5 {SHARED}
    on conflict do nothing
"""

GROW = """
    update conversations set length = length + $2, bytes = bytes + $5
    where id = $1 and response_id = $3 and server_id = $4
"""
"""Makes room at the end of a conversation, and blocks other changes of it until the transaction is over."""

ADD = """
    insert into conversation_items (conversation_id, position, id, stored_at, item, tokens, result, writer)
    select id, length - cast($2 as bigint), cast($3 as text), cast($4 as double precision), cast($5 as text), $6,
           cast($7 as text), cast($8 as text)
    from conversations where id = $1 and response_id = $9 and server_id = $10
"""
"""Inserts an item, ``$2`` places before the end of the conversation."""

UNLOCK = """
    update conversations set response_id = null, server_id = null
    where id = $1 and response_id = $2 and server_id = $3
"""

END = """
    update responses
    set status = $2, response = $3, tokens = $4, results = $5, ended_at = $6, server_id = null, request = null,
        writer = $9,
        bytes = bytes + $8 + (select coalesce(sum(length(data)), 0) from events where response_id = $1)
    where id = $1 and server_id = $7
"""

NOTIFY = f"""
    insert into webhooks (id, response_id, owner, kind, created_at, attempts, due_at)
    select cast($2 as text), id, owner, cast($3 as text), {NOW}, 0, {NOW}
    from responses where id = $1 and server_id = $4 and request is not null {SHARED}
    on conflict do nothing
"""
"""Records that a background response has ended; to be executed before its end."""

WITHDRAWAL = (
    """
    delete from items where response_id = $1 and exists (
        select 1 from responses where id = $1 and server_id = $2 and status = 'queued'
    )
    """,
    "delete from responses where id = $1 and server_id = $2 and status = 'queued'",
)
"""Deletes a queued response that must not run, because `Store.accept` has failed."""

RELEASE = "update responses set server_id = null where id = $1 and server_id = $2"

STATEMENTS = (
    BEGIN,
    *WITHDRAWAL,
    START,
    INDEX,
    APPEND,
    GROW,
    ADD,
    UNLOCK,
    NOTIFY,
)
"""The statements of runs, in their order of execution when many units are merged; those of the parts follow."""

LAST = (END, RELEASE)
"""The statements of runs after which a response belongs to no server, so that no other one changes anything."""


def bulks(units: Iterable[Unit]) -> dict[str, list[tuple[Value, ...]]]:
    """Return the arguments of all units by statement, in the order of execution."""
    of_parts = (sql for part in installed_parts() for sql in part.queued)
    rows: dict[str, list[tuple[Value, ...]]] = {sql: [] for sql in (*STATEMENTS, *of_parts, *LAST)}
    for unit in units:
        for statement in unit.statements:
            rows[statement.sql].append(statement.arguments)
    return {sql: arguments for sql, arguments in rows.items() if arguments}


def unlock(conversation_id: str, response_id: str, server_id: str) -> Statement:
    """Return the statement that releases a conversation for the next response."""
    return Statement(UNLOCK, (conversation_id, response_id, server_id))
