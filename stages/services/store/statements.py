"""What a run does to the database: statements that wait in the queue, and that many runs carry out together.

Each one is fenced: it changes only what belongs to the server that says it, so that a server which the others took for
dead overwrites nothing that they have settled; and carried out twice it changes no more than once, because after a lost
connection nobody knows whether the last commit was in time.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.stages.services.store.database import SHARED, Statement, Unit, Value

BEGIN = """
    insert into responses (id, owner, previous_response_id, conversation_id, position, created_at, status, server_id,
                           response, input, request, logged, tokens)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, 1, $12)
    on conflict (id) do nothing
"""

START = "update responses set status = $2, response = $3 where id = $1 and server_id = $4"

INDEX = f"""
    insert into items (owner, id, stored_at, response_id)
    select owner, cast($2 as text), cast($3 as double precision), id
    from responses where id = $1 and server_id = $4 {SHARED}
    on conflict do nothing
"""
"""That a response holds an item."""

APPEND = f"""
    insert into events (response_id, first, count, data)
    select id, cast($2 as bigint), cast($3 as bigint), $4
    from responses where id = $1 and server_id = $5 {SHARED}
    on conflict do nothing
"""

GROW = "update conversations set length = length + $2 where id = $1 and response_id = $3 and server_id = $4"
"""Makes room at the end of a conversation, and keeps others from doing so until the transaction is over."""

ADD = """
    insert into conversation_items (conversation_id, position, id, stored_at, item, tokens, result)
    select id, length - cast($2 as bigint), cast($3 as text), cast($4 as double precision), cast($5 as text), $6,
           cast($7 as text)
    from conversations where id = $1 and response_id = $8 and server_id = $9
"""
"""An item, so many places before the end."""

UNLOCK = """
    update conversations set response_id = null, server_id = null
    where id = $1 and response_id = $2 and server_id = $3
"""

END = """
    update responses
    set status = $2, response = $3, tokens = $4, results = $5, ended_at = $6, server_id = null, request = null
    where id = $1 and server_id = $7
"""

WITHDRAWAL = (
    """
    delete from items where response_id = $1 and exists (
        select 1 from responses where id = $1 and server_id = $2 and status = 'queued'
    )
    """,
    "delete from responses where id = $1 and server_id = $2 and status = 'queued'",
)
"""Takes back a response that was never to be run."""

RELEASE = "update responses set server_id = null where id = $1 and server_id = $2"

STATEMENTS = (BEGIN, *WITHDRAWAL, START, INDEX, APPEND, GROW, ADD, UNLOCK, END, RELEASE)
"""All of them, in the order in which they are carried out when many units go together."""


def bulks(units: Iterable[Unit]) -> dict[str, list[tuple[Value, ...]]]:
    """The arguments of all units, by statement, in the order of `STATEMENTS`."""
    rows: dict[str, list[tuple[Value, ...]]] = {sql: [] for sql in STATEMENTS}
    for unit in units:
        for statement in unit.statements:
            rows[statement.sql].append(statement.arguments)
    return {sql: arguments for sql, arguments in rows.items() if arguments}


def unlock(conversation_id: str, response_id: str, server_id: str) -> Statement:
    """Let the next response have the conversation."""
    return Statement(UNLOCK, (conversation_id, response_id, server_id))
