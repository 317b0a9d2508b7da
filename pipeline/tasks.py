"""Work in tasks of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def unhindered(work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that is completed even if the caller is cancelled.

    If it then fails, asyncio would log that its error was never retrieved; but no caller is left to handle it.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(task)
