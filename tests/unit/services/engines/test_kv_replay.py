"""The index asks servers for what it has missed: here vLLM's own publishers, over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from importlib import import_module
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.pipeline.frames import Prompt
from penstock.services.engines import kv_events
from penstock.services.engines.kv_events import KvEvents
from penstock.services.engines.replicas import EventSource
from tests.support.api_clients import wait_until
from tests.support.fake_vllm import prompt_for_fakes
from tests.support.processes import free_port

pytestmark = [pytest.mark.io, pytest.mark.vllm, pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")]

URL = "http://gpu1:8000"
SIZE = 4


class Lossy:
    """A socket of a publisher that loses messages."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.loses: Callable[[tuple[bytes, ...]], bool] = lambda _: False

    def send_multipart(self, parts: tuple[bytes, ...]) -> None:
        if not self.loses(parts):
            self._socket.send_multipart(parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class Rank:
    """The publisher of an engine core, which stores one block after the other."""

    def __init__(self, rank: int = 0, *, repeats: bool = True, steps: int = 10_000) -> None:
        ports = [free_port() - rank for _ in range(2)]
        replay = f"tcp://127.0.0.1:{ports[1]}" if repeats else None
        self._vllm: Any = import_module("vllm.distributed.kv_events")
        self._publisher = self._vllm.ZmqEventPublisher(rank, f"tcp://*:{ports[0]}", replay, buffer_steps=steps)
        config = self._publisher.get_publisher_config()
        self.source = EventSource(config.endpoint, config.replay_endpoint)
        self.address = config.endpoint.replace("*", "127.0.0.1")
        self.news, self.repeated = Lossy(self._publisher._pub), Lossy(self._publisher._replay)  # noqa: SLF001
        self._publisher._pub, self._publisher._replay = self.news, self.repeated if repeats else None  # noqa: SLF001
        self.stored = 0

    def store(self, blocks: int) -> None:
        for number in range(self.stored, self.stored + blocks):
            parent = number - 1 if number else None
            event = self._vllm.BlockStored(
                [number], parent, [number] * SIZE, SIZE, lora_id=None, medium="GPU", lora_name=None
            )
            self._publisher.publish(self._vllm.EventBatch(0.0, [event]))
        self.stored += blocks

    def clear(self) -> None:
        self._publisher.publish(self._vllm.EventBatch(0.0, [self._vllm.AllBlocksCleared()]))

    async def published(self) -> None:
        await wait_until(lambda: len(self._publisher._buffer) == self.stored)  # noqa: SLF001

    def close(self) -> None:
        self._publisher.shutdown()


@pytest.fixture
def start() -> Generator[Callable[..., Rank], None, None]:
    ranks = list[Rank]()

    def started(*arguments: Any, **options: Any) -> Rank:
        ranks.append(Rank(*arguments, **options))
        return ranks[-1]

    yield started
    for rank in ranks:
        rank.close()


def prompt(blocks: int) -> Prompt:
    return replace(prompt_for_fakes(), token_ids=tuple(number for number in range(blocks) for _ in range(SIZE)))


UNHEARD = replace(prompt_for_fakes(), token_ids=(9,) * 99)


async def known(caches: KvEvents, blocks: int, name: str = URL) -> None:
    await wait_until(lambda: caches.sizes().get(name) == blocks)


async def cleared(rank: Rank, caches: KvEvents) -> None:
    """Publish that a cache was cleared, until this is heard."""

    def is_heard() -> bool:
        rank.clear()
        return caches.cached(prompt(9), None) == {}

    await wait_until(is_heard)


async def test_blocks_from_before_the_start_are_known(start: Callable[..., Rank]) -> None:
    rank = start()
    rank.store(5)
    await rank.published()
    with closing(KvEvents({URL: rank.address})) as caches:
        assert caches.cached(UNHEARD, None) is None
        caches.follow(URL, [rank.source])
        await known(caches, 5)
        assert caches.cached(prompt(7), None) == {URL: 5 * SIZE}
        assert caches.cached(UNHEARD, None) == {}
        rank.store(2)
        await known(caches, 7)
        assert caches.cached(prompt(7), None) == {URL: 7 * SIZE}


async def test_server_that_has_stored_nothing_is_known_to_hold_nothing(start: Callable[..., Rank]) -> None:
    rank = start()
    with closing(KvEvents({URL: rank.address})) as caches:
        caches.follow(URL, [rank.source])
        await known(caches, 0)
        assert caches.cached(prompt(7), None) == {}
        rank.store(1)
        await known(caches, 1)


async def test_lost_messages_are_asked_for(start: Callable[..., Rank]) -> None:
    rank = start()
    with closing(KvEvents({URL: rank.address})) as caches:
        caches.follow(URL, [rank.source])
        await known(caches, 0)
        for round_ in range(1, 4):
            rank.news.loses = lambda _: True
            rank.store(3)
            await rank.published()
            rank.news.loses = lambda _: False
            rank.store(1)
            await known(caches, 4 * round_)
            assert caches.cached(prompt(99), None) == {URL: 16 * round_}


async def test_messages_that_a_server_no_longer_has_make_its_cache_unknown(start: Callable[..., Rank]) -> None:
    rank = start(steps=2)
    with closing(KvEvents({URL: rank.address})) as caches:
        caches.follow(URL, [rank.source])
        await known(caches, 0)
        rank.store(2)
        await known(caches, 2)
        rank.news.loses = lambda parts: int.from_bytes(parts[1]) < 8
        rank.store(7)  # the first of those that it has follow a block that is not known
        await known(caches, 0)
        assert caches.cached(prompt(9), None) is None
        rank.clear()
        await wait_until(lambda: caches.cached(prompt(9), None) == {})


async def test_server_is_asked_until_no_message_is_lost(start: Callable[..., Rank]) -> None:
    """ZeroMQ drops what a subscriber is slow to read, and the end of it all as well."""
    rank = start()
    sent = count(1)
    rank.repeated.loses = lambda parts: parts[-1] != b"" and next(sent) % 7 == 0
    rank.store(50)
    await rank.published()
    with closing(KvEvents({URL: rank.address})) as caches:
        caches.follow(URL, [rank.source])
        await known(caches, 50)
        assert caches.cached(UNHEARD, None) == {}


@pytest.mark.parametrize("loses_all", [True, False])
async def test_server_that_repeats_nothing_is_followed(
    start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, *, loses_all: bool
) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_SECONDS", 0.3)
    rank = start()
    rank.repeated.loses = lambda parts: loses_all or parts[-1] == b""
    rank.store(1)
    await rank.published()
    with closing(KvEvents({URL: rank.address})) as caches:
        caches.follow(URL, [rank.source])
        if not loses_all:  # but the end
            await known(caches, 1)
        await cleared(rank, caches)


async def test_forgotten_cache_is_asked_for_unless_its_weights_are_others(start: Callable[..., Rank]) -> None:
    rank = start()
    rank.store(3)
    with closing(KvEvents({URL: rank.address})) as caches:
        caches.follow(URL, [rank.source])
        await known(caches, 3)
        caches.forget(URL)
        await wait_until(lambda: caches.cached(prompt(3), None) == {URL: 3 * SIZE})
        caches.forget(URL, unless_cleared_after=0.0)
        await wait_until(lambda: not caches.sizes())
        rank.store(1)
        await known(caches, 0)  # it follows a block that is not known


async def test_each_rank_of_a_server_has_a_cache(start: Callable[..., Rank]) -> None:
    first, second = start(), start(1)
    first.store(2)
    second.store(5)
    await second.published()
    with closing(KvEvents({URL: first.address})) as caches:
        caches.follow(URL, [first.source, second.source])
        await known(caches, 2)
        await known(caches, 5, f"{URL}#1")
        assert caches.cached(prompt(7), None) == {URL: 2 * SIZE, f"{URL}#1": 5 * SIZE}
        caches.follow(URL, [first.source])
        await wait_until(lambda: caches.sizes() == {URL: 2})
        assert caches.cached(prompt(7), None) == {URL: 2 * SIZE}
        caches.follow(URL, [first.source, second.source])
        await known(caches, 5, f"{URL}#1")


async def test_server_that_says_nothing_of_its_events_is_followed(start: Callable[..., Rank]) -> None:
    rank = start(repeats=False)
    with closing(KvEvents({URL: rank.address})) as caches:
        caches.follow(URL, [])
        caches.follow(URL, [EventSource("nonsense", "tcp://*:0"), EventSource("ipc://elsewhere")])
        await cleared(rank, caches)
