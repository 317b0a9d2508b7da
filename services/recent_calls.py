"""RecentCalls: the tokens of calls that clients were sent, for when they send the calls back as texts.

A client with ``store: false`` keeps its conversation, and sends calls without the tokens that the model has written: a
model may write a header, a blank or an escape in another way than it is rendered.  So it is with what comes before the
calls, in APIs that have no place for sealed thoughts.  With the tokens, the next prompt begins with those of the turn
before, which the engine's prefix cache holds.  They are in memory alone: a server that does not know them renders the
text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

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


class RecentCalls:
    """Calls by their ids; each key has at most half of the room."""

    def __init__(self) -> None:
        self._sent: LruCache[_Sent] = LruCache(MOST_BYTES, MOST_BYTES // 2)
        self._lock = Lock()  # a thread reads the calls of long requests

    def keep(self, items: Iterable[Item], owner: str, writer: str, tokens: Mapping[str, Sequence[int]]) -> None:
        """Remember the whole calls among the items of a response, which the model ``writer`` has written.

        With each are the items between it and the call before.
        """
        before: list[tuple[Reasoning | Message, array[int]]] = []
        for item in items:
            written = array("I", tokens.get(item.id, ()))
            if isinstance(item, Reasoning | Message) and written:
                before.append((item, written))
                continue
            if isinstance(item, FunctionCall | CustomToolCall) and item.status == "completed" and written:
                sent = _Sent(owner, call=item, tokens=written, writer=writer, before=tuple(before), spelling=item.text)
                size = _OWN_BYTES + sum(len(each.text) + 4 * len(ids) for each, ids in (*before, (item, written)))
                with self._lock:
                    self._sent.put(item.call_id, sent, size, owner)
            before = []

    async def restored(
        self, items: Sequence[Item], owner: str, reads: Callable[[str], bool]
    ) -> tuple[tuple[Item, ...], Mapping[str, TokenIds]]:
        """Return items whose calls have the model's own spelling, and the tokens of what it has written, by item id.

        ``reads`` tells if the model reads what another one has written.  A call that the client has changed stays.
        """
        is_long = len(items) > MANY_VALUES or sum(len(call.text) for call in _calls(items)) > _LONG_CHARACTERS
        return await apart(is_long, self._restored, items, owner, reads)

    def _restored(
        self, items: Sequence[Item], owner: str, reads: Callable[[str], bool]
    ) -> tuple[tuple[Item, ...], Mapping[str, TokenIds]]:
        own, tokens = list(items), dict[str, TokenIds]()
        for at, item in enumerate(items):
            if not isinstance(item, FunctionCall | CustomToolCall) or not (sent := self._found(item)):
                continue
            if sent.owner == owner and reads(sent.writer) and _is_same(item, sent):
                own[at] = _in_its_words(item, sent.call)
                tokens[item.id] = tuple(sent.tokens)
                tokens.update(_before(items, at, sent))
        return tuple(own), tokens

    def _found(self, call: FunctionCall | CustomToolCall) -> _Sent | None:
        with self._lock:
            return self._sent.get(call.call_id) or self._sent.get(_by_item(call))


def _calls(items: Iterable[Item]) -> Iterator[FunctionCall | CustomToolCall]:
    return (item for item in items if isinstance(item, FunctionCall | CustomToolCall))


def _before(items: Sequence[Item], at: int, sent: _Sent) -> Iterator[tuple[str, TokenIds]]:
    """Yield the ids and tokens of the items before a call, from the last to the first that is as it was."""
    for back, (known, ids) in enumerate(reversed(sent.before), start=1):
        given = items[at - back] if back <= at else None
        if not isinstance(given, Reasoning | Message) or not _says_the_same(given, known):
            return
        yield given.id, tuple(ids)


def _in_its_words(item: Item, call: Item) -> Item:
    if isinstance(item, FunctionCall) and isinstance(call, FunctionCall) and item.arguments != call.arguments:
        return replace(item, arguments=call.arguments)
    return item


def _by_item(call: FunctionCall | CustomToolCall) -> str:
    """Return the id of a call that this server has made, by that of its item: a dialect may name calls in its way."""
    return f"call_{call.id.partition('_')[2]}"


def _is_same(call: FunctionCall | CustomToolCall, sent: _Sent) -> bool:
    if call.tool != sent.call.tool:
        return False
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
