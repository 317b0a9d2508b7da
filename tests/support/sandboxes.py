"""Sandboxes in the modes that the machine offers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest

from penstock.extensions.tools.sandbox.container import ContainerHost
from penstock.extensions.tools.sandbox.live_containers import OpenContainers
from penstock.extensions.tools.sandbox.plan import MODES, Kind, Mode, SandboxLimits
from penstock.extensions.tools.sandbox.probe import Sandbox, probe
from penstock.extensions.tools.sandbox.python import PythonHost
from penstock.services.slots import Slots

LANDLOCK_CREATE_RULESET, ONLY_ITS_VERSION = 444, 1


async def available(
    kind: Kind, modes: Sequence[Mode] = MODES, *, limits: SandboxLimits | None = None, packages: Path | None = None
) -> Sandbox:
    """Return a sandbox in the first mode that the machine offers; skip the test if it offers none."""
    lacks = [_lack(kind, mode) for mode in modes]
    if None not in lacks:
        pytest.skip("; ".join(f"{mode}: {lack}" for mode, lack in zip(modes, lacks, strict=True)))
    found = await probe(kind, modes=(modes[lacks.index(None)],), limits=limits, packages=packages)
    assert isinstance(found, Sandbox), found.reason
    return found


def lives(process: psutil.Process) -> bool:
    """Return True if a process has not ended; it may end, and be gone, while one looks."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@cache
def _lack(kind: Kind, mode: Mode) -> str | None:
    """Name the part of the machine that a mode needs and that is missing."""
    if ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, ONLY_ITS_VERSION) < 1:
        return "the kernel has no Landlock"
    if mode == "landlock":
        return "only root can count the processes of a container" if kind == "container" and os.geteuid() else None
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    namespaces = subprocess.run(
        ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, check=False
    )
    return "the kernel refuses namespaces" if namespaces.returncode else None


def code_host(sandbox: Sandbox, slots: Slots | None = None) -> PythonHost:
    """Return a host of Python with containers of its own."""
    return PythonHost(OpenContainers(slots or Slots(8), sandboxes={"python": sandbox}))


def shell_host(sandbox: Sandbox) -> ContainerHost:
    """Return a host of the shell with containers of its own."""
    return ContainerHost(OpenContainers(Slots(8), sandboxes={"container": sandbox}))
