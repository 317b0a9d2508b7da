"""The index follows the events of servers: here publishers that send what vLLM sends, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from penstock.pipeline.frames import Prompt, Scheduling, with_facts
from penstock.services.engines.cached_blocks import LONGEST_HASH, AllBlocksCleared, BlockRemoved, BlockStored
from penstock.services.engines.kv_events import LARGEST_MESSAGE, KvEvents
from tests.support.api_clients import PATIENCE, wait_until
from tests.support.fake_vllm import prompt_for_fakes

pytestmark = pytest.mark.io

URL, OTHER = "http://gpu1:8000", "http://gpu2:8000"
TOKENS = tuple(range(100, 108))
STORED = BlockStored([b"a", b"b"], None, list(TOKENS), 4, None, [["salt"], None], 0, "full_attention")


class Publisher:
    """The events of one server."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self.address = f"ipc://{path}"
        self._socket = context.socket(zmq.XPUB)  # it learns of those who subscribe, so that nothing is sent too early
        self._socket.xpub_verbose, self._socket.rcvtimeo = True, int(PATIENCE * 1000)
        self._socket.bind(self.address)
        self.next = 0

    def publish(self, *events: Any, number: int | None = None) -> None:
        """Send a batch, under the next number or the given one."""
        if self.next == 0 and number is None:
            assert self._socket.recv() == b"\x01"
        self.send(msgspec.msgpack.encode([0.0, events, 0]), number)

    def subscribed_again(self) -> None:
        """Wait until the connection has ended, and another one been made."""
        while self._socket.recv() != b"\x01":
            pass

    def send(self, payload: bytes, number: int | None = None) -> None:
        number = self.next if number is None else number
        self._socket.send_multipart([b"", number.to_bytes(8), payload])
        self.next = number + 1


@pytest.fixture
def publishers(tmp_path: Path) -> Generator[list[Publisher], None, None]:
    context = zmq.Context()
    yield [Publisher(context, tmp_path / name) for name in ("one", "other")]
    context.destroy(linger=0)


@pytest.fixture
def caches(publishers: list[Publisher]) -> Generator[KvEvents, None, None]:
    one, other = publishers
    with closing(KvEvents({URL: one.address, OTHER: other.address})) as caches:
        yield caches


def salted(token_ids: tuple[int, ...] = TOKENS, salt: str | None = "salt") -> Prompt:
    return with_facts(replace(prompt_for_fakes(), token_ids=token_ids), scheduling=Scheduling(cache_salt=salt))


async def known(caches: KvEvents, blocks: int, url: str = URL) -> None:
    await wait_until(lambda: caches.sizes().get(url) == blocks)


async def reported(caches: KvEvents, publishers: list[Publisher]) -> Publisher:
    """Have both servers report, and the first, which is returned, two blocks."""
    one, other = publishers
    other.publish()
    one.publish(STORED)
    await known(caches, 2)
    return one


async def test_servers_hold_what_they_have_reported(caches: KvEvents, publishers: list[Publisher]) -> None:
    one, other = publishers
    one.publish(STORED)
    other.publish(BlockStored([b"x"], None, list(TOKENS[:4]), 4, None, [["salt"]], 0, "full_attention"))
    await known(caches, 2)
    await known(caches, 1, OTHER)
    assert caches.cached(salted(), None) == {URL: 8, OTHER: 4}
    assert caches.cached(salted((*TOKENS[:4], 5, 6, 7, 8)), None) == {URL: 4, OTHER: 4}
    assert caches.cached(salted(salt=None), None) == {}
    assert caches.cached(salted(salt="another"), None) == {}
    assert caches.cached(salted(), "adapter") == {}
    one.publish(BlockRemoved([b"b"], 0))
    await known(caches, 1)
    assert caches.cached(salted(), None) == {URL: 4, OTHER: 4}
    one.publish(AllBlocksCleared())
    await known(caches, 0)
    assert caches.cached(salted(), None) == {OTHER: 4}


async def test_lost_message_makes_a_cache_unknown(caches: KvEvents, publishers: list[Publisher]) -> None:
    one = await reported(caches, publishers)
    one.publish(number=5)
    await known(caches, 0)
    assert caches.cached(salted(), None) is None  # it may hold what it held before
    one.publish(AllBlocksCleared())
    await wait_until(lambda: caches.cached(salted(), None) == {})


async def test_server_that_starts_again_holds_nothing(caches: KvEvents, publishers: list[Publisher]) -> None:
    one = await reported(caches, publishers)
    one.publish(number=0)
    await known(caches, 0)
    assert caches.cached(salted(), None) == {}


async def test_blocks_from_before_are_not_known(caches: KvEvents, publishers: list[Publisher]) -> None:
    """The home of a conversation then counts as their holder, until most of a prompt is known."""
    one, other = publishers
    other.publish()
    one.next = 7
    one.publish(STORED)
    await known(caches, 2)
    assert caches.cached(salted((1, 2, 3, 4)), None) is None
    assert caches.cached(salted((*TOKENS, *range(9))), None) is None
    assert caches.cached(salted((*TOKENS, 1)), None) == {URL: 8}


async def test_cache_that_was_cleared_since_stays_known(caches: KvEvents, publishers: list[Publisher]) -> None:
    one = await reported(caches, publishers)
    before = time.monotonic()
    one.publish(AllBlocksCleared(), STORED)
    one.publish(BlockStored([b"c"], None, [1, 2, 3, 4], 4, None, [None], 0, "full_attention"))
    await known(caches, 3)
    caches.forget(URL, unless_cleared_after=before)
    caches.forget(OTHER, unless_cleared_after=before)
    await wait_until(lambda: OTHER not in caches.sizes())
    assert caches.sizes() == {URL: 3}
    caches.forget(URL, unless_cleared_after=time.monotonic())
    await wait_until(lambda: not caches.sizes())


async def test_silent_server_makes_nothing_known(caches: KvEvents) -> None:
    assert caches.cached(salted(), None) is None


async def test_what_a_server_holds_of_an_image_is_not_known(caches: KvEvents, publishers: list[Publisher]) -> None:
    for publisher in publishers:
        publisher.publish(STORED)
    await known(caches, 2)
    assert caches.cached(replace(salted(), images=("data:image/png;base64,AA==",)), None) is None


@pytest.mark.parametrize(
    "event",
    [
        {"type": "Unheard"},
        {"type": "BlockStored", "token_ids": "?"},
        BlockStored([b"x"], None, [2**63], 1),
        BlockStored([b"x" * (LONGEST_HASH + 1)], None, [1], 1),
        BlockRemoved([b"x" * (LONGEST_HASH + 1)]),
        [[[[]]]],
    ],
)
async def test_event_that_cannot_be_followed_makes_a_cache_unknown(
    caches: KvEvents, publishers: list[Publisher], caplog: pytest.LogCaptureFixture, event: Any
) -> None:
    one = await reported(caches, publishers)
    one.publish(event)
    one.publish(event)
    await known(caches, 0)
    assert caches.cached(salted(), None) is None
    one.publish(STORED)
    await known(caches, 2)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"KV events of the engine at {URL} cannot be read: ")


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", b"\x91" * 5_000])
async def test_message_of_another_form_makes_a_cache_unknown(
    caches: KvEvents, publishers: list[Publisher], payload: bytes
) -> None:
    one, _ = publishers
    one.publish(STORED)
    await known(caches, 2)
    one.send(payload)
    await known(caches, 0)
    one.publish(STORED)
    await known(caches, 2)


async def test_message_too_large_ends_a_connection_and_another_is_made(
    caches: KvEvents, publishers: list[Publisher]
) -> None:
    one = await reported(caches, publishers)
    for _ in range(2):
        one.send(bytes(LARGEST_MESSAGE + 1))
        await asyncio.to_thread(one.subscribed_again)
        await wait_until(lambda: URL not in caches.sizes())
        one.publish(STORED)
        await known(caches, 2)
    assert caches.cached(salted(), None) == {URL: 8}


async def test_server_that_comes_back_may_hold_nothing(caches: KvEvents, publishers: list[Publisher]) -> None:
    """A server of another start may send its first message under the number that is due."""
    one, _ = publishers
    for publisher in publishers:
        publisher.publish(STORED)
    await known(caches, 2)
    await known(caches, 2, OTHER)
    caches.forget(URL)
    assert caches.cached(salted(), None) == {OTHER: 8}
    await wait_until(lambda: URL not in caches.sizes())
    one.publish(BlockStored([b"c"], None, list(TOKENS[:4]), 4, None, [["salt"]], 0, "full_attention"))
    await known(caches, 1)


async def test_addresses_of_ipv6_connect() -> None:
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)
    socket.ipv6 = True
    port = socket.bind_to_random_port("tcp://[::1]")
    with closing(KvEvents({URL: f"tcp://[::1]:{port}"})):
        assert await asyncio.to_thread(socket.recv) == b"\x01"
    context.destroy(linger=0)


def test_there_may_be_thousands_of_servers() -> None:
    with closing(KvEvents({f"http://gpu{number}": f"ipc:///nowhere/{number}" for number in range(1_100)})) as caches:
        assert caches.sizes() == {}


def test_wrong_address_is_named() -> None:
    with pytest.raises(ValueError, match=r"^tcp://nowhere is no address of KV events: "):
        KvEvents({URL: "tcp://nowhere"})
