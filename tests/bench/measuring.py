"""The parts of a run: each measures something, fills in its goals, and keeps its full table."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from tests.bench import beside
from tests.bench import figures as names
from tests.bench.apis import APIS, CHAT, MESSAGES, RESPONSES
from tests.bench.beside import AT_A_PACE, FIRST_LONG, IN_TIME, OPEN_STREAM, SHORT_REQUEST
from tests.bench.budget import measured_budget, stream_budget, token_budget
from tests.bench.chain import RESENT, SOCKET
from tests.bench.figures import DISK, OWN_POST, SQLITE, Comparison, Figure, over
from tests.bench.frontends import frontend_costs, frontend_table
from tests.bench.goals import Goal, among
from tests.bench.loopback import BARE, OURS, PEER, RUST, Servers, servers
from tests.bench.observed import METRICS, NOTHING, OPEN, TRACES, scrape_times, watching_costs, watching_table
from tests.bench.paced import overload_table, overloaded, pace_table, up_and_down
from tests.bench.reading import AGENT, reading_costs
from tests.bench.rust_frontend import RELEASE, program
from tests.bench.sealed import costs as sealed_costs
from tests.bench.sealed import sealed_table
from tests.bench.searching import search_costs
from tests.bench.serving import KEPT, LEAST, figures, serving_table
from tests.bench.sockets import BARE_SOCKET, EACH, SSE, token_costs, token_table, turn_table, turn_times
from tests.bench.stalls import stall_table, stalls
from tests.bench.store import ALONE, APPENDS, UPSERTS, microseconds, postgres_figures, store_figures, store_table
from tests.bench.store import DISK as TO_DISK

TOKEN_BUDGET = "What the cost of a token is made of"

WITHOUT_RUST = f"vllm-rs {RELEASE}, as pip's index did not give vLLM's wheel"

LIMIT = 600.0
"""Seconds that a part may take."""


class Found(msgspec.Struct):
    """The results of one part: its goals, bounds of figures of its own, comparisons and other tables, by title.

    ``where`` is the date and the machine, ``seconds`` how long the part took; ``failed`` is the reason why results are
    missing, if any are.
    """

    where: str = ""
    seconds: float = 0.0
    goals: list[Goal] = []
    bounds: list[Goal] = []
    comparisons: dict[str, list[Comparison]] = {}
    tables: dict[str, str] = {}
    failed: str = ""


@dataclass
class Run:
    """One run; a quick one measures the same with fewer rounds and smaller loads."""

    folder: Path
    is_quick: bool
    found: Found = field(default_factory=Found)
    _closing: AsyncExitStack = field(default_factory=AsyncExitStack)
    _servers: Servers = field(default_factory=dict)

    async def close(self) -> None:
        self._servers = {}
        await self._closing.aclose()

    async def _all(self) -> Servers:
        """Return the running servers; a table says which are missing."""
        kinds = (OURS, PEER, RUST, BARE) if program() else (OURS, PEER, BARE)
        if not self._servers:
            self._servers = await self._closing.enter_async_context(servers(self.folder, kinds))
        if RUST not in kinds:
            self.found.tables["Not measured"] = WITHOUT_RUST
        return self._servers

    def _beside(self, compared: Sequence[Comparison]) -> None:
        """Keep comparisons in the tables of the other servers."""
        for each in compared:
            self.found.comparisons.setdefault(f"Beside {each.beside}", []).append(each)

    def _less(self, usual: int, quick: int) -> int:
        return quick if self.is_quick else usual

    def _goal(self, goal: Goal) -> None:
        self.found.goals.append(goal)

    def _bound(self, what: str, unit: str, rounds: Sequence[float], most: float) -> None:
        """Keep a bound of a figure, which nothing else was measured beside."""
        self.found.bounds.append(Goal(what, unit, Figure(tuple(rounds)), most=most))

    async def servers(self) -> None:
        """A token of each API, at a pace and at full speed."""
        every = await self._all()
        for name, bounds in ((CHAT, (1.25, None)), (RESPONSES, (0.4, 1.4)), (MESSAGES, None)):
            found = await beside.token_costs(every, name, self._less(5, 2))
            self._beside(found)
            if bounds:
                of_peer, of_limit = bounds
                what = f"a token of {name} at a pace"
                rest = "the engine's client, stages, log"
                of = among(found, f"{name}: {AT_A_PACE}")
                self._goal(Goal(what, "us", **of, of_peer=of_peer, of_limit=of_limit, rest=rest))

    async def requests(self) -> None:
        """Whole requests of each API, and the time to their first text."""
        every = await self._all()
        for name in APIS:
            found = await beside.request_costs(every, name, self._less(4, 2))
            self._beside(found)
            if name == RESPONSES:
                what, rest = "a request of Responses, 500 tokens", "rendering, `AsyncLLM`, the store"
                self._goal(Goal(what, "us", **among(found, f"{name}: {SHORT_REQUEST}"), of_peer=0.8, rest=rest))
        for name in (CHAT, RESPONSES, MESSAGES):
            self._beside(await beside.answer_costs(every, name, self._less(3, 1)))

    async def first_token(self) -> None:
        """Requests with a long prompt."""
        every = await self._all()
        for name in (CHAT, RESPONSES):
            found = await beside.long_requests(every, name, self._less(4, 1))
            self._beside(found)
            if name == CHAT:
                beside_vllm = [each for each in found if each.beside != names.RUST]  # see the known limits
                of = {**among(beside_vllm, f"{name}: {FIRST_LONG}"), "limit": None}  # a bare server encodes nothing
                what, rest = "the first text after 70,000 tokens", "encoding the prompt"
                self._goal(Goal(what, "ms", **of, of_peer=0.4, rest=rest))

    async def memory(self) -> None:
        """The servers must be fresh: later streams would reuse memory that earlier ones have freed."""
        every = await self._all()
        found = await beside.memory(every, CHAT, self._less(500, 100))
        self._beside(found)
        rest = "`AsyncLLM`, stages, log"
        self._goal(Goal("an open stream of Chat", "KB", **among(found, f"{CHAT}: {OPEN_STREAM}"), most=40, rest=rest))
        sizes = {OURS: self._less(12_000, 2_000), PEER: self._less(2_000, 500)}
        self._beside(await beside.retained(every, sizes))

    async def budget(self) -> None:
        """The parts of a token at a pace, and of an open stream."""
        budget = await measured_budget(self.folder, self._less(4, 2), self._less(500, 100))
        self.found.tables[TOKEN_BUDGET] = token_budget(budget.token)
        self.found.tables["What the memory of an open stream is made of"] = stream_budget(budget.stream)

    async def paced(self) -> None:
        """The number of streams whose tokens come in time."""
        every = await self._all()
        tries = await up_and_down(every, self._less(6, 4))
        self.found.tables["Streams at a pace"] = pace_table(tries)
        settled = {which: found[-self._less(4, 2) :] for which, found in tries.items()}
        streams = {which: [float(each.streams) for each in found] for which, found in settled.items()}
        self._beside(beside.compared(CHAT, IN_TIME, streams))
        most = 2 * round(statistics.median(streams[OURS]))
        overload = [await overloaded(every[OURS], most) for _ in range(self._less(2, 1))]
        self.found.tables["Twice as many streams: the first three seconds, then the next"] = overload_table(overload)
        rounds = [later.p99 / sooner.p99 for sooner, later in overload]
        self._bound("p99 of a token with twice as many streams, later over sooner", "", rounds, 1.25)

    async def store(self) -> None:
        rounds = await store_figures(self._less(5, 1))
        self.found.tables["store"] = store_table(rounds)
        appends, alone, disk = (microseconds(rounds, what) for what in (APPENDS, ALONE, TO_DISK))
        peer, limit = Comparison({}, appends, alone, beside=SQLITE), Comparison({}, appends, disk, beside=DISK)
        rest = "the commit and waking 64 writers"
        self._goal(Goal("a durable append, 64 writers", "us", appends, peer=peer, of_peer=2.0, limit=limit, rest=rest))
        for what in (APPENDS, UPSERTS):
            self._bound(f"p99 of {what[0]}, 64 writers", "ms", [each[what].p99 for each in rounds], 50)

    async def reading(self) -> None:
        found = reading_costs(self._less(7, 2))
        self.found.comparisons["A request of 10,000 items: ms of CPU"] = found
        rest = "checking items"
        self._goal(Goal("a history of 10,000 items", "ms", **among(found, AGENT), of_peer=0.2, of_limit=10, rest=rest))

    async def sockets(self) -> None:
        times, cpu = await turn_times(self._less(7, 2))
        self.found.tables["A tool turn over a socket"] = turn_table(times, cpu)
        ours, posts, least = (Figure(tuple(times[way])) for way in (SOCKET, RESENT, BARE_SOCKET))
        peer, limit = Comparison({}, ours, posts, beside=OWN_POST), Comparison({}, ours, least, beside=names.BARE)
        rest = "the pipeline"
        self._goal(Goal("a tool turn over a socket", "ms", ours, peer=peer, of_peer=0.8, limit=limit, rest=rest))

    async def lanes(self) -> None:
        costs = await token_costs(self._less(7, 2))
        self.found.tables["A token over a socket"] = token_table(costs)
        self._bound("CPU of a token over a socket, over that by SSE", "", over(costs, EACH, SSE), 1.0)

    async def search(self) -> None:
        found = await search_costs(self._less(5, 1))
        self.found.comparisons["A search by words: ms of CPU"] = [found]
        rest = "the texts found"
        self._goal(Goal("a search in 4,000 chunks", "ms", found.ours, peer=found, of_peer=1.5, limit=found, rest=rest))

    async def frontends(self) -> None:
        costs = await frontend_costs(self.folder, self._less(5, 2))
        self.found.tables["Frontends"] = frontend_table(costs)
        one, two = (costs[count] for count in (1, 2))
        rounds = [both / alone for alone, both in zip(one, two, strict=True)]
        self._bound("CPU of a token with two frontends, over one", "", rounds, 1.25)

    async def stalls(self) -> None:
        least = await stalls()
        self.found.tables["stalls"] = stall_table(least)
        self._bound("the longest stall of the loop by any one request", "ms", [max(least.values())], 20)

    async def postgres(self) -> None:
        self.found.tables["PostgreSQL"] = store_table(await postgres_figures(self._less(5, 1)))

    async def kept(self) -> None:
        measured = await figures(self._less(7, 3))
        self.found.tables["with the store and without"] = serving_table(measured)
        self._bound("CPU with store and event log, over without", "", over(measured, KEPT, LEAST), 1.15)

    async def sealed(self) -> None:
        found = sealed_costs()
        self.found.tables["Sealed thoughts"] = sealed_table(found)
        self._bound("sealing and opening a thought of 10,000 tokens", "ms", [found[10_000].both], 2.0)

    async def observed(self) -> None:
        costs = await watching_costs(self._less(7, 2))
        scrapes = await scrape_times(self._less(20, 5))
        self.found.tables["Metrics and traces"] = watching_table(costs)
        self._bound("CPU of a token with metrics, over without", "", over(costs, METRICS, NOTHING), 1.03)
        self._bound("CPU of a token with traces, over without", "", over(costs, TRACES, METRICS), 1.03)
        self._bound(f"a scrape with {OPEN:,} open streams", "ms", scrapes, 20)

    async def tokens(self) -> None:
        from tests.bench.tokens import guard_table, variant_table  # noqa: PLC0415 - each imports a lot

        self.found.tables["Items of every kind"] = await variant_table()
        self.found.tables["A stage of the operator's"] = await guard_table()

    async def chat(self) -> None:
        from tests.bench.chat import chat_figures  # noqa: PLC0415

        self.found.tables["Chat models"] = await chat_figures()

    async def parsers(self) -> None:
        from tests.bench.parsers import parser_figures  # noqa: PLC0415

        self.found.tables["Parsers of chat models"] = parser_figures()


Part: TypeAlias = Callable[[Run], Awaitable[None]]

PARTS: dict[str, Part] = {
    "memory": Run.memory,
    "servers": Run.servers,
    "requests": Run.requests,
    "first": Run.first_token,
    "paced": Run.paced,
    "budget": Run.budget,
    "store": Run.store,
    "reading": Run.reading,
    "sockets": Run.sockets,
    "search": Run.search,
}
"""All that a user would feel."""

DETAILS: dict[str, Part] = {
    "lanes": Run.lanes,
    "frontends": Run.frontends,
    "stalls": Run.stalls,
    "postgres": Run.postgres,
    "kept": Run.kept,
    "sealed": Run.sealed,
    "observed": Run.observed,
    "tokens": Run.tokens,
    "chat": Run.chat,
    "parsers": Run.parsers,
}
"""Parts that run if they are named."""

USING_SERVERS = {"memory", "servers", "requests", "first", "paced"}


async def measured(parts: Sequence[str], folder: Path, tell: Callable[[str, Found], None], *, is_quick: bool) -> None:
    """Run the parts one after another and pass their results to ``tell``; a failing part does not stop the others."""
    run = Run(folder, is_quick)
    try:
        for name in parts:
            if name not in USING_SERVERS:
                await run.close()
            run.found = Found()
            await attempt(name, run.found, (PARTS | DETAILS)[name](run))
            tell(name, run.found)
            if run.found.failed:
                await run.close()  # the servers may be in the middle of something
    finally:
        await run.close()


async def attempt(name: str, found: Found, work: Awaitable[None]) -> None:
    """Await ``work`` for up to `LIMIT` seconds; if it fails, store the reason in ``found``."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name}\n")
    begun, limit = time.monotonic(), asyncio.timeout(LIMIT)
    try:
        async with limit:
            await work
    except Exception as error:  # noqa: BLE001 - the other parts are still worth running
        traceback.print_exc()
        found.failed = f"not done within {LIMIT:g} seconds" if limit.expired() else repr(error)
    found.seconds = time.monotonic() - begun
