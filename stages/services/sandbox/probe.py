"""Find the sandboxes that work on this machine, by starting each kind once when the server starts."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.stages.services.sandbox.plan import MODES, Kind, Mode, Plan, SandboxLimits, interpreters
from penstock.stages.services.sandbox.process import Process, SandboxDied
from penstock.stages.services.sandbox.seccomp import MACHINES


@dataclass(frozen=True)
class NoSandbox:
    """The result of `probe` if no sandbox works here, with the reason."""

    kind: Kind
    reason: str

    def describe(self) -> str:
        """Return the reason, for the log."""
        return f"no {self.kind}: {self.reason}"


@dataclass(frozen=True)
class Sandbox:
    """A kind of sandbox that works here: one was started, confined itself and verified that."""

    plan: Plan

    def describe(self) -> str:
        """Return the active protections, for the log."""
        own = "own files, network and processes (bubblewrap), " if self.plan.isolates else "no namespaces, "
        user = "another user" if self.plan.drops_user else "the server's user"
        return f"{self.plan.kind}: {own}Landlock, seccomp, limits, {user}, {self.plan.interpreter}"


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
    reasons = []
    for mode in modes:
        if mode == "landlock" and kind == "container" and not drops_user:
            reasons.append("landlock: processes can only be counted if the server starts as root")
            continue
        for python in interpreters(interpreter):
            plan = Plan(kind, mode, python, limits or SandboxLimits(), packages, drops_user)
            failure = await _failure(plan)
            if failure is None:
                return Sandbox(plan)
            reasons.append(f"{mode} with {python}: {failure}")
    return NoSandbox(kind, "; ".join(reasons))


async def _failure(plan: Plan) -> str | None:
    """Start a sandbox; return the error, or None if it works."""
    try:
        process = await Process.start(plan)
    except (SandboxDied, OSError) as exc:
        return str(exc)
    await process.end()
    return None
