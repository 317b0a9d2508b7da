"""The blocks that the prefix caches of several vLLM servers hold, as their KV events report them.

A block is known by its tokens and by all before them, because a cache reuses only whole beginnings of prompts.  vLLM's
own hashes serve to follow its events; from release to release it makes them in other ways, so that a prompt cannot be
looked up by them.  So each block gets a number of our own, which its tokens and the number of the block before
determine, and prompts are numbered alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import msgspec

LONGEST_HASH = 64
"""Bytes of a hash: vLLM's have up to 32."""

EngineHash: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=LONGEST_HASH)] | int
"""vLLM's own hash of a block."""

MOST_BLOCKS = 2**21
"""Blocks that one cache is believed to hold: 33 million tokens in blocks of 16."""

MOST_SIZES = 8
"""Sizes of blocks that one cache is believed to have: each costs a look at every prompt."""

MOST_GROUPS = 64
"""Groups of layers that one cache is believed to have."""

_ENDS = frozenset({"sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba"})
"""Kinds of layers that keep the ends of prompts only.  How much of a prompt is cached, the other layers decide."""


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
    medium: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Blocks that a cache no longer holds."""

    block_hashes: list[EngineHash]
    group_idx: int | None = None
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A cache is empty."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
"""An event of a cache, in the form in which vLLM publishes it."""


class TooMuch(ValueError):
    """A cache claims more than one can have: the message says of what, without any text of the engine."""


@dataclass
class _Cache:
    """The blocks of one cache."""

    bit: int
    numbers: dict[EngineHash, int] = field(default_factory=dict)
    """The numbers of its blocks, by vLLM's hashes."""
    copies: dict[EngineHash, int] = field(default_factory=dict)
    """The number of further copies of a block that has some."""
    sizes: set[int] = field(default_factory=set)
    """The sizes of its blocks."""
    ends: set[int | None] = field(default_factory=set)
    """The groups of its layers that keep the ends of prompts only."""


class CachedBlocks:
    """The blocks of several caches.  Caches are numbered from 0.

    A set of caches is an int with a bit for each; the blocks that only one cache holds share one int.  A block that two
    requests have computed at once is in a cache twice, is stored twice, and is removed twice.
    """

    def __init__(self) -> None:
        self._holders = dict[int, int]()  # of each block, by its number
        self._caches = dict[int, _Cache]()
        self._sizes = dict[
            int, int
        ]()  # the number of caches with blocks of a size; a thread may write as another reads

    def count(self, cache: int) -> int:
        """Return the number of blocks that a cache is known to hold."""
        held = self._caches.get(cache)
        return len(held.numbers) if held else 0

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of the blocks of all caches, for each of which a prompt is looked up."""
        return tuple(self._sizes)

    def take(self, cache: int, event: CacheEvent) -> None:
        """Take an event of a cache.  Those of slower memory, into which vLLM moves blocks, do not count.

        Raises `TooMuch` or another error for an event that cannot be true, and may have taken a part of it.
        """
        held = self._caches.setdefault(cache, _Cache(1 << cache))
        match event:
            case AllBlocksCleared():
                self.forget(cache)
            case BlockStored(medium="GPU" | None):
                self._store(held, event)
            case BlockRemoved(medium="GPU" | None):
                self._remove(held, event)
            case _:
                pass

    def forget(self, cache: int) -> None:
        """Forget all blocks of a cache."""
        if held := self._caches.pop(cache, None):
            for number in held.numbers.values():
                self._release(number, held.bit)
            for size in held.sizes:
                if caches := self._sizes.pop(size) - 1:
                    self._sizes[size] = caches

    def cached(self, token_ids: Sequence[int], adapter: str | None, salt: str | None) -> dict[int, int]:
        """Return how many tokens at the beginning of a prompt each cache holds; caches without any are left out."""
        tokens = array("q", token_ids)
        found = dict[int, int]()
        for size in self.sizes():
            first = _root(size, adapter, salt)
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

    def _store(self, held: _Cache, event: BlockStored) -> None:
        if event.kv_cache_spec_kind in _ENDS:
            held.ends.add(event.group_idx)
            if len(held.ends) > MOST_GROUPS:
                raise TooMuch(f"it has more than {MOST_GROUPS} groups of layers")
            return
        if event.block_size < 1 or not event.block_hashes:
            return
        keys = event.extra_keys or [None] * len(event.block_hashes)
        if event.parent_block_hash is None:
            first = _root(event.block_size, event.lora_name, _salt(event.lora_name, keys[0] or []))
            self._know(event.block_size, held)
        elif event.parent_block_hash in held.numbers:
            first = held.numbers[event.parent_block_hash]
        else:
            return
        chain = _chain(first, array("q", event.token_ids), event.block_size)
        for engine_hash, others, number in zip(event.block_hashes, keys, chain, strict=False):
            if any(not isinstance(key, str) for key in others or ()):
                return  # an image, which a prompt shows by its place only
            if engine_hash in held.numbers:
                held.copies[engine_hash] = held.copies.get(engine_hash, 0) + 1
                continue
            held.numbers[engine_hash] = number
            holders = self._holders.get(number)
            self._holders[number] = held.bit if holders is None else holders | held.bit
        if len(held.numbers) > MOST_BLOCKS:
            raise TooMuch(f"it holds more than {MOST_BLOCKS:,} blocks")

    def _know(self, size: int, held: _Cache) -> None:
        """Note that a cache has blocks of a size."""
        if size in held.sizes:
            return
        if len(held.sizes) == MOST_SIZES:
            raise TooMuch(f"its blocks have more than {MOST_SIZES} sizes")
        held.sizes.add(size)
        self._sizes[size] = self._sizes.get(size, 0) + 1

    def _remove(self, held: _Cache, event: BlockRemoved) -> None:
        if event.group_idx in held.ends:
            return
        for engine_hash in event.block_hashes:
            if copies := held.copies.pop(engine_hash, 0):
                if copies > 1:
                    held.copies[engine_hash] = copies - 1
            elif (number := held.numbers.pop(engine_hash, None)) is not None:
                self._release(number, held.bit)

    def _release(self, number: int, bit: int) -> None:
        if rest := self._holders.get(number, 0) & ~bit:
            self._holders[number] = rest
        else:
            self._holders.pop(number, None)


def _root(size: int, adapter: str | None, salt: str | None) -> int:
    """Return the number that the first block of a prompt follows: caches keep adapters and salts apart."""
    return hash((size, adapter or "", salt or ""))


def _salt(adapter: str | None, keys: Sequence[Any]) -> str | None:
    """Return the salt among the keys of a first block, which begin with its adapter."""
    rest = keys[1:] if adapter and keys[:1] == [adapter] else keys
    return rest[0] if rest and isinstance(rest[0], str) else None


def _chain(number: int, tokens: array[int], size: int) -> Iterator[int]:
    """Yield the numbers of the blocks of these tokens, the first of which follows the block ``number``."""
    data, width = tokens.tobytes(), size * tokens.itemsize
    for end in range(width, len(data) + 1, width):
        number = hash((number, data[end - width : end]))
        yield number


def _bits(caches: int) -> Iterator[int]:
    while caches:
        lowest = caches & -caches
        yield lowest.bit_length() - 1
        caches ^= lowest
