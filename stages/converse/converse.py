"""Converse: alternate between the model and its tools until the model is done, a client must act, or a limit is met.

The inner pipeline runs once per turn.  Server-side tool calls run when the turn is over, concurrently if the request
allows it; their frames are yielded as things happen.  The results extend the conversation, which is then rendered
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import ContextTooLong, EngineOverloaded, ImagesRefused, UnsupportedParameter
from penstock.pipeline.frames import ConversedFrame, ItemDelta, ParsedFrame, ResolvedRequest
from penstock.pipeline.tasks import apart
from penstock.stages.converse.mcp_tools import with_declarations
from penstock.stages.converse.tool_loop import Limits, ToolLoop
from penstock.stages.converse.turn import turn_without_model
from penstock.stages.services.tools import Toolbox
from penstock.stages.services.tracing import TracedTurn, turn_span


def _never(response_id: str) -> bool:
    return False


async def _nothing(response_id: str) -> bool:
    return False


@dataclass(frozen=True)
class Steering:
    """The wishes of clients, and the means to fulfil them, by response id."""

    is_wanted: Callable[[str], bool] = _never
    """Return True if a response shall end once it safely can."""
    stop: Callable[[str], Awaitable[object]] = _nothing
    """End the generation for a response; its frames then end with the reason ``cancelled``."""


@dataclass(frozen=True)
class Converse:
    """Let the model that ``inner`` runs use the tools in ``toolbox``; ``clock`` returns monotonic seconds.

    ``steering`` has the responses that their clients want to end early.
    """

    inner: Pipeline[ResolvedRequest, ParsedFrame]
    toolbox: Toolbox = field(default_factory=Toolbox)
    limits: Limits = field(default_factory=Limits)
    steering: Steering = field(default_factory=Steering)
    clock: Callable[[], float] = time.monotonic

    async def __call__(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ConversedFrame, None]:
        """Yield the frames of all turns of each conversation.

        An error in the first prompt is raised before the first frame, unless MCP frames had to come before the prompt.
        """
        async for request in source:
            self._check(request)
            declared = await with_declarations(request, self.toolbox.hosts, self.limits.listing_seconds)
            settings = self.toolbox, self.limits, self.clock, self.steering.is_wanted
            loop = await apart(declared.is_long, ToolLoop, declared, *settings)
            try:
                await loop.claim()
                for step in loop.begin():
                    yield loop.note(await step if isinstance(step, asyncio.Task) else step)
                while loop.next_turn():
                    if loop.may_compact and await apart(loop.request.is_long, loop.has_superseded):
                        loop.compact_if_full(await self._length(loop.request))
                    with turn_span(loop.request) as turn:
                        async with self._accepted(loop, turn) as (first, parsed):
                            for passed in loop.feed(first) if first else ():
                                yield passed
                            async for frame in parsed:
                                if loop.is_plain and type(frame) is ItemDelta:  # hot path: see `penstock.pipeline.core`
                                    loop.take_text(frame.text)
                                    yield frame
                                    continue
                                turn.speak()
                                for passed in loop.feed(frame):
                                    yield passed
                                await self._stop_if_cut(loop)
                        turn.end(loop.finished)
                    for step in loop.end_turn():
                        yield loop.note(await step if isinstance(step, asyncio.Task) else step)
            finally:
                await loop.close()

    @asynccontextmanager
    async def _opened(self, request: ResolvedRequest) -> AsyncGenerator[AsyncIterator[ParsedFrame], None]:
        """Open the stages of a turn.

        The model is not needed if ``summarize`` makes a summary itself, or to prepare an empty conversation, which
        many chat templates refuse.
        """
        if not (request.facts.generates or request.history or request.facts.input):
            async with aclosing(source_of(turn_without_model(request.facts, ""))) as nothing:
                yield nothing
            return
        if not request.facts.summarizes:
            async with self.inner.open(source_of([request])) as parsed:
                yield parsed
            return
        async with self.inner.through("summarize").open(source_of([request])) as requests:
            asking = await anext(requests)
        if asking.facts.summary is not None:
            async with aclosing(source_of(turn_without_model(asking.facts, asking.facts.summary))) as made:
                yield made
            return
        async with self.inner.following("summarize").open(source_of([asking])) as parsed:
            yield parsed

    async def _stop_if_cut(self, loop: ToolLoop) -> None:
        """End the engine's generation once its output is dropped."""
        if loop.stops_now():
            await self.steering.stop(loop.request.facts.response_id)

    def _check(self, request: ResolvedRequest) -> None:
        """Raise `UnsupportedParameter` for a compaction if the inner pipeline has not the stages for it."""
        compacting, names = request.facts.compacting, self.inner.names()
        if compacting and "summarize" not in names:
            param = "input" if compacting.at_once else "context_management"
            raise UnsupportedParameter("This server does not compact conversations.", param=param)
        if compacting and not compacting.at_once and "render" not in names:
            message = "This server cannot count tokens: the prompt is made elsewhere."
            raise UnsupportedParameter(message, param="context_management")

    async def _length(self, request: ResolvedRequest) -> int:
        """Return the number of tokens of the next prompt."""
        try:
            async with self.inner.through("render").open(source_of([request])) as prompts:
                return len((await anext(prompts)).token_ids)
        except ContextTooLong as error:
            return error.prompt_tokens

    @asynccontextmanager
    async def _accepted(
        self, loop: ToolLoop, turn: TracedTurn
    ) -> AsyncGenerator[tuple[ParsedFrame | None, AsyncIterator[ParsedFrame]], None]:
        """Open the next turn; return its first frame, or None if there is none, and the stream of the rest.

        A response that has begun can no longer be refused, so it retries until the engine has room for its turn.
        Images that the engine refuses are left out, if the client does not send them now.  Raises `EngineOverloaded` if
        the response has not begun.
        """
        while True:
            async with self._opened(turn.asking(loop.asked)) as parsed:
                try:
                    first_frame = await anext(parsed, None)
                except ImagesRefused as error:
                    if not loop.hide(error.reasons):
                        raise
                    continue
                except EngineOverloaded:
                    if not loop.has_begun:
                        raise
                else:
                    yield turn.begin(first_frame), parsed
                    return
            await asyncio.sleep(self.limits.retry_seconds)
