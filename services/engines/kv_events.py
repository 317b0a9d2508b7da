"""The contents of the prefix caches of vLLM servers, from the KV events that the servers publish over ZeroMQ.

A server publishes them with ``--kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'``.
Each of its data parallel ranks has a cache and an address of its own.  With a ``replay_endpoint``, a server repeats its
last messages: so its caches are known after a start of this process, and after lost messages.

Importing this module needs pyzmq, which is installed along with vLLM.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from math import inf
from queue import SimpleQueue

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.frames import Prompt
from penstock.services.engines.cached_blocks import AllBlocksCleared, CachedBlocks, CacheEvent
from penstock.services.engines.replicas import EventSource, core_name

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 200
"""Milliseconds after which the thread that listens looks if it should end."""

MOST_WAITING = 1_000
"""Messages of a server that wait for the thread; if more come, some are lost, and the server is to repeat them."""

LARGEST_MESSAGE = 2**22
"""Bytes of a message, which is far more than the blocks of one step of an engine; a larger one is lost."""

RECONNECT_SECONDS = 0.2
"""Seconds after the end of a connection before another one."""

REPLAY_SECONDS = 5.0
"""Seconds without a repeated message after which no more are expected."""

LONGEST_REPLAY = 120.0
"""Seconds after which a server has repeated enough: its new messages wait meanwhile."""

AT_ONCE = 0.02
"""Seconds in which repeated messages of a server are taken before those of others."""

KNOWN_SHARE = 0.5
"""Share of a prompt that some cache must be known to hold, if there are blocks that were stored before we listened."""


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[CacheEvent]


_PORT = re.compile(r"tcp://.*:(\d{1,5})")

_decode_batch = msgspec.msgpack.Decoder(_Batch).decode

_OPTIONS = {"rcvhwm": MOST_WAITING, "maxmsgsize": LARGEST_MESSAGE, "ipv6": True, "linger": 0}

_NUMBER = struct.Struct(">q")
"""The number of a message, which is negative at the end of a replay alone."""


@dataclass
class _Replay:
    """The messages that a server repeats; its new ones wait meanwhile."""

    socket: zmq.Socket[bytes]
    quiet_at: float
    """When the server is taken to repeat no more."""
    ends_at: float
    """When it is to repeat no more."""
    has_any: bool = False


@dataclass
class _Source:
    """The events of an engine core, and how much of its cache was heard of."""

    url: str
    number: int
    address: str
    cache: int
    messages: zmq.Socket[bytes]
    changes: zmq.Socket[bytes]
    """A socket with an event for each beginning and each end of the connection."""
    is_connected: bool = False
    again_at: float | None = None
    """When to connect again; None unless the connection has ended."""
    due: int | None = None
    """The number of its next message; None before the first."""
    is_whole: bool = False
    """True if every block that it holds was heard of."""
    is_stale: bool = False
    """True if its cache has to be forgotten."""
    cleared_at: float = -inf
    """The time of the event that it is empty."""
    has_complaint: bool = False
    replay_address: str | None = None
    replay: _Replay | None = None
    may_repeat: bool = False
    """True after a replay, until the first message that it did not have."""
    is_to_repeat: bool = False
    """True if the server is to repeat its messages after its cache was forgotten."""

    @property
    def name(self) -> str:
        """The name of the engine core."""
        return core_name(self.url, self.number)


class KvEvents:
    """The prefix caches of servers, by their KV events, which a thread reads.

    ``addresses`` are the ZeroMQ addresses of the events by the URLs of the servers, if a server has several ranks that
    of the first.  Raises `ValueError` if ZeroMQ cannot connect to one.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)
        self._blocks = CachedBlocks()
        self._context = zmq.Context()
        self._context.max_sockets = self._context.get(zmq.SOCKET_LIMIT)
        for name, value in _OPTIONS.items():
            setattr(self._context, name, value)  # of each socket of it
        self._poller = zmq.Poller()
        self._told = SimpleQueue[tuple[str, Sequence[EventSource]]]()
        self._closing = threading.Event()
        self._all = dict[int, _Source]()  # by the numbers of their caches; it is replaced, not changed
        try:
            for url, address in self._addresses.items():
                self._add(url, 0, address)
        except BaseException:
            self._context.destroy()
            raise
        self._thread = threading.Thread(target=self._listen, name="kv-events", daemon=True)
        self._thread.start()

    def cached(self, prompt: Prompt, adapter: str | None) -> Mapping[str, int] | None:
        """Return how many tokens of a prompt each engine core holds; those that hold none are left out.

        Returns None if that is not known: of an image, and of what was stored before this object listened.
        """
        if prompt.images:
            return None
        salt, sources = prompt.facts.scheduling.cache_salt, self._all
        found = self._blocks.cached(prompt.token_ids, adapter, salt)
        known = max(found.values(), default=0)
        if known < KNOWN_SHARE * len(prompt.token_ids) and not all(source.is_whole for source in sources.values()):
            return None
        held = ((sources[cache], tokens) for cache, tokens in found.items() if cache in sources)
        return {source.name: tokens for source, tokens in held if not source.is_stale}

    def sizes(self) -> Mapping[str, int]:
        """Return the number of blocks that each core is known to hold; cores that reported none are left out."""
        sources = (source for source in self._all.values() if source.due is not None)
        return {source.name: self._blocks.count(source.cache) for source in sources}

    def forget(self, url: str, unless_cleared_after: float | None = None) -> None:
        """Forget the caches of a server, unless an event after a time says that they are empty.

        Without a time, the server then repeats what it has published.
        """
        for source in self._all.values():
            if source.url == url and (unless_cleared_after is None or source.cleared_at <= unless_cleared_after):
                source.is_to_repeat = unless_cleared_after is None
                source.is_stale, source.is_whole = True, False  # the thread then forgets its blocks

    def follow(self, url: str, sources: Sequence[EventSource]) -> None:
        """Take in where a server says that its engine cores publish events, in the order of their ranks.

        Of these addresses only the ports count: a server does not know by which name it is reached.
        """
        self._told.put((url, sources))

    def close(self) -> None:
        """Stop listening; blocks for up to `POLL_MILLISECONDS`."""
        self._closing.set()
        self._thread.join()
        self._context.destroy()

    def _add(self, url: str, number: int, address: str) -> _Source:
        cache = next(cache for cache in count() if cache not in self._all)
        messages, changes = self._connected(address)
        source = _Source(url=url, number=number, address=address, cache=cache, messages=messages, changes=changes)
        self._register(source)
        self._all = {**self._all, cache: source}
        return source

    def _connected(self, address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return the socket of a connection, and that of its changes."""
        with ExitStack() as failing:
            socket = failing.enter_context(self._context.socket(zmq.SUB))
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            changes: zmq.Socket[bytes] = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            failing.callback(changes.close)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                raise ValueError(f"{address} is no address of KV events: {named_error(error)}") from error
            failing.pop_all()
        return socket, changes

    def _listen(self) -> None:
        while not self._closing.is_set():
            ready = dict(self._poller.poll(POLL_MILLISECONDS))
            while not self._told.empty():
                self._adapt(*self._told.get())
            for source in self._all.values():
                try:
                    self._attend(source, ready)
                except Exception as error:  # noqa: BLE001 - such as too many open files
                    self._complain(source, error)
                    self._lose(source)

    def _attend(self, source: _Source, ready: Mapping[zmq.Socket[bytes], int]) -> None:
        """Do what is due for a source."""
        if source.is_stale:
            source.is_stale = False
            self._start_anew(source)
        if source.replay:
            self._hear_again(source, source.replay)
        elif source.messages in ready:
            self._take(source, source.messages.recv_multipart())
        if source.changes in ready:
            self._change(source)
        if source.again_at is not None and time.monotonic() >= source.again_at:
            source.messages, source.changes = self._connected(source.address)
            source.again_at = None
            self._register(source)

    def _register(self, source: _Source) -> None:
        for socket in (source.messages, source.changes):
            self._poller.register(socket, zmq.POLLIN)

    def _change(self, source: _Source) -> None:
        """Note that a connection has begun or ended.

        One that has ended is left: ZeroMQ makes no other one after a message that was too large.
        """
        if recv_monitor_message(source.changes)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            source.is_connected = source.is_to_repeat = True
            if source.due is None or source.replay_address:
                self._start_anew(source)
            return
        self._lose(source)

    def _lose(self, source: _Source) -> None:
        """Leave a connection, and make another one later."""
        self._leave(source)
        source.again_at, source.is_to_repeat = time.monotonic() + RECONNECT_SECONDS, False
        self._start_anew(source)

    def _leave(self, source: _Source) -> None:
        """Close the sockets of a source."""
        self._end_replay(source)
        source.is_connected = False
        if source.again_at is None:
            self._poller.unregister(source.messages)
            self._poller.unregister(source.changes)
            source.messages.disable_monitor()
            source.changes.close()
            source.messages.close()

    def _adapt(self, url: str, told: Sequence[EventSource]) -> None:
        """Follow as many engine cores of a server as it names, and have them repeat what they have published."""
        given = self._addresses[url]
        known = {source.number: source for source in self._all.values() if source.url == url}
        for number, source in known.items():
            if number >= max(1, len(told)):
                self._leave(source)
                self._forget(source)
                self._all = {cache: one for cache, one in self._all.items() if one is not source}
        for number, one in enumerate(told):
            address = _beside(given, one.endpoint, told[0].endpoint) if number else given
            if address is None:
                continue
            try:
                source = known.get(number) or self._add(url, number, address)
            except (ValueError, zmq.ZMQError) as error:
                logger.warning("KV events of the engine at %s cannot be followed: %s", url, named_error(error))
                return
            before, source.replay_address = source.replay_address, _beside(given, one.replay_endpoint, told[0].endpoint)
            if source.replay_address != before and not source.is_whole:
                source.is_to_repeat = source.is_stale = True

    def _start_anew(self, source: _Source) -> None:
        """Forget a cache, and have the server repeat what it has published, if it is to."""
        self._forget(source)
        self._end_replay(source)
        source.due, source.may_repeat = None, False
        if source.is_to_repeat:
            self._ask(source)

    def _ask(self, source: _Source) -> None:
        """Have the server repeat its messages from the one that is due, or as many as it still has."""
        if source.replay_address is None or not source.is_connected:
            return
        with ExitStack() as failing:
            socket = failing.enter_context(self._context.socket(zmq.DEALER))
            socket.connect(source.replay_address)
            socket.send_multipart([b"", _NUMBER.pack(source.due or 0)])
            failing.pop_all()
        self._poller.unregister(source.messages)
        self._poller.register(socket, zmq.POLLIN)
        now = time.monotonic()
        source.replay, source.is_to_repeat = _Replay(socket, now + REPLAY_SECONDS, now + LONGEST_REPLAY), False

    def _end_replay(self, source: _Source) -> None:
        if source.replay:
            self._poller.unregister(source.replay.socket)
            source.replay.socket.close()
            self._poller.register(source.messages, zmq.POLLIN)
            source.replay, source.may_repeat = None, True

    def _hear_again(self, source: _Source, replay: _Replay) -> None:
        """Take some repeated messages, the last of which has no content and a negative number.

        If one is lost, as vLLM drops those that we are slow to read, the server has to repeat the rest.
        """
        is_quiet, until = False, time.monotonic() + AT_ONCE
        while (now := time.monotonic()) < until:
            try:
                message = replay.socket.recv_multipart(zmq.NOBLOCK)[1:]
                number = _number(message)
            except zmq.Again:
                is_quiet = now >= replay.quiet_at
                break
            except (ValueError, struct.error):
                continue
            if number < 0:
                self._heard(source, replay, is_end=True)
                return
            if number < (source.due or 0):
                continue  # it is not one that is missing
            if replay.has_any and number != source.due:
                self._end_replay(source)
                self._ask(source)
                return
            replay.has_any, replay.quiet_at = True, now + REPLAY_SECONDS
            self._take(source, message)
        if is_quiet or now >= replay.ends_at:
            self._heard(source, replay, is_end=False)

    def _heard(self, source: _Source, replay: _Replay, *, is_end: bool) -> None:
        """Go on with the new messages."""
        self._end_replay(source)
        if not replay.has_any and not (is_end and source.due is None):
            self._start_anew(source)
        elif source.due is None:  # it has published nothing
            source.due, source.is_whole = 0, True

    def _take(self, source: _Source, message: list[bytes]) -> None:
        """Follow a message.  A server may send anything: what cannot be followed makes its cache unknown."""
        try:
            if not self._counts(source, _number(message)):
                return
            for event in _decode_batch(message[2]).events:
                self._blocks.take(source.cache, event)
                if isinstance(event, AllBlocksCleared):
                    source.is_whole, source.cleared_at = True, time.monotonic()
        except Exception as error:  # noqa: BLE001
            self._forget(source)
            self._complain(source, error)

    def _complain(self, source: _Source, error: Exception) -> None:
        if not source.has_complaint:
            source.has_complaint = True
            logger.warning("KV events of the engine at %s cannot be read: %s", source.url, named_error(error))

    def _counts(self, source: _Source, number: int) -> bool:
        """Return True if the message with this number is to be followed now."""
        if source.due is None:
            logger.info("The engine at %s reports its prefix cache", source.name)
        elif number < source.due and source.may_repeat:
            return False
        elif number > source.due and source.replay is None:
            self._ask(source)
            if source.replay:
                return False
        if number != source.due:
            self._forget(source)
            source.is_whole = number == 0
        source.due = number + 1
        if source.replay is None:
            source.may_repeat = False
        return True

    def _forget(self, source: _Source) -> None:
        source.is_whole = False
        self._blocks.forget(source.cache)


def _number(message: list[bytes]) -> int:
    """Return the number of a message, which has two other parts: a topic and a content."""
    _, number, _ = message
    return int(*_NUMBER.unpack(number))


def _beside(given: str, address: str | None, first: str) -> str | None:
    """Return another address of a server whose ``first`` one is ``given``, as the server and as the operator say."""
    ports = [int(port[1]) for each in (given, address, first) if (port := _PORT.fullmatch(each or ""))]
    if len(ports) < 3:
        return None
    beside = ports[0] + ports[1] - ports[2]
    return f"{given.rpartition(':')[0]}:{beside}" if 0 < beside < 2**16 else None
