"""Add entries to the metadata of each response, for example to search the stored responses for a release.

The facts of a response are fixed at its start: all events, the store and the answer to a background request repeat
them. So the place is before `normalize`; a number that is known only at the end, such as a count, goes into a log or a
metric. Raise `InvalidRequest` to refuse a request: the client gets a 400.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import replace
from penstock.pipeline.protocol.params.request import CreateResponse


@dataclass(frozen=True)
class AddMetadata:
    entries: dict[str, str]

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[CreateResponse, None]:
        async for request in source:
            metadata = {**(request.metadata or {}), **self.entries}
            if len(metadata) > 16:
                limit = 16 - len(self.entries)
                raise InvalidRequest(f"This server takes at most {limit} entries here.", param="metadata")
            yield replace(request, metadata=metadata)


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_before("normalize", "add_metadata", AddMetadata({"release": "2026-11"}))
