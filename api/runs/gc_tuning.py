"""Settings of the garbage collector, which stops the whole process while it runs.

A request leaves no garbage that only the collector could free.  But a large request has a hundred thousand values, and
with Python's default thresholds the collector traverses them again and again while they are created, together with all
other requests.  Each time, the event loop stands still for tens of milliseconds.
"""

from __future__ import annotations

import gc

YOUNG, SOME, ALL = 5_000, 3, 250
"""The thresholds of `gc.set_threshold`.

They are new objects before a collection of the youngest generation, such collections before one of the middle
generation, and collections of the middle generation before one of all objects.  The first two kinds of collections
take milliseconds at most.  The last kind is only for garbage of plug-ins and libraries.
"""


def settle() -> None:
    """Exclude all present objects from collection, and collect new ones rarely; to be called once the server is up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, SOME, ALL)
