"""Retention: old responses and their events are deleted, and the log states how much is left."""

from __future__ import annotations

import asyncio
import logging

from penstock.pipeline.errors import StoreFailed
from penstock.stages.services.store.store import Store

logger = logging.getLogger(__name__)

PERIOD = 3600.0
"""The most seconds between two sweeps; if responses or events are kept for less, sweeps are more frequent."""


async def keep_sweeping(store: Store, keep_responses: float, keep_streams: float) -> None:
    """Sweep the store, now and periodically, until cancelled.

    Responses are kept for ``keep_responses`` seconds after their end, and their events for ``keep_streams`` seconds.
    """
    period = min(PERIOD, max(1.0, min(keep_responses, keep_streams)))
    while True:
        try:
            stats = await store.sweep(keep_responses, keep_streams)
        except StoreFailed:
            logger.exception("What is too old could not be deleted")
        else:
            days = stats.oldest_age / 86400
            logger.info("Stored: %d responses, %.1f MB, %.1f days", stats.responses, stats.bytes / 1e6, days)
        await asyncio.sleep(period)
