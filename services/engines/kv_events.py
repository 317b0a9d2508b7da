"""The contents of the prefix caches of vLLM servers, from the KV events that the servers publish over ZeroMQ.

A server publishes them with ``--kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'``.
Importing this module needs pyzmq, which is installed along with vLLM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import msgspec
import zmq

from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.frames import Prompt
from penstock.services.engines.cached_blocks import AllBlocksCleared, CachedBlocks, CacheEvent

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 200
"""Milliseconds after which the thread that listens looks if it should end."""

MOST_WAITING = 10_000
"""Messages of a server that wait for the thread; if more come, some are lost, and its cache is learned anew."""

LARGEST_MESSAGE = 2**22
"""Bytes of a message, which is far more than the blocks of one step of an engine; a larger one is lost."""

RECONNECT_SECONDS = 0.2
"""Seconds after the end of a connection before another one."""

LEAST_SOCKETS = 1_023
"""ZeroMQ's default number of sockets."""

SOCKETS = 3
"""Sockets of a connection: that of its messages, and two by which ZeroMQ tells of its end."""

KNOWN_SHARE = 0.5
"""Share of a prompt that some cache must be known to hold, if there are blocks that were stored before we listened."""


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[CacheEvent]


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode


@dataclass
class _Server:
    """A server, and how much of its cache was heard of."""

    url: str
    address: str
    cache: int
    messages: zmq.Socket[bytes]
    ends: zmq.Socket[bytes]
    """A socket with an event for each end of the connection."""
    again_at: float | None = None
    """When to connect again; None while it is connected."""
    due: int | None = None
    """The number of its next message; None before the first."""
    is_whole: bool = False
    """True if every block that it holds was heard of."""
    is_stale: bool = False
    """True if its cache has to be forgotten."""
    cleared_at: float = -inf
    """The time of the event that it is empty."""
    has_complaint: bool = False


class KvEvents:
    """The prefix caches of servers, by their KV events, which a thread reads.

    ``addresses`` are the ZeroMQ addresses of the events, by the URLs of the servers.  Raises `ValueError` if ZeroMQ
    cannot connect to one.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._blocks = CachedBlocks()
        self._context = zmq.Context()
        self._context.max_sockets = max(LEAST_SOCKETS, SOCKETS * len(addresses) + 1)
        self._closing = threading.Event()
        try:
            self._all = tuple(
                _Server(url, address, cache, *self._connected(address))
                for cache, (url, address) in enumerate(addresses.items())
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._listen, name="kv-events", daemon=True)
        self._thread.start()

    def cached(self, prompt: Prompt, adapter: str | None) -> Mapping[str, int] | None:
        """Return how many tokens of a prompt each server holds; servers that hold none are left out.

        Returns None if that is not known: of an image, and of what was stored before this object listened.
        """
        if prompt.images:
            return None
        salt = prompt.facts.scheduling.cache_salt
        found = self._blocks.cached(prompt.token_ids, adapter, salt)
        known = max(found.values(), default=0)
        if known < KNOWN_SHARE * len(prompt.token_ids) and not all(server.is_whole for server in self._all):
            return None
        return {self._all[cache].url: tokens for cache, tokens in found.items() if not self._all[cache].is_stale}

    def sizes(self) -> Mapping[str, int]:
        """Return the number of blocks that each server is known to hold; servers that reported none are left out."""
        return {server.url: self._blocks.count(server.cache) for server in self._all if server.due is not None}

    def forget(self, url: str, unless_cleared_after: float | None = None) -> None:
        """Forget the cache of a server, unless an event after a time says that it is empty."""
        for server in self._all:
            if server.url == url and (unless_cleared_after is None or server.cleared_at <= unless_cleared_after):
                server.is_stale, server.is_whole = True, False  # the thread then forgets its blocks

    def close(self) -> None:
        """Stop listening; blocks for up to `POLL_MILLISECONDS`."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _connected(self, address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return the socket of a connection, and that of its ends."""
        socket = self._context.socket(zmq.SUB)
        socket.rcvhwm, socket.maxmsgsize, socket.ipv6 = MOST_WAITING, LARGEST_MESSAGE, True
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        ends: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ValueError(f"{address} is no address of KV events: {named_error(error)}") from error
        return socket, ends

    def _listen(self) -> None:
        poller = zmq.Poller()
        for server in self._all:
            _register(poller, server)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MILLISECONDS))
            for server in self._all:
                if server.messages in ready:
                    self._take(server, server.messages.recv_multipart())
                if server.ends in ready:
                    _disconnect(poller, server)
                if server.again_at is not None and time.monotonic() >= server.again_at:
                    server.messages, server.ends = self._connected(server.address)
                    server.again_at = None
                    _register(poller, server)
                if server.is_stale:
                    self._forget(server)
                    server.due, server.is_stale = None, False

    def _take(self, server: _Server, message: list[bytes]) -> None:
        """Follow a message.  A server may send anything: what cannot be followed makes its cache unknown."""
        try:
            _, number, payload = message
            self._count(server, int.from_bytes(number))
            for event in _decode_batch(payload).events:
                self._blocks.take(server.cache, event)
                if isinstance(event, AllBlocksCleared):
                    server.is_whole, server.cleared_at = True, time.monotonic()
        except Exception as error:  # noqa: BLE001
            self._forget(server)
            if not server.has_complaint:
                server.has_complaint = True
                logger.warning("KV events of the engine at %s cannot be read: %s", server.url, named_error(error))

    def _count(self, server: _Server, number: int) -> None:
        if server.due is None:
            logger.info("The engine at %s reports its prefix cache", server.url)
        if number != server.due:
            self._forget(server)
            server.is_whole = number == 0
        server.due = number + 1

    def _forget(self, server: _Server) -> None:
        server.is_whole = False
        self._blocks.forget(server.cache)


def _register(poller: zmq.Poller, server: _Server) -> None:
    for socket in (server.messages, server.ends):
        poller.register(socket, zmq.POLLIN)


def _disconnect(poller: zmq.Poller, server: _Server) -> None:
    """Leave a connection that has ended: ZeroMQ makes no other one after a message that was too large."""
    poller.unregister(server.messages)
    poller.unregister(server.ends)
    server.messages.disable_monitor()
    server.ends.close(linger=0)
    server.messages.close(linger=0)
    server.again_at, server.is_stale, server.is_whole = time.monotonic() + RECONNECT_SECONDS, True, False
