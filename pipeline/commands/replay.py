"""``penstock replay``: recorded frames through the rest of the flow, without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.commands.model import RecordedModel, model_of
from pipeline.core import Pipeline
from pipeline.protocol.events import DONE, to_sse
from pipeline.record import FILES, SOURCES, Recording, read_header, read_recording, replay_recording

ASKING = frozenset({"converse", "render", "generate"})
"""The stages from which on a model is asked."""
WITHOUT_TOOLS = frozenset({"render", "generate", "parse"})
"""The stages from which on one turn is made, and no tool is run."""


def main(arguments: Sequence[str]) -> None:
    """Write the events of a recording as a client would see them."""
    parser = argparse.ArgumentParser(prog="penstock replay", description=__doc__)
    parser.add_argument("recording", type=Path, help="a folder with one file per junction")
    parser.add_argument(
        "--from",
        dest="since",
        choices=SOURCES,
        help="the first stage to run: parse, or where that is not possible, emit",
    )
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.recording
    model = model_of(read_header(first_file(folder)))
    stage = chosen.since or ("emit" if ran_tools(folder) or not model.spelling else "parse")
    if problem := why_not(folder, stage, model):
        parser.error(problem)
    recording = read_recording(*source_of(folder, stage))
    asyncio.run(print_replay(model.pipeline.since(stage), recording))


def first_file(folder: Path) -> Path:
    """A file of the recording in ``folder``, for its header."""
    files = [folder / name for name, _ in FILES.values()]
    return next(filter(Path.is_file, files), files[-1])


def ran_tools(folder: Path) -> bool:
    """Whether tools ran between the turns of the response that is recorded in ``folder``."""
    return (folder / FILES["converse"][0]).is_file()


def source_of(folder: Path, stage: str) -> tuple[Path, Any]:
    """The file that ``stage`` reads, and the union of its frames."""
    found = [(folder / name, junction) for name, junction in (FILES[behind] for behind in SOURCES[stage])]
    return next((each for each in found if each[0].is_file()), found[-1])


def why_not(folder: Path, stage: str, model: RecordedModel) -> str | None:
    """Why the recording in ``folder`` cannot be replayed since ``stage``, if it cannot."""
    if not source_of(folder, stage)[0].is_file():
        return f"there is no recording {source_of(folder, stage)[0]}"
    if stage in WITHOUT_TOOLS and ran_tools(folder):
        return f"tools ran between the turns of {folder}: replay it --from emit, as what they did is known there"
    if stage == "parse" and not model.spelling:
        return f"only a model of its kind can read the tokens of {folder}, and {model.missing}: replay it --from emit"
    if stage in ASKING:
        return f"--from {stage} asks a model"
    return None


async def print_replay(pipeline: Pipeline[Any, Any], recording: Recording) -> None:
    """Write the events of a recording as a client would see them."""
    async with pipeline.open(replay_recording(recording)) as events:
        async for event in events:
            sys.stdout.buffer.write(to_sse(event))
    sys.stdout.buffer.write(DONE)
