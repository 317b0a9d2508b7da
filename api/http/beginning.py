"""The events of a response on their way to its client, and the beginning of the stream, as the client sees it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import cache

from penstock.pipeline import metrics
from penstock.pipeline.hot_path import join
from penstock.pipeline.protocol.events import Event, ResponseCreated, ResponseEvent, TerminalEvent
from penstock.pipeline.protocol.response import Response

_first_event, _first_token = cache(metrics.FIRST_EVENT_SECONDS.labels), cache(metrics.FIRST_TOKEN_SECONDS.labels)


class Beginning:
    """Measures the time from ``started``, when a request of an API arrived, to the first event and delta it gets."""

    __slots__ = ("_has_begun", "_labels", "_started")

    def __init__(self, api: str, model: str, started: float) -> None:
        self._labels = api, model
        self._started = started
        self._has_begun = False

    def is_over(self, event: Event) -> bool:
        """Take an event that was sent; return True for the first delta, after which nothing is measured."""
        if isinstance(event, ResponseCreated):
            self._has_begun = True
            _first_event(*self._labels).observe(time.monotonic() - self._started)
        if not self._has_begun or not isinstance(getattr(event, "delta", None), str):
            return False
        _first_token(*self._labels).observe(time.monotonic() - self._started)
        return True


class Delivery:
    """The events of one response, before they are rewritten for its client.

    Their first is awaited apart, because its error keeps the response from beginning.  An event counts as sent when its
    reader takes the next one; ``beginning``, if given, measures the first ones.
    """

    __slots__ = ("_beginning", "_events", "_last")

    def __init__(self, events: AsyncIterator[ResponseEvent], beginning: Beginning | None = None) -> None:
        self._events = events
        self._beginning = beginning
        self._last: ResponseEvent | None = None

    async def begin(self) -> None:
        """Await the first event, and raise its error."""
        self._last = await anext(self._events)

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        """Yield the events, the first one included."""
        assert self._last is not None
        yield self._last
        if self._beginning and not self._beginning.is_over(self._last):
            async for event in self._events:
                self._last = event
                yield event
                if self._beginning.is_over(event):
                    break
        join(has_begun=True)
        async for event in self._events:
            self._last = event
            yield event

    @property
    def has_ended(self) -> bool:
        """True if the last event of the response is among those that were sent."""
        return isinstance(self._last, TerminalEvent)

    @property
    def response(self) -> Response:
        """The response as it ended, once it has."""
        if not isinstance(self._last, TerminalEvent):
            raise RuntimeError("the stream ended without a terminal event")  # noqa: TRY004 - a bug
        return self._last.response
