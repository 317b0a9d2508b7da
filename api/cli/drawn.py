"""The pipeline that would serve a model, drawn without starting the model."""

from __future__ import annotations

from penstock.api.settings import Settings
from penstock.api.settings.engine_settings import DEFAULT_MODEL
from penstock.api.start.assembly import RunningEngine, rehearsed
from penstock.api.start.backends import loading, over_http, planned, start
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.recordings.converse import partly_run

CHECK_WAIT = 3.0
"""Seconds to wait for an engine elsewhere, to check the settings."""


async def drawn(settings: Settings) -> str:
    """Describe what would serve the model, for ``--print-pipeline``, without starting a model."""
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
