"""How much text a regular expression demands at least: an estimate from its brackets and repetitions alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = re.compile(
    r"""\\[pPxuU]\{[^}]*\} | \\.                     # an escape
    | \[\^?\]?(?:\\.|[^\]\\])*\]                    # a class
    | (?P<opened>\((?:\?(?:P?<\w+>|[\w-]*:))?)      # a group begins
    | (?P<closed>\))
    | (?P<other>\|)
    | (?P<optional>[*?])
    | \{(?P<least>\d+)(?:,\d*)?\}
    | .""",
    re.VERBOSE | re.DOTALL,
)


@dataclass
class _Group:
    """A group that is being read: the lengths of its longest branch, of the branch so far, and of its last part."""

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


def shortest(pattern: str) -> int:
    """Characters of the shortest text that matches ``pattern``, the longest branch of each group taken."""
    groups = [_Group()]
    for part in _PART.finditer(pattern):
        match part.lastgroup:
            case "opened":
                groups.append(_Group())
            case "closed" if len(groups) > 1:
                length = groups.pop().length
                groups[-1].add(length)
            case "other":
                group = groups[-1]
                group.longest, group.branch, group.last = group.length, 0, 0
            case "optional" | "least":
                groups[-1].repeat(int(part["least"] or 0))
            case _:
                groups[-1].add(1)
    return sum(group.length for group in groups)
