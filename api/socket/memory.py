"""The responses that connections remember: the latest of each lane, with the history that continues it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from penstock.api.open_sockets import Latest
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.history import History, opening
from penstock.pipeline.yield_point import YieldPoint
from penstock.services.lru_cache import LruCache
from penstock.services.runs.run import Run

_encode = msgspec.msgpack.Encoder().encode


@dataclass
class LaneMemory:
    """The latest responses of one connection, by lane; ``shared`` holds those of all connections."""

    shared: LruCache[Latest]
    owner: str = ""
    _lanes: dict[str | None, str] = field(default_factory=dict)
    """The id of the latest response of each lane."""

    def find(self, response_id: str | None) -> Latest | None:
        """Return a remembered response, of any lane."""
        is_ours = response_id is not None and response_id in self._lanes.values()
        return self.shared.get(response_id) if is_ours and response_id else None

    def remember(self, lane: str | None, latest: Latest) -> None:
        """Remember a response, and forget the one before it in its lane."""
        self._drop(lane)
        self._lanes[lane] = latest.response_id
        self.shared.put(latest.response_id, latest, latest.size, self.owner)

    def forget(self, lane: str | None, response_id: object) -> None:
        """Forget the latest response of a lane if it has this id."""
        if self._lanes.get(lane) == response_id:
            self._drop(lane)

    def clear(self) -> None:
        """Forget all responses."""
        for lane in tuple(self._lanes):
            self._drop(lane)

    def _drop(self, lane: str | None) -> None:
        if lane in self._lanes:
            self.shared.drop(self._lanes.pop(lane))


async def latest_of(resolved: ResolvedRequest, run: Run, parent: Latest | None, sent: int) -> Latest:
    """Return a response that has ended, for what continues it; ``sent`` are the bytes of its request."""
    may_yield = YieldPoint()
    items = (*resolved.history, *resolved.facts.input, *run.response.output)
    results, before = {**resolved.results, **run.results}, parent.history if parent else History(())
    tokens = {**before.tokens, **resolved.tokens, **run.tokens}  # also those of other models that have answered before
    writers = {**before.writers, **dict.fromkeys((*resolved.tokens, *run.tokens), run.model)}
    size = sent + (parent.size if parent else 0)
    for part in (*(() if parent else resolved.history), *run.response.output, run.tokens, *run.results.values()):
        size += len(_encode(part))
        await may_yield()
    begun = resolved.facts.origin.opening or opening(resolved.facts.input, run.response.id)
    return Latest(run.response.id, History(items, tokens, results, opening=begun, writers=writers), size)
