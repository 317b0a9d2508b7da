"""Recordings of this server, read again in the order in which their frames came."""

from __future__ import annotations

import re
from collections.abc import Iterator
from heapq import merge, nlargest
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from pydantic_core import from_json

from penstock.api.http.wire import server_sent
from penstock.extensions.workbench.live.spelling import Spelling
from penstock.extensions.workbench.live.watch import JUNCTIONS, junction_line
from penstock.pipeline.errors import InvalidRequest, ResponseNotFound
from penstock.pipeline.recordings.format import (
    FILES,
    UNFINISHED,
    End,
    Header,
    UnreadableRecording,
    end_of_all,
    in_words,
    read_header,
)
from penstock.pipeline.recordings.response_folder import REQUEST

MOST_LISTED = 50
"""The most recordings in a list; the latest come first."""

LARGEST_REQUEST = 2**20
"""Bytes of a recorded request up to which it is shown."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,199}")
"""The names that a folder of a response has: no path."""


OLDEST = 2
"""The oldest format of recordings that the page can show."""


class Saved(msgspec.Struct, frozen=True):
    """A recording: the name of its folder, its model, and the ISO 8601 time at which it began."""

    id: str
    model: str
    recorded_at: str | None


class Opened(msgspec.Struct, frozen=True):
    """The first event of a recording, with the request if it was recorded."""

    id: str
    header: Header
    request: Any = None
    goes_on: bool = False


class SavedEnd(End, frozen=True, tag="End", omit_defaults=True):
    """The last event of a recording, ``unfinished`` if a file of it has no last line.

    ``why`` says in words why it ends early, or has no end.
    """

    unfinished: bool = False
    why: str = ""


class _Line(msgspec.Struct):
    type: str = ""
    at: float | None = None
    token_ids: tuple[int, ...] = ()


_read_line = msgspec.json.Decoder(_Line).decode
_read_end = msgspec.json.Decoder(End).decode


def listed(folder: Path) -> list[Saved]:
    """Return the latest recordings of a folder."""
    found = (path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))
    return [saved for path in nlargest(MOST_LISTED, found, key=_age) if (saved := _saved(path))]


def find(folder: Path, name: str) -> Path:
    """Return the folder of a recording; raise `ResponseNotFound` if there is none of that name."""
    if not _NAME.fullmatch(name) or not (folder / name).is_dir():
        raise ResponseNotFound(name[:200])
    return folder / name


def header_of(path: Path) -> Header:
    """Return the header of a recording; raise `InvalidRequest` if it cannot be read."""
    try:
        header = read_header(next(iter(_files(path).values()), path))
    except UnreadableRecording as error:
        raise InvalidRequest(f"This recording cannot be read: {error}") from error
    if header.format < OLDEST:
        raise InvalidRequest(f"This recording has format {header.format}: penstock inspect shows it.")
    return header


def frames_of(path: Path, header: Header, spelling: Spelling, *, goes_on: bool) -> Iterator[bytes]:
    """Yield the frames of a recording as server-sent events, in the order of their times.

    Raise `InvalidRequest` if it has no times.
    """
    yield server_sent(Opened(path.name, header, _request(path), goes_on), "recording")
    frames, files, ends = 0, _files(path), dict[str, End]()
    for _, _, _, stage, data, tokens in merge(*(_lines(*each, ends) for each in enumerate(files.items()))):
        frames += 1
        if texts := spelling.of(tokens):
            yield server_sent(texts, "texts")
        yield junction_line(stage, data)
    end, is_unfinished = end_of_all([ends[stage] for stage in files if stage in ends]), len(ends) < len(files)
    yield server_sent(
        SavedEnd(
            frames,
            failure=end.failure,
            abandoned=end.abandoned,
            cause=end.cause,
            unfinished=is_unfinished,
            why=UNFINISHED if is_unfinished else in_words(end.cause) if end.abandoned else "",
        ),
        "end",
    )


def _files(path: Path) -> dict[str, Path]:
    """Return the files of a recording by their stages; that of ``converse`` has all that ``parse`` has, and more."""
    files = {stage: path / FILES[stage][0] for stage in (*JUNCTIONS, "parse")}
    files = {stage: file for stage, file in files.items() if file.exists()}
    if "converse" in files:
        files.pop("parse", None)
    return files


def _lines(
    order: int, file: tuple[str, Path], ends: dict[str, End]
) -> Iterator[tuple[float, int, int, str, bytes, tuple[int, ...]]]:
    """Yield the complete lines of the frames of a file, each after its time and its place, and keep its last line."""
    stage, path = file
    with path.open("rb") as lines:
        next(lines)
        for number, data in zip(count(), lines, strict=False):
            if not data.endswith(b"\n"):  # it is being written
                return
            read = _read_line(data)
            if read.type == "End":
                ends[stage] = _read_end(data)
                return
            if read.at is None:
                raise InvalidRequest("This recording has no times, so the order of its frames is not known.")
            yield read.at, order, number, stage, data, read.token_ids


def _saved(path: Path) -> Saved | None:
    try:
        header = header_of(path)
    except InvalidRequest:
        return None
    return Saved(path.name, header.model, header.recorded_at)


def _request(path: Path) -> Any:
    try:
        file = path / REQUEST
        return from_json(file.read_bytes()) if file.stat().st_size <= LARGEST_REQUEST else None
    except (OSError, ValueError):
        return None


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it was deleted
        return 0.0
