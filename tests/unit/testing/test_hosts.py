"""`check_host`: a host that keeps all rules passes, and each broken rule is found and named."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from penstock.services.tools import ToolResult
from penstock.testing import BrokenRule, ExampleCalls, check_host

CALLS = ExampleCalls(quick=("count", "3"), wrong=("count", "three"), slow=("wait", ""))


class Counter:
    """A host, and the session of each response."""

    def __init__(self) -> None:
        self.running = set[asyncio.Task[Any]]()
        self.is_closed = False

    def session(self, request: Any) -> Counter:
        return type(self)()

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        if self.is_closed:
            return ToolResult(error="It is closed.")
        task = asyncio.create_task(self._run(name, text))
        self.running.add(task)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(task)
        except TimeoutError:
            return ToolResult(error="It took too long.")
        except asyncio.CancelledError:
            return self.left(task)
        finally:
            self.running.discard(task)
            task.cancel()

    def left(self, task: asyncio.Task[Any]) -> ToolResult:
        if task.cancelled():
            return ToolResult(error="It was closed.")
        raise asyncio.CancelledError

    async def _run(self, name: str, text: str) -> ToolResult:
        if name == "wait":
            await asyncio.Event().wait()
        if not text.isdecimal():
            return ToolResult(error="It is no number.")
        await asyncio.sleep(0)
        return ToolResult(str(int(text) + 1))

    async def close(self) -> None:
        self.is_closed = True
        for task in self.running:
            task.cancel()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.testing.hosts.GRACE_SECONDS", 1.0)
    monkeypatch.setattr("penstock.testing.hosts._PATIENCE", 30.0)
    monkeypatch.setattr("penstock.testing.hosts._MOMENT", 0.02)


async def test_host_keeps_all_rules() -> None:
    await check_host(Counter(), CALLS)
    await check_host(Counter(), ExampleCalls(CALLS.quick, CALLS.wrong))


@pytest.mark.parametrize("seconds", [2, 60])
async def test_host_whose_calls_end_by_themselves_is_checked_quickly(seconds: float) -> None:
    async with asyncio.timeout(50):
        await check_host(Open(), CALLS, seconds=seconds)


class Raising(Counter):
    async def _run(self, name: str, text: str) -> ToolResult:
        return ToolResult(str(int(text) + 1))


class Textless(Counter):
    async def _run(self, name: str, text: str) -> Any:
        return ToolResult(3)  # type: ignore[arg-type]


class Bare(Counter):
    async def _run(self, name: str, text: str) -> Any:
        return "4"


class Silent(Counter):
    async def _run(self, name: str, text: str) -> ToolResult:
        return await super()._run(name, text) if text.isdecimal() else ToolResult()


class Endless(Counter):
    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        return await super().run(name, text, 1000)


class Deaf(Counter):
    def left(self, task: asyncio.Task[Any]) -> ToolResult:
        return ToolResult(error="It was cancelled.")


class Exclusive(Counter):
    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        return ToolResult(error="It is busy.") if self.running else await super().run(name, text, seconds)


class Open(Counter):
    async def close(self) -> None:
        pass


class Stuck(Counter):
    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        try:
            return await super().run(name, text, seconds)
        finally:
            if self.is_closed:
                await asyncio.Event().wait()


class OnceClosed(Counter):
    async def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed twice")
        await super().close()


class Leaky(Counter):
    def session(self, request: Any) -> Counter:
        return Counter()

    async def close(self) -> None:
        self.left_over = asyncio.create_task(asyncio.Event().wait())


class RaisingForNothing(Counter):
    async def _run(self, name: str, text: str) -> ToolResult:
        if not text:
            raise LookupError("no text")
        return await super()._run(name, text)


class EndedByAnError(Counter):
    async def _run(self, name: str, text: str) -> ToolResult:
        self.is_closed |= not text.isdecimal()
        return await super()._run(name, text)


class Wordless(Counter):
    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        result = await super().run(name, text, seconds)
        return ToolResult() if name == "wait" else result


class EndedByTheLimit(Counter):
    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        result = await super().run(name, text, seconds)
        self.is_closed |= name == "wait"
        return result


class Blocking(Counter):
    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        if name != "wait":
            return await super().run(name, text, seconds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return ToolResult(error="It took too long.")


class Linked(Counter):
    """What ends one session ends those of all responses."""

    def __init__(self, ended: list[str] | None = None) -> None:
        super().__init__()
        self.ended = [] if ended is None else ended

    def session(self, request: Any) -> Counter:
        return type(self)(self.ended)

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        return ToolResult(error=self.ended[0]) if self.ended else await super().run(name, text, seconds)


class CancelledForAll(Linked):
    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        try:
            return await super().run(name, text, seconds)
        except asyncio.CancelledError:
            self.ended.append("It was cancelled.")
            raise


class ClosedForAll(Linked):
    async def close(self) -> None:
        if self.running:
            self.ended.append("It was closed.")
        await super().close()


class RaisingOnceClosed(Counter):
    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        if self.is_closed:
            raise RuntimeError("It is closed.")
        return await super().run(name, text, seconds)


class HostClosedOnce(OnceClosed):
    def session(self, request: Any) -> Counter:
        return Counter()


class Lacking(Counter):
    def session(self, request: Any) -> Any:
        return object()


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (Lacking, "members: the method run of object is missing: write it as `async def run"),
        (Raising, "errors: errors are in the result, and not raised: ValueError"),
        (Textless, "run: the result and the error of .* are texts"),
        (Bare, "run: run returns a ToolResult, not '4'"),
        (Silent, "errors: the model reads why a call failed"),
        (RaisingForNothing, "errors: errors are in the result, and not raised: LookupError"),
        (EndedByAnError, "errors: the quick call succeeds; its error was 'It is closed.'"),
        (Endless, "seconds: run ends by itself"),
        (Wordless, "seconds: the model reads that a call took too long"),
        (EndedByTheLimit, "seconds: the quick call succeeds; its error was 'It is closed.'"),
        (Blocking, "seconds: a call that takes long awaits"),
        (Deaf, "cancellation: a call that is cancelled raises CancelledError"),
        (CancelledForAll, "cancellation: the quick call succeeds; its error was 'It was cancelled.'"),
        (Exclusive, "concurrency: the quick call succeeds; its error was 'It is busy.'"),
        (Stuck, "session: a call that runs while its session is closed ends"),
        (RaisingOnceClosed, "session: errors are in the result, and not raised: RuntimeError"),
        (ClosedForAll, "session: the quick call succeeds; its error was 'It was closed.'"),
        (OnceClosed, "session: it raised RuntimeError: closed twice"),
        (HostClosedOnce, "close: it raised RuntimeError: closed twice"),
        (Leaky, "close: close leaves no task running: Event.wait, Event.wait"),
    ],
)
async def test_broken_rule_is_named(kind: type[Counter], broken: str) -> None:
    with pytest.raises(BrokenRule, match=broken) as wrong:
        await check_host(kind(), CALLS, seconds=60)
    assert wrong.value.rule == broken.partition(":")[0]


async def test_slow_call_has_to_be_slow() -> None:
    with pytest.raises(BrokenRule, match="the slow call takes longer than"):
        await check_host(Counter(), ExampleCalls(CALLS.quick, CALLS.wrong, CALLS.quick))
