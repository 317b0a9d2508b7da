"""Show: the flow of a pipeline, drawn from its code."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.commands.model import named

RESPONSES = "stages.responses:recorded_responses"


def main(arguments: Sequence[str]) -> None:
    """Draw a pipeline."""
    parser = argparse.ArgumentParser(prog="penstock show", description=__doc__)
    parser.add_argument("--of", default=RESPONSES, metavar="MODULE:FUNCTION", help="what makes the pipeline")
    print(named(parser.parse_args(arguments).of)())
