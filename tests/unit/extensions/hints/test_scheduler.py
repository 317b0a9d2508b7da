"""The order in which vLLM's block pool forgets: no block is lost, and nothing that a request will read goes early."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.engines.http_endpoints import LET_GO

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCKS, PROMPT = 12, 4
"""Blocks of the cache, and of a prompt."""

CONVERSATIONS = "abcd"

STEPS = st.lists(
    st.tuples(st.sampled_from(("turn", "ask", "fetch", "let_go", "wait", "fill")), st.sampled_from(CONVERSATIONS)),
    max_size=40,
)


class Cache:
    """vLLM's own pool with the tiers in it, and a clock that the test moves.  All prompts begin with the same block."""

    def __init__(self) -> None:
        from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415 - takes seconds

        from penstock.extensions.hints.scheduler import HintedCache, TieredQueue  # noqa: PLC0415 - takes seconds

        self.pool: Any = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=16)
        free = self.pool.free_block_queue
        self.queue = self.pool.free_block_queue = TieredQueue(free.popleft_n(free.num_free_blocks))
        self.now = 1.0
        self.hinted = HintedCache(self.queue, BLOCKS, lambda: self.now)

    def hashes(self, name: str) -> list[Any]:
        return [b"first", *(f"{name} {number}".encode() for number in range(1, PROMPT))]

    def held(self, name: str) -> list[Any]:
        """The blocks that the pool has of a prompt, from its first on."""
        found: list[Any] = []
        for key in self.hashes(name):
            block = self.pool.get_cached_block(key, [0])
            if block is None:
                break
            found += block
        return found

    def turn(self, name: str) -> int:
        """Run a turn; return the blocks that the cache had of it."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id  # noqa: PLC0415 - takes seconds

        self.hinted.keep(name)
        found = self.held(name)
        self.pool.touch(found)
        new = self.pool.get_new_blocks(PROMPT - len(found))
        for block, key in zip(new, self.hashes(name)[len(found) :], strict=True):
            hashed = make_block_hash_with_group_id(key, 0)
            block.set_block_hash(hashed)
            self.pool.cached_block_hash_to_block.insert(hashed, block)
        self.hinted.note(name, [*found, *new])
        self.pool.free_blocks(reversed([*found, *new]))
        return len(found)

    def hint(self, action: str, name: str) -> None:
        from vllm.v1.kv_hints import KvHintAction  # noqa: PLC0415 - takes seconds

        self.hinted.take([KvHintAction("1", f"penstock.{action}", "1.0", {"session": name})])


def ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]


@given(STEPS)
def test_every_block_is_in_one_tier_whatever_comes(steps: Sequence[tuple[str, str]]) -> None:
    cache = Cache()
    for step, name in steps:
        match step:
            case "turn":
                cache.turn(name)
            case "ask":
                cache.hinted.keep(name)
            case "wait":
                cache.now += 100
            case "fill":
                cache.pool.free_blocks(cache.pool.get_new_blocks(5))
            case _:
                cache.hint(step, name)
        order = ids(cache.queue.get_all_free_blocks())
        assert sorted(order) == list(range(1, BLOCKS + 1))
        assert cache.queue.num_free_blocks == BLOCKS


@given(STEPS, st.sampled_from(CONVERSATIONS))
def test_what_a_request_will_read_is_forgotten_last(steps: Sequence[tuple[str, str]], name: str) -> None:
    cache = Cache()
    for step, other in [*steps, ("turn", name)]:
        if step == "turn":
            cache.turn(other)
    cache.hint("let_go", next(other for other in CONVERSATIONS if other != name))
    cache.hinted.keep(name, math.inf)
    cache.pool.free_blocks(cache.pool.get_new_blocks(BLOCKS - PROMPT))
    assert cache.turn(name) == PROMPT


def test_conversation_that_is_let_go_leaves_room_and_the_beginning_that_others_share() -> None:
    cache = Cache()
    for name in "ab":
        cache.turn(name)
    cache.hint("let_go", "b")
    assert [cache.turn(name) for name in "cda"] == [1, 1, PROMPT]


@pytest.mark.parametrize(("seconds", "blocks"), [(1, PROMPT), (1_000, PROMPT - 1)])
def test_fetch_without_a_request_ends(seconds: float, blocks: int) -> None:
    cache = Cache()
    cache.turn("a")
    cache.hint("fetch", "a")
    cache.now += seconds
    cache.hint("fetch", "none")
    assert [cache.turn(name) for name in "bcda"] == [1, 1, 1, blocks]


@given(STEPS)
def test_vllm_copies_what_it_forgets_next_and_nothing_that_was_let_go(steps: Sequence[tuple[str, str]]) -> None:
    """By its own offload, in steps that copy no more than some blocks, which it has to find from where it was."""
    from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415 - takes seconds
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler  # noqa: PLC0415 - takes seconds

    cache = Cache()
    offload: Any = object.__new__(SimpleCPUOffloadScheduler)  # its scheduler's side alone
    offload._gpu_block_pool, offload._target_free, offload._cursor = cache.pool, 5, None  # noqa: SLF001
    offload.cpu_block_pool = BlockPool(1_000, enable_caching=True, hash_block_size=16)
    for step, name in steps:
        if step == "turn":
            cache.turn(name)
        elif step == "ask":
            cache.hinted.keep(name)
        elif step == "let_go":
            cache.hint(step, name)
        let_go = cache.queue._tiers[0].num_free_blocks  # noqa: SLF001
        others, before = cache.queue.get_all_free_blocks()[let_go:], offload._cursor  # noqa: SLF001
        next_ones = others[others.index(before) + 1 if before in others else 0 :][:5]
        copied, *_ = offload._prepare_lazy_store_specs()  # noqa: SLF001
        assert copied == ids(block for block in next_ones if block.block_hash)
        cache.pool.free_blocks([cache.pool.blocks[number] for number in copied])


@pytest.mark.parametrize(
    ("sent", "over"), [(["a", "b"], ["a", "b"]), ([], []), (5, None), ("abc", None), ([["a"]], None), ({"a": 1}, None)]
)
def test_conversations_that_are_over_are_read_from_what_any_client_may_send(sent: Any, over: list[str] | None) -> None:
    from penstock.extensions.hints.scheduler import _over  # noqa: PLC0415 - takes seconds

    request: Any = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={LET_GO: sent}))
    assert _over(request) == over


def test_queue_has_all_that_vllm_asks_of_its_own() -> None:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue  # noqa: PLC0415 - takes seconds

    from penstock.extensions.hints.scheduler import TieredQueue  # noqa: PLC0415 - takes seconds

    assert {name for name in vars(FreeKVCacheBlockQueue) if not name.startswith("_")} <= {*dir(TieredQueue)}
