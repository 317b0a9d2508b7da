"""A take: one response as it is written down, a track for each junction.

All of this runs in the thread that writes.  A take is a folder once its response has begun, and its files grow by whole
lines, so that what a killed server leaves can be read up to there.  No file stays open.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from penstock.pipeline.frames import GenerationStarted, ItemDelta, Prompt, ResponseStarted, TokenChunk, ToolFrame
from penstock.pipeline.protocol.events import DELTAS, TerminalEvent
from penstock.pipeline.recordings.format import FILES, End, Failure, Header, line
from penstock.pipeline.recordings.redaction import Redaction, request_told, without_secrets

logger = logging.getLogger(__name__)

REQUEST, RESPONSE = "request.json", "response.json"

BEGUN, OVER = object(), object()
"""In place of a frame: the response of a track has begun, or has passed all taps."""

_TELLING = frozenset({GenerationStarted, ResponseStarted, *get_args(ToolFrame), *get_args(TerminalEvent)})
"""The frames that say what is to become of the files."""

_PLAIN = frozenset({TokenChunk, ItemDelta, *DELTAS})
"""Frames that hold no secrets."""


@dataclass(eq=False)
class Track:
    """One junction of a take.  Taps write ``failure``, ``abandoned`` and ``is_cut``; the rest is the thread's."""

    take: Take
    stage: str
    is_kept: bool
    failure: Failure | None = None
    abandoned: bool = False
    is_cut: bool = False
    prompt: Prompt | None = None
    """The latest one that passed."""
    frames: int = 0
    tells_of_tools: bool = False
    _held: list[tuple[float, Any]] = field(default_factory=list)
    _turns: int = 0
    _lines: list[bytes] = field(default_factory=list)
    _is_told: bool = False  # to the last event: whoever leaves behind it misses nothing
    _is_there: bool = False

    @property
    def path(self) -> Path:
        """Its file."""
        return self.take.folder / FILES[self.stage][0]

    def repeats(self, frame: Any) -> bool:
        """Whether ``frame`` is the last prompt again, for which the engine had no room the first time."""
        if not isinstance(frame, Prompt):
            return False
        before, self.prompt = self.prompt, frame
        return frame == before

    def take_in(self, at: float, said: Any) -> None:
        """Write a frame, once the response has begun; or begin or end the take."""
        take = self.take
        if take.is_lost and said is not OVER:
            return
        if type(said) in _PLAIN and take.is_plain:  # nearly every frame
            self._lines.append(line(said, at - take.started))
        elif said is BEGUN:
            take.begin()
        elif said is OVER:
            take.end()
        elif not take.has_begun:
            self._held.append((at, said))
        else:
            self._write(at, said)

    def _write(self, at: float, frame: Any) -> None:
        if type(frame) in _TELLING:
            self._look_at(frame)
        for told in self.take.redaction.frames(self.stage, frame):
            written = without_secrets(told) if hasattr(told, "response") else told
            self._lines.append(line(written, at - self.take.started))

    def begin(self) -> None:
        """Write what waited for the response to begin."""
        held, self._held = self._held, []
        for at, frame in held:
            self._write(at, frame)

    def end(self) -> None:
        """Say how the stream ended, unless something of it is missing."""
        self.save()
        if not self.is_cut:
            failure = None if self.failure is None else self.take.redaction.failure(self.failure)
            self._lines.append(line(End(self.frames, failure, self.abandoned and not self._is_told)))
        self.save()
        if self.stage == "converse" and not self.tells_of_tools and "parse" in self.take.kept:
            self.path.unlink(missing_ok=True)  # it says what the file of the parsed frames says

    def save(self) -> None:
        """Append what is new to the file, which only the first time need not be there."""
        if self._lines:
            lines, self._lines = self._lines, []
            self.frames += len(lines)
            if self._is_there:
                append(self.path, b"".join(lines), os.O_APPEND)
            else:
                append(self.path, b"".join([line(self.take.header), *lines]), os.O_CREAT | os.O_TRUNC)
            self._is_there = True

    def _look_at(self, frame: Any) -> None:
        if isinstance(frame, TerminalEvent):
            self.take.response, self._is_told = frame.response, True
            return
        is_turn = isinstance(frame, GenerationStarted)
        self._turns += is_turn
        self.tells_of_tools |= self._turns > 1 or not is_turn


@dataclass(eq=False)
class Take:
    """One response.  Taps count in ``running`` how many of them its frames pass; the rest is the thread's."""

    folder: Path
    header: Header
    started: float
    redaction: Redaction
    request: bytes = b""
    running: int = 0
    tracks: dict[str, Track] = field(default_factory=dict)
    has_begun: bool = False
    is_plain: bool = False
    """Whether it has begun, and frames that tell of no request are written as they are."""
    is_lost: bool = False
    response: Any = None
    """The one that the stream ended with."""

    @property
    def name(self) -> str:
        """The response's id."""
        return self.folder.name

    @property
    def kept(self) -> frozenset[str]:
        """The stages of which there is a file."""
        return frozenset(stage for stage, track in self.tracks.items() if track.is_kept)

    def track(self, stage: str, after: Container[str]) -> Track:
        """The junction behind ``stage``; it gets a file if it is one of those ``after`` which is recorded."""
        track = self.tracks.get(stage)
        if track is None:
            is_kept = stage in after and self.redaction.keeps(stage)
            track = self.tracks[stage] = Track(self, stage, is_kept)
        return track

    def begin(self) -> None:
        """Make the folder; what a server that died left of the same response goes."""
        self.has_begun, self.is_plain = True, not self.redaction.changes_frames
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for name in (REQUEST, RESPONSE, *(file for file, _ in FILES.values())):
            (self.folder / name).unlink(missing_ok=True)
        if self.request and self.redaction.keeps_request:
            with suppress(ValueError):  # some that is no JSON can be mended, which is not worth it here
                write_json(self.folder / REQUEST, request_told(self.request))
        self.request = b""
        for track in self._written():
            track.begin()

    def save(self) -> None:
        """Write what is new."""
        for track in () if self.is_lost else self._written():
            track.save()

    def end(self) -> None:
        """Write how all of it ended; nothing is left of a response that never began."""
        try:
            if self.has_begun and not self.is_lost:
                self._write_end()
        finally:
            self.tracks.clear()  # each holds its take: without this, they and their prompts wait for the collector

    def _write_end(self) -> None:
        for track in self._written():
            track.end()
        if self.response is not None:
            write_json(self.folder / RESPONSE, without_secrets(self.redaction.response(self.response)))

    def lose(self, error: Exception) -> None:
        """Something could not be written: this response is no longer recorded, and what is there has no end."""
        if self.is_lost:
            return
        self.is_lost = True
        for track in tuple(self.tracks.values()):
            track.is_cut = True
        bug = None if isinstance(error, OSError) else error
        logger.warning("The recording of %s is cut: %s", self.name, error, exc_info=bug)

    def _written(self) -> list[Track]:
        return [track for track in tuple(self.tracks.values()) if track.is_kept]


def write_json(path: Path, said: Any) -> None:
    """A file for people to read."""
    append(path, msgspec.json.format(msgspec.json.encode(said)) + b"\n", os.O_CREAT | os.O_TRUNC)


def append(path: Path, data: bytes, how: int) -> None:
    """Write to the end of a file that only its owner may read."""
    file = os.open(path, os.O_WRONLY | how, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)
