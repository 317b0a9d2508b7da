"""Recordings: the frames of one junction as a file of JSON lines.

A file of frames is a source for the stages behind its junction, so that a recording is all that a replay needs.  Its
first line is a `Header`, its last one an `End`; those between are frames, each with the seconds at which it came, where
somebody took the time.  Secrets are not written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from penstock.pipeline.errors import CannotRun, StageError, error_named
from penstock.pipeline.frames import Conversation, ConversedFrame, EmittedFrame, ParsedFrame, Prompt, TokenFrame
from penstock.pipeline.secret import unread, unwritten

Frame = TypeVar("Frame")

FORMAT = 1
"""The version of all this; what has another one cannot be read."""

FILES: Mapping[str, tuple[str, Any]] = {
    "normalize": ("conversation.jsonl", Conversation),
    "render": ("prompt.jsonl", Prompt),
    "generate": ("tokens.jsonl", TokenFrame),
    "parse": ("parsed.jsonl", ParsedFrame),
    "converse": ("conversed.jsonl", ConversedFrame),
    "emit": ("events.jsonl", EmittedFrame),
}
"""Which file of a recorded response holds what a stage gave, and the union that its frames belong to."""

SOURCES: Mapping[str, tuple[str, ...]] = {
    "converse": ("normalize",),
    "render": ("normalize",),
    "generate": ("render",),
    "parse": ("generate",),
    "emit": ("converse", "parse"),
    "persist": ("emit",),
}
"""Behind which stages the frames were recorded that each stage can read, the best ones first.

Where tools ran between the turns, what they did is in ``conversed.jsonl`` alone; otherwise there is no such file.
"""

Encoding: TypeAlias = Literal["harmony", "chat"]


class Header(msgspec.Struct, frozen=True, tag="Recording", omit_defaults=True):
    """What was recorded: the first line of a file.

    ``model`` is the name under which it was served, ``source`` the folder or id that it was loaded from, and
    ``options`` what the operator said of its chat template and its parsers.  ``recorded_at`` is a time as ISO 8601 has
    it, the one from which frames count their seconds.
    """

    format: int
    model: str = ""
    encoding: Encoding = "harmony"
    source: str | None = None
    options: Mapping[str, Any] = {}
    versions: Mapping[str, str] = {}
    recorded_at: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """An error that ended a stream: the name of its class, and what it said."""

    error: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What to write of an error."""
        return cls(type(error).__name__, error.message if isinstance(error, StageError) else str(error))

    def again(self) -> Exception:
        """An error of that class, if it is one of `penstock.pipeline.errors`; a `RuntimeError` otherwise."""
        return error_named(self.error, self.message) or RuntimeError(f"{self.error}: {self.message}")


class End(msgspec.Struct, frozen=True, tag="End", omit_defaults=True):
    """How the stream ended: the last line of a file, which has so many ``frames``.

    ``failure`` is what was raised in place of more frames.  With ``abandoned`` nobody wanted more of them.
    """

    frames: int
    failure: Failure | None = None
    abandoned: bool = False


class Abandoned(BaseException):
    """Whoever read a recorded stream left at this point; passes all stages, as a cancellation does."""


class UnreadableRecording(CannotRun):
    """A file that is no recording, or a broken one; the message begins with the file and the line."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}{'' if line is None else f':{line}'}: {problem}")
        self.path = path
        self.line = line


@dataclass(frozen=True)
class Timed:
    """A frame, the line that it stands in, and the second at which it came, if that was recorded."""

    frame: Any
    line: int
    at: float | None = None


@dataclass(frozen=True)
class Recording:
    """A file that was read as a whole."""

    header: Header
    timed: tuple[Timed, ...]
    end: End

    @property
    def frames(self) -> tuple[Any, ...]:
        """The frames alone."""
        return tuple(timed.frame for timed in self.timed)


class _Stamp(msgspec.Struct):
    at: float | None = None


_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for what is no JSON."""

_encode = msgspec.json.Encoder(enc_hook=unwritten).encode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_end = msgspec.json.Decoder(End).decode
_decode_stamp = msgspec.json.Decoder(_Stamp).decode


def line(frame: object, at: float | None = None) -> bytes:
    """A header, a frame or an end as a line of a file."""
    encoded = _encode(frame)
    return encoded + b"\n" if at is None else b'{"at":%.6f,%b\n' % (at, encoded[1:])


def write_frames(path: Path, frames: Iterable[object], header: Header = Header(FORMAT)) -> None:  # noqa: B008 - frozen
    """Write a whole recording, without times."""
    lines = [line(frame) for frame in frames]
    path.write_bytes(line(header) + b"".join(lines) + line(End(len(lines))))


def read_frames(path: Path, junction: Any) -> Iterator[Any]:
    """The frames of a file, as members of the union ``junction``; raises `UnreadableRecording`."""
    yield from read_recording(path, junction).frames


def read_header(path: Path) -> Header:
    """The first line of a file; raises `UnreadableRecording` for what is no recording, or one of another format."""
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError as error:
        raise UnreadableRecording(path, None, f"there is no recording here: {error.strerror}") from error
    try:
        header = _decode_header(first)
    except _NO_JSON as error:
        raise UnreadableRecording(path, 1, "this is no recording: it does not begin with a header") from error
    if header.format != FORMAT:
        raise UnreadableRecording(path, 1, f"a recording of format {header.format}, where {FORMAT} is understood")
    return header


def read_recording(path: Path, junction: Any) -> Recording:
    """A file of frames of the union ``junction``; raises `UnreadableRecording`."""
    header = read_header(path)
    lines = path.read_bytes().split(b"\n")
    if lines.pop():
        raise UnreadableRecording(path, len(lines) + 1, "the recording was cut in the middle of this line")
    end = _read_end(path, lines)
    decode = msgspec.json.Decoder(junction, dec_hook=unread).decode
    timed = tuple(_read_frame(path, number, data, decode) for number, data in enumerate(lines[1:-1], start=2))
    return Recording(header, timed, end)


def _read_end(path: Path, lines: list[bytes]) -> End:
    try:
        end = _decode_end(lines[-1])
    except _NO_JSON as error:
        raise UnreadableRecording(path, len(lines), "the recording was cut behind this line: it has no end") from error
    if end.frames != len(lines) - 2:
        raise UnreadableRecording(path, len(lines), f"{end.frames} frames were recorded, and {len(lines) - 2} are here")
    return end


def _read_frame(path: Path, number: int, data: bytes, decode: Any) -> Timed:
    try:
        return Timed(decode(data), number, _decode_stamp(data).at)
    except msgspec.ValidationError as error:
        raise UnreadableRecording(path, number, f"no frame of this place, or of this version: {error}") from error
    except _NO_JSON as error:
        raise UnreadableRecording(path, number, f"this is no JSON: {error}") from error


async def replay(frames: Iterable[Frame]) -> AsyncGenerator[Frame, None]:
    """Frames as the source of a pipeline."""
    for frame in frames:
        yield frame


async def replay_recording(recording: Recording) -> AsyncGenerator[Any, None]:
    """A recording as the source of a pipeline: it ends as it ended then, which may mean to raise."""
    for frame in recording.frames:
        yield frame
    if recording.end.failure:
        raise recording.end.failure.again()
    if recording.end.abandoned:
        raise Abandoned
