"""The frames of a client, read by the rules of RFC 6455, and the messages that they make up.

A message is unmasked, checked and counted in pieces while it arrives, so that a large one does not hold the event loop,
and its bytes count as those of a body do.  No extension is agreed on, so a compressed frame breaks the rules.

aiohttp's own reader would be shorter, but it takes frames without a mask, hides which bytes belong to which message,
and unmasks a whole one at once: that holds the loop for a tenth of a second if the message is as large as it may be.
"""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from dataclasses import dataclass, field

from aiohttp import EofStream, WebSocketError, WSCloseCode, WSMessage, WSMsgType
from aiohttp.base_protocol import BaseProtocol

from penstock.api.http.held_bytes import SMALL, HeldBody, HeldBytes
from penstock.api.http.request_body import SECONDS, joined
from penstock.pipeline.errors import ServerBusy
from penstock.pipeline.yield_point import YieldPoint

PIECE_BYTES = 2**16
"""Bytes of a message that are unmasked at once; the connection is not read while more than twice as many wait."""

_DATA = {kind.value: kind for kind in (WSMsgType.CONTINUATION, WSMsgType.TEXT, WSMsgType.BINARY)}
_CONTROL = {kind.value: kind for kind in (WSMsgType.CLOSE, WSMsgType.PING, WSMsgType.PONG)}
_KINDS = _DATA | _CONTROL
_SHORTEST_HEAD = 2
"""Bytes of the shortest head of a frame (RFC 6455, section 5.2)."""
_MOST_CONTROL_BYTES = 125
_CLOSE_CODES = frozenset({*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)})
_text_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass
class _WebSocketFrame:
    """A frame whose payload is arriving; ``left`` are the bytes of it that have not been taken."""

    kind: WSMsgType
    is_last: bool
    mask: bytes
    left: int

    @property
    def least(self) -> int:
        """The bytes of the payload that are taken at once, at least."""
        return self.left if self.kind in _CONTROL else min(self.left, 1)

    def unmask(self, masked: bytearray) -> bytes:
        """Return the next bytes of the payload."""
        size, turn = len(masked), len(masked) % 4
        mask = (self.mask * (size // 4 + 1))[:size]
        self.mask = self.mask[turn:] + self.mask[:turn]
        self.left -= size
        return (int.from_bytes(masked, "little") ^ int.from_bytes(mask, "little")).to_bytes(size, "little")


@dataclass
class _Message:
    """A message that is arriving."""

    kind: WSMsgType
    size: int = 0
    pieces: list[bytes] = field(default_factory=list)
    _short: bytearray = field(default_factory=bytearray)
    """The end of the message, not yet long enough for a piece."""
    _decoder: codecs.IncrementalDecoder = field(default_factory=_text_decoder)

    def add(self, data: bytes, *, is_end: bool) -> None:
        """Add bytes; raise `WebSocketError` for text that is not UTF-8."""
        if self.kind is WSMsgType.TEXT:
            _decoded(self._decoder, data, is_end=is_end)
        self.size += len(data)
        self._short += data
        if is_end or len(self._short) >= PIECE_BYTES:
            self.pieces.append(bytes(self._short))
            self._short.clear()


@dataclass(eq=False)
class Incoming:
    """Stands between a connection, which feeds it bytes, and its socket, which reads messages.

    A message has ``most_bytes`` at most.  The bytes of messages are ``held`` until `pass_on` or `end` is called.  A
    message that the server cannot hold, that takes too long, or that breaks the rules is an error, and nothing is read
    after it.
    """

    protocol: BaseProtocol
    most_bytes: int
    held: HeldBytes
    owner: str = ""
    was_heard: bool = True
    """True if bytes have arrived since it was set to False."""
    is_paused: bool = False
    """True if the connection is not read, as many bytes wait."""
    _bytes: bytearray = field(default_factory=bytearray)
    _frame: _WebSocketFrame | None = None
    _message: _Message | None = None
    _late_at: float | None = None
    _holding: HeldBody = field(init=False)
    _told: deque[WSMessage] = field(default_factory=deque)
    """Messages that the socket sends itself, to wake its reader."""
    _error: BaseException | None = None
    _waiter: asyncio.Future[None] | None = None
    _may_yield: YieldPoint = field(default_factory=YieldPoint)

    def __post_init__(self) -> None:
        self._holding = self._new()

    # What the connection calls

    def receive(self, data: bytes) -> tuple[bool, bytes]:
        """Take bytes; return False, as the connection stays open, and no bytes to be read otherwise."""
        self.was_heard = True
        if self._error is None:
            self._bytes += data
        if len(self._bytes) > 2 * PIECE_BYTES and not self.is_paused:
            self.is_paused = True
            self.protocol.pause_reading()
        self._wake()
        return False, b""

    def feed_eof(self) -> None:
        """Take note of the end of the connection."""
        self.set_exception(EofStream())

    # What the socket calls

    def feed_data(self, message: WSMessage, _size: int) -> None:
        """Return a message of the socket itself from `read`."""
        self._told.append(message)
        self._wake()

    def set_exception(self, error: BaseException, _cause: object = None) -> None:
        """Raise an error from `read` once all messages have been read that have arrived before it."""
        self._error = self._error or error
        self._wake()

    async def read(self) -> WSMessage:
        """Return the next message; raise `WebSocketError` for a wrong one, and `EofStream` after the last."""
        while not self._told:
            await self._may_yield()
            try:
                message = await self._taken()
            except WebSocketError as error:
                self._fail(error)
                raise
            if message:
                return message
        return self._told.popleft()

    # What the reader of the messages calls

    def pass_on(self) -> HeldBody:
        """Return the bytes of the message that was read, which the caller has to release."""
        passed, self._holding = self._holding, self._new()
        return passed

    def end(self) -> None:
        """Read nothing more, and hold nothing."""
        self._fail(EofStream())
        self._holding.release()

    # Reading

    async def _taken(self) -> WSMessage | None:
        """Take what has arrived of a frame, or wait for more; return a message that is whole."""
        self._frame = frame = self._frame or self._head()
        if frame is None or len(self._bytes) < frame.least:
            await self._more()
            return None
        payload = self._payload(frame)
        if not frame.left:
            self._frame = None
        if frame.kind in _CONTROL:
            return _control(frame.kind, payload)
        message = self._message = self._message or _Message(frame.kind)
        is_end = frame.is_last and not frame.left
        message.add(payload, is_end=is_end)
        self._hold(message, len(payload))
        if not is_end:
            return None
        self._holding.finish()
        self._message = self._late_at = None
        return WSMessage(message.kind, await joined(message.pieces, message.size), None)

    def _head(self) -> _WebSocketFrame | None:
        """Take the head of a frame, if it has arrived."""
        if len(self._bytes) < _SHORTEST_HEAD:
            return None
        first, second = self._bytes[:2]
        kind, is_last, length = first & 0x0F, first >= 0x80, second & 0x7F
        if first & 0x70:
            raise _wrong("a reserved bit is set, and no extension was agreed on")
        if second < 0x80:
            raise _wrong("a frame of a client has a mask")
        if kind not in _KINDS:
            raise _wrong(f"opcode {kind} is unknown")
        if kind in _CONTROL and not (is_last and length <= _MOST_CONTROL_BYTES):
            raise _wrong(f"a control frame is one frame of at most {_MOST_CONTROL_BYTES} bytes")
        if kind in _DATA and (kind == WSMsgType.CONTINUATION) != (self._message is not None):
            raise _wrong("a message goes on in continuation frames, and begins in another one")
        end = 2 + {126: 2, 127: 8}.get(length, 0)
        head = bytes(self._bytes[: end + 4])
        if len(head) < end + 4:
            return None
        size = int.from_bytes(head[2:end], "big") if end > 2 else length
        if size + (self._message.size if self._message else 0) > self.most_bytes:
            raise WebSocketError(WSCloseCode.MESSAGE_TOO_BIG, f"A message has more than {self.most_bytes} bytes.")
        del self._bytes[: end + 4]
        return _WebSocketFrame(_KINDS[kind], is_last, head[end:], size)

    def _payload(self, frame: _WebSocketFrame) -> bytes:
        size = min(frame.left, len(self._bytes), PIECE_BYTES)
        payload = frame.unmask(self._bytes[:size])
        del self._bytes[:size]
        return payload

    def _new(self) -> HeldBody:
        return self.held.message(self.most_bytes, self._drop, self.owner)

    def _drop(self) -> None:
        """End a message that arrives too slowly while others need its room."""
        self._fail(WebSocketError(WSCloseCode.TRY_AGAIN_LATER, "The message arrives too slowly for a busy server."))
        self._wake()

    def _hold(self, message: _Message, count: int) -> None:
        """Count the bytes of a message, and begin to wait for the rest of a large one."""
        try:
            self._holding.take(count)
        except ServerBusy as error:
            raise WebSocketError(WSCloseCode.TRY_AGAIN_LATER, error.message) from None
        if message.size > SMALL and self._late_at is None:
            self._late_at = asyncio.get_running_loop().time() + SECONDS

    async def _more(self) -> None:
        """Wait until something arrives."""
        if self._error:
            raise self._error
        if self.is_paused:
            self.is_paused = False
            self.protocol.resume_reading()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(self._late_at):
                await self._waiter
        except TimeoutError:
            late = f"The message did not arrive within {SECONDS:.0f} seconds."
            raise WebSocketError(WSCloseCode.POLICY_VIOLATION, late) from None

    def _fail(self, error: BaseException) -> None:
        self._error, self._frame, self._message, self._late_at = error, None, None, None
        self._bytes.clear()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


def _control(kind: WSMsgType, payload: bytes) -> WSMessage:
    """Return the message of a control frame."""
    if kind is not WSMsgType.CLOSE:
        return WSMessage(kind, payload, None)
    if not payload:
        return WSMessage(kind, 0, "")
    code = int.from_bytes(payload[:2], "big")
    if len(payload) < 2 or code not in _CLOSE_CODES:
        raise _wrong("a connection is not closed with this code")
    return WSMessage(kind, code, _decoded(_text_decoder(), payload[2:], is_end=True))


def _wrong(rule: str) -> WebSocketError:
    return WebSocketError(WSCloseCode.PROTOCOL_ERROR, f"The frame is wrong: {rule}.")


def _decoded(decoder: codecs.IncrementalDecoder, data: bytes, *, is_end: bool) -> str:
    try:
        return decoder.decode(data, is_end)
    except UnicodeDecodeError:
        raise WebSocketError(WSCloseCode.INVALID_TEXT, "A text is not UTF-8.") from None
