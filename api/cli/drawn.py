"""The pipeline that would serve a model, drawn without starting the model."""

from __future__ import annotations

import asyncio
import shlex
import shutil

import aiohttp

from penstock.api.settings import Settings
from penstock.api.settings.engine_settings import DEFAULT_MODEL
from penstock.api.settings.model_settings import ModelTable
from penstock.api.start.assembly import RunningEngine, rehearsed
from penstock.api.start.backends import loading, model_here, over_http, planned, stages_elsewhere, start
from penstock.api.start.parts import UNSTARTABLE
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.foreign_errors import named_error
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.recordings.converse import partly_run

CHECK_WAIT = 3.0
"""Seconds to wait for an engine elsewhere, to check the settings."""


async def drawn(settings: Settings) -> str:
    """Describe what would serve the model, for ``--print-pipeline``, without starting a model."""
    if settings.models:
        lines = [f"{name} {await _known_of(settings, name)}" for name in settings.models]
        return "\n".join((*lines, "", await drawn_of_several(settings)))
    if not settings.engine:
        with loading(settings):
            plan, model = planned(settings)
        return await _drawn(settings, RunningEngine(ScriptedEngine(models=plan.models), model), "vLLM in this process")
    own = settings.recordings or settings.engine_factory
    async with start(settings) if own else over_http(settings, wait=CHECK_WAIT) as running:
        at = "" if own else "vLLM at "
        return await _drawn(settings, running, f"{at}{' and '.join(settings.engine)}")


async def _drawn(settings: Settings, running: RunningEngine, engine: str) -> str:
    model = settings.model or (running.engine.models[0] if settings.engine else DEFAULT_MODEL)
    place = "" if settings.recordings else f", and runs on {engine}"
    pipeline = await rehearsed(settings, running)
    return f"{model} {running.model.description}{place}.\n\n{pipeline.drawn(partly_run(pipeline))}"


async def drawn_of_several(settings: Settings) -> str:
    """Draw the pipeline that is the same for all models of the settings, and start none of them."""
    elsewhere = {name: table.apart() for name, table in settings.models.items()}
    async with start(settings.model_copy(update={"models": elsewhere})) as running:
        pipeline = await rehearsed(settings, running)
    return pipeline.drawn(partly_run(pipeline))


async def _known_of(settings: Settings, name: str) -> str:
    try:
        return await described(settings, name)
    except UNSTARTABLE as error:
        return f"cannot be described: {error}"


def bonds(table: ModelTable) -> str:
    """Name what binds a model to others and to its place, as its table does."""
    groups = f"; groups {', '.join(table.groups)}" if table.groups else ""
    idle = f"; idle {table.idle:g} s" if table.idle is not None else ""
    others = (
        f"; {key} {value}"
        for key, value in (("priority", table.priority), ("instead", table.instead), ("summaries", table.summaries))
        if value
    )
    return f"{groups}{idle}{''.join(others)}"


async def described(settings: Settings, name: str) -> str:
    """Describe one of several models, as far as that is known without starting it.

    Raises one of `UNSTARTABLE` if its files cannot be read, or its engine does not answer.
    """
    return f"{await _described(settings, name)}{bonds(settings.models[name])}"


async def _described(settings: Settings, name: str) -> str:
    table, own = settings.models[name], settings.of_model(name)
    if table.is_here:
        model_here(own)
        with loading(own):
            _, model = planned(own)
        return f"{model.description}, and runs on vLLM in this process"
    if table.command:
        program = shutil.which(shlex.split(table.command)[0])
        return f"{_of_files(own) or 'is known once it runs'}, and is started by {program}"
    if not table.generates:
        await asyncio.gather(*(_reach(url) for url in table.engine))
        return f"is passed on, of the kind {table.kind}, to {' and '.join(table.engine)}"
    async with start(own) if own.engine_factory else over_http(own, wait=CHECK_WAIT) as running:
        return f"{running.model.description}, and runs on {' and '.join(own.engine)}"


def _of_files(settings: Settings) -> str:
    """Describe a model by its files, if the settings name them."""
    if not settings.model:
        return ""
    try:
        return stages_elsewhere(settings, settings.model).description
    except (OSError, ValueError) as error:
        raise CannotStart(f"{settings.model}: its files cannot be read ({named_error(error)})") from error


async def _reach(url: str) -> None:
    """Raise `CannotStart` if no server answers at a URL; which one it is cannot be known."""
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CHECK_WAIT)) as session, session.get(url):
            pass
    except (aiohttp.ClientError, TimeoutError) as error:
        raise CannotStart(f"{url} does not answer ({named_error(error)})") from error
