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
from penstock.stages.normalize.normalize import Normalize


@dataclass(eq=False, slots=True)
class Opened:
    """The pipeline of a request, which may have ended.  Its holder closes it, after the stages that follow."""

    half: Halfway[ResolvedRequest]
    _closing: AsyncExitStack | None = None
    """Closes the pipeline; None if it has ended."""
    _around: tuple[dict[int, str], ...] = field(default_factory=running.get)
    is_unsent: bool = False
    """True once its events could not be written, though the client is there."""

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Note an error of the block, which sends the events."""
        try:
            yield
        except Exception as error:
            self.note(error)
            raise

    def note(self, error: BaseException | None) -> None:
        """Note an error with which the sending of the events has ended, unless it says that the client has left."""
        if isinstance(error, Exception) and not isinstance(error, ConnectionResetError):
            self.is_unsent = True

    @property
    def request(self) -> ResolvedRequest:
        """The request, as `normalize` has given it."""
        return self.half.frame

    def source(self, request: ResolvedRequest) -> AsyncGenerator[ResolvedRequest, None]:
        """Return the source of the stages that follow, with ``request`` in place of the one that was given."""
        return self.half.going_on(request)

    def taken(self) -> Opened:
        """Return the pipeline for another task, which then closes it in place of this holder."""
        return Opened(self.half, self._closing and self._closing.pop_all(), self._around)

    async def aclose(self) -> None:
        """Close the pipeline, unless another task has taken it; this task then no longer runs it."""
        if self._closing:
            await self._closing.aclose()
            running.set(self._around)

    async def __aenter__(self) -> Opened:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def ends_at_once(through_normalize: Pipeline[CreateResponse, ResolvedRequest]) -> bool:
    """Return True if no stage stands beside `normalize`, which has nothing left to do after its frame."""
    return [type(step.stage) for step in through_normalize.steps] == [Normalize]


async def opened(
    through_normalize: Pipeline[CreateResponse, ResolvedRequest], request: CreateResponse, *, ends: bool = False
) -> Opened:
    """Open the pipeline for a request, and run it through `normalize`; raise its errors.

    It is run to its end if it ``ends`` at once, as an open one takes memory for as long as the response takes.
    """
    around = running.get()
    source = handed_over([request])
    del request  # what follows may take long
    async with AsyncExitStack() as closing:
        frames = await closing.enter_async_context(through_normalize.open(source))
        frame = await first(frames)
        if not ends:
            return Opened(Halfway(frame, frames), closing.pop_all(), around)
        rest = handed_over([more async for more in frames])
    return Opened(Halfway(frame, rest))
