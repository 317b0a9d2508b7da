"""Show: draw the flow of a pipeline, from its code."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from penstock.stages.responses import recorded_responses


def main(arguments: Sequence[str]) -> None:
    """Draw a pipeline."""
    parser = argparse.ArgumentParser(prog="penstock show", description=__doc__)
    parser.add_argument(
        "--of", type=_named, default=recorded_responses, metavar="MODULE:FUNCTION", help="what makes the pipeline"
    )
    print(parser.parse_args(arguments).of())


def _named(path: str) -> Any:
    """Import the object at ``module:name``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
