"""The host of ``container``: each response has a sandbox of its own for commands, whose files stay from call to call.

Commands may start others.  All that a command has started ends with it, so that nothing runs on in the background.
With bubblewrap that is certain, by the pid namespace.  Without it the sandbox's first process sees to it: Landlock
(version 6) keeps the commands from signalling it, and keeps its own ``kill(-1)`` to what it started.  What this does
not cover is that first process being killed from outside, by the kernel for want of memory: then what runs at that
moment goes on until its processor time is used up.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from penstock.pipeline.frames import Conversation
from penstock.stages.models.shell_calls import ArgumentsInvalid, ShellCall, executed, shell_action, shell_call
from penstock.stages.services.sandbox.plan import Limits
from penstock.stages.services.sandbox.probe import Sandbox
from penstock.stages.services.sandbox.process import SandboxDied
from penstock.stages.services.sandbox.tenancy import Tenancy
from penstock.stages.services.tools import Outcome

_GRACE_SECONDS: Final = 2.0
"""How long the sandbox may take to end a command whose time is over."""
_NOTHING: Final = "(The command wrote nothing.)"

Output = dict[str, Any]


class ContainerHost:
    """Runs commands in sandboxes, at most so many at once; more wait."""

    def __init__(self, sandbox: Sandbox, most: int = 32) -> None:
        self._sandbox = sandbox
        self._places = asyncio.Semaphore(most)

    def session(self, conversation: Conversation) -> ContainerSession:
        """A session for one response; nothing is started yet."""
        plan = self._sandbox.plan
        return ContainerSession(Tenancy(plan, self._places), plan.limits)

    def describe(self) -> str:
        """The protections that are on, for the log."""
        return self._sandbox.describe()

    async def close(self) -> None:
        """Sandboxes belong to sessions, so there is nothing to close."""


class ContainerSession:
    """One response's sandbox for commands."""

    def __init__(self, tenancy: Tenancy, limits: Limits) -> None:
        self._tenancy = tenancy
        self._limits = limits

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        """The commands, as one would type them."""
        return shell_action(text)

    async def run(self, name: str, text: str, seconds: float) -> Outcome:
        """Run the commands of a call one after another."""
        try:
            call = shell_call(text)
        except ArgumentsInvalid as exc:
            return Outcome(error=str(exc))
        async with self._tenancy.turn:
            outputs: list[Output] = []
            try:
                await self._run(call, seconds, outputs)
            except (SandboxDied, TimeoutError) as exc:
                await self._tenancy.drop()
                reason = str(exc) or "it did not answer"
                return _outcome(outputs, f"The sandbox has ended ({reason}). All files are lost.")
            except asyncio.CancelledError:
                self._tenancy.kill()
                raise
            return _outcome(outputs)

    async def close(self) -> None:
        """End all processes, and wait until nothing of them is left."""
        await self._tenancy.close()

    async def _run(self, call: ShellCall, seconds: float, outputs: list[Output]) -> None:
        """Add the output of each command that ran; a command that takes too long is the last."""
        now = asyncio.get_running_loop().time
        until = now() + seconds
        own = seconds if call.timeout_ms is None else call.timeout_ms / 1000
        process = await self._tenancy.process(seconds)
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
    """What the sandbox told of a command, believing nothing of it."""
    code = answer.get("code")
    flooded = "\n(The command was ended: it wrote without end.)" if answer.get("flooded") else ""
    ended = {"type": "exit", "exit_code": code} if isinstance(code, int) else {"type": "timeout"}
    return {
        "stdout": str(answer.get("stdout", "")),
        "stderr": str(answer.get("stderr", "")) + flooded,
        "outcome": ended,
    }


def _outcome(outputs: list[Output], error: str | None = None) -> Outcome:
    result = "\n".join(_read(output) for output in outputs)
    return Outcome(result=result, error=error, data=tuple(outputs))


def _read(output: Output) -> str:
    """What the model reads of a command."""
    ended = output["outcome"]
    if ended["type"] == "timeout":
        last = "(The command took too long and was ended, with all that it had started. Files are kept.)"
    else:
        last = f"(exit code {ended['exit_code']})" if ended["exit_code"] else ""
    parts = [part.rstrip("\n") for part in (output["stdout"], output["stderr"], last) if part]
    return "\n".join(parts) or _NOTHING
