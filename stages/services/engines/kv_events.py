"""The contents of the prefix caches of vLLM servers, from the KV events that the servers publish over ZeroMQ.

A server publishes them with ``--kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'``.
Importing this module needs pyzmq, which is installed along with vLLM.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from penstock.pipeline.frames import Prompt
from penstock.stages.services.engines.cached_blocks import AllBlocksCleared, CachedBlocks, CacheEvent

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 200
"""Milliseconds after which the thread that listens looks if it should end."""

MOST_WAITING = 10_000
"""Messages of a server that wait for the thread; if more come, some are lost, and its cache is learned anew."""

KNOWN_SHARE = 0.5
"""Share of a prompt that some cache must be known to hold, if there are blocks that were stored before we listened."""


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[msgspec.Raw]


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_event: Any = msgspec.msgpack.Decoder(CacheEvent).decode


@dataclass
class _Server:
    """A server, and how much of its cache was heard of."""

    url: str
    cache: int
    next: int | None = None
    """The number of its next message; None before the first."""
    is_whole: bool = False
    """True if every block that it holds was heard of."""
    complained: bool = False


class KvEvents:
    """The prefix caches of servers, by their KV events, which a thread reads.

    ``addresses`` are the ZeroMQ addresses of the events, by the URLs of the servers.  Raises `ValueError` if ZeroMQ
    cannot connect to one.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._blocks = CachedBlocks()
        self._context = zmq.Context()
        self._closing = threading.Event()
        self._servers = dict[zmq.Socket[bytes], _Server]()
        try:
            for cache, (url, address) in enumerate(addresses.items()):
                self._servers[self._connected(address)] = _Server(url, cache)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._urls = [server.url for server in self._servers.values()]
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
        if known < KNOWN_SHARE * len(prompt.token_ids) and not all(
            server.is_whole for server in self._servers.values()
        ):
            return None
        return {self._urls[cache]: tokens for cache, tokens in found.items()}

    def sizes(self) -> Mapping[str, int]:
        """Return the number of blocks that each server is known to hold."""
        return {server.url: self._blocks.count(server.cache) for server in self._servers.values()}

    def close(self) -> None:
        """Stop listening; blocks for up to `POLL_MILLISECONDS`."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _connected(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        socket.rcvhwm = MOST_WAITING
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ValueError(f"{address} is no address of KV events: {error}") from error
        return socket

    def _listen(self) -> None:
        poller = zmq.Poller()
        for socket in self._servers:
            poller.register(socket, zmq.POLLIN)
        while not self._closing.is_set():
            for socket, _ in poller.poll(POLL_MILLISECONDS):
                server = self._servers[socket]
                self._take(server, socket.recv_multipart())

    def _take(self, server: _Server, message: list[bytes]) -> None:
        try:
            _, number, payload = message
            batch = _decode_batch(payload)
        except (ValueError, msgspec.MsgspecError) as error:
            self._complain(server, error)
            return
        self._follow(server, int.from_bytes(number))
        for raw in batch.events:
            try:
                event = _decode_event(raw)
            except msgspec.MsgspecError as error:
                self._complain(server, error)
                continue
            self._blocks.take(server.cache, event)
            server.is_whole |= isinstance(event, AllBlocksCleared)

    def _follow(self, server: _Server, number: int) -> None:
        if server.next is None:
            logger.info("The engine at %s reports its prefix cache", server.url)
        if number != server.next:
            self._blocks.forget(server.cache)
            server.is_whole = number == 0
        server.next = number + 1

    def _complain(self, server: _Server, error: Exception) -> None:
        if not server.complained:
            server.complained = True
            logger.warning("Some KV events of the engine at %s cannot be read, and are left out: %s", server.url, error)
