"""Bodies on their way through the stage, and answers in its store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing
from time import process_time
from timeit import timeit
from typing import Any, TypeAlias

from msgspec.structs import replace

from pipeline.frames import Conversation, TokenIds
from pipeline.protocol.items import OutputItem
from pipeline.protocol.reading import read_request
from pipeline.protocol.response import ResponseStatus
from pipeline.record import replay
from stages.normalize.normalize import Normalize
from stages.persist.database import Nowhere
from stages.persist.store import Store, StoredResponse

Json: TypeAlias = Any

MODEL = "gpt-oss-20b"
NOW = 1_790_000_000.9
ALL: frozenset[str] = frozenset({"python", "browser", "container"})


async def normalized(
    store: Store,
    suffix: str = "1",
    /,
    *,
    owner: str = "",
    hosted: frozenset[str] = frozenset(),
    labels: frozenset[str] = frozenset(),
    sees: bool = False,
    **body: Any,
) -> Conversation:
    """The conversation of one body, whose response gets the id ``resp_<suffix>``."""
    stage = Normalize(
        store, (MODEL,), draw=lambda: suffix, clock=lambda: NOW, hosted=hosted, labels=labels, sees_images=sees
    )
    request = (await read_request(json.dumps(body).encode())).owned_by(owner)
    async with aclosing(stage(replay([request]))) as conversations:
        (conversation,) = [conversation async for conversation in conversations]
    return conversation


def cost(**body: Any) -> float:
    """Seconds of CPU, those of the garbage collector left out, that it takes to make one body a conversation."""
    return min(
        timeit(lambda: asyncio.run(normalized(Store(Nowhere()), **body)), timer=process_time, number=1)
        for _ in range(3)
    )


async def answered(
    store: Store,
    suffix: str,
    /,
    *output: OutputItem,
    status: ResponseStatus = "completed",
    tokens: Mapping[str, TokenIds] | None = None,
    results: Mapping[str, str] | None = None,
    **body: Any,
) -> Conversation:
    """The same, and ``output`` is what the model answered: the response is stored, and added to its conversation."""
    conversation = await normalized(store, suffix, **body)
    began, origin = conversation.response, conversation.origin
    if began.conversation:
        await store.conversations.lock(began.conversation.id, origin.owner, began.id, origin.position)
    ended = replace(began, status=status, output=output)
    if began.store:
        store.begin(StoredResponse(ended, conversation.input, origin))
    if status not in ("queued", "in_progress"):
        await store.end(StoredResponse(ended, conversation.input, origin, tokens or {}, results or {}), None)
    return conversation


def additional_tools(*tools: Json) -> Json:
    return {"type": "additional_tools", "role": "developer", "tools": list(tools)}


USER = {"role": "user", "content": "Hi"}


def allowed_tools(*tools: Json, mode: str = "auto") -> Json:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}
