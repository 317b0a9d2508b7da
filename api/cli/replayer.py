"""Replay recorded frames through the rest of their pipeline: choose the file and the stages, and trace the result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.api.cli.recorded_model import RecordedModel, model_of
from penstock.api.runs.watchdog import watching
from penstock.pipeline.core import Pipeline, Step
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import counted
from penstock.pipeline.plugins import Install
from penstock.pipeline.recordings.format import (
    FILES,
    SOURCES,
    Recording,
    UnreadableRecording,
    read_header,
    read_recording,
    source_of_recording,
)
from penstock.pipeline.tap import Tap
from penstock.pipeline.trace import Trace, traced

SLOW, SILENCE = 0.25, 30.0
"""Seconds for which code may hold the event loop, and for which a stage may give nothing, before a line names it."""

WITH_ENGINE = ("converse", "render", "generate")
"""The stages from which a replay includes the engine, which replays the recorded tokens."""
ONE_TURN = ("render", "generate", "parse")
"""The stages from which a replay covers a single turn and runs no tools."""


class NoReplay(CannotRun):
    """A recording cannot be replayed or compared as requested."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of a replay.

    ``ran`` is the part of the ``pipeline`` that ran.  ``trace`` begins with the recorded frames.  ``turns`` has a tap
    after each stage inside ``converse``, if that ran.  ``notes`` give the reason why the tokens were not parsed
    again, and name the stages of plug-ins that did not run.
    """

    files: Mapping[str, Path]
    model: RecordedModel
    pipeline: Pipeline[Any, Any]
    ran: Pipeline[Any, Any]
    recording: Recording
    trace: Trace
    turns: Mapping[str, Tap]
    notes: tuple[str, ...]


async def replay_of(
    path: Path, since: str | None = None, upto: str | None = None, install: Install = nullcontext
) -> Replay:
    """Replay the recording at ``path``, a folder or one file, from the stage ``since`` to the stage ``upto``.

    By default, begin with the first stage that needs neither a model nor tools.  ``install`` adds the stages of
    plug-ins.  Raise `UnreadableRecording`, `NoReplay`, and any error of ``install``.
    """
    files = recorded_files(path)
    header = read_header(next(iter(files.values())))
    model = model_of(header, files.get("generate"))
    async with install(model.pipeline) as pipeline:
        unreadable = since == "parse" and not model.spelling
        since, note = (_checked(path, files, since), "") if since and not unreadable else _best(path, files, model)
        source = next(stage for stage in SOURCES[since] if stage in files)
        recording = read_recording(files[source], FILES[source][1])
        turns: dict[str, Tap] = {}
        tapped = _tapped(pipeline, turns) if since == "converse" else pipeline
        ran = part(tapped, source, since, upto)
        with watching(pipeline, SLOW, SILENCE, logging.WARNING, only_inserted=True):
            trace = await traced(ran, source_of_recording(recording), source)
        left_out = _left_out(model.pipeline, pipeline, part(pipeline, source, since), FILES[source][0])
        return Replay(
            files=files,
            model=model,
            pipeline=pipeline,
            ran=ran,
            recording=recording,
            trace=trace,
            turns=turns,
            notes=tuple(filter(None, (note, left_out))),
        )


def _tapped(pipeline: Pipeline[Any, Any], turns: dict[str, Tap]) -> Pipeline[Any, Any]:
    for stage in ("render", "generate", "parse"):
        pipeline = pipeline.insert_after(stage, f"tap {stage}", turns.setdefault(stage, Tap()))
    return pipeline


def recorded_files(path: Path) -> dict[str, Path]:
    """Return the files at ``path``, a folder or one file, by stage.  Raise `UnreadableRecording` if there are none."""
    stages = {name: stage for stage, (name, _) in FILES.items()}
    try:
        places = [path] if path.is_file() else [path / name for name, _ in FILES.values()]
        paths = {stages[place.name]: place for place in places if place.name in stages and place.is_file()}
    except OSError as error:
        raise UnreadableRecording(path, None, f"it cannot be read: {error.strerror}") from error
    if paths:
        return paths
    if path.is_file():
        raise UnreadableRecording(path, None, f"a file of a recording has one of the names {', '.join(stages)}")
    if not path.is_dir():
        raise UnreadableRecording(path, None, "no such file or folder")
    inner = sorted({file.parent for name in stages for file in path.glob(f"*/{name}")})
    problem = (
        f"it holds {counted(len(inner), 'recording')}: name one of them, such as {inner[0]}"
        if inner
        else f"there is no recording in this folder: none of {', '.join(stages)}"
    )
    raise UnreadableRecording(path, None, problem)


def _best(path: Path, files: dict[str, Path], model: RecordedModel) -> tuple[str, str]:
    """Return the first stage to replay without a model and tools, and the reason if it is not the parser."""
    if "generate" in files and "converse" not in files and model.spelling:
        return "parse", ""
    stage = next((stage for stage in ("emit", "persist", "parse") if _has_source(files, stage)), "")
    if stage == "parse" or not stage:
        raise NoReplay(f"{path}: {model.problem if stage else 'no part of the response was recorded'}")
    return stage, model.problem if "generate" in files else ""


def _has_source(files: dict[str, Path], stage: str) -> bool:
    return any(source in files for source in SOURCES[stage])


def _checked(path: Path, files: dict[str, Path], since: str) -> str:
    if since not in SOURCES:
        raise NoReplay(f"a replay can begin with {', '.join(SOURCES)}, not with {since}")
    if not _has_source(files, since):
        names = " or ".join(FILES[source][0] for source in SOURCES[since])
        raise NoReplay(f"{since} reads {names}, which is not in {path}")
    if since in (*ONE_TURN, "converse") and "converse" in files:
        raise NoReplay(f"tools ran between the turns of {path}: replay it --from emit, after their results")
    if since in WITH_ENGINE and "generate" not in files:
        raise NoReplay(f"--from {since} needs the tokens of the model: there is no tokens.jsonl in {path}")
    return since


def part(pipeline: Pipeline[Any, Any], source: str, since: str, upto: str | None = None) -> Pipeline[Any, Any]:
    """Return the pipeline from ``since`` to ``upto``, with the stages that plug-ins put after ``source``.

    Raise `NoReplay` if a stage is missing.
    """
    try:
        rest = pipeline.following(source)
        part: Pipeline[Any, Any] = Pipeline((*rest.through(since).steps, *rest.from_stage(since).steps[1:]))
        return part if upto is None else part.through(upto)
    except LookupError as error:
        raise NoReplay(str(error.args[0])) from error


def _left_out(declared: Pipeline[Any, Any], edited: Pipeline[Any, Any], replayed: Pipeline[Any, Any], file: str) -> str:
    known = {id(step.stage) for pipeline in (declared, replayed) for step in _single(pipeline)}
    names = [step.name for step in _single(edited) if id(step.stage) not in known]
    return f"{', '.join(names)} did not run: {file} was recorded after it" if names else ""


def _single(pipeline: Pipeline[Any, Any]) -> Iterator[Step]:
    for step in pipeline.steps:
        if step.inner:
            yield from _single(step.inner)
        else:
            yield step
