"""Each part of a run: what it measures, which goals that answers, and its table in full."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.bench.figures import Comparison
from tests.bench.first_token import first_tokens
from tests.bench.goals import Goal, growth, token_goal
from tests.bench.inprocess import DEPTHS, in_process
from tests.bench.loopback import Pair, loopback, pair
from tests.bench.paced import open_stream, retained_token, streams_of_both
from tests.bench.serving import KEPT, figures, serving_table, to_least
from tests.bench.stalls import stall_table, stalls
from tests.bench.store import store_figures, store_table


class Found(msgspec.Struct):
    """What a run found: the goals, and by part what was compared, or its table."""

    goals: list[Goal] = []
    comparisons: dict[str, list[Comparison]] = {}
    tables: dict[str, str] = {}


@dataclass
class Run:
    """One run; a quick one measures the same of less."""

    folder: Path
    is_quick: bool
    found: Found = field(default_factory=Found)
    _closing: AsyncExitStack = field(default_factory=AsyncExitStack)
    _pair: Pair | None = None

    async def close(self) -> None:
        """End the servers, if they run."""
        await self._closing.aclose()

    async def _both(self) -> Pair:
        if self._pair is None:
            self._pair = await self._closing.enter_async_context(pair(self.folder))
        return self._pair

    def _less(self, usual: int, quick: int) -> int:
        return quick if self.is_quick else usual

    def _goal(self, *goals: Goal) -> None:
        self.found.goals += goals

    async def in_process(self) -> None:
        """P1 and P4."""
        depths = DEPTHS[:2] if self.is_quick else DEPTHS
        compared = await in_process(self._less(5, 2), self._less(1_024, 256), depths)
        self.found.comparisons["in process"] = compared
        by_depth = {found.load["reasoning"]: found for found in compared if found.load["step"] == 1}
        self._goal(
            token_goal("P1", "ids to SSE bytes, in process", by_depth[0], 1.0, 0.06),
            growth(by_depth[depths[-1]], by_depth[0]),
        )

    async def servers(self) -> None:
        """P2 and P3."""
        loads = [(100, 1_000)] if self.is_quick else [(n, depth) for n in (100, 500) for depth in DEPTHS]
        if not self.is_quick:
            loads.remove((500, 16_000))  # the peer needs minutes to get there
        compared = await loopback(await self._both(), loads, self._less(7, 3), self._less(6_000, 2_000))
        self.found.comparisons["whole servers"] = compared
        by_step = {c.load["step"]: c for c in compared if c.load["streams"] == 100 and c.load["reasoning"] == 1_000}
        self._goal(
            token_goal("P2", "whole server, 100 streams behind 1,000 tokens", by_step[1], 8.0, 0.18),
            token_goal("P3", "the same, 8 tokens per step", by_step[8], 3.0, 0.12),
        )

    async def paced(self) -> None:
        """P5."""
        both = await self._both()
        mine, other = await streams_of_both(both, self._less(6, 2))
        ratio = mine / other if other else None
        what = "streams at 50 tokens/s, p99 of a step under 20 ms"
        self._goal(Goal("P5", what, "", mine, 1_400, other, ratio, 5.0, is_rate=True))

    async def memory(self) -> None:
        """P6, of servers that have served nothing: later ones take what earlier streams have left."""
        both, streams = await self._both(), self._less(500, 100)
        begun = [await open_stream(server, streams) / 1024 for server in (both.ours, both.peer)]
        kept = [await retained_token(server, 20, self._less(4_096, 512)) for server in (both.ours, both.peer)]
        self._goal(
            Goal("P6", "memory of an open stream", "KB", begun[0], 16, begun[1], begun[0] / begun[1]),
            Goal("P6", "memory of a retained token", "B", kept[0], 16, kept[1], kept[0] / kept[1]),
        )

    async def first_token(self) -> None:
        """P7."""
        compared = first_tokens(await self._both(), self._less(7, 2))
        self.found.comparisons["first token"] = compared
        for found, what, most in zip(
            compared, ("500-token prompt", "70,000 tokens, cold", "70,000 tokens, known"), (0.5, 15, 2), strict=True
        ):
            name, mine, other = f"time to the first token, {what}", found.ours.median, found.peer.median
            self._goal(Goal("P7", name, "ms", mine, most, other, found.ratio))

    async def stalls(self) -> None:
        """P8."""
        least = await stalls(self._less(5, 1))
        self.found.tables["stalls"] = stall_table(least)
        self._goal(Goal("P8", "longest stall of the loop by any one request", "ms", max(least.values()), 20))

    async def store(self) -> None:
        """P9."""
        rows = await store_figures()
        self.found.tables["store"] = store_table(rows)
        for what, most in (("appends", 15_000), ("upserts", 5_000)):
            row = rows[f"SQLite, {what}", 64]
            self._goal(
                Goal("P9", f"durable {what} at 64 writers, SQLite", "/s", row.rate, most, is_rate=True),
                Goal("P9", f"p99 of {what}", "ms", row.p99, 50),
            )

    async def kept(self) -> None:
        """P10."""
        measured = await figures()
        self.found.tables["with the store and without"] = serving_table(measured)
        self._goal(Goal("P10", "CPU with store and event log over without", "", to_least(measured, KEPT), 1.15))


PARTS: dict[str, Callable[[Run], Awaitable[None]]] = {
    "inprocess": Run.in_process,
    "memory": Run.memory,
    "servers": Run.servers,
    "paced": Run.paced,
    "first": Run.first_token,
    "stalls": Run.stalls,
    "store": Run.store,
    "kept": Run.kept,
}


async def measured(parts: Sequence[str], folder: Path, *, is_quick: bool) -> Found:
    """What these parts find, one after the other."""
    run = Run(folder, is_quick)
    try:
        for name in parts:
            await PARTS[name](run)
    finally:
        await run.close()
    run.found.goals.sort(key=lambda goal: int(goal.name[1:]))
    return run.found
