"""The end of the pipeline: every event goes on as it came, and the last one's response is stored on the way.

Only the terminal event waits for the store, because whoever has seen the end of a response may ask for it at once;
a delta never waits.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from pipeline.ending import failed_response
from pipeline.errors import StoreFailed
from pipeline.frames import EmittedFrame, GenerationStarted
from pipeline.protocol.events import (
    DELTAS,
    ResponseCompleted,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    TerminalEvent,
)
from pipeline.protocol.items import Item
from stages.persist.store import ResponseStore, StoredResponse

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Persist:
    """Stores each response that asks for it, with the input of its request, before its terminal event passes."""

    store: ResponseStore

    async def __call__(self, source: AsyncIterator[EmittedFrame]) -> AsyncGenerator[ResponseEvent, None]:
        """Pass the events on; what `GenerationStarted` knows of the request stays here."""
        request_input: tuple[Item, ...] = ()
        async for frame in source:
            if type(frame) in DELTAS:  # nearly every frame
                delta: Any = frame
                yield delta
                continue
            match frame:
                case GenerationStarted():
                    request_input = frame.input
                case ResponseCompleted() | ResponseIncomplete() | ResponseFailed() if frame.response.store:
                    yield await self._stored(frame, request_input)
                case _:
                    yield frame

    async def _stored(self, event: TerminalEvent, request_input: tuple[Item, ...]) -> TerminalEvent:
        """The event once its response is stored, or the news that it could not be."""
        try:
            await self.store.put(StoredResponse(event.response, request_input))
        except StoreFailed as exc:
            _log.exception("response %s is lost to the store", event.response.id)
            if isinstance(event, ResponseFailed):
                return event
            failed = failed_response(event.response, exc, event.response.output)
            return ResponseFailed(event.sequence_number, failed)  # a client must not build on what is lost
        return event
