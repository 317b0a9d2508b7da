"""The door of the room: it starts several models for one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

from penstock.api.settings import Settings
from penstock.api.settings.model_settings import ModelTable
from penstock.api.start.assembly import RunningEngine
from penstock.api.start.backends import over_http, start
from penstock.extensions.models.catalogue import Catalogue, Model
from penstock.extensions.models.child import ChildSpec
from penstock.extensions.models.engines import ManyEngines
from penstock.extensions.models.life import OnDemand
from penstock.extensions.models.stages import stages_of
from penstock.extensions.models.standing import Standing
from penstock.extensions.models.turns import Groups
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.plugins import load
from penstock.services.engines.engine import Engine, TextBackend
from penstock.services.model_names import is_name
from penstock.services.own_hosts import label_of
from penstock.stages.normalize.tool_types import named
from penstock.stages.responses import ModelStages

CHILD_WAIT, SERVER_WAIT = 30.0, 5.0
"""Seconds that an engine gets to answer: one whose process is up, and one that others start."""


@asynccontextmanager
async def several(settings: Settings) -> AsyncGenerator[RunningEngine, None]:
    """Run the models of the settings for the length of a block.

    vLLM in this process loads its model first.  All others are opened as they are used.
    """
    async with AsyncExitStack() as closing:
        here = await closing.enter_async_context(start(own)) if (own := settings.in_this_process) else None
        house = House(settings, here)
        closing.push_async_callback(house.catalogue.close)
        engine = ManyEngines(house.catalogue)
        yield RunningEngine(
            cast("Engine", engine),
            stages_of(house.catalogue),
            settings_of=lambda model: house.catalogue.of(model).settings,
            aliases=house.catalogue.aliases,
            take=house.take,
        )


class House:
    """All models of a server, and the tasks of those that it starts and ends."""

    def __init__(self, settings: Settings, here: RunningEngine | None) -> None:
        self.catalogue = Catalogue()
        self._here = here
        self._own = settings.in_this_process
        self._groups = Groups()
        self._tasks: set[asyncio.Task[None]] = set()
        self.take(settings)

    def take(self, settings: Settings) -> None:
        """Serve the models of these settings from now on; those whose settings are as they were go on.

        Raises `CannotStart` for another model of vLLM in this process than the one that it has loaded.
        """
        if settings.in_this_process not in (None, self._own):
            raise CannotStart("only a restart changes the model that vLLM runs in this process")
        self._groups.resize(settings.model_groups)
        models = dict[str, Model]()
        for name, table in settings.models.items():
            own, known = settings.of_model(name), self.catalogue.all.get(name)
            if known and known.table == table and known.settings == own:
                models[name] = known
                continue
            models[name] = self._made(Model(name, table, own))
        patterns = {name: model.name for model in models.values() for name in model.table.names if not is_name(name)}
        self.catalogue.take(models, settings.aliases | patterns)

    def _made(self, model: Model) -> Model:
        """Give a model its life."""
        if model.table.command is None:
            model.life = life = Standing(model.name, partial(self._opened, model))
            if model.table.is_here:
                life.begin()  # its weights are loaded
            return model
        spec = _spec(model.table, model.settings)
        model.life = on_demand = OnDemand(model.name, spec, self._groups, partial(self._opened, model))
        task = asyncio.create_task(on_demand.run(), name=f"model {model.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return model

    @asynccontextmanager
    async def _opened(self, model: Model, url: str | None = None) -> AsyncGenerator[RunningEngine | None, None]:
        """Open the engine of a model, at the URL of its process if it has one, for the length of a block.

        A model whose answers are passed on has none.
        """
        if not model.table.generates:
            yield None
            return
        await self.catalogue.begun.wait()
        async with self._running(model, url) as running:
            if isinstance(running.engine, TextBackend):
                raise CannotStart(f"[models.{model.name}]: an engine of texts cannot stand beside other models")
            stages = model.stages or self._with_tools(model, running.model)
            turn = stages.turn(running.engine, self.catalogue.runs, self.catalogue.retry_seconds)
            options = model.settings.option_tables
            async with load(list(options), options)(turn) as edited:
                model.engine, model.stages = running.engine, stages
                model.context_length = running.engine.context_length
                model.turn = {step.name: step.stage for step in edited.steps}
                try:
                    yield RunningEngine(running.engine, stages)
                finally:
                    model.engine = None

    def _with_tools(self, model: Model, stages: ModelStages) -> ModelStages:
        """Return the stages of a model that may use the tools of its table alone, if it names some."""
        if model.table.tools is None:
            return stages
        own = [label_of(name) for name in model.settings.tool]
        return replace(stages, traits=replace(stages.traits, tools=named(model.table.tools, own)))

    def _running(self, model: Model, url: str | None) -> AbstractAsyncContextManager[RunningEngine]:
        if url is not None:
            return over_http(model.settings.model_copy(update={"engine": [url]}), CHILD_WAIT, model.stages)
        if model.table.is_here:
            assert self._here is not None
            return nullcontext(self._here)
        if model.settings.engine_factory:
            return start(model.settings)
        return over_http(model.settings, SERVER_WAIT, model.stages)


def _spec(table: ModelTable, settings: Settings) -> ChildSpec:
    return ChildSpec(
        table.command or "",
        idle=table.idle,
        sleep=table.sleep,
        start_timeout=table.start_timeout,
        groups=tuple(table.groups),
        priority=table.priority,
        key=settings.engine_key.get_secret_value() if settings.engine_key else None,
    )
