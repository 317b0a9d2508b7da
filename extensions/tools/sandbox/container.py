"""The host of ``container``: each container has its own sandbox for commands, and its files persist between calls.

Commands may start other processes.  They all end with the command; none continues in the background.  With bubblewrap
the pid namespace guarantees this.  Without it the sandbox's first process ends them: Landlock (version 6) keeps the
commands from signalling that process, and limits its ``kill(-1)`` to the processes that it started.  One case is not
covered: if the kernel kills the first process for lack of memory, the commands running at that moment continue until
their processor time is used up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from penstock.extensions.tools.sandbox.kinds import container_description
from penstock.extensions.tools.sandbox.live_containers import Lease, OpenContainers, Turn
from penstock.extensions.tools.sandbox.probe import offered
from penstock.extensions.tools.sandbox.process import SandboxDied
from penstock.extensions.tools.sandbox.python import SandboxHost, files_of
from penstock.pipeline.frames import ResolvedRequest, ShellOutput
from penstock.services.tools import ContainerFiles, HostSettings, ToolResult
from penstock.stages.models.shell_calls import ArgumentsInvalid, ShellCommands, executed, shell_action, shell_call

_GRACE_SECONDS: Final = 10.0
"""Seconds that the sandbox may take to end a command after its time is up: a fork bomb slows it down, too."""
_NOTHING: Final = "(The command wrote nothing.)"

Output = dict[str, Any]


class ContainerHost(SandboxHost):
    """Runs commands."""

    def __init__(self, containers: OpenContainers) -> None:
        super().__init__("container", containers, container_description)

    def session(self, request: ResolvedRequest) -> ContainerSession:
        return ContainerSession(self.lease(request))


async def host(settings: HostSettings) -> ContainerHost | None:
    """Return the host, if its sandbox works on this machine."""
    containers = settings.containers
    if not isinstance(containers, OpenContainers) or not (sandbox := await offered("container", "Shell")):
        return None
    containers.sandboxes["container"] = sandbox
    return ContainerHost(containers)


class ContainerSession:
    """One response's use of the shell in a container."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._limits = lease.limits
        self.files: ContainerFiles | None = None

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        return shell_action(text)

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        try:
            call = shell_call(text)
        except ArgumentsInvalid as exc:
            return ToolResult(error=str(exc))
        outputs: list[Output] = []
        process = None
        try:
            async with self._lease.call(seconds) as turn:
                process = turn.process
                await self._run(turn, call, outputs)
                self.files = files_of(turn.container, await turn.container.files())
        except SandboxDied as exc:
            lost = " All files are lost." if process and process.excess == "disk" else ""
            return _outcome(outputs, f"The sandbox has ended ({exc}).{lost}")
        return _outcome(outputs)

    async def close(self) -> None:
        await self._lease.close()

    async def _run(self, turn: Turn, call: ShellCommands, outputs: list[Output]) -> None:
        """Append the output of each command to ``outputs``; stop after a command that times out."""
        now = asyncio.get_running_loop().time
        until = now() + turn.seconds
        own = turn.seconds if call.timeout_ms is None else call.timeout_ms / 1000
        for words in call.commands:
            share = max(min(own, until - now()), 0)
            question = {
                "words": executed(words),
                "workdir": call.workdir,
                "env": dict(call.env),
                "seconds": share,
                "keep": min(call.max_output_length or self._limits.output, self._limits.output),
            }
            try:
                answer = await turn.process.ask(question, share + _GRACE_SECONDS)
            except TimeoutError:
                raise SandboxDied("it did not answer") from None
            outputs.append(_output(answer, turn.process.shown))
            if outputs[-1]["outcome"]["type"] == "timeout":
                return


def _output(answer: dict[str, Any], shown: Callable[[str], str]) -> Output:
    """Return the output of a command from the sandbox's answer, which is not trusted."""
    code = answer.get("code")
    flooded = "\n(The command was ended: it wrote without end.)" if answer.get("flooded") else ""
    ended = {"type": "exit", "exit_code": code} if isinstance(code, int) else {"type": "timeout"}
    return {
        "stdout": shown(str(answer.get("stdout", ""))),
        "stderr": shown(str(answer.get("stderr", ""))) + flooded,
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
