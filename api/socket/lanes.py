"""The lanes of a connection: the responses of one lane run one after another, those of different lanes side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from msgspec import UNSET

from penstock.pipeline.errors import InvalidRequest

Job = TypeVar("Job")

MOST_RUNNING = 16
"""The most responses of one connection that run at once; others wait."""

MOST_NAMED = 32
"""The most names of lanes that one connection may use in its life."""

_NAME = re.compile(r"[\w.-]{1,256}", re.ASCII)

_WRONG_NAME = (
    "The 'stream_id' field must be a non-empty string with at most 256 characters and may only contain letters, "
    "numbers, underscores, hyphens, and periods."
)
_TOO_MANY_NAMES = (
    f"This WebSocket connection has reached its maximum number of distinct stream IDs ({MOST_NAMED}). Reuse an existing"
    " stream_id or open a new WebSocket connection."
)


class InvalidStreamId(InvalidRequest):
    """The ``stream_id`` of an event is no name of a lane."""

    code = "invalid_stream_id"

    def __init__(self) -> None:
        super().__init__(_WRONG_NAME, param="stream_id")


class TooManyStreamIds(InvalidRequest):
    """The connection has used all names of lanes that it may use."""

    code = "websocket_stream_limit_reached"

    def __init__(self, name: str) -> None:
        super().__init__(_TOO_MANY_NAMES, param="stream_id")
        self.name = name


@dataclass
class Lanes(Generic[Job]):
    """State machine, one per connection: it decides which jobs run now, and which wait.

    The name of the default lane is None.
    """

    _names: set[str] = field(default_factory=set)
    _running: set[str | None] = field(default_factory=set)
    _waiting: list[tuple[str | None, Job]] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        """The number of jobs that wait."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """True if no job runs or waits."""
        return not self._running and not self._waiting

    def enter(self, name: object) -> str | None:
        """Return the lane of a ``stream_id``; raise `InvalidStreamId` or `TooManyStreamIds` if it cannot be used."""
        if name is UNSET:
            return None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidStreamId
        if name not in self._names and len(self._names) == MOST_NAMED:
            raise TooManyStreamIds(name)
        self._names.add(name)
        return name

    def add(self, lane: str | None, job: Job) -> Iterator[tuple[str | None, Job]]:
        """Add a job to the end of its lane; yield it if it runs now."""
        self._waiting.append((lane, job))
        return self._startable()

    def end(self, lane: str | None) -> Iterator[tuple[str | None, Job]]:
        """End the running job of a lane, and yield those that run now."""
        self._running.discard(lane)
        return self._startable()

    def clear(self) -> list[Job]:
        """Remove and return the jobs that wait."""
        waiting, self._waiting = self._waiting, []
        return [job for _, job in waiting]

    def _startable(self) -> Iterator[tuple[str | None, Job]]:
        """Yield the oldest jobs whose lanes are free, while there is room."""
        position = 0
        while position < len(self._waiting) and len(self._running) < MOST_RUNNING:
            lane, job = self._waiting[position]
            if lane in self._running:
                position += 1
                continue
            del self._waiting[position]
            self._running.add(lane)
            yield lane, job
