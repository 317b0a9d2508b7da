"""The heap of the C library, whose free memory goes back to the system after a peak."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

WORTHWHILE_BYTES = 2**26
"""Bytes that have become free since the heap was trimmed, from which on it is trimmed again."""


class _Info(ctypes.Structure):
    """The struct ``mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass
class Heap:
    """The heap of this process.  Without glibc 2.33 or later it is never trimmed."""

    _least_free: int = 0
    """The fewest bytes that have been free since the heap was trimmed: they are not in memory."""

    def __post_init__(self) -> None:
        library: Any = ctypes.CDLL(None)
        self._trim, self._info = getattr(library, "malloc_trim", None), getattr(library, "mallinfo2", None)
        if self._info:
            self._info.restype = _Info

    @property
    def free_bytes(self) -> int:
        """The bytes that are allocated from the system and not used."""
        return int(self._info().fordblks) if self._info else 0

    def tidy(self) -> bool:
        """Trim the heap if that is worthwhile, and return True if so.  It takes milliseconds, without the GIL."""
        free = self.free_bytes
        self._least_free = min(self._least_free, free)
        if not self._trim or free - self._least_free < WORTHWHILE_BYTES:
            return False
        self._trim(ctypes.c_size_t(0))
        self._least_free = free
        return True
