"""The memory of processes, as Linux tells it."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_of(pid: int) -> int | None:
    """Return the resident bytes of a process and of those that it has started; None if that is not known.

    What processes share counts for each of them.
    """
    own = Path(f"/proc/{pid}")
    try:
        resident = int((own / "statm").read_text().split()[1]) * _PAGE
        children = " ".join(each.read_text() for each in own.glob("task/*/children"))
    except (OSError, IndexError):  # it has ended, or this is another system
        return None
    return resident + sum(memory_of(int(child)) or 0 for child in children.split())
