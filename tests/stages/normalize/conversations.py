"""Bodies on their way through the stage, and answers in its store."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from time import process_time
from timeit import timeit
from typing import Any

from msgspec.structs import replace

from pipeline.frames import Conversation
from pipeline.protocol.items import OutputItem
from pipeline.protocol.reading import read_request
from pipeline.record import replay
from stages.normalize.normalize import Normalize
from stages.persist.store import NoStore, ResponseStore, StoredResponse

MODEL = "gpt-oss-20b"
NOW = 1_790_000_000.9


async def normalized(store: ResponseStore, suffix: str = "1", /, **body: Any) -> Conversation:
    """The conversation of one body, whose response gets the id ``resp_<suffix>``."""
    stage = Normalize(store, (MODEL,), draw=lambda: suffix, clock=lambda: NOW)
    async with aclosing(stage(replay([await read_request(json.dumps(body).encode())]))) as conversations:
        (conversation,) = [conversation async for conversation in conversations]
    return conversation


def cost(**body: Any) -> float:
    """Seconds of CPU, those of the garbage collector left out, that it takes to make one body a conversation."""
    return min(
        timeit(lambda: asyncio.run(normalized(NoStore(), **body)), timer=process_time, number=1) for _ in range(3)
    )


async def answered(store: ResponseStore, suffix: str, /, *output: OutputItem, **body: Any) -> Conversation:
    """The same, and ``output`` is what the model answered: the response is stored."""
    conversation = await normalized(store, suffix, **body)
    response = replace(conversation.response, status="completed", output=output)
    await store.put(StoredResponse(response, conversation.input))
    return conversation
