"""Options that several commands share: each is declared here once, and a command names it among its ``parents``."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

from penstock.api.settings.stage_settings import stage_tables
from penstock.pipeline.plugins import Install, load
from penstock.pipeline.recordings.format import SOURCES

PLUGINS = ArgumentParser(add_help=False)
"""The option ``--with``, for commands that build a pipeline."""
PLUGINS.add_argument(
    "--with",
    dest="plugins",
    action="append",
    default=[],
    metavar="PLUGIN",
    help="insert stages of your own, as for penstock serve; repeat it for more",
)

STAGES = ArgumentParser(add_help=False, parents=[PLUGINS])
"""The options of a replay: its first and last stage, and ``--with``."""
STAGES.add_argument("--from", dest="since", metavar="STAGE", help=f"the first stage to run: {', '.join(SOURCES)}")
STAGES.add_argument("--to", dest="upto", metavar="STAGE", help="the last stage to run")


def chosen_stages(names: Sequence[str]) -> Install:
    """Return a function that installs the stages that ``--with`` names, with their settings; raises `CannotRun`."""
    return load(names, stage_tables() if names else {})
