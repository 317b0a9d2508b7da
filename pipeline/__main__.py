"""Look at a pipeline, and replay recordings through it.

    python -m pipeline show
    python -m pipeline replay fixtures/harmony/function_call [--since emit]

``--of module:function`` names another pipeline than the one that serves Harmony models.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from typing import Any

from pipeline.core import Pipeline
from pipeline.protocol.events import DONE, to_sse
from pipeline.record import SOURCES, read_frames, replay


def main() -> None:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline", description="Look at a pipeline, and replay through it."
    )
    parser.add_argument(
        "--of", default="stages.responses:recorded_responses", help="module:function that makes the pipeline"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("show", help="draw the flow")
    replaying = commands.add_parser("replay", help="run a recorded response through the rest of the flow")
    replaying.add_argument("recording", type=Path, help="a folder with one file per junction")
    replaying.add_argument("--since", default="parse", choices=SOURCES, help="the first stage to run")
    arguments = parser.parse_args()
    if arguments.command == "show":
        print(load(arguments.of))
        return
    recording = arguments.recording / SOURCES[arguments.since]
    if not recording.is_file():
        replaying.error(f"there is no recording {recording}")
    asyncio.run(print_replay(load(arguments.of).since(arguments.since), recording))


def load(path: str) -> Pipeline[Any, Any]:
    """The pipeline that ``module:function`` makes."""
    module, _, function = path.partition(":")
    pipeline: Pipeline[Any, Any] = getattr(import_module(module), function)()
    return pipeline


async def print_replay(pipeline: Pipeline[Any, Any], recording: Path) -> None:
    """Write the events of a recording as a client would see them."""
    junction = reduce(or_, pipeline.steps[0].accepts().frames)
    async with pipeline.open(replay(read_frames(recording, junction))) as events:
        async for event in events:
            sys.stdout.buffer.write(to_sse(event))
    sys.stdout.buffer.write(DONE)


if __name__ == "__main__":
    main()
