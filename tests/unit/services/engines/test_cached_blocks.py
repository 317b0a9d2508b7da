from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.services.engines import cached_blocks
from penstock.services.engines.cached_blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CachedBlocks,
    CacheEvent,
    TooMuch,
)

SIZE = 2
CACHES = 3

prompts = st.lists(st.integers(0, 2), max_size=12)
adapters = st.sampled_from([None, "lora"])
salts = st.sampled_from([None, "salt", "lora"])
Key = tuple[str | None, str | None, tuple[int, ...]]


class Server:
    """The prefix cache of a server, which reports its blocks as vLLM does, with hashes of its own."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers
        self.held = dict[Key, bytes]()

    def store(self, tokens: Sequence[int], adapter: str | None, salt: str | None) -> list[BlockStored]:
        """Hold a prompt; return an event for its new blocks, which follow those that are held."""
        keys = [(adapter, salt, tuple(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]
        new = [number for number, key in enumerate(keys) if key not in self.held]
        if not new:
            return []
        for number in new:
            self.held[keys[number]] = next(self._numbers).to_bytes(32)
        first, last = new[0], new[-1] + 1
        extra: list[list[Any] | None] = [
            [key for key in (adapter, salt if number == 0 else None) if key] or None for number in range(first, last)
        ]
        parent = self.held[keys[first - 1]] if first else None
        hashes: list[bytes | int] = [self.held[key] for key in keys[first:last]]
        stored = BlockStored(hashes, parent, list(tokens[first * SIZE : last * SIZE]), SIZE, adapter, extra, 0)
        return [stored]

    def remove(self, position: int) -> list[BlockRemoved]:
        """Let go of a block that no other follows, as a cache frees chains from their ends."""
        ends = [
            key for key in self.held if not any(len(more[2]) > len(key[2]) and _is_of(more, key) for more in self.held)
        ]
        return [BlockRemoved([self.held.pop(ends[position % len(ends)])], 0)] if ends else []

    def cached(self, tokens: Sequence[int], adapter: str | None, salt: str | None) -> int:
        ends = range(SIZE, len(tokens) + 1, SIZE)
        return next(
            (end - SIZE for end in ends if (adapter, salt, tuple(tokens[:end])) not in self.held),
            len(tokens) // SIZE * SIZE,
        )


def _is_of(more: Key, key: Key) -> bool:
    return more[:2] == key[:2] and more[2][: len(key[2])] == key[2]


class Index(RuleBasedStateMachine):
    """Whatever several servers store and remove, the index knows what each holds of any prompt."""

    @initialize()
    def begin(self) -> None:
        hashes = count()
        self.servers = [Server(hashes) for _ in range(CACHES)]
        self.blocks = CachedBlocks()

    @rule(cache=st.integers(0, CACHES - 1), tokens=prompts, adapter=adapters, salt=salts)
    def store(self, cache: int, tokens: list[int], adapter: str | None, salt: str | None) -> None:
        self._take(cache, self.servers[cache].store(tokens, adapter, salt))

    @rule(cache=st.integers(0, CACHES - 1), tokens=prompts, copies=st.integers(1, 3))
    def compute_at_once(self, cache: int, tokens: list[int], copies: int) -> None:
        """Several requests compute the same blocks; then the cache lets go of all but one copy of each."""
        events = self.servers[cache].store(tokens, None, None)
        self._take(cache, events * (copies + 1))
        for event in events * copies:
            self._take(cache, [BlockRemoved(event.block_hashes, 0)])

    @rule(cache=st.integers(0, CACHES - 1), position=st.integers(0, 50))
    def remove(self, cache: int, position: int) -> None:
        self._take(cache, self.servers[cache].remove(position))

    @rule(cache=st.integers(0, CACHES - 1))
    def clear(self, cache: int) -> None:
        self.servers[cache].held.clear()
        self._take(cache, [AllBlocksCleared()])

    @rule(tokens=prompts, adapter=adapters, salt=salts)
    def look_up(self, tokens: list[int], adapter: str | None, salt: str | None) -> None:
        held = {number: server.cached(tokens, adapter, salt) for number, server in enumerate(self.servers)}
        assert self.blocks.cached(tokens, adapter, salt) == {cache: known for cache, known in held.items() if known}

    @invariant()
    def counts_are_right(self) -> None:
        for number, server in enumerate(self.servers):
            assert self.blocks.count(number) == len(server.held)

    def teardown(self) -> None:
        for cache in range(CACHES):
            self.blocks.forget(cache)
        assert not any(
            self.blocks.cached([0, 0], adapter, salt) for adapter in (None, "lora") for salt in (None, "salt")
        )

    def _take(self, cache: int, events: Sequence[CacheEvent]) -> None:
        for event in events:
            self.blocks.take(cache, event)


TestIndex = Index.TestCase


def stored(tokens: Sequence[int], parent: bytes | None = None, **more: Any) -> BlockStored:
    hashes: list[bytes | int] = [bytes([*tokens[: end + 1]]) for end in range(0, len(tokens), SIZE)]
    return BlockStored(hashes, parent, list(tokens), SIZE, **more)


def test_block_behind_an_unknown_one_is_left_out() -> None:
    """It was stored before anything was heard, so that its place in a prompt is not known."""
    blocks = CachedBlocks()
    blocks.take(0, stored([1, 2], parent=b"unknown"))
    assert blocks.count(0) == 0
    assert blocks.cached([1, 2], None, None) == {}


def test_layers_that_keep_the_end_of_a_prompt_do_not_count() -> None:
    blocks = CachedBlocks()
    blocks.take(0, stored([1, 2, 3, 4], group_idx=0, kv_cache_spec_kind="full_attention"))
    blocks.take(0, stored([1, 2, 3, 4], group_idx=1, kv_cache_spec_kind="sliding_window"))
    blocks.take(0, BlockRemoved(list(stored([1, 2, 3, 4]).block_hashes), group_idx=1))
    assert blocks.cached([1, 2, 3, 4, 5], None, None) == {0: 4}


def test_prompt_is_known_up_to_its_first_image() -> None:
    blocks = CachedBlocks()
    blocks.take(0, stored([1, 2, 9, 9, 5, 6], extra_keys=[None, [["image", 0]], None]))
    assert blocks.cached([1, 2, 9, 9, 5, 6], None, None) == {0: 2}


def test_servers_may_have_blocks_of_different_sizes() -> None:
    blocks = CachedBlocks()
    blocks.take(0, stored([1, 2]))
    blocks.take(1, BlockStored([b"a"], None, [1, 2, 3], 3))
    assert blocks.cached([1, 2, 3], None, None) == {0: 2, 1: 3}


@given(st.binary(max_size=60))
@settings(max_examples=50)
def test_events_have_the_form_of_vllm(data: bytes) -> None:
    """Fields that are not known, and those that are missing, do no harm."""
    event = {
        "type": "BlockStored",
        "block_hashes": [data],
        "parent_block_hash": None,
        "token_ids": [1],
        "block_size": 1,
    }
    wire = msgspec.msgpack.encode(event | {"lora_id": None, "locality": "LOCAL", "session_id": "x"})
    assert msgspec.msgpack.decode(wire, type=BlockStored | BlockRemoved | AllBlocksCleared) == BlockStored(
        [data], None, [1], 1
    )


def test_events_of_slower_memory_do_not_count() -> None:
    """A block may be in both, and vLLM says of the slower one only that it has some."""
    blocks = CachedBlocks()
    blocks.take(0, stored([1, 2], medium="GPU"))
    blocks.take(0, stored([1, 2, 3, 4], medium="CPU"))
    blocks.take(0, BlockRemoved(list(stored([1, 2]).block_hashes), medium="CPU"))
    blocks.take(0, BlockStored([b"x"], None, [], 0, medium="CPU"))
    assert blocks.cached([1, 2, 3, 4], None, None) == {0: 2}


numbers = st.integers(-(2**63), 2**63 - 1)
odd = st.builds(
    BlockStored,
    st.lists(numbers, max_size=3),
    st.none() | numbers,
    st.lists(numbers, max_size=5),
    st.integers(-3, 3) | numbers,
    st.none() | st.text(max_size=2),
    st.none() | st.lists(st.none() | st.lists(st.none() | st.text(max_size=2) | numbers, max_size=2), max_size=3),
)


@given(st.lists(odd, max_size=4), prompts)
def test_no_event_breaks_the_index(events: list[BlockStored], tokens: list[int]) -> None:
    blocks = CachedBlocks()
    for event in events:
        blocks.take(0, event)
        blocks.cached(tokens, None, None)
        blocks.take(0, BlockRemoved(event.block_hashes))
    blocks.forget(0)
    assert blocks.count(0) == 0
    assert blocks.cached(tokens, None, None) == {}


def test_cache_that_claims_too_much_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_blocks, "MOST_BLOCKS", 2)
    blocks = CachedBlocks()
    blocks.take(0, stored([1, 2, 3, 4]))
    assert blocks.count(0) == 2
    with pytest.raises(ValueError, match="it holds more than 2 blocks"):
        blocks.take(0, stored([5, 6]))


@pytest.mark.parametrize(
    ("claims", "what"),
    [
        ([BlockStored([b"%d" % size], None, [1] * size, size) for size in range(1, 10)], "8 sizes"),
        (
            [BlockStored([b"x"], None, [1], 1, None, None, group, "mamba") for group in range(65)],
            "64 groups of layers",
        ),
    ],
)
def test_cache_that_claims_too_many_kinds_of_blocks_is_not_followed(claims: list[BlockStored], what: str) -> None:
    blocks = CachedBlocks()
    for event in claims[:-1]:
        blocks.take(0, event)
    with pytest.raises(TooMuch, match=f"more than {what}"):
        blocks.take(0, claims[-1])


def test_sizes_of_blocks_are_forgotten_with_the_last_cache_that_has_them() -> None:
    """Each size costs a look at every prompt."""
    blocks = CachedBlocks()
    for cache in range(2):
        for size in range(1, 9):
            blocks.take(cache, BlockStored([b"%d" % size], None, [1] * size, size))
    assert sorted(blocks.sizes()) == list(range(1, 9))
    blocks.forget(0)
    assert blocks.cached([1] * 8, None, None) == {1: 8}
    blocks.take(1, AllBlocksCleared())
    assert not blocks.sizes()
