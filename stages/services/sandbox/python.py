"""The host of ``python``: each response has its own Python, and its variables persist between calls."""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.pipeline.frames import CodeOutputs, ResolvedRequest
from penstock.stages.services.sandbox.lease import SandboxHost, SandboxLease
from penstock.stages.services.sandbox.probe import offered
from penstock.stages.services.sandbox.process import SandboxDied
from penstock.stages.services.tools import HostSettings, ToolResult

_GRACE_SECONDS: Final = 5.0
"""Seconds that interrupted code may take to end: on a busy machine it waits for its turn."""
_NOTHING: Final = "(The code wrote nothing.)"


class PythonHost(SandboxHost):
    """Runs Python code."""

    def session(self, request: ResolvedRequest) -> PythonSession:
        return PythonSession(self.lease(request))


async def host(settings: HostSettings) -> PythonHost | None:
    """Return the host, if its sandbox works on this machine."""
    sandbox = await offered("python", "Python") if settings.slots else None
    return PythonHost(sandbox, settings.slots, settings.limit) if sandbox else None


class PythonSession:
    """One response's Python sandbox."""

    def __init__(self, lease: SandboxLease) -> None:
        self._lease = lease

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        """Run one cell.  An exception in the code is output; a timeout or a dead sandbox is an error."""
        async with self._lease.turn:
            try:
                return await self._run(text, seconds)
            except SandboxDied as exc:
                written = self._lease.written
                await self._lease.drop()
                return _outcome(written, f"The sandbox has ended ({exc}). All variables and files are lost.")
            except asyncio.CancelledError:
                self._lease.kill()
                raise

    async def close(self) -> None:
        await self._lease.close()

    async def _run(self, code: str, seconds: float) -> ToolResult:
        now = asyncio.get_running_loop().time
        until = now() + seconds
        process = await self._lease.process(seconds)
        try:
            await process.ask({"code": code}, until - now())
        except TimeoutError:
            return await self._interrupt(seconds)
        return _outcome(process.written)

    async def _interrupt(self, seconds: float) -> ToolResult:
        """Interrupt a cell that takes too long; end the sandbox if that does not help."""
        process = await self._lease.process(0)
        process.interrupt()
        late = f"The code ran longer than {seconds:g} seconds"
        try:
            await process.answer(_GRACE_SECONDS)
        except TimeoutError:
            await self._lease.drop()
            return _outcome(process.written, f"{late} and was killed. All variables and files are lost.")
        return _outcome(process.written, f"{late} and was interrupted. Variables and files are kept.")


def _outcome(written: str, error: str | None = None) -> ToolResult:
    logs = CodeOutputs(({"type": "logs", "logs": written},)) if written else None
    return ToolResult(result=written or ("" if error else _NOTHING), error=error, data=logs)
