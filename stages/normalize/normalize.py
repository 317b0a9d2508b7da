"""Normalize: turn a request body and the history that it continues into one ResolvedRequest.

Its three stages follow from what they need: ``recall`` loads what the request continues, ``read`` reads what it brings,
and ``resolve`` makes what follows from both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.prompts import FilledRequest, Prompts, blamed, fill
from penstock.services.tools import Toolbox
from penstock.stages.normalize.read import Read
from penstock.stages.normalize.recall import Recall
from penstock.stages.normalize.resolve import DEFAULT_SHARING, CacheSharing, Resolve

NO_TOOLS = Toolbox()


@dataclass(frozen=True)
class Normalize:
    """Turn a request into a conversation, by the stages of ``inner``."""

    inner: Pipeline[FilledRequest, ResolvedRequest]
    prompts: Prompts = field(default_factory=Prompts)
    """The templates that requests may name."""

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[ResolvedRequest, None]:
        """Yield one resolved request per request.

        Raises `InvalidRequest` for a request that is invalid, that this server does not support, or that names an
        unknown prompt, model, response or conversation; raises `StoreFailed` if the history cannot be read.
        """
        async for request in source:
            filled = fill(self.prompts, request)
            del request  # the filled one may be a copy, and one of both is long enough
            try:
                async with self.inner.open(source_of([filled])) as stream:
                    resolved = [each async for each in stream]
            except InvalidRequest as error:
                raise blamed(error, filled) from error.__cause__
            del filled  # free it: it may be long, and the response may take long
            while resolved:
                yield resolved.pop(0)


def normalizing(recall: Recall, toolbox: Toolbox = NO_TOOLS, caches: CacheSharing = DEFAULT_SHARING) -> Normalize:
    """Return the stage with its three inner ones, the first of which is ``recall``."""
    return Normalize(
        Pipeline.start("recall", recall)
        .then("read", Read(toolbox))
        .then("resolve", Resolve(store=recall.store, toolbox=toolbox, caches=caches))
    )
