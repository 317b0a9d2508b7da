"""Converse, from recordings: requests are answered with what was said and done when they were recorded.

No model is asked and no tool runs.  Frames go on from the junction behind which they were recorded: tokens through all
stages behind ``generate``, what was parsed of them through those behind ``parse``, and what tools did as it was told.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from penstock.pipeline.core import Pipeline, Step
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import (
    Conversation,
    ConversedFrame,
    GenerationStarted,
    McpCallOpened,
    ParsedFrame,
    ResponseStarted,
    TurnFinished,
)
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.tools import HOSTED
from penstock.pipeline.recordings.format import Recording, UnreadableRecording
from penstock.stages.recordings.recordings import Recorded, Recordings
from penstock.stages.recordings.request import Asked

Frame = TypeVar("Frame")


def answered_from(
    recordings: Recordings, speed: float | None, pipeline: Pipeline[CreateResponse, ResponseEvent]
) -> Pipeline[CreateResponse, ResponseEvent]:
    """The pipeline, with ``recordings`` in place of a model and of tools: all that was asked may be asked again."""

    def read_all(step: Step) -> tuple[Step, ...]:
        stage: Any = step.stage
        may = {"hosted": frozenset(HOSTED), "labels": recordings.labels, "has_template": recordings.has_templates}
        return (Step(step.name, dataclasses.replace(stage, **may, sees_images=True)),)

    converse = ConverseAsRecorded(pipeline.inner("converse"), recordings, speed)
    return (
        pipeline.edited("normalize", read_all)
        .replace("converse", converse)
        .before("converse", "match", Match(recordings))
    )


@dataclass(frozen=True)
class Match:
    """Let those conversations through which a recording answers; raises `NotRecorded` for others."""

    recordings: Recordings

    async def __call__(self, source: AsyncIterator[Conversation]) -> AsyncGenerator[Conversation, None]:
        """The same conversations."""
        async for conversation in source:
            self.recordings.find(conversation)
            yield conversation


@dataclass(frozen=True)
class ConverseAsRecorded:
    """Answer each conversation from a recording, ``speed`` times as fast as it was; None is at once."""

    inner: Pipeline[Conversation, ParsedFrame]
    recordings: Recordings
    speed: float | None = None

    async def __call__(self, source: AsyncIterator[Conversation]) -> AsyncGenerator[ConversedFrame, None]:
        """Tell recorded failures again, those ahead of the first frame as well."""
        async for conversation in source:
            recorded = self.recordings.next(conversation)
            try:
                recording = await asyncio.to_thread(recorded.read)
            except UnreadableRecording as error:
                raise EngineFailed(f"The recording {recorded.name!r} can no longer be read.") from error
            told = _answering(conversation, recorded, _paced(recording, self.speed))
            async with self._behind(recorded.stage).open(told) as frames:
                async for frame in frames:
                    yield frame

    def _behind(self, stage: str) -> Pipeline[Any, Any]:
        """What frames of that junction have yet to pass."""
        if stage == "converse":
            return Pipeline.start(stage, passed)
        return self.inner.since(stage).replace(stage, passed)


async def passed(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    """Pass frames through that have been made before."""
    async for frame in source:
        yield frame


async def _paced(recording: Recording, speed: float | None) -> AsyncGenerator[Any, None]:
    """The frames, each as many seconds behind the beginning as it was; and the end that they had."""
    clock = asyncio.get_running_loop().time
    started = clock()
    for timed in recording.timed:
        due = started if speed is None or timed.at is None else started + timed.at / speed
        await asyncio.sleep(max(0.0, due - clock()))
        yield timed.frame
    if recording.end.failure:
        raise recording.end.failure.again()
    if recording.end.abandoned:
        raise EngineFailed("The recording ends here, as nobody waited for more.")


async def _answering(
    conversation: Conversation, recorded: Recorded, frames: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """The frames as those of another response."""
    approvals = dict(zip(recorded.asked.approvals, Asked.by(conversation).approvals, strict=False))
    response, given, origin = conversation.response, conversation.input, conversation.origin
    try:
        async for frame in frames:
            match frame:
                case GenerationStarted(raw_messages=raw):
                    raw = raw if conversation.raw_messages else None
                    yield replace(frame, response=response, input=given, origin=origin, raw_messages=raw)
                case ResponseStarted():
                    yield replace(frame, response=response, input=given, origin=origin)
                case TurnFinished() if not conversation.raw_messages:
                    yield replace(frame, raw_messages=None)
                case McpCallOpened(approval_request_id=str(request)):
                    yield replace(frame, approval_request_id=approvals.get(request, request))
                case _:
                    yield frame
    finally:
        await frames.aclose()
