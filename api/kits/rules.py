"""Rules that a kit checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from penstock.pipeline.lifecycle.rules import InvariantBroken, rule


class BrokenRule(AssertionError):
    """An engine broke a rule of `Engine`, or another part one of its own; ``rule`` is the name of the rule."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.rule = name


async def keep(name: str, check: Awaitable[None], seconds: float) -> None:
    """Await the check of the rule ``name``; raise `BrokenRule` if it fails, or takes more than ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await check
    except InvariantBroken as broken:
        raise BrokenRule(name, str(broken)) from None
    except TimeoutError:
        raise BrokenRule(name, f"it took more than {seconds:g} seconds") from None
    except Exception as error:
        raise BrokenRule(name, f"it raised {type(error).__name__}: {error}") from error


async def check_tasks(before: set[asyncio.Task[Any]]) -> None:
    """Raise `InvariantBroken` if a task runs that did not run ``before``."""
    running = asyncio.all_tasks() - before - {asyncio.current_task()}
    if running:
        await asyncio.wait(running, timeout=0.1)
    names = sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in running if not task.done())
    rule(not names, f"close leaves no task running: {', '.join(names)}")
