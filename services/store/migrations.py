"""The tables, and the statements that upgrade the database of an older penstock to them.

A database stores how many statements of its list (`POSTGRES` or `SQLITE`) it has executed; opening it executes the
rest.  So new statements are only ever appended to a list.  None is removed as long as a commit of the main branch could
have left a database that lacks it: the number of statements is the version of such a database.  The parts of the store
that packages bring along (`StorePart`) have lists of their own, and a database stores the number of each by its name.

During a rolling upgrade the servers of two releases share a store.  So a database also stores the version from which on
a penstock can use it: the last release's, as long as the new statements only add tables, indexes, and columns that are
null or have a default.  A release may drop only what its last release does not use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from string import punctuation
from typing import TypeAlias

from penstock.pipeline.errors import StoreFailed

_PUNCTUATION = "''" + punctuation.replace("'", "'" * 4) + "''"
"""Parts of terms of SQLite, in quotes within quotes: only spaces are between terms."""

_TABLES = (
    """
    create table responses (
        id text primary key,
        owner text not null,
        previous_response_id text,
        conversation_id text,
        position bigint not null,
        created_at double precision not null,
        ended_at double precision,
        status text not null,
        server_id text,
        logged bigint not null,
        response text not null,
        input text not null,
        tokens bytea not null,
        request text
    )
    """,
    "create index responses_continued on responses (previous_response_id) where previous_response_id is not null",
    "create index responses_of_conversation on responses (conversation_id) where conversation_id is not null",
    "create index responses_running on responses (created_at) where ended_at is null",
    "create index responses_ended on responses (ended_at) where ended_at is not null",
    "create index responses_logged on responses (ended_at) where ended_at is not null and logged = 1",
    """
    create table events (
        response_id text not null,
        first bigint not null,
        count bigint not null,
        data bytea not null,
        primary key (response_id, first)
    )
    """,
    """
    create table items (
        owner text not null,
        id text not null,
        stored_at double precision not null,
        response_id text not null,
        primary key (owner, id, stored_at, response_id)
    )
    """,
    "create index items_of_response on items (response_id)",
    """
    create table conversations (
        id text primary key,
        owner text not null,
        created_at bigint not null,
        metadata text not null,
        length bigint not null,
        response_id text,
        server_id text
    )
    """,
    "create index conversations_locked on conversations (response_id) where response_id is not null",
    """
    create table conversation_items (
        conversation_id text not null,
        position bigint not null,
        id text,
        stored_at double precision not null,
        item text not null,
        tokens bytea
    )
    """,
    "create index items_of_conversation on conversation_items (conversation_id, position)",
    "create index conversation_items_by_id on conversation_items (id) where id is not null",
    """
    create table servers (
        id text primary key,
        url text not null,
        machine text not null,
        beat_at double precision not null
    )
    """,
)
"""The tables of both databases.  A response is ``logged`` as long as its events are kept."""

_RESULTS = ("alter table responses add column results text", "alter table conversation_items add column result text")
"""The columns for tool call results, as JSON; null if there are none."""

_ITEM_LOOKUP = (
    "drop index conversation_items_by_id",
    "create index conversation_items_by_id on conversation_items (id, conversation_id) where id is not null",
)
"""Finds an item in one conversation, also if others have an item with the same id."""

_SECRETS = ("create table secrets (name text primary key, value bytea not null)",)
"""Random keys that all servers of the store share."""

_FIRST_TABLES = (
    """
    create table responses (
        id text primary key,
        previous_response_id text,
        created_at integer not null,
        status text not null,
        response text not null,
        input text not null
    )
    """,
    "create table items (id text, response_id text, primary key (id, response_id)) without rowid",
    "create index items_of_response on items (response_id)",
    """
    create trigger response_stored after insert on responses begin
        delete from items where response_id = new.id;
        insert into items
            select json_extract(value, '$.id'), new.id from json_each(new.input)
            union select json_extract(value, '$.id'), new.id from json_each(new.response, '$.output');
    end
    """,
    """
    create trigger response_deleted after delete on responses begin
        delete from items where response_id = old.id;
    end
    """,
    """
    insert into items
        select json_extract(value, '$.id'), responses.id from responses, json_each(input)
        union select json_extract(value, '$.id'), responses.id from responses, json_each(response, '$.output')
    """,
)
"""The first SQLite schema, before owners, events and conversations."""

_SET_ASIDE = (
    "drop trigger response_stored",
    "drop trigger response_deleted",
    "drop table items",
    "alter table responses rename to first_responses",
)
"""Frees the names of the first SQLite tables for `_TABLES`."""

_BROUGHT_OVER = (
    """
    insert into responses
        (id, owner, previous_response_id, position, created_at, ended_at, status, logged, response, input, tokens)
        select id, '', previous_response_id, 0, created_at, created_at, status, 0, response, input, x'80'
        from first_responses order by rowid
    """,
    """
    insert into items (owner, id, stored_at, response_id)
        select '', json_extract(value, '$.id'), created_at, responses.id
        from responses, json_each(input) where json_extract(value, '$.id') is not null
        union select '', json_extract(value, '$.id'), created_at, responses.id
        from responses, json_each(response, '$.output')
    """,
    "drop table first_responses",
)
"""Copies the responses of the first SQLite schema; ``x'80'`` is an empty MessagePack map."""

_POSTGRES_0_1 = (*_TABLES, *_RESULTS, *_ITEM_LOOKUP, *_SECRETS)
_SQLITE_0_1 = (*_FIRST_TABLES, *_SET_ASIDE, *_TABLES, *_BROUGHT_OVER, *_RESULTS, *_ITEM_LOOKUP, *_SECRETS)
"""The statements of release 0.1.0, whose code refuses a database with a higher version than theirs."""

_ALLOWANCES = (
    """
    create table allowances (
        owner text not null,
        kind text not null,
        level double precision not null,
        at double precision not null,
        primary key (owner, kind)
    )
    """,
)
"""The ``level`` of each allowance of an API key, ``at`` a time."""

_PLACES = (
    """
    create table places (
        owner text not null,
        kind text not null,
        server_id text not null,
        held bigint not null,
        primary key (owner, kind, server_id)
    )
    """,
)
"""The places that each server holds for an API key."""

_BYTES = (
    "alter table responses add column bytes bigint not null default 0",
    "create index responses_bytes on responses (owner, bytes)",
    "alter table conversations add column bytes bigint not null default 0",
    "create index conversations_bytes on conversations (owner, bytes)",
)
"""The bytes of a response with its events, and of a conversation with its items; 0 if an older release wrote it."""

_SINCE_0_1 = (
    "create table api_keys (digest text primary key, words text not null, made_at double precision not null)",
    *_ALLOWANCES,
    *_PLACES,
    *_BYTES,
)
"""The statements of release 0.2.0, for both databases; 0.1.0 goes on without knowing what they add."""


@dataclass(frozen=True)
class Each:
    """Statements that each database has in its own form."""

    postgres: tuple[str, ...]
    sqlite: tuple[str, ...]


Statements: TypeAlias = Sequence[str | Each]


def numbered(table: str) -> Each:
    """Return the statement for a table whose rows are numbered by the database; no number comes twice."""
    return Each(
        (table.format(number="bigint generated always as identity primary key"),),
        (table.format(number="integer primary key autoincrement"),),
    )


_CHUNKS = """
    create table vector_store_chunks (
        number {number},
        text text not null,
        fresh bigint not null,
        terms text not null
    )
"""

_SEARCHED = Each((_CHUNKS.format(number="bigint primary key"),), (_CHUNKS.format(number="integer primary key"),))

_TERMS = Each(
    (
        """
        create index vector_store_terms on vector_store_chunks using gin (string_to_array(terms, ' '))
        with (gin_pending_list_limit = 512)
        """,
    ),
    (
        f"""
        create virtual table vector_store_terms using fts5 (
            terms, content = 'vector_store_chunks', content_rowid = 'number', detail = 'none', columnsize = 0,
            tokenize = 'ascii tokenchars {_PUNCTUATION}'
        )
        """,
        """
        create trigger vector_store_chunk_added after insert on vector_store_chunks begin
            insert into vector_store_terms (rowid, terms) values (new.number, new.terms);
        end
        """,
        """
        create trigger vector_store_chunk_deleted after delete on vector_store_chunks begin
            insert into vector_store_terms (vector_store_terms, rowid, terms)
            values ('delete', old.number, old.terms);
        end
        """,
    ),
)
"""Chunks of texts, and the terms by which they are found.

A text is ``fresh`` from that character on, after what it repeats of the chunk before.  SQLite finds terms by a table of
FTS5, which holds no positions, and PostgreSQL by an index over an array.  These tables stand here because each database
has a search of its own (`with_term` of ``database.py``).
"""

_WEBHOOKS = (
    """
    create table webhooks (
        id text primary key,
        response_id text not null,
        owner text not null,
        kind text not null,
        created_at double precision not null,
        attempts bigint not null,
        due_at double precision not null
    )
    """,
    "create index webhooks_due on webhooks (due_at)",
)
"""The notifications of ended responses that are not delivered yet, and the time at which each is tried next."""


_MOVED = "-- "


def _moved(part: str, count: int) -> tuple[str, ...]:
    """Return the places of statements that stand with a part of the store now, so that no number changes.

    They are not executed.  What a database has executed at these places, it has executed of the part.
    """
    return (f"{_MOVED}{part}",) * count


_SINCE_0_2: Statements = (
    """
    create table approvals (
        owner text not null,
        id text not null,
        response_id text not null,
        used_at double precision not null,
        primary key (owner, id)
    )
    """,
    *_moved("files", 6),
    *_moved("containers", 2),
    *_moved("vector_stores", 12),
    _SEARCHED,
    *_moved("vector_stores", 1),
    _TERMS,
    *_WEBHOOKS,
    "alter table responses add column model text",
    *_moved("vector_stores", 2),
    "alter table responses add column writer text",
    "alter table conversation_items add column writer text",
    "alter table responses add column line text",
)
"""The statements since release 0.2.0, for both databases, beginning with the approvals of MCP calls that were used.

The ``model`` of a response is the one that its request names, and the ``writer`` of tokens the served name of the one
that generated them; both are null if an older release wrote the row.  The ``line`` is that of a batch, or null.
"""

EXECUTED_TABLES = (
    "create table if not exists schema_statements (executed bigint not null)",
    "create table if not exists schema_parts (name text primary key, executed bigint not null)",
)
EXECUTED = "select max(executed) from schema_statements"
EXECUTED_OF_PARTS = "select name, executed from schema_parts"


@dataclass(frozen=True)
class Schema:
    """The statements that bring a database from empty to this penstock's tables, without those of its parts."""

    statements: tuple[str, ...]
    usable_from: int
    """The number of statements that a penstock must know to use a database that has executed all of these."""
    own: Callable[[Each], tuple[str, ...]]
    """Returns the form of statements that this database has."""

    def upgrade(
        self, usable_from: int, executed: int | None, of_parts: Mapping[str, int], parts: Mapping[str, Statements]
    ) -> tuple[tuple[str, ...], int]:
        """Return the statements that upgrade a database, and its new ``usable_from``.

        ``executed`` is the result of `EXECUTED`: None in a database of 0.1.0, which has executed ``usable_from``.
        ``of_parts`` is that of `EXECUTED_OF_PARTS`, and ``parts`` are the statements of the parts that are here.  A
        newer penstock's numbers are not lowered.  Raises `StoreFailed` if that has made the database unusable.
        """
        known = len(self.statements)
        if usable_from > known:
            raise StoreFailed(
                f"The store has schema version {usable_from}, and this penstock knows versions up to {known}: "
                "run the penstock that wrote it, or a newer one."
            )
        executed = usable_from if executed is None else executed
        record = f"insert into schema_statements values ({max(executed, known)})"
        done = {**Counter(part for part in map(_part, self.statements[:executed]) if part), **of_parts}
        statements = (
            *(statement for statement in self.statements[executed:] if not _part(statement)),
            "delete from schema_statements",
            record,
            *self._upgrade_parts(done, parts),
        )
        return statements, max(usable_from, self.usable_from)

    def _upgrade_parts(self, done: Mapping[str, int], parts: Mapping[str, Statements]) -> Iterator[str]:
        """Yield the statements that are left of the parts.

        The number of each is recorded, also of a part that is not here, whose places count once only.
        """
        moved = {part: () for part in map(_part, self.statements) if part}
        for name, statements in {**moved, **parts}.items():
            known, executed = flat(statements, self.own), done.get(name, 0)
            yield from known[executed:]
            yield f"delete from schema_parts where name = '{name}'"
            yield f"insert into schema_parts (name, executed) values ('{name}', {max(executed, len(known))})"


def _part(statement: str) -> str:
    """Return the part whose place this is in the list, or an empty string."""
    return statement.removeprefix(_MOVED) if statement.startswith(_MOVED) else ""


def flat(statements: Statements, own: Callable[[Each], tuple[str, ...]]) -> tuple[str, ...]:
    """Return the statements in the form of one database."""
    return tuple(chain.from_iterable((entry,) if isinstance(entry, str) else own(entry) for entry in statements))


def _schema(statements_of_0_1: tuple[str, ...], own: Callable[[Each], tuple[str, ...]]) -> Schema:
    return Schema((*statements_of_0_1, *_SINCE_0_1, *flat(_SINCE_0_2, own)), len(statements_of_0_1), own)


POSTGRES = _schema(_POSTGRES_0_1, lambda each: each.postgres)
SQLITE = _schema(_SQLITE_0_1, lambda each: each.sqlite)
