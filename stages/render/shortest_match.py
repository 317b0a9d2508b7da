"""Estimate the least amount of text that a regular expression or a Lark grammar demands.

The estimate only looks at brackets, repetitions and names.  Of several branches, the longest counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_PART = re.compile(
    r"""\\[pPxuU]\{[^}]*\} | \\.                     # an escape
    | \[\^?\]?(?:\\.|[^\]\\])*\]                    # a class
    | (?P<opened>\((?:\?(?:P?<\w+>|[\w-]*:))?)      # a group begins
    | (?P<closed>\))
    | (?P<other>\|)
    | (?P<optional>[*?])
    | (?P<nothing>[+^$])
    | \{(?P<least>\d+)(?:,\d*)?\}
    | .""",
    re.VERBOSE | re.DOTALL,
)
_DEFINITION = re.compile(r"^[?!]*(\w+)(?:\.\d+)?(?:\[[^\]]*\])?\s*:", re.MULTILINE)
_LARK_PART = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*")
    | /(?!/)(?P<pattern>(?:\\.|[^/\\])+)/
    | (?P<nothing>->\s*\w+|//[^\n]*|\#[^\n]*|\s+|\+)
    | (?P<opened>[(\[])
    | (?P<closed>\))
    | (?P<left_out>\])
    | (?P<other>\|)
    | (?P<optional>[*?])
    | \{(?P<least>\d+)(?:,\d*)?\}
    | (?P<name>\w+)
    | .""",
    re.VERBOSE,
)


@dataclass
class _Group:
    """A group being read: the lengths of its longest branch, of the current branch so far, and of its last part."""

    longest: int = 0
    branch: int = 0
    last: int = 0

    def add(self, length: int) -> None:
        self.branch += length
        self.last = length

    def repeat(self, times: int) -> None:
        self.branch += self.last * (times - 1)
        self.last *= times

    @property
    def length(self) -> int:
        return max(self.longest, self.branch)


class _Lengths:
    """Adds up the lengths of parts, group by group."""

    def __init__(self) -> None:
        self._groups = [_Group()]

    @property
    def length(self) -> int:
        return sum(group.length for group in self._groups)

    def read(self, kind: str | None, times: int = 0) -> None:
        """Take a part of the given kind.  A part of no listed kind is a single character."""
        group = self._groups[-1]
        match kind:
            case "opened":
                self._groups.append(_Group())
            case "closed" | "left_out" if len(self._groups) > 1:
                self._groups.pop()
                self.add(group.length if kind == "closed" else 0)
            case "other":
                group.longest, group.branch, group.last = group.length, 0, 0
            case "optional" | "least":
                group.repeat(times)
            case "nothing":
                pass
            case _:
                self.add(1)

    def add(self, length: int) -> None:
        self._groups[-1].add(length)


def _times(digits: str | None) -> int:
    """Return the number in ``digits``.  Only 12 digits count: that exceeds all limits, and more are slow to parse."""
    return int((digits or "").lstrip("0")[:12] or 0)


def shortest(pattern: str) -> int:
    """Estimate the characters of the shortest text that matches a regular expression."""
    reader = _Lengths()
    for part in _PART.finditer(pattern):
        reader.read(part.lastgroup, _times(part["least"]))
    return reader.length


def shortest_of_lark(definition: str) -> int:
    """Estimate the characters that each name of a Lark grammar demands, and return the largest estimate.

    Recursion is followed once.  Raises `RecursionError` if names are nested too deeply.
    """
    starts = [*_DEFINITION.finditer(definition)]
    ends = [*(start.start() for start in starts), len(definition)][1:]
    bodies = {start[1]: definition[start.end() : end] for start, end in zip(starts, ends, strict=True)}
    lengths: dict[str, int] = {}
    return max((_shortest_of(name, bodies, lengths) for name in bodies), default=0)


def _shortest_of(name: str, bodies: Mapping[str, str], lengths: dict[str, int]) -> int:
    if name not in bodies:
        return 1
    if name not in lengths:
        lengths[name] = 0
        reader = _Lengths()
        for part in _LARK_PART.finditer(bodies[name]):
            match part.lastgroup:
                case "text":
                    reader.add(len(part[0]) - 2)
                case "pattern":
                    reader.add(shortest(part["pattern"]))
                case "name":
                    reader.add(_shortest_of(part[0], bodies, lengths))
                case kind:
                    reader.read(kind, _times(part["least"]))
        lengths[name] = reader.length
    return lengths[name]
