"""The event log: the events of one run, kept so compactly that any of them can be read again to the same bytes.

Whoever knows an item's deltas can tell the events that close it, and whoever knows the response those that begin and
end it.  So a block of the log holds the texts of deltas, the whole of those events that nobody can tell, as those that
open items, and for all others the number of the right one among the guesses of `Follower`.  Writer and reader follow
the same events, hence make the same guesses.

What begins a response is told from how it ended.  So a stage that changes, only at the end, what the response says of
its request, which no stream may, is read as if it had said so from the beginning.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.pipeline.lifecycle.follower import Follower
from penstock.pipeline.lifecycle.outcome import begun
from penstock.pipeline.protocol.events import (
    OutputTextDelta,
    ResponseCreated,
    ResponseEvent,
    ResponseInProgress,
    ResponseQueued,
    TerminalEvent,
)
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.protocol.response import Response


class Block(msgspec.Struct, frozen=True):
    """Some events in a row: ``count`` of them, from sequence number ``first`` on."""

    first: int
    count: int
    data: bytes


class _Texts(msgspec.Struct, array_like=True, tag=0):
    """Deltas of the open text."""

    texts: list[str]


class _Likely(msgspec.Struct, array_like=True, tag=1):
    """A delta with logprobs."""

    text: str
    logprobs: tuple[Logprob, ...]


_Entry: TypeAlias = _Texts | _Likely | int | bytes
"""Deltas, the number of a guess, or a whole event."""

_encode = msgspec.msgpack.Encoder().encode
_decode_entries = msgspec.msgpack.Decoder(list[_Entry]).decode
_decode_event: Any = msgspec.msgpack.Decoder(ResponseEvent).decode


class EventLog:
    """The machine: the log of one run, which is written at its end and read from anywhere.

    ``response`` is the response so far, and how it ended once that event is sealed.  The events since the last block
    are ``fresh``: kept as they are.  All blocks are one stretch of bytes, because objects of their own would weigh more
    than what is in them.  Events come in the order of their numbers.
    """

    def __init__(self, response: Response, blocks: Iterable[Block] = ()) -> None:
        self.response = response
        self.fresh: list[ResponseEvent] = []
        self._follower = Follower()
        self._data = bytearray()
        self._ends = array("q", [0])  # where each block ends in there, and the first begins
        for block in blocks:
            self.load(block)

    @property
    def size(self) -> int:
        """Bytes that the blocks take."""
        return sys.getsizeof(self._data) + sys.getsizeof(self._ends)

    @property
    def last_number(self) -> int:
        """The sequence number of the last event, -1 before the first."""
        return self.fresh[-1].sequence_number if self.fresh else self.last_sealed

    @property
    def last_sealed(self) -> int:
        """The sequence number of the last event in a block."""
        return self._follower.number

    @property
    def next_number(self) -> int:
        """The sequence number of the event to come."""
        return self.last_number + 1

    def load(self, block: Block) -> None:
        """Take the next block of a log that was stored."""
        for _ in _read(block.data, self._follower, self.response):
            pass
        self._keep(block.data)

    def append(self, event: ResponseEvent) -> None:
        """Take the next event."""
        self.fresh.append(event)

    def begin(self) -> None:
        """Take the events that a response begins with, up to its present status, where nobody else writes them."""
        created = begun(self.response)
        self.append(ResponseCreated(0, created))
        if created.status == "queued":
            self.append(ResponseQueued(1, created))
        if self.response.status == "in_progress":
            self.append(ResponseInProgress(self.next_number, replace(created, status="in_progress")))

    def seal(self) -> Block | None:
        """Encode what came since the last block; None if nothing did."""
        events, self.fresh = self.fresh, []
        return self._block(events, self._entries(events))

    def break_off(self, error: Exception | None) -> Block | None:
        """End the stream here in good order, as `Follower.ending` does, and seal it.

        A log without any event begins first.
        """
        if self.next_number == 0:
            self.begin()
        events, self.fresh = self.fresh, []
        entries = self._entries(events)
        while not self._follower.ended:
            events.append(self._follower.ending(error))
            entries += self._entries(events[-1:])
        return self._block(events, entries)

    def read(self, after: int = -1) -> Iterator[ResponseEvent]:
        """The events behind the one of number ``after``."""
        reader = LogReader(self, after)
        while reader.is_behind:
            yield from reader.read()

    def sealed(self, number: int) -> bytes:
        """What is in the block of that number."""
        begin, end = self._ends[number : number + 2]
        return bytes(self._data[begin:end])

    def _entries(self, events: Sequence[ResponseEvent]) -> list[_Entry]:
        """What to write of the next events."""
        entries, at = list[_Entry](), 0
        while at < len(events):
            if texts := self._follower.growth(events, at):
                entries.append(_Texts(texts))
                at += len(texts)
            else:
                entries.append(self._entry(events[at]))
                self._follower.feed(events[at])
                at += 1
        return entries

    def _entry(self, event: ResponseEvent) -> _Entry:
        if isinstance(event, TerminalEvent):
            self.response = event.response
        elif isinstance(event, OutputTextDelta) and self._follower.deltas([event.delta], event.logprobs) == [event]:
            return _Likely(event.delta, event.logprobs)
        for number, guess in enumerate(self._follower.guesses(self.response)):
            if guess == event:
                return number
        return _encode(event)

    def _block(self, events: Sequence[ResponseEvent], entries: list[_Entry]) -> Block | None:
        if not events:
            return None
        block = Block(events[0].sequence_number, len(events), _encode(entries))
        self._keep(block.data)
        return block

    def _keep(self, data: bytes) -> None:
        self._data += data
        self._ends.append(len(self._data))


class LogReader:
    """The machine: one reader of a log, which may still be growing."""

    def __init__(self, log: EventLog, after: int = -1) -> None:
        self._log = log
        self._after = after
        self._blocks_read = 0
        self._follower = Follower()
        self._fresh: list[ResponseEvent] = []  # the log's own list when it was last read, up to this position
        self._position = 0

    @property
    def is_behind(self) -> bool:
        """Whether there are events that were not read."""
        return self._after < self._log.last_number

    def read(self) -> Sequence[ResponseEvent]:
        """Some of the events that were not read, in order: no more than a block of them, or those that are fresh.

        Nothing is decoded as long as the reader keeps up with the writer.
        """
        if not self.is_behind:
            return ()
        events = self._next_fresh() if self._after >= self._log.last_sealed else self._next_block()
        if events:
            self._after = events[-1].sequence_number
        return events

    def _next_fresh(self) -> Sequence[ResponseEvent]:
        fresh = self._log.fresh
        if fresh is not self._fresh:
            self._fresh, self._position = fresh, bisect_right(fresh, self._after, key=_number)
        position, self._position = self._position, len(fresh)
        return fresh[position:]

    def _next_block(self) -> Sequence[ResponseEvent]:
        events = _read(self._log.sealed(self._blocks_read), self._follower, self._log.response)
        self._blocks_read += 1
        return [event for event in events if event.sequence_number > self._after]


def read_blocks(response: Response, blocks: Iterable[Block]) -> Iterator[ResponseEvent]:
    """The events of a log that was stored; ``response`` is the response so far, or as it ended."""
    follower = Follower()
    for block in blocks:
        yield from _read(block.data, follower, response)


def _read(data: bytes, follower: Follower, response: Response) -> Iterator[ResponseEvent]:
    for entry in _decode_entries(data):
        if isinstance(entry, _Texts):
            yield from follower.deltas(entry.texts)
            follower.take(entry.texts)
        else:
            event = _told(entry, follower, response)
            follower.feed(event)
            yield event


def _told(entry: _Likely | int | bytes, follower: Follower, response: Response) -> ResponseEvent:
    match entry:
        case _Likely(text, logprobs):
            return follower.deltas([text], logprobs)[0]
        case int(number):
            return next(islice(follower.guesses(response), number, None))
        case bytes():
            event: ResponseEvent = _decode_event(entry)
            return event


def _number(event: ResponseEvent) -> int:
    return event.sequence_number
