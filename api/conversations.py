"""The routes of the Conversations API.

Items have the same form as in requests for responses.  While a response holds the lock of a conversation, its items do
not change: a request to add or delete items is answered with status 409 and can be retried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from penstock.api.http.auth import OWNER
from penstock.api.http.bodies import Conversation, DeletedConversation, Items
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.pagination import INCLUDE, PAGE, PageRequest, page
from penstock.api.http.request_body import receive
from penstock.pipeline.errors import (
    ConversationLocked,
    ConversationNotFound,
    InvalidRequest,
    ItemNotFound,
    StoreFailed,
    no_conversation,
)
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.params.conversation import AddItems, CreateConversation, UpdateConversation
from penstock.pipeline.protocol.params.items import InputItem
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.validation import read_body
from penstock.stages.normalize.input_items import InputReader, new_items, references
from penstock.stages.normalize.normalize import draw_suffix
from penstock.stages.normalize.pairing import check_pairs
from penstock.stages.normalize.toolset import ToolsetBuilder
from penstock.stages.services.store.store import Store
from penstock.stages.services.store.stored import StoredConversation

_LOOKING = (InvalidRequest, ConversationNotFound, StoreFailed)


@dataclass(frozen=True)
class Conversations:
    """The Conversations API; ``draw`` and ``clock`` are the sources of ids and of the time."""

    store: Store
    draw: Callable[[], str] = draw_suffix
    clock: Callable[[], float] = time.time

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        one = f"{base}/conversations/{{conversation_id}}"
        return (
            web.post(f"{base}/conversations", self.create),
            web.get(one, self.retrieve),
            web.post(one, self.update),
            web.delete(one, self.delete),
            web.get(f"{one}/items", self.list_items),
            web.post(f"{one}/items", self.add_items),
            web.get(f"{one}/items/{{item_id}}", self.retrieve_item),
            web.delete(f"{one}/items/{{item_id}}", self.delete_item),
        )

    @operation(Operation(Conversation, body=CreateConversation, refusals=(InvalidRequest, StoreFailed)))
    async def create(self, request: web.Request) -> web.Response:
        """Create a conversation."""
        body, owner = await read_body(await receive(request), CreateConversation), request[OWNER]
        items = await self._read(body.items or (), (), owner)
        conversation = StoredConversation(f"conv_{self.draw()}", int(self.clock()), body.metadata or {})
        await self.store.conversations.create(conversation, owner, items)
        return _answer(conversation)

    @operation(Operation(Conversation, refusals=_LOOKING))
    async def retrieve(self, request: web.Request) -> web.Response:
        """Retrieve a conversation."""
        return _answer(await self._found(request))

    @operation(Operation(Conversation, body=UpdateConversation, refusals=_LOOKING))
    async def update(self, request: web.Request) -> web.Response:
        """Replace the metadata of a conversation."""
        body = await read_body(await receive(request), UpdateConversation)
        conversation_id, owner = request.match_info["conversation_id"], request[OWNER]
        updated = await self.store.conversations.update(conversation_id, owner, body.metadata or {})
        if updated is None:
            raise _not_found(request)
        return _answer(updated)

    @operation(Operation(DeletedConversation, refusals=_LOOKING))
    async def delete(self, request: web.Request) -> web.Response:
        """Delete a conversation and its items; the responses that used it are kept."""
        conversation_id = request.match_info["conversation_id"]
        if not await self.store.conversations.delete(conversation_id, request[OWNER]):
            raise _not_found(request)
        return as_json(DeletedConversation(conversation_id))

    @operation(Operation(Items, query=PAGE, refusals=_LOOKING))
    async def list_items(self, request: web.Request) -> web.Response:
        """List the items of a conversation, page by page."""
        page_request = PageRequest.read(request)
        return as_json(page_request.of(await self._items(request)))

    @operation(Operation(Items, body=AddItems, query=(INCLUDE,), refusals=(*_LOOKING, ConversationLocked)))
    async def add_items(self, request: web.Request) -> web.Response:
        """Append items to a conversation; the answer lists the items that are new to it."""
        INCLUDE.read(request)
        body = await read_body(await receive(request), AddItems)
        conversation_id, owner = request.match_info["conversation_id"], request[OWNER]
        items = await self._read(body.items, await self._items(request), owner)
        if not await self.store.conversations.add_items(conversation_id, owner, items):
            raise _not_found(request)
        return as_json(page(items))

    @operation(Operation(Item, query=(INCLUDE,), refusals=(*_LOOKING, ItemNotFound)))
    async def retrieve_item(self, request: web.Request) -> web.Response:
        """Retrieve one item of a conversation."""
        INCLUDE.read(request)
        item_id = request.match_info["item_id"]
        for item in reversed(await self._items(request)):  # of several with one id the last, as `delete_item` does
            if item.id == item_id:
                return as_json(item)
        raise ItemNotFound(shortened(item_id))

    @operation(Operation(Conversation, refusals=(*_LOOKING, ItemNotFound, ConversationLocked)))
    async def delete_item(self, request: web.Request) -> web.Response:
        """Delete one item of a conversation."""
        conversation, item_id = await self._found(request), request.match_info["item_id"]
        if not await self.store.conversations.delete_item(conversation.id, request[OWNER], item_id):
            raise ItemNotFound(shortened(item_id))
        return _answer(conversation)

    async def _found(self, request: web.Request) -> StoredConversation:
        conversation = await self.store.conversations.get(request.match_info["conversation_id"], request[OWNER])
        if conversation is None:
            raise _not_found(request)
        return conversation

    async def _items(self, request: web.Request) -> tuple[Item, ...]:
        """Return the items of the conversation, oldest first."""
        history = await self.store.conversations.items(request.match_info["conversation_id"], request[OWNER])
        if history is None:
            raise _not_found(request)
        return history.items

    async def _read(self, input_items: Sequence[InputItem], before: Sequence[Item], owner: str) -> tuple[Item, ...]:
        """Read the items of a body; references to items ``before`` them in the conversation are left out."""
        ids = references(input_items, "items")
        referenced = await self.store.items(ids, owner) if ids else {}
        # images are read too, because any model may continue the conversation
        reader = InputReader("items", self.draw(), referenced, ToolsetBuilder(), sees_images=True)

        def read() -> tuple[Item, ...]:
            items = reader.read(input_items, before)
            check_pairs(before, items, "items")
            return new_items(before, items)

        return await asyncio.to_thread(read)


def _not_found(request: web.Request) -> InvalidRequest:
    return no_conversation(shortened(request.match_info["conversation_id"]))


def _answer(conversation: StoredConversation) -> web.Response:
    return as_json(Conversation(conversation.id, conversation.created_at, conversation.metadata))
