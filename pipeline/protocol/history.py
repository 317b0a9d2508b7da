"""The history that a request continues."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.pipeline.protocol.items import Item


class History(msgspec.Struct, frozen=True):
    """Items in order, with the token ids that the engine generated and the tool call results, both by item id.

    ``end`` is the position after the last item, in a conversation.
    """

    items: tuple[Item, ...]
    tokens: Mapping[str, tuple[int, ...]] = {}
    results: Mapping[str, str] = {}
    end: int = 0
