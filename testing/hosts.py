"""The check of a host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.lifecycle.rules import InvariantBroken, rule
from penstock.pipeline.members import missing_members
from penstock.services.tools import Host, Session, ToolResult
from penstock.stages.converse.sessions import GRACE_SECONDS
from penstock.testing.rules import check_tasks, closing_broken, keep_all
from penstock.testing.stages import resolved


@dataclass(frozen=True)
class ExampleCalls:
    """Calls that a host gets from `check_host`, each as the name of a function and the text that a model writes."""

    quick: tuple[str, str]
    """A call that succeeds."""
    wrong: tuple[str, str]
    """A call that fails, such as one whose arguments the function does not have."""
    slow: tuple[str, str] | None = None
    """A call that would take a minute; None if the host has none that takes longer than a moment."""


async def check_host(
    host: Host, calls: ExampleCalls, request: ResolvedRequest | None = None, *, seconds: float = 60.0
) -> None:
    """Check that a host, and its sessions for a ``request``, keep the rules of `Host` and `Session`; close it.

    Raises `BrokenRule` at the first rule that it breaks, or if a rule takes more than ``seconds``.  The slow
    call gets a sixtieth of that.
    """
    tester = _Tester(host, calls, request or await resolved("Hi"), max(2 * _MOMENT, seconds / 60))
    async with closing_broken(host):
        await keep_all(_RULES, tester, seconds)


_PATIENCE = 30.0
"""Seconds that a call of the check may take which takes only a moment: the first one may start a program."""

_MOMENT = 0.3
"""Seconds for which a slow call runs before it is stopped."""

_UNREADABLE = ("", "{", "null", "[1]", '{"\\ud800": NaN}', "[" * 10_000, "\x00")
"""Texts that a model may write instead of arguments."""


class _Tester:
    """A host, and sessions of it."""

    def __init__(self, host: Host, calls: ExampleCalls, request: ResolvedRequest, seconds: float) -> None:
        self.host = host
        self.calls = calls
        self.request = request
        self.seconds = seconds
        self.tasks = asyncio.all_tasks()

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[Session, None]:
        """Open a session for the length of a block."""
        session = self.host.session(self.request)
        try:
            yield session
        finally:
            await session.close()

    async def run(self, session: Session, call: tuple[str, str], seconds: float = _PATIENCE) -> ToolResult:
        """Return the result of a call."""
        try:
            result = await session.run(*call, seconds)
        except Exception as error:
            problem = f"errors are in the result, and not raised: {type(error).__name__}: {error}"
            raise InvariantBroken(problem) from error
        rule(isinstance(result, ToolResult), f"run returns a ToolResult, not {result!r}")
        texts = [result.result, *([] if result.error is None else [result.error])]
        rule(all(isinstance(text, str) for text in texts), f"the result and the error of {result!r} are texts")
        return result

    async def succeeds(self, session: Session) -> None:
        """Make the quick call."""
        result = await self.run(session, self.calls.quick)
        rule(result.error is None, f"the quick call succeeds; its error was {result.error!r}")

    @asynccontextmanager
    async def running(self, session: Session) -> AsyncGenerator[asyncio.Task[ToolResult], None]:
        """Make the slow call for the length of a block, if there is one, and the quick one otherwise."""
        await self.succeeds(session)
        limited = (self.calls.slow, self.seconds) if self.calls.slow else (self.calls.quick, _PATIENCE)
        task = asyncio.create_task(self.run(session, *limited))
        await asyncio.wait({task}, timeout=_MOMENT if self.calls.slow else 0)
        rule(not (self.calls.slow and task.done()), f"the slow call takes longer than {_MOMENT:g} seconds")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})


async def _check_members(tester: _Tester) -> None:
    problems = missing_members(tester.host, Host)
    rule(not problems, "; ".join(problems))
    session = tester.host.session(tester.request)
    problems = missing_members(session, Session)
    rule(not problems, "; ".join(problems))
    await session.close()


async def _check_run(tester: _Tester) -> None:
    async with tester.session() as session:
        await tester.succeeds(session)
        await tester.succeeds(session)


async def _check_errors(tester: _Tester) -> None:
    async with tester.session() as session:
        result = await tester.run(session, tester.calls.wrong)
        rule(bool(result.error or result.result), "the model reads why a call failed")
        for text in _UNREADABLE:
            await tester.run(session, (tester.calls.quick[0], text))
        await tester.succeeds(session)


async def _check_time_limit(tester: _Tester) -> None:
    if tester.calls.slow is None:
        return
    async with tester.session() as session:
        await tester.succeeds(session)
        try:
            async with asyncio.timeout(_MOMENT + GRACE_SECONDS), _awaiting(_MOMENT / 2):
                result = await tester.run(session, tester.calls.slow, _MOMENT)
        except TimeoutError:
            raise InvariantBroken("run ends by itself when its seconds are over") from None
        rule(bool(result.error or result.result), "the model reads that a call took too long")
        await tester.succeeds(session)


@asynccontextmanager
async def _awaiting(seconds: float) -> AsyncGenerator[None, None]:
    """Raise `InvariantBroken` if the block takes longer than ``seconds``, and nothing else can run meanwhile."""
    loop, others = asyncio.get_running_loop(), asyncio.Event()
    end = loop.time() + seconds
    timer = loop.call_at(end, others.set)
    yield
    timer.cancel()
    rule(others.is_set() or loop.time() <= end, "a call that takes long awaits, so that other responses go on")


async def _check_cancellation(tester: _Tester) -> None:
    async with tester.session() as session, tester.session() as other:
        async with tester.running(session) as task:
            task.cancel()
            await asyncio.wait({task})
            rule(task.cancelled() or not tester.calls.slow, "a call that is cancelled raises CancelledError")
        await tester.succeeds(other)


async def _check_concurrency(tester: _Tester) -> None:
    async with tester.session() as session, tester.session() as other:
        await asyncio.gather(*(tester.succeeds(each) for each in (session, other) * 3))


async def _check_session_close(tester: _Tester) -> None:
    async with tester.session() as session, tester.session() as other:
        async with tester.running(session) as task:
            await asyncio.create_task(session.close())
            await asyncio.wait({task}, timeout=tester.seconds + GRACE_SECONDS)
            rule(task.done(), "a call that runs while its session is closed ends, at the latest after its seconds")
            if not task.cancelled():
                task.result()
        await session.close()
        await tester.run(session, tester.calls.quick)
        await tester.succeeds(other)
    unused = tester.host.session(tester.request)
    await unused.close()


async def _check_close(tester: _Tester) -> None:
    await tester.host.close()
    await tester.host.close()
    await check_tasks(tester.tasks)


_RULES: dict[str, Callable[[_Tester], Awaitable[None]]] = {
    "members": _check_members,
    "run": _check_run,
    "errors": _check_errors,
    "seconds": _check_time_limit,
    "cancellation": _check_cancellation,
    "concurrency": _check_concurrency,
    "session": _check_session_close,
    "close": _check_close,
}
