"""The event log: the events of one run in a compact form that reproduces them byte by byte.

Most events can be derived: the events that close an item from its deltas, and the first and last events of the stream
from the response.  So a block of the log holds the texts of deltas, a complete copy of each event that cannot be
derived (such as one opening an item), and for all others an index into `StreamState.predict`.  Writer and reader feed
the same events to a `StreamState`, so they get the same predictions.

The first events are derived from the final response.  If a stage breaks the protocol by changing, at the end, fields
that repeat the request, a reader sees the changed fields from the first event on.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.pipeline.lifecycle.outcome import begun
from penstock.pipeline.lifecycle.stream_state import StreamState
from penstock.pipeline.protocol.events import (
    OutputTextDelta,
    ResponseCreated,
    ResponseEvent,
    ResponseInProgress,
    ResponseQueued,
    TerminalEvent,
)
from penstock.pipeline.protocol.generations import Generation
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.protocol.response import Response, Usage


class Block(msgspec.Struct, frozen=True):
    """``count`` consecutive events, encoded, from sequence number ``first`` on."""

    first: int
    count: int
    data: bytes


class _Texts(msgspec.Struct, array_like=True, tag=0):
    """Deltas of the open text, which have no log probabilities."""

    texts: list[str]


class _Likely(msgspec.Struct, array_like=True, tag=1):
    """A delta with log probabilities."""

    text: str
    logprobs: tuple[Logprob, ...]


_Entry: TypeAlias = _Texts | _Likely | int | bytes
"""Deltas, the index of a prediction, or a complete encoded event."""

_encode = msgspec.msgpack.Encoder().encode
_decode_entries = msgspec.msgpack.Decoder(list[_Entry]).decode
_decode_event: Any = msgspec.msgpack.Decoder(ResponseEvent).decode
_decode_json: Any = msgspec.json.Decoder(ResponseEvent).decode


class EventLog:
    """State machine for the log of one run.  It is appended to, can be read from any event, and does no I/O.

    ``response`` is the response so far, and the final response once the terminal event is sealed.  ``fresh`` holds the
    events since the last block, not encoded.  All blocks share one byte array, because a Python object for each would
    take more memory than its data.  Events must be appended in the order of their sequence numbers.
    """

    def __init__(self, response: Response, blocks: Iterable[Block] = ()) -> None:
        self.response = response
        self.fresh: list[ResponseEvent] = []
        self._state = StreamState()
        self._data = bytearray()
        self._ends = array("q", [0])  # the end of each block in `_data`, after the start of the first
        for block in blocks:
            self.load(block)

    @property
    def size(self) -> int:
        """Memory in bytes that the blocks use."""
        return sys.getsizeof(self._data) + sys.getsizeof(self._ends)

    @property
    def last_number(self) -> int:
        """The sequence number of the last event, -1 if there is none."""
        return self.fresh[-1].sequence_number if self.fresh else self.last_sealed

    @property
    def last_sealed(self) -> int:
        """The sequence number of the last event in a block, -1 if there is none."""
        return self._state.number

    @property
    def next_number(self) -> int:
        return self.last_number + 1

    def load(self, block: Block) -> None:
        """Load the next block of a stored log."""
        for _ in _read(block.data, self._state, self.response):
            pass
        self._keep(block.data)

    def append(self, event: ResponseEvent) -> None:
        self.fresh.append(event)

    def begin(self) -> None:
        """Append the first events of a response, up to its present status, if no pipeline has emitted them."""
        created = begun(self.response)
        self.append(ResponseCreated(0, created))
        if created.status == "queued":
            self.append(ResponseQueued(1, created))
        if self.response.status == "in_progress":
            self.append(ResponseInProgress(self.next_number, replace(created, status="in_progress")))

    def seal(self) -> Block | None:
        """Encode the fresh events as a block; return None if there are none."""
        events, self.fresh = self.fresh, []
        return self._block(events, self._entries(events))

    def end_early(
        self,
        error: Exception | None,
        usage: Usage | None,
        generations: tuple[Generation, ...] | UnsetType = UNSET,
    ) -> Block | None:
        """Close the open item and the stream, and seal the log.

        Without ``error``, the response is cancelled, and has this ``usage``.  It had these ``generations`` until now.

        An empty log gets its first events, too.
        Returns None if there were no events to seal.
        """
        if self.next_number == 0:
            self.begin()
        events, self.fresh = self.fresh, []
        entries = self._entries(events)
        while not self._state.ended:
            events.append(self._state.ending(error, usage, generations))
            entries += self._entries(events[-1:])
        return self._block(events, entries)

    def read(self, after: int = -1) -> Iterator[ResponseEvent]:
        """Yield the events after sequence number ``after``."""
        reader = LogReader(self, after)
        while reader.is_behind:
            yield from reader.read()

    def sealed(self, number: int) -> bytes:
        begin, end = self._ends[number : number + 2]
        return bytes(self._data[begin:end])

    def _entries(self, events: Sequence[ResponseEvent]) -> list[_Entry]:
        entries, at = list[_Entry](), 0
        while at < len(events):
            if texts := self._state.take_run(events, at):
                entries.append(_Texts(texts))
                at += len(texts)
            else:
                entries.append(self._entry(events[at]))
                self._state.feed(events[at])
                at += 1
        return entries

    def _entry(self, event: ResponseEvent) -> _Entry:
        if isinstance(event, TerminalEvent):
            self.response = event.response
        elif isinstance(event, OutputTextDelta) and self._state.deltas([event.delta], event.logprobs) == [event]:
            return _Likely(event.delta, event.logprobs)
        for number, prediction in enumerate(self._state.predict(self.response)):
            if prediction == event:
                return number
        return _whole(event)

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
    """State machine for one reader of a log, which may still be growing.  It does no I/O."""

    def __init__(self, log: EventLog, after: int = -1) -> None:
        self._log = log
        self._after = after
        self._blocks_read = 0
        self._state = StreamState()
        self._fresh: list[ResponseEvent] = []  # the log's list at the last read, and the position reached in it
        self._position = 0

    @property
    def is_behind(self) -> bool:
        """True if there are unread events."""
        return self._after < self._log.last_number

    def read(self) -> Sequence[ResponseEvent]:
        """Return the next unread events: at most one block, or all fresh ones.

        As long as the reader keeps up with the writer, nothing is decoded.
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
        events = _read(self._log.sealed(self._blocks_read), self._state, self._log.response)
        self._blocks_read += 1
        return [event for event in events if event.sequence_number > self._after]


def read_blocks(response: Response, blocks: Iterable[Block]) -> Iterator[ResponseEvent]:
    """Yield the events of a stored log; ``response`` is the response so far, or the final one if it has ended."""
    state = StreamState()
    for block in blocks:
        yield from _read(block.data, state, response)


def _read(data: bytes, state: StreamState, response: Response) -> Iterator[ResponseEvent]:
    for entry in _decode_entries(data):
        if isinstance(entry, _Texts):
            yield from state.deltas(entry.texts)
            state.take(entry.texts)
        else:
            event = _event(entry, state, response)
            state.feed(event)
            yield event


def _event(entry: _Likely | int | bytes, state: StreamState, response: Response) -> ResponseEvent:
    match entry:
        case _Likely(text, logprobs):
            return state.deltas([text], logprobs)[0]
        case int(number):
            return next(islice(state.predict(response), number, None))
        case bytes():
            event: ResponseEvent = (_decode_json if entry.startswith(b"{") else _decode_event)(entry)
            return event


def _whole(event: ResponseEvent) -> bytes:
    """Encode an event: as JSON if it has an integer that MessagePack has not, such as one of the schema of a tool."""
    try:
        return _encode(event)
    except OverflowError:
        return msgspec.json.encode(event)


def _number(event: ResponseEvent) -> int:
    return event.sequence_number
