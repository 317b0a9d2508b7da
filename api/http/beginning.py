"""The beginning of a stream, as its client sees it."""

from __future__ import annotations

import time

from penstock.pipeline import metrics
from penstock.pipeline.protocol.events import Event, ResponseCreated


class Beginning:
    """Measures the time from ``started``, when a request arrived, to the first event and the first delta it gets."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._model: str | None = None

    def is_over(self, event: Event) -> bool:
        """Take an event that was sent; return True for the first delta, after which nothing is measured."""
        if isinstance(event, ResponseCreated):
            self._model = event.response.model
            metrics.FIRST_EVENT_SECONDS.labels(self._model).observe(time.monotonic() - self._started)
        if self._model is None or not isinstance(getattr(event, "delta", None), str):
            return False
        metrics.FIRST_TOKEN_SECONDS.labels(self._model).observe(time.monotonic() - self._started)
        return True
