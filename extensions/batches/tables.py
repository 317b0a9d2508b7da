"""The tables of batches, and the statements that change them.

A batch or a line that a server works on has its id, and each change is fenced by that: a server that seemed dead, and
whose work others have taken over, changes nothing.  A line without a ``kind`` has no result yet.
"""

from __future__ import annotations

from penstock.services.store.database import NOW
from penstock.services.store.heartbeats import of_dead_server

TABLES = (
    """
    create table batches (
        id text primary key,
        owner text not null,
        api text not null,
        endpoint text not null,
        model text not null,
        status text not null,
        created_at double precision not null,
        expires_at double precision not null,
        in_progress_at double precision,
        finalizing_at double precision,
        cancelling_at double precision,
        ended_at double precision,
        total bigint not null,
        succeeded bigint not null,
        errored bigint not null,
        expired bigint not null,
        cancelled bigint not null,
        input_file_id text,
        output_file_id text,
        error_file_id text,
        completion_window text not null,
        metadata text,
        errors text,
        output_expires_after bigint,
        key_name text not null,
        team text not null,
        input_tokens bigint not null,
        cached_tokens bigint not null,
        output_tokens bigint not null,
        reasoning_tokens bigint not null,
        bytes bigint not null,
        server_id text
    )
    """,
    "create index batches_of_owner on batches (owner, api, created_at, id)",
    "create index batches_bytes on batches (owner, bytes)",
    "create index batches_open on batches (created_at, id) where ended_at is null",
    "create index batches_ended on batches (ended_at) where ended_at is not null",
    """
    create table batch_lines (
        batch_id text not null,
        number bigint not null,
        custom_id text not null,
        model text not null,
        prefix text not null,
        server_id text,
        attempts bigint not null,
        kind text,
        status bigint not null,
        request_id text not null,
        input_tokens bigint not null,
        cached_tokens bigint not null,
        output_tokens bigint not null,
        reasoning_tokens bigint not null,
        bytes bigint not null,
        data bytea not null,
        primary key (batch_id, number)
    )
    """,
    "create index batch_lines_open on batch_lines (batch_id, prefix, number) where kind is null",
    "create index batch_lines_done on batch_lines (batch_id, kind) where kind is not null",
    "create index batch_lines_claimed on batch_lines (server_id) where server_id is not null",
)
"""The batches, and their lines: ``data`` is the request of a line until it has a result, and then that."""

COUNTS = ("succeeded", "errored", "expired", "cancelled")
TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")

PLAIN = (
    "id",
    "owner",
    "api",
    "endpoint",
    "model",
    "status",
    "created_at",
    "expires_at",
    "in_progress_at",
    "finalizing_at",
    "cancelling_at",
    "total",
    "input_file_id",
    "output_file_id",
    "error_file_id",
    "completion_window",
    "output_expires_after",
    "key_name",
    "team",
    *TOKENS,
)
"""The columns that are fields of a batch as they are."""


def _now(count: str) -> str:
    """Return the number of lines with a result of a kind: that of now until the batch has ended."""
    counted = f"select count(*) from batch_lines where batch_id = batches.id and kind = '{count}'"
    return f"case when ended_at is null then ({counted}) else {count} end"


COLUMNS = ", ".join((*PLAIN, *map(_now, COUNTS), "ended_at", "metadata", "errors"))

_NEW = (*PLAIN, *COUNTS, "metadata", "bytes", "server_id")

CREATE = f"""
    insert into batches ({", ".join(_NEW)}) values ({", ".join(f"${number}" for number, _ in enumerate(_NEW, 1))})
    on conflict (id) do nothing
"""

_IS_VALIDATED = "id = $1 and server_id = $2 and status = 'validating'"

KEEP_VALIDATING = f"update batches set status = 'validating' where {_IS_VALIDATED}"
"""The fence of lines that are added: no other server changes the batch until the transaction is over."""

_NEW_LINE = "($1, ${0}, ${1}, ${2}, ${3}, 0, 0, '', 0, 0, 0, 0, ${4}, ${5})"


def add_lines(count: int) -> str:
    """Return the statement that adds so many lines, unless they are there."""
    lines = (_NEW_LINE.format(*range(first, first + 6)) for first in range(2, 2 + 6 * count, 6))
    return f"""
        insert into batch_lines (batch_id, number, custom_id, model, prefix, attempts, status, request_id,
                                 input_tokens, cached_tokens, output_tokens, reasoning_tokens, bytes, data)
        values {", ".join(lines)} on conflict (batch_id, number) do nothing
    """


BEGIN = f"""
    update batches set status = 'in_progress', in_progress_at = $3, server_id = null, model = $4,
        total = (select count(*) from batch_lines where batch_id = $1),
        bytes = (select coalesce(sum(bytes), 0) from batch_lines where batch_id = $1)
    where {_IS_VALIDATED}
"""

FAIL = f"""
    update batches set status = 'failed', ended_at = $3, server_id = null, errors = $4, bytes = 0
    where {_IS_VALIDATED}
"""

GIVE_UP = f"delete from batches where {_IS_VALIDATED}"

GET = f"select {COLUMNS} from batches where id = $1 and owner = $2"

IS_SHOWN = "not (api = 'anthropic' and status = 'validating')"
"""A client of Anthropic's API learns of a batch once all of its lines are stored."""

PAGE = """
    select {columns} from batches where owner = $1 and api = $2 and {shown} {place}
    order by created_at {order}, id {order} limit $3
"""

CANCEL = """
    update batches set cancelling_at = $3, status = 'cancelling'
    where id = $1 and owner = $2 and status in ('validating', 'in_progress')
"""

DELETE = "delete from batches where id = $1 and owner = $2 and ended_at is not null"

OPEN_OF = """
    select count(*), coalesce(sum(total), 0), coalesce(sum(bytes), 0) from batches
    where ended_at is null and (owner = $1 or cast($1 as text) is null)
"""

_LINES = "select 1 from batch_lines where batch_id = batches.id and kind is null"

LOOK = f"""
    select {", ".join(PLAIN)}, server_id, exists ({_LINES} and server_id is null), exists ({_LINES})
    from batches where ended_at is null order by created_at, id
"""
"""All open batches, and if each has lines that wait, and any without a result."""

WAITING = """
    select number, model from batch_lines
    where batch_id = $1 and kind is null and server_id is null {left_out} order by prefix, number limit $2
"""

CLAIM = """
    update batch_lines set server_id = $3, attempts = attempts + 1
    where batch_id = $1 and number = $2 and kind is null and (server_id = $3 or server_id is null and exists (
        select 1 from batches where id = $1 and status = 'in_progress' and expires_at > $4
    ))
"""
"""A line that the server has already stays its own: it was claimed before the batch was cancelled."""

CLAIMED = """
    select number, custom_id, attempts, data from batch_lines
    where batch_id = $1 and server_id = $2 and kind is null and number in ({numbers})
"""

FINISH = """
    update batch_lines set kind = $4, status = $5, request_id = $6, input_tokens = $7, cached_tokens = $8,
        output_tokens = $9, reasoning_tokens = $10, bytes = $11, data = $12, server_id = null
    where batch_id = $1 and number = $2 and server_id = $3 and kind is null
"""

RELEASE_LINE = """
    update batch_lines set server_id = null where batch_id = $1 and number = $2 and server_id = $3 and kind is null
"""

RELEASE_LINES = """
    update batch_lines set server_id = null, attempts = attempts - 1 where server_id = $1 and kind is null
"""
"""A server that stops has begun its lines in vain, for which they are not to blame."""

RELEASE_BATCHES = "update batches set server_id = null where server_id = $1 and ended_at is null"

CLOSE = """
    update batch_lines set kind = $2, bytes = 0, data = $4
    where batch_id = $1 and kind is null and server_id is null and (prefix, number) <= (
        select prefix, number from (
            select prefix, number from batch_lines where batch_id = $1 and kind is null and server_id is null
            order by prefix, number limit $3
        ) as first order by prefix desc, number desc limit 1
    )
"""
"""Gives the first lines that wait a result without an answer.

They are compared with one row: PostgreSQL, without statistics of a new batch, would look a list up for each line again.
"""

CLAIM_VALIDATION = """
    update batches set server_id = $2 where id = $1 and status = 'validating' and (server_id is null or server_id = $2)
"""

CLAIM_END = f"""
    update batches set server_id = $2, finalizing_at = coalesce(finalizing_at, $3),
        status = case when status = 'in_progress' then 'finalizing' else status end
    where id = $1 and ended_at is null and status in ('in_progress', 'finalizing', 'cancelling')
        and (server_id is null or server_id = $2 or status = 'cancelling' and in_progress_at is null)
        and not (in_progress_at is not null and exists ({_LINES}))
"""
"""Takes a batch whose lines all have results, or one that was cancelled before it began."""

NAME_FILES = "update batches set output_file_id = $3, error_file_id = $4 where id = $1 and server_id = $2"

TOTALS = f"""
    select {", ".join(f"count(case when kind = '{count}' then 1 end)" for count in COUNTS)},
           {", ".join(f"coalesce(sum({name}), 0)" for name in TOKENS)}, coalesce(sum(bytes), 0)
    from batch_lines where batch_id = $1
"""

END = """
    update batches set status = $3, ended_at = $4, succeeded = $5, errored = $6, expired = $7, cancelled = $8,
        input_tokens = $9, cached_tokens = $10, output_tokens = $11, reasoning_tokens = $12, bytes = $13,
        server_id = null
    where id = $1 and server_id = $2 and ended_at is null
"""

NOTIFY = f"""
    insert into webhooks (id, response_id, owner, kind, created_at, attempts, due_at)
    select cast($2 as text), id, owner, cast($3 as text), {NOW}, 0, {NOW} from batches
    where id = $1 and api = 'openai' on conflict do nothing
"""

COUNT_WAITING = "select count(*) from batch_lines where kind is null and server_id is null"

RESULT_SIZES = """
    select number, bytes from batch_lines where batch_id = $1 and number > $2 and kind is not null
    order by number limit $3
"""

RESULTS = """
    select number, custom_id, kind, status, request_id, data from batch_lines
    where batch_id = $1 and number > $2 and number <= $3 and kind is not null order by number
"""

IS_DEAD_LINE = f"server_id is not null and server_id <> $1 and {of_dead_server('batch_lines')}"

IS_DEAD_BATCH = f"server_id is not null and server_id <> $1 and ended_at is null and {of_dead_server('batches')}"

HAS_DEAD = f"""
    select 1 from batch_lines where {IS_DEAD_LINE}
    union all
    select 1 from batches where {IS_DEAD_BATCH}
    limit 1
"""

RECOVER = (
    f"update batch_lines set server_id = null, attempts = attempts + 9 where {IS_DEAD_LINE}",
    f"delete from batches where {IS_DEAD_BATCH} and not ({IS_SHOWN})",
    f"update batches set server_id = null where {IS_DEAD_BATCH}",
)
"""A batch of Anthropic's API whose server has died among its lines is deleted: its client knows nothing of it."""

EXPIRED = "select id from batches where ended_at < $1 order by ended_at limit {most}"

FORGET = "delete from batches where id = $1 and ended_at < $2"

LEFT = """
    select batch_id from batch_lines
    where not exists (select 1 from batches where batches.id = batch_id and (ended_at is null or api = 'anthropic'))
    group by batch_id limit {most}
"""
"""The batches whose lines have no reader: they are gone, or have their results in files."""

DROP = """
    delete from batch_lines
    where batch_id = $1 and number <= (
        select max(number) from (select number from batch_lines where batch_id = $1 order by number limit $2) as first
    ) and not exists (select 1 from batches where id = $1 and (ended_at is null or api = 'anthropic'))
"""
