"""Frames are read as aiohttp's own reader reads them, in any pieces; wrong ones end the connection by RFC 6455."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from aiohttp import EofStream, WebSocketError, WSCloseCode, WSMessage, WSMsgType
from aiohttp._websocket.reader import WebSocketDataQueue, WebSocketReader
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.api.http.held_bytes import MOST_AT_ONCE, MOST_SMALL_BYTES, SMALL, SMALL_SECONDS, HeldBytes
from penstock.api.socket import incoming as incoming_module
from penstock.api.socket.incoming import PIECE_BYTES, Incoming
from tests.support.socket_frames import (
    BINARY,
    CLOSE,
    COMPRESSED,
    CONTINUATION,
    NO_MASK,
    PING,
    PONG,
    TEXT,
    deflated,
    frame_of,
)

MOST = 2**21
"""Bytes of the largest message in these tests."""


class Connection:
    """Takes note of what it is told about reading."""

    def __init__(self) -> None:
        self._reading_paused = False

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False


def incoming(held: HeldBytes | None = None) -> Incoming:
    connection: Any = Connection()
    return Incoming(connection, MOST, held or HeldBytes())


async def read_all(reader: Incoming) -> tuple[list[WSMessage], BaseException]:
    """Read until the end; return the messages, and the error at which it ends."""
    messages = list[WSMessage]()
    try:
        while True:
            messages.append(await reader.read())
    except (WebSocketError, EofStream) as error:
        return messages, error


async def read_of(pieces: Iterable[bytes]) -> tuple[list[WSMessage], BaseException]:
    reader = incoming()
    reading = asyncio.create_task(read_all(reader))
    for piece in pieces:
        reader.receive(piece)
        await asyncio.sleep(0)
    reader.feed_eof()
    return await asyncio.wait_for(reading, 120)


# Agreement with aiohttp


async def read_by_aiohttp(sent: bytes) -> tuple[list[Any], int | None]:
    protocol: Any = Connection()
    queue = WebSocketDataQueue(protocol, 2**20, loop=asyncio.get_running_loop())
    WebSocketReader(queue, MOST, compress=False, decode_text=True).feed_data(sent)
    if not queue.exception():
        queue.feed_eof()
    messages = list[Any]()
    try:
        while True:
            messages.append(comparable(await queue.read()))
    except EofStream:
        return messages, None
    except WebSocketError as error:
        return messages, error.code


texts = st.text(max_size=100).map(str.encode)
closing = st.builds(
    lambda code, reason: struct.pack(">H", code) + reason,
    st.sampled_from([999, 1000, 1001, 1004, 1005, 1006, 1007, 1011, 1014, 1015, 2999, 3000, 4999]),
    st.sampled_from([b"", b"Bye", "é".encode(), b"\xff"]),
)
masks = st.binary(min_size=4, max_size=4)
frames = st.one_of(
    st.builds(frame_of, texts, st.sampled_from([CONTINUATION, TEXT]), mask=masks),
    st.builds(frame_of, texts.filter(bool), st.sampled_from([CONTINUATION, TEXT]), fin=st.just(False), mask=masks),
    st.builds(frame_of, closing, st.sampled_from([CLOSE, PING, PONG]), mask=masks),
    st.builds(frame_of, texts, st.sampled_from([BINARY, 3, 15]), mask=masks, reserved=st.sampled_from([0, 1, 2, 4])),
    st.builds(frame_of, texts, st.sampled_from([PING, CLOSE]), fin=st.just(False), mask=masks),
)
"""Frames that aiohttp reads by the rules: it takes an empty beginning of a message for none."""


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 400), max_size=20))
@example([frame_of(b"Hi", fin=False), frame_of(b"", PING), frame_of(b"!", CONTINUATION)], [1] * 20)
@example([frame_of("é".encode()[:1], fin=False), frame_of("é".encode()[1:], CONTINUATION)], [])
async def test_frames_in_any_pieces_are_read_as_by_aiohttp(sent: Sequence[bytes], sizes: Sequence[int]) -> None:
    whole = b"".join(sent)
    pieces, start = list[bytes](), 0
    for size in sizes:
        pieces.append(whole[start : start + size])
        start += size
    messages, error = await read_of([*pieces, whole[start:]])
    code = error.code if isinstance(error, WebSocketError) else None
    assert ([comparable(message) for message in messages], code) == await read_by_aiohttp(whole)


def comparable(message: Any) -> Any:
    return message.type, message.data.encode() if isinstance(message.data, str) else message.data, message.extra or ""


# Rules


WRONG = {
    "an unmasked text": (frame_of(b"{}", mask=NO_MASK), WSCloseCode.PROTOCOL_ERROR),
    "an unmasked ping": (frame_of(b"", PING, mask=NO_MASK), WSCloseCode.PROTOCOL_ERROR),
    "an unmasked close": (frame_of(b"", CLOSE, mask=NO_MASK), WSCloseCode.PROTOCOL_ERROR),
    "an unmasked frame within a message": (
        frame_of(b"x", fin=False) + frame_of(b"x", CONTINUATION, mask=NO_MASK),
        WSCloseCode.PROTOCOL_ERROR,
    ),
    "a compressed text": (frame_of(deflated(b"{}"), reserved=COMPRESSED), WSCloseCode.PROTOCOL_ERROR),
    "a broken compressed text": (frame_of(b"\xff\xff", reserved=COMPRESSED), WSCloseCode.PROTOCOL_ERROR),
    "a compressed ping": (frame_of(b"", PING, reserved=COMPRESSED), WSCloseCode.PROTOCOL_ERROR),
    "another reserved bit": (frame_of(b"{}", reserved=1), WSCloseCode.PROTOCOL_ERROR),
    "an unknown opcode": (frame_of(b"{}", 5), WSCloseCode.PROTOCOL_ERROR),
    "a continuation of nothing": (frame_of(b"{}", CONTINUATION), WSCloseCode.PROTOCOL_ERROR),
    "a continuation of a whole message": (
        frame_of(b"{}") + frame_of(b"{}", CONTINUATION),
        WSCloseCode.PROTOCOL_ERROR,
    ),
    "a message within a message": (frame_of(b"", fin=False) + frame_of(b"{}"), WSCloseCode.PROTOCOL_ERROR),
    "a ping in two frames": (frame_of(b"", PING, fin=False), WSCloseCode.PROTOCOL_ERROR),
    "a long ping": (frame_of(b"x" * 126, PING), WSCloseCode.PROTOCOL_ERROR),
    "half a code": (frame_of(b"\3", CLOSE), WSCloseCode.PROTOCOL_ERROR),
    "a code that is never sent": (frame_of(struct.pack(">H", 1005), CLOSE), WSCloseCode.PROTOCOL_ERROR),
    "a reason that is not UTF-8": (frame_of(struct.pack(">H", 1000) + b"\xff", CLOSE), WSCloseCode.INVALID_TEXT),
    "text that is not UTF-8": (frame_of(b"\xff"), WSCloseCode.INVALID_TEXT),
    "text that ends in a character": (frame_of("é".encode()[:1]), WSCloseCode.INVALID_TEXT),
    "a surrogate": (frame_of(b"\xed\xa0\x80"), WSCloseCode.INVALID_TEXT),
    "text that is not UTF-8, in two frames": (
        frame_of(b"\xff", fin=False) + frame_of(b"", CONTINUATION),
        WSCloseCode.INVALID_TEXT,
    ),
    "a frame that is too large": (b"\x81\xff" + struct.pack(">Q", MOST + 1) + b"abcd", WSCloseCode.MESSAGE_TOO_BIG),
    "a frame of almost all there is": (b"\x81\xff" + b"\xff" * 8 + b"abcd", WSCloseCode.MESSAGE_TOO_BIG),
    "a message that is too large": (
        frame_of(b"x" * 10, fin=False) + b"\x80\xff" + struct.pack(">Q", MOST - 9) + b"abcd",
        WSCloseCode.MESSAGE_TOO_BIG,
    ),
}


@pytest.mark.parametrize(("sent", "code"), WRONG.values(), ids=WRONG.keys())
async def test_wrong_frame_ends_the_connection(sent: bytes, code: WSCloseCode) -> None:
    messages, error = await read_of([frame_of(b"Hi") + sent + frame_of(b"lost")])
    assert isinstance(error, WebSocketError)
    assert (error.code, messages[0].data) == (code, b"Hi")
    assert b"lost" not in [message.data for message in messages]


RIGHT = {
    "text in two frames, with half a character in each": (
        frame_of("é".encode()[:1], fin=False) + frame_of("é".encode()[1:], CONTINUATION),
        "é".encode(),
    ),
    "a message of empty frames": (frame_of(b"", fin=False) + frame_of(b"", CONTINUATION), b""),
    "bytes that are not UTF-8": (frame_of(b"\xff", BINARY), b"\xff"),
    "the largest message": (frame_of(b"x" * MOST), b"x" * MOST),
}


@pytest.mark.parametrize(("sent", "data"), RIGHT.values(), ids=RIGHT.keys())
async def test_right_message_is_read(sent: bytes, data: bytes) -> None:
    messages, error = await read_of([sent])
    assert [message.data for message in messages] == [data]
    assert isinstance(error, EofStream)


# Bounds


async def test_bytes_are_held_until_they_are_passed_on() -> None:
    held = HeldBytes()
    reader = incoming(held)
    reader.receive(frame_of(b"x" * 100) + frame_of(b"y" * 50, fin=False) + frame_of(b"", PING))
    assert len((await reader.read()).data) == held.count == 100
    assert reader.pass_on().size == 100
    assert (await reader.read()).type is WSMsgType.PING
    assert held.count == 150
    reader.end()
    assert held.count == 100


async def test_message_beyond_what_the_server_holds_is_refused() -> None:
    held = HeldBytes()
    held.large.counts[""] = MOST_AT_ONCE * MOST - SMALL
    reader = incoming(held)
    reader.receive(frame_of(b"x" * SMALL))
    await reader.read()
    reader.receive(frame_of(b"x" * (SMALL + 1)))
    with pytest.raises(WebSocketError) as refused:
        await reader.read()
    assert refused.value.code == WSCloseCode.TRY_AGAIN_LATER
    with pytest.raises(WebSocketError):  # and from now on
        await reader.read()


async def test_message_that_arrives_slowly_makes_room_for_others() -> None:
    now = 0.0
    held = HeldBytes(clock=lambda: now)
    held.messages.counts[""] = MOST_SMALL_BYTES - 150
    slow, honest = incoming(held), incoming(held)
    slow.receive(frame_of(b"x" * 100, fin=False))
    reading = asyncio.create_task(slow.read())
    while held.count != MOST_SMALL_BYTES - 50:
        await asyncio.sleep(0)
    now = SMALL_SECONDS
    honest.receive(frame_of(b"y" * 100))
    assert (await honest.read()).data == b"y" * 100
    with pytest.raises(WebSocketError) as dropped:
        await reading
    assert dropped.value.code == WSCloseCode.TRY_AGAIN_LATER


async def test_connection_is_not_read_while_many_bytes_wait() -> None:
    reader = incoming()
    connection: Any = reader.protocol
    reader.receive(frame_of(b"x" * (2 * PIECE_BYTES)))
    assert (reader.is_paused, connection._reading_paused) == (True, True)
    await reader.read()
    reading = asyncio.create_task(reader.read())
    while connection._reading_paused:
        await asyncio.sleep(0)
    reader.receive(frame_of(b"Hi"))
    assert (await reading).data == b"Hi"


async def test_flood_of_small_frames_lets_other_tasks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.yield_point.HELD_SECONDS", 0.0)
    flood, turns = frame_of(b"", TEXT, fin=False) + frame_of(b"", CONTINUATION, fin=False) * 1_000, 0
    reader = incoming()
    reading = asyncio.create_task(reader.read())
    reader.receive(flood + frame_of(b"!", CONTINUATION))
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 1_000


async def test_message_of_many_fragments_is_kept_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_module, "PIECE_BYTES", 4096)
    reader = incoming()
    reading = asyncio.create_task(reader.read())
    for number in range(20):
        reader.receive(frame_of(b"x", CONTINUATION if number else TEXT, fin=False) * 1)
        reader.receive(frame_of(b"x", CONTINUATION, fin=False) * 1000)
        while reader._bytes:
            await asyncio.sleep(0)
    assert reader._message
    assert len(reader._message.pieces) == 20_020 // 4096
    reader.receive(frame_of(b"", CONTINUATION))
    assert (await reading).data == b"x" * 20_020


@pytest.mark.io
async def test_large_message_that_stops_arriving_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_module, "SECONDS", 0.05)
    reader = incoming()
    reader.receive(frame_of(b"x" * (SMALL + 1), fin=False))
    with pytest.raises(WebSocketError) as late:
        await reader.read()
    assert late.value.code == WSCloseCode.POLICY_VIOLATION


@pytest.mark.io
async def test_small_message_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_module, "SECONDS", 0.01)
    reader = incoming()
    reader.receive(frame_of(b"x" * 1000, fin=False))
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0.05)
    reader.receive(frame_of(b"", CONTINUATION))
    assert len((await reading).data) == 1000


# The socket's own use


async def test_message_of_the_socket_comes_before_a_frame_that_is_not_whole() -> None:
    reader = incoming()
    reader.receive(frame_of(b"Hi")[:4])
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    told = WSMessage(WSMsgType.CLOSING, None, None)
    reader.feed_data(told, 0)
    assert await reading == told
    reader.receive(frame_of(b"Hi")[4:])
    assert (await reader.read()).data == b"Hi"


async def test_messages_that_arrived_before_an_error_are_read() -> None:
    reader = incoming()
    reader.receive(frame_of(b"Hi") + frame_of(b"", CLOSE))
    reader.set_exception(ConnectionResetError())
    assert [(await reader.read()).type for _ in range(2)] == [WSMsgType.TEXT, WSMsgType.CLOSE]
    with pytest.raises(ConnectionResetError):
        await reader.read()
