"""Where two recordings part: the first frame of a junction that is another one, and the place in it.

Runs of one request draw other ids, take other times, and get their tokens in other chunks: none of that is a
difference.  An id is known by where it came first; what comes in pieces is compared as one text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec

from penstock.pipeline.frames import ItemDelta, TokenChunk
from penstock.pipeline.protocol.events import DELTAS, Event
from penstock.pipeline.recordings.format import End
from penstock.pipeline.secret import unwritten

ID = re.compile(r"\b([a-z]+_)([0-9a-f]{32})")
"""What is drawn for a response, an item of its input or a conversation, and is part of the ids that derive from it."""

PASSING = frozenset(
    {
        "created_at",
        "completed_at",
        "duration",
        "date",
        "cached_tokens",
        "cached_tokens_per_turn",
        "trace_headers",
        "owner",
    }
)
"""Fields in which two runs of one request differ though both are right."""

SHOWN = 60
"""Characters that are shown of each value."""


@dataclass(frozen=True)
class Line:
    """A frame, or the `End`, and the line that it stands in, or would stand in."""

    frame: Any
    number: int


@dataclass
class Unit:
    """What is compared as one: a frame, a token, or pieces of text that follow each other.

    ``value`` are its fields.  ``pieces`` tell at which characters of its text which line begins.
    """

    name: str
    value: dict[str, Any]
    line: int
    pieces: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Parting:
    """The lines where two junctions part, the place within the frames, and what is there."""

    line: int
    other_line: int
    problem: str


def parting(one: Sequence[Line], other: Sequence[Line], *, exact: bool) -> Parting | None:
    """Where two recordings of a junction part; None if they do not."""
    joined = not exact and not is_chunked_alike(one, other)
    mine, others = (list(_units(lines, exact=exact, joined=joined)) for lines in (one, other))
    for left, right in zip(mine, others, strict=False):  # both end with an `End`
        if left.name != right.name:
            return Parting(left.line, right.line, f"{left.name} != {right.name}")
        if left.value != right.value:
            return _parting_of(left, right)
    return None


def is_chunked_alike(one: Sequence[Line], other: Sequence[Line]) -> bool:
    """Whether two recordings that are the same came in the same pieces."""
    sizes = [[_size(line.frame) for line in lines if _is_piece(line.frame)] for lines in (one, other)]
    return sizes[0] == sizes[1]


def _size(frame: Any) -> int:
    return len(frame.token_ids) if isinstance(frame, TokenChunk) else len(_piece(frame))


def _is_piece(frame: Any) -> bool:
    return isinstance(frame, (TokenChunk, ItemDelta)) or (type(frame) in DELTAS and isinstance(frame.delta, str))


def _piece(frame: Any) -> str:
    text: str = frame.text if isinstance(frame, ItemDelta) else frame.delta
    return text


# What is compared


def _units(lines: Iterable[Line], *, exact: bool, joined: bool) -> Iterator[Unit]:
    """The units of a junction: frames as they are, or without what passes, or also with their pieces joined."""
    if exact:
        yield from (Unit(_name(line.frame), _fields(line.frame), line.number) for line in lines)
        return
    units = _Units(joined=joined)
    for line in lines:
        yield from units.feed(line)


class _Units:
    """The machine: frames in, units out; an `End` ends it."""

    def __init__(self, *, joined: bool) -> None:
        self._joined = joined
        self._ids: dict[str, str] = {}
        self._deltas = 0
        self._open: Unit | None = None

    def feed(self, line: Line) -> Iterator[Unit]:
        """Take one frame, give what is whole."""
        unit = Unit(_name(line.frame), self._value(line.frame), line.number)
        if not self._joined:
            yield unit
            return
        if _is_piece(line.frame) and not isinstance(line.frame, TokenChunk):
            key = "text" if "text" in unit.value else "delta"
            if self._open and self._joins(self._open, unit, key):
                self._open.pieces.append((len(self._open.value[key]), line.number))
                for grown in {key, "logprobs"} & unit.value.keys():
                    self._open.value[grown] = self._open.value.get(grown, []) + unit.value[grown]
                return
            yield from self._close()
            unit.pieces.append((0, line.number))
            self._open = unit
            return
        yield from self._close()
        yield from _tokens(unit) if isinstance(line.frame, TokenChunk) else (unit,)

    def _close(self) -> Iterator[Unit]:
        if self._open:
            yield self._open
        self._open = None

    def _joins(self, begun: Unit, unit: Unit, key: str) -> bool:
        one, other = ({**each.value, key: None, "logprobs": None} for each in (begun, unit))
        return begun.name == unit.name and one == other

    def _value(self, frame: Any) -> dict[str, Any]:
        value: dict[str, Any] = _without_passing(_fields(frame), self._ids)
        if isinstance(frame, End):
            value.pop("frames")
        if isinstance(frame, Event):  # numbered without deltas, of which there may be more or fewer
            value["sequence_number"] -= self._deltas
        self._deltas += type(frame) in DELTAS
        return value


def _tokens(chunk: Unit) -> Iterator[Unit]:
    logprobs = chunk.value.get("logprobs", ())
    for token, logprob in zip_longest(chunk.value["token_ids"], logprobs):
        yield Unit("token", {"id": token} | ({} if logprob is None else {"logprob": logprob}), chunk.line)


def _name(frame: Any) -> str:
    return str(frame.__struct_config__.tag)


def _fields(frame: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(frame, enc_hook=unwritten))
    fields.pop("type", None)
    return fields


def _without_passing(value: Any, ids: dict[str, str]) -> Any:
    """The value without what passes, and with ids that say where they came first."""
    match value:
        case dict():
            return {key: _without_passing(each, ids) for key, each in value.items() if key not in PASSING}
        case list():
            return [_without_passing(each, ids) for each in value]
        case str():
            return ID.sub(lambda found: found[1] + ids.setdefault(found[2], f"<{len(ids) + 1}>"), value)
        case _:
            return value


# Where it parts


def _parting_of(left: Unit, right: Unit) -> Parting:
    path, mine, other = _first_difference(left.value, right.value)
    lines = left.line, right.line
    if left.pieces and right.pieces and isinstance(mine, str) and isinstance(other, str):
        at = common(mine, other)
        lines = _line_at(left, at), _line_at(right, at)
    return Parting(*lines, f"{left.name} {path} {_short(mine, other)} != {_short(other, mine)}")


def _line_at(unit: Unit, at: int) -> int:
    """The line of the piece that has that character, or would have it."""
    return [line for start, line in unit.pieces if start <= at][-1]


def _first_difference(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any]:
    """The path to the first difference of two values that differ, and what is there on both sides."""
    if isinstance(one, dict) and isinstance(other, dict):
        key = next(key for key in one | other if one.get(key, ABSENT) != other.get(key, ABSENT))
        return _first_difference(one.get(key, ABSENT), other.get(key, ABSENT), f"{path}.{key}" if path else key)
    if isinstance(one, list) and isinstance(other, list):
        pairs = enumerate(zip_longest(one, other, fillvalue=ABSENT))
        at, (left, right) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        return _first_difference(left, right, f"{path}[{at}]")
    return path, one, other


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


def common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (first, second) in pairs if first != second), min(len(one), len(other)))


def _short(value: Any, other: Any) -> str:
    """A value around the place where it differs from the other one."""
    if not isinstance(value, str):
        text = repr(value)
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    at = common(value, other) if isinstance(other, str) else 0
    start = max(0, at - SHOWN // 2)
    shown = value[start : start + SHOWN]
    return f"{'…' if start else ''}{shown!r}{'…' if start + SHOWN < len(value) else ''}"
