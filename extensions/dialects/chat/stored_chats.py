"""The completions that clients store: each is a stored response, with metadata that may change.

A completion is found once its response has ended with an answer, and as long as the store keeps that response.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.response import Response
from penstock.services.store import rows
from penstock.services.store.database import Row, Statement, Value, placeholders
from penstock.services.store.parts import StorePart

KEPT: Final = 86_400.0
"""Seconds for which the row of a completion stays without a response, which may not be stored yet."""

_TABLES = (
    """
    create table stored_chats (
        id text primary key,
        owner text not null,
        created_at double precision not null,
        messages text not null
    )
    """,
    "create index stored_chats_of_owner on stored_chats (owner, created_at, id)",
    """
    create table stored_chat_metadata (
        chat_id text not null,
        name text not null,
        value text not null,
        primary key (chat_id, name)
    )
    """,
)
"""The completions by the ids of their responses, with the position of the message of each item of their input."""

_ADD = """
    insert into stored_chats (id, owner, created_at, messages) values ($1, $2, $3, $4) on conflict (id) do nothing
"""

_LABEL = """
    insert into stored_chat_metadata (chat_id, name, value)
    select id, cast($3 as text), cast($4 as text) from stored_chats where id = $1 and owner = $2
    on conflict (chat_id, name) do nothing
"""

_CLEAR = """
    delete from stored_chat_metadata
    where chat_id = $1 and exists (select 1 from stored_chats where id = $1 and owner = $2)
"""

_DELETE = "delete from stored_chats where id = $1 and owner = $2"

_FOUND = """
    from stored_chats join responses on responses.id = stored_chats.id and responses.owner = stored_chats.owner
    where stored_chats.owner = $1 and status in ('completed', 'incomplete')
"""

_GET = f"select response {_FOUND} and stored_chats.id = $2"

_READ = f"select input, messages {_FOUND} and stored_chats.id = $2"

_PLACE = f"select stored_chats.created_at {_FOUND} and stored_chats.id = $2"

_HAS = """
    and exists (
        select 1 from stored_chat_metadata where chat_id = stored_chats.id and name = ${name} and value = ${value}
    )
"""

_SWEEP = (
    """
    delete from stored_chats
    where created_at < $1 and not exists (select 1 from responses where responses.id = stored_chats.id)
    """,
    """
    delete from stored_chat_metadata
    where not exists (select 1 from stored_chats where stored_chats.id = chat_id)
    """,
)

_RESPONSE = msgspec.json.Decoder(Response)
_ITEMS = msgspec.json.Decoder(tuple[Item, ...])
_POSITIONS = msgspec.json.Decoder(tuple[int, ...])
_TEXT = msgspec.json.Decoder(str)


class StoredChats(StorePart):
    """The stored completions of all owners, by the ids of their responses."""

    name = "stored_chats"
    tables = _TABLES
    queued = (_ADD, _LABEL)

    def record(self, response: Response, owner: str, messages: Sequence[int]) -> None:
        """Have a response that begins be found as a completion; each item of its input is of the message there."""
        added = Statement(_ADD, (response.id, owner, time.time(), rows.to_json(list(messages))))
        labels = _labels(response.id, owner, response.metadata or {})
        self.context.writer.queue([added, *labels], response.id)

    async def get(self, response_id: str, owner: str) -> Response | None:
        """Return the response of a completion; None if there is none."""
        for (response,) in await self._read(_GET, owner, response_id):
            return rows.from_json(response, _RESPONSE)
        return None

    async def input(self, response_id: str, owner: str) -> tuple[tuple[Item, ...], tuple[int, ...]] | None:
        """Return the input of a completion, and the position of the message of each item; None if there is none."""
        for items, messages in await self._read(_READ, owner, response_id):
            return rows.from_json(items, _ITEMS), rows.from_json(messages, _POSITIONS)
        return None

    async def page(
        self,
        owner: str,
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = False,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> list[Response] | None:
        """Return up to ``limit`` responses of completions in the order of their creation, with this model and metadata.

        They follow the one with the id ``after``; None if there is none.
        """
        arguments: list[Value] = [owner, limit]
        filters = list(_filters(arguments, model, metadata or {}))
        sign, order = ("<", "desc") if newest_first else (">", "asc")
        if after is not None:
            places = await self._read(_PLACE, owner, after)
            if not places:
                return None
            arguments += [places[0][0], after]
            filters.append(
                f"and (stored_chats.created_at, stored_chats.id) {sign} (${len(arguments) - 1}, ${len(arguments)})"
            )
        sorting = f"order by stored_chats.created_at {order}, stored_chats.id {order} limit $2"
        await self.context.writer.flushed()
        found = await self.context.read(f"select response {_FOUND} {' '.join(filters)} {sorting}", *arguments)
        return await rows.decoded(found, _response)

    async def metadata(self, response_ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the metadata of completions, by id."""
        found: dict[str, dict[str, str]] = {name: {} for name in response_ids}
        if found:
            named = f"where chat_id in ({placeholders(len(found))}) order by name"
            query = f"select chat_id, name, value from stored_chat_metadata {named}"
            for chat_id, name, value in await self.context.read(query, *found):
                found[chat_id][rows.from_json(name, _TEXT)] = rows.from_json(value, _TEXT)
        return found

    async def label(self, response_id: str, owner: str, metadata: Mapping[str, str]) -> None:
        """Replace the metadata of a completion."""
        labels = _labels(response_id, owner, metadata)
        await self.context.writer.carry_out([Statement(_CLEAR, (response_id, owner)), *labels])

    async def forget(self, response_id: str, owner: str) -> None:
        """Delete what is stored of a completion besides its response."""
        row = (response_id, owner)
        await self.context.writer.carry_out([Statement(_CLEAR, row), Statement(_DELETE, row)])

    async def sweep(self) -> None:
        """Delete what is left of completions whose responses have gone."""
        chats, metadata = _SWEEP
        await self.context.writer.carry_out([Statement(chats, (time.time() - KEPT,)), Statement(metadata, ())])

    async def _read(self, sql: str, owner: str, response_id: str) -> Sequence[Row]:
        if not rows.can_exist(response_id):
            return ()
        await self.context.writer.flushed(response_id)
        return await self.context.read(sql, owner, response_id)


def _labels(response_id: str, owner: str, metadata: Mapping[str, str]) -> Iterator[Statement]:
    for name, value in metadata.items():
        yield Statement(_LABEL, (response_id, owner, rows.to_json(name), rows.to_json(value)))


def _filters(arguments: list[Value], model: str | None, metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield the conditions of a query, whose ``arguments`` grow by those that they name."""
    if model is not None:
        arguments.append(rows.model_column(model))
        yield f"and responses.model = ${len(arguments)}"
    for name, value in metadata.items():
        arguments += [rows.to_json(name), rows.to_json(value)]
        yield _HAS.format(name=len(arguments) - 1, value=len(arguments))


def _response(row: Row) -> Response:
    return rows.from_json(row[0], _RESPONSE)
