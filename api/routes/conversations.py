"""The routes of the Conversations API.

Items have the same form as in requests for responses.  While a response holds the lock of a conversation, its items do
not change: a request to add or delete items is answered with status 409 and can be retried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from penstock.api.http.auth import OWNER
from penstock.api.http.bodies import Conversation, DeletedConversation, Items
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.pagination import INCLUDE, PAGE, PageRequest, page
from penstock.api.http.request_body import off_loop, receive
from penstock.api.limits.admission import Admission
from penstock.pipeline.errors import (
    ConversationLocked,
    ConversationNotFound,
    DiskFull,
    InvalidRequest,
    ItemNotFound,
    StorageFull,
    StoreFailed,
    no_conversation,
)
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.params.conversation import AddItems, CreateConversation, UpdateConversation
from penstock.pipeline.protocol.params.items import InputItem, ItemReference
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.tasks import in_thread
from penstock.services.file_reading import PlacedFile
from penstock.services.store.store import Store
from penstock.services.store.stored import StoredConversation
from penstock.stages.normalize.input_items import (
    InputReader,
    files_of,
    id_prefix,
    new_items,
    references,
    said_now,
)
from penstock.stages.normalize.pairing import check_pairs, is_checked
from penstock.stages.normalize.recall import draw_suffix
from penstock.stages.normalize.same_item import is_same
from penstock.stages.normalize.toolset import ToolsetBuilder

_FULL = (StorageFull, DiskFull)

_LOOKING = (InvalidRequest, ConversationNotFound, StoreFailed)


@dataclass(frozen=True)
class Conversations:
    """The Conversations API; ``draw`` and ``clock`` are the sources of ids and of the time."""

    store: Store
    admission: Admission = field(default_factory=Admission)
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

    @operation(Operation(Conversation, body=CreateConversation, refusals=(InvalidRequest, StoreFailed, *_FULL)))
    async def create(self, request: web.Request) -> web.Response:
        """Create a conversation."""
        self.store.check_keeps("conversations")
        body, owner = await off_loop(read_body, await receive(request), CreateConversation), request[OWNER]
        await self.admission.storing(owner, self.store)
        await self.store.check_room(request.content_length or 0)
        items = await self._read(body.items or (), owner)
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
        body = await off_loop(read_body, await receive(request), UpdateConversation)
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

    @operation(Operation(Items, query=PAGE, refusals=(*_LOOKING, ItemNotFound)))
    async def list_items(self, request: web.Request) -> web.Response:
        """List the items of a conversation, page by page."""
        wanted, conversation = PageRequest.read(request), await self._found(request)
        items = await self.store.conversations.page(
            conversation.id, request[OWNER], wanted.after, wanted.limit + 1, newest_first=wanted.order == "desc"
        )
        return as_json(page(items[: wanted.limit], has_more=len(items) > wanted.limit))

    @operation(Operation(Items, body=AddItems, query=(INCLUDE,), refusals=(*_LOOKING, *_FULL, ConversationLocked)))
    async def add_items(self, request: web.Request) -> web.Response:
        """Append items to a conversation; the answer lists the items that are new to it."""
        INCLUDE.read(request)
        body = await off_loop(read_body, await receive(request), AddItems)
        conversation, owner = await self._found(request), request[OWNER]
        await self.admission.storing(owner, self.store)
        await self.store.check_room(request.content_length or 0)
        items = await self._read(body.items, owner, conversation.id)
        if not await self.store.conversations.add_items(conversation.id, owner, items):
            raise _not_found(request)
        return as_json(page(items))

    @operation(Operation(Item, query=(INCLUDE,), refusals=(*_LOOKING, ItemNotFound)))
    async def retrieve_item(self, request: web.Request) -> web.Response:
        """Retrieve one item of a conversation."""
        INCLUDE.read(request)
        conversation, item_id = await self._found(request), request.match_info["item_id"]
        found = await self.store.conversations.find(conversation.id, request[OWNER], [item_id])
        if item_id not in found:
            raise ItemNotFound(shortened(item_id))
        return as_json(found[item_id])

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

    async def _read(
        self, input_items: Sequence[InputItem], owner: str, conversation_id: str | None = None
    ) -> tuple[Item, ...]:
        """Read the items of a body; references to items that the conversation has already are left out.

        As at OpenAI, an item with the id of a stored item is that item; with other content, it is another one.
        """
        ids = [item.id for item in input_items if item.id]
        present = await self.store.conversations.find(conversation_id, owner, ids) if conversation_id else {}
        _check_ids(input_items, present)
        stored = await self.store.items(ids, owner) if ids else {}
        # images are read too, because any model may continue the conversation
        reader = InputReader("items", self.draw(), stored, ToolsetBuilder(usable=frozenset(kinds())), sees_images=True)
        items, files = await in_thread(_read_items, reader, input_items, present.values())
        if any(map(is_checked, items)):
            past = await self.store.conversations.items(conversation_id, owner) if conversation_id else None
            await in_thread(check_pairs, past.items if past else (), items, "items")
        for file in files:
            file_id = file.file_id if file.path else None
            if file_id is not None and not await self.store.has_file(file_id, owner):
                raise file.not_found()
        return new_items(present.values(), items)


def _read_items(
    reader: InputReader, given: Sequence[InputItem], present: Iterable[Item]
) -> tuple[Sequence[Item], Sequence[PlacedFile]]:
    """Read items, which may have many parts, and find their files."""
    known = reader.referenced
    read = zip(given, reader.read(given, present), strict=True)
    named = [(item, known.get(sent.id or "")) for sent, item in read]
    items = [item if stored is None or not is_same(item, stored) else stored for item, stored in named]
    return items, files_of(items, said_now(given, items, "items"))[0]


def _check_ids(input_items: Sequence[InputItem], present: Container[str]) -> None:
    """Raise `InvalidRequest` for an id that the conversation has already, that is repeated, or of another kind."""
    references(input_items, "items")
    seen = set[str]()
    for position, item in enumerate(input_items):
        if not item.id or isinstance(item, ItemReference):
            continue
        if item.id in present or item.id in seen:
            message = f"The conversation has an item {shortened(item.id)!r} already."
            raise InvalidRequest(message, param="items", code="item_already_in_conversation")
        seen.add(item.id)
        if not item.id.startswith(prefix := id_prefix(item)):
            message = f"The id of this item begins with {prefix!r}, and {shortened(item.id)!r} does not."
            raise InvalidRequest(message, param=f"items[{position}].id", code="invalid_value")


def _not_found(request: web.Request) -> InvalidRequest:
    return no_conversation(shortened(request.match_info["conversation_id"]))


def _answer(conversation: StoredConversation) -> web.Response:
    return as_json(Conversation(conversation.id, conversation.created_at, conversation.metadata))
