"""RecentCalls: the tokens of calls that clients were sent, for when they send the calls back as texts.

A client with ``store: false`` keeps its conversation, and sends calls without the tokens that the model has written: a
model may write a header, a blank or an escape in another way than it is rendered.  So it is with what comes before the
calls, in APIs that have no place for sealed thoughts.  With the tokens, the next prompt
begins with those of the turn before, which the engine's prefix cache holds.  They are in memory alone: a server that
does not know them renders the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.items import CustomToolCall, FunctionCall, Item, Message, Reasoning
from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.lru_cache import LruCache

MOST_BYTES = 2**26
"""Bytes of calls that are remembered, about ten million tokens."""

_OWN_BYTES = 1_000
"""Bytes of a call besides its text and its tokens."""

_LONG_CHARACTERS = 2**15
"""Characters of texts that take milliseconds to compare."""


@dataclass
class _Sent:
    """A call as a client was sent it."""

    owner: str
    call: FunctionCall | CustomToolCall
    tokens: array[int]
    writer: str
    before: tuple[tuple[Reasoning | Message, array[int]], ...]
    """The thoughts and messages since the call before, with their tokens."""
    spelling: str
    """The text that means the same and that a client sends."""


class _Found(NamedTuple):
    call: FunctionCall | CustomToolCall
    sent: _Sent


class RecentCalls:
    """Calls by their ids; each key has at most half of the room."""

    def __init__(self) -> None:
        self._sent: LruCache[_Sent] = LruCache(MOST_BYTES, MOST_BYTES // 2)

    def keep(self, items: Iterable[Item], owner: str, writer: str, tokens: Mapping[str, Sequence[int]]) -> None:
        """Remember the whole calls among the items of a response, which the model ``writer`` has written.

        With each are the items between it and the call before.
        """
        before: list[tuple[Reasoning | Message, array[int]]] = []
        for item in items:
            written = array("I", tokens.get(item.id, ()))
            if isinstance(item, Reasoning | Message):
                before = [*before, (item, written)] if written else []
                continue
            if isinstance(item, FunctionCall | CustomToolCall) and item.status == "completed" and written:
                sent = _Sent(owner, call=item, tokens=written, writer=writer, before=tuple(before), spelling=item.text)
                size = _OWN_BYTES + sum(len(each.text) + 4 * len(ids) for each, ids in (*before, (item, written)))
                self._sent.put(item.call_id, sent, size, owner)
            before = []

    async def restored(
        self, items: Sequence[Item], owner: str, reads: Callable[[str], bool]
    ) -> tuple[tuple[Item, ...], Mapping[str, TokenIds]]:
        """Return items whose calls have the model's own spelling, and the tokens of these calls by the items' ids.

        ``reads`` tells if the model reads what another one has written.  A call that the client has changed stays.
        """
        found = {
            item.id: _Found(item, sent)
            for item in items
            if isinstance(item, FunctionCall | CustomToolCall)
            and (sent := self._sent.get(item.call_id) or self._sent.get(_by_item(item)))
            and sent.owner == owner
            and sent.call.tool == item.tool
            and reads(sent.writer)
        }
        if not found:
            return tuple(items), {}
        characters = sum(len(call.text) for call, sent in found.values() if call.text != sent.spelling)
        return await apart(len(items) > MANY_VALUES or characters > _LONG_CHARACTERS, _restored, items, found)


def _restored(items: Sequence[Item], found: Mapping[str, _Found]) -> tuple[tuple[Item, ...], Mapping[str, TokenIds]]:
    same = {name: sent for name, (call, sent) in found.items() if _means_the_same(call, sent)}
    own = tuple(_in_its_words(item, same[item.id]) if item.id in same else item for item in items)
    tokens = dict[str, TokenIds]()
    for at, item in enumerate(items):
        if sent := same.get(item.id):
            tokens[item.id] = tuple(sent.tokens)
            for back, (known, ids) in enumerate(reversed(sent.before), start=1):
                given = items[at - back] if back <= at else None
                if not isinstance(given, Reasoning | Message) or not _says_the_same(given, known):
                    break
                tokens[given.id] = tuple(ids)
    return own, tokens


def _in_its_words(item: Item, sent: _Sent) -> Item:
    if isinstance(item, FunctionCall) and item.arguments != sent.call.text:
        return replace(item, arguments=sent.call.text)
    return item


def _by_item(call: FunctionCall | CustomToolCall) -> str:
    """Return the id of a call that this server has made, by that of its item: a dialect may name calls in its way."""
    return f"call_{call.id.partition('_')[2]}"


def _means_the_same(call: FunctionCall | CustomToolCall, sent: _Sent) -> bool:
    if call.text == sent.spelling:
        return True
    if not isinstance(call, FunctionCall) or (given := _sorted(call.text)) is None or given != _sorted(sent.call.text):
        return False
    sent.spelling = call.text  # a client spells it alike in each turn
    return True


def _says_the_same(given: Reasoning | Message, known: Reasoning | Message) -> bool:
    return type(given) is type(known) and given.text == known.text


def _sorted(arguments: str) -> bytes | None:
    """Return arguments in one spelling; None if they are no JSON."""
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted")
    except (msgspec.DecodeError, msgspec.EncodeError, RecursionError, ValueError):
        return None
