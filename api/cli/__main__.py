"""The ``penstock`` command: serve a model, and work with recorded responses."""

from __future__ import annotations

import sys
from importlib import import_module

from penstock.pipeline.errors import CannotRun

COMMANDS = {
    "serve": ("penstock.server", "serve a model over HTTP"),
    "show": ("penstock.api.cli.show", "draw the flow of a pipeline"),
    "replay": ("penstock.api.cli.replay", "run recorded frames through the stages, without a GPU"),
    "diff": ("penstock.api.cli.diff", "say where two recordings part, or a recording and its replay"),
    "shrink": ("penstock.api.cli.shrink", "cut a failing recording to the smallest one that fails"),
    "inspect": ("penstock.api.cli.inspect", "show a recording as a page: who caused whom"),
}
"""The module of each command, imported only when the command runs, and a summary for the usage message."""


def main() -> None:
    """Run the command that the command line names."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in COMMANDS:
        listed = "\n".join(f"  {command:10s}{purpose}" for command, (_, purpose) in COMMANDS.items())
        usage = f"usage: penstock COMMAND ...\n\n{listed}\n\nTry: penstock serve --help"
        if name in ("-h", "--help"):
            print(usage)
            return
        print(usage, file=sys.stderr)
        sys.exit(2)
    try:
        import_module(COMMANDS[name][0]).main(arguments)
    except CannotRun as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
