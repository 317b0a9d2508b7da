"""StoredConversations: sequences of items, extended by one response at a time.

Each item has a position, which it keeps.  The column ``length`` is the position of the next item.  A transaction that
adds items first increases it; other transactions that change the conversation wait until this one is over.  A deletion
takes a position as well, so that the same length means the same items.  A response holds the conversation's lock (the
column ``response_id``) from its request until its end, when its items are added.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from penstock.pipeline.errors import ConversationLocked, ConversationNotFound, ItemNotFound
from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.history import History
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.lru_cache import LruCache
from penstock.services.store import rows
from penstock.services.store.database import (
    KEPT_BYTES,
    NOW,
    OCTETS,
    Row,
    Statement,
    Value,
    batches,
    placeholders,
    size_of,
)
from penstock.services.store.statements import unlock
from penstock.services.store.stored import StoredConversation
from penstock.services.store.writer import StoreContext

_CREATE = """
    insert into conversations (id, owner, created_at, metadata, length, bytes) values ($1, $2, $3, $4, $5, $6)
    on conflict (id) do nothing
"""

_GET = "select created_at, metadata from conversations where id = $1 and owner = $2"

_UPDATE = f"""
    update conversations set metadata = $3, bytes = bytes + $4 - {OCTETS}(metadata) where id = $1 and owner = $2
"""

_DELETE = "delete from conversations where id = $1 and owner = $2"

_DELETE_ITEMS = """
    delete from conversation_items
    where conversation_id = $1 and not exists (select 1 from conversations where id = $1)
"""

_LENGTH = "select length from conversations where id = $1 and owner = $2"

_ITEMS = """
    select position, item, tokens, result, writer from conversation_items
    where conversation_id = $1 and position >= $2 and position < $3 order by position
"""

_OWNED = """
    conversation_id = $1 and exists (select 1 from conversations where conversations.id = $1 and owner = $2)
"""

_OLDEST_FIRST = f"""
    select item from conversation_items where {_OWNED} and position > $3 order by position limit $4
"""

_NEWEST_FIRST = f"""
    select item from conversation_items where {_OWNED} and position < $3 order by position desc limit $4
"""

_PLACES = f"select min(position), max(position) from conversation_items where {_OWNED} and id = $3"

_FREE = f"""(response_id is null or (
    server_id <> $3
    and not exists (select 1 from responses where responses.id = conversations.response_id and ended_at is null)
    and not exists (select 1 from servers where servers.id = conversations.server_id
                    and beat_at >= {NOW} - cast($4 as double precision))
))"""
"""The condition of a free lock: no response holds it, or no server will ever end the response that holds it."""

_HOLD = f"""
    update conversations set response_id = case when {_FREE} then null else response_id end
    where id = $1 and owner = $2
"""
"""Clears a lock that no server will ever release, and keeps responses from locking until the transaction is over."""

_GROW = """
    update conversations set length = length + $3, bytes = bytes + $4
    where id = $1 and owner = $2 and response_id is null
"""

_ADD = """
    insert into conversation_items (conversation_id, position, id, stored_at, item)
    select id, length - cast($3 as bigint), cast($4 as text), cast($5 as double precision), cast($6 as text)
    from conversations where id = $1 and owner = $2 and response_id is null
"""

_IS_THERE = "select 1 from conversation_items where conversation_id = $1 and id = $2"

_POSITION = """(
    select max(position) from conversation_items where conversation_id = $1 and id = $2
    and exists (select 1 from conversations where conversations.id = $1 and response_id is null)
)"""
"""The position of the item to delete; null if there is none, or while a response holds the conversation."""

_NOTE_DELETION = f"""
    update conversations set length = length + 1, bytes = bytes - (
        select {OCTETS}(item) + coalesce(length(tokens), 0) + coalesce({OCTETS}(result), 0)
        from conversation_items where conversation_id = $1 and position = {_POSITION}
    )
    where id = $1 and {_POSITION} is not null
"""

_DELETE_ITEM = f"""
    delete from conversation_items where conversation_id = $1 and id = $2 and position = {_POSITION}
"""

_LOCK = f"""
    update conversations set response_id = $5, server_id = $3
    where id = $1 and owner = $2 and length = $6 and {_FREE}
"""

_END = 2**62
"""A position after the last item of any conversation."""


class _StoredItem(NamedTuple):
    position: int
    item: Item
    tokens: TokenIds
    result: str | None
    writer: str


class _Known(NamedTuple):
    """The items of a conversation before the position ``end``, and the size of their columns in bytes."""

    end: int
    items: tuple[_StoredItem, ...]
    size: int


_NOTHING_KNOWN = _Known(0, (), 0)


class StoredConversations:
    """The conversations in the store."""

    def __init__(self, context: StoreContext) -> None:
        self.context = context
        self._known: LruCache[_Known] = LruCache(KEPT_BYTES)

    async def create(self, conversation: StoredConversation, owner: str, items: Sequence[Item] = ()) -> None:
        """Store a new conversation that begins with these items."""
        await self.context.writer.carry_out(partial(_created, conversation, owner, items), conversation.id)

    async def get(self, conversation_id: str, owner: str) -> StoredConversation | None:
        """Return the conversation without its items; None if there is none."""
        for created_at, metadata in await self._read(_GET, conversation_id, owner):
            decoded: dict[str, str] = rows.from_json(metadata, _METADATA)
            return StoredConversation(conversation_id, created_at, decoded)
        return None

    async def update(self, conversation_id: str, owner: str, metadata: dict[str, str]) -> StoredConversation | None:
        """Replace the metadata, and return the conversation; None if there is none."""
        if not rows.can_exist(conversation_id):
            return None
        new = rows.to_json(metadata)
        await self._change(conversation_id, Statement(_UPDATE, (conversation_id, owner, new, rows.octets(new))))
        return await self.get(conversation_id, owner)

    async def delete(self, conversation_id: str, owner: str) -> bool:
        """Delete a conversation and its items durably, but not its responses; False if there is none."""
        if not rows.can_exist(conversation_id):
            return False
        self._known.drop(conversation_id)
        deleted = Statement(_DELETE, (conversation_id, owner))
        counts = await self._change(conversation_id, deleted, Statement(_DELETE_ITEMS, (conversation_id,)))
        return self.context.deleted(conversation_id, counts)

    async def items(self, conversation_id: str, owner: str, upto: int | None = None) -> History | None:
        """Return all items of a conversation, or those before the position ``upto``; None if there is none such."""
        for (length,) in await self._read(_LENGTH, conversation_id, owner):
            kept = (await self._up_to_date(conversation_id, length)).items
            if upto is not None:
                kept = kept[: bisect_left(kept, upto, key=_position)]
            return await apart(len(kept) > MANY_VALUES, _history, kept, length)
        return None

    async def page(
        self, conversation_id: str, owner: str, after: str | None, limit: int, *, newest_first: bool
    ) -> tuple[Item, ...]:
        """Return up to ``limit`` items that follow the item ``after``, or from the first one on.

        Raises `ItemNotFound` if there is no such item.  Ids may repeat, and pages would go in circles if the first one
        counted: so the last one does, in the order of the list.
        """
        start: int | None = _END if newest_first else -1
        if after is not None:
            places = await self._read(_PLACES, conversation_id, owner, after) if rows.can_exist(after) else ()
            start = next((lowest if newest_first else highest for lowest, highest in places), None)
            if start is None:
                raise ItemNotFound(shortened(after), param="after")
        sql = _NEWEST_FIRST if newest_first else _OLDEST_FIRST
        found = await self._read(sql, conversation_id, owner, start, limit)
        return tuple(await rows.decoded(found, lambda row: rows.item(row[0])))

    async def find(self, conversation_id: str, owner: str, ids: Iterable[str]) -> dict[str, Item]:
        """Return the items of a conversation that have these ids, by id; of several with one id, the last."""
        found: dict[str, Item] = {}
        for some in batches(rows.possible(ids)):
            query = f"""
                select id, item from conversation_items
                where {_OWNED} and id in ({placeholders(len(some), 3)}) order by position
            """
            read = await self._read(query, conversation_id, owner, *some)
            found.update(await rows.decoded(read, lambda row: (row[0], rows.item(row[1]))))
        return found

    async def _up_to_date(self, conversation_id: str, length: int) -> _Known:
        """Return the items of a conversation of this length; only those that are not known yet are read."""
        known = self._known.get(conversation_id)
        if known is None or known.end > length:
            known = _NOTHING_KNOWN
        added = await self._read(_ITEMS, conversation_id, known.end, length)
        if known.items and len(added) < length - known.end:  # an item was deleted in the meantime, perhaps a known one
            known = _NOTHING_KNOWN
            added = await self._read(_ITEMS, conversation_id, 0, length)
        if added or known.end < length:
            read = await rows.decoded(added, lambda row: (_stored_item(row), size_of(row)))
            known = await apart(len(read) > MANY_VALUES, _grown, known, read, length)
            self._known.put(conversation_id, known, known.size)
        return known

    async def add_items(self, conversation_id: str, owner: str, items: Sequence[Item]) -> bool:
        """Append items to a conversation; False if there is no such conversation.

        Raises `ConversationLocked` while a response holds it.
        """
        if not rows.can_exist(conversation_id):
            return False
        grown = partial(self._grown, conversation_id, owner, items)
        held, *counts = await self.context.writer.carry_out(grown, conversation_id)
        if held and not counts[0]:
            raise ConversationLocked
        return held > 0

    async def delete_item(self, conversation_id: str, owner: str, item_id: str) -> bool:
        """Delete an item, the last one if several have the id; False if there is no such item or conversation.

        Responses that have read it stay unchanged; responses that continue them read the conversation without it.
        Raises `ConversationLocked` while a response holds the conversation.
        """
        if not rows.can_exist(item_id) or await self.get(conversation_id, owner) is None:
            return False
        named = (conversation_id, item_id)
        steps = [Statement(sql, named) for sql in (_NOTE_DELETION, _DELETE_ITEM)]
        counts = await self._change_held(conversation_id, owner, *steps)
        if not counts[-1] and await self._read(_IS_THERE, *named):
            raise ConversationLocked
        return counts[-1] > 0

    async def lock(self, conversation_id: str, owner: str, response_id: str, position: int) -> None:
        """Lock the conversation for a response that has read its items before ``position``, the end.

        Raises `ConversationNotFound`, or `ConversationLocked` while another response holds it and if its items have
        changed since it was read.
        """
        if rows.can_exist(conversation_id):
            locked = Statement(_LOCK, (conversation_id, owner, *self._ours, response_id, position))
            counts = await self._change(conversation_id, locked)
            if counts[0]:
                return
            if await self.get(conversation_id, owner) is not None:
                raise ConversationLocked
        raise ConversationNotFound(conversation_id, param="conversation")

    def forget(self) -> None:
        """Drop all items from memory."""
        self._known.clear()

    def unlock(self, conversation_id: str, response_id: str) -> None:
        """Release the conversation for the next response, if this response holds it."""
        unlocked = unlock(conversation_id, response_id, self.context.server_id)
        self.context.writer.queue((unlocked,), conversation_id)

    @property
    def _ours(self) -> tuple[str, float]:
        return self.context.server_id, self.context.stale

    async def _change_held(self, conversation_id: str, owner: str, *statements: Statement) -> tuple[int, ...]:
        """Execute statements in a transaction during which no response can lock the conversation.

        The first of the returned counts is 1 if the conversation exists, and 0 if not.
        """
        return await self._change(conversation_id, self._held(conversation_id, owner), *statements)

    def _held(self, conversation_id: str, owner: str) -> Statement:
        return Statement(_HOLD, (conversation_id, owner, *self._ours))

    def _grown(self, conversation_id: str, owner: str, items: Sequence[Item]) -> Iterable[Statement]:
        added = list(_added(conversation_id, owner, items))
        grown = Statement(_GROW, (conversation_id, owner, len(items), _size(added)))
        return self._held(conversation_id, owner), grown, *added

    async def _change(self, conversation_id: str, *statements: Statement) -> tuple[int, ...]:
        return await self.context.writer.carry_out(statements, conversation_id)

    async def _read(self, sql: str, conversation_id: str, *arguments: Value) -> Sequence[Row]:
        if not rows.can_exist(conversation_id):
            return ()
        await self.context.writer.flushed(conversation_id)
        return await self.context.read(sql, conversation_id, *arguments)


_METADATA: msgspec.json.Decoder[dict[str, str]] = msgspec.json.Decoder(dict[str, str])


def _history(kept: Sequence[_StoredItem], end: int) -> History:
    return History(
        tuple([each.item for each in kept]),
        {each.item.id: each.tokens for each in kept if each.tokens},
        {each.item.id: each.result for each in kept if each.result is not None},
        end,
        writers={each.item.id: each.writer for each in kept if each.writer},
    )


def _grown(known: _Known, read: Sequence[tuple[_StoredItem, int]], length: int) -> _Known:
    items = (*known.items, *(item for item, _ in read))
    return _Known(length, items, known.size + sum(size for _, size in read))


def _position(stored: _StoredItem) -> int:
    return stored.position


def _stored_item(row: Row) -> _StoredItem:
    position, item, tokens, result, writer = row
    read = rows.result(result) if result else None
    return _StoredItem(
        position=position, item=rows.item(item), tokens=rows.token_ids(tokens), result=read, writer=writer or ""
    )


def _created(conversation: StoredConversation, owner: str, items: Sequence[Item]) -> Iterable[Statement]:
    name, metadata = conversation.id, rows.to_json(conversation.metadata)
    added = list(_added(name, owner, items))
    size = rows.octets(metadata) + _size(added)
    return Statement(_CREATE, (name, owner, conversation.created_at, metadata, len(items), size)), *added


def _size(added: Iterable[Statement]) -> int:
    """Return the bytes of the items that statements of `_added` insert."""
    return sum(rows.octets(statement.arguments[-1]) for statement in added)


def _added(conversation_id: str, owner: str, items: Sequence[Item]) -> Iterable[Statement]:
    """Yield statements to insert items at the end of a conversation whose length already includes them."""
    now = time.time()
    for number, item in enumerate(items):
        item_id = item.id if rows.can_exist(item.id) else None
        place = (conversation_id, owner, len(items) - number)
        yield Statement(_ADD, (*place, item_id, now, rows.to_json(item)))
