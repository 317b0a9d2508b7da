"""The ``penstock`` command: serve a model, and work with recorded responses."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

from penstock.pipeline.distribution import DISTRIBUTION, own_version
from penstock.pipeline.errors import CannotRun, CannotStart
from penstock.pipeline.logs import nearest

COMMANDS = "penstock.commands"
"""The group of entry points for commands: functions that take the arguments that follow the name."""


DOORS = {
    "Operate: penstock demo, then penstock serve MODEL, or penstock serve --engine URL": (
        *("demo", "serve", "batch", "check", "config", "keys", "usage"),
    ),
    "Build: penstock launch claude": ("launch", "conformance"),
    "Extend: penstock show": ("show",),
    "Train: penstock rollouts RECORDINGS": ("rollouts",),
    "Find faults: penstock inspect RECORDING": ("inspect", "record", "replay", "diff", "shrink", "compare"),
}
"""The commands by what they are for, each group under the first ones to try."""


def own_commands() -> dict[str, EntryPoint]:
    """Return penstock's own commands by name; they are found sooner than those of all packages."""
    return {point.name: point for point in distribution(DISTRIBUTION).entry_points.select(group=COMMANDS)}


def all_commands() -> dict[str, EntryPoint]:
    """Return the commands of all packages by name.  One of penstock's own has the name before another."""
    return {point.name: point for point in entry_points(group=COMMANDS)} | own_commands()


def summary(command: EntryPoint) -> str:
    """Return the first line of a command's docstring, read from its file: some take seconds to import."""
    module = find_spec(command.module)
    source = Path(module.origin).read_bytes() if module and module.origin else b""
    defined = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return next((ast.get_docstring(node) or "" for node in defined if node.name == command.attr), "").partition("\n")[0]


def usage(known: Mapping[str, EntryPoint]) -> str:
    """Return the known commands, by what they are for."""
    others = sorted(known.keys() - {name for names in DOORS.values() for name in names})
    doors = {**DOORS, "Of other packages": others}
    lines = {door: [f"  {name:12s}{summary(known[name])}" for name in doors[door] if name in known] for door in doors}
    groups = ("\n".join((door, *found)) for door, found in lines.items() if found)
    return "\n\n".join(("usage: penstock COMMAND ...", *groups, "penstock COMMAND --help says more."))


def version() -> str:
    """Return the versions of penstock, of vLLM if it is installed, and of Python."""
    from penstock.stages.models.vllm_private import installed_vllm

    vllm = installed_vllm()
    engine = f"vLLM {vllm}" if vllm else "without vLLM"
    return f"{DISTRIBUTION} {own_version()}, {engine}, Python {python_version()}"


def main() -> None:
    """Run the command that the command line names."""
    _open_missing_streams()
    name, *arguments = sys.argv[1:] or [""]
    if name == "--version":
        print(version())
        return
    known = own_commands()
    if name not in known:
        known = all_commands()
    if name in ("", "-h", "--help"):
        print(usage(known), file=None if name else sys.stderr)
        sys.exit(0 if name else 2)
    if name not in known:
        print(
            f"penstock: there is no command {name}{nearest(name, known)}; penstock --help lists them", file=sys.stderr
        )
        sys.exit(2)
    try:
        with _quiet_without_a_reader():
            known[name].load()(arguments)
    except (CannotRun, CannotStart) as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(2)


def _open_missing_streams() -> None:
    """Open the standard streams that the parent process closed: else a socket or a file would get their numbers."""
    for name in ("stdin", "stdout", "stderr"):  # each gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: PTH123, SIM115  (open until the end)


@contextmanager
def _quiet_without_a_reader() -> Iterator[None]:
    """End the command without a traceback if the reader of its output, such as ``head``, is gone."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail


if __name__ == "__main__":
    main()
