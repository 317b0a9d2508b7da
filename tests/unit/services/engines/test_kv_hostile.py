"""Whatever a server publishes and repeats, the index goes on with the others, and with it once it starts again.

The servers here write ZMTP, the protocol of ZeroMQ, byte by byte: a socket of ZeroMQ would not send all that they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from itertools import count

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.services.engines import kv_events
from penstock.services.engines.cached_blocks import AllBlocksCleared, BlockRemoved, BlockStored
from penstock.services.engines.kv_events import KvEvents
from penstock.services.engines.replicas import EventSource
from tests.support.api_clients import wait_until
from tests.support.fake_vllm import prompt_for_fakes

pytestmark = [pytest.mark.io, pytest.mark.slow]

URL, OTHER = "http://gpu1:8000", "http://gpu2:8000"
PROMPT = replace(prompt_for_fakes(), token_ids=(1, 2, 3, 4))
LARGEST = 10_000
"""Bytes of a message here, so that a larger one is soon sent."""

SOCKETS = 2 * 2 + 1
"""Sockets for two servers, one of which repeats messages."""

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
COMMAND, MORE, LONG = 4, 1, 2
END = (-1).to_bytes(8, signed=True)


def ready(kind: bytes) -> bytes:
    """Return what ends the handshake of a socket."""
    body = b"\5READY\x0bSocket-Type" + len(kind).to_bytes(4) + kind
    return bytes([COMMAND, len(body)]) + body


def framed(*parts: bytes) -> bytes:
    """Return a message in the form that is sent."""
    flags = (MORE,) * (len(parts) - 1) + (0,)
    return b"".join(
        bytes([flag | LONG]) + len(part).to_bytes(8) + part for flag, part in zip(flags, parts, strict=True)
    )


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


STORED = payload(AllBlocksCleared(), BlockStored([b"a"], None, [*PROMPT.token_ids], 4))

numbers = st.sampled_from(
    [*(number.to_bytes(8) for number in (0, 1, 2, 3, 9, 2**63 - 1, 2**63)), END, b"", b"\0", b"\xff" * 9]
)
contents = st.sampled_from(
    [
        *(STORED, b"", b"\xc1", b"\x91" * 5_000, bytes(LARGEST + 1)),
        payload(BlockStored([b"b"], b"a", [5, 6, 7, 8], 4)),
        payload(*(BlockStored([size], None, [1] * size, size) for size in range(20))),
        payload(BlockRemoved([b"a"]), {"type": "Unheard"}),
    ]
)
parts = st.tuples(st.just(b""), numbers, contents).map(list) | st.lists(numbers | contents, min_size=1, max_size=5)
wire = st.sampled_from([b"\0", b"\2\xff", b"\3" + bytes(8), b"\x06" + b"\xff" * 9, ready(b"PUSH")]) | st.binary(
    max_size=9
)
news = parts.map(lambda message: framed(*message)) | wire
answers = st.lists(parts.map(lambda message: framed(b"", *message)) | news, max_size=5).map(b"".join)


class Server:
    """A server that publishes what it is told to, and answers each wish for a replay with the next of its answers.

    It sends the last answer again and again.  Without any, it says that it has published nothing.
    """

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers
        self._peers = set[asyncio.StreamWriter]()
        self._hearing = set[asyncio.StreamWriter]()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Server, None]:
        news, replays = [await asyncio.start_server(each, "127.0.0.1", 0) for each in (self._publish, self._repeat)]
        self.address, repeated = (f"tcp://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in (news, replays))
        self.source = EventSource(self.address, repeated)
        async with news, replays:
            yield self
            self.leave()

    def publish(self, message: bytes) -> None:
        for peer in self._hearing:
            peer.write(message)

    def start_again(self) -> None:
        """Be a server that says what it should."""
        self._answers.clear()
        self.leave()

    def leave(self) -> None:
        for peer in self._peers:
            peer.close()

    async def _publish(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in self._asked(reader, writer, b"PUB"):
            self._hearing.add(writer)

    async def _repeat(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in self._asked(reader, writer, b"ROUTER"):
            if len(self._answers) > 1:
                writer.write(self._answers.pop(0))
            while self._answers and not writer.is_closing():
                writer.write(self._answers[0])
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.write(framed(b"", b"", END, b""))

    async def _asked(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: bytes
    ) -> AsyncGenerator[None, None]:
        """Yield for each message of a client, until it leaves."""
        self._peers.add(writer)
        writer.write(GREETING + ready(kind))
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(len(GREETING))
            while True:
                flags, size = await reader.readexactly(2)
                await reader.readexactly(size)
                if not flags & (COMMAND | MORE):
                    yield
        self._peers.remove(writer)
        self._hearing.discard(writer)
        writer.close()


def stored() -> Iterator[bytes]:
    """Yield messages that say one after another that a cache holds the prompt and nothing else."""
    return (framed(b"", number.to_bytes(8), STORED) for number in count())


@pytest.fixture(scope="module", autouse=True)
def _hurried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("REPLAY_SECONDS", "LONGEST_REPLAY", "RECONNECT_SECONDS"):
            patch.setattr(kv_events, name, 0.1)
        patch.setattr(kv_events, "POLL_MILLISECONDS", 10)
        patch.setitem(kv_events._OPTIONS, "maxmsgsize", LARGEST)  # noqa: SLF001
        yield


@given(st.lists(news, max_size=8), st.lists(answers, max_size=4))
@example([], [b"".join(framed(b"", b"", number, STORED) for number in (END, bytes(8))) + framed(b"", b"", END, b"")])
async def test_no_server_keeps_the_index_from_others_or_from_itself(said: list[bytes], repeated: list[bytes]) -> None:
    async with Server(repeated).running() as hostile, Server([]).running() as other:
        with closing(KvEvents({URL: hostile.address, OTHER: other.address})) as caches:
            caches.follow(URL, [hostile.source])

            async def known(server: Server, held: dict[str, int]) -> None:
                """Wait until it is known which caches hold the prompt, which a server says."""
                messages = stored()

                def is_known() -> bool:
                    server.publish(next(messages))
                    return held.items() <= (caches.cached(PROMPT, None) or {}).items()

                await wait_until(is_known)

            for message in said:
                await known(other, {OTHER: 4})
                hostile.publish(message)
            await known(other, {OTHER: 4})
            hostile.start_again()
            await known(hostile, {URL: 4, OTHER: 4})
            assert len(caches._context._sockets) <= SOCKETS  # noqa: SLF001
