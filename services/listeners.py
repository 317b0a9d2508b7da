"""Listeners: functions that hear of what has happened, and have no part in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

logger = logging.getLogger(__name__)

Heard = TypeVar("Heard")


def tell(listeners: Iterable[Callable[[Heard], object]], heard: Heard) -> None:
    """Call each of the ``listeners``; one that raises is logged, and reaches neither the caller nor the others."""
    for listener in listeners:
        try:
            listener(heard)
        except Exception:
            logger.exception("A listener has failed")
