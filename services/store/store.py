"""The store: responses, their events and conversations, each with an owner, and the parts that packages bring along.

It outlives all runs and servers.

A run only queues its changes, and never waits.  A request waits until its changes are durable.  A read sees every
change that this server queued before it.  Objects of another owner are not found, as if they did not exist.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import STORES_NOTHING, RunInterrupted, StoreFailed, StreamExpired, UnsupportedParameter
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.logs import Seldom
from penstock.pipeline.protocol.history import History, opening
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.light import are_light
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings import older
from penstock.pipeline.secret import unread
from penstock.pipeline.tasks import LARGE_BYTES, MANY_VALUES, apart
from penstock.services.lru_cache import LruCache
from penstock.services.recent_calls import RecentCalls
from penstock.services.runs.event_log import Block
from penstock.services.store import rows
from penstock.services.store import statements as run_sql
from penstock.services.store.approvals import StoredApprovals
from penstock.services.store.conversations import StoredConversations
from penstock.services.store.database import (
    KEPT_BYTES,
    NOW,
    Database,
    Row,
    Statement,
    Value,
    batches,
    placeholders,
    size_of,
)
from penstock.services.store.heartbeats import STALE, Servers
from penstock.services.store.item_lookup import find_items, find_results
from penstock.services.store.key_limits import StoredAllowances, StoredReservations
from penstock.services.store.maintenance import claim, name_model, orphaned_models, orphans, restart, sweep
from penstock.services.store.parts import FileShelf, RemembersOwners, StorePart, installed_parts
from penstock.services.store.stored import Orphan, Report, Server, StoredConversation, StoredResponse
from penstock.services.store.stored_keys import StoredKeys
from penstock.services.store.webhooks import StoredWebhooks
from penstock.services.store.writer import BULK, Statements, StoreContext
from penstock.services.use import Names, Use

__all__ = ["Orphan", "Report", "Server", "Store", "StoredConversation", "StoredResponse"]

Part = TypeVar("Part", bound=StorePart)

_log = logging.getLogger(__name__)

_GET = f"select {rows.RESPONSE_COLUMNS} from responses where id = $1 and owner = $2"

_CHAIN = """
    with recursive chain (id, previous_response_id, age) as (
        select id, previous_response_id, 0 from responses where id = $1 and owner = $2
        union all
        select older.id, older.previous_response_id, age + 1
        from chain join responses as older on older.id = chain.previous_response_id and older.owner = $2
    )
    select id from chain order by age
"""

_BLOCKS = "select first, count, data from events where response_id = $1 order by first"

_REQUEST = "select request from responses where id = $1 and server_id = $2 and request is not null"

_LOGGED = "select logged from responses where id = $1"

_IN_BACKGROUND = """
    select count(*) from responses
    where ended_at is null and request is not null and (owner = $1 or cast($1 as text) is null)
"""

_OWNED = ("responses", "conversations")
"""The tables whose rows count as bytes of their owners, as those of the parts do."""

_BYTES = "select coalesce(sum(bytes), 0) from {table} where bytes > 0 {own}"

_RESOLVED_REQUEST = msgspec.json.Decoder(ResolvedRequest, dec_hook=unread)

_KEEP_RANDOM = "insert into secrets (name, value) values ($1, $2) on conflict do nothing"

_RANDOM = "select value from secrets where name = $1"

_DELETE = (
    "delete from responses where id = $1 and owner = $2",
    "delete from events where response_id = $1 and not exists (select 1 from responses where id = $1)",
    "delete from items where response_id = $1 and not exists (select 1 from responses where id = $1)",
)


class Store:
    """The storage of responses and conversations, and of what the parts have.

    Without ``keeps`` there are none, and nothing may be stored.  An operation that fails raises `StoreFailed`, as does
    every operation after `close`.  The responses that this server runs carry its id.  After ``stale`` seconds without a
    heartbeat, other servers may take them over.  If the store ``notifies``, the end of a background response leaves a
    notification in ``webhooks``.
    """

    def __init__(self, database: Database, stale: float = STALE, *, keeps: bool = True, notifies: bool = False) -> None:
        self.keeps = keeps
        self._notifies = notifies
        self._database = database
        self.context = StoreContext(database, stale)
        self.writer = self.context.writer
        self.conversations = StoredConversations(self.context)
        self.servers = Servers(self.context)
        self.keys = StoredKeys(self.context)
        self.allowances = StoredAllowances(self.context)
        self.reservations = StoredReservations(self.context)
        self.approvals = StoredApprovals(self.context)
        self.webhooks = StoredWebhooks(self.context)
        self._unnoted = Seldom()
        self.names: Names | None = None
        """The names of the keys, for what is used."""
        self.recent_calls = RecentCalls()
        self._known: LruCache[StoredResponse] = LruCache(KEPT_BYTES)

    @cached_property
    def parts(self) -> Mapping[type[StorePart], StorePart]:
        """The parts of the store that packages bring along."""
        return {kind: kind(self.context) for kind in installed_parts()}

    def part(self, kind: type[Part]) -> Part:
        """Return the part of a class; raises `LookupError` if its package is not installed."""
        part = self.parts[kind]
        assert isinstance(part, kind)
        return part

    @cached_property
    def files(self) -> FileShelf | None:
        """The part that keeps files; None if no package brings one."""
        return next((part for part in self.parts.values() if isinstance(part, FileShelf)), None)

    @cached_property
    def _remembering(self) -> Sequence[RemembersOwners]:
        return [part for part in self.parts.values() if isinstance(part, RemembersOwners)]

    def words_of(self, owner: str) -> str | None:
        """Return the words of an owner that a part remembers; None if none does."""
        for part in self._remembering:  # several times in each request
            if (words := part.words_of(owner)) is not None:
                return words
        return None

    @property
    def server_id(self) -> str:
        return self.context.server_id

    @property
    def is_degraded(self) -> bool:
        """True if the last write found the database unavailable, or the current one is slow."""
        return self.writer.is_degraded

    @property
    def backlog(self) -> int:
        return self.writer.backlog

    def check(self) -> None:
        """Raise `StoreFailed` if too many bytes wait to be written."""
        self.writer.check()

    def check_keeps(self, what: str) -> None:
        """Raise `UnsupportedParameter` if nothing is stored, such as ``files``."""
        if not self.keeps:
            raise UnsupportedParameter(f"This server has no {what}.{STORES_NOTHING}")

    async def check_room(self, size: int) -> None:
        """Raise `DiskFull` if a body of this size is large, and would fill the disk; small ones use the reserve."""
        if size > BULK and self.keeps:
            async with self.context.room_for(size):
                pass

    async def open(self) -> None:
        """Connect, and bring the schema up to date; raises `StoreFailed` if that is not possible."""
        await self._database.open()

    async def close(self) -> None:
        """Try once more to write the queued changes, then close the database.  Closing twice is harmless."""
        await self.writer.close()
        await self._database.close()

    async def clock(self) -> float | None:
        """Return the time of the database, in seconds since 1970; None if nothing is kept."""
        for (now,) in await self.context.read(f"select {NOW}"):
            return float(now)
        return None

    async def secret(self, name: str) -> bytes:
        """Return a random secret of 32 bytes, the same for all servers of this store; the first one makes it.

        If the store keeps nothing, each server has its own.
        """
        made = secrets.token_bytes(32)
        await self.writer.carry_out([Statement(_KEEP_RANDOM, (name, made))])
        for (kept,) in await self.context.read(_RANDOM, name):
            return bytes(kept)
        return made

    # Runs: only `accept` waits for the database

    def begin(self, stored: StoredResponse) -> asyncio.Future[None]:
        """Store a response that this server begins to run, unless it is stored already.

        The future is done when it is durable.
        """
        return self._queue(stored, partial(self._begun, stored, None, time.time()))

    async def accept(self, stored: StoredResponse, conversation: ResolvedRequest) -> None:
        """Store a response that this server is going to run, durably, with all that is needed to run it.

        Secrets are not stored: the server that runs it must get them from elsewhere.
        """
        begun = partial(self._begun, stored, conversation, time.time())
        try:
            await self.writer.carry_out(begun, *_keys(stored.response))
        except StoreFailed:  # the commit may have succeeded before the connection was lost
            self._queue(stored, [Statement(sql, (stored.response.id, self.server_id)) for sql in run_sql.WITHDRAWAL])
            raise

    def start(self, response: Response) -> asyncio.Future[None]:
        """Record that a queued response is running; the future is done when that is durable."""
        started = (response.id, response.status, rows.to_json(response), self.server_id)
        return self.writer.queue((Statement(run_sql.START, started),), response.id)

    def append(self, response_id: str, block: Block) -> asyncio.Future[None]:
        """Store a block of a run's events; the future is done when it is durable."""
        return self.writer.queue((self._appended(response_id, block),), response_id)

    def end(
        self, stored: StoredResponse, block: Block | None, use: Callable[[], Use] | None = None
    ) -> asyncio.Future[None]:
        """Store an ended response and its last events, add its items to its conversation, and release the conversation.

        Items are added only if the response is completed or incomplete.  The parts note what ``use`` returns
        with it.  The future is done when all is durable.
        """
        return self._queue(stored, partial(self._at_the_end, stored, block, time.time(), use))

    def used(self, use: Use | Callable[[], Use]) -> asyncio.Future[None] | None:
        """Have the parts note what an answer has used that is not stored; the future is done when that is durable.

        A function that makes a ``use`` of much is called in a thread.  Returns None if no part notes it, or if too many
        bytes wait to be written.
        """
        if not self.keeps:
            return None
        statements: Statements = (lambda: self.statements_of(use())) if callable(use) else self.statements_of(use)
        if statements == ():
            return None
        try:
            self.writer.check()
        except StoreFailed as error:
            self._unnoted.warn(_log, "use", f"The use of an answer that is not stored is lost: {error}")
            return None
        return self.writer.queue(statements)

    def statements_of(self, use: Use, response_id: str | None = None) -> Sequence[Statement]:
        """Return the statements by which the parts note what an answer has used (see `StorePart.used`)."""
        if self.names and not use.key_name:  # another process began the response, and has not stored the name
            use = replace(use, key_name=self.names.title(use.owner), team=use.team or self.names.team(use.owner))
        return tuple(chain.from_iterable(part.used(use, response_id) for part in self.parts.values()))

    def release(self, response_id: str) -> None:
        """Let any server run a response that is still queued."""
        self.writer.queue((Statement(run_sql.RELEASE, (response_id, self.server_id)),), response_id)

    def _queue(self, stored: StoredResponse, statements: Statements) -> asyncio.Future[None]:
        response = stored.response
        if callable(statements) and not response.tools and are_light(stored.items, response.instructions):
            statements = statements()
        return self.writer.queue(statements, *_keys(response))

    # The statements of a response, which the queue builds in a thread

    def _begun(self, stored: StoredResponse, request: ResolvedRequest | None, now: float) -> Iterator[Statement]:
        response, origin, read = stored.response, stored.origin, rows.to_json(stored.input)
        row: tuple[Value, ...] = (
            response.id,
            origin.owner,
            response.previous_response_id,
            _conversation_id(response),
            origin.position,
            now,
            response.status,
            self.server_id,
            rows.to_json(response),
            read,
            None if request is None else rows.to_json(request),
            rows.tokens_column(stored.tokens),
            rows.octets(read),
            rows.model_column(response.model),
            origin.line or None,
        )
        yield Statement(run_sql.BEGIN, row)
        yield from self._indexed(response.id, stored.input, now)

    def _at_the_end(
        self, stored: StoredResponse, block: Block | None, now: float, use: Callable[[], Use] | None
    ) -> Iterator[Statement]:
        response = stored.response
        if block is not None:
            yield self._appended(response.id, block)
        yield from self._indexed(response.id, response.output, now)
        if response.conversation is not UNSET:
            yield from self._added(stored, response.conversation.id, now)
        if self._notifies:
            notified = (response.id, _notification_id(response), f"response.{response.status}", self.server_id)
            yield Statement(run_sql.NOTIFY, notified)
        if use is not None:
            yield from self.statements_of(use(), response.id)
        yield self._ended(stored, now)

    def _indexed(self, response_id: str, items: Iterable[Item], now: float) -> Iterator[Statement]:
        for name in rows.known_ids(items):
            yield Statement(run_sql.INDEX, (response_id, name, now, self.server_id))

    def _appended(self, response_id: str, block: Block) -> Statement:
        return Statement(run_sql.APPEND, (response_id, block.first, block.count, block.data, self.server_id))

    def _added(self, stored: StoredResponse, conversation_id: str, now: float) -> Iterator[Statement]:
        """Yield the statements that add a response's items to its conversation, then release the conversation."""
        response_id = stored.response.id
        if stored.response.status in ("completed", "incomplete"):
            items = [_item_columns(stored, item) for item in stored.items]
            size = sum(rows.octets(*columns) for _, columns in items)
            yield Statement(run_sql.GROW, (conversation_id, len(items), response_id, self.server_id, size))
            for number, (item, (item_id, columns)) in enumerate(zip(stored.items, items, strict=True)):
                place = (conversation_id, len(items) - number, item_id, now)
                writer = rows.writer_column(stored) if item.id in stored.tokens else None
                yield Statement(run_sql.ADD, (*place, *columns, writer, response_id, self.server_id))
        yield run_sql.unlock(conversation_id, response_id, self.server_id)

    def _ended(self, stored: StoredResponse, now: float) -> Statement:
        response = stored.response
        columns = rows.to_json(response), rows.tokens_column(stored.tokens), rows.results_column(stored.results)
        end = (response.id, response.status, *columns, now, self.server_id, rows.octets(*columns))
        return Statement(run_sql.END, (*end, rows.writer_column(stored)))

    # Reading

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """Return the response, ended or still running; None if there is no such response."""
        for stored in await rows.decoded(await self._read(_GET, response_id, owner), rows.stored_response):
            return stored
        return None

    async def chain(self, response_id: str, owner: str) -> tuple[StoredResponse, ...]:
        """Return the response and all that it continues through ``previous_response_id``, oldest first.

        The chain begins after the nearest missing ancestor, and is empty if the response itself is missing.
        """
        ids = [name for (name,) in await self._read(_CHAIN, response_id, owner)]
        read = await self._stored(ids)
        chain: list[StoredResponse] = []
        for name in ids:
            if name not in read:  # it was deleted between the two queries
                break
            chain.append(read[name])
        return tuple(reversed(chain))

    async def _stored(self, ids: Sequence[str]) -> dict[str, StoredResponse]:
        """Return those responses that exist, by id; ended ones never change, and are kept in memory."""
        found = {name: stored for name in ids if (stored := self._known.get(name))}
        unknown = [name for name in ids if name not in found]
        for some in batches(unknown):
            query = (
                f"select id, ended_at, {rows.RESPONSE_COLUMNS} from responses where id in ({placeholders(len(some))})"
            )
            for name, stored, size, has_ended in await rows.decoded(await self.context.read(query, *some), _ended):
                found[name] = stored
                if has_ended:
                    self._known.put(name, stored, size)
        return found

    async def history(self, chain: Sequence[StoredResponse]) -> History:
        """Return the items before the next response: those of the conversation, then those of this chain."""
        before = await self._before(chain[0])
        count = len(before.items) + sum(len(stored.input) for stored in chain)
        return await apart(count > MANY_VALUES, _history, before, chain)

    async def input_items(self, response_id: str, owner: str) -> tuple[Item, ...] | None:
        """Return all items that a response has read, ending with its own input; None if there is no such response."""
        chain = await self.chain(response_id, owner)
        if not chain:
            return None
        return _items_read(await self._before(chain[0]), chain)

    async def _before(self, stored: StoredResponse) -> History:
        name, origin = _conversation_id(stored.response), stored.origin
        read = await self.conversations.items(name, origin.owner, origin.position) if name else None
        return read or History(())

    async def items(self, ids: Sequence[str], owner: str) -> dict[str, Item]:
        """Return the items with these ids, by id, from responses and conversations; missing items are left out.

        Of several items with one id, the item stored last is returned.
        """
        await self.writer.flushed()
        return await find_items(self.context, await apart(len(ids) > MANY_VALUES, rows.possible, ids), owner)

    async def results(self, ids: Sequence[str], owner: str) -> dict[str, str]:
        """Return tool call results by item id: the texts that the calls gave the model to read.

        Results stored only with a deleted response are left out.
        """
        await self.writer.flushed()
        return await find_results(self.context, await apart(len(ids) > MANY_VALUES, rows.possible, ids), owner)

    async def blocks(self, response_id: str) -> tuple[Block, ...]:
        """Return the events of a response in order; raises `StreamExpired` if they are no longer kept."""
        block_rows = await self._read(_BLOCKS, response_id)
        if not block_rows and any(not logged for (logged,) in await self._read(_LOGGED, response_id)):
            raise StreamExpired("The events of this response are no longer kept: ask for it without its stream.")
        return tuple(Block(*row) for row in block_rows)

    async def queued(self, response_id: str) -> ResolvedRequest | None:
        """Return the request of an accepted response, to run it, without secrets.

        None if the response has ended or belongs to another server.
        Raises `RunInterrupted` if this penstock cannot decode the request that another version has stored.
        """
        for (request,) in await self._read(_REQUEST, response_id, self.server_id):
            try:
                return await apart(len(request) > LARGE_BYTES, _queued_request, request)
            except StoreFailed as exc:
                raise RunInterrupted from exc
        return None

    async def has_file(self, file_id: str, owner: str) -> bool:
        """Return True if an owner has a file with this id."""
        return any([await part.has_file(file_id, owner) for part in self.parts.values()])

    async def in_background(self, owner: str | None) -> int:
        """Return the number of background responses of an owner, or of all if None, that have not ended."""
        await self.writer.flushed()
        ((count,),) = await self.context.read(_IN_BACKGROUND, owner) or ((0,),)
        return int(count)

    async def bytes_of(self, owner: str | None) -> int:
        """Return about how many bytes the responses, conversations and files of an owner take, or those of all if None.

        What this server has only queued, and what an older release has stored, does not count.
        """
        own, arguments = ("", ()) if owner is None else ("and owner = $1", (owner,))
        tables = (*_OWNED, *chain.from_iterable(part.counted for part in self.parts))
        counted = [await self.context.read(_BYTES.format(table=table, own=own), *arguments) for table in tables]
        return sum(int(count) for rows_read in counted for (count,) in rows_read)

    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete the response, its events and items durably; False if there is no such response.

        Responses that continue it stay; their chains then begin after the gap.
        """
        if not rows.can_exist(response_id):
            return False
        self._known.drop(response_id)
        first, *others = _DELETE
        forgotten = [Statement(first, (response_id, owner)), *(Statement(sql, (response_id,)) for sql in others)]
        return self.context.deleted(response_id, await self.writer.carry_out(forgotten, response_id))

    async def _read(self, sql: str, response_id: str, *arguments: Value) -> Sequence[Row]:
        if not rows.can_exist(response_id):
            return ()
        await self.writer.flushed(response_id)
        return await self.context.read(sql, response_id, *arguments)

    # Responses of other servers, and expired ones

    async def runner(self, response_id: str) -> Server | None:
        await self.writer.flushed(response_id)
        return await self.servers.runner(response_id)

    async def orphaned_models(self, *, restarts: bool) -> dict[str, int]:
        return await orphaned_models(self.context, restarts=restarts)

    async def orphans(self, unserved: Sequence[str] = (), *, restarts: bool = False) -> tuple[Orphan, ...]:
        return await orphans(self.context, unserved, restarts=restarts)

    async def name_model(self, response: Response) -> None:
        await name_model(self.context, response)

    async def recover_parts(self) -> None:
        """Have the parts take back what dead servers have left unfinished."""
        for part in self.parts.values():
            await part.recover()

    async def claim(self, orphan: Orphan) -> bool:
        return await claim(self.context, orphan)

    async def restart(self, response_id: str) -> None:
        await restart(self.context, response_id)

    async def sweep(self, keep_responses: float, keep_logs: float) -> Report:
        self._known.clear()  # what has expired, or was deleted by another server, leaves the memory too
        self.conversations.forget()
        for part in self.parts.values():
            await part.sweep()
        return await sweep(self.context, keep_responses, keep_logs)


def _ended(row: Row) -> tuple[str, StoredResponse, int, bool]:
    """Decode a row: the id of a response, the response, its size, and True if it has ended."""
    name, ended_at, *columns = row
    return name, rows.stored_response(columns), size_of(columns), ended_at is not None


def _history(before: History, chain: Sequence[StoredResponse]) -> History:
    """Return the history of a chain whose first response had read the items ``before`` it."""
    tokens, results, writers = dict(before.tokens), dict(before.results), dict(before.writers)
    for stored in chain:
        tokens |= stored.tokens
        results |= stored.results
        writers |= dict.fromkeys(stored.tokens, stored.writer)
    read, first = (*_items_read(before, chain), *chain[-1].response.output), chain[0]
    begun = opening((*before.items, *first.input), first.response.id)
    return History(read, tokens, results, opening=begun, writers=writers)


def _item_columns(stored: StoredResponse, item: Item) -> tuple[str | None, tuple[Value, ...]]:
    """Return the id of an item, if it can be looked up, and its columns in a conversation."""
    tokens = rows.token_ids_column(stored.tokens.get(item.id))
    result = rows.result_column(stored.results.get(item.id))
    return item.id if rows.can_exist(item.id) else None, (rows.to_json(item), tokens, result)


def _queued_request(text: str) -> ResolvedRequest:
    """Decode a queued request, perhaps of a server that still wrote it in the layout of recordings of format 1 or 2."""
    if (version := older.layout_of(text)) is not None:
        text = json.dumps(older.upgraded(json.loads(text), version))
    return rows.from_json(text, _RESOLVED_REQUEST)


def _items_read(before: History, chain: Sequence[StoredResponse]) -> tuple[Item, ...]:
    """Return the items that the last response of a chain has read; its first response had read those ``before`` it."""
    *older, last = chain
    return (*before.items, *(item for stored in older for item in stored.items), *last.input)


def _keys(response: Response) -> tuple[str, ...]:
    conversation_id = _conversation_id(response)
    return (response.id,) if conversation_id is None else (response.id, conversation_id)


def _conversation_id(response: Response) -> str | None:
    return None if response.conversation is UNSET else response.conversation.id


def _notification_id(response: Response) -> str:
    return f"evt_{response.id.removeprefix('resp_')}"
