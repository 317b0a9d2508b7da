"""The first difference between two recordings of a junction: the frame, and the place within it.

Two runs of one request get different ids, times and token chunks; these do not count as differences.  Ids are compared
by their order of first appearance, and consecutive deltas as one text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

from penstock.pipeline.frames import ItemDelta, TokenChunk
from penstock.pipeline.protocol.events import DELTAS, Event
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.recordings.format import End
from penstock.pipeline.secret import plain_json

ID = re.compile(r"\b([a-z]+_)([0-9a-f]{32})")
"""A random id of a response, an input item or a conversation; other ids derived from it contain its digits."""

PASSING = frozenset(
    {"created_at", "completed_at", "duration", "date", "cached_tokens"}
    | {"trace_headers", "owner", "encrypted_content"}
    | {f"{counted}_per_turn" for counted in ("input_tokens", "cached_tokens", "output_tokens", "tool_output_tokens")}
)
"""Fields that differ between two correct runs of one request.  Releases up to 0.2 always gave the numbers per turn."""

Path: TypeAlias = tuple[str | int, ...]

SHOWN_CHARACTERS = 60
"""Characters of each value that are shown."""


@dataclass(frozen=True)
class Line:
    """A frame or the `End` of a recording, with its line number in the file, or in the file of a replay."""

    frame: Any
    number: int


@dataclass
class Comparable:
    """The unit of comparison: a frame, a token, or consecutive deltas of one text.

    ``value`` has the fields of the frame.  ``pieces`` has a pair for each delta: its offset in the text, and its line.
    ``within`` leads to a token in its frame.
    """

    name: str
    value: dict[str, Any]
    line: int
    pieces: list[tuple[int, int]] = field(default_factory=list)
    within: Path = ()


@dataclass(frozen=True)
class Place:
    """A line, the keys and indexes that lead to a value in its frame, and an offset in that value if it is a text."""

    line: int
    path: Path = ()
    offset: int = 0


@dataclass(frozen=True)
class Difference:
    """The first difference: its place in each recording, and a description with both values."""

    here: Place
    there: Place
    problem: str


def first_difference(one: Sequence[Line], other: Sequence[Line], *, exact: bool) -> Difference | None:
    """Return the first difference of two recordings; with ``exact``, ids, times and chunk borders count as well."""
    joined = not exact and not is_chunked_alike(one, other)
    mine, others = (list(_units(lines, exact=exact, joined=joined)) for lines in (one, other))
    for left, right in zip(mine, others, strict=False):  # both end with an `End`
        if left.name != right.name:
            here, there = (Place(each.line, ("type",)) for each in (left, right))
            return Difference(here, there, f"{left.name} != {right.name}")
        if left.value != right.value:
            return _difference_of(left, right)
    return None


def is_chunked_alike(one: Sequence[Line], other: Sequence[Line]) -> bool:
    """True if the chunks and deltas of both recordings have the same sizes, in order."""
    sizes = [[_size(line.frame) for line in lines if _is_piece(line.frame)] for lines in (one, other)]
    return sizes[0] == sizes[1]


def _size(frame: Any) -> int:
    return len(frame.token_ids) if isinstance(frame, TokenChunk) else len(_piece(frame))


def _is_piece(frame: Any) -> bool:
    return isinstance(frame, (TokenChunk, ItemDelta)) or (type(frame) in DELTAS and isinstance(frame.delta, str))


def _piece(frame: Any) -> str:
    text: str = frame.text if isinstance(frame, ItemDelta) else frame.delta
    return text


# Units of comparison


def _units(lines: Iterable[Line], *, exact: bool, joined: bool) -> Iterator[Comparable]:
    """Yield each frame as it is if ``exact``; otherwise normalized, and if ``joined`` as whole texts and tokens."""
    if exact:
        yield from (Comparable(_name(line.frame), _fields(line.frame), line.number) for line in lines)
        return
    units = _Units(joined=joined)
    for line in lines:
        yield from units.feed(line)


class _Units:
    """Turns frames into units.  The last frame fed must be the `End`, which closes an open text."""

    def __init__(self, *, joined: bool) -> None:
        self._joined = joined
        self._ids: dict[str, str] = {}
        self._deltas = 0
        self._open: Comparable | None = None

    def feed(self, line: Line) -> Iterator[Comparable]:
        unit = Comparable(_name(line.frame), self._value(line.frame), line.number)
        if not self._joined:
            yield unit
            return
        if _is_piece(line.frame) and not isinstance(line.frame, TokenChunk):
            key = "text" if "text" in unit.value else "delta"
            if self._open and self._open.name == unit.name and _rest(self._open, key) == _rest(unit, key):
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

    def _close(self) -> Iterator[Comparable]:
        if self._open:
            yield self._open
        self._open = None

    def _value(self, frame: Any) -> dict[str, Any]:
        value: dict[str, Any] = _without_passing(_fields(frame), self._ids)
        if isinstance(frame, End):
            value.pop("frames")
        if isinstance(frame, Event):  # the number of deltas may differ, so they are not counted
            value["sequence_number"] -= self._deltas
        self._deltas += type(frame) in DELTAS
        return value


def _rest(unit: Comparable, key: str) -> dict[str, Any]:
    return {**unit.value, key: None, "logprobs": None}


def _tokens(chunk: Comparable) -> Iterator[Comparable]:
    logprobs = chunk.value.get("logprobs", ())
    for at, (token, logprob) in enumerate(zip_longest(chunk.value["token_ids"], logprobs)):
        value = {"id": token} | ({} if logprob is None else {"logprob": logprob})
        yield Comparable("token", value, chunk.line, within=("token_ids", at))


def _name(frame: Any) -> str:
    return str(frame.__struct_config__.tag)


def _fields(frame: Any) -> dict[str, Any]:
    fields: dict[str, Any] = plain_json(frame)
    fields.pop("type", None)
    return fields


def _without_passing(value: Any, ids: dict[str, str]) -> Any:
    match value:
        case dict():
            return {key: _without_passing(each, ids) for key, each in value.items() if key not in PASSING}
        case list():
            return [_without_passing(each, ids) for each in value]
        case str():
            return ID.sub(lambda match: match[1] + ids.setdefault(match[2], f"<{len(ids) + 1}>"), value)
        case _:
            return value


# The place of a difference


def _difference_of(left: Comparable, right: Comparable) -> Difference:
    path, mine, other = _first_difference(left.value, right.value)
    at = common_prefix(mine, other) if isinstance(mine, str) and isinstance(other, str) else 0
    named = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
    problem = f"{left.name} {named} {_short(mine, other)} != {_short(other, mine)}"
    return Difference(_place(left, path, at), _place(right, path, at), problem)


def _place(unit: Comparable, path: Path, offset: int) -> Place:
    pieces = unit.pieces if path in (("text",), ("delta",)) else ()
    start, line = [piece for piece in pieces or [(0, unit.line)] if piece[0] <= offset][-1]
    return Place(line, unit.within or path, offset - start)


def _first_difference(one: Any, other: Any, path: Path = ()) -> tuple[Path, Any, Any]:
    if isinstance(one, dict) and isinstance(other, dict):
        key = next(key for key in one | other if one.get(key, ABSENT) != other.get(key, ABSENT))
        return _first_difference(one.get(key, ABSENT), other.get(key, ABSENT), (*path, key))
    if isinstance(one, list) and isinstance(other, list):
        pairs = enumerate(zip_longest(one, other, fillvalue=ABSENT))
        at, (left, right) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        return _first_difference(left, right, (*path, at))
    return path, one, other


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


def _short(value: Any, other: Any) -> str:
    if not isinstance(value, str):
        return shortened(repr(value), SHOWN_CHARACTERS)
    return excerpt(value, other if isinstance(other, str) else "", SHOWN_CHARACTERS)


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts or lists."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (first, second) in pairs if first != second), min(len(one), len(other)))


def excerpt(text: str, other: str, size: int) -> str:
    """Return ``size`` characters of a text around the first one that differs from the other text, in quotes."""
    start = max(0, common_prefix(text, other) - size // 2)
    shown = text[start : start + size]
    return f"{'…' if start else ''}{shown!r}{'…' if start + size < len(text) else ''}"
