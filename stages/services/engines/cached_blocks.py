"""The blocks that the prefix caches of several vLLM servers hold, as their KV events report them.

A block is known by its tokens and by all before them, because a cache reuses only whole beginnings of prompts.  vLLM's
own hashes serve to follow its events; from release to release it makes them in other ways, so that a prompt cannot be
looked up by them.  So each block gets a number of our own, which its tokens and the number of the block before
determine, and prompts are numbered alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

EngineHash: TypeAlias = bytes | int
"""vLLM's own hash of a block."""

_SHORTENED = frozenset({"sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba"})
"""Kinds of layers that keep the end of a prompt only.  How much of a prompt is cached, the other layers decide."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Blocks that follow one another, and that a cache holds from now on."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """Of each block what its hash depends on besides its tokens: an adapter, images, and a salt."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Blocks that a cache no longer holds."""

    block_hashes: list[EngineHash]
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A cache is empty."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
"""An event of a cache, in the form in which vLLM publishes it."""


class CachedBlocks:
    """The blocks of several caches.  Caches are numbered from 0.

    A set of caches is an int with a bit for each, as most blocks are in one cache.
    """

    def __init__(self) -> None:
        self._holders = dict[int, int]()  # of each block, by its number
        self._numbers = dict[int, dict[EngineHash, int]]()  # of each cache, by vLLM's hashes
        self._shortened = dict[int, set[int | None]]()  # groups of layers of each cache
        self._sizes = set[int]()

    def count(self, cache: int) -> int:
        """Return the number of blocks that a cache is known to hold."""
        return len(self._numbers.get(cache, ()))

    def take(self, cache: int, event: CacheEvent) -> None:
        """Take an event of a cache."""
        match event:
            case BlockStored():
                self._store(cache, event)
            case BlockRemoved():
                self._remove(cache, event)
            case AllBlocksCleared():
                self.forget(cache)

    def forget(self, cache: int) -> None:
        """Forget all blocks of a cache."""
        for number in self._numbers.pop(cache, {}).values():
            self._release(number, 1 << cache)

    def cached(self, token_ids: Sequence[int], adapter: str | None, salt: str | None) -> dict[int, int]:
        """Return how many tokens at the beginning of a prompt each cache holds; caches without any are left out."""
        tokens = array("q", token_ids)
        found = dict[int, int]()
        for size in tuple(self._sizes):
            first = _root(size, [key for key in (adapter, salt) if key])
            for cache, blocks in self._depths(_chain(first, tokens, size)):
                found[cache] = max(found.get(cache, 0), blocks * size)
        return found

    def _depths(self, numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
        """Yield each cache that holds blocks from the first on, with their count."""
        caches, depth = -1, 0
        for number in numbers:
            still = caches & self._holders.get(number, 0)
            if depth:
                yield from ((cache, depth) for cache in _bits(caches & ~still))
            caches = still
            if not caches:
                return
            depth += 1
        if depth:
            yield from ((cache, depth) for cache in _bits(caches))

    def _store(self, cache: int, event: BlockStored) -> None:
        if event.kv_cache_spec_kind in _SHORTENED:
            self._shortened.setdefault(cache, set()).add(event.group_idx)
            return
        keys = event.extra_keys or [None] * len(event.block_hashes)
        numbers = self._numbers.setdefault(cache, {})
        if event.parent_block_hash is None:
            first = _root(event.block_size, keys[0] if keys[0] is not None else [event.lora_name])
        elif event.parent_block_hash in numbers:
            first = numbers[event.parent_block_hash]
        else:
            return
        self._sizes.add(event.block_size)
        chain = _chain(first, array("q", event.token_ids), event.block_size)
        for engine_hash, others, number in zip(event.block_hashes, keys, chain, strict=False):
            if others and not all(isinstance(key, str) for key in others):
                return  # an image, which a prompt shows by its place only
            if engine_hash not in numbers:
                numbers[engine_hash] = number
                self._holders[number] = self._holders.get(number, 0) | 1 << cache

    def _remove(self, cache: int, event: BlockRemoved) -> None:
        if event.group_idx in self._shortened.get(cache, ()):
            return
        numbers = self._numbers.get(cache, {})
        for engine_hash in event.block_hashes:
            number = numbers.pop(engine_hash, None)
            if number is not None:
                self._release(number, 1 << cache)

    def _release(self, number: int, bit: int) -> None:
        if rest := self._holders.get(number, 0) & ~bit:
            self._holders[number] = rest
        else:
            self._holders.pop(number, None)


def _root(size: int, keys: Sequence[Any]) -> int:
    """Return the number that the first block of a prompt follows: caches keep adapters and salts apart."""
    return hash((size, *map(str, filter(None, keys))))


def _chain(number: int, tokens: array[int], size: int) -> Iterator[int]:
    """Yield the numbers of the blocks of these tokens, behind the block ``number``."""
    data, width = tokens.tobytes(), size * tokens.itemsize
    for end in range(width, len(data) + 1, width):
        number = hash((number, data[end - width : end]))
        yield number


def _bits(caches: int) -> Iterator[int]:
    while caches:
        lowest = caches & -caches
        yield lowest.bit_length() - 1
        caches ^= lowest
