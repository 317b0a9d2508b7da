"""The models of a server as they are now: their states, what they do, and the tokens that they read and write."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
from prometheus_client.metrics import MetricWrapperBase

from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.workbench.live.memory import memory_of
from penstock.pipeline import metrics
from penstock.pipeline.tasks import in_thread
from penstock.pipeline.urls import host_of
from penstock.services.engines.engine import Backend, ModelState, ModelStatus, engine_of, has_several, title_of
from penstock.services.engines.vllm_http import VllmHttpEngine

READ, CACHED, WRITTEN = "input", "cached_input", "output"
"""The types of tokens that are counted, as `metrics.TOKENS` names them."""


class ServerNow(msgspec.Struct, frozen=True):
    """A server of a model."""

    address: str
    is_up: bool | None
    """None if that is not known."""


class ModelNow(msgspec.Struct, frozen=True, kw_only=True):
    """A model of this server."""

    name: str
    names: tuple[str, ...]
    """Its other names for clients, patterns among them."""
    kind: str
    is_read: bool
    """False if its answers are passed on unread, and so without tokens."""
    state: ModelState
    changed_at: float | None
    """The time of the change to its state, if that is known."""
    reason: str
    """Why it has failed, as the rest of a sentence."""
    running: int
    """The responses and requests that use it."""
    waiting: int
    """The responses and requests that wait for it."""
    servers: tuple[ServerNow, ...]
    """Its servers; none if it runs in this process."""
    is_child: bool
    """True if this server starts and ends its process."""
    pid: int | None
    memory_bytes: int | None
    """The resident memory of that process and of those that it has started, if it is known."""
    tokens_read: int
    """The tokens of its prompts since ``since``, also of responses that run."""
    tokens_cached: int
    """The part of them that its engine had in its prefix cache."""
    tokens_written: int


class ModelsNow(msgspec.Struct, frozen=True):
    """The models of this server."""

    now: float
    """The time of this answer."""
    since: float
    """The time since which this process counts tokens."""
    data: tuple[ModelNow, ...]


@dataclass(frozen=True)
class ModelsView:
    """Tells how the models of a server are, by what the server counts anyway."""

    scheduler: Scheduler
    since: float = field(default_factory=time.time)

    async def now(self) -> ModelsNow:
        """Return the models as they are now."""
        seen = _Seen(self.scheduler)
        pids = [each.pid for each in seen.statuses if each.pid is not None]
        memory = await in_thread(lambda: {pid: memory_of(pid) for pid in pids}) if pids else {}
        data = tuple(seen.model(each, memory.get(each.pid or 0)) for each in seen.statuses)
        return ModelsNow(time.time(), self.since, data)


@dataclass(frozen=True)
class _Seen:
    """One look at the models of a server."""

    scheduler: Scheduler

    @property
    def engine(self) -> Backend:
        return self.scheduler.engine

    @cached_property
    def statuses(self) -> Sequence[ModelStatus]:
        engine = self.engine
        return engine.statuses() if has_several(engine) else [self._only()]

    def _only(self) -> ModelStatus:
        """Return the status of a model that is the only one."""
        engine, (name, *names) = self.engine, self.engine.models
        is_alive = engine.is_alive
        return ModelStatus(
            name=name,
            names=tuple(names),
            kind="generate",
            state="ready" if is_alive else "failed",
            changed_at=None,
            reason="" if is_alive else "none of its engines answers",
            leases=len(self.scheduler.runs.running),
            waiting=0,
            urls=(),
            is_child=False,
            pid=None,
        )

    def model(self, status: ModelStatus, memory: int | None) -> ModelNow:
        """Return a model, with the bytes of its memory."""
        name = status.name
        return ModelNow(
            name=name,
            names=tuple(dict.fromkeys((*status.names, *self._aliases(name)))),
            kind=status.kind,
            is_read=name in self.engine.models,
            state=status.state,
            changed_at=status.changed_at,
            reason=status.reason,
            running=status.leases,
            waiting=status.waiting + self.waiting[name],
            servers=tuple(self._servers(status)),
            is_child=status.is_child,
            pid=status.pid,
            memory_bytes=memory,
            tokens_read=self.tokens[name, READ],
            tokens_cached=self.tokens[name, CACHED],
            tokens_written=self.tokens[name, WRITTEN],
        )

    def _aliases(self, name: str) -> Iterator[str]:
        return (pattern for pattern, served in self.scheduler.aliases.items() if self._title(served) == name)

    def _title(self, name: str | None) -> str | None:
        """Return the own name of a model, given by a name that is served; None if it no longer is."""
        if name is None or name not in self.engine.models:
            return None
        return title_of(self.engine, name) or self.engine.models[0]

    def _servers(self, status: ModelStatus) -> Iterator[ServerNow]:
        own = engine_of(self.engine, status.name) if status.name in self.engine.models else None
        if isinstance(own, VllmHttpEngine):
            yield from (ServerNow(each.address, each.is_healthy) for each in own.replicas.all)
        else:
            yield from (ServerNow(host_of(url) or "", None) for url in status.urls)

    @cached_property
    def waiting(self) -> Counter[str | None]:
        """The responses in the queue, and the turns that wait for a place in the engine, of each model."""
        counted = Counter(self._title(run.model) for run in self.scheduler.runs.queued)
        for labels, count in _series(metrics.TURNS_WAITING):
            counted[self._title(labels["model"])] += count
        return counted

    @cached_property
    def tokens(self) -> Counter[tuple[str | None, str]]:
        """The tokens of each model by kind: of responses that have ended in this process, and of those that run."""
        counted = Counter[tuple[str | None, str]]()
        for labels, count in _series(metrics.TOKENS):
            counted[self._title(labels["model"]), labels["type"]] += count
        runs = self.scheduler.runs
        for run in runs.running:
            if usage := runs.tallies.of(run.response.id).usage():
                title = self._title(run.model)
                counted[title, READ] += usage.input_tokens
                counted[title, CACHED] += usage.input_tokens_details.cached_tokens
                counted[title, WRITTEN] += usage.output_tokens
        return counted


def _series(metric: MetricWrapperBase) -> Iterator[tuple[Mapping[str, str], int]]:
    """Yield the labels and the value of each series of a metric of this process."""
    for family in metric.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield sample.labels, int(sample.value)
