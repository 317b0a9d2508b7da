"""The tool sessions of one response, and the calls that run in them.

Each session is opened at the first call that needs it, and all are closed together.  Each call runs in a task of its
own, and none outlives the response.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from penstock.pipeline import frames, metrics
from penstock.pipeline.audit import decided
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import Toolset
from penstock.pipeline.tasks import cancelled
from penstock.services.own_hosts import OwnSession
from penstock.services.tool_search import SEARCH_NAMESPACE, ToolSearch
from penstock.services.tools import (
    LONGEST_RESULT,
    Acting,
    Advancing,
    Citable,
    ContainerFiles,
    FileSource,
    HasFiles,
    NestedCall,
    PastCall,
    Session,
    Source,
    Toolbox,
    ToolResult,
    bounded,
)
from penstock.services.tracing import TracedCaller, caller_span, fail, tool_span
from penstock.stages.converse.turn import ToolCall

logger = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""Extra seconds for a session to end an overlong call itself, before the call is cancelled."""

FAILURE = "Error: "
"""The beginning of the text that says why a call has failed."""

FrameOrTask: TypeAlias = frames.ConversedFrame | asyncio.Task[frames.CallFinished]
"""The next frame of a response, or the task whose result is that frame."""


@dataclass(frozen=True)
class Unshown:
    """The outcome of work that is no frame."""


@dataclass(frozen=True)
class Recalled(Unshown):
    """The calls that a program has made before."""

    calls: Sequence[PastCall]


@dataclass(frozen=True)
class Advanced(Unshown):
    """The next step of a program: the calls for which it waits, or its end."""

    calls: tuple[NestedCall, ...]
    finished: frames.CallFinished


Step: TypeAlias = FrameOrTask | asyncio.Task[Advanced] | asyncio.Task[Recalled]
"""The next thing in a response: its next frame, or work for a program, which is none."""


Result = TypeVar("Result")


@dataclass(frozen=True)
class RunningProgram:
    """A program that runs, or goes on, in a response.

    ``waiting`` has the spans of the calls that the client makes: they end with that of the program.
    """

    call: ToolCall
    call_id: str
    traced: TracedCaller
    waiting: ExitStack


@dataclass(frozen=True)
class RunningCall:
    """A call that was started or refused; ``action`` is what its item shows while it runs, if anything."""

    call: ToolCall
    action: dict[str, Any] | None
    outcome: FrameOrTask

    def frames(self, closed: frames.ItemClosed) -> Iterator[FrameOrTask]:
        """Yield the frames from the end of the call's text to the end of its item; ``closed`` ends the call's item."""
        if self.call.output is not None:
            yield closed
            yield self.call.output
            yield frames.CallStarted()
            yield self.outcome
            yield frames.ItemClosed(complete=True)
        else:
            yield frames.CallStarted(self.action)
            yield self.outcome
            yield closed


class Sessions:
    """The open sessions of one response; a call may take ``seconds``, and its result ``longest`` characters.

    ``cited`` are the namespaces of the tools that the conversation has used before, if their pages can be cited.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        request: frames.ResolvedRequest,
        seconds: float,
        longest: int,
        *,
        cited: Collection[str],
    ) -> None:
        self._toolbox = toolbox
        self._request = request
        self._seconds = seconds
        self._longest = longest
        self._servers = {server.label: server for server in request.facts.tools.servers}
        self._cited = cited
        self.tools: Toolset = request.facts.tools
        """The tools of the next turn, which a search looks through."""
        self._open: dict[str, Session] = {}
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def source(self) -> Callable[[int], Source | FileSource | None] | None:
        """A function that finds the page or the file of a cursor; None if the conversation has none."""
        citable = (kind.namespace for kind in kinds().values() if kind.cites)
        used: list[object] = [self._session(kind) for kind in citable if kind in self._cited or kind in self._open]
        sessions = [session for session in used if isinstance(session, Citable)]
        if not sessions:
            return None

        def source(cursor: int) -> Source | FileSource | None:
            found = (session.source(cursor) for session in sessions)
            return next((each for each in found if each is not None), None)

        return source

    @property
    def files(self) -> Sequence[ContainerFiles]:
        """The files that calls of the response have left, of each container once."""
        sessions: list[object] = list(self._open.values())
        left = [session.files for session in sessions if isinstance(session, HasFiles) and session.files]
        return list({each.container_id: each for each in left}.values())

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start ``work`` in a task."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        return task

    def call(self, call: ToolCall, refusal: str | None = None, caller: RunningProgram | None = None) -> RunningCall:
        """Start a call of the model, or of a program, unless there is a ``refusal`` to read instead of a result."""
        if caller:
            metrics.PROGRAM_CALLS.labels(self._measured_name(call.namespace)).inc()
        session: object = self._session(call.namespace)
        action = session.action(call.name, call.text) if isinstance(session, Acting) else None
        if refusal is None:
            return RunningCall(call, action, self.start(self._run(call, caller)))
        metrics.TOOL_CALLS.labels(self._measured_name(call.namespace), "denied").inc()
        of_program = {"caller": caller.call_id} if caller else {}
        decided("tools", "refused", self._request.facts.response_id, tool=call.namespace, **of_program)
        return RunningCall(call, action, _refused(call, refusal))

    @contextmanager
    def program(self, call: ToolCall, call_id: str) -> Iterator[RunningProgram]:
        """Trace a program for the length of a block, in which it runs or goes on."""
        with caller_span(self._request, self._traced_name(call)) as traced, ExitStack() as waiting:
            yield RunningProgram(call, call_id, traced, waiting)

    def ask_client(self, program: RunningProgram, server: str = "") -> None:
        """Note a call of a program that the client makes, or approves for the MCP server of this label."""
        name = self._measured_name(server) if server else "function"
        metrics.PROGRAM_CALLS.labels(name).inc()
        program.waiting.enter_context(caller_span(program.traced.request, name))

    def advance(self, program: RunningProgram, past: Sequence[PastCall]) -> asyncio.Task[Advanced]:
        """Let a program go on in a task, after its ``past`` calls."""
        return self.start(self._advanced(program, past))

    def keep(self, program: RunningProgram, past: Sequence[PastCall]) -> None:
        """Keep a program that waits for the client beyond this response, with the outcomes of its ``past`` calls."""
        session: object = self._session(program.call.namespace)
        if isinstance(session, Advancing):
            session.keep(program.call_id, past)

    async def _advanced(self, program: RunningProgram, past: Sequence[PastCall]) -> Advanced:
        call = program.call
        session: object = self._session(call.namespace)
        if not isinstance(session, Advancing):
            return Advanced((), frames.CallFinished(error := "This server runs no programs.", error))
        refusal = partial(self._refusal, program)
        advance = partial(session.advance, program.call_id, call.text, past, self._seconds, refusal)
        step = await self._done(call, advance)
        if not isinstance(step, ToolResult):
            return Advanced(step, frames.CallFinished())
        if step.error:
            fail(program.traced.span, "tool_error")
        return Advanced((), self._finished(call, step, self._longest))

    def _refusal(self, program: RunningProgram, call: NestedCall) -> str | None:
        """Return why a guard refuses a call of a program; None if none does."""
        refusal = next(filter(None, (guard(self._request, call) for guard in self._toolbox.guards)), None)
        if refusal is not None:
            facts = {"tool": ".".join(filter(None, call.tool)), "caller": program.call_id}
            decided("programs", "refused", self._request.facts.response_id, **facts)
        return refusal

    async def _run(self, call: ToolCall, caller: RunningProgram | None) -> frames.CallFinished:
        """Run a call and return how it finished; errors are part of the result, never raised."""
        request, longest = (caller.traced.request, LONGEST_RESULT) if caller else (self._request, self._longest)
        session = self._session(call.namespace)
        with tool_span(request, self._traced_name(call), is_mcp=self._is_mcp(call.namespace)) as traced:
            if session is None:
                done = ToolResult(error=f"There is no tool {call.namespace}.{call.name} here.")
            else:
                done = await self._done(call, partial(session.run, call.name, call.text, self._seconds))
            if done.error:
                fail(traced, "tool_error")
        return self._finished(call, done, longest)

    def _finished(self, call: ToolCall, done: ToolResult, longest: int) -> frames.CallFinished:
        is_read = not done.error or done.error == done.result
        failure = "" if is_read else f"{FAILURE}{done.error}"
        result = "\n".join(filter(None, (bounded(done.result, longest), bounded(failure, longest))))
        return frames.CallFinished(result, done.error, self._shown(call.namespace, done.data), images=done.images)

    async def close(self) -> None:
        """Cancel all tasks that still run, then close all open sessions; log errors instead of raising them."""
        await cancelled(self._tasks)  # a call that ends uses its session until then
        sessions, self._open = self._open, {}
        for error in await asyncio.gather(*(session.close() for session in sessions.values()), return_exceptions=True):
            if isinstance(error, Exception):
                logger.error("A session of tools could not be closed", exc_info=error)

    async def _done(self, call: ToolCall, work: Callable[[], Awaitable[Result]]) -> Result | ToolResult:
        """Do the work of a call, and return its outcome, which for a program may be other calls."""
        tool, status, started = self._measured_name(call.namespace), "failed", time.monotonic()
        try:
            async with asyncio.timeout(self._seconds + GRACE_SECONDS):
                result = await work()
            status = _status(result)
        except TimeoutError:
            status = "timeout"
            return ToolResult(error=f"The call took longer than {self._seconds:g} seconds.")
        except asyncio.CancelledError:
            status = "cancelled"
            raise
        except Exception:  # the host may be the operator's: its bug is a result that the model reads
            logger.exception("A call of %s met a bug", call.namespace)
            return ToolResult(error="Internal error.")
        else:
            return result
        finally:
            seconds = time.monotonic() - started
            if status:
                metrics.TOOL_CALLS.labels(tool, status).inc()
            metrics.TOOL_SECONDS.labels(tool).observe(seconds)
            self._toolbox.tallies.of(self._request.facts.response_id).tool_seconds += seconds

    def _measured_name(self, namespace: str) -> str:
        """Return the name of a tool in the metrics, which have no label that a client has chosen."""
        if namespace in self._servers:
            return f"mcp:{namespace}" if namespace in self._toolbox.labels else "mcp"
        if namespace == SEARCH_NAMESPACE:
            return "tool_search"
        kind = kinds().get(namespace)
        return kind.api_type if kind else "other"

    def _is_mcp(self, namespace: str) -> bool:
        """Return True if an MCP server runs the tools of a namespace."""
        server = self._servers.get(namespace)
        return server is not None and self._toolbox.own_host(server) is None

    def _traced_name(self, call: ToolCall) -> str:
        """Return the name of a tool in traces; tools of servers that the client names have none."""
        if call.namespace in self._servers and call.namespace in self._toolbox.labels:
            return call.name
        return self._measured_name(call.namespace)

    def _session(self, namespace: str) -> Session | None:
        if namespace not in self._open:
            if server := self._servers.get(namespace):
                own = self._toolbox.own_host(server)
                self._open[namespace] = OwnSession(own, self._request) if own else self._toolbox.mcp.session(server)
            elif namespace == SEARCH_NAMESPACE:
                self._open[namespace] = ToolSearch(lambda: self.tools)
            elif host := self._toolbox.hosts.get(namespace):
                self._open[namespace] = host.session(frames.with_facts(self._request, tools=self.tools))
        return self._open.get(namespace)

    def _shown(self, namespace: str, data: frames.CallData | None) -> frames.CallData | None:
        """Return the data that the item shows: outputs, sources and results only if the request includes them."""
        kind = kinds().get(namespace)
        return kind.shown(data, self._request.facts.include) if kind and data is not None else data


def _status(outcome: object) -> str:
    """Return the status of a call by its outcome; empty if it goes on after calls of its own."""
    if not isinstance(outcome, ToolResult):
        return ""
    return "failed" if outcome.error else "completed"


def _refused(call: ToolCall, refusal: str) -> frames.CallFinished:
    if call.output is not None:  # the output shows why; its call is complete
        return frames.CallFinished(refusal, refusal)
    return frames.CallFinished(refusal, ran=False)
