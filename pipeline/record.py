"""Recordings: the frames of one junction as a file of JSON lines.

A file of frames is a source for the stages behind its junction, so that a recording is all that a replay needs.
Secrets are not written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline.secret import unread, unwritten

Frame = TypeVar("Frame")

SOURCES = {
    "converse": ("conversation.jsonl",),
    "render": ("conversation.jsonl",),
    "generate": ("prompt.jsonl",),
    "parse": ("tokens.jsonl",),
    "emit": ("conversed.jsonl", "parsed.jsonl"),
    "persist": ("events.jsonl",),
}
"""The files of a recorded response that each stage can read, the best one first.

Where tools ran between the turns, what they did is in ``conversed.jsonl`` alone; otherwise there is no such file.
"""

_encoder = msgspec.json.Encoder(enc_hook=unwritten)


def write_frames(path: Path, frames: Iterable[object]) -> None:
    """Write one frame per line."""
    path.write_bytes(_encoder.encode_lines(frames))


def read_frames(path: Path, junction: Any) -> Iterator[Any]:
    """The frames of a file, as members of the union ``junction``.

    Raises `msgspec.ValidationError` for a line that is no such frame.
    """
    yield from msgspec.json.Decoder(junction, dec_hook=unread).decode_lines(path.read_bytes())


async def replay(frames: Iterable[Frame]) -> AsyncGenerator[Frame, None]:
    """Frames as the source of a pipeline."""
    for frame in frames:
        yield frame
