"""Rules that a kit checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol, TypeVar

from penstock.pipeline.lifecycle.rules import InvariantBroken, rule

Tester = TypeVar("Tester")


class Closable(Protocol):
    """A part that is closed after its check."""

    async def close(self) -> None:
        """Close it."""
        ...


class BrokenRule(AssertionError):
    """An engine broke a rule of `Engine`, or another part one of its own; ``rule`` is the name of the rule."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.rule = name


async def keep_all(rules: Mapping[str, Callable[[Tester], Awaitable[None]]], tester: Tester, seconds: float) -> None:
    """Await the check of each rule; raise `BrokenRule` for the first that fails, or takes more than ``seconds``."""
    for name, check in rules.items():
        with checking(name):
            try:
                async with asyncio.timeout(seconds):
                    await check(tester)
            except TimeoutError:
                raise InvariantBroken(f"it took more than {seconds:g} seconds") from None


@contextmanager
def checking(name: str) -> Iterator[None]:
    """Raise `BrokenRule` for an error of the block, which checks the rule ``name``."""
    try:
        yield
    except InvariantBroken as broken:
        raise BrokenRule(name, str(broken)) from None
    except Exception as error:
        raise BrokenRule(name, f"it raised {type(error).__name__}: {error}") from error


@asynccontextmanager
async def closing_broken(checked: Closable) -> AsyncGenerator[None, None]:
    """Close what is checked in the block, if it has broken a rule; it may lack the method for that."""
    try:
        yield
    except BrokenRule:
        with suppress(Exception):
            await checked.close()
        raise


async def check_tasks(before: set[asyncio.Task[Any]]) -> None:
    """Raise `InvariantBroken` if a task runs that did not run ``before``."""
    running = asyncio.all_tasks() - before - {asyncio.current_task()}
    if running:
        await asyncio.wait(running, timeout=1.0)
    names = sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in running if not task.done())
    rule(not names, f"close leaves no task running: {', '.join(names)}")
