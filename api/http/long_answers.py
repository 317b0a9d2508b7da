"""Answers whose long lists are written apart from the event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.events import DELTAS, ResponseEvent
from penstock.pipeline.protocol.pieces import in_pieces
from penstock.pipeline.tasks import LARGE_BYTES, in_thread


def may_be_long(request: ResolvedRequest, sent: int) -> bool:
    """Return True if the answer may repeat long parameters of ``sent`` bytes, or has log probabilities."""
    return sent > LARGE_BYTES or request.facts.sampling.logprobs is not None


async def events_in_pieces(events: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    """Write the long lists of all events but deltas in a thread."""
    async for event in events:
        yield event if type(event) in DELTAS else await in_thread(in_pieces, event)
