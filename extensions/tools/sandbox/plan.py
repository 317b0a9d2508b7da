"""The plan of a sandbox: its command line, and the order that its first program follows.

There are two modes.  With ``bubblewrap`` the process has its own file system, network and process ids.  With
``landlock`` it shares the host's, and is denied access to them.  In both modes it runs under Landlock, a seccomp filter
and resource limits, and as another user if the server is root.

In both modes the folder of the container is at `HOME`.  Without a file system of its own, the path is a symbolic link
of the machine into ``/proc/self``, which leads each process to the folder that it holds open.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from penstock.extensions.tools.sandbox.seccomp import MACHINES, Permissions, program
from penstock.services.containers import HOME

Kind: TypeAlias = Literal["python", "container", "program"]
Mode: TypeAlias = Literal["bubblewrap", "landlock"]
MODES: Final[tuple[Mode, ...]] = ("bubblewrap", "landlock")

NOBODY: Final = 65534
"""The user inside a sandbox with bubblewrap."""
DESCRIPTOR: Final = 100
"""The descriptor of the folder in a sandbox that finds it by the link."""
LINK: Final = f"/proc/self/fd/{DESCRIPTOR}"
"""The target of the link `HOME`."""
OWN: Final = (HOME, "/tmp")  # noqa: S108 - its own
"""The writable folders with bubblewrap; all but `HOME`, the folder of the container, are file systems in memory."""
UNREADABLE: Final = "/etc/passwd"
"""A file that every host has and no sandbox can read.  Each sandbox checks that at its start."""

_HERE: Final = Path(__file__).parent
_PROGRAMS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "python": ("repl",),
    "container": ("head_tail", "shell"),
    "program": ("repl", "program"),
}
"""The programs that each kind of sandbox gets, the one that it runs last."""
_FILES: Final = ("/etc/ld.so.cache", "/etc/localtime")
_LIBRARIES: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives")
_DEVICES: Final = ("/dev/zero", "/dev/random", "/dev/urandom", "/dev/full")


@dataclass(frozen=True)
class SandboxLimits:
    """The resource limits of a sandbox."""

    memory: int = 512 << 20
    """Bytes of address space of each process."""
    processor_seconds: int = 300
    """Processor time of each process, in seconds."""
    processes: int = 64
    """Processes and threads; a sandbox for Python or a program has one process."""
    disk: int = 64 << 20
    """Bytes of files.  They are measured a few times a second, so they may exceed the limit for a moment."""
    output: int = 64_000
    """Bytes kept of the output of a Python call or a program, and of each stream of a command."""
    flood: int = 64 << 20
    """Bytes of output in one call after which a command, or a sandbox for Python or a program, is ended."""

    def of_kernel(self, others: int) -> dict[str, int]:
        """Return the limits by the names of the kernel (``RLIMIT_``).

        The kernel counts processes and threads per user: ``others`` is the number that the user has already.
        """
        return {
            "NPROC": others + self.processes,
            "AS": self.memory,
            "CPU": self.processor_seconds,
            "FSIZE": self.disk,
            "NOFILE": 128,
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
        }


@dataclass(frozen=True)
class Plan:
    """The settings common to all sandboxes of one kind."""

    kind: Kind
    mode: Mode
    interpreter: str
    limits: SandboxLimits = SandboxLimits()
    packages: Path | None = None
    """A folder of packages that Python code may import besides the standard library."""
    drops_user: bool = False
    """True if each sandbox runs as a user of its own."""
    uses_link: bool = False
    """True if `HOME` is a link of the machine, through which each sandbox finds its own folder."""

    @property
    def isolates(self) -> bool:
        """True if the sandbox has its own files, processes and network."""
        return self.mode == "bubblewrap"

    @property
    def seed(self) -> str:
        """The seed of Python's hashes, which order its sets: one for all programs, as they may have to run again."""
        return "0" if self.kind == "program" else ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The host's folders and files that the sandbox may read."""
        prefix = Path(self.interpreter).parent.parent
        programs = (*_SYSTEM, str(prefix / "bin")) if self.kind == "container" else (*_LIBRARIES, self.interpreter)
        packages = () if self.packages is None else (str(self.packages),)
        return (*programs, str(prefix / "lib"), str(prefix / "lib64"), *packages, *_FILES)

    def home(self, folder: Path) -> str:
        """Return the path inside of the folder of a container."""
        return HOME if self.isolates or self.uses_link else str(folder)

    def within(self, memory: int | None = None, disk: int | None = None) -> Plan:
        """Return the plan with another limit of memory, and with a lower one of disk, in bytes, if they are given."""
        memory = self.limits.memory if memory is None else memory
        disk = self.limits.disk if disk is None else min(disk, self.limits.disk)
        return replace(self, limits=replace(self.limits, memory=memory, disk=disk))

    def command(self, status: int, folder: Path) -> list[str]:
        """Return the command line of a sandbox in a folder.

        bubblewrap writes the pid of the first process inside to ``status``, a descriptor.
        """
        alone = "-sP" if self.seed else "-I"  # which ignores the seed
        python = [self.interpreter, alone, "-B", "-X", "utf8", "-c", source("confined")]
        return [*self._bubblewrap(status, folder), "--", *python] if self.isolates else python

    def order(self, folder: Path) -> dict[str, Any]:
        """Return the order for `confined`, the first program: its restrictions, and the program to run."""
        machine = MACHINES[platform.machine()]
        runs_programs = self.kind == "container"
        permissions = Permissions(runs_programs, metadata=self.isolates or (runs_programs and self.drops_user))
        processes = ("/proc",) if self.isolates and runs_programs else ()
        return {
            # without a pid namespace the shell's first process must outlive the server, to end the others
            "dies_with_parent": self.isolates or not runs_programs,
            "scope": not self.isolates and runs_programs,
            "limits": self.limits.of_kernel(0 if self.isolates or self.drops_user else tasks(os.getuid())),
            "read": [*self.reads, *_DEVICES, *processes],
            "write": ["/dev/null", *(OWN if self.isolates else (str(folder),))],
            "unreadable": UNREADABLE,
            "filter": program(machine, permissions).hex(),
            "programs": {f"{__package__}.{name}": source(name) for name in _PROGRAMS[self.kind]},
            "packages": None if self.packages is None else str(self.packages),
            "home": self.home(folder),
            "descriptor": DESCRIPTOR if self.uses_link else None,
            "flood": self.limits.flood,
        }

    def _bubblewrap(self, status: int, folder: Path) -> list[str]:
        size = str(self.limits.disk)
        processes = ["--proc", "/proc"] if self.kind == "container" else []
        return [
            *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1"),
            *("--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL", "--hostname", "sandbox"),
            *("--json-status-fd", str(status), "--dev", "/dev", "--remount-ro", "/dev", *processes),
            *("--bind", str(folder), HOME),
            *(word for place in OWN if place != HOME for word in ("--size", size, "--tmpfs", place)),
            *(word for path in self.reads for word in ("--ro-bind-try", path, path)),
            *("--remount-ro", "/", "--chdir", HOME),
        ]


def link_home() -> None:
    """Make `HOME` the link through which each sandbox finds its own folder; raises `OSError` if it is anything else."""
    with contextlib.suppress(FileExistsError):  # an earlier sandbox, or another server, has made it
        Path(HOME).symlink_to(LINK)
    if str(Path(HOME).readlink()) != LINK:
        raise FileExistsError(f"{HOME} leads elsewhere")


def tasks(user: int) -> int:
    """Return the number of processes and threads of a user."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process may end between the listing and this
            if process.stat().st_uid == user:
                count += sum(1 for _ in (process / "task").iterdir())
    return count


def environment(home: str, seed: str) -> Mapping[str, str]:
    """Return all environment variables of a sandbox."""
    return {
        **({"PYTHONHASHSEED": seed} if seed else {}),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "PWD": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "MPLBACKEND": "Agg",
        "OPENBLAS_NUM_THREADS": "1",  # each thread takes address space
    }


def source(name: str) -> str:
    """Return the text of a program that runs inside a sandbox."""
    return (_HERE / f"{name}.py").read_text(encoding="utf-8")


def interpreters(chosen: str | None) -> tuple[str, ...]:
    """Return the Pythons to try: only the operator's choice if there is one, else the server's own and the system's."""
    if chosen is not None:
        return (chosen,)
    own = Path(getattr(sys, "_base_executable", sys.executable))
    paths = (os.path.realpath(path) for path in (own, "/usr/bin/python3", "/usr/local/bin/python3"))
    return tuple(dict.fromkeys(paths))
