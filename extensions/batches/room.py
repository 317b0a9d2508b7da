"""What the routes of batches share."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.resources.resources import ServerParts
from penstock.extensions.batches.runner import BatchRunner
from penstock.extensions.batches.stored_batches import StoredBatches


@dataclass(frozen=True)
class Room:
    """The parts of the room, which its routes use: ``openai_routes(room)`` and ``anthropic_routes(room)``."""

    parts: ServerParts
    stored: StoredBatches
    runner: BatchRunner
    paths: frozenset[str]
    """The paths to which lines may be requests."""

    async def check_bounds(self, owner: str, lines: int) -> None:
        """Raise `LimitReached` if an owner may not have one batch more, with so many lines."""
        raise NotImplementedError
