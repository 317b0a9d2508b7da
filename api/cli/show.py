"""Show: draw the flow of a pipeline, from its code, and list the models of the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from penstock.api.cli.arguments import PLUGINS, Parser, chosen_stages
from penstock.api.cli.drawn import bonds
from penstock.api.settings import Settings
from penstock.api.settings.model_settings import ModelTable
from penstock.pipeline.core import Pipeline
from penstock.pipeline.plugins import Install
from penstock.stages.responses import recorded_responses


def main(arguments: Sequence[str]) -> None:
    """Show the stages of a pipeline and their frames."""
    parser = Parser(prog="penstock show", description=__doc__, parents=[PLUGINS])
    parser.add_argument(
        "--of",
        type=resolve_name,
        default=recorded_responses,
        metavar="MODULE:FUNCTION",
        help="the function that builds the pipeline",
    )
    chosen = parser.parse_args(arguments)
    print(asyncio.run(_drawn(chosen_stages(chosen.plugins), chosen.of())))
    models, _ = Settings.of_files()
    print("".join(f"\n{name}: {_described(table)}" for name, table in models.items()), end="\n" if models else "")


def _described(table: ModelTable) -> str:
    """Describe a model by its table: the command starts no model, and requests nothing of an engine."""
    kind = "" if table.generates else f"{table.kind}, passed on, "
    names = f"; also {', '.join(table.names)}" if table.names else ""
    return f"{kind}{table.where}{names}{bonds(table)}"


async def _drawn(install: Install, pipeline: Pipeline[Any, Any]) -> str:
    async with install(pipeline) as edited:
        return str(edited)
