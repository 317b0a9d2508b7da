"""Find the sandboxes that work on this machine, by starting each kind once when the server starts.

A sandbox that does not start in time counts as one that may work, because the machine may be busy: the calls of the
model try again.  Each start verifies the protections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.extensions.tools.sandbox.folder import Folder
from penstock.extensions.tools.sandbox.plan import MODES, Kind, Mode, Plan, SandboxLimits, interpreters
from penstock.extensions.tools.sandbox.process import Process, SandboxDied, SandboxLate
from penstock.extensions.tools.sandbox.seccomp import MACHINES
from penstock.pipeline.foreign_errors import named_error
from penstock.services.containers import HOME

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NoSandbox:
    """The result of `probe` if no sandbox works here, with the reason."""

    kind: Kind
    reason: str

    def describe(self) -> str:
        """Return the reason, for the log."""
        return f"no {self.kind}: {self.reason}"


@dataclass(eq=False)
class Sandbox:
    """A kind of sandbox that works here: one was started, confined itself and verified that."""

    plan: Plan
    weaker: tuple[Plan, ...] = ()
    """The plans to try if ``plan`` is refused; empty once a sandbox has started."""
    refusals: list[str] = field(default_factory=list)
    """The plans that were refused, with the reasons."""
    is_late: bool = False
    """True if no sandbox has started yet, as the latest one took too long."""

    async def start(self, folder: Folder, memory: int | None = None, disk: int | None = None) -> Process:
        """Start a sandbox of the strongest plan that works; raises `SandboxDied` or `OSError`.

        ``memory`` and ``disk`` are limits in bytes, if not those of the plan.  A plan that is refused is not tried
        again; one that took too long is.
        """
        while True:
            plan = self.plan
            try:
                process = await Process.start(plan.within(memory, disk), folder)
            except SandboxLate:
                self.is_late = True
                raise
            except (SandboxDied, OSError) as exc:
                if plan is self.plan:
                    self.refusals.append(f"{plan.mode} with {plan.interpreter}: {named_error(exc)}")
                    if not self.weaker:
                        raise
                    self.plan, *weaker = self.weaker
                    self.weaker = tuple(weaker)
            else:
                self.is_late, self.weaker = False, ()
                return process

    @property
    def has_home(self) -> bool:
        """True if its code finds the folder of the container at `HOME`."""
        return self.plan.isolates or self.plan.uses_link

    def describe(self) -> str:
        """Return the active protections, for the log."""
        if self.is_late:
            return f"{self.plan.kind}: it did not start in time; each call tries again"
        own = "own files, network and processes (bubblewrap), " if self.plan.isolates else "no namespaces, "
        user = "another user" if self.plan.drops_user else "the server's user"
        files = "" if self.has_home else f"no {HOME}, "
        return f"{self.plan.kind}: {own}{files}Landlock, seccomp, limits, {user}, {self.plan.interpreter}"


async def probe(
    kind: Kind,
    *,
    limits: SandboxLimits | None = None,
    interpreter: str | None = None,
    packages: Path | None = None,
    modes: Sequence[Mode] = MODES,
) -> Sandbox | NoSandbox:
    """Return a sandbox of the strongest mode that works, or the reasons why none does."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return NoSandbox(kind, "sandboxes need Linux on x86-64 or arm64")
    drops_user = os.geteuid() == 0
    counts = kind != "container" or drops_user
    uncounted = [] if counts else ["landlock: processes can only be counted if the server starts as root"]
    plans = [
        Plan(
            kind,
            mode=mode,
            interpreter=python,
            limits=limits or SandboxLimits(),
            packages=packages,
            drops_user=drops_user,
            uses_link=uses_link,
        )
        for mode in modes
        if mode == "bubblewrap" or counts
        for uses_link in ((False,) if mode == "bubblewrap" else (True, False))
        for python in interpreters(interpreter)
    ]
    if not plans:
        return NoSandbox(kind, "; ".join(uncounted))
    sandbox = Sandbox(plans[0], tuple(plans[1:]))
    folder = await asyncio.to_thread(Folder, drops_user=drops_user)
    try:
        process = await sandbox.start(folder)
        await process.end()
    except SandboxLate:
        return sandbox
    except (SandboxDied, OSError):
        return NoSandbox(kind, "; ".join(sandbox.refusals + uncounted))
    finally:
        await folder.remove()
    return sandbox


async def offered(kind: Kind, title: str) -> Sandbox | None:
    """Return the sandbox that works here for the tool with this ``title``, if one does, and log what was found."""
    found = await probe(kind)
    is_late = isinstance(found, Sandbox) and found.is_late
    logger.log(logging.WARNING if is_late else logging.INFO, "%s for the model: %s", title, found.describe())
    return found if isinstance(found, Sandbox) else None
