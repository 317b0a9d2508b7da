"""Takes: the recording of one response while it is written, with a track for each junction.

All writing happens in the recorder's thread.  The folder of a take is created when its response begins.  Its files grow
by whole lines, so what a killed server leaves is readable up to its last line.  No file stays open.
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
"""Queued in place of a frame: the response of a track has begun, or all its taps have finished."""

_TELLING = frozenset({GenerationStarted, ResponseStarted, *get_args(ToolFrame), *get_args(TerminalEvent)})
"""The frames that decide which files are kept, and what is written at the end."""

_PLAIN = frozenset({TokenChunk, ItemDelta, *DELTAS})
"""The frames that never contain secrets."""


@dataclass(eq=False)
class Track:
    """One junction of a take.

    The taps set ``failure``, ``abandoned``, ``is_cut`` and ``prompt``.  All else belongs to the recorder's thread.
    """

    take: Take
    stage: str
    is_kept: bool
    failure: Failure | None = None
    abandoned: bool = False
    is_cut: bool = False
    prompt: Prompt | None = None
    """The latest prompt."""
    frames: int = 0
    tells_of_tools: bool = False
    _held: list[tuple[float, Any]] = field(default_factory=list)
    _turns: int = 0
    _lines: list[bytes] = field(default_factory=list)
    _is_told: bool = False  # the terminal event was written: a reader that leaves after it misses nothing
    _is_there: bool = False

    @property
    def path(self) -> Path:
        """The path of the track's file."""
        return self.take.folder / FILES[self.stage][0]

    def repeats(self, frame: Any) -> bool:
        """True if ``frame`` is the previous prompt again, retried because the engine had no room for it."""
        if not isinstance(frame, Prompt):
            return False
        before, self.prompt = self.prompt, frame
        return frame == before

    def take_in(self, at: float, entry: Any) -> None:
        """Handle one entry of the queue: begin or end the take, or write a frame, held back until the take begins."""
        take = self.take
        if take.is_lost and entry is not OVER:
            return
        if type(entry) in _PLAIN and take.is_plain:  # nearly every frame
            self._lines.append(line(entry, at - take.started))
        elif entry is BEGUN:
            take.begin()
        elif entry is OVER:
            take.end()
        elif not take.has_begun:
            self._held.append((at, entry))
        else:
            self._write(at, entry)

    def _write(self, at: float, frame: Any) -> None:
        if type(frame) in _TELLING:
            self._look_at(frame)
        for redacted in self.take.redaction.frames(self.stage, frame):
            written = without_secrets(redacted) if hasattr(redacted, "response") else redacted
            self._lines.append(line(written, at - self.take.started))

    def begin(self) -> None:
        """Write the frames that came before the response began."""
        held, self._held = self._held, []
        for at, frame in held:
            self._write(at, frame)

    def end(self) -> None:
        """Write the `End`, unless frames are missing."""
        self.save()
        if not self.is_cut:
            failure = None if self.failure is None else self.take.redaction.failure(self.failure)
            self._lines.append(line(End(self.frames, failure, self.abandoned and not self._is_told)))
        self.save()
        if self.stage == "converse" and not self.tells_of_tools and "parse" in self.take.kept:
            self.path.unlink(missing_ok=True)  # without tools it only repeats the parsed frames

    def save(self) -> None:
        """Append the new lines to the file.  Only the first call may create it."""
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


@dataclass(eq=False)  # hashed by identity
class Take:
    """One response.

    ``running`` is the number of taps that its streams are passing, counted by the taps.  All else belongs to the
    recorder's thread.
    """

    folder: Path
    header: Header
    started: float
    redaction: Redaction
    request: bytes = b""
    running: int = 0
    tracks: dict[str, Track] = field(default_factory=dict)
    has_begun: bool = False
    is_plain: bool = False
    """True if the take has begun and frames without secrets are written unchanged."""
    is_lost: bool = False
    response: Any = None
    """The final response, from the terminal event."""

    @property
    def name(self) -> str:
        """The id of the response."""
        return self.folder.name

    @property
    def kept(self) -> frozenset[str]:
        """The stages whose output is written to a file."""
        return frozenset(stage for stage, track in self.tracks.items() if track.is_kept)

    def track(self, stage: str, after: Container[str]) -> Track:
        """Return the track of ``stage``, created if needed; it gets a file if ``stage`` is one of ``after``."""
        track = self.tracks.get(stage)
        if track is None:
            is_kept = stage in after and self.redaction.keeps(stage)
            track = self.tracks[stage] = Track(self, stage, is_kept)
        return track

    def begin(self) -> None:
        """Create the folder, removing leftovers of an earlier, crashed run."""
        self.has_begun, self.is_plain = True, not self.redaction.changes_frames
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for name in (REQUEST, RESPONSE, *(file for file, _ in FILES.values())):
            (self.folder / name).unlink(missing_ok=True)
        if self.request and self.redaction.keeps_request:
            with suppress(ValueError):  # the server accepts some bodies that are not valid JSON
                write_json(self.folder / REQUEST, request_told(self.request))
        self.request = b""
        for track in self._written():
            track.begin()

    def save(self) -> None:
        """Write the new lines of all tracks."""
        for track in () if self.is_lost else self._written():
            track.save()

    def end(self) -> None:
        """Finish all files; a response that never began leaves nothing."""
        try:
            if self.has_begun and not self.is_lost:
                self._write_end()
        finally:
            self.tracks.clear()  # break the reference cycle, so that prompts are freed without the garbage collector

    def _write_end(self) -> None:
        for track in self._written():
            track.end()
        if self.response is not None:
            write_json(self.folder / RESPONSE, without_secrets(self.redaction.response(self.response)))

    def lose(self, error: Exception) -> None:
        """Stop recording this response after an error, leaving its files without an `End`."""
        if self.is_lost:
            return
        self.is_lost = True
        for track in tuple(self.tracks.values()):
            track.is_cut = True
        bug = None if isinstance(error, OSError) else error
        logger.warning("The recording of %s is cut: %s", self.name, error, exc_info=bug)

    def _written(self) -> list[Track]:
        return [track for track in tuple(self.tracks.values()) if track.is_kept]


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    append(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n", os.O_CREAT | os.O_TRUNC)


def append(path: Path, data: bytes, how: int) -> None:
    """Write data to a file with permissions 0600; ``how`` are the flags for `os.open`."""
    file = os.open(path, os.O_WRONLY | how, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)
