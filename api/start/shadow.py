"""Setup of ``--shadow``: a second engine that reads a share of the answers again."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.engines.engine import Engine
from penstock.services.engines.replicas import UnusableServer
from penstock.services.engines.vllm_http import start_vllm_http
from penstock.services.shadowing import Shadow
from penstock.stages.optional.shadow import Shadowed

logger = logging.getLogger(__name__)


@asynccontextmanager
async def shadowed(
    settings: Settings, running: RunningEngine, pipeline: Pipeline[CreateResponse, ResponseEvent]
) -> AsyncGenerator[Pipeline[CreateResponse, ResponseEvent], None]:
    """Yield the pipeline, a share of whose turns the engine of ``--shadow`` reads again, for the length of a block.

    Without ``--shadow``, or without a stage ``generate``, it is the same pipeline.
    """
    if not settings.shadow or "generate" not in pipeline.names():
        yield pipeline
        return

    async def connect() -> Engine:
        key = settings.shadow_key.get_secret_value() if settings.shadow_key else None
        engine = await start_vllm_http(settings.shadow, api_key=key, wait=math.inf)
        is_harmony = running.model.encoding == "harmony"
        if engine.speaks_harmony not in (None, is_harmony):
            await engine.close()
            raise UnusableServer("The model of --shadow has other tokens: only one of both speaks Harmony.")
        logger.info("The shadow %s reads %g of the turns again", engine.root, settings.shadow_share)
        return engine

    shadow = Shadow(connect)
    stage = Shadowed(pipeline.stage("generate"), shadow.take, settings.shadow_share)
    async with shadow.running():
        yield pipeline.replace("generate", stage)
