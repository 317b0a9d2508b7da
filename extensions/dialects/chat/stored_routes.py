"""The routes of stored completions.

See https://platform.openai.com/docs/api-reference/chat/list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from aiohttp import web

from penstock.api.dialect import Edge, Prepared
from penstock.api.http.auth import OWNER
from penstock.api.http.bodies import Page
from penstock.api.http.errors import as_json, listed_as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.pagination import ends
from penstock.api.http.query import AnyText, Choice, Number, Parameter
from penstock.api.http.request_body import receive
from penstock.extensions.dialects.chat.body import Places
from penstock.extensions.dialects.chat.retold import (
    StoredCompletion,
    StoredMessage,
    stored_completion,
    stored_messages,
)
from penstock.extensions.dialects.chat.stored_chats import StoredChats
from penstock.pipeline.errors import InvalidRequest, ResponseNotFound, StoreFailed
from penstock.pipeline.protocol.params.common import Body, Metadata
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.protocol.response import Response
from penstock.services.store.store import Store

MOST_PAIRS = 16
"""The most pairs of metadata that a query may name: no completion has more."""

LIMIT = Number("limit", default=20, least=1, most=100, meaning="The most entries of a page.")
ORDER = Choice("order", ("asc", "desc"), meaning="`asc` begins with the oldest entry, `desc` with the newest.")
AFTER = AnyText("after", meaning="The id of the entry after which the page begins.")
MODEL = AnyText("model", meaning="The name of the model whose completions are listed.")

_REFUSALS = (InvalidRequest, ResponseNotFound, StoreFailed)


class Pairs(Parameter):
    """Pairs of texts, each written as ``name[key]=value``."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the pairs."""
        return {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MOST_PAIRS}

    def read(self, request: web.Request) -> dict[str, str]:
        """Read the pairs of a request."""
        pairs = dict[str, str]()
        for name, value in request.query.items():
            if name == self.name or name.startswith(f"{self.name}["):
                key = re.fullmatch(rf"{self.name}\[(.+)\]", name, re.DOTALL)
                if key is None or pairs.setdefault(key[1], value) != value:
                    raise self._refusal(f"{self.name}[key]=value, once for each key", f"{name}={value}")
        if len(pairs) > MOST_PAIRS:
            raise InvalidRequest(f"{self.name} may have {MOST_PAIRS} keys.", param=self.name, code="invalid_value")
        return pairs


METADATA = Pairs(
    "metadata", meaning="Texts that the metadata of listed completions have, each as `metadata[key]=value`."
)


class UpdateCompletion(Body):
    """New metadata for a completion; null removes it."""

    metadata: Metadata | None
    """New texts by name, in place of the old ones; null for none."""


class CompletionList(Page[StoredCompletion], frozen=True):
    """One page of a list of completions."""


class MessageList(Page[StoredMessage], frozen=True):
    """One page of the messages of a completion."""


class DeletedCompletion(msgspec.Struct, frozen=True):
    """The confirmation that a completion was deleted."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Literal[True] = True


@dataclass(frozen=True)
class StoredRoutes:
    """The stored completions over the edge of their dialect."""

    edge: Edge

    @property
    def store(self) -> Store:
        """The store of the responses."""
        return self.edge.scheduler.store

    @property
    def chats(self) -> StoredChats:
        """The completions in the store."""
        return self.store.part(StoredChats)

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        one = f"{base}/chat/completions/{{completion_id}}"
        return (
            web.get(f"{base}/chat/completions", self.list_completions),
            web.get(one, self.retrieve),
            web.post(one, self.update),
            web.delete(one, self.delete),
            web.get(f"{one}/messages", self.list_messages),
        )

    def record(self, prepared: Prepared) -> None:
        """Have a response that is going to run be found as a completion, if it is stored."""
        facts = prepared.resolved.facts
        if facts.response.store and self.store.keeps:
            assert isinstance(prepared.place, Places)
            self.chats.record(facts.response, facts.origin.owner, prepared.place.messages)

    @operation(Operation(CompletionList, query=(MODEL, METADATA, LIMIT, ORDER, AFTER), refusals=_REFUSALS))
    async def list_completions(self, request: web.Request) -> web.Response:
        """List the stored completions, page by page."""
        limit, after = LIMIT.read(request), AFTER.read(request)
        found = await self.chats.page(
            request[OWNER],
            limit=limit + 1,
            after=None if after is None else response_id(after),
            newest_first=ORDER.read(request) == "desc",
            model=MODEL.read(request),
            metadata=METADATA.read(request),
        )
        if found is None:
            raise InvalidRequest(f"There is no stored completion {shortened(after or '')!r}.", param="after")
        listed = found[:limit]
        metadata = await self.chats.metadata([response.id for response in listed])
        data = tuple([await stored_completion(response, metadata[response.id]) for response in listed])
        return await listed_as_json(CompletionList(data, *ends(data), len(found) > limit), "data")

    @operation(Operation(StoredCompletion, refusals=_REFUSALS))
    async def retrieve(self, request: web.Request) -> web.Response:
        """Retrieve a stored completion."""
        return await self._answer(await self._found(request))

    @operation(Operation(StoredCompletion, body=UpdateCompletion, refusals=_REFUSALS))
    async def update(self, request: web.Request) -> web.Response:
        """Replace the metadata of a stored completion."""
        body = read_body(await receive(request), UpdateCompletion)
        response = await self._found(request)
        await self.chats.label(response.id, request[OWNER], body.metadata or {})
        return await self._answer(response)

    @operation(Operation(DeletedCompletion, refusals=_REFUSALS))
    async def delete(self, request: web.Request) -> web.Response:
        """Delete a stored completion, and the response that it is."""
        response = await self._found(request)
        deleted = await self.store.delete(response.id, request[OWNER])
        await self.chats.forget(response.id, request[OWNER])
        if not deleted:
            raise self._missing(request)
        return as_json(DeletedCompletion(request.match_info["completion_id"]))

    @operation(Operation(MessageList, query=(LIMIT, ORDER, AFTER), refusals=_REFUSALS))
    async def list_messages(self, request: web.Request) -> web.Response:
        """List the messages that a stored completion has read, page by page."""
        limit, order, after = LIMIT.read(request), ORDER.read(request), AFTER.read(request)
        name = response_id(request.match_info["completion_id"])
        if (read := await self.chats.input(name, request[OWNER])) is None:
            raise self._missing(request)
        messages = stored_messages(name, *read)[:: -1 if order == "desc" else 1]
        if after is not None:
            ids = [message.id for message in messages]
            if after not in ids:
                raise InvalidRequest(f"There is no message {shortened(after)!r} in this list.", param="after")
            messages = messages[ids.index(after) + 1 :]
        data = tuple(messages[:limit])
        return await listed_as_json(MessageList(data, *ends(data), len(messages) > limit), "data")

    async def _answer(self, response: Response) -> web.Response:
        metadata = await self.chats.metadata([response.id])
        return as_json(await stored_completion(response, metadata[response.id]))

    async def _found(self, request: web.Request) -> Response:
        name = response_id(request.match_info["completion_id"])
        if (response := await self.chats.get(name, request[OWNER])) is None:
            raise self._missing(request)
        return response

    def _missing(self, request: web.Request) -> ResponseNotFound:
        error = ResponseNotFound(shortened(request.match_info["completion_id"]), keeps=self.store.keeps)
        error.param = "completion_id"
        return error


def response_id(completion_id: str) -> str:
    """Return the id of the response that a completion is; empty for a text that is no id of a completion."""
    kind, mark, suffix = completion_id.partition("-")
    return f"resp_{suffix}" if (kind, mark) == ("chatcmpl", "-") else ""
