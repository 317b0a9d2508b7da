"""Housekeeping of a server: expired responses are deleted, memory is freed, and the garbage collector is tuned."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys

from penstock.api.limits.admission import Admission
from penstock.api.runs.background import InFlight
from penstock.api.runs.heap import Heap
from penstock.pipeline import metrics
from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.logs import counted, duration
from penstock.services.store.store import Store

logger = logging.getLogger(__name__)

PERIOD = 3600.0
"""The most seconds between two sweeps; if responses or events are kept for less, sweeps are more frequent."""

TIDY_SECONDS = 10.0
"""Seconds between two times at which unused memory is freed."""

YOUNG, SOME, NEVER = 5_000, 1, 2**31 - 1
"""The thresholds of `gc.set_threshold`.

They are new objects before a collection of the youngest generation, such collections before one of the middle
generation, and collections of the middle generation before one of all objects.  The first two kinds of collections
take milliseconds.  The last one takes a third of a second beside a request with a million values, so that it waits for
a moment without requests (see `collect_if_due`).
"""

DUE, OVERDUE = 50, 400
"""Collections of the middle generation before one of all objects while no request runs, and in any case."""


async def keep_sweeping(store: Store, keep_responses: float, keep_streams: float) -> None:
    """Sweep the store, now and periodically, until cancelled.

    Responses are kept for ``keep_responses`` seconds after their end, and their events for ``keep_streams`` seconds.
    """
    period = min(PERIOD, max(1.0, min(keep_responses, keep_streams)))
    while True:
        try:
            stats = await store.sweep(keep_responses, keep_streams)
        except StoreFailed:
            logger.exception("Expired responses could not be deleted")
        else:
            oldest = f", the oldest for {duration(stats.oldest_age)}" if stats.responses else ""
            number, megabytes = counted(stats.responses, "response"), stats.bytes / 1e6
            kept = f"kept for {duration(keep_responses)}, their streams for {duration(keep_streams)}"
            metrics.STORED_RESPONSES.set(stats.responses)
            metrics.STORED_BYTES.set(stats.bytes)
            if store.keeps:
                logger.info("Stored: %s, %.1f MB%s; %s", number, megabytes, oldest, kept)
        await asyncio.sleep(period)


async def keep_tidying(admission: Admission, in_flight: InFlight) -> None:
    """Forget idle owners, and free garbage and memory, periodically, until cancelled."""
    heap = Heap()
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        await admission.forget_idle()
        collect_if_due(in_flight.count)
        await asyncio.to_thread(heap.tidy)


def collect_if_due(running: int) -> None:
    """Collect all garbage if that is due while ``running`` requests run.

    Only plug-ins and libraries leave garbage that outlives the younger generations.
    """
    if gc.get_count()[2] > (OVERDUE if running else DUE):
        gc.collect()


def forget_generators() -> None:
    """Let the event loop keep no weak reference to each async generator, which takes 200 bytes.

    The loop would only close those that are still open when it ends.  The server ends all responses before, and every
    stage is closed with its response.
    """
    sys.set_asyncgen_hooks(firstiter=None)


def tune_gc() -> None:
    """Exclude all present objects from collection, and collect new ones rarely; to be called once the server is up.

    A request leaves no garbage that only the collector could free.  But a large request has a hundred thousand values,
    and with Python's default thresholds the collector traverses them again and again while they are created, together
    with all other requests.  Each time, the event loop stands still for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, SOME, NEVER)
