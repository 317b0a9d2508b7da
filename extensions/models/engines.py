"""The engines of several models, which stand for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from penstock.extensions.models.catalogue import Catalogue, Model, Names
from penstock.extensions.models.life import OnDemand
from penstock.pipeline.errors import ModelUnavailable
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.services.engines.engine import UNLIMITED, Backend, Engine, ModelState, ModelStatus

ANY_TOKEN = 2**31
"""Upper bound of token ids where no model is known: the stage ``generate`` of a model checks its own."""


@dataclass(frozen=True)
class Closed:
    """The engine of a model that is not open now: what is known of it.

    It claims all that an engine may be able to do: the stage ``generate`` of its model checks prompts once it is open.
    """

    model: Model
    scores_prompts: Literal[True] = True
    scores_tokens: Literal[True] = True

    @property
    def models(self) -> tuple[str, ...]:
        """The names of its model."""
        return tuple(self.model.names)

    @property
    def context_length(self) -> int:
        """That of its engine, once that has been open."""
        return self.model.context_length or UNLIMITED

    @property
    def vocabulary_size(self) -> int:
        """That of any: its engine checks the tokens once it is open."""
        return ANY_TOKEN

    @property
    def is_alive(self) -> bool:
        """True unless the latest start has failed."""
        return self.model.life.state != "failed"

    async def cancel(self, response_id: str) -> bool:
        """Cancel nothing: it generates nothing."""
        return False

    async def stop(self) -> None:
        """Stop nothing."""

    async def close(self) -> None:
        """Close nothing."""


@dataclass(frozen=True)
class ManyEngines:
    """The engines of all models.  Prompts reach them through the stages of their models."""

    catalogue: Catalogue
    context_length: int = UNLIMITED
    vocabulary_size: int = ANY_TOKEN

    @property
    def models(self) -> Names:
        """The names of all models."""
        return self.catalogue.names

    @property
    def is_alive(self) -> bool:
        """True if any model can answer, or can be opened: one that has failed is tried again."""
        return any(model.engine is None or model.engine.is_alive for model in self.catalogue.all.values())

    def of(self, model: str) -> Backend:
        """Return the engine of a model, or what is known of it if it is not open."""
        named = self.catalogue.of(model)
        return named.engine or Closed(named)

    def title(self, model: str) -> str:
        """Return the own name of a model."""
        return self.catalogue.of(model).name

    @property
    def kinds(self) -> Mapping[str, str]:
        """The names of all models, each with what the model does."""
        return {name: model.table.kind for model in self.catalogue.all.values() for name in model.names}

    def state(self, model: str) -> ModelState:
        """Return the state of a model; the servers of others whose answers are passed on are not opened here."""
        return _state(next(each for each in self.catalogue.all.values() if model in each.names))

    def statuses(self) -> Sequence[ModelStatus]:
        """Return what is known of each model."""
        return [_status(model) for model in self.catalogue.all.values()]

    @property
    def _open(self) -> list[Engine]:
        models = (*self.catalogue.all.values(), *self.catalogue.retiring)
        return [model.engine for model in models if model.engine]

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        """Run one generation on the engine of the model of a prompt, if it is open."""
        model = self.catalogue.of(prompt.facts.model)
        if model.engine is None:
            raise ModelUnavailable(model.name, "it is not up")
        async with model.engine.open(prompt) as frames:
            yield frames

    @asynccontextmanager
    async def leased(self, model: str) -> AsyncGenerator[str, None]:
        """Have a model that penstock starts stay up for the length of a block; yield the URL of its process."""
        one = self.catalogue.all[model]
        assert isinstance(one.life, OnDemand)
        lease = await one.life.acquire(one.wait)
        try:
            yield one.life.url
        finally:
            lease.release()

    async def cancel(self, response_id: str) -> bool:
        """End the generations for a response."""
        return any([await engine.cancel(response_id) for engine in self._open])

    async def stop(self) -> None:
        """End all generations."""
        await asyncio.gather(*(engine.stop() for engine in self._open))

    async def close(self) -> None:
        """End all models."""
        await self.catalogue.close()


def _is_foreign(model: Model) -> bool:
    """Return True if its servers answer without being opened here: whether they are up is not known."""
    return not model.table.generates and model.table.command is None


def _has_died(model: Model) -> bool:
    return model.life.state == "ready" and model.engine is not None and not model.engine.is_alive


def _state(model: Model) -> ModelState:
    if _is_foreign(model):
        return "ready"
    return "failed" if _has_died(model) else model.life.state


def _status(model: Model) -> ModelStatus:
    life, table = model.life, model.table
    child = life if isinstance(life, OnDemand) else None
    urls = () if model.settings.engine_factory else tuple(model.settings.engine)
    return ModelStatus(
        name=model.name,
        names=tuple(table.names),
        kind=table.kind,
        state=_state(model),
        changed_at=None if _is_foreign(model) or _has_died(model) else life.changed_at,
        reason="none of its engines answers" if _has_died(model) else life.reason,
        leases=life.running,
        waiting=life.waiting,
        urls=(child.url,) if child else urls,
        is_child=child is not None,
        pid=child.pid if child else None,
    )
