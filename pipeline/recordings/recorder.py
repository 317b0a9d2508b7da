"""Recording: a tap behind each stage notes what passes, and a thread writes it into one folder per response.

A tap does no more than to put the frame and the time into a queue, so that the stream waits neither for an encoder nor
for a disk.  Where the disk falls behind, the queue fills: what does not fit is not noted, the log says so, and the file
has no end, which is how a recording shows that it was cut.  A recording begins with the response itself: of what was
refused nothing is left.  It is over when all its taps are, however they were left.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from msgspec.structs import replace

from penstock.pipeline.core import Pipeline, Stage, Step
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.frames import Conversation
from penstock.pipeline.logs import current_response
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import FILES, FORMAT, Failure, Header, replay
from penstock.pipeline.recordings.redaction import Redact, Redaction
from penstock.pipeline.recordings.sampling import ALWAYS, Condition
from penstock.pipeline.recordings.take import BEGUN, OVER, Take, Track

logger = logging.getLogger(__name__)

Frame = TypeVar("Frame")

PAUSE = 0.1
"""Seconds between two visits of the disk."""

MOST_WAITING = 100_000
"""Frames that wait for the disk, those of all responses together."""

AT_ONCE = 32
"""Frames that are encoded before the stages get the interpreter back."""

LAST_WRITES = 5.0
"""Seconds that the disk gets when the server ends."""

_asked: ContextVar[tuple[str, bytes]] = ContextVar("_asked", default=("", b""))
"""The body of the latest request of this task, behind the id of its response."""


def make_folder(folder: Path) -> None:
    """Make it, if need be; raises `OSError` where nothing can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"no recording can be written to {folder}: {error.strerror}") from error


@dataclass
class Recorder:
    """Writes the responses that ``condition`` chooses into ``folder``; ``described`` is what all headers say.

    ``after`` are the stages behind which is recorded.  ``redact`` changes what is written.  Raises `OSError` where
    nothing can be written.
    """

    folder: Path
    described: Header = Header(FORMAT)  # noqa: RUF009 - frozen
    after: Collection[str] = tuple(FILES)
    condition: Condition = ALWAYS
    redact: Redact = Redaction
    most_waiting: int = MOST_WAITING
    pause: float = PAUSE
    clock: Callable[[], float] = time.monotonic
    takes: dict[str, Take] = field(default_factory=dict)
    """The responses that pass some tap now, by their ids."""
    waiting: deque[tuple[Track, float, Any]] = field(default_factory=deque)
    """What was noted: on which track, when, and what passed."""

    def __post_init__(self) -> None:
        make_folder(self.folder)
        self._closing = Event()
        self._thread = Thread(target=self._write_until_closed, name="recorder", daemon=True)
        self._thread.start()

    def tapped(self, pipeline: Pipeline[CreateResponse, Any]) -> Pipeline[CreateResponse, Any]:
        """The pipeline with the taps, each right behind its stage; raises `CannotRun` where one is not there."""
        try:
            for stage in FILES:
                pipeline = pipeline.after(stage, f"record {stage}", Tap(self, stage))
        except (LookupError, ValueError) as error:  # plug-ins may change names
            raise CannotRun(f"--record: {error.args[0]}") from error
        return pipeline.edited("normalize", lambda step: (Step(step.name, Remembering(step.stage, self.condition)),))

    async def close(self) -> None:
        """Write what waits, unless the disk hangs."""
        self._closing.set()
        await asyncio.to_thread(self._thread.join, LAST_WRITES)
        if self._thread.is_alive():
            logger.warning("%s is too slow: recordings of the last responses are cut", self.folder)

    # What taps say

    def enter(self, stage: str, frame: Any) -> Track | None:
        """A stream begins to pass a tap with ``frame``: its track, if its response is to be recorded."""
        response, origin = getattr(frame, "response", None), getattr(frame, "origin", None)
        if response is None or origin is None or not self.condition.chooses(response.id, origin):
            return None
        take = self.takes.get(response.id)
        if take is None:
            take = self.takes[response.id] = self._new_take(response)
        take.running += 1
        track = take.track(stage, self.after)
        track.failure, track.abandoned = None, False
        if stage == "emit":
            self.waiting.append((track, 0.0, BEGUN))
        if len(self.waiting) >= self.most_waiting:
            self.cut(track)
        elif track.is_kept and not track.is_cut and not track.repeats(frame):
            self.waiting.append((track, self.clock(), frame))
        return track

    def cut(self, track: Track) -> None:
        """A frame passes that there is no room for, or that comes behind such a one."""
        if not track.is_cut:
            track.is_cut = True
            logger.warning("%s is too slow: %s is cut behind %s", self.folder, track.take.name, track.stage)

    def leave(self, track: Track) -> None:
        """A stream has passed a tap, or was left."""
        take = track.take
        take.running -= 1
        if not take.running:
            del self.takes[take.name]
            self.waiting.append((track, 0.0, OVER))

    def broke_off(self, stage: str, track: Track | None, error: BaseException) -> None:
        """A stream was left, or ended in an ``error``: it may be a later turn of a response, without any frame."""
        if track is None and (take := self.takes.get(current_response.get())):
            track = take.tracks.get(stage)
        if track is None:
            return
        if isinstance(error, Exception):
            track.failure = Failure.of(error)
        else:  # cancelled, or closed by its reader
            track.abandoned = True

    def _new_take(self, response: Response) -> Take:
        asked_for, body = _asked.get()
        recorded_at = datetime.now(UTC).isoformat(timespec="microseconds")
        return Take(
            self.folder / response.id,
            replace(self.described, model=response.model, recorded_at=recorded_at),
            self.clock(),
            self.redact(),
            body if asked_for == response.id and "normalize" in self.after else b"",
        )

    # What the thread does

    def _write_until_closed(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(self.pause)
            changed: dict[Take, None] = {}
            for count in range(len(self.waiting)):
                if count % AT_ONCE == 0:
                    time.sleep(0)  # whoever waits for the interpreter gets it now
                track, at, said = self.waiting.popleft()
                changed[track.take] = None
                try:
                    track.take_in(at, said)
                except Exception as error:  # noqa: BLE001 - it is logged, and shown by the file
                    track.take.lose(error)
            for take in changed:
                try:
                    take.save()
                except OSError as error:
                    take.lose(error)


@dataclass(frozen=True)
class Tap:
    """A stage that lets everything through, and has it noted; the first frame says of which response it is."""

    recorder: Recorder
    stage: str

    async def __call__(self, source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        """Streams that are not recorded pass as they are."""
        recorder, track = self.recorder, None
        try:
            async for frame in source:
                track = recorder.enter(self.stage, frame)
                yield frame
                break
            if track is not None and track.is_kept:
                waiting, now, most = recorder.waiting, recorder.clock, recorder.most_waiting
                note = waiting.append
                async for frame in source:
                    if len(waiting) < most and not track.is_cut:
                        note((track, now(), frame))
                    else:
                        recorder.cut(track)
                    yield frame
            else:
                async for frame in source:
                    yield frame
        except BaseException as error:
            recorder.broke_off(self.stage, track, error)
            raise
        finally:
            if track is not None:
                recorder.leave(track)


@dataclass(frozen=True)
class Remembering:
    """Normalize where responses are recorded: a request stays at hand until the task has another one."""

    normalize: Stage[CreateResponse, Conversation]
    condition: Condition

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[Conversation, None]:
        """The same conversations."""
        async for request in source:
            async with aclosing(self.normalize(replay([request]))) as conversations:
                async for conversation in conversations:
                    response_id = conversation.response.id
                    is_recorded = self.condition.chooses(response_id, conversation.origin)
                    _asked.set((response_id, request.body if is_recorded else b""))
                    yield conversation
