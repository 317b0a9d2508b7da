"""Look at a pipeline, and replay recordings through it.

    python -m pipeline show
    python -m pipeline replay fixtures/harmony/function_call [--since emit]

``--of module:function`` names another pipeline than the one that serves Harmony models: that one has neither a model
nor tools, and so can only go on from what they said.  The tokens of other models mean nothing to it: it goes on from
what was parsed of them.
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
from pipeline.frames import GenerationStarted, TokenFrame
from pipeline.protocol.events import DONE, to_sse
from pipeline.record import SOURCES, read_frames, replay

RECORDED = "stages.responses:recorded_responses"
ASKING = frozenset({"converse", "render", "generate"})
"""The stages from which on a model is asked."""
WITHOUT_TOOLS = frozenset({"render", "generate", "parse"})
"""The stages from which on one turn is made, and no tool is run."""


def main() -> None:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline", description="Look at a pipeline, and replay through it."
    )
    parser.add_argument("--of", default=RECORDED, help="module:function that makes the pipeline")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("show", help="draw the flow")
    replaying = commands.add_parser("replay", help="run a recorded response through the rest of the flow")
    replaying.add_argument("recording", type=Path, help="a folder with one file per junction")
    replaying.add_argument(
        "--since", choices=SOURCES, help="the first stage to run: parse, or where that is not possible, emit"
    )
    arguments = parser.parse_args()
    if arguments.command == "show":
        print(load(arguments.of))
        return
    folder: Path = arguments.recording
    has_model = arguments.of != RECORDED
    stage = arguments.since or ("emit" if ran_tools(folder) or unreadable(folder, has_model=has_model) else "parse")
    if problem := why_not(folder, stage, has_model=has_model):
        replaying.error(problem)
    asyncio.run(print_replay(load(arguments.of).since(stage), source_of(folder, stage)))


def ran_tools(folder: Path) -> bool:
    """Whether tools ran between the turns of the response that is recorded in ``folder``."""
    return (folder / "conversed.jsonl").is_file()


def unreadable(folder: Path, *, has_model: bool) -> bool:
    """Whether the tokens recorded in ``folder`` are of a vocabulary that is not at hand: that of a chat model."""
    if has_model:
        return False
    tokens = folder / "tokens.jsonl"
    first = next(read_frames(tokens, TokenFrame), None) if tokens.is_file() else None
    return isinstance(first, GenerationStarted) and first.chat is not None


def source_of(folder: Path, stage: str) -> Path:
    """The file that ``stage`` reads."""
    files = [folder / name for name in SOURCES[stage]]
    return next(filter(Path.is_file, files), files[-1])


def why_not(folder: Path, stage: str, *, has_model: bool) -> str | None:
    """Why the recording in ``folder`` cannot be replayed since ``stage``, if it cannot."""
    if not (source := source_of(folder, stage)).is_file():
        return f"there is no recording {source}"
    if stage in WITHOUT_TOOLS and ran_tools(folder):
        return f"tools ran between the turns of {folder}: replay it --since emit, as what they did is known there"
    if stage == "parse" and unreadable(folder, has_model=has_model):
        return f"only a model of its kind can read the tokens of {folder}: replay it --since emit, or name its pipeline"
    if stage in ASKING and not has_model:
        return f"--since {stage} asks a model: name a pipeline that has one, --of module:function"
    return None


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
