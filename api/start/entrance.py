"""The way in for programs: the first stage of a pipeline that runs without HTTP, and the response of its events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from penstock.pipeline.protocol.params.request import CreateResponse


@dataclass
class Entrance:
    """The first stage of the pipeline of a program, which is closed when the block of the pipeline has ended."""

    is_closed: bool = False

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[CreateResponse, None]:
        """Pass on the request of a program; raise `TypeError` for another frame, and `ValueError` unless it is one.

        Raise `RuntimeError` if the pipeline is closed.
        """
        if self.is_closed:
            raise RuntimeError("the pipeline is closed: open it inside its block, async with pipeline(settings) as ...")
        given: list[CreateResponse] = []
        async for request in source:
            if not isinstance(request, CreateResponse):
                raise TypeError(f"a response is made of a CreateResponse, not of a {type(request).__name__}")
            if given:
                raise ValueError("the source gives more than one request: open the pipeline once for each")
            given.append(request)
        if not given:
            raise ValueError("the source gives no request: open the pipeline with source_of([request])")
        yield given[0]
