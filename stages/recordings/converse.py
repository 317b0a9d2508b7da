"""The converse stage of a server that answers from recordings.

No model and no tool runs.  Recorded frames enter the pipeline after the stage that made them: tokens after
``generate``, parsed frames after ``parse``, and frames that include the work of tools after ``converse``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline, Stage, source_of
from penstock.pipeline.errors import CannotStart, EngineFailed
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.recordings.format import Recording, UnreadableRecording
from penstock.services.runs.turns import own_turn
from penstock.services.tools import Toolbox
from penstock.stages.recordings.recorded_request import ComparableRequest
from penstock.stages.recordings.recordings import Recorded, Recordings

Frame = TypeVar("Frame")


@dataclass(frozen=True)
class RecordedTools(Toolbox):
    """The tools that recorded requests name; none runs, as recordings have the results."""

    recordings: Recordings = field(kw_only=True)
    of_unknown: str = "recordings answer here, and no tools run"

    @property
    def namespaces(self) -> frozenset[str]:
        """All built-in tools."""
        return frozenset(kinds())

    @property
    def labels(self) -> frozenset[str]:
        """The MCP servers in recorded requests."""
        return self.recordings.labels


@dataclass(frozen=True)
class RenderIfRecorded:
    """Renders a conversation that a recording answers; raises `NotRecorded` for any other."""

    recordings: Recordings
    render: Stage[frames.ResolvedRequest, frames.Prompt]

    async def __call__(self, source: AsyncIterator[frames.ResolvedRequest]) -> AsyncGenerator[frames.Prompt, None]:
        """Yield one prompt for each conversation."""
        async for request in source:
            self.recordings.find(request)
            async with aclosing(self.render(source_of([request]))) as prompts:
                async for prompt in prompts:
                    yield prompt


@dataclass(frozen=True)
class ConverseAsRecorded:
    """Answers each conversation from a recording, ``speed`` times as fast as recorded; None means without waiting."""

    inner: Pipeline[frames.ResolvedRequest, frames.ParsedFrame]
    recordings: Recordings
    speed: float | None = None

    async def __call__(
        self, source: AsyncIterator[frames.ResolvedRequest]
    ) -> AsyncGenerator[frames.ConversedFrame, None]:
        """Yield the recorded frames, and raise a recorded failure again, even if it came before the first frame.

        Raise `EngineFailed` if the recording can no longer be read, or was abandoned.
        """
        async for request in source:
            recorded = self.recordings.next(request)
            try:
                recording = await asyncio.to_thread(recorded.read)
            except UnreadableRecording as error:
                raise EngineFailed(f"The recording {recorded.name!r} can no longer be read.") from error
            await own_turn()
            answer = _answering(request, recorded, _paced(recording, self.speed))
            async with self._stages_after(recorded.stage).open(answer) as answered:
                async for frame in answered:
                    yield frame

    def partly_run(self) -> dict[str, str]:
        """Return the inner stages that do not run for each recording, with a description of when they run.

        Raise `CannotStart` if answers of recordings cannot enter the inner pipeline, as a plug-in removed that stage.
        """
        entering = Counter(recorded.stage for recorded in self.recordings.all)
        names = self.inner.names()
        if missing := [stage for stage in entering if stage not in (*names, "converse")]:
            raise CannotStart(
                f"recordings answer in place of the stage {missing[0]}, which this pipeline does not have"
            )
        counts_tokens = names[: names.index("render") + 1] if "render" in names else []
        passing, all_of_them = 0, len(self.recordings.all)
        described: dict[str, str] = {}
        for name in names:
            if name in counts_tokens:
                described[name] = "runs only to count input tokens"
            elif not passing:
                described[name] = "does not run"
            elif passing < all_of_them:
                described[name] = f"runs for {passing} of {all_of_them} recordings"
            passing += entering[name]
        return described

    def _stages_after(self, stage: str) -> Pipeline[Any, Any]:
        if stage == "converse":
            return Pipeline.start(stage, passed)
        return self.inner.from_stage(stage).replace(stage, passed)


def partly_run(pipeline: Pipeline[Any, Any]) -> dict[str, str]:
    """Return the stages that do not run for each recording, with a description of when they run.

    Without recordings there are none.  Raise `CannotStart` if recordings cannot answer in this pipeline.
    """
    answering = _answered_by(pipeline)
    return answering.partly_run() if answering else {}


def recorded_example(pipeline: Pipeline[Any, Any]) -> tuple[str, str] | None:
    """Return a model and an input that the recordings of a pipeline answer, or None without recordings."""
    answering = _answered_by(pipeline)
    return answering.recordings.example if answering else None


def _answered_by(pipeline: Pipeline[Any, Any]) -> ConverseAsRecorded | None:
    converse = pipeline.stage("converse") if "converse" in pipeline.names() else None
    return converse if isinstance(converse, ConverseAsRecorded) else None


async def passed(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    """Yield the frames unchanged, in place of the stage whose recorded output they are."""
    async for frame in source:
        yield frame


async def _paced(recording: Recording, speed: float | None) -> AsyncGenerator[Any, None]:
    """Yield the frames at their recorded times, divided by ``speed``, and end as the recording does."""
    clock = asyncio.get_running_loop().time
    started = clock()
    for timed in recording.timed:
        due = started if speed is None or timed.at is None else started + timed.at / speed
        await asyncio.sleep(max(0.0, due - clock()))
        yield timed.frame
    if recording.end.failure:
        raise recording.end.failure.again()
    if recording.end.abandoned:
        raise EngineFailed("The recording ends here: its client did not wait for more.")


async def _answering(
    request: frames.ResolvedRequest, recorded: Recorded, source: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """Yield the frames with the response, the input, and the ids of approvals and programs of this conversation."""
    facts, before, now = request.facts, recorded.request, ComparableRequest.of(request)
    approvals, programs = (
        dict(zip(recorded_ids, ids, strict=False))
        for recorded_ids, ids in ((before.approvals, now.approvals), (before.programs, now.programs))
    )
    key, here = (response_id.removeprefix("resp_") for response_id in (before.response.id, facts.response_id))
    try:
        async for frame in source:
            if caller := getattr(frame, "caller", ""):
                frame = replace(frame, caller=programs.get(caller, caller.replace(key, here)))  # noqa: PLW2901
            match frame:
                case frames.GenerationStarted():
                    # a request that only names the recording has no tools, and its calls are to be read all the same
                    tools = facts.tools if facts.tools.tools else frame.facts.tools
                    raw_messages = frame.raw_messages if facts.wants_raw_messages else None
                    yield replace(frame, facts=replace(facts, tools=tools), raw_messages=raw_messages)
                case frames.ResponseStarted():
                    yield replace(frame, facts=facts)
                case frames.TurnFinished() if not facts.wants_raw_messages:
                    yield replace(frame, raw_messages=None)
                case frames.ProgramOutputOpened(call_id):
                    yield frames.ProgramOutputOpened(programs.get(call_id, call_id.replace(key, here)))
                case frames.McpCallOpened(approval_request_id=str(request_id)):
                    yield replace(frame, approval_request_id=approvals.get(request_id, request_id))
                case _:
                    yield frame
    finally:
        await source.aclose()
