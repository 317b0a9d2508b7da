"""Recordings of the wire as recordings of the stages: items, and events as penstock would have made them.

Penstock's own parsers read the tokens of an answer if it has some and its model is here.  Else the items are those that
the server has sent.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import structs

from penstock.api.cli.recorded_model import model_of
from penstock.extensions.workbench.wiretap.answers import CLIENT_LEFT, TURNS, turn_of
from penstock.extensions.workbench.wiretap.token_file import TOKENS, bare, request_of, unfit
from penstock.extensions.workbench.wiretap.tokens import NONE_CAME, WITH_TOKENS, Tokens
from penstock.pipeline.core import Pipeline, Stage, source_of
from penstock.pipeline.errors import CannotRun, EngineFailed, StageError
from penstock.pipeline.frames import (
    EngineFrame,
    GenerationStarted,
    ParsedFrame,
    Prompt,
    ResolvedRequest,
    TokenFrame,
    replace,
)
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.recordings.format import Recording, read_recording
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.response_folder import REQUEST
from penstock.pipeline.recordings.wire import is_wire, read_wire
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.stages.generate import Generate
from penstock.stages.responses import responses_pipeline, text_stages


class Unshown(CannotRun):
    """A recording of the wire has no items that can be shown.

    Cure: compare it with ``penstock diff RECORDINGS --against URL``, which needs its events alone.
    """


@dataclass
class RecordedAnswer:
    """A backend that answers with a recording of the wire, and the ``clock`` of its events."""

    recording: Recording
    context_length: int = 131_072
    is_alive: bool = True
    now: float = 0.0

    @property
    def models(self) -> tuple[str, ...]:
        """The model of the recording."""
        return (self.recording.header.model,)

    async def answer(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
        """Yield the turn of the recording."""
        async for request in source:
            yield GenerationStarted(request.facts, prompt_tokens=0)
            for at, frame in turn_of(self.recording):
                self.now = at
                yield frame

    async def cancel(self, response_id: str) -> bool:
        """Cancel nothing."""
        return False

    async def stop(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def clock(self) -> float:
        """Return the time of the latest event."""
        return self.now


@dataclass
class RecordedTokens:
    """An engine that answers with the recorded tokens, and the ``clock`` of its frames."""

    recording: Recording
    context_length: int = sys.maxsize
    vocabulary_size: int = 2**32
    is_alive: bool = True
    scores_prompts: Literal[True] = True
    scores_tokens: Literal[True] = True
    now: float = 0.0

    @property
    def models(self) -> tuple[str, ...]:
        """The model of the recording."""
        return (self.recording.header.model,)

    @property
    def started(self) -> GenerationStarted:
        """The beginning of the turn."""
        first: GenerationStarted = self.recording.frames[0]
        return first

    def after(self, render: Stage[ResolvedRequest, Prompt]) -> Stage[ResolvedRequest, Prompt]:
        """Return the stage ``render``, whose prompts have the tokens that the recorded engine has read."""

        async def as_read(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[Prompt, None]:
            async with aclosing(render(source)) as prompts:
                async for prompt in prompts:
                    yield replace(prompt, token_ids=self.started.prompt or prompt.token_ids, grammar=None)

        return as_read

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        """Answer with the recorded turn."""
        async with aclosing(self._frames()) as frames:
            yield frames

    async def _frames(self) -> AsyncGenerator[EngineFrame, None]:
        end = self.recording.end
        for timed in self.recording.timed[1:]:
            self.now = self.now if timed.at is None else timed.at
            yield timed.frame
        if end.failure or end.abandoned:
            raise EngineFailed(end.failure.message if end.failure else CLIENT_LEFT)

    async def cancel(self, response_id: str) -> bool:
        """Cancel nothing."""
        return False

    async def stop(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def clock(self) -> float:
        """Return the time of the latest frame."""
        return self.now


@contextmanager
def staged(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the recording of the stages for a path, and a note about it if it was made of one of the wire.

    Raise `UnreadableRecording` if it is broken, and `Unshown` if it has no items.
    """
    if not is_wire(path):
        yield path, ""
        return
    folder = path.parent if path.is_file() else path
    recording = read_wire(folder)
    if recording.header.dialect not in TURNS:
        raise Unshown(f"{folder}: the items of the dialect {recording.header.dialect} cannot be read")
    with tempfile.TemporaryDirectory(prefix="penstock-") as made:
        notes = asyncio.run(_stage(folder, recording, Path(made)))
        (only,) = Path(made).iterdir()
        yield only.rename(only.with_name(folder.name)), "; and ".join(notes)


async def _stage(folder: Path, recording: Recording, made: Path) -> list[str]:
    """Make the recording of the stages in a folder; return notes about it."""
    try:
        sent = msgspec.json.decode((folder / REQUEST).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        await _run_texts(recording, bare(recording.header), made)
        return [f"it has no tokens: {NONE_CAME}", "no request: it was recorded without texts"]
    notes = [f"it has no tokens: {_missing(recording, sent)}"] if not (folder / TOKENS).is_file() else []
    if isinstance(choices := sent.get("n"), int) and choices > 1:
        notes.append(f"of its {choices} choices the first one is shown")
    try:
        request = request_of(recording.header, sent)
        if not (folder / TOKENS).is_file():
            await _run_texts(recording, request, made)
        elif problem := await _run_tokens(folder, request, made):
            await _run_texts(recording, request, made)
            notes.append(problem)
    except StageError as error:
        notes.append(f"penstock refuses its request: {error.message}")
        await _run_texts(recording, bare(recording.header), made)
    return notes


def _missing(recording: Recording, sent: Mapping[str, Any]) -> str:
    """Return why an answer has no tokens."""
    tokens = Tokens()
    if recording.header.dialect in WITH_TOKENS:
        for timed in recording.timed:
            tokens.read(timed.at or 0.0, timed.frame)
    return tokens.problem or unfit(sent) or NONE_CAME


async def _run_tokens(folder: Path, request: CreateResponse, made: Path) -> str:
    """Run a request through all stages of its model, with the recorded tokens, and record that in a folder.

    Return why that is not possible; empty after it has happened.
    """
    recording = read_recording(folder / TOKENS, TokenFrame)
    model = await asyncio.to_thread(model_of, recording.header)
    if not model.problem:
        engine = RecordedTokens(recording)
        pipeline = model.pipeline.replace("generate", Generate(engine))
        pipeline = pipeline.replace("render", engine.after(pipeline.stage("render")))
        await _record(pipeline, request, Recorder(made, recording.header, pause=0.01, clock=engine.clock))
    return model.problem


async def _run_texts(recording: Recording, request: CreateResponse, made: Path) -> None:
    """Run a request through all stages, with the recorded answer in place of a model, and record that in a folder."""
    answer = RecordedAnswer(recording)
    described = structs.replace(recording.header, encoding="chat", path=None, headers={}, left_out=())
    pipeline = responses_pipeline(text_stages(), answer, RunRegistry(Store(NullDatabase())))
    await _record(pipeline, request, Recorder(made, described, pause=0.01, clock=answer.clock))


async def _record(pipeline: Pipeline[Any, Any], request: CreateResponse, recorder: Recorder) -> None:
    try:
        async with recorder.tapped(pipeline).open(source_of([request])) as events:
            async for _ in events:
                pass
    finally:
        await recorder.close()
