"""A scheduler of vLLM's whose prefix cache hears hints; ``--scheduler-cls`` names it.

It runs in the process of vLLM's engine core.  Hints come with requests, as the actions of vLLM's ``kv_hints`` or, over
HTTP, which has no field for these, as an argument for plug-ins.  They name conversations by the ``session_id`` of their
requests.

vLLM evicts the free blocks that were used least recently.  Here, those of conversations that were let go come first,
and those that a waiting request will read come last.  None is pinned.  A hint to ``keep`` changes nothing: among
conversations that wait, the last use tells best who comes back (``make fleet``).
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_hints import KvHintAction
from vllm.v1.request import Request

from penstock.services.engines.http_endpoints import LET_GO
from penstock.stages.models.vllm_private import check_scheduler_parts

FIRST, PLAIN, KEPT = range(3)
"""The tiers of free blocks, in the order of their eviction."""

FETCHED = 60.0
"""Seconds for which the blocks of a conversation come last that goes on at any moment."""

KNOWN = 4
"""Blocks that conversations are known by, for each block of the cache: conversations share some, and lose some."""


class TieredQueue:
    """The free blocks in tiers, each in vLLM's own order, in place of vLLM's one queue."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.kept: Counter[int] = Counter()
        """The number of conversations that will read a block, by its id."""
        self.held: Counter[int] = Counter()
        """The number of conversations that go on and have a block, by its id."""
        self._tiers = tuple(FreeKVCacheBlockQueue([]) for _ in range(3))
        self._tier_of: dict[int, int] = {}
        self.append_n(blocks)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks in all tiers."""
        return sum(tier.num_free_blocks for tier in self._tiers)

    def popleft(self) -> KVCacheBlock:
        """Take one block for other tokens."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take blocks for other tokens: no conversation has them any more."""
        taken: list[KVCacheBlock] = []
        for tier in self._tiers:
            taken += tier.popleft_n(min(n - len(taken), tier.num_free_blocks))
        for block in taken:
            del self._tier_of[block.block_id]
            self.kept.pop(block.block_id, None)
            self.held.pop(block.block_id, None)
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block whose tokens are used again."""
        self._tiers[self._tier_of.pop(block.block_id)].remove(block)

    def append(self, block: KVCacheBlock) -> None:
        """Add a block that was used just now."""
        self._put(block, KEPT if self.kept[block.block_id] > 0 else PLAIN)

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add blocks that were used just now."""
        for block in blocks:
            self.append(block)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add blocks to be used next, as their tokens are of no use."""
        self._tiers[FIRST].prepend_n(blocks)
        self._tier_of.update((block.block_id, FIRST) for block in blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return all blocks in the order of their eviction."""
        return [block for tier in self._tiers for block in tier.get_all_free_blocks()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Yield the blocks that vLLM copies to slower memory before it evicts them: none that were let go."""
        begun = FIRST if cursor is None else self._tier_of[cursor.block_id]
        for number in range(max(begun, PLAIN), len(self._tiers)):
            yield from self._tiers[number].iter_blocks_after(cursor if number == begun else None)

    def settle(self, block: KVCacheBlock, otherwise: int = PLAIN) -> None:
        """Move a free block to the tier of the conversations that have it, or without one to the tier ``otherwise``."""
        number = block.block_id
        tier = KEPT if self.kept[number] > 0 else PLAIN if self.held[number] > 0 else otherwise
        if self._tier_of.get(number, tier) != tier:
            self.remove(block)
            self._put(block, tier)

    def _put(self, block: KVCacheBlock, tier: int) -> None:
        self._tiers[tier].append(block)
        self._tier_of[block.block_id] = tier


@dataclass(slots=True)
class _Conversation:
    blocks: list[KVCacheBlock]
    """The blocks of its latest turn, from the first of each group of layers on."""
    hashes: list[Any]
    """The hashes of the blocks: one that has another by now belongs to others."""
    kept_until: float = 0.0

    def own(self) -> Iterator[KVCacheBlock]:
        """Yield what is left of the blocks from the end on, where a cache forgets first."""
        for block, known in zip(reversed(self.blocks), reversed(self.hashes), strict=True):
            if block.block_hash == known:
                yield block


class HintedCache:
    """The conversations whose blocks a cache has, and the order in which it evicts them."""

    def __init__(self, queue: TieredQueue, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue, self._most, self._clock = queue, KNOWN * size, clock
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()
        self._known = 0
        self._ends: list[tuple[float, str]] = []
        """The times until which conversations are kept, the earliest first."""

    def note(self, session: str, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that these blocks have the latest turn of a conversation."""
        self._forget(session, PLAIN)
        full = [block for block in blocks if block.block_hash is not None]
        self._conversations[session] = _Conversation(full, [block.block_hash for block in full])
        self._queue.held.update(block.block_id for block in full)
        self._known += len(full)
        while self._known > self._most:
            self._forget(next(iter(self._conversations)), PLAIN)

    def take(self, actions: Iterable[KvHintAction]) -> None:
        """Take hints in, and give up those conversations that did not go on in time."""
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            until, session = heappop(self._ends)
            found = self._conversations.get(session)
            if found and found.kept_until == until:
                self._give_up(found)
        for action in actions:
            if action.action_type == "penstock.fetch":
                self.keep(action.payload["session"], now + FETCHED)
            elif action.action_type == "penstock.let_go":
                self.let_go((action.payload["session"],))

    def let_go(self, sessions: Iterable[str]) -> None:
        """Let conversations go that do not go on."""
        for session in sessions:
            self._forget(session, FIRST)

    def keep(self, session: str, until: float = math.inf) -> None:
        """Let the blocks of a conversation come last: it will read them."""
        found = self._conversations.get(session)
        if found is None:
            return
        is_kept, found.kept_until = bool(found.kept_until), until
        if until < math.inf:
            heappush(self._ends, (until, session))
        for block in () if is_kept else found.own():
            self._queue.kept[block.block_id] += 1
            self._queue.settle(block)

    def _give_up(self, found: _Conversation) -> None:
        found.kept_until = 0.0
        for block in found.own():
            self._queue.kept[block.block_id] -= 1
            self._queue.settle(block)

    def _forget(self, session: str, otherwise: int) -> None:
        """Forget a conversation: blocks that no other one has go to the tier ``otherwise``."""
        found = self._conversations.pop(session, None)
        if found is None:
            return
        if found.kept_until:
            self._give_up(found)
        self._known -= len(found.blocks)
        for block in found.own():
            self._queue.held[block.block_id] -= 1
            self._queue.settle(block, otherwise)


class Scheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler, whose free blocks stand in tiers."""

    takes_hints = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_scheduler_parts()
        super().__init__(*args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        free = pool.free_block_queue
        pool.free_block_queue = TieredQueue(free.popleft_n(free.num_free_blocks))
        self._hinted = HintedCache(pool.free_block_queue, len(pool.blocks))

    def add_request(self, request: Request) -> None:
        """Take the hints in that come with a request, which will read the blocks of its conversation."""
        if request.kv_hints is not None:
            self._hinted.take(request.kv_hints.actions)
        self._hinted.let_go(_over(request) or ())
        if request.session_id is not None:
            self._hinted.keep(request.session_id)
        super().add_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> tuple[dict[str, Any] | None, Any]:
        transfer, others = super()._free_request(request, *args, **kwargs)
        return ({**(transfer or {}), LET_GO: True} if _over(request) == [] else transfer), others

    def _free_blocks(self, request: Request) -> None:
        if request.session_id is not None:
            groups = self.kv_cache_manager.coordinator.get_blocks(request.request_id)
            self._hinted.note(request.session_id, [block for group in groups for block in group if not block.is_null])
        super()._free_blocks(request)


def _over(request: Request) -> list[str] | None:
    """Return the conversations that are over, which a prompt over HTTP tells; none of them is a question.

    Other clients may send anything: an error here ends vLLM's engine.
    """
    sampling = request.sampling_params
    over = sampling.extra_args.get(LET_GO) if sampling and sampling.extra_args else None
    return over if isinstance(over, list) and all(isinstance(session, str) for session in over) else None
