"""What the store keeps and tells, as values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.pipeline.frames import Origin, TokenIds
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.response import Response


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and the input that came with its own request; what it continues is stored under its own id.

    ``tokens`` are those that the engine wrote for its output items, by the item's id, and ``results`` what the calls
    among them gave the model to read, where the item does not say it.
    """

    response: Response
    input: tuple[Item, ...]
    origin: Origin = Origin()
    tokens: Mapping[str, TokenIds] = {}
    results: Mapping[str, str] = {}

    @property
    def items(self) -> tuple[Item, ...]:
        """What it adds to a conversation: its input, then its output."""
        return (*self.input, *self.response.output)


class History(msgspec.Struct, frozen=True):
    """Items in their order, and by the item's id the tokens that an engine wrote, and the results that it read."""

    items: tuple[Item, ...]
    tokens: Mapping[str, TokenIds] = {}
    results: Mapping[str, str] = {}


class StoredConversation(msgspec.Struct, frozen=True):
    """A conversation without its items; ``created_at`` is in seconds since 1970."""

    id: str
    created_at: int
    metadata: dict[str, str]


class Server(msgspec.Struct, frozen=True):
    """One penstock process: where the others reach it, and whether its heart still beats."""

    id: str
    url: str
    is_alive: bool


class Orphan(msgspec.Struct, frozen=True):
    """A response that has not ended and that nobody runs; ``server_id`` names the dead server that did."""

    stored: StoredResponse
    server_id: str | None
    is_background: bool


class Report(msgspec.Struct, frozen=True):
    """How much is stored: ``bytes`` on disk, and the age of the oldest response in seconds."""

    responses: int
    bytes: int
    oldest_age: float
