"""Items that a client sends again: the item of the store, or one that the client has changed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from penstock.pipeline.protocol.items import Item, Reasoning

_OF_SERVER = frozenset({"id", "status", "phase", "annotations", "logprobs"})
"""The fields whose values the server chooses: clients leave them out, or send them as they came."""


def is_same(sent: Item, stored: Item) -> bool:
    """Return True if all that a client sends of an item is stored.

    It may lack what was not included in a response: the text of a thought, or the outputs of a call that ran here.
    """
    fields = msgspec.to_builtins(sent)
    free = _OF_SERVER
    if isinstance(sent, Reasoning):
        free |= {"encrypted_content", *(name for name in ("content", "summary") if not fields.get(name))}
    return _is_part(fields, msgspec.to_builtins(stored), free)


def _is_part(sent: Any, stored: Any, free: Collection[str]) -> bool:
    if isinstance(sent, dict) and isinstance(stored, dict):
        given = ((name, value) for name, value in sent.items() if name not in free and value is not None)
        return all(_is_part(value, stored.get(name), free) for name, value in given)
    if isinstance(sent, list | tuple) and isinstance(stored, list | tuple):
        return len(sent) == len(stored) and all(_is_part(*pair, free) for pair in zip(sent, stored, strict=True))
    return bool(sent == stored)
