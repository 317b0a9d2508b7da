"""Work in tasks and threads of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

MANY: Final = 1_000
"""Values from which on work on each of them happens apart from the event loop."""

LINGER: Final = 1.0
"""Seconds after which what a request has left is held by nothing else."""

LARGE: Final = 2**18
"""Bytes from which on their reading, writing or copying happens apart from the event loop."""


async def apart(is_long: bool, work: Callable[..., Result], *arguments: Any) -> Result:
    """Return what ``work`` returns; it computes in a thread if that takes long."""
    return await asyncio.to_thread(work, *arguments) if is_long else work(*arguments)


def let_go(values: Iterable[object]) -> None:
    """Free many values in a thread, some at a time, once their other holders have let go of them.

    The last holder of a long list would else free all of it at once, and nothing else could compute meanwhile.
    """
    held = list(values)
    if len(held) > MANY:
        loop = asyncio.get_running_loop()
        loop.call_later(LINGER, loop.run_in_executor, None, _free, held)


def _free(held: list[object]) -> None:
    while held:
        del held[-MANY:]


async def unhindered(work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that is completed even if the caller is cancelled.

    If it then fails, asyncio would log that its error was never retrieved; but no caller is left to handle it.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(task)
