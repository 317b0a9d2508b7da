"""Request bodies of the Conversations API, as openai-python 3.52 writes them."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from penstock.pipeline.protocol.params.common import Body, Metadata, at_most
from penstock.pipeline.protocol.params.items import InputItems

MOST_ITEMS = 20
"""The most items that one request may add."""

_Items: TypeAlias = Annotated[InputItems, Field(max_length=MOST_ITEMS), at_most(MOST_ITEMS, "items")]


class CreateConversation(Body):
    """A new conversation, with its first items."""

    items: _Items | None = None
    """The first items, up to 20."""
    metadata: Metadata | None = None
    """Up to 16 texts by name, for the client."""


class UpdateConversation(Body):
    """New metadata for a conversation; null removes it."""

    metadata: Metadata | None
    """New texts by name, in place of the old ones; null for none."""


class AddItems(Body):
    """Items to append to a conversation."""

    items: _Items
    """The items to append, up to 20."""
