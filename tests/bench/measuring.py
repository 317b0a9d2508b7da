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

import msgspec

from tests.bench import beside
from tests.bench.apis import APIS, CHAT, MESSAGES, RESPONSES
from tests.bench.budget import measured_budget, stream_budget, token_budget
from tests.bench.chain import SOCKET, STORED
from tests.bench.figures import DISK, Comparison, over
from tests.bench.frontends import frontend_costs, frontend_table
from tests.bench.goals import Goal, compared, growth
from tests.bench.inprocess import DEPTHS, in_process
from tests.bench.loopback import BARE, OURS, PEER, RUST, Servers, servers
from tests.bench.observed import METRICS, NOTHING, OPEN, TRACES, scrape_times, watching_costs, watching_table
from tests.bench.paced import overload_table, overloaded, pace_table, up_and_down
from tests.bench.reading import costs as reading_costs
from tests.bench.reading import reading_table
from tests.bench.rust_frontend import RELEASE, program
from tests.bench.sealed import costs as sealed_costs
from tests.bench.sealed import sealed_table
from tests.bench.serving import KEPT, LEAST, figures, serving_table
from tests.bench.sockets import EACH, SSE, token_costs, token_table, turn_table, turn_times
from tests.bench.stalls import stall_table, stalls
from tests.bench.store import BARE as DISK_WRITES
from tests.bench.store import median, store_figures, store_table, to_bare

IN_PROCESS = "In process: us of CPU per token"

SERVERS = "Whole servers over loopback: us of CPU per token"

IN_TIME = "streams at 50 tokens/s, p99 of a token under 20 ms"
WITHOUT_RUST = f"vllm-rs {RELEASE}, as pip's index did not give vLLM's wheel"

LIMIT = 600.0
"""Seconds that a part may take."""


class Found(msgspec.Struct):
    """The results of one part: its goals, and its comparisons and other tables, by title.

    ``where`` is the date and the machine; ``failed`` is the reason why results are missing, if any are.
    """

    where: str = ""
    goals: list[Goal] = []
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

    def _goal(self, *goals: Goal) -> None:
        self.found.goals += goals

    async def in_process(self) -> None:
        """P1 and P4."""
        depths = DEPTHS[:2] if self.is_quick else DEPTHS
        every = await in_process(self._less(15, 2), self._less(1_024, 256), depths)
        self.found.comparisons[IN_PROCESS] = every
        by_depth = {found.load["reasoning"]: found for found in every if found.load["step"] == 1}
        self._goal(
            compared("P1", "ids to SSE bytes, in process", by_depth[0], 0.12),
            growth(by_depth[depths[-1]], by_depth[0]),
        )

    async def servers(self) -> None:
        """A token of each API, at a pace and at full speed."""
        every = await self._all()
        for name in (CHAT, RESPONSES, MESSAGES):
            self._beside(await beside.token_costs(every, name, self._less(5, 2)))

    async def requests(self) -> None:
        """Whole requests of each API, and the time to their first text."""
        every = await self._all()
        for name in APIS:
            self._beside(await beside.request_costs(every, name, self._less(4, 2)))
        for name in (CHAT, RESPONSES, MESSAGES):
            self._beside(await beside.answer_costs(every, name, self._less(3, 1)))

    async def first_token(self) -> None:
        """Requests with a long prompt."""
        every = await self._all()
        for name in (CHAT, RESPONSES):
            self._beside(await beside.long_requests(every, name, self._less(3, 1)))

    async def memory(self) -> None:
        """The servers must be fresh: later streams would reuse memory that earlier ones have freed."""
        every = await self._all()
        self._beside(await beside.memory(every, CHAT, self._less(500, 100)))
        sizes = {OURS: self._less(12_000, 2_000), PEER: self._less(2_000, 500)}
        self._beside(await beside.retained(every, sizes))

    async def budget(self) -> None:
        """The parts of P2 at a fixed rate, and of P6."""
        budget = await measured_budget(self.folder, self._less(5, 2), self._less(500, 100))
        self.found.tables["What the cost of a token is made of"] = token_budget(budget.token)
        self.found.tables["What the memory of an open stream is made of"] = stream_budget(budget.stream)

    async def paced(self) -> None:
        """The number of streams whose tokens come in time."""
        every = await self._all()
        tries = await up_and_down(every, self._less(8, 4))
        self.found.tables["Streams at a pace"] = pace_table(tries)
        settled = {which: found[-self._less(5, 2) :] for which, found in tries.items()}
        streams = {which: [float(each.streams) for each in found] for which, found in settled.items()}
        self._beside(beside.compared(CHAT, IN_TIME, streams))
        most = 2 * round(statistics.median(streams[OURS]))
        overload = [await overloaded(every[OURS], most) for _ in range(self._less(4, 1))]
        self.found.tables["Twice as many streams: the first three seconds, then the next"] = overload_table(overload)
        growth = tuple(later.p99 / sooner.p99 for sooner, later in overload)
        what = "p99 of a token with twice as many streams, later over sooner: it does not fall behind"
        self._goal(Goal("P5", what, "", statistics.median(growth), 1.25, rounds=growth))

    async def frontends(self) -> None:
        costs = await frontend_costs(self.folder, self._less(5, 2))
        self.found.tables["Frontends"] = frontend_table(costs)
        one, two = (costs[count] for count in (1, 2))
        rounds = tuple(both / alone for alone, both in zip(one, two, strict=True))
        what = "CPU of a token with two frontends, over one"
        self._goal(Goal("P5", what, "", statistics.median(rounds), 1.25, rounds=rounds))

    async def stalls(self) -> None:
        least = await stalls()
        self.found.tables["stalls"] = stall_table(least)
        self._goal(Goal("P8", "longest stall of the loop by any one request", "ms", max(least.values()), 20))

    async def store(self) -> None:
        rounds = await store_figures(self._less(5, 1))
        self.found.tables["store"] = store_table(rounds)
        appends, upserts = ((f"SQLite, {what}", 64) for what in ("appends", "upserts"))
        appended, upserted, disk = (median(rounds, what) for what in (appends, upserts, DISK_WRITES))
        what = "durable {} at 64 writers, SQLite"
        self._goal(
            Goal(
                *("P9", what.format("appends"), "/s", appended.rate, 15_000, disk.rate, DISK, 5.0),
                is_rate=True,
                rounds=to_bare(rounds, appends),
            ),
            Goal("P9", "p99 of appends", "ms", appended.p99, 50),
            Goal("P9", what.format("upserts"), "/s", upserted.rate, 5_000, is_rate=True),
            Goal("P9", "p99 of upserts", "ms", upserted.p99, 50),
        )

    async def kept(self) -> None:
        measured = await figures(self._less(7, 3))
        self.found.tables["with the store and without"] = serving_table(measured)
        rounds, name = over(measured, KEPT, LEAST), "CPU with store and event log over without"
        self._goal(Goal("P10", name, "", statistics.median(rounds), 1.15, rounds=rounds))

    async def sealed(self) -> None:
        found = sealed_costs()
        self.found.tables["Sealed thoughts"] = sealed_table(found)
        self._goal(Goal("P11", "sealing and opening a thought of 10,000 tokens", "ms", found[10_000].both, 2.0))

    async def reading(self) -> None:
        found = reading_costs()
        self.found.tables["A request of 10,000 items"] = reading_table(found)

    async def sockets(self) -> None:
        rounds = self._less(7, 2)
        costs = await token_costs(rounds)
        times, cpu = await turn_times(rounds)
        self.found.tables["A token over a socket"] = token_table(costs)
        self.found.tables["A tool turn over a socket"] = turn_table(times, cpu)
        tokens, turns = over(costs, EACH, SSE), over(times, SOCKET, STORED)
        what = "time of a tool turn over a socket, over that of POSTs that continue stored responses"
        self._goal(
            Goal(
                "P12",
                "CPU of a token over a socket, over that by SSE",
                "",
                statistics.median(tokens),
                1.0,
                rounds=tokens,
            ),
            Goal("P13", what, "", statistics.median(turns), 0.5, rounds=turns),
        )

    async def observed(self) -> None:
        costs = await watching_costs(self._less(7, 2))
        scrapes = await scrape_times(self._less(20, 5))
        self.found.tables["Metrics and traces"] = watching_table(costs)
        what = "CPU of a token with {}, over without"
        counted, traced = over(costs, METRICS, NOTHING), over(costs, TRACES, METRICS)
        self._goal(
            Goal("P14", what.format("metrics"), "", statistics.median(counted), 1.03, rounds=counted),
            Goal("P14", what.format("traces"), "", statistics.median(traced), 1.03, rounds=traced),
            Goal("P15", f"a scrape with {OPEN:,} open streams, median", "ms", statistics.median(scrapes), 20),
        )


PARTS: dict[str, Callable[[Run], Awaitable[None]]] = {
    "inprocess": Run.in_process,
    "memory": Run.memory,
    "servers": Run.servers,
    "requests": Run.requests,
    "budget": Run.budget,
    "paced": Run.paced,
    "frontends": Run.frontends,
    "first": Run.first_token,
    "stalls": Run.stalls,
    "store": Run.store,
    "kept": Run.kept,
    "sealed": Run.sealed,
    "reading": Run.reading,
    "sockets": Run.sockets,
    "observed": Run.observed,
}

USING_SERVERS = {"memory", "servers", "requests", "first", "paced"}


async def measured(parts: Sequence[str], folder: Path, tell: Callable[[str, Found], None], *, is_quick: bool) -> None:
    """Run the parts one after another and pass their results to ``tell``; a failing part does not stop the others."""
    run = Run(folder, is_quick)
    try:
        for name in parts:
            if name not in USING_SERVERS:
                await run.close()
            run.found = Found()
            await attempt(name, run.found, PARTS[name](run))
            tell(name, run.found)
            if run.found.failed:
                await run.close()  # the servers may be in the middle of something
    finally:
        await run.close()


async def attempt(name: str, found: Found, work: Awaitable[None]) -> None:
    """Await ``work`` for up to `LIMIT` seconds; if it fails, store the reason in ``found``."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name}\n")
    limit = asyncio.timeout(LIMIT)
    try:
        async with limit:
            await work
    except Exception as error:  # noqa: BLE001 - the other parts are still worth running
        traceback.print_exc()
        found.failed = f"not done within {LIMIT:g} seconds" if limit.expired() else repr(error)
