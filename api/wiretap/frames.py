"""Recordings of the wire as recordings of the stages: items, and events as penstock would have made them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from penstock.api.dialects.named import OPTION, named
from penstock.api.wiretap.answers import TURNS, turn_of
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import CannotRun, StageError
from penstock.pipeline.frames import GenerationStarted, ParsedFrame, ResolvedRequest
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.recordings.format import Recording
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.response_folder import REQUEST
from penstock.pipeline.recordings.wire import is_wire, read_wire
from penstock.stages.responses import responses_pipeline, text_stages
from penstock.stages.services.runs.run import RunRegistry
from penstock.stages.services.store.database import NullDatabase
from penstock.stages.services.store.store import Store


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
        request, note = _request(folder, recording)
        try:
            asyncio.run(_run(recording, request, Path(made)))
        except StageError as error:
            note = f"{note}; and penstock refuses its request: {error.message}"
            asyncio.run(_run(recording, _bare(recording), Path(made)))
        (only,) = Path(made).iterdir()
        yield only.rename(only.with_name(folder.name)), note


def _request(folder: Path, recording: Recording) -> tuple[CreateResponse, str]:
    """Return the recorded request as penstock reads it, or a bare one, and a note that says what is missing."""
    missing = "it has no tokens: the server did not send them"
    try:
        body = (folder / REQUEST).read_bytes()
    except OSError:
        return _bare(recording), f"{missing}; and no request: it was recorded without texts"
    try:
        request = named(recording.header.dialect or "", OPTION).read(body).request
    except StageError as error:
        return _bare(recording), f"{missing}; and penstock refuses its request: {error.message}"
    return request.replaced({"previous_response_id": None, "conversation": None}), missing


def _bare(recording: Recording) -> CreateResponse:
    return CreateResponse.model_validate({"model": recording.header.model, "input": ""})


async def _run(recording: Recording, request: CreateResponse, folder: Path) -> None:
    """Run a request through all stages, with the recorded answer in place of a model, and record that in a folder."""
    answer = RecordedAnswer(recording)
    described = replace(recording.header, encoding="chat", path=None, headers={}, left_out=())
    pipeline = responses_pipeline(text_stages(), answer, RunRegistry(Store(NullDatabase())))
    recorder = Recorder(folder, described, pause=0.01, clock=answer.clock)
    try:
        async with recorder.tapped(pipeline).open(source_of([request])) as events:
            async for _ in events:
                pass
    finally:
        await recorder.close()
