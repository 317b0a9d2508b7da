"""The garbage collector of a server, which stops everything for as long as it looks.

A request leaves nothing behind that only the collector could free, but a large one has a hundred thousand values: with
Python's own settings they are looked at again and again while they are made, together with all other requests, and
the loop stands still for tens of milliseconds each time.
"""

from __future__ import annotations

import gc

YOUNG, SOME, ALL = 5_000, 3, 250
"""New objects between two looks at these; such looks between two that go back further, and those between two at all.

The first two take milliseconds at most.  The last is only for what plugins and libraries may leave behind.
"""


def settle() -> None:
    """A server is up: never look at what there is by now, and seldom at what comes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, SOME, ALL)
