"""Show: draw the flow of a pipeline, from its code."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pkgutil import resolve_name

from penstock.api.cli.arguments import PLUGINS, chosen_stages
from penstock.stages.responses import recorded_responses


def main(arguments: Sequence[str]) -> None:
    """Show the stages of a pipeline and their frames."""
    parser = argparse.ArgumentParser(prog="penstock show", description=__doc__, parents=[PLUGINS])
    parser.add_argument(
        "--of",
        type=resolve_name,
        default=recorded_responses,
        metavar="MODULE:FUNCTION",
        help="the function that builds the pipeline",
    )
    chosen = parser.parse_args(arguments)
    print(chosen_stages(chosen.plugins)(chosen.of()))
