"""The tables of vector stores, and the statements on them."""

from __future__ import annotations

from penstock.services.store.database import BATCH
from penstock.services.store.heartbeats import of_dead_server
from penstock.services.store.migrations import Each, numbered

TABLES: tuple[str | Each, ...] = (
    numbered(
        """
        create table vector_stores (
            number {number},
            id text not null unique,
            owner text not null,
            name text not null,
            metadata text not null,
            created_at double precision not null,
            active_at double precision not null,
            expires_days bigint
        )
        """
    ),
    "create index vector_stores_of_owner on vector_stores (owner, number)",
    "create index vector_stores_expiring on vector_stores (active_at) where expires_days is not null",
    numbered(
        """
        create table vector_store_files (
            number {number},
            vector_store_id text,
            file_id text not null,
            batch_id text,
            owner text not null,
            filename text not null,
            created_at double precision not null,
            attributes text not null,
            chunk_tokens bigint not null,
            overlap_tokens bigint not null,
            status text not null,
            error text,
            bytes bigint not null,
            chunks bigint not null,
            work text,
            server_id text,
            unique (vector_store_id, file_id)
        )
        """
    ),
    "create index vector_store_files_of_store on vector_store_files (vector_store_id, number)",
    "create index vector_store_files_of_batch on vector_store_files (batch_id, number) where batch_id is not null",
    "create index vector_store_files_of_file on vector_store_files (file_id)",
    "create index vector_store_files_to_do on vector_store_files (owner, number) where work is not null",
    "create index vector_store_files_bytes on vector_store_files (owner, bytes)",
    """
    create table vector_store_attributes (
        file bigint not null,
        name text not null,
        words bytea,
        number double precision,
        flag bigint,
        primary key (file, name)
    )
    """,
    """
    create table vector_store_batches (
        id text primary key,
        vector_store_id text not null,
        created_at double precision not null,
        is_cancelled bigint not null
    )
    """,
    "create index vector_store_batches_of_store on vector_store_batches (vector_store_id)",
    "create table vector_store_vectors (first bigint primary key, count bigint not null, data bytea not null)",
    "alter table vector_store_files add column replaces bigint",
    "create index vector_store_files_replacing on vector_store_files (replaces) where replaces is not null",
)
"""The vector stores, the files in them, and the vectors of their chunks, whose texts stand in ``vector_store_chunks``.

A file that has left its store has no ``vector_store_id`` any more, but chunks that a server still has to delete.
``work`` is what is left to do with a file, and ``server_id`` the server that does it.  The number of a chunk is that of
its file, shifted, and its place in the file.  ``replaces`` is the number of the file in a vector store whose place
another takes once it is read: the same file, read anew.
"""

PLACES = 20
"""Bits of a chunk's number for its place in the file; the number of the file is in the others."""

DAY = 86400.0
"""Seconds of a day."""

STORE_COLUMNS = "number, id, name, metadata, created_at, active_at, expires_days"

FILE_COLUMNS = (
    "number, vector_store_id, file_id, filename, created_at, attributes, chunk_tokens, overlap_tokens, status, error, "
    "bytes, chunks"
)

CREATE = """
    insert into vector_stores (id, owner, name, metadata, created_at, active_at, expires_days)
    values ($1, $2, $3, $4, $5, $5, $6)
"""

UPDATE = "update vector_stores set name = $3, metadata = $4, expires_days = $5 where id = $1 and owner = $2"

TOUCH = "update vector_stores set active_at = $3 where id = $1 and owner = $2 and active_at < $4"

DELETE = "delete from vector_stores where id = $1 and owner = $2"

LEAVE = """
    update vector_store_files set vector_store_id = null, batch_id = null, bytes = 0, work = 'delete'
    where vector_store_id = $1
"""

ORPHANED = f"{LEAVE} and not exists (select 1 from vector_stores where id = $1)"

DELETE_BATCHES = """
    delete from vector_store_batches
    where vector_store_id = $1 and not exists (select 1 from vector_stores where id = $1)
"""

COUNTS = """
    select {column}, status, count(*), sum(bytes), sum(chunks) from vector_store_files
    where {column} in ({names}) group by {column}, status
"""

ADD = """
    insert into vector_store_files (vector_store_id, file_id, batch_id, owner, filename, created_at, attributes,
                                    chunk_tokens, overlap_tokens, status, bytes, chunks, work)
    select id, cast($2 as text), cast($3 as text), owner, cast($4 as text), cast($5 as double precision),
           cast($6 as text), cast($7 as bigint), cast($8 as bigint), 'in_progress', 0, 0, 'read'
    from vector_stores where id = $1
    and not exists (select 1 from vector_store_files where vector_store_id = $1 and file_id = $2)
"""

IN_PLACE = "(select number from vector_store_files where vector_store_id = $1 and file_id = $2)"

GIVE_UP_REPLACEMENT = f"update vector_store_files set work = 'delete', replaces = null where replaces in {IN_PLACE}"

ADD_AGAIN = """
    update vector_store_files
    set status = 'in_progress', error = null, batch_id = coalesce($3, batch_id), filename = $4,
        attributes = coalesce(cast($5 as text), attributes),
        chunk_tokens = coalesce(cast($6 as bigint), chunk_tokens),
        overlap_tokens = coalesce(cast($7 as bigint), overlap_tokens),
        work = case when work = 'read' then 'clear' else work end
    where vector_store_id = $1 and file_id = $2
"""

ADD_REPLACEMENT = """
    insert into vector_store_files (file_id, owner, filename, created_at, attributes, chunk_tokens, overlap_tokens,
                                    status, bytes, chunks, work, replaces)
    select file_id, owner, filename, created_at, attributes, chunk_tokens, overlap_tokens,
           'in_progress', 0, 0, 'read', number
    from vector_store_files where vector_store_id = $1 and file_id = $2
"""

IS_REPLACEMENT = "number = $1 and replaces is not null"

MAKE_ROOM = f"""
    update vector_store_files
    set replaces = $1, vector_store_id = null, batch_id = null, bytes = 0, status = 'completed', work = 'delete'
    where vector_store_id = $2 and number =
        (select replaces from vector_store_files where {IS_REPLACEMENT} and status = 'completed')
"""
"""Takes a file out of its vector store, whose replacement ``$1`` is read."""

INHERIT = f"""
    update vector_store_files set
        batch_id = (select batch_id from vector_store_files as old where old.number = vector_store_files.replaces),
        attributes = (select attributes from vector_store_files as old where old.number = vector_store_files.replaces)
    where {IS_REPLACEMENT} and status = 'completed'
"""

INHERIT_ATTRIBUTES = """
    update vector_store_attributes set file = $1
    where file = (select number from vector_store_files where replaces = $1)
"""

TAKE_PLACE = f"""
    update vector_store_files set vector_store_id = $2, replaces = null
    where {IS_REPLACEMENT} and exists (select 1 from vector_store_files as old where old.replaces = $1)
"""

LEFT_OVER = f"update vector_store_files set work = 'delete', replaces = null where {IS_REPLACEMENT}"
"""Deletes a replacement whose place is gone; that of one that has taken its place is null by now."""

FAIL_REPLACED = """
    update vector_store_files set status = 'failed', error = $2
    where number = (select replaces from vector_store_files where number = $1 and status = 'failed')
"""

ADD_ATTRIBUTE = """
    insert into vector_store_attributes (file, name, words, number, flag)
    select number, cast($3 as text), $4, cast($5 as double precision), cast($6 as bigint)
    from vector_store_files where vector_store_id = $1 and file_id = $2
"""

DELETE_ATTRIBUTES = """
    delete from vector_store_attributes
    where file in (select number from vector_store_files where vector_store_id = $1 and file_id = $2)
"""

SET_ATTRIBUTES = """
    update vector_store_files set attributes = $4 where vector_store_id = $1 and file_id = $2 and owner = $3
"""

FILE = f"""
    select {FILE_COLUMNS} from vector_store_files where vector_store_id = $1 and file_id = $2 and owner = $3
"""

LEAVE_ALL = """
    update vector_store_files set vector_store_id = null, batch_id = null, bytes = 0, work = 'delete'
    where file_id = $1 and vector_store_id is not null and not exists (select 1 from files where files.id = $1)
"""
"""Takes a file that was deleted out of all vector stores."""

GONE = f"""
    select distinct file_id from vector_store_files
    where vector_store_id is not null
    and not exists (select 1 from files where files.id = file_id and (expires_at is null or expires_at > $1))
    limit {BATCH}
"""

LEAVE_GONE = """
    update vector_store_files set vector_store_id = null, batch_id = null, bytes = 0, work = 'delete'
    where file_id = $1 and vector_store_id is not null
"""

EXPIRED = f"""
    select id from vector_stores
    where expires_days is not null and active_at + expires_days * {DAY} < $1
    and exists (select 1 from vector_store_files where vector_store_id = vector_stores.id) limit {BATCH}
"""

ADD_BATCH = """
    insert into vector_store_batches (id, vector_store_id, created_at, is_cancelled)
    select cast($1 as text), id, cast($3 as double precision), 0 from vector_stores where id = $2
"""

FIND_BATCH = """
    select batches.created_at, is_cancelled from vector_store_batches as batches
    join vector_stores on vector_stores.id = batches.vector_store_id
    where batches.id = $1 and vector_store_id = $2 and owner = $3
"""

CANCEL_BATCH = "update vector_store_batches set is_cancelled = 1 where id = $1 and vector_store_id = $2"

CANCEL_REPLACEMENTS = """
    update vector_store_files set work = 'delete', replaces = null
    where replaces in (
        select number from vector_store_files where batch_id = $1 and vector_store_id = $2 and status = 'in_progress'
    )
"""

CANCEL_REPLACED = """
    update vector_store_files set status = 'cancelled'
    where batch_id = $1 and vector_store_id = $2 and status = 'in_progress' and (work is null or work = 'clear')
"""

CANCEL_FILES = """
    update vector_store_files set status = 'cancelled', work = 'clear'
    where batch_id = $1 and vector_store_id = $2 and work = 'read'
"""

# Work

FREE = f"(server_id is null or server_id = $1 or {of_dead_server('vector_store_files')})"

WAITING = f"""
    select owner, number from (
        select owner, number, row_number() over (partition by owner order by number) as place
        from vector_store_files where work is not null and {FREE}
    ) as waiting where place <= $3 order by place, number limit {BATCH}
"""

CLAIM = f"update vector_store_files set server_id = $1 where number = $3 and work is not null and {FREE}"

STORE_OF_REPLACED = """
    coalesce(vector_store_id, (
        select old.vector_store_id from vector_store_files as old where old.number = vector_store_files.replaces
    ))
"""

CLAIMED = f"""
    select owner, work, {FILE_COLUMNS.replace("vector_store_id", STORE_OF_REPLACED)} from vector_store_files
    where number = $1 and server_id = $2
"""

READING = "from vector_store_files where number = $1 and server_id = $2 and work = 'read'"

INDEXED = 3
"""About the bytes that a byte of a chunk takes on disk, with the index of its terms."""

ADD_CHUNK = f"""
    insert into vector_store_chunks (number, text, fresh, terms)
    select cast($3 as bigint), cast($4 as text), cast($5 as bigint), cast($6 as text) {READING}
"""

ADD_VECTORS = f"""
    insert into vector_store_vectors (first, count, data)
    select cast($3 as bigint), cast($4 as bigint), $5 {READING}
"""

COMPLETE = """
    update vector_store_files
    set status = 'completed', work = null, server_id = null, bytes = $3, chunks = $4, error = null
    where number = $1 and server_id = $2 and work = 'read'
"""

FAIL = """
    update vector_store_files set status = 'failed', work = 'clear', error = $3
    where number = $1 and server_id = $2 and work = 'read'
"""

CLEARED = """
    update vector_store_files set work = null, server_id = null
    where number = $1 and server_id = $2 and work = 'clear'
"""

DELETED = "delete from vector_store_files where number = $1 and server_id = $2 and work = 'delete'"

FORGET_ATTRIBUTES = """
    delete from vector_store_attributes
    where file = $1 and not exists (select 1 from vector_store_files where number = $1)
"""

RELEASE = "update vector_store_files set server_id = null where number = $1 and server_id = $2"

LAST_CHUNK = "select max(number) from vector_store_chunks where number >= $1 and number < $2"

DELETE_CHUNKS = "delete from vector_store_chunks where number >= $1 and number < $2"

DELETE_VECTORS = "delete from vector_store_vectors where first >= $1 and first < $2"

VECTORS = f"""
    select files.number, count, data from vector_store_files as files
    join vector_store_vectors on first >= files.number << {PLACES} and first < (files.number + 1) << {PLACES}
    where files.number in ({{numbers}}) order by first
"""

TEXTS = """
    select text, fresh from vector_store_chunks where number >= $1 and number < $2 order by number
"""
