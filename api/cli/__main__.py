"""The ``penstock`` command: serve a model, and work with recorded responses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from penstock.pipeline.errors import CannotRun

COMMANDS = {
    "serve": ("penstock.server", "Serve a model over HTTP."),
    "show": ("penstock.api.cli.show", "Show the stages of a pipeline and their frames."),
    "replay": ("penstock.api.cli.replay", "Run recorded frames through the stages, without a GPU."),
    "diff": (
        "penstock.api.cli.diff",
        "Find the first difference between two recordings, or between a recording and its replay.",
    ),
    "shrink": ("penstock.api.cli.shrink", "Cut a failing recording to the smallest one that fails."),
    "inspect": (
        "penstock.api.cli.inspect",
        "Show a recording as a page, with the tokens that caused each item and event.",
    ),
}
"""For each command, the module with its ``main``, and its summary in the usage message."""


def main() -> None:
    """Run the command that the command line names."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in COMMANDS:
        listed = "\n".join(f"  {name:10s}{summary}" for name, (_, summary) in COMMANDS.items())
        usage = f"usage: penstock COMMAND ...\n\n{listed}\n\nTry: penstock serve --help"
        if name in ("-h", "--help"):
            print(usage)
            return
        print(usage, file=sys.stderr)
        sys.exit(2)
    try:
        with _quiet_without_a_reader():
            # imported only now: the imports of `serve` take longer than the other commands
            import_module(COMMANDS[name][0]).main(arguments)
    except CannotRun as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(2)


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
