"""The cost of a token in the whole server over a real socket, with and without store, event log and recordings.

The clients run in another process; the figure is the CPU time of this one, all threads included.  Variants are
interleaved, so that their ratios hold on a busy machine too.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yarl import URL

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import EmittedFrame, ItemResult, ItemTokens, ResponseStarted
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.recordings.recorder import Recorder
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.persist import Persist
from tests.bench.core import SETTLING
from tests.bench.figures import over
from tests.support.server import Server, running_server

STREAMS = 16
TOKENS = 1_000

WORDS = "The quick brown fox jumps over the lazy dog, and then it has to think about that for a while. "


@dataclass(frozen=True)
class Unkept:
    """A replacement of `Persist` that keeps neither an event log nor a stored response."""

    runs: RunRegistry

    async def __call__(self, source: AsyncIterator[EmittedFrame]) -> AsyncGenerator[ResponseEvent, None]:
        started = await anext(source)
        assert isinstance(started, ResponseStarted)
        run = self.runs.begin(started)
        async for frame in source:
            if not isinstance(frame, ResponseStarted | ItemTokens | ItemResult):
                yield frame
        run.ended = True
        self.runs.discard(run)


def without_log(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    persist = pipeline.stage("persist")
    assert isinstance(persist, Persist)
    return pipeline.replace("persist", Unkept(persist.runs))


LEAST = "no log, no store"
KEPT = "event log and store"

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    LEAST: ("unkept", {"store": False}),
    "event log, no store": ("kept", {"store": False}),
    KEPT: ("kept", {}),
    "in the background": ("kept", {"background": True}),
    "recorded, event log and store": ("recorded", {}),
}
"""By name: the key of the server, and the fields of the request."""


def talking(tokens: int = TOKENS) -> ScriptedEngine:
    """Return an engine that emits a number of tokens of reasoning, one per step."""
    thoughts = load_encoding().encode(WORDS * tokens)[:tokens]
    opening, end = (
        load_encoding().encode_markup("<|channel|>analysis<|message|>"),
        load_encoding().encode_markup("<|return|>"),
    )
    return ScriptedEngine(Script((*opening, *thoughts, *end)))


async def cost(served: Server[ScriptedEngine], body: dict[str, Any]) -> float:
    """Return microseconds of CPU per token, with `STREAMS` streams at once."""
    port, data = str(URL(served.url).port), json.dumps({"input": "Hi", "stream": True, **body})
    command = (sys.executable, "-m", "tests.bench.readers", port, str(STREAMS), data)
    started = time.process_time()
    clients = await asyncio.create_subprocess_exec(*command)
    assert await clients.wait() == 0
    while served.store.backlog:
        await asyncio.sleep(0.01)
    await asyncio.sleep(SETTLING)  # recordings are written a little later
    return (time.process_time() - started) * 1e6 / (STREAMS * TOKENS)


async def figures(rounds: int) -> dict[str, list[float]]:
    """Return the cost of each variant in each round; a first round warms up and is dropped."""
    measured: dict[str, list[float]] = {name: [] for name in VARIANTS}
    async with AsyncExitStack() as closing:
        folder = Path(closing.enter_context(TemporaryDirectory()))
        recorder = Recorder(folder / "recordings")
        closing.push_async_callback(recorder.close)
        edits = {"kept": lambda pipeline: pipeline, "unkept": without_log, "recorded": recorder.tapped}
        servers = {
            name: await closing.enter_async_context(running_server(talking(), folder / name, edit=edit))
            for name, edit in edits.items()
        }
        for _ in range(1 + rounds):
            for name, (server, body) in VARIANTS.items():
                measured[name].append(await cost(servers[server], body))
    return {name: values[1:] for name, values in measured.items()}


def serving_table(measured: dict[str, list[float]]) -> str:
    """Return the medians, and the medians of the ratios within a round, as a table."""
    lines = [f"the whole server, {STREAMS} streams, 1 token per step   us per token   to {LEAST}"]
    for name, values in measured.items():
        lines.append(
            f"{name:44s}{statistics.median(values):18.2f}{statistics.median(over(measured, name, LEAST)):22.2f}"
        )
    return "\n".join(lines)
