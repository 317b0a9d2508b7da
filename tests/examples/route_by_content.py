"""Route requests by their text: to a LoRA adapter, to another temperature, to another priority.

Parameters that a stage sets before `normalize` are validated like those of the client, and the response shows them.
Here `legal` is an adapter (`--enable-lora --lora-modules legal=FOLDER`), and a request with a lower priority runs first
(`--scheduling-policy priority`).

To compare two adapters, choose by a hash of `safety_identifier`: a client that changed its model in the middle of a
conversation would have its prefix read anew.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import replace
from penstock.pipeline.protocol.items import Message
from penstock.pipeline.protocol.params.request import CreateResponse

ROUTES: dict[str, dict[str, Any]] = {
    r"\b(contract|liability)\b": {"model": "legal", "temperature": 0.2},
    r"\burgent\b": {"priority": -10},
}


async def route(source: AsyncIterator[CreateResponse]) -> AsyncGenerator[CreateResponse, None]:
    async for request in source:
        messages = (item for item in request.input_items if isinstance(item, Message))
        text = "\n".join(message.text for message in messages if message.role == "user")
        changes: dict[str, Any] = {}
        for words, parameters in ROUTES.items():
            if re.search(words, text, re.IGNORECASE):
                changes |= parameters
        yield replace(request, **changes)


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_before("normalize", "route", route)
