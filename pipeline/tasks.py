"""Work in tasks and threads of its own."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

MANY_VALUES: Final = 1_000
"""Values from which on work on each of them happens apart from the event loop."""

LINGER_SECONDS: Final = 1.0
"""Seconds after which what a request has left is held by nothing else."""

LARGE_BYTES: Final = 2**18
"""Bytes from which on their reading, writing or copying happens apart from the event loop."""


async def in_thread(
    work: Callable[Arguments, Result], /, *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result:
    """Return what ``work`` returns, computed in a thread.

    If it raises, its variables are freed there too: the event loop would else free them with the error.
    """
    return await asyncio.to_thread(_clearing, work, *arguments, **named)


def _clearing(work: Callable[Arguments, Result], /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
    try:
        return work(*arguments, **named)
    except Exception as error:
        raised: BaseException | None = error
        while raised is not None:
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__cause__ or raised.__context__
        raise


def until_it_waits(work: Coroutine[Any, Any, object]) -> None:
    """Run ``work`` until it is done or first has to wait, and leave it there; raise what it raises.

    If the future that it would wait for fails, asyncio would log that its error was never retrieved.
    """
    with suppress(StopIteration):
        awaited = work.send(None)
        if isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(_retrieve_error)
    work.close()


async def apart(is_long: bool, work: Callable[..., Result], *arguments: Any) -> Result:
    """Return what ``work`` returns; it computes in a thread if that takes long."""
    return await in_thread(work, *arguments) if is_long else work(*arguments)


async def uncut(work: Callable[[], Result], undo: Callable[[Result], object] = lambda _: None) -> Result:
    """Return what ``work`` returns, computed in a thread.

    A caller that is cancelled waits for the thread, which still uses what the caller would close, and has ``undo`` take
    the result.
    """
    working = asyncio.create_task(in_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        if not working.cancelled() and working.exception() is None:
            undo(working.result())
        raise


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended, however they do."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


@asynccontextmanager
async def beside(*works: Coroutine[Any, Any, object]) -> AsyncGenerator[None, None]:
    """Do endless work beside a block; asyncio logs what else than the end of the block has ended it."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def wait_at_most(seconds: float | None, event: asyncio.Event) -> None:
    """Wait until an event is set, or some seconds have passed: `asyncio.wait_for` of 3.11 may lose a cancellation."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def let_go(values: Iterable[object]) -> None:
    """Free many values in a thread, some at a time, once their other holders have let go of them.

    The last holder of a long list would else free all of it at once, and nothing else could compute meanwhile.
    """
    held = list(values)
    if len(held) > MANY_VALUES:
        loop = asyncio.get_running_loop()
        loop.call_later(LINGER_SECONDS, loop.run_in_executor, None, _free, held)


def _free(held: list[object]) -> None:
    while held:
        del held[-MANY_VALUES:]


async def shielded(work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that is completed even if the caller is cancelled.

    If it then fails, asyncio would log that its error was never retrieved; but no caller is left to handle it.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_retrieve_error)
    return await asyncio.shield(task)


def _retrieve_error(ended: asyncio.Future[Any]) -> None:
    if not ended.cancelled():
        ended.exception()
