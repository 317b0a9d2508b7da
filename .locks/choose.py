"""Choose the versions of the lock files: ``python .locks/choose.py [OPTIONS OF UV PIP COMPILE]``.

A version that is in a file stays while the requirements in ``pyproject.toml`` permit it; with ``--upgrade``, the newest
versions are chosen.  The files for one environment have the same version of a package.
"""

from __future__ import annotations

import subprocess
import sys

from install import has_uv, options_for_uv

LEFT_OUT = ("--excludes", ".locks/left_out.txt")
LOCKS = {
    "cpu": ("pyproject.toml", "--extra", "cpu", *LEFT_OUT),
    "test": ("pyproject.toml", "--group", "test", "-c", ".locks/cpu.txt", *LEFT_OUT),
    "site": ("--group", "site", "-c", ".locks/cpu.txt", "-c", ".locks/test.txt"),
    "clients": ("--group", "clients", "--overrides", ".locks/overrides.txt"),
    "trainer": ("--group", "trainer", "-c", ".locks/cpu.txt", "--overrides", ".locks/overrides.txt"),
}
"""The lock files, each with what it has to hold: extras and groups of ``pyproject.toml``."""
OLDEST_PYTHON = "3.11"
"""The Python whose packages are chosen; ``make pythons`` tests them on newer ones."""


def main() -> int:
    """Write the files, and return the status of uv."""
    if not has_uv():
        return 1
    options, environment = options_for_uv(torch_backend="cpu")
    command = (sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-header", "--no-annotate")
    for name, contents in LOCKS.items():
        arguments = (*contents, "--python-version", OLDEST_PYTHON, "-o", f".locks/{name}.txt", *sys.argv[1:])
        if status := subprocess.run((*command, *options, *arguments), env=environment, check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
