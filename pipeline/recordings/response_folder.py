"""The folder of one response while it is recorded, with a file for each junction.

All writing happens in the recorder's thread.  The folder is created when its response begins.  Its files grow by whole
lines, so the files of a killed server are readable up to the last line.  No file stays open.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.frames import (
    GenerationStarted,
    ItemDelta,
    ProgramOpened,
    Prompt,
    ResponseStarted,
    TokenChunk,
    ToolFrame,
)
from penstock.pipeline.protocol.events import DELTAS, TerminalEvent
from penstock.pipeline.recordings.format import CHANGED_TURN, FILES, Cause, End, Failure, Header, line
from penstock.pipeline.recordings.redaction import Redaction, public, redacted_request, without_secrets

logger = logging.getLogger(__name__)

REQUEST, RESPONSE = "request.json", "response.json"

BEGUN, OVER = object(), object()
"""Queued in place of a frame: the response has begun, or all its taps have finished."""

_NOTED = frozenset({GenerationStarted, ResponseStarted, ProgramOpened, *get_args(ToolFrame), *get_args(TerminalEvent)})
"""The frames that decide which files are kept, and what is written at the end."""

_PLAIN = frozenset({TokenChunk, ItemDelta, *DELTAS})
"""The frames that never contain secrets."""


@dataclass(eq=False)
class JunctionFile:
    """The file of one junction.

    The taps set ``failure``, ``abandoned``, ``is_cut`` and ``prompt``.  All else belongs to the recorder's thread.
    """

    folder: ResponseFolder
    stage: str
    is_kept: bool
    failure: Failure | None = None
    abandoned: bool = False
    is_cut: bool = False
    prompt: Prompt | None = None
    """The latest prompt."""
    frames: int = 0
    has_tools: bool = False
    _held: list[tuple[float, Any]] = field(default_factory=list)
    _turns: int = 0
    _lines: list[bytes] = field(default_factory=list)
    _is_complete: bool = False  # the terminal event was written: a reader that leaves after it misses nothing
    _exists: bool = False

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.folder.path / FILES[self.stage][0]

    def repeats(self, frame: Any) -> bool:
        """True if ``frame`` is the previous prompt again, retried because the engine had no room for it."""
        if not isinstance(frame, Prompt):
            return False
        before, self.prompt = self.prompt, frame
        return frame == before

    def add(self, at: float, entry: Any) -> None:
        """Handle an entry of the queue: begin or end the folder, or write a frame, held back until then."""
        folder = self.folder
        if folder.is_lost and entry is not OVER:
            return
        if type(entry) in _PLAIN and folder.is_plain:  # hot path: see `penstock.pipeline.core`
            self._lines.append(line(entry, at - folder.started))
        elif entry is BEGUN:
            folder.begin()
        elif entry is OVER:
            folder.end()
        elif not folder.has_begun:
            self._held.append((at, entry))
        else:
            self._write(at, entry)

    def _write(self, at: float, frame: Any) -> None:
        if type(frame) in _NOTED:
            self._note(frame)
        for redacted in self.folder.redaction.frames(self.stage, frame):
            self._lines.append(line(public(redacted), at - self.folder.started))

    def begin(self) -> None:
        """Write the frames that came before the response began."""
        held, self._held = self._held, []
        for at, frame in held:
            self._write(at, frame)

    def end(self) -> None:
        """Write the `End`, unless frames are missing."""
        self.save()
        if not self.is_cut:
            failure = None if self.failure is None else self.folder.redaction.failure(self.failure)
            is_abandoned = self.abandoned and not self._is_complete
            cause = self.folder.cause_of_end if is_abandoned else ""
            self._lines.append(line(End(self.frames, failure, is_abandoned, cause)))
        self.save()
        if self.stage == "converse" and not self.has_tools and "parse" in self.folder.kept:
            self._repeat()

    def _repeat(self) -> None:
        """Delete a file that only repeats the parsed frames, or name it otherwise if a stage may have changed them."""
        if "parse" not in self.folder.header.stages:
            self.path.unlink(missing_ok=True)
        elif self._exists:
            self.path.rename(self.folder.path / CHANGED_TURN)

    def save(self) -> None:
        """Append the new lines to the file.  Only the first call may create it."""
        if self._lines:
            lines, self._lines = self._lines, []
            self.frames += len(lines)
            if self._exists:
                append(self.path, b"".join(lines), os.O_APPEND)
            else:
                append(self.path, b"".join([line(self.folder.header), *lines]), os.O_CREAT | os.O_TRUNC)
            self._exists = True

    def _note(self, frame: Any) -> None:
        if isinstance(frame, TerminalEvent):
            self._is_complete = True
            if self.stage == "emit":
                self.folder.response = frame.response
            return
        is_turn = isinstance(frame, GenerationStarted)
        self._turns += is_turn
        self.has_tools |= self._turns > 1 or not is_turn


@dataclass(eq=False)  # hashed by identity
class ResponseFolder:
    """The folder of one response.

    ``running`` is the number of taps that its streams are passing, counted by the taps.  The recorder sets ``cause``,
    before it queues the end.  All else belongs to the recorder's thread.
    """

    path: Path
    header: Header
    started: float
    redaction: Redaction
    request: bytes = b""
    running: int = 0
    cause: Cause | None = None
    files: dict[str, JunctionFile] = field(default_factory=dict)
    has_begun: bool = False
    is_plain: bool = False
    """True if the folder has begun and frames without secrets are written unchanged."""
    is_lost: bool = False
    response: Any = None
    """The final response, from the terminal event."""

    @property
    def name(self) -> str:
        """The id of the response."""
        return self.path.name

    @property
    def kept(self) -> frozenset[str]:
        """The stages whose output is written to a file."""
        return frozenset(stage for stage, file in self.files.items() if file.is_kept)

    @property
    def cause_of_end(self) -> Cause:
        """The reason for which streams were closed early: a stage's, if the response has its last event."""
        if self.cause and self.response is None:
            return self.cause
        has_failed = any(file.failure for file in self.files.values()) or getattr(self.response, "error", None)
        return "raised" if has_failed else "unread"

    def junction(self, stage: str, after: Container[str]) -> JunctionFile:
        """Return the file of ``stage``, added if needed; it is written only if ``stage`` is one of ``after``."""
        file = self.files.get(stage)
        if file is None:
            is_kept = stage in after and self.redaction.keeps(stage)
            file = self.files[stage] = JunctionFile(self, stage, is_kept)
        return file

    def begin(self) -> None:
        """Create the folder, removing leftovers of an earlier, crashed run."""
        self.has_begun, self.is_plain = True, not self.redaction.changes_frames
        self.path.mkdir(mode=0o700, exist_ok=True)
        for name in (REQUEST, RESPONSE, CHANGED_TURN, *(file for file, _ in FILES.values())):
            (self.path / name).unlink(missing_ok=True)
        if self.request and self.redaction.keeps_request:
            with suppress(ValueError):  # the server accepts some bodies that are not valid JSON
                write_json(self.path / REQUEST, redacted_request(self.request))
        self.request = b""
        for file in self._written():
            file.begin()

    def save(self) -> None:
        """Write the new lines of all files."""
        for file in () if self.is_lost else self._written():
            file.save()

    def end(self) -> None:
        """Finish all files; a response that never began leaves nothing."""
        try:
            if self.has_begun and not self.is_lost:
                self._write_end()
        finally:
            self.files.clear()  # break the reference cycle, so that prompts are freed without the garbage collector

    def _write_end(self) -> None:
        for file in self._written():
            file.end()
        if self.response is not None:
            write_json(self.path / RESPONSE, without_secrets(self.redaction.response(self.response)))

    def lose(self, error: Exception) -> None:
        """Stop recording this response after an error, leaving its files without an `End`."""
        if self.is_lost:
            return
        self.is_lost = True
        for file in tuple(self.files.values()):
            file.is_cut = True
        bug = None if isinstance(error, OSError) else error
        logger.warning("The recording of %s is cut: %s", self.name, named_error(error), exc_info=bug)

    def _written(self) -> list[JunctionFile]:
        return [file for file in tuple(self.files.values()) if file.is_kept]


@contextmanager
def private_files() -> Iterator[None]:
    """Give new files and folders the rights of a recording, whose texts only their owner can read."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


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
