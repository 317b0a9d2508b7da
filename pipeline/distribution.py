"""The distribution that penstock is installed as, its version, and another one that has the name of the package."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, requires, version

from penstock.pipeline.errors import CannotStart

DISTRIBUTION = "penstock-llm"
"""The name by which penstock is installed."""

PACKAGE = "penstock"
"""The name of the package and of the command; on indexes of packages it belongs to other projects."""


def own_version() -> str:
    """Return the version of penstock."""
    return version(DISTRIBUTION)


def vllm_requirement() -> str:
    """Return the releases of vLLM that penstock runs with, as pip reads it.

    A message names vLLM, not the extra of penstock's that brings it: from an index, pip could take a stranger's package
    of penstock's name.
    """
    [found] = (each for each in requires(DISTRIBUTION) or () if each.startswith("vllm") and "gpu" in each)
    return found.partition(";")[0].strip()


def namesake() -> str:
    """Say which distribution named `PACKAGE` is installed beside penstock, or return "".

    Such a one is another project's, or penstock before 0.3.0.  Raises `CannotStart` if it has files in the package, or
    the command: then its code may run in place of penstock's, and pip removes files of both when it uninstalls one.
    """
    with suppress(PackageNotFoundError):
        other = distribution(PACKAGE)
        shared = [str(file) for file in other.files or () if file.parts[0].partition(".")[0] == PACKAGE]
        if other.entry_points.select(group="console_scripts", name=PACKAGE):
            shared.append(f"the command {PACKAGE}")
        if shared:
            raise CannotStart(
                f"{PACKAGE} {other.version} is installed beside {DISTRIBUTION}, and both own {shared[0]}: "
                f"uninstall both, then install {DISTRIBUTION}"
            )
        return (
            f"{PACKAGE} {other.version}, another project's, is installed beside {DISTRIBUTION}, which does not need it"
        )
    return ""
