"""Admission: one door for all requests with a body and all responses, which knows the limits of each API key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from operator import attrgetter
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from penstock.api.limits.allowance import Allowance, Allowances, OwnAllowances
from penstock.api.limits.reserved_slots import PATIENCE, LocalReservations, Reservations, ReservedSlots
from penstock.api.limits.table import ALL, DEFAULT, NO_LIMITS, KeyLimits, read_limits
from penstock.pipeline.errors import LimitReached, StorageFull, StoreFailed, TokenLimitReached
from penstock.pipeline.yield_point import YieldPoint
from penstock.services.containers import OwnerLimits
from penstock.services.runs.run import Run
from penstock.services.store.store import Store

REQUESTS, TOKENS, SECONDS = "requests", "tokens", "sandbox seconds"
RESPONSES, BACKGROUND, SANDBOXES = "responses", "background responses", "sandboxes"

_COST = {REQUESTS: 1.0, TOKENS: 0.0}
"""The amounts that a request spends when it is admitted; its tokens are spent when its response ends."""

_RESPONSES_AT_ONCE, _SANDBOXES_AT_ONCE = attrgetter("responses"), attrgetter("sandboxes")

SHORTEST_WAIT = 0.1
"""Seconds after which a call at least looks again whether it may use a sandbox."""

PAUSE = 1.0
"""Seconds after which a client that has too many responses may try again."""

EVERYBODY = "*"
"""The owner of the allowances of all keys together, which is the owner of no response."""


class Gate(Protocol):
    """A rule of an extension that every request with a body has to pass, and every line of a batch."""

    async def check(self, owner: str) -> None:
        """Raise a `StageError` if the owner may not go on."""
        ...

    def headers(self, owner: str) -> Mapping[str, str]:
        """Return the headers about the rule for the answers to an owner."""
        ...


def _default(_: str) -> str:
    return DEFAULT


@dataclass
class Admission:
    """The limits of each owner, which a ``file`` sets, and what the owners use.

    ``name_of`` gives the name of the table of an owner, or an empty text.  Raises `UnusableLimits` for a wrong file.
    """

    file: Path | None = None
    allowances: Allowances = field(default_factory=OwnAllowances)
    name_of: Callable[[str], str] = _default
    tables: Mapping[str, KeyLimits] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    _known: dict[tuple[str, str], Allowance] = field(default_factory=dict)
    reservations: Reservations = field(default_factory=LocalReservations)
    _slots: WeakValueDictionary[tuple[str, str], ReservedSlots] = field(default_factory=WeakValueDictionary)
    """The slots that are used, waited for, or given back."""
    gates: list[Gate] = field(default_factory=list)
    _stored: dict[str, StoredBytes] = field(default_factory=dict)
    _queueing: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        self.tables = self.read()

    def read(self) -> Mapping[str, KeyLimits]:
        """Return the tables that the file has now; raises `UnusableLimits`."""
        return self.tables if self.file is None else read_limits(self.file)

    def of(self, owner: str) -> KeyLimits:
        """Return the limits of an owner."""
        return self.tables.get(self.name_of(owner)) or self.tables.get(DEFAULT, NO_LIMITS)

    @property
    def of_all(self) -> KeyLimits:
        """The limits of all owners together."""
        return self.tables.get(ALL, NO_LIMITS)

    async def admit(self, owner: str) -> None:
        """Count a request.  Raises `LimitReached` if the owner, or all owners together, have made too many.

        Raises what the `gates` raise, before the request is counted.
        """
        await self.check_gates(owner)
        with ExitStack() as refunds:
            for payer, limits in self._payers(owner):
                for allowance in self._allowances(payer, limits):
                    cost = _COST[allowance.kind]
                    if not await allowance.take(cost):
                        raise _refusal(allowance)
                    refunds.callback(allowance.spend, -cost)
            refunds.pop_all()

    async def check_gates(self, owner: str) -> None:
        """Raise what the `gates` raise if an owner may not go on."""
        for gate in self.gates:
            await gate.check(owner)

    def responding(self, owner: str) -> AbstractAsyncContextManager[None]:
        """Count a response for the length of a block.  Raises `LimitReached` if too many run."""
        return self._using(owner, RESPONSES, _RESPONSES_AT_ONCE, PATIENCE)

    def most_responses(self, owner: str) -> float:
        """Return the number of responses that may run at once."""
        most = (limits.responses for _, limits in self._payers(owner))
        return min((each for each in most if each is not None), default=inf)

    @asynccontextmanager
    async def sandbox(self, owner: str) -> AsyncGenerator[None, None]:
        """Count a sandbox and its seconds for the length of a block, which begins when there is a place for it."""
        for payer, limits in self._payers(owner):
            for seconds in self._allowances(payer, limits, (SECONDS,)):
                while not await seconds.take(0.0):
                    await asyncio.sleep(max(SHORTEST_WAIT, seconds.refills_in(1.0)))
        async with self._using(owner, SANDBOXES, _SANDBOXES_AT_ONCE, inf):
            begun = self.clock()
            try:
                yield
            finally:
                self._spend(owner, SECONDS, self.clock() - begun)

    def containers(self, owner: str) -> OwnerLimits:
        """Return the limits of the containers of an owner."""
        limits = self.of(owner)
        return OwnerLimits(limits.containers, limits.container_bytes)

    @asynccontextmanager
    async def queueing(self, owner: str, store: Store) -> AsyncGenerator[None, None]:
        """Let a block store a background response.  Raises `LimitReached` if too many have not ended.

        The blocks of an owner run one after another.  So if several servers store responses in the same moment, the
        limit is exceeded by at most one for each of the others.
        """
        async with AsyncExitStack() as turns:
            for payer, limits in self._payers(owner):
                if (most := limits.background) is not None:
                    await turns.enter_async_context(self._queueing.setdefault(payer, asyncio.Lock()))
                    if await store.in_background(None if payer == EVERYBODY else payer) >= most:
                        raise _too_many(payer, BACKGROUND, most)
            yield

    async def storing(self, owner: str, store: Store, size: int = 1) -> None:
        """Raise `StorageFull` if an owner, or all owners together, may not store so many bytes more."""
        for payer, limits in self._payers(owner):
            if (most := limits.stored_bytes) is not None:
                known = self._stored.setdefault(payer, StoredBytes(None if payer == EVERYBODY else payer))
                if (now := await known.read(store, most - size)) > most - size:
                    has = "All API keys together have" if payer == EVERYBODY else "This API key has"
                    remedy = 'Delete files, responses or conversations, or send "store": false.'
                    raise StorageFull(f"{has} stored {now} bytes, of at most {most}. {remedy}")

    def stored(self, owner: str, size: int) -> None:
        """Count bytes that were stored since those of an owner were read."""
        for payer in (owner, EVERYBODY):
            if known := self._stored.get(payer):
                known.add(size)

    def close(self) -> None:
        """Give nothing back any more: a server that has left its store holds nothing."""
        for slots in list(self._slots.values()):
            slots.close()

    async def forget_idle(self) -> None:
        """Forget the allowances and stored bytes of idle owners, which would be the same if they were made anew."""
        may_yield = YieldPoint()
        for owner_and_kind, allowance in list(self._known.items()):
            if allowance.is_idle:
                del self._known[owner_and_kind]
            await may_yield()
        for owner, stored in list(self._stored.items()):
            if stored.is_idle:
                del self._stored[owner]
            await may_yield()

    def end(self, run: Run) -> None:
        """Note that a response has ended: its tokens are spent, unless it answers the line of a batch."""
        if run.origin.line:
            return
        owner, usage = run.origin.owner, run.response.usage
        tokens = usage.total_tokens if usage else run.event_count  # at least a token for each delta
        self.spend_tokens(owner, tokens)

    def spend_tokens(self, owner: str, tokens: int) -> None:
        """Note that the owner has used tokens."""
        self._spend(owner, TOKENS, tokens)

    def headers(self, owner: str) -> dict[str, str]:
        """Return OpenAI's headers about the limits of an owner, and those of the `gates`; none if it has no limits."""
        headers: dict[str, str] = {}
        for gate in self.gates:
            headers.update(gate.headers(owner))
        for allowance in self._allowances(owner, self.of(owner)):
            headers[f"x-ratelimit-limit-{allowance.kind}"] = str(int(allowance.most))
            headers[f"x-ratelimit-remaining-{allowance.kind}"] = str(max(0, int(allowance.remaining)))
            headers[f"x-ratelimit-reset-{allowance.kind}"] = _duration(allowance.refills_in(allowance.most))
        return headers

    def _payers(self, owner: str) -> Iterator[tuple[str, KeyLimits]]:
        yield owner, self.of(owner)
        yield EVERYBODY, self.of_all

    def _spend(self, owner: str, kind: str, amount: float) -> None:
        for payer, limits in self._payers(owner):
            for allowance in self._allowances(payer, limits, (kind,)):
                allowance.spend(amount)

    def _allowances(self, owner: str, limits: KeyLimits, kinds: Iterable[str] = tuple(_COST)) -> Iterator[Allowance]:
        per_minute = {
            REQUESTS: limits.requests_per_minute,
            TOKENS: limits.tokens_per_minute,
            SECONDS: limits.sandbox_seconds_per_minute,
        }
        for kind in kinds:
            known = self._known.get((owner, kind))
            if (most := per_minute[kind]) is None:
                continue
            if known is None or known.most != most:
                known = self._known[owner, kind] = Allowance(
                    self.allowances, owner=owner, kind=kind, most=most, clock=self.clock
                )
            yield known

    def _using(self, owner: str, kind: str, most: Callable[[KeyLimits], int | None], patience: float) -> _Using:
        """Use a slot of the owner and one of all owners together."""
        return _Using(partial(self._enter, owner, kind, most, patience))

    async def _enter(
        self,
        owner: str,
        kind: str,
        most: Callable[[KeyLimits], int | None],
        patience: float,
        entered: list[ReservedSlots],
    ) -> None:
        for payer, limits in self._payers(owner):
            if (slots := self._slots.get((payer, kind))) is None:
                slots = self._slots[payer, kind] = ReservedSlots(self.reservations, payer, kind)
            if not await slots.enter(most(limits), patience):
                raise _too_many(payer, kind, slots.most)
            entered.append(slots)


class _Using:
    """The block in which slots are used: many responses wait here, and the frame of a generator takes more memory."""

    __slots__ = ("_enter", "_entered")

    def __init__(self, enter: Callable[[list[ReservedSlots]], Awaitable[None]]) -> None:
        self._enter = enter
        self._entered: list[ReservedSlots] = []

    async def __aenter__(self) -> None:
        enter = self._enter
        del self._enter
        try:
            await enter(self._entered)
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        for slots in reversed(self._entered):
            slots.leave()


def _too_many(owner: str, kind: str, most: int) -> LimitReached:
    return LimitReached(f"Rate limit reached for {_named(owner)}: {most} {kind} at once. Try again later.", PAUSE)


def _named(owner: str) -> str:
    return "all API keys together" if owner == EVERYBODY else "this API key"


def _refusal(allowance: Allowance) -> LimitReached:
    """Return the error for an allowance that is used up, in OpenAI's words."""
    seconds = max(allowance.refills_in(1.0), 0.01)
    message = (
        f"Rate limit reached for {_named(allowance.owner)} on {allowance.kind} per minute: "
        f"limit {int(allowance.most)}. Please try again in {_duration(seconds)}."
    )
    kind = TokenLimitReached if allowance.kind == TOKENS else LimitReached
    return kind(message, seconds)


def _duration(seconds: float) -> str:
    """Return a duration as OpenAI's headers have it, such as ``120ms``, ``7.66s`` or ``6m0s``."""
    if seconds < 1:
        return f"{ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


FRESH, FRESH_IF_FULL = 10.0, 1.0
"""Seconds after which the bytes are read again; sooner for a key that has reached its limit, and may have deleted."""


@dataclass(eq=False)
class StoredBytes:
    """The bytes of an ``owner``, or of all if None."""

    owner: str | None
    _bytes: int = 0
    _read_at: float = -inf
    _is_full: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_idle(self) -> bool:
        """True if the bytes would be read again, and were below the limit: an owner that has reached it stays known."""
        return not self._is_full and time.monotonic() - self._read_at > FRESH and not self._turn.locked()

    def add(self, size: int) -> None:
        """Count bytes until all are read again."""
        self._bytes += size

    async def read(self, store: Store, most: int) -> int:
        """Return the bytes of some seconds ago, of one if they are more than ``most``, or of before an outage."""
        async with self._turn:
            self._is_full = self._bytes > most
            fresh = FRESH_IF_FULL if self._is_full else FRESH
            if time.monotonic() - self._read_at > fresh:
                try:
                    self._bytes = await store.bytes_of(self.owner)
                except StoreFailed:  # it is counted and logged where it happens
                    return self._bytes
                self._read_at, self._is_full = time.monotonic(), self._bytes > most
            return self._bytes
