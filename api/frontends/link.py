"""The link between the supervisor and a frontend: messages both ways, and connections of clients one way."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec

LARGEST = 65536
"""Bytes of the largest message."""

IDS = 500
"""The most ids in one message."""


class Serving(msgspec.Struct, tag=True, frozen=True):
    """The frontend serves; the supervisor needs the greetings of the engine's cores if it has to start it again."""

    models: tuple[str, ...]
    example: tuple[str, str] | None
    greetings: tuple[tuple[bytes, bytes], ...]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The frontend cannot start; the message is for the operator."""

    message: str


class RequestBegun(msgspec.Struct, tag=True, frozen=True):
    """The engine works on a request of the frontend."""

    request_id: str


class RequestEnded(msgspec.Struct, tag=True, frozen=True):
    """The engine no longer works on a request of the frontend."""

    request_id: str


class Received(msgspec.Struct, tag=True, frozen=True):
    """The frontend has received this number of connections since its start."""

    count: int


class Draining(msgspec.Struct, tag=True, frozen=True):
    """The frontend was stopped by itself, and gets no more connections."""


class LastConnectionSent(msgspec.Struct, tag=True, frozen=True):
    """The last connection has been sent to a frontend that leaves."""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """The frontend has to abort requests of another one, which has died."""

    request_ids: tuple[str, ...]


class FrontendLost(msgspec.Struct, tag=True, frozen=True):
    """Another frontend has died; peers reached it at ``url``."""

    url: str


class EngineLost(msgspec.Struct, tag=True, frozen=True):
    """A process of the engine has ended."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The frontend has to stop with the server; the second time, without waiting."""


FromFrontend: TypeAlias = Serving | Failed | RequestBegun | RequestEnded | Received | Draining
FromSupervisor: TypeAlias = LastConnectionSent | Abort | FrontendLost | EngineLost | Stop

_encode = msgspec.msgpack.Encoder().encode
_from_frontend = msgspec.msgpack.Decoder(FromFrontend).decode
_from_supervisor = msgspec.msgpack.Decoder(FromSupervisor).decode
_CONNECTION = b"\0"
"""The data of a message that brings a connection; msgpack writes no message like it."""


class Link:
    """One end of a link; messages keep their order, and those that find no room are dropped."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end

    def fileno(self) -> int:
        """Return the descriptor, for an event loop."""
        return self.end.fileno()

    def send(self, message: FromFrontend | FromSupervisor) -> bool:
        """Send a message; return False if there is no room for it, or the other end is closed."""
        try:
            self.end.send(_encode(message))
        except OSError:
            return False
        return True

    def abort(self, request_ids: Sequence[str]) -> None:
        """Send the requests to abort."""
        for start in range(0, len(request_ids), IDS):
            self.send(Abort(tuple(request_ids[start : start + IDS])))

    def pass_on(self, connection: socket.socket) -> bool:
        """Send a connection of a client; return False if there is no room for it."""
        try:
            socket.send_fds(self.end, [_CONNECTION], [connection.fileno()])
        except OSError:
            return False
        return True

    def messages(self) -> Iterator[FromFrontend]:
        """Yield the messages of a frontend that have arrived."""
        for data, _ in self._arrived():
            if data:
                yield _from_frontend(data)

    def received(self) -> Iterator[FromSupervisor | socket.socket]:
        """Yield the messages and connections of the supervisor that have arrived; it asks to stop when it ends."""
        for data, descriptors in self._arrived():
            if not data:
                yield from (Stop(), Stop())
            elif data == _CONNECTION:
                yield from map(_socket, descriptors)
            else:
                yield _from_supervisor(data)

    def _arrived(self) -> Iterator[tuple[bytes, Sequence[int]]]:
        """Yield what has arrived, with its descriptors; no bytes are the end."""
        with suppress(BlockingIOError):  # all was read that has arrived
            while True:
                try:
                    data, descriptors, _, _ = socket.recv_fds(self.end, LARGEST, 1)
                except ConnectionResetError:  # the other process died before it had read all; its last messages follow
                    continue
                yield data, descriptors
                if not data:
                    return


def _socket(descriptor: int) -> socket.socket:
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def new_link() -> tuple[Link, socket.socket]:
    """Return the supervisor's end, and the other end, which can be given to a process when it starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Link(ours), theirs
