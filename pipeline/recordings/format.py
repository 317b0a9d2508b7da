"""Recordings: the frames of one junction as a file of JSON lines.

The frames of a file can be fed to the stages after its junction, so a replay needs nothing but a recording.  The first
line is a `Header` and the last an `End`.  The lines between are frames, each with the time in seconds at which it came,
if times were recorded.  Secrets are not written.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import structs

from penstock.pipeline.errors import CannotRun, StageError, error_named
from penstock.pipeline.foreign_errors import text_of
from penstock.pipeline.frames import ConversedFrame, EmittedFrame, ParsedFrame, Prompt, ResolvedRequest, TokenFrame
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.recordings import older
from penstock.pipeline.secret import unread, unwritten

Frame = TypeVar("Frame")

FORMAT = 3
"""The version of the file format.  Files of earlier ones are read too (see `older`), and all others are rejected."""

FILES: Mapping[str, tuple[str, Any]] = {
    "normalize": ("conversation.jsonl", ResolvedRequest),
    "render": ("prompt.jsonl", Prompt),
    "generate": ("tokens.jsonl", TokenFrame),
    "parse": ("parsed.jsonl", ParsedFrame),
    "converse": ("conversed.jsonl", ConversedFrame),
    "emit": ("events.jsonl", EmittedFrame),
    "persist": ("sent.jsonl", ResponseEvent),
}
"""For each stage, the file with its recorded output, and the union type of the frames in it.

The file of ``persist`` has what comes out last.  It exists only if a stage of the operator's after ``emit`` may change
it: otherwise it only repeats the events.
"""

CHANGED_TURN = "changed.jsonl"
"""The file with the output of ``converse`` of a response of one turn without tools, which `SOURCES` does not name.

It exists if a stage of the operator's stands after ``parse``, and shows what that has changed.
"""

SOURCES: Mapping[str, tuple[str, ...]] = {
    "converse": ("normalize",),
    "render": ("normalize",),
    "generate": ("render",),
    "parse": ("generate",),
    "emit": ("converse", "parse"),
    "persist": ("emit",),
}
"""For each stage, the stages whose recorded output it can read, best first.

If tools ran between the turns, only ``conversed.jsonl`` contains their work; otherwise that file does not exist.
"""

Encoding: TypeAlias = Literal["harmony", "chat"]


class Header(msgspec.Struct, frozen=True, tag="Recording", omit_defaults=True):
    """The first line of a file: a description of the recording.

    ``model`` is the name under which the model was served, ``source`` the folder or id that it was loaded from, and
    ``options`` the operator's settings for its chat template and parsers.  ``answered_from`` is the folder of
    recordings that answered instead of a model.  ``masked`` is True if the letters and digits of all texts
    were replaced, and with them the tokens.  ``stages`` names the operator's own stages after ``generate``, by the
    stage of `FILES` that they follow.  ``recorded_at`` is an ISO 8601 time; the times of the frames are in
    seconds after it.

    A recording of the wire has the server ``upstream``, the ``dialect``, the ``path`` and some ``headers`` of the
    request, and the names of the fields of its body that were ``left_out``.
    """

    format: int
    model: str = ""
    encoding: Encoding = "harmony"
    source: str | None = None
    options: Mapping[str, Any] = {}
    versions: Mapping[str, str] = {}
    answered_from: str | None = None
    recorded_at: str | None = None
    masked: bool = False
    stages: Mapping[str, tuple[str, ...]] = {}
    upstream: str | None = None
    dialect: str | None = None
    path: str | None = None
    headers: Mapping[str, str] = {}
    left_out: tuple[str, ...] = ()


class Failure(msgspec.Struct, frozen=True):
    """An error that ended a stream: the name of its class, and its message."""

    error: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return the failure that records an error."""
        return cls(type(error).__name__, error.message if isinstance(error, StageError) else text_of(error))

    def again(self) -> Exception:
        """Return an error of the same class if it is in `penstock.pipeline.errors`, otherwise a `RuntimeError`."""
        return error_named(self.error, self.message) or RuntimeError(f"{self.error}: {self.message}")


class End(msgspec.Struct, frozen=True, tag="End", omit_defaults=True):
    """The last line of a file: the number of ``frames``, and how the stream ended.

    ``failure`` is the error that ended the stream.  ``abandoned`` is True if the stream was closed early or cancelled,
    and ``cause`` then says why: it is a key of `CAUSES`, and empty in recordings of earlier releases.
    """

    frames: int
    failure: Failure | None = None
    abandoned: bool = False
    cause: str = ""


Cause: TypeAlias = Literal["client_left", "unsent", "cancelled", "interrupted", "released", "raised", "unread"]

CAUSES: Mapping[Cause, str] = {
    "client_left": "the client left",
    "unsent": "the answer could not be written",
    "cancelled": "the response was cancelled",
    "interrupted": "the server stopped",
    "released": "another server took the response over",
    "raised": "a later stage raised",
    "unread": "a later stage read no further",
}
"""The reasons for which a stream is closed before its end, in words."""

LEFT = "a stage raised, the client left, or the response was cancelled"
"""The words for a stream whose recording does not say why."""

UNFINISHED = "it is still being written, or was cut"
"""The words for a file without an `End`."""


def end_of_all(ends: Sequence[End]) -> End:
    """Return how a response ended, by the ends of its files: the first failure, and the last cause of an early end."""
    failure = next((end.failure for end in ends if end.failure), None)
    causes = [end.cause for end in ends if end.abandoned]
    return End(sum(end.frames for end in ends), failure, abandoned=bool(causes), cause=causes[-1] if causes else "")


def in_words(cause: str) -> str:
    """Return the words for the ``cause`` of an `End`."""
    return next((words for known, words in CAUSES.items() if known == cause), LEFT)


class Abandoned(BaseException):
    """Raised by a replay when it reaches the point at which the recorded stream was closed or cancelled.

    A `BaseException`, so that it passes through all stages as a cancellation does.
    """

    def __init__(self, frames: int, cause: str = "") -> None:
        super().__init__(f"the recording ends early, after {counted(frames, 'frame')}: {in_words(cause)}")
        self.cause = cause


class UnreadableRecording(CannotRun):
    """A file is not a recording, or is broken; the message begins with the file and the line."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}{'' if line is None else f':{line}'}: {problem}{_named_otherwise(path)}")
        self.path = path
        self.line = line


_OF_OTHER_APIS = re.compile(r"(?:msg|chatcmpl|cmpl)[_-]([0-9a-f]{1,64})")
"""An id as the other APIs write it."""


def _named_otherwise(path: Path) -> str:
    """Name the folder beside a missing one that has the same id in the form of the Responses API."""
    for missing in (path, path.parent):
        named = _OF_OTHER_APIS.fullmatch(missing.name)
        if named and not missing.exists() and (folder := missing.with_name(f"resp_{named[1]}")).is_dir():
            return f"; the recording of this id is {folder}"
    return ""


@dataclass(frozen=True)
class Timed:
    """A frame, its line number, and its time in seconds, if that was recorded."""

    frame: Any
    line: int
    at: float | None = None


@dataclass(frozen=True)
class Recording:
    """The contents of a complete file."""

    header: Header
    timed: tuple[Timed, ...]
    end: End

    @property
    def frames(self) -> tuple[Any, ...]:
        """The frames without line numbers and times."""
        return tuple(timed.frame for timed in self.timed)


class _Stamp(msgspec.Struct):
    type: str = ""
    at: float | None = None


_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for invalid JSON."""

_encode = msgspec.json.Encoder(enc_hook=unwritten).encode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_end = msgspec.json.Decoder(End).decode
_decode_stamp = msgspec.json.Decoder(_Stamp).decode


def line(frame: object, at: float | None = None) -> bytes:
    """Encode a header, a frame or an end as a line of a file, with the time ``at`` in seconds if it is given."""
    encoded = _encode(frame)
    return encoded + b"\n" if at is None else b'{"at":%.6f,%b\n' % (at, encoded[1:])


def write_frames(
    path: Path,
    frames: Iterable[object],
    header: Header = Header(FORMAT),  # noqa: B008 - frozen
    end: End = End(0),  # noqa: B008 - frozen
) -> None:
    """Write a complete recording, without times, that ended as ``end`` says."""
    lines = [line(frame) for frame in frames]
    path.write_bytes(line(header) + b"".join(lines) + line(structs.replace(end, frames=len(lines))))


def read_frames(path: Path, junction: Any) -> Iterator[Any]:
    """Yield the frames of a file, decoded as the union ``junction``.  Raise `UnreadableRecording` if it is broken."""
    yield from read_recording(path, junction).frames


def read_header(path: Path) -> Header:
    """Read the first line of a file.  Raise `UnreadableRecording` if it is no recording, or of another version."""
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError as error:
        raise UnreadableRecording(path, None, f"there is no recording here: {error.strerror}") from error
    return header_of(path, first)


def header_of(path: Path, first: bytes) -> Header:
    """Return the header in the first line of a file, or raise as `read_header` does."""
    try:
        header = _decode_header(first)
    except _NO_JSON as error:
        raise UnreadableRecording(path, 1, "this is no recording: it does not begin with a header") from error
    if header.format not in (*older.CHANGED, FORMAT):
        raise UnreadableRecording(path, 1, f"a recording of format {header.format}; only 1 to {FORMAT} can be read")
    return header


def read_recording(path: Path, junction: Any) -> Recording:
    """Read a file whose frames belong to the union ``junction``.  Raise `UnreadableRecording` if it is broken."""
    header = read_header(path)
    lines = path.read_bytes().split(b"\n")
    if lines.pop():
        raise UnreadableRecording(path, len(lines) + 1, f"the recording stops within this line: {UNFINISHED}")
    end = _read_end(path, lines)
    decode = msgspec.json.Decoder(junction, dec_hook=unread).decode
    timed = tuple(
        _read_frame(path, number, data, decode, header.format) for number, data in enumerate(lines[1:-1], start=2)
    )
    return Recording(header, timed, end)


def _read_end(path: Path, lines: list[bytes]) -> End:
    try:
        end = _decode_end(lines[-1])
    except _NO_JSON as error:
        raise UnreadableRecording(
            path, len(lines), f"the recording has no end after this line: {UNFINISHED}"
        ) from error
    if end.frames != len(lines) - 2:
        raise UnreadableRecording(path, len(lines), f"{len(lines) - 2} of {end.frames} frames are in the file")
    return end


def _read_frame(path: Path, number: int, data: bytes, decode: Any, version: int) -> Timed:
    try:
        stamp = _decode_stamp(data)
        if stamp.type in older.CHANGED.get(version, ()):
            data = _encode(older.upgraded(msgspec.json.decode(data), version))
        return Timed(decode(data), number, stamp.at)
    except msgspec.ValidationError as error:
        raise UnreadableRecording(path, number, f"not a frame of this file, or of this version: {error}") from error
    except _NO_JSON as error:
        raise UnreadableRecording(path, number, f"this line is not JSON: {error}") from error


async def source_of_recording(recording: Recording) -> AsyncGenerator[Any, None]:
    """Yield the frames of a recording, then raise its failure, or `Abandoned` if the stream was abandoned."""
    for frame in recording.frames:
        yield frame
    if recording.end.failure:
        raise recording.end.failure.again()
    if recording.end.abandoned:
        raise Abandoned(recording.end.frames, recording.end.cause)
