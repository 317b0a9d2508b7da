"""Options that several commands share: each is declared here once, and a command names it among its ``parents``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from penstock.api.settings.stage_settings import stage_tables
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import nearest
from penstock.pipeline.plugins import Install, load
from penstock.pipeline.recordings.format import SOURCES


class Parser(argparse.ArgumentParser):
    """A parser of a command, which names an unknown option in one line, with the one that was meant."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    @property
    def flags(self) -> Iterator[str]:
        """The options of this command, and of those below it."""
        for action in self._actions:
            yield from action.option_strings
            below = action.choices.values() if isinstance(action.choices, Mapping) else ()
            yield from (flag for each in below if isinstance(each, Parser) for flag in each.flags)

    def error(self, message: str) -> NoReturn:
        """Raise `CannotRun` for options that are unknown; else show the usage, and exit."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        names = [name for word in words.split() if (name := word.partition("=")[0]).startswith("-")]
        if not is_unknown or not names:
            super().error(message)
        raise CannotRun("\n".join(f"{name}: there is no such option{nearest(name, self.flags)}" for name in names))


PLUGINS = Parser(add_help=False)
"""The option ``--with``, for commands that build a pipeline."""
PLUGINS.add_argument(
    "--with",
    dest="plugins",
    action="append",
    default=[],
    metavar="PLUGIN",
    help="insert stages of your own, as for penstock serve; repeat it for more",
)

STAGES = Parser(add_help=False, parents=[PLUGINS])
"""The options of a replay: its first and last stage, and ``--with``."""
STAGES.add_argument("--from", dest="since", metavar="STAGE", help=f"the first stage to run: {', '.join(SOURCES)}")
STAGES.add_argument("--to", dest="upto", metavar="STAGE", help="the last stage to run")


def chosen_stages(names: Sequence[str]) -> Install:
    """Return a function that installs the stages that ``--with`` names, with their settings; raises `CannotRun`."""
    return load(names, stage_tables() if names else {})
