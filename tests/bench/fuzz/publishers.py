"""Have a hostile engine publish KV events beside an honest one: the index stays bounded, and follows the honest one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import count, islice
from pathlib import Path
from unittest.mock import patch

import msgspec
import zmq
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.frames import Prompt
from penstock.services.engines import cached_blocks
from penstock.services.engines.cached_blocks import (
    LONGEST_HASH,
    MOST_GROUPS,
    MOST_SIZES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CachedBlocks,
    CacheEvent,
)
from penstock.services.engines.kv_events import LARGEST_MESSAGE, KvEvents
from tests.bench.fuzz.fire import HANGS, Outcome
from tests.bench.fuzz.hostile import drawn
from tests.support.fake_vllm import prompt_for_fakes

FEW_BLOCKS = 2_000
"""Blocks that a cache may have here, so that floods exceed them."""

FEW = 10
"""Hostile messages after which both engines must be followed."""

SIZE = 16
"""Tokens of a block of the honest engine."""

HOSTILE, HONEST = "http://hostile", "http://honest"

DUE = b"due"
"""The part of a message in whose place the number is sent that is due."""

Message = Sequence[bytes]
"""The parts of a message."""

_numbers = st.one_of(st.integers(-2, 99), st.sampled_from([2**31, 2**63 - 1, -(2**63), 2**64 - 1]))
_hashes = st.one_of(st.binary(max_size=70), _numbers, st.just(b"h" * 100_000))
_kinds = st.sampled_from([None, "full_attention", "sliding_window", "mamba", "x" * 9_999])
_wrong: st.SearchStrategy[object] = st.sampled_from(
    [None, "?", 1e400, [[[[]]]], {"type": "Unheard"}, {"type": "BlockStored"}, [["BlockStored"]]]
)
_media = st.sampled_from([None, None, "GPU", "CPU"])
_parents = st.none() | st.none() | _hashes
_events = st.one_of(
    st.builds(
        BlockStored,
        st.lists(_hashes, max_size=9),
        _parents,
        st.lists(_numbers, max_size=99),
        _numbers,
        st.none() | st.text(max_size=9),
        st.none() | st.lists(st.none() | st.lists(_numbers | st.text(max_size=9), max_size=3), max_size=9),
        _numbers,
        _kinds,
        _media,
    ),
    st.builds(BlockRemoved, st.lists(_hashes, max_size=9), _numbers, _media),
    st.just(AllBlocksCleared()),
    _wrong,
)
"""Events that say anything."""


def _flood(kind: str, many: int) -> Sequence[CacheEvent]:
    """Make events that have more of something each."""
    each = range(1, many)
    match kind:
        case "sizes":
            return [BlockStored([number], None, [1] * number, number) for number in each]
        case "groups":
            return [BlockStored([1], None, [1], 1, None, None, number, "sliding_window") for number in each]
        case "copies":
            return [BlockStored([1], None, [1], 1) for _ in each]
        case "long hashes":
            return [BlockStored([b"%9d" % number * 200], None, [number] * SIZE, SIZE) for number in each]
        case _:
            return [BlockStored([*range(number * 99, number * 99 + 99)], None, [number] * 99, 1) for number in each]


_floods = st.builds(
    _flood, st.sampled_from(["sizes", "groups", "copies", "long hashes", "blocks"]), st.sampled_from([50, 300])
)
_damage = st.sampled_from([b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5_000, b"\0" * 99])


@st.composite
def hostile_messages(draw: st.DrawFn) -> Message:
    """Draw a message: of any events, a flood, damaged, too large, of a wrong number of parts."""
    events = draw(draw(st.sampled_from([st.lists(_events, max_size=5), _floods])))
    payload = msgspec.msgpack.encode([draw(st.sampled_from([*[0.0] * 9, "?"])), events, 0])
    match draw(st.sampled_from([*["whole"] * 6, "damaged", "parts", "noise", "large"])):
        case "damaged":
            at = draw(st.integers(0, len(payload)))
            payload = payload[:at] + draw(_damage) + payload[at + draw(st.integers(0, 9)) :]
        case "parts":
            return draw(st.lists(st.binary(max_size=20), min_size=1, max_size=50))
        case "noise":
            payload = draw(st.binary(max_size=99))
        case "large":
            payload += bytes(LARGEST_MESSAGE)
        case _:
            pass
    return [b"", draw(st.sampled_from([*[DUE] * 9, b"", b"\xff" * 8, b"\xff" * 9_999])), payload]


class WatchedBlocks(CachedBlocks):
    """Blocks whose bounds are checked after each event."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self._outcome = outcome

    def take(self, cache: int, event: CacheEvent) -> None:
        super().take(cache, event)
        self._outcome.statuses["events taken"] += 1
        if held := self._caches.get(cache):
            known = len(held.numbers), len(held.copies), len(held.sizes), len(held.ends)
            if max(known[:2]) > FEW_BLOCKS or known[2] > MOST_SIZES or known[3] > MOST_GROUPS:
                self._outcome.fault("too many blocks, copies, sizes or groups", known)
            named = event.block_hashes if isinstance(event, BlockStored) else ()
            if any(isinstance(each, bytes) and len(each) > LONGEST_HASH and each in held.numbers for each in named):
                self._outcome.fault("a long hash is kept", LONGEST_HASH)


class Publisher:
    """The events of one engine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.XPUB)  # it learns of those who subscribe, so that nothing is sent too early
        self._socket.sndhwm, self._socket.rcvtimeo, self._socket.xpub_verbose = 0, int(HANGS * 1000), True
        self._socket.bind(address)
        self._next = 0

    async def subscribed(self) -> None:
        """Wait for a subscriber; that it does not come is a fault, and nothing is followed then."""
        with suppress(zmq.Again):
            while await asyncio.to_thread(self._socket.recv) != b"\x01":
                pass

    def publish(self, *events: CacheEvent) -> None:
        self.send([b"", DUE, msgspec.msgpack.encode([0.0, events, 0])])

    def send(self, message: Message) -> None:
        """Send a message; its part `DUE` becomes the number that is due."""
        self._socket.send_multipart([self._next.to_bytes(8) if part == DUE else part for part in message])
        self._next += 1


async def attack_index(folder: Path, total: int, seed: int) -> dict[str, Outcome]:
    """Send the messages of a hostile engine, and after each few of them follow both engines."""
    index, honest = Outcome(), Outcome()
    messages = iter(drawn(hostile_messages(), total, seed))
    with ExitStack() as closing_all:
        closing_all.enter_context(patch.object(cached_blocks, "MOST_BLOCKS", FEW_BLOCKS))
        context = zmq.Context()
        closing_all.callback(context.destroy, linger=0)
        addresses = {url: f"ipc://{folder}/{name}" for name, url in (("a", HOSTILE), ("b", HONEST))}
        attacker, other = (Publisher(context, address) for address in addresses.values())
        caches = closing_all.enter_context(closing(KvEvents(addresses)))
        caches._blocks = WatchedBlocks(index)  # noqa: SLF001 - nothing is published so far
        await attacker.subscribed()
        await other.subscribed()
        for number in count(1):
            if not (few := [*islice(messages, FEW)]):
                break
            for message in few:
                attacker.send(message)
                if len(message[-1]) > LARGEST_MESSAGE:
                    await attacker.subscribed()  # again, as a message that is too large ends its connection
            attacker.publish(AllBlocksCleared(), _block(number, HOSTILE))
            other.publish(_block(number, HONEST))
            await _follow(caches, _prompt(HOSTILE, number, number), {HOSTILE: SIZE}, index)
            await _follow(caches, _prompt(HONEST, 1, number), {HONEST: number * SIZE}, honest)
    return {"KV events of a hostile engine": index, "those of an honest one": honest}


def _tokens(url: str, number: int) -> list[int]:
    return [2 * number + (url == HONEST)] * SIZE


def _block(number: int, url: str) -> BlockStored:
    """Make a block, which follows the one before, of the honest engine."""
    parent = number - 1 if url == HONEST and number > 1 else None
    return BlockStored([number], parent, _tokens(url, number), SIZE)


def _prompt(url: str, first: int, last: int) -> Prompt:
    tokens = [token for number in range(first, last + 1) for token in _tokens(url, number)]
    return replace(prompt_for_fakes(), token_ids=tuple(tokens))


async def _follow(caches: KvEvents, prompt: Prompt, known: Mapping[str, int], outcome: Outcome) -> None:
    try:
        async with asyncio.timeout(HANGS):
            while caches.cached(prompt, None) != known:
                await asyncio.sleep(0.005)
    except TimeoutError:
        outcome.fault(f"not followed for {HANGS:g} seconds", caches.cached(prompt, None))
    outcome.statuses["followed"] += 1
