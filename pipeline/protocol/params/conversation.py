"""The bodies of the Conversations API, as openai-python 3.52 writes them."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from penstock.pipeline.protocol.params.common import Body, Metadata, at_most
from penstock.pipeline.protocol.params.items import InputItem

MOST_ITEMS = 20
"""How many items may be added at once."""

_Items: TypeAlias = Annotated[
    list[InputItem],
    Field(fail_fast=True, max_length=MOST_ITEMS),
    at_most(MOST_ITEMS, "items"),
]


class CreateConversation(Body):
    """A new conversation, with its first items."""

    items: _Items | None = None
    metadata: Metadata | None = None


class UpdateConversation(Body):
    """What a conversation is to be marked with from now on; null for nothing."""

    metadata: Metadata | None


class AddItems(Body):
    """More items, behind those that a conversation has."""

    items: _Items
