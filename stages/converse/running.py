"""Running calls: each runs in a task of its own, and yields the frames that report it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from penstock.pipeline.frames import CallFinished, CallStarted, ConversedFrame, ItemClosed, ShellOutputOpened
from penstock.stages.converse.sessions import Sessions
from penstock.stages.converse.turn import Called

Result = TypeVar("Result")


class Running:
    """The tasks of one response; none of them outlives the response."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start ``work`` in a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call(self, called: Called) -> RunningCall:
        """Start a call."""
        return RunningCall(called, self._sessions.action(called), self.start(self._sessions.run(called)))

    async def close(self) -> None:
        """Cancel all tasks that still run, and wait until they have ended."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RunningCall:
    """A call that has been started."""

    def __init__(self, called: Called, action: dict[str, Any] | None, task: asyncio.Task[CallFinished]) -> None:
        self._called = called
        self._action = action
        self._task = task

    async def frames(self, closed: ItemClosed) -> AsyncGenerator[ConversedFrame, None]:
        """Yield the frames from the end of the call's text to the end of its item; ``closed`` ends the call's item.

        The output of the shell is an item of its own, so a shell call ends before it runs.
        """
        if self._called.namespace != "container":
            yield CallStarted(self._action)
            yield await self._task
            yield closed
            return
        yield closed
        yield ShellOutputOpened()
        yield CallStarted()
        yield await self._task
        yield ItemClosed(complete=True)
