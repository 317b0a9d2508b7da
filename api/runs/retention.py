"""Retention: what nobody is to find any more is deleted, and the operator is told how much is left."""

from __future__ import annotations

import asyncio
import logging

from penstock.pipeline.errors import StoreFailed
from penstock.stages.services.store.store import Store

logger = logging.getLogger(__name__)

PERIOD = 3600.0
"""Seconds between two sweeps at most: what is kept for less is looked after more often."""


async def keep_sweeping(store: Store, keep_responses: float, keep_streams: float) -> None:
    """Sweep now, and again and again: what ended so many seconds ago goes, its stream first."""
    period = min(PERIOD, max(1.0, min(keep_responses, keep_streams)))
    while True:
        try:
            left = await store.sweep(keep_responses, keep_streams)
        except StoreFailed:
            logger.exception("What is too old could not be deleted")
        else:
            days = left.oldest_age / 86400
            logger.info("Stored: %d responses, %.1f MB, %.1f days", left.responses, left.bytes / 1e6, days)
        await asyncio.sleep(period)
