"""The parts of the room of batches, as its routes use them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.limits.admission import PAUSE, Admission
from penstock.api.limits.table import KeyLimits
from penstock.api.resources.resources import ServerParts
from penstock.extensions.batches.answering import Answering
from penstock.extensions.batches.runner import BatchRunner
from penstock.extensions.batches.stored_batches import StoredBatches
from penstock.pipeline.errors import LimitReached


@dataclass(frozen=True)
class Room:
    """The parts of the room, which its routes use: ``openai_routes(room)`` and ``anthropic_routes(room)``."""

    parts: ServerParts
    stored: StoredBatches
    runner: BatchRunner
    answering: Answering

    @property
    def paths(self) -> frozenset[str]:
        """The paths to which lines may be requests."""
        return self.answering.paths

    async def check_bounds(self, owner: str, lines: int) -> None:
        """Raise `LimitReached` if an owner may not have one batch more, with so many lines."""
        await check_bounds(self.parts.scheduler.admission, self.stored, owner, lines, batches=1)


async def check_bounds(
    admission: Admission, stored: StoredBatches, owner: str, lines: int, *, batches: int = 0
) -> None:
    """Raise `LimitReached` if an owner, or all owners together, may not have so many batches and lines more."""
    payers: tuple[tuple[str | None, KeyLimits], ...] = (owner, admission.of(owner)), (None, admission.of_all)
    for payer, limits in payers:
        if limits.batches is None and limits.batch_lines is None:
            continue
        now = await stored.open_of(payer)
        for kind, most, count in (
            ("batches", limits.batches, now.batches + batches),
            ("lines of batches", limits.batch_lines, now.lines + lines),
        ):
            if most is not None and count > most:
                who = "all API keys together" if payer is None else "this API key"
                message = f"Limit reached for {who}: {most} {kind} that have not ended. Try again later."
                raise LimitReached(message, PAUSE)
