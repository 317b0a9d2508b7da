"""The ``penstock`` command: serve a model, and work with recorded responses."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version as installed
from platform import python_version

from penstock.pipeline.errors import CannotRun, CannotStart
from penstock.pipeline.logs import nearest

# Each command imports its module when it runs: the imports of ``serve`` take longer than the other commands.


def serve(arguments: Sequence[str]) -> None:
    """Serve a model over HTTP."""
    from penstock.api.cli.serve import main

    main(arguments)


def demo(arguments: Sequence[str]) -> None:
    """Show a recorded answer on its way through the stages, and serve it, without a GPU."""
    from penstock.api.cli.demo import main

    main(arguments)


def check(arguments: Sequence[str]) -> None:
    """Verify the settings of a server, and all that it needs but its model."""
    from penstock.api.cli.check import main

    main(arguments)


def config(arguments: Sequence[str]) -> None:
    """Print a penstock.toml with all settings and their defaults."""
    from penstock.api.cli.sample_config import main

    main(arguments)


def keys(arguments: Sequence[str]) -> None:
    """Make, list and revoke API keys."""
    from penstock.api.cli.keys import main

    main(arguments)


def launch(arguments: Sequence[str]) -> None:
    """Start Claude Code, Codex or opencode on a server that runs."""
    from penstock.api.cli.launch import main

    main(arguments)


def conformance(arguments: Sequence[str]) -> None:
    """Check how far a server keeps to the API."""
    from penstock.api.cli.conformance.command import main

    main(arguments)


def show(arguments: Sequence[str]) -> None:
    """Show the stages of a pipeline and their frames."""
    from penstock.api.cli.show import main

    main(arguments)


def record(arguments: Sequence[str]) -> None:
    """Record what a server of any make answers, by a proxy in front of it."""
    from penstock.api.cli.record import main

    main(arguments)


def replay(arguments: Sequence[str]) -> None:
    """Run recorded frames through the stages, without a GPU."""
    from penstock.api.cli.replay import main

    main(arguments)


def diff(arguments: Sequence[str]) -> None:
    """Find the first difference between two recordings, or between a recording and its replay."""
    from penstock.api.cli.diff import main

    main(arguments)


def compare(arguments: Sequence[str]) -> None:
    """Find the recorded answers that another engine would have changed, and the token at which."""
    from penstock.api.cli.compare import main

    main(arguments)


def shrink(arguments: Sequence[str]) -> None:
    """Cut a failing recording to the smallest one that fails."""
    from penstock.api.cli.shrink import main

    main(arguments)


def inspect(arguments: Sequence[str]) -> None:
    """Show a recording as a page, with the tokens that caused each item and event."""
    from penstock.api.cli.inspect import main

    main(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    command.__name__: command
    for command in (
        *(serve, demo, launch, check, config, keys, conformance),
        *(show, record, replay, diff, compare, shrink, inspect),
    )
}
"""The commands by name; the docstring of each is its summary in the usage message."""


def version() -> str:
    """Return the versions of penstock, of vLLM if it is installed, and of Python."""
    from penstock.stages.models.vllm_private import installed_vllm

    vllm = installed_vllm()
    engine = f"vLLM {vllm}" if vllm else "without vLLM"
    return f"penstock {installed('penstock')}, {engine}, Python {python_version()}"


def main() -> None:
    """Run the command that the command line names."""
    _open_missing_streams()
    name, *arguments = sys.argv[1:] or [""]
    if name == "--version":
        print(version())
        return
    if name not in COMMANDS:
        listed = "\n".join(f"  {name:12s}{command.__doc__}" for name, command in COMMANDS.items())
        usage = f"usage: penstock COMMAND ...\n\n{listed}\n\nTry: penstock serve --help, or penstock --version"
        if name in ("-h", "--help"):
            print(usage)
            return
        unknown = f"\npenstock: there is no command {name}{nearest(name, COMMANDS)}" if name else ""
        print(usage + unknown, file=sys.stderr)
        sys.exit(2)
    try:
        with _quiet_without_a_reader():
            COMMANDS[name](arguments)
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
