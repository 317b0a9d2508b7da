"""A network in memory: bytes arrive late and in pieces, connections break, and processes cannot reach each other.

Each direction of a connection keeps the order of its bytes.  A seed decides when they arrive, and in how many pieces.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.loop import Process, SimulatedLoop

LATENCY = 1e-3
"""The most seconds until bytes arrive."""

LOSS, RETRANSMISSION = 0.02, 0.4
"""The share of packets that are lost, and the most seconds until they arrive all the same."""

NOTICE = 5.0
"""The most seconds until an end of a broken connection notices it."""

RETRY = 0.2
"""Seconds between two attempts of bytes to pass a partition."""

HIGH, LOW = 64 * 1024, 16 * 1024
"""Bytes on their way above which a sender has to pause, and below which it may go on."""

SPLIT = 0.3
"""The share of arrivals that bring a part of the bytes only."""


@dataclass(eq=False)
class Listener:
    """A listening socket, as `loop.create_server` returns it."""

    network: Network
    factory: Callable[[], asyncio.Protocol]
    address: tuple[str, int]
    process: Process
    context: Context
    sockets: tuple[Any, ...] = ()

    def close(self) -> None:
        """Accept no more connections."""
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]

    async def wait_closed(self) -> None:
        """Return at once: the connections end by themselves."""

    def is_serving(self) -> bool:
        return self.network.listeners.get(self.address) is self


@dataclass(eq=False)
class Network:
    """The connections between the processes of a simulation."""

    loop: SimulatedLoop
    seed: str
    listeners: dict[tuple[str, int], Listener] = field(default_factory=dict)
    ends: dict[End, None] = field(default_factory=dict)
    """The open ends of connections, in the order in which they were opened."""
    apart: set[frozenset[str]] = field(default_factory=set)
    """The pairs of processes, by name, whose bytes wait."""
    _connecting: dict[int, Listener] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed} network")

    def listen(self, factory: Callable[[], asyncio.Protocol], host: str, port: int) -> Listener:
        """Listen at an address for the process that calls."""
        process = self.loop.process
        made = self.listeners[host, port] = Listener(self, factory, (host, port), process, copy_context())
        return made

    async def connect(self, sock: Any, address: tuple[str, int]) -> None:
        """Reach the listener at an address; ``sock`` is a real socket, which is only a key here."""
        await asyncio.sleep(self._random.random() * LATENCY)
        while True:
            listener = self.listeners.get((address[0], address[1]))
            if listener is None:
                raise ConnectionRefusedError(111, f"Connect call failed {address}")
            if not self.is_cut(self.loop.process, listener.process):
                break
            await asyncio.sleep(RETRY)
        self._connecting[id(sock)] = listener

    def joined(self, factory: Callable[[], asyncio.Protocol], sock: Any) -> tuple[End, asyncio.Protocol]:
        """Open the connection that `connect` has prepared; return the end of the process that calls."""
        listener = self._connecting.pop(id(sock))
        sock.close()
        self._count += 1
        ours = End(self, self._count, self.loop.process, copy_context(), factory(), listener.address)
        theirs = End(self, self._count, listener.process, listener.context, None, ("10.9.0.1", 20_000 + self._count))
        ours.peer, theirs.peer = theirs, ours
        self.ends[ours] = self.ends[theirs] = None
        ours.protocol.connection_made(ours)
        self.loop.call_later(self._random.random() * LATENCY, theirs.accept, listener, context=listener.context)
        return ours, ours.protocol

    def is_cut(self, one: Process, other: Process) -> bool:
        """Return True if bytes do not pass between two processes at the moment."""
        return frozenset((one.name, other.name)) in self.apart

    def kill(self, process: Process, *, resets: bool) -> None:
        """Close all that a dead process had open; what it has sent still arrives, unless it ``resets``."""
        for listener in [each for each in self.listeners.values() if each.process is process]:
            listener.close()
        for end in [end for end in self.ends if end.process is process]:
            end.vanish(resets=resets)

    def break_one(self, chance: random.Random, is_chosen: Callable[[End], bool]) -> bool:
        """Break one of the chosen connections; return False if there is none."""
        chosen = [end for end in self.ends if is_chosen(end) and end.protocol is not None]
        if not chosen:
            return False
        end = chance.choice(chosen)
        for each, seconds in ((end, LATENCY), (end.peer, NOTICE)):
            assert each
            each.cut()
            self.loop.call_later(chance.random() * seconds, each.lose, context=each.context)
        return True

    def delay(self) -> float:
        """Return the seconds until bytes arrive."""
        slow = RETRANSMISSION if self._random.random() < LOSS else LATENCY
        return self._random.random() * slow

    def piece(self, size: int) -> int:
        """Return the number of bytes that arrive at once."""
        return 1 + int(self._random.random() * size) if self._random.random() < SPLIT else size

    def close(self) -> None:
        """Forget all connections."""
        self.ends.clear()
        self.listeners.clear()


class End(asyncio.Transport):
    """One end of a connection, and what it has sent that has not arrived."""

    def __init__(
        self,
        network: Network,
        number: int,
        process: Process,
        context: Context,
        protocol: asyncio.Protocol | None,
        peername: tuple[str, int],
    ) -> None:
        super().__init__({"peername": peername, "sockname": ("10.9.0.2", 8000)})
        self.network, self.number, self.process, self.context = network, number, process, context
        self.protocol: Any = protocol
        self.peer: End | None = None
        self._sent = bytearray()
        self._has_ended = False  # nothing is sent after what is on its way
        self._is_closing = False
        self._is_lost = False
        self._is_cut = False
        self._reads = protocol is not None
        self._arriving: asyncio.TimerHandle | None = None
        self._must_pause = False

    # For the network

    def accept(self, listener: Listener) -> None:
        """Begin as the end of a server."""
        assert self.peer
        if self._is_closing or not listener.is_serving():
            self.vanish(resets=True)
            return
        self.protocol, self._reads = listener.factory(), True
        self.protocol.connection_made(self)
        self.peer.send_on()

    def send_on(self) -> None:
        """Let the next bytes arrive after a moment."""
        if self._arriving is None and self.peer and (self._sent or self._has_ended):
            when = self.network.loop.now + self.network.delay()
            self._arriving = self.network.loop.call_at(when, self._arrive, context=self.peer.context)

    def _arrive(self) -> None:
        """Give the peer what arrives; this runs in the peer's process."""
        self._arriving = None
        peer = self.peer
        if peer is None or peer._is_lost or not peer._reads or self._is_cut:
            return
        if self.network.is_cut(self.process, peer.process):
            self._arriving = self.network.loop.call_later(RETRY, self._arrive)
            return
        if not self._sent:
            if self._has_ended and not peer._is_closing and not peer.protocol.eof_received():
                peer.close()
            return
        count = self.network.piece(len(self._sent))
        data = bytes(self._sent[:count])
        del self._sent[:count]
        self.network.loop.note(f"{self.number} {len(data)} ")
        if not peer._is_closing:
            peer.protocol.data_received(data)
        if self._must_pause and len(self._sent) < LOW:
            self._must_pause = False
            self.network.loop.call_soon(self._resume, context=self.context)
        self.send_on()

    def _resume(self) -> None:
        if not self._is_lost:
            self.protocol.resume_writing()

    def cut(self) -> None:
        """Let nothing arrive any more."""
        self._is_cut = True
        self._sent.clear()

    def lose(self, error: Exception | None = None) -> None:
        """Notice that the connection is broken."""
        self._end(error or ConnectionResetError(104, "Connection reset by peer"))

    def vanish(self, *, resets: bool) -> None:
        """Close this end without a word to its process; the peer reads the rest, or a reset."""
        self._is_closing = self._is_lost = self._has_ended = True
        self.network.ends.pop(self, None)
        if self.peer is None or self.peer._is_lost:
            return
        if resets:
            self.cut()
            self.network.loop.call_later(self.network.delay(), self.peer.lose, context=self.peer.context)
        else:
            self.send_on()

    def _end(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_closing = self._is_lost = True
        self.network.ends.pop(self, None)
        if self.protocol is not None:
            self.protocol.connection_lost(error)

    # For the protocol

    def write(self, data: Any) -> None:
        if self._is_closing or self._is_cut or not data:
            return
        self._sent += data
        if not self._must_pause and len(self._sent) > HIGH:
            self._must_pause = True
            self.protocol.pause_writing()
        self.send_on()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = self._has_ended = True
            self.send_on()
            self.network.loop.call_soon(self._end, None, context=self.context)

    def abort(self) -> None:
        if not self._is_lost and self.peer:
            self._is_closing = True
            self.cut()
            self.network.loop.call_soon(self._end, None, context=self.context)
            self.network.loop.call_later(self.network.delay(), self.peer.lose, context=self.peer.context)

    def write_eof(self) -> None:
        self._has_ended = True
        self.send_on()

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        if self.peer:
            self.peer.send_on()

    def is_reading(self) -> bool:
        return self._reads

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return len(self._sent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Keep the limits of the network."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self.protocol
        return protocol
