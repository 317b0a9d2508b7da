"""Recordings of the wire: what a server of any make has answered, event by event, as its client got it.

The header names the server, the dialect and the path.  The request stands beside the file, in the form of its dialect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from penstock.pipeline.recordings.format import Recording, read_recording

WIRE = "wire.jsonl"
"""The file of a recording of the wire."""


class _Wire(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class AnswerBegun(_Wire, frozen=True):
    """The headers of an answer have come."""

    status: int
    content_type: str = ""


class WireEvent(_Wire, frozen=True):
    """A server-sent event: its name, if it has one, and its ``data``, or its ``text`` if that is no JSON."""

    event: str = ""
    data: Any | UnsetType = UNSET
    text: str | UnsetType = UNSET


class WireBody(_Wire, frozen=True):
    """The whole body of an answer that is no stream: its ``data``, or its ``text`` if that is no JSON."""

    data: Any | UnsetType = UNSET
    text: str | UnsetType = UNSET


WireFrame: TypeAlias = AnswerBegun | WireEvent | WireBody


def is_wire(path: Path) -> bool:
    """True if ``path`` is a recording of the wire: its folder, or its file; False for one that cannot be looked at."""
    try:
        return path.name == WIRE if path.is_file() else (path / WIRE).is_file()
    except OSError:  # its reader says why
        return False


def read_wire(path: Path) -> Recording:
    """Read a recording of the wire, by its folder or its file.  Raise `UnreadableRecording` if it is broken."""
    return read_recording(path if path.is_file() else path / WIRE, WireFrame)
