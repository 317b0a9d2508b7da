"""Steering: a client ends a response early, where that breaks nothing, because a successor goes on with new input."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


def _never(response_id: str) -> bool:
    return False


async def _nothing(response_id: str) -> bool:
    return False


@dataclass(frozen=True)
class Steering:
    """The wishes of clients, and the means to fulfil them, by response id."""

    is_wanted: Callable[[str], bool] = _never
    """Return True if a response shall end once it safely can."""
    stop: Callable[[str], Awaitable[object]] = _nothing
    """End the generation for a response; its frames then end with the reason ``cancelled``."""
