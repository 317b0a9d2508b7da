"""Names of files, as clients declare them: without folders, control characters and all that imitates another name."""

from __future__ import annotations

import re
import unicodedata

LONGEST_NAME = 200
"""The most bytes of a name: file systems take 255."""

_LONGEST_ENDING = 16
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""The categories of Unicode whose characters are not seen: controls, marks of the direction, ends of lines."""

_IGNORED = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]")
"""The characters of other categories that Unicode has programs ignore in what they show."""


def is_invisible(character: str) -> bool:
    """True for a character that a reader does not see, so that names with and without it look the same."""
    return unicodedata.category(character) in _INVISIBLE or bool(_IGNORED.match(character))


def plain_name(given: str) -> str:
    """Return the last part of a declared name, of at most `LONGEST_NAME` bytes; ``file`` if nothing is left."""
    last = re.split(r"[/\\]", given.rstrip("/\\"))[-1]
    name = "".join("_" if is_invisible(each) else each for each in last).strip()
    if len(name.encode()) > LONGEST_NAME:
        stem, dot, ending = name.rpartition(".")
        ending = dot + ending if stem and len(ending.encode()) < _LONGEST_ENDING else ""
        kept = name.encode()[: LONGEST_NAME - len(ending.encode())]
        name = kept.decode(errors="ignore").rstrip() + ending
    return name if name.strip(". ") else "file"
