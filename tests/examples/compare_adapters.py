"""Split clients between two LoRA adapters, to compare them.

A request for the model `support` goes to one of two adapters (`--enable-lora --lora-modules support-v1=FOLDER
support-v2=FOLDER`). The same client always gets the same one: another model in the middle of a conversation would read
its prefix anew. The response shows the adapter as its `model`, so stored responses and logs can be compared by it.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import replace
from penstock.pipeline.protocol.params.request import CreateResponse


@dataclass(frozen=True)
class Compare:
    model: str
    old: str
    new: str
    percent: int
    """The share of clients that get the new adapter."""

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[CreateResponse, None]:
        async for request in source:
            client = request.safety_identifier or request.prompt_cache_key or secrets.token_hex()
            is_new = zlib.crc32(client.encode()) % 100 < self.percent
            changes = {"model": self.new if is_new else self.old} if request.model == self.model else {}
            yield replace(request, **changes)


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    stage = Compare("support", old="support-v1", new="support-v2", percent=10)
    return pipeline.insert_before("normalize", "compare_adapters", stage)
