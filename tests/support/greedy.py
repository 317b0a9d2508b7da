"""A stage for servers under test that makes every request greedy, because many clients set no temperature.

The option ``--with tests/support/greedy.py:install`` adds it to a server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from msgspec.structs import replace

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import ResolvedRequest, with_facts
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse


async def greedy(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    async for conversation in source:
        yield with_facts(conversation, sampling=replace(conversation.facts.sampling, temperature=0.0))


def install(pipeline: Pipeline[CreateResponse, ResponseEvent]) -> Pipeline[CreateResponse, ResponseEvent]:
    return pipeline.insert_after("normalize", "greedy", greedy)
