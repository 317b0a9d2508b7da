"""The models behind one door: who they are, which names they have, and which of them are up."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from penstock.api.settings import Settings
from penstock.api.settings.model_settings import ModelTable
from penstock.api.start.assembly import RunningEngine
from penstock.extensions.models.life import Lease
from penstock.pipeline.core import Stage
from penstock.pipeline.errors import ModelAway, ModelUnavailable
from penstock.pipeline.frames import RequestFacts
from penstock.services.engines.engine import Engine, ModelState
from penstock.services.model_names import allowed_names, is_name
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.stages.normalize.frames import ModelTraits
from penstock.stages.normalize.recall import all_models
from penstock.stages.responses import ModelStages


class Life(Protocol):
    """The life of a model: `OnDemand` or `Standing`."""

    state: ModelState
    reason: str
    changed_at: float

    @property
    def running(self) -> int:
        """The leases that are held."""
        ...

    @property
    def waiting(self) -> int:
        """The requests that wait for a lease."""
        ...

    async def acquire(self, wait: float | None) -> Lease[RunningEngine | None]:
        """Return a lease as soon as it is up; raises `ModelUnavailable`."""
        ...

    async def retire(self) -> None:
        """Close when no request waits, and no lease is held."""
        ...

    async def close(self) -> None:
        """Close it, and refuse requests from now on."""
        ...


@dataclass(eq=False)
class Model:
    """A model behind the door: its table, its own settings, and its life."""

    name: str
    table: ModelTable
    settings: Settings
    life: Life = field(init=False)
    engine: Engine | None = None
    """Its engine, while it is open."""
    stages: ModelStages | None = None
    """Its stages, once it has been open: its tokenizer is kept then."""
    turn: Mapping[str, Stage[Any, Any]] = field(default_factory=dict)
    """The stages of one of its turns, once it has been open; ``generate`` needs that it still is."""
    context_length: int | None = None
    """The context length of its engine, once it has been open."""

    @property
    def names(self) -> list[str]:
        """The names by which clients may ask for it, its own first; patterns are aliases."""
        return [self.name, *filter(is_name, self.table.names)]

    def upstream(self, name: str) -> str:
        """Return the name by which its engine knows it: an adapter has its own, all others mean the model."""
        if self.engine is None:
            raise ModelUnavailable(self.name, "its process has ended")
        return name if name in self.engine.models else self.engine.models[0]

    @property
    def wait(self) -> float | None:
        """The seconds that a request waits for it."""
        return self.settings.engine_wait


class Names(Sequence[str]):
    """The names of models that clients may give, each with its model; they change with the settings."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}

    @overload
    def __getitem__(self, position: int) -> str: ...

    @overload
    def __getitem__(self, position: slice) -> list[str]: ...

    def __getitem__(self, position: int | slice) -> str | list[str]:
        return [*self.models][position]

    def __len__(self) -> int:
        return len(self.models)

    def __iter__(self) -> Iterator[str]:
        return iter(self.models)

    def __contains__(self, name: object) -> bool:
        return name in self.models


class Catalogue:
    """The models of a server, and the leases of its responses."""

    def __init__(self) -> None:
        self.all: dict[str, Model] = {}
        """The models by their own names, in the order of the settings."""
        self.names = Names()
        """The models that generate, by all of their names."""
        self.aliases: dict[str, str] = {}
        """Patterns of names, each with the own name of a model that generates."""
        self.allowed: Callable[[str], Collection[str] | None] = all_models
        """Gives the patterns of the names of models that an owner may use; None for all."""
        self.runs = RunRegistry(Store(NullDatabase()))
        """The runs of the server, once its pipeline is made."""
        self.retry_seconds = 1.0
        """Seconds before retrying a turn that an engine had no room for."""
        self.begun = asyncio.Event()
        """Set once the runs of the server are known, without which no model can be opened."""
        self._leases: dict[str, list[tuple[Model, Lease[RunningEngine | None]]]] = defaultdict(list)
        self.retiring: dict[Model, asyncio.Task[None]] = {}
        """Models that are no longer served, and go on for the responses that they run."""

    def take(self, models: Mapping[str, Model], aliases: Mapping[str, str]) -> None:
        """Serve these models from now on; those that are no longer among them retire."""
        gone = [model for name, model in self.all.items() if models.get(name) is not model]
        self.all = dict(models)
        generating = [model for model in models.values() if model.table.generates]
        self.names.models = {name: model for model in generating for name in model.names}
        self.aliases.clear()
        self.aliases.update({pattern: name for pattern, name in aliases.items() if name in self.names})
        for model in gone:
            self.retiring[model] = asyncio.create_task(self._retire(model))

    async def _retire(self, model: Model) -> None:
        try:
            await model.life.retire()
        finally:
            del self.retiring[model]

    def turns_begin(self, runs: RunRegistry, retry_seconds: float) -> None:
        """Know the runs of the server, for the turns of the models."""
        self.runs, self.retry_seconds = runs, retry_seconds
        self.begun.set()

    def of(self, name: str) -> Model:
        """Return the model of a name that is served; raises `ModelAway` if it no longer is."""
        model = self.names.models.get(name)
        if model is None:
            raise ModelAway(repr(name))
        return model

    def of_response(self, facts: RequestFacts) -> Model:
        """Return the model of a request: the one that its response holds, also if that is no longer served."""
        held = (model for model, _ in self._leases.get(facts.response_id, ()) if facts.model in model.names)
        return next(held, None) or self.of(facts.model)

    def instead(self, model: Model, owner: str) -> str | None:
        """Return the model that answers an owner in place of another one; None if there is none that it may use."""
        other = self.all.get(model.table.instead or "")
        if other is None:
            return None
        usable = allowed_names(self.names, self.aliases, self.allowed(owner))
        return other.name if any(name in usable for name in other.names) else None

    async def traits_of(self, name: str, owner: str) -> ModelTraits:
        """Return the traits of a model, which is loaded if it has never been; or those of the one that stands in."""
        model = self.of(name)
        if model.stages is None:
            try:
                (await model.life.acquire(model.wait)).release()
            except ModelUnavailable:
                other = self.instead(model, owner)
                if other is None:
                    raise
                return await self.traits_of(other, owner)
        assert model.stages is not None
        return model.stages.traits

    async def stage(self, facts: RequestFacts, name: str) -> Stage[Any, Any]:
        """Return a stage of the turns of the model that a request is for, which is loaded if it has never been."""
        model = self.of_response(facts)
        if not model.turn:
            self._let_go(facts.response_id, model)
            (await model.life.acquire(model.wait)).release()
        return model.turn[name]

    async def held(self, facts: RequestFacts) -> Model:
        """Return the model of a request, which its response holds from now on to its end."""
        model = self.of_response(facts)
        leases = self._leases[facts.response_id]
        if not any(held is model and _is_of(lease, model) for held, lease in leases):
            self._let_go(facts.response_id, model)
            leases.append((model, await model.life.acquire(model.wait)))
        return model

    def _let_go(self, response_id: str, model: Model) -> None:
        """Let go of what a model may wait for: those that share places, and its own process that has ended.

        Else a response would wait for itself, or two responses for each other.
        """
        leases = self._leases.get(response_id, [])
        for held, lease in [*leases]:
            if held is model or (held.table.groups and model.table.groups):
                leases.remove((held, lease))
                lease.release()

    def release(self, response_id: str) -> None:
        """Let go of the models that a response holds."""
        for _, lease in self._leases.pop(response_id, ()):
            lease.release()

    async def close(self) -> None:
        """End all models."""
        await asyncio.gather(*(model.life.close() for model in self.all.values()), *self.retiring.values())


def _is_of(lease: Lease[RunningEngine | None], model: Model) -> bool:
    """Return True if a lease is of the present life of a model, whose process may have ended since."""
    return lease.value is not None and lease.value.engine is model.engine
