"""The host of ``container``: each response has its own sandbox for commands, and its files persist between calls.

Commands may start other processes.  They all end with the command; none continues in the background.  With bubblewrap
the pid namespace guarantees this.  Without it the sandbox's first process ends them: Landlock (version 6) keeps the
commands from signalling that process, and limits its ``kill(-1)`` to the processes that it started.  One case is not
covered: if the kernel kills the first process for lack of memory, the commands running at that moment continue until
their processor time is used up.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from penstock.pipeline.frames import ResolvedRequest, ShellOutput
from penstock.stages.models.shell_calls import ArgumentsInvalid, ShellCommands, executed, shell_action, shell_call
from penstock.stages.services.sandbox.lease import SandboxHost, SandboxLease
from penstock.stages.services.sandbox.probe import offered
from penstock.stages.services.sandbox.process import SandboxDied
from penstock.stages.services.tools import HostSettings, ToolResult

_GRACE_SECONDS: Final = 10.0
"""Seconds that the sandbox may take to end a command after its time is up: a fork bomb slows it down, too."""
_NOTHING: Final = "(The command wrote nothing.)"

Output = dict[str, Any]


class ContainerHost(SandboxHost):
    """Runs commands."""

    def session(self, request: ResolvedRequest) -> ContainerSession:
        return ContainerSession(self.lease(request))


async def host(settings: HostSettings) -> ContainerHost | None:
    """Return the host, if its sandbox works on this machine."""
    sandbox = await offered("container", "Shell") if settings.slots else None
    return ContainerHost(sandbox, settings.slots, settings.limit) if sandbox else None


class ContainerSession:
    """One response's sandbox for commands."""

    def __init__(self, lease: SandboxLease) -> None:
        self._lease = lease
        self._limits = lease.limits

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        return shell_action(text)

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        try:
            call = shell_call(text)
        except ArgumentsInvalid as exc:
            return ToolResult(error=str(exc))
        async with self._lease.turn:
            outputs: list[Output] = []
            try:
                await self._run(call, seconds, outputs)
            except (SandboxDied, TimeoutError) as exc:
                await self._lease.drop()
                reason = str(exc) or "it did not answer"
                return _outcome(outputs, f"The sandbox has ended ({reason}). All files are lost.")
            except asyncio.CancelledError:
                self._lease.kill()
                raise
            return _outcome(outputs)

    async def close(self) -> None:
        await self._lease.close()

    async def _run(self, call: ShellCommands, seconds: float, outputs: list[Output]) -> None:
        """Append the output of each command to ``outputs``; stop after a command that times out."""
        now = asyncio.get_running_loop().time
        until = now() + seconds
        own = seconds if call.timeout_ms is None else call.timeout_ms / 1000
        process = await self._lease.process(seconds)
        for words in call.commands:
            share = max(min(own, until - now()), 0)
            question = {
                "words": executed(words),
                "workdir": call.workdir,
                "env": dict(call.env),
                "seconds": share,
                "keep": min(call.max_output_length or self._limits.output, self._limits.output),
            }
            outputs.append(_output(await process.ask(question, share + _GRACE_SECONDS)))
            if outputs[-1]["outcome"]["type"] == "timeout":
                return


def _output(answer: dict[str, Any]) -> Output:
    """Return the output of a command from the sandbox's answer, which is not trusted."""
    code = answer.get("code")
    flooded = "\n(The command was ended: it wrote without end.)" if answer.get("flooded") else ""
    ended = {"type": "exit", "exit_code": code} if isinstance(code, int) else {"type": "timeout"}
    return {
        "stdout": str(answer.get("stdout", "")),
        "stderr": str(answer.get("stderr", "")) + flooded,
        "outcome": ended,
    }


def _outcome(outputs: list[Output], error: str | None = None) -> ToolResult:
    result = "\n".join(_read(output) for output in outputs)
    return ToolResult(result=result, error=error, data=ShellOutput(tuple(outputs)) if outputs else None)


def _read(output: Output) -> str:
    ended = output["outcome"]
    if ended["type"] == "timeout":
        last = "(The command took too long and was ended, with all that it had started. Files are kept.)"
    else:
        last = f"(exit code {ended['exit_code']})" if ended["exit_code"] else ""
    parts = [part.rstrip("\n") for part in (output["stdout"], output["stderr"], last) if part]
    return "\n".join(parts) or _NOTHING
