"""The values that the store accepts and returns."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.pipeline.frames import Origin, TokenIds
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.response import Response


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and the input of its own request; a response that it continues is stored under its own id.

    ``tokens`` are the token ids that the engine generated for its output items, by item id.  ``results`` are the texts
    that its tool calls gave the model to read, by item id, if the items do not contain them.  ``writer`` is the served
    name of the model that generated the tokens, empty if an older release stored them.
    """

    response: Response
    input: tuple[Item, ...]
    origin: Origin = Origin()
    tokens: Mapping[str, TokenIds] = {}
    results: Mapping[str, str] = {}
    writer: str = ""

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that it adds to a conversation: its input, then its output."""
        return (*self.input, *self.response.output)


class StoredConversation(msgspec.Struct, frozen=True):
    """A conversation without its items; ``created_at`` is in seconds since 1970."""

    id: str
    created_at: int
    metadata: dict[str, str]


class Server(msgspec.Struct, frozen=True):
    """One penstock process.  Other servers reach it at ``url``; ``is_alive`` is False if its heartbeat has stopped."""

    id: str
    url: str
    is_alive: bool


class Orphan(msgspec.Struct, frozen=True):
    """A response that has not ended and has no live server; ``server_id`` is the dead server, if there was one."""

    stored: StoredResponse
    server_id: str | None
    is_background: bool


class Report(msgspec.Struct, frozen=True):
    """The size of the store: responses, bytes on disk, and the age of the oldest response in seconds."""

    responses: int
    bytes: int
    oldest_age: float
