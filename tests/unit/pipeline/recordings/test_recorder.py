"""The recorder's taps and thread, with failing engines, disks, queues and redactions."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import CannotRun, EngineFailed, EngineOverloaded, StageError
from penstock.pipeline.frames import (
    EngineFrame,
    GenerationStarted,
    ParsedFrame,
    Prompt,
    ResolvedRequest,
    TokenChunk,
)
from penstock.pipeline.plugins import Edit, guarded
from penstock.pipeline.protocol.events import DELTAS, ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope
from penstock.pipeline.protocol.params.validation import read_request
from penstock.pipeline.recordings import response_folder
from penstock.pipeline.recordings import writer as module
from penstock.pipeline.recordings.format import End, Failure
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.redaction import Redaction
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.stages.converse.tool_loop import Limits
from penstock.stages.models.harmony.token_masking import WithoutTexts, harmony_words
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages, responses_pipeline
from tests.support.server import COUNT, only_recording, read_stage, recorded_files, script

LOST = '<|channel|>analysis to=browser.search code<|message|>{"query": "height"}<|call|>'
"""A call of a missing tool, after which the model gets another turn."""


@asynccontextmanager
async def recorder(folder: Path, **options: Any) -> AsyncGenerator[Recorder, None]:
    """A recorder with a long pause: it writes when the block ends, unless a test makes it write before."""
    taps = Recorder(folder, **{"pause": 60.0, **options})
    try:
        yield taps
        assert not taps.folders
    finally:
        await taps.close()


def flow(taps: Recorder, engine: ScriptedEngine, install: Edit = lambda pipeline: pipeline) -> Pipeline[Any, Any]:
    """The stages of a server with their taps."""
    live = RunRegistry(Store(NullDatabase()))
    declared = responses_pipeline(harmony_stages(load_encoding()), engine, live, limits=Limits(retry_seconds=0.0))
    return taps.tapped(guarded(install(declared), declared))


async def passed(pipeline: Pipeline[Any, Any], first: Any) -> list[Any]:
    """All frames that the pipeline makes of one frame."""
    async with pipeline.open(source_of([first])) as frames:
        return [frame async for frame in frames]


async def request_of(text: str = "Hi") -> CreateResponse:
    body = b'{"model": "tiny", "input": "%b"}' % text.encode()
    return read_request(body, Envelope(body=body, is_recorded=True))


async def frames_of_answer(pipeline: Pipeline[Any, Any], text: str = "Hi") -> list[Any]:
    """All frames that the pipeline makes of a request."""
    return await passed(pipeline, await request_of(text))


@dataclass
class Refusing(ScriptedEngine):
    """An engine that accepts the first prompt and raises ``refusals`` for the next ones."""

    refusals: list[StageError] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        if self.prompts and self.refusals:
            raise self.refusals.pop(0)
        async with super().open(prompt) as frames:
            yield frames


async def test_turn_that_waited_for_room_is_recorded_once(tmp_path: Path) -> None:
    engine = Refusing(turns=(script(LOST), script()), refusals=[EngineOverloaded("full")] * 3)
    async with recorder(tmp_path / "r") as taps:
        assert (await frames_of_answer(flow(taps, engine)))[-1].response.status == "completed"
    assert not engine.refusals
    folder = only_recording(tmp_path / "r")
    assert len(read_stage(folder, "render").frames) == 2
    for stage in ("generate", "parse"):
        recording = read_stage(folder, stage)
        assert sum(isinstance(frame, GenerationStarted) for frame in recording.frames) == 2
        assert (recording.end.failure, recording.end.abandoned) == (None, False)


async def test_refused_turn_is_recorded_as_a_failure(tmp_path: Path) -> None:
    engine = Refusing(turns=(script(LOST),), refusals=[EngineFailed("no more")])
    async with recorder(tmp_path / "r") as taps:
        assert (await frames_of_answer(flow(taps, engine)))[-1].response.status == "failed"
    for stage in ("generate", "parse"):
        failure = read_stage(only_recording(tmp_path / "r"), stage).end.failure
        assert failure is not None
        assert (failure.error, failure.message) == ("EngineFailed", "no more")


async def test_request_is_recorded_with_its_own_response_only(tmp_path: Path) -> None:
    """A task that runs a conversation from another task does not record its own last request with it."""
    engine = ScriptedEngine(script())
    async with recorder(tmp_path / "r") as taps:
        pipeline = flow(taps, engine)
        [waiting] = await frames_of_answer(pipeline.through("normalize"))
        assert isinstance(waiting, ResolvedRequest)
        await frames_of_answer(pipeline, "Another one.")
        await passed(pipeline.from_stage("record normalize"), waiting)
    assert "request.json" not in recorded_files(tmp_path / "r" / waiting.facts.response.id)
    assert sum("request.json" in recorded_files(folder) for folder in (tmp_path / "r").iterdir()) == 1


async def test_frame_times_count_from_start_of_response(tmp_path: Path) -> None:
    ticks = count(start=1000)
    async with recorder(tmp_path / "r", clock=lambda: next(ticks) / 1_000_000) as taps:
        await frames_of_answer(flow(taps, ScriptedEngine(script())))
    folder = only_recording(tmp_path / "r")
    stages = ("normalize", "render", "generate", "parse", "emit")
    times = sorted(timed.at for stage in stages for timed in read_stage(folder, stage).timed if timed.at is not None)
    converse_too = next(ticks) - 1001
    assert times[0] == 1e-6
    assert len(set(times)) == len(times) <= converse_too
    assert times[-1] <= converse_too / 1_000_000


async def test_conversed_frames_are_kept_if_recorded_alone(tmp_path: Path) -> None:
    """The file stays even after a single turn, if no other file has the parsed frames."""
    async with recorder(tmp_path / "r", after=("converse",)) as taps:
        await frames_of_answer(flow(taps, ScriptedEngine(script())))
    assert recorded_files(only_recording(tmp_path / "r")) == {"conversed.jsonl"}


async def shout(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    event: Any
    async for event in source:
        yield msgspec.structs.replace(event, delta=event.delta.upper()) if type(event) in DELTAS else event


async def test_changed_events_are_recorded_as_sent(tmp_path: Path) -> None:
    def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return pipeline.insert_after("persist", "shout", shout)

    async with recorder(tmp_path / "r") as taps:
        sent = await frames_of_answer(flow(taps, ScriptedEngine(script()), install))
    folder = only_recording(tmp_path / "r")
    recording = read_stage(folder, "persist")
    assert "".join(frame.delta for frame in recording.frames if type(frame) in DELTAS) == "A GREETING.HELLO!"
    assert (list(recording.frames), recording.end) == (sent, End(len(sent)))


async def test_error_message_is_redacted_as_text(tmp_path: Path) -> None:
    """A message may quote anything, so without texts only the kind of the error is written."""
    engine = ScriptedEngine(script(error=EngineFailed("It broke at quokka 7.")))
    async with recorder(tmp_path / "r", redact=lambda _: WithoutTexts(harmony_words)) as taps:
        await frames_of_answer(flow(taps, engine))
    folder = only_recording(tmp_path / "r")
    failure = read_stage(folder, "generate").end.failure
    assert failure == Failure("EngineFailed", "xx xxxxx xx xxxxxx 0.")
    error = json.loads((folder / "response.json").read_bytes())["error"]
    assert error == {"code": "server_error", "message": "xx xxxxx xx xxxxxx 0."}
    assert [path.name for path in folder.iterdir() if "quokka" in path.read_text()] == []


async def test_refused_request_leaves_no_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with recorder(tmp_path / "r") as taps:
        with pytest.raises(EngineOverloaded):
            await frames_of_answer(flow(taps, ScriptedEngine(Script(refusal=EngineOverloaded("full")))))
    assert list((tmp_path / "r").iterdir()) == []
    assert "cut" not in caplog.text


# Cut recordings


def tokens_in(path: Path) -> list[int]:
    """The tokens in the complete lines of a cut file."""
    lines = [json.loads(data) for data in path.read_bytes().splitlines(keepends=True) if data.endswith(b"\n")]
    assert lines[-1]["type"] == "TokenChunk"
    return [token for each in lines for token in each.get("token_ids", ())]


def is_beginning(first: Sequence[int], whole: Sequence[int]) -> bool:
    """True if only the last tokens are missing."""
    return 0 < len(first) < len(whole) and [*whole[: len(first)]] == [*first]


async def test_recording_ends_at_its_first_gap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(script(COUNT))
    async with recorder(tmp_path / "r", most_waiting=40, after=("generate",)) as taps:
        async with flow(taps, engine).open(source_of([await request_of()])) as events:
            written = [await anext(events) for _ in range(80)]
            assert len(taps.waiting) == 40
            noted = [taps.waiting.popleft() for _ in range(20)]
            written += [event async for event in events]
        taps.waiting.extendleft(reversed(noted))
    assert written[-1].response.status == "completed"
    assert caplog.text.count("is too slow") == 1
    assert is_beginning(tokens_in(only_recording(tmp_path / "r") / "tokens.jsonl"), engine.script.token_ids)


async def test_nothing_is_recorded_without_room(tmp_path: Path) -> None:
    async with recorder(tmp_path / "r", most_waiting=0) as taps:
        await frames_of_answer(flow(taps, ScriptedEngine(script())))
    assert not recorded_files(only_recording(tmp_path / "r")) & {"tokens.jsonl", "parsed.jsonl", "events.jsonl"}


class Failing(Redaction):
    """A redaction that raises at the tenth chunk."""

    changes_frames = True

    def __init__(self) -> None:
        self._numbers = count(1)

    def frames(self, stage: str, frame: Any) -> Iterable[Any]:
        if isinstance(frame, TokenChunk) and next(self._numbers) == 10:
            raise ValueError("what is this?")
        return (frame,)


async def test_failing_redaction_cuts_its_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(script(COUNT))
    redactions = iter([Failing(), Redaction()])
    async with recorder(tmp_path / "r", redact=lambda _: next(redactions)) as taps:
        pipeline = flow(taps, engine)
        cut, whole = [(await frames_of_answer(pipeline))[-1].response for _ in range(2)]
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage() == f"The recording of {cut.id} is cut: ValueError"
    assert record.exc_info
    for name in recorded_files(tmp_path / "r" / cut.id) & {"tokens.jsonl", "parsed.jsonl", "events.jsonl"}:
        assert b'"type":"End"' not in (tmp_path / "r" / cut.id / name).read_bytes()
    assert "response.json" not in recorded_files(tmp_path / "r" / cut.id)
    assert read_stage(tmp_path / "r" / whole.id, "generate").end.failure is None


async def until(happened: Callable[[], object]) -> None:
    """Wait until the writer thread has done its part."""
    async with asyncio.timeout(120):
        while not happened():
            await asyncio.sleep(0.005)


@pytest.mark.io
async def test_disk_that_was_full_leaves_no_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_full = os.write, False

    def fill(file: int, data: Any) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", fill)
    engine = ScriptedEngine(script(COUNT))
    async with (
        recorder(tmp_path / "r", pause=0.005, after=("generate",)) as taps,
        flow(taps, engine).open(source_of([await request_of()])) as events,
    ):
        await anext(events)
        await until(lambda: list(tmp_path.glob("r/*/tokens.jsonl")))
        for _ in range(30):
            await anext(events)
        await until(lambda: not taps.waiting)
        is_full = True
        for _ in range(30):
            await anext(events)
        await until(lambda: caplog.records)
        is_full = False
        rest = [event async for event in events]
    assert rest[-1].response.status == "completed"
    assert "is cut: OSError: No space left on device" in caplog.text
    assert is_beginning(tokens_in(only_recording(tmp_path / "r") / "tokens.jsonl"), engine.script.token_ids)


@pytest.mark.parametrize(
    ("stage", "name", "reason"), [("emit", "say", "'emit'"), ("persist", "record parse", "repeat")]
)
async def test_recording_renamed_stages_is_refused(tmp_path: Path, stage: str, name: str, reason: str) -> None:
    """Recordings are named by the usual stages, so a plug-in that renames one is refused."""
    pipeline = responses_pipeline(harmony_stages(load_encoding()), ScriptedEngine(), RunRegistry(Store(NullDatabase())))
    steps = tuple(replace(step, name=name) if step.name == stage else step for step in pipeline.steps)
    async with recorder(tmp_path / "r") as taps:
        with pytest.raises(CannotRun, match=f"^--record: .*{reason}"):
            taps.tapped(Pipeline(steps))


async def answer(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
    async for _ in source:
        raise NotImplementedError
    nothing: tuple[ParsedFrame, ...] = ()
    for frame in nothing:
        yield frame


async def test_turns_without_tokens_are_recorded_after_the_stage_that_makes_them(tmp_path: Path) -> None:
    pipeline = responses_pipeline(harmony_stages(load_encoding()), ScriptedEngine(), RunRegistry(Store(NullDatabase())))
    async with recorder(tmp_path / "r") as taps:
        names = taps.tapped(pipeline.replace("parse", answer, first="render")).names()
    assert names[2:5] == ["converse", "summarize", "parse"]


@pytest.mark.parametrize("is_full", [False, True])
async def test_written_frames_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_full: bool
) -> None:
    """They are released at once, prompts included, without the garbage collector."""

    def fill(file: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_full:
        monkeypatch.setattr(os, "write", fill)
        caplog.set_level(
            logging.CRITICAL, response_folder.__name__
        )  # pytest would keep the error, which knows its frames
    gc.disable()
    try:
        async with recorder(tmp_path / "r") as taps:
            pipeline = flow(taps, ScriptedEngine(script(COUNT)))
            async with pipeline.open(source_of([await request_of()])) as events:
                await anext(events)
                [folder] = map(weakref.ref, taps.folders.values())
                assert [event async for event in events]
        assert folder() is None
    finally:
        gc.enable()


async def test_partial_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:100]))
    async with recorder(tmp_path / "r", after=("generate",)) as taps:
        await frames_of_answer(flow(taps, ScriptedEngine(script())))
    assert read_stage(only_recording(tmp_path / "r"), "generate").end == End(len(script().token_ids) + 2)


async def test_shutdown_does_not_wait_for_a_hanging_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, hangs = os.write, threading.Event()
    monkeypatch.setattr(module, "LAST_WRITES_SECONDS", 0.05)
    monkeypatch.setattr(os, "write", lambda file, data: hangs.wait(60) and write(file, data))
    taps = Recorder(tmp_path / "r", after=("generate",))
    await frames_of_answer(flow(taps, ScriptedEngine(script())))
    await taps.close()
    assert f"{tmp_path / 'r'} is too slow: recordings of the last responses are cut" in caplog.text
    hangs.set()
    taps.writer.thread.join()


async def test_request_of_another_dialect_is_recorded_as_one_of_the_responses_api(tmp_path: Path) -> None:
    body = {"model": "tiny", "input": [{"role": "user", "content": "Hi"}], "text": {"format": {"type": "text"}}}
    request = read_request(json.dumps(body).encode(), Envelope(body=None, is_recorded=True))
    async with recorder(tmp_path / "r") as taps:
        await passed(flow(taps, ScriptedEngine(script())), request)
    recorded = (only_recording(tmp_path / "r") / "request.json").read_bytes()
    assert read_request(recorded) == request.inside(Envelope())
