"""The watchdog: which code it names, for which times, and how often."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import uvloop

from penstock.api.runs.watchdog import QUIET, CodeLine, Reports, Stall, Watchdog, find_line, name_silent, preempted
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.frames import GenerationStarted, Prompt
from penstock.pipeline.logs import current_response, name_response
from penstock.pipeline.plugins import guarded, guarded_at
from penstock.pipeline.recordings.format import read_frames
from penstock.pipeline.stage_guard import StageGuard
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.generate import Generate
from tests.support.clock import Clock
from tests.support.paths import HARMONY

Numbers = AsyncGenerator[int, None]
STOPS = threading.Event()


async def own(source: AsyncIterator[int]) -> Numbers:
    async for number in source:
        yield number


async def stops(source: AsyncIterator[int]) -> Numbers:
    async for number in source:
        STOPS.wait(120)  # holds the loop
        yield number


async def passes(source: AsyncIterator[int]) -> Numbers:
    async for number in source:
        yield number


async def hangs(source: AsyncIterator[int]) -> Numbers:
    async for number in source:
        yield number
        await asyncio.Event().wait()  # hangs


CODES = {stage.__code__ for stage in (own, hangs, passes)}


def line_of(comment: str) -> str:
    """The line of this file with that comment, as the log names it."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'  # {comment}'))}"


def inserted(*stages: Callable[[AsyncIterator[int]], Numbers]) -> Pipeline[int, int]:
    """A pipeline of the server's stage ``own`` and then those of an operator."""
    original: Any = Pipeline.start("own", own)
    edited = original
    for stage in stages:
        edited = edited.then(stage.__name__, stage)
    return guarded(edited, original)


@pytest.mark.io
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_stage_that_holds_the_loop_is_named_with_its_line(
    run: Callable[[Any], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line comes while the stage still holds the loop, and only then it goes on."""
    ended = threading.Event()

    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            (STOPS if "still is" in record.msg else ended).set()

    async def serve() -> None:
        with Watchdog(0.1, {}, patience=0.3):  # time for many looks: on a busy machine, one may see what comes before
            await asyncio.sleep(0)
            async with inserted(stops).open(source_of([1])) as numbers:
                assert [number async for number in numbers] == [1]
            await asyncio.to_thread(ended.wait, 120)

    log = logging.getLogger("penstock.api.runs.watchdog")
    monkeypatch.setattr(log, "handlers", [Release()])
    STOPS.clear()
    run(serve())
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    place = f"by the stage 'stops', at {line_of('holds the loop')}, in {threading.__file__}:"
    assert all(place in record.message for record in caplog.records)


async def test_outer_stages_are_not_named() -> None:
    """All stages from the reader on are on the stack, and each but the innermost only waits."""
    pipeline = inserted(hangs, passes)
    found: list[CodeLine] = []

    async def source() -> Numbers:
        frame, stack = inspect.currentframe(), list[FrameType]()
        while frame:
            stack.append(frame)
            frame = frame.f_back
        found.extend(
            find_line(stack[at:], {own.__code__: "own"}) for at, frame in enumerate(stack) if frame.f_code in CODES
        )
        yield 1

    async with pipeline.open(source()) as numbers:
        await anext(numbers)
    assert [line.culprit for line in found] == ["stage 'own'", "stage 'hangs'", "stage 'passes'"]
    assert found[0].line.startswith(f"{__file__}:")


class HangingEngine(ScriptedEngine):
    found: CodeLine | None = None

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[Any], None]:
        yield self.generated()

    async def generated(self) -> AsyncGenerator[Any, None]:
        self.look()  # holds the loop in the engine
        await asyncio.Event().wait()
        yield

    def look(self) -> None:
        stack = list[FrameType]()
        frame = inspect.currentframe()
        while frame := frame and frame.f_back:
            stack.append(frame)
        self.found = find_line(stack, {})


async def test_engine_is_named_instead_of_the_stage_that_runs_it(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = HangingEngine()
    pipeline: Any = guarded_at("generate", engine.open, Pipeline.start("generate", Generate(engine)))
    prompts = read_frames(HARMONY / "greeting" / "prompt.jsonl", Prompt)
    with naming(pipeline):
        async with pipeline.open(source_of(prompts)) as frames:
            assert isinstance(await anext(frames), GenerationStarted)
            reading = asyncio.ensure_future(anext(frames))
            await pass_minutes(clock, 2)
            reading.cancel()
            await asyncio.wait([reading])
    assert str(engine.found) == f"by the engine, in stage 'generate', at {line_of('holds the loop in the engine')}"
    begin = f"{__file__}:{inspect.getsourcelines(inspect.unwrap(HangingEngine.open))[1]}"
    assert caplog.messages == [
        "The engine, in stage 'generate', has given nothing for 60 s, and does not wait for its source: it is at "
        + begin
    ]


@pytest.mark.parametrize(
    ("interval", "computed", "lost"),
    [
        pytest.param(0.05, 0.0, 0.0, id="it sleeps, as in time.sleep"),
        pytest.param(10.0, 10.0, 0.0, id="it computes without releasing the interpreter"),
        pytest.param(10.0, 0.0, 10.0, id="the process is stopped"),
        pytest.param(10.0, 4.0, 6.0, id="it computes, and then the process gets no CPU"),
    ],
)
def test_times_without_a_cpu_are_excused(interval: float, computed: float, lost: float) -> None:
    assert preempted(interval, 0.05, computed) == lost


def test_stage_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports()
    for now in (0.0, 1.0, 2.0, QUIET):
        stall = Stall(
            now - 0.5,
            now,
            0.0,
            Counter(
                [CodeLine("stage 'mine'", "mine.py:1"), CodeLine("stage 'mine'", "mine.py:1"), CodeLine(None, "x")]
            ),
        )
        reports.ended(stall, 0.5, now)
    long = Stall(0.0, 0.0, 1.0, Counter([CodeLine(None, "app.py:2")]))
    for now in (6.0, 7.0):
        reports.goes_on(long, now)
    reports.ended(long, 7.0, 8.0)
    assert [record.message for record in caplog.records] == [
        "The event loop was held for 0.50 s by the stage 'mine', at mine.py:1",
        "The event loop was held for 0.50 s by the stage 'mine', at mine.py:1; 2 more holds since the line before",
        "The event loop has been held for 5 s, and still is, at app.py:2",
        "The event loop was held for 7.00 s at app.py:2",
    ]


async def test_silent_stage_is_named_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(name_response)
    current_response.set("resp_1")
    pipeline = inserted(hangs, passes)
    with naming(pipeline) as guards:
        async with pipeline.open(source_of([1, 2])) as numbers:
            assert await anext(numbers) == 1
            await pass_minutes(clock, 2)
            assert not caplog.records  # the reader asks for nothing
            reading = asyncio.ensure_future(anext(numbers))
            await pass_minutes(clock, 3)
            reading.cancel()
            await asyncio.wait([reading])
    text = "The stage 'hangs' has given nothing for 60 s, and does not wait for its source: it is at "
    lines = [(getattr(record, "response", ""), record.levelname, record.message) for record in caplog.records]
    assert lines == [("resp_1", "INFO", text + line_of("hangs"))]
    assert not any(guard.running for guard in guards)


async def test_stage_that_waits_for_its_source_is_not_silent(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def slow() -> Numbers:
        await asyncio.Event().wait()
        yield 1

    pipeline = inserted(passes)
    with naming(pipeline):
        async with pipeline.open(slow()) as numbers:
            reading = asyncio.ensure_future(anext(numbers))
            await pass_minutes(clock, 3)
            reading.cancel()
            await asyncio.wait([reading])
    assert not caplog.records


@contextmanager
def naming(pipeline: Pipeline[int, int]) -> Iterator[list[StageGuard]]:
    """Name the silent stages of a pipeline for the length of the block."""
    guards = [step.guard for step in pipeline.every_step() if step.guard]
    task = asyncio.create_task(name_silent(guards))
    try:
        yield guards
    finally:
        task.cancel()


async def pass_minutes(clock: Clock, minutes: int) -> None:
    for _ in range(6 * minutes):
        await clock.move(10.0)
