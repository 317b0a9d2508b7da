"""The resource of batches: the runner, and the routes of both APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from penstock.api.resources.resources import ServerParts
from penstock.extensions.batches.answering import Answering
from penstock.extensions.batches.anthropic_routes import anthropic_routes
from penstock.extensions.batches.openai_form import output_line
from penstock.extensions.batches.openai_routes import openai_routes
from penstock.extensions.batches.room import Bounds, Room
from penstock.extensions.batches.runner import BatchRunner
from penstock.extensions.batches.stored_batches import StoredBatches
from penstock.extensions.batches.validation import Validation
from penstock.extensions.batches.yielding import Yielding


@asynccontextmanager
async def batches(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Run batches for the length of a block, and yield the routes to them."""
    settings, scheduler = parts.settings, parts.scheduler
    stored = scheduler.store.part(StoredBatches)
    stored.keep, stored.notifies = settings.batch_ttl, settings.webhook_secret is not None
    bounds, yielding = Bounds(scheduler.admission, stored), Yielding.of(parts)
    answering = Answering(parts, yielding)
    runner = BatchRunner(
        scheduler,
        answer=answering.answer,
        room=yielding.room,
        validate=Validation(parts, stored, bounds.within),
        output_line=output_line,
        keys=parts.keys,
        idle_share=lambda: yielding.idle_share,
    )
    async with runner.running():
        room = Room(parts, stored, bounds=bounds, runner=runner, answering=answering)
        yield (*openai_routes(room), *anthropic_routes(room))
