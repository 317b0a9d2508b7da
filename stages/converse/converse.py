"""Converse: alternate between the model and its tools until the model is done, a client must act, or a limit is met.

The inner pipeline runs once per turn.  Server-side tool calls run when the turn is over, concurrently if the request
allows it; their frames are yielded as things happen.  The results extend the conversation, which is then rendered
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import ContextTooLong, EngineOverloaded, ImagesRefused, UnsupportedParameter
from penstock.pipeline.frames import ConversedFrame, ItemDelta, ParsedFrame, Prompt, ResolvedRequest
from penstock.pipeline.halfway import Halfway, halfway
from penstock.pipeline.hot_path import join, on_the_way
from penstock.pipeline.tasks import apart
from penstock.services.tools import Guard, Toolbox
from penstock.services.tracing import TracedTurn, turn_span
from penstock.stages.converse.mcp_tools import with_declarations
from penstock.stages.converse.sessions import Step, Unshown
from penstock.stages.converse.tool_loop import Limits, ToolLoop
from penstock.stages.converse.turn import turn_without_model


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


@on_the_way
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
            settings = self.toolbox, self.limits_of(request), self.clock, self.steering.is_wanted
            loop = await apart(declared.is_long, ToolLoop, declared, *settings)
            try:
                await loop.claim()
                join(turn=loop)
                async with aclosing(_frames(loop, loop.begin())) as beginning:
                    async for passed in beginning:
                        yield passed
                del beginning  # else its frame stays as long as the response
                if not loop.is_unspoken:
                    await loop.describe()
                while loop.next_turn():
                    with turn_span(loop.request) as turn:
                        measured = self._measured(loop, turn) if loop.may_compact else _UNMEASURED
                        async with measured as begun, _Accepted(self, loop, turn, begun) as answer:
                            first, parsed = answer
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
                    async with aclosing(_frames(loop, loop.end_turn())) as ending:
                        async for passed in ending:
                            yield passed
            finally:
                await loop.close()

    def limits_of(self, _request: ResolvedRequest) -> Limits:
        """Return the limits of a request."""
        return self.limits

    def _opened(self, request: ResolvedRequest) -> AbstractAsyncContextManager[AsyncIterator[ParsedFrame]]:
        """Open the stages of a turn.

        The model is not needed if ``summarize`` makes a summary itself, or to prepare an empty conversation, which
        many chat templates refuse.
        """
        if not (request.facts.purpose.generates or request.history or request.facts.input):
            return aclosing(source_of(turn_without_model(request.facts, "")))
        if not request.facts.purpose.summarizes:
            return self.inner.open(source_of([request]))
        return self._summarized(request)

    @asynccontextmanager
    async def _summarized(self, request: ResolvedRequest) -> AsyncGenerator[AsyncIterator[ParsedFrame], None]:
        """Open the stages of a turn that summarizes."""
        async with halfway(self.inner.through("summarize"), source_of([request])) as asked:
            if asked.frame.facts.purpose.summary is not None:
                async with aclosing(_made(asked)) as made:
                    yield made
                return
            async with self.inner.following("summarize").open(asked.going_on(asked.frame)) as parsed:
                yield parsed

    async def _stop_if_cut(self, loop: ToolLoop) -> None:
        """End the engine's generation once its output is dropped."""
        if loop.stops_now():
            await self.steering.stop(loop.request.facts.response_id)

    def _check(self, request: ResolvedRequest) -> None:
        """Raise `UnsupportedParameter` for a compaction if the inner pipeline has not the stages for it."""
        compacting = request.facts.purpose.compacting
        if compacting is None:
            return
        names = self.inner.names()
        if "summarize" not in names:
            param = "input" if compacting.at_once else "context_management"
            raise UnsupportedParameter("This server does not compact conversations.", param=param)
        if not compacting.at_once and "render" not in names:
            message = "This server cannot count tokens: the prompt is made elsewhere."
            raise UnsupportedParameter(message, param="context_management")

    @asynccontextmanager
    async def _measured(self, loop: ToolLoop, turn: TracedTurn) -> AsyncGenerator[Halfway[Prompt] | None, None]:
        """Render the next prompt if its length decides whether the turn is a compaction; yield it if it is none."""
        if not await apart(loop.request.is_long, loop.has_superseded):
            yield None
            return
        async with AsyncExitStack() as closing:
            begun, through_render = None, self.inner.through("render")
            try:
                rendering = halfway(through_render, source_of([turn.asking(loop.request)]))
                begun = await closing.enter_async_context(rendering)
                length = len(begun.frame.token_ids)
            except ContextTooLong as error:
                length = error.prompt_tokens
            if loop.compact_if_full(length):
                await closing.aclose()
                begun = None
            yield begun

    def begun(
        self, loop: ToolLoop, turn: TracedTurn, begun: Halfway[Prompt] | None
    ) -> AbstractAsyncContextManager[AsyncIterator[ParsedFrame]]:
        """Open the next turn, or the rest of one that has ``begun``."""
        if loop.is_unspoken:
            return aclosing(source_of(turn_without_model(loop.request.facts, "")))
        return self._rest_of(begun) if begun else self._opened(turn.asking(loop.asked))

    def _rest_of(self, begun: Halfway[Prompt]) -> AbstractAsyncContextManager[AsyncIterator[ParsedFrame]]:
        return self.inner.following("render").open(begun.going_on(begun.frame))


class _Accepted:
    """The block of a turn that the engine has accepted.

    A response that has begun can no longer be refused, so it retries until a backend of texts has room for its turn;
    `Generate` does so for others.  Images that the engine refuses are left out, if the client does not send them now.
    """

    __slots__ = ("_begun", "_converse", "_loop", "_opened", "_turn")

    def __init__(self, converse: Converse, loop: ToolLoop, turn: TracedTurn, begun: Halfway[Prompt] | None) -> None:
        self._converse = converse
        self._loop = loop
        self._turn = turn
        self._begun = begun

    async def __aenter__(self) -> tuple[ParsedFrame | None, AsyncIterator[ParsedFrame]]:
        """Return the first frame, or None if there is none, and the stream of the rest.

        Raises `EngineOverloaded` if the response has not begun.
        """
        while True:
            try:
                return await self._first()
            except ImagesRefused as error:
                if not self._loop.hide(error.reasons):
                    raise
                continue
            except EngineOverloaded:
                if not self._loop.has_begun:
                    raise
            await asyncio.sleep(self._converse.limits.retry_seconds)

    async def __aexit__(self, *raised: Any) -> None:
        await self._opened.__aexit__(*raised)

    async def _first(self) -> tuple[ParsedFrame | None, AsyncIterator[ParsedFrame]]:
        begun, self._begun = self._begun, None
        self._opened = self._converse.begun(self._loop, self._turn, begun)
        parsed = await self._opened.__aenter__()
        try:
            return self._turn.begin(await anext(parsed, None)), parsed
        except BaseException as error:
            await self._opened.__aexit__(type(error), error, error.__traceback__)
            raise


_UNMEASURED = nullcontext()


def guarding(pipeline: Pipeline[Any, Any], guard: Guard) -> Pipeline[Any, Any]:
    """Return the pipeline with one more guard of the calls of programs; recordings, which make none, need it not."""
    converse = pipeline.stage("converse")
    if not isinstance(converse, Converse):
        return pipeline
    toolbox = replace(converse.toolbox, guards=(*converse.toolbox.guards, guard))
    return pipeline.replace("converse", replace(converse, toolbox=toolbox))


async def _frames(loop: ToolLoop, steps: Iterator[Step]) -> AsyncGenerator[ConversedFrame, None]:
    """Yield the frames of steps when they come; the step of a program is waited for, and is none."""
    for step in steps:
        done = await step if isinstance(step, asyncio.Task) else step
        if not isinstance(done, Unshown):
            yield loop.note(done)


async def _made(asked: Halfway[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
    """Yield a turn with the summary that a stage has made without the model."""
    facts = asked.frame.facts
    for frame in turn_without_model(facts, facts.purpose.summary or ""):
        yield frame
    await asked.finish()
