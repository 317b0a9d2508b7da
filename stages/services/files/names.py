"""Names of files, as clients declare them: without folders, control characters and all that imitates another name."""

from __future__ import annotations

import re

LONGEST_NAME = 200
"""The most bytes of a name: file systems take 255."""

_LONGEST_ENDING = 16
_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain_name(given: str) -> str:
    """Return the last part of a declared name, of at most `LONGEST_NAME` bytes; ``file`` if nothing is left."""
    name = _INVISIBLE.sub("_", re.split(r"[/\\]", given.rstrip("/\\"))[-1]).strip()
    if len(name.encode()) > LONGEST_NAME:
        stem, dot, ending = name.rpartition(".")
        ending = dot + ending if stem and len(ending.encode()) < _LONGEST_ENDING else ""
        kept = name.encode()[: LONGEST_NAME - len(ending.encode())]
        name = kept.decode(errors="ignore").rstrip() + ending
    return name if name.strip(". ") else "file"
