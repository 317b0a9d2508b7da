"""Open pipelines, each of which has read one request and stands after `normalize`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field

from penstock.pipeline.core import Pipeline
from penstock.pipeline.faults import first, running
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.halfway import Halfway, handed_over
from penstock.pipeline.protocol.params.request import CreateResponse


@dataclass(eq=False)
class Opened:
    """The open pipeline of a request.  Its holder closes it, after the stages that follow."""

    half: Halfway[ResolvedRequest]
    _closing: AsyncExitStack
    _around: tuple[dict[object, str], ...] = field(default_factory=running.get)
    is_unsent: bool = False
    """True once its events could not be written, though the client is there."""

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Note an error of the block, which sends the events, unless it says that the client has left."""
        try:
            yield
        except ConnectionResetError:
            raise
        except Exception:
            self.is_unsent = True
            raise

    @property
    def request(self) -> ResolvedRequest:
        """The request, as `normalize` has given it."""
        return self.half.frame

    def source(self, request: ResolvedRequest) -> AsyncGenerator[ResolvedRequest, None]:
        """Return the source of the stages that follow, with ``request`` in place of the one that was given."""
        return self.half.going_on(request)

    def taken(self) -> Opened:
        """Return the pipeline for another task, which then closes it in place of this holder."""
        return Opened(self.half, self._closing.pop_all(), self._around)

    async def aclose(self) -> None:
        """Close the pipeline, unless another task has taken it; this task then no longer runs it."""
        await self._closing.aclose()
        running.set(self._around)

    async def __aenter__(self) -> Opened:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def opened(through_normalize: Pipeline[CreateResponse, ResolvedRequest], request: CreateResponse) -> Opened:
    """Open the pipeline for a request, and run it through `normalize`; raise its errors."""
    around = running.get()
    source = handed_over([request])
    del request  # what follows may take long
    async with AsyncExitStack() as closing:
        frames = await closing.enter_async_context(through_normalize.open(source))
        return Opened(Halfway(await first(frames), frames), closing.pop_all(), around)
