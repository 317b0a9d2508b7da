"""The recorder: a tap after each stage notes the frames that pass, and a thread writes them to one folder per response.

A tap only puts the frame and the time into a queue, so the stream waits neither for encoding nor for the disk.  If the
disk is too slow and the queue is full, frames are dropped with a warning in the log, and the file gets no `End`: that
is how a reader knows that a recording was cut.  A recording begins when its response does, so a refused request leaves
nothing.  It is complete when every tap of the response has finished, failed or been closed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.pipeline import metrics
from penstock.pipeline.core import Pipeline, Stage, source_of
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.frames import RequestFacts, ResolvedRequest
from penstock.pipeline.logs import current_response
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import FILES, FORMAT, Cause, Failure, Header
from penstock.pipeline.recordings.redaction import Redact, Redaction
from penstock.pipeline.recordings.response_folder import BEGUN, OVER, JunctionFile, ResponseFolder
from penstock.pipeline.recordings.sampling import ALWAYS, Condition
from penstock.pipeline.recordings.writer import PAUSE_SECONDS, Writer

logger = logging.getLogger(__name__)

Frame = TypeVar("Frame")

MOST_WAITING = 100_000
"""The most frames in the queue, for all responses together."""

_latest_request: ContextVar[tuple[str, bytes]] = ContextVar("_latest_request", default=("", b""))
"""The response id and the body of this task's latest request."""

WITH_TOKENS = ("render", "generate")
"""The stages that a pipeline does not have if its model takes and gives texts."""


@dataclass
class Recorder:
    """Records the responses chosen by ``condition`` into ``folder``.

    ``described`` has the header fields that all recordings of a model share, and may be a function of its name.
    ``after`` names the stages whose output is recorded.  ``redact`` makes the `Redaction` for a response by its header.
    Raises `OSError` if the folder is not writable.
    """

    folder: Path
    described: Header | Callable[[str], Header] = Header(FORMAT)  # noqa: RUF009 - frozen
    after: Collection[str] = tuple(FILES)
    condition: Condition = ALWAYS
    redact: Redact = lambda _: Redaction()
    most_waiting: int = MOST_WAITING
    pause: float = PAUSE_SECONDS
    clock: Callable[[], float] = time.monotonic
    folders: dict[str, ResponseFolder] = field(default_factory=dict)
    """The responses that are passing a tap now, by id."""
    stages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The operator's own stages after ``generate``, by the stage of `FILES` that they follow."""

    def __post_init__(self) -> None:
        self.writer = Writer[JunctionFile](self.folder, self.pause)

    @property
    def waiting(self) -> deque[tuple[JunctionFile, float, Any]]:
        """The queue for the thread: the file, the time, and the frame or `BEGUN` or `OVER`."""
        return self.writer.waiting

    def tapped(self, pipeline: Pipeline[CreateResponse, Any]) -> Pipeline[CreateResponse, Any]:
        """Return the pipeline with a tap directly after each stage.  Raise `CannotRun` if a stage is missing.

        The tap for ``persist`` is the last stage.  A pipeline without token ids has no ``render`` and no ``generate``.
        """
        names = pipeline.names()
        self.stages = {**self.stages, **own_stages(pipeline)}
        absent = () if any(stage in names for stage in WITH_TOKENS) else WITH_TOKENS
        try:
            is_changed = any(step.guard for step in pipeline.following("emit").steps)
            for stage in FILES:
                if stage != "persist" and stage not in absent:
                    pipeline = pipeline.insert_after(stage, f"record {stage}", RecorderTap(self, stage))
            if is_changed:
                pipeline = pipeline.then("record persist", RecorderTap(self, "persist"))
        except (LookupError, ValueError) as error:  # plug-ins may change names
            raise CannotRun(f"--record: {error.args[0]}") from error
        return pipeline.replace("normalize", KeepBody(pipeline.stage("normalize"), self.condition))

    async def close(self) -> None:
        """Write the queued frames, as `Writer.close` does."""
        await self.writer.close()

    def enter(self, stage: str, frame: Any) -> JunctionFile | None:
        """Register a stream at a tap by its first frame.  Return its file, or None if it is not to be recorded."""
        folder = self._folder(frame)
        if folder is None:
            return None
        folder.running += 1
        file = folder.junction(stage, self.after)
        file.failure, file.abandoned = None, False
        if stage == "emit":
            self.waiting.append((file, 0.0, BEGUN))
        if len(self.waiting) >= self.most_waiting:
            self.cut(file)
        elif file.is_kept and not file.is_cut and not file.repeats(frame):
            self.waiting.append((file, self.clock(), frame))
        return file

    def cut(self, file: JunctionFile) -> None:
        """Drop a frame because the queue is full or the file is already cut, with one warning per file."""
        if not file.is_cut:
            file.is_cut = True
            metrics.RECORDINGS_CUT.inc()
            logger.warning("%s is too slow: %s is cut after %s", self.folder, file.folder.name, file.stage)

    def leave(self, file: JunctionFile) -> None:
        """Note that a stream at a tap is finished or closed; the last one ends the folder."""
        folder = file.folder
        folder.running -= 1
        if not folder.running:
            del self.folders[folder.name]
            self.waiting.append((file, 0.0, OVER))

    def broke_off(self, stage: str, file: JunctionFile | None, error: BaseException) -> None:
        """Note that a stream raised ``error`` or was closed early.

        Without a ``file`` it broke before its first frame.  It may then be a later turn of a recorded response.
        """
        if file is None and (folder := self.folders.get(current_response.get())):
            file = folder.files.get(stage)
        if file is None:
            return
        if isinstance(error, Exception):
            file.failure = Failure.of(error)
        else:  # cancelled, or closed by its reader
            file.abandoned = True

    def closing(self, response_id: str, cause: Cause) -> None:
        """Note why the stages of a response are closed before their end; the first cause counts."""
        if folder := self.folders.get(response_id):
            folder.cause = folder.cause or cause

    def _folder(self, frame: Any) -> ResponseFolder | None:
        """Return the folder of the response that a first frame belongs to, or None if it is not to be recorded."""
        facts = getattr(frame, "facts", None)
        if facts is None:  # an event, whose response has passed the tap after ``emit``
            response = getattr(frame, "response", None)
            return self.folders.get(response.id) if isinstance(response, Response) else None
        if not self.condition.chooses(facts.response_id, facts.origin):
            return None
        folder = self.folders.get(facts.response_id)
        if folder is None:
            folder = self.folders[facts.response_id] = self._new_folder(facts)
        return folder

    def _new_folder(self, facts: RequestFacts) -> ResponseFolder:
        response_id = facts.response_id
        request_id, body = _latest_request.get()
        recorded_at = datetime.now(UTC).isoformat(timespec="microseconds")
        described = self.described(facts.model) if callable(self.described) else self.described
        header = replace(described, model=facts.model, recorded_at=recorded_at, stages=self.stages)
        return ResponseFolder(
            self.folder / response_id,
            header=header,
            started=self.clock(),
            redaction=self.redact(header),
            request=body if request_id == response_id and "normalize" in self.after else b"",
        )


def own_stages(pipeline: Pipeline[Any, Any]) -> Mapping[str, tuple[str, ...]]:
    """Return the operator's own stages after ``generate``, by the latest stage of `FILES` before each."""
    found, latest = dict[str, tuple[str, ...]](), ""

    def look(within: Pipeline[Any, Any]) -> None:
        nonlocal latest
        for step in within.steps:
            if step.inner is not None:
                look(step.inner)
            elif step.guard and latest:
                found[latest] = (*found.get(latest, ()), step.name)
            if step.name == "generate" or (latest and step.name in FILES):
                latest = step.name

    look(pipeline)
    return found


@dataclass(frozen=True)
class RecorderTap:
    """A stage that passes all frames on and notes them; the first frame identifies the response."""

    recorder: Recorder
    stage: str

    async def __call__(self, source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        """Pass all frames on, and queue them for the recorder if the response is to be recorded."""
        recorder, file = self.recorder, None
        try:
            async for frame in source:
                file = recorder.enter(self.stage, frame)
                yield frame
                break
            if file is not None and file.is_kept:
                waiting, now, most = recorder.waiting, recorder.clock, recorder.most_waiting
                note = waiting.append
                async for frame in source:
                    if len(waiting) < most and not file.is_cut:
                        note((file, now(), frame))
                    else:
                        recorder.cut(file)
                    yield frame
            else:
                async for frame in source:
                    yield frame
        except BaseException as error:
            recorder.broke_off(self.stage, file, error)
            raise
        finally:
            if file is not None:
                recorder.leave(file)


@dataclass(frozen=True)
class KeepBody:
    """The normalize stage of a recorded pipeline; keeps the body of the task's latest request for the recorder."""

    normalize: Stage[CreateResponse, ResolvedRequest]
    condition: Condition

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[ResolvedRequest, None]:
        """Yield the conversations of the wrapped stage."""
        async for request in source:
            async with aclosing(self.normalize(source_of([request]))) as conversations:
                async for conversation in conversations:
                    response_id = conversation.facts.response_id
                    is_recorded = self.condition.chooses(response_id, conversation.facts.origin)
                    _latest_request.set((response_id, _body_of(request) if is_recorded else b""))
                    yield conversation


def _body_of(request: CreateResponse) -> bytes:
    """Return the body of a request; one that came in another dialect is written as one of the Responses API."""
    body = request.envelope.body
    if body is not None:
        return body
    given = msgspec.to_builtins(
        {name: getattr(request, name) for name in request.model_fields_set},
        enc_hook=lambda part: part.model_dump(by_alias=True, exclude_unset=True),
    )
    if isinstance(items := given.get("input"), list):
        given["input"] = [
            {name: value for name, value in item.items() if (name, value) != ("id", "")} for item in items
        ]
    if (raw := request.raw_prompt) is not None:
        given["prompt"] = raw.text or raw.token_ids
    return msgspec.json.encode(given)
