"""The flow of a recorded response: its tokens, items and events, each with its cause.

The causes come from a replay.  A recording that cannot be replayed is shown as it was recorded, without causes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.api.cli.recorded_model import model_of
from penstock.api.cli.rerun import NoReplay, recorded_files
from penstock.api.cli.story import Crossing, Junction, Story, tell
from penstock.pipeline.frames import Prompt
from penstock.pipeline.plugins import Install
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.recordings.format import FILES, Abandoned, Failure, Header, Recording, read_recording
from penstock.pipeline.recordings.model import RecordedModel
from penstock.pipeline.recordings.token_places import Token


@dataclass
class Flow:
    """Three rows of frames: the frames of the engine, the item frames that they caused, and the events caused by those.

    ``files`` are the recordings, by the stages whose output they contain.  ``placed`` are the tokens with their places;
    empty if the vocabulary is not available.  ``notes`` explain to the reader what is missing or differs.
    """

    header: Header
    files: Mapping[str, Recording]
    model: RecordedModel
    tokens: Sequence[Crossing] = ()
    items: Sequence[Crossing] = ()
    events: Sequence[Crossing] = ()
    prompts: Sequence[Prompt] = ()
    placed: Sequence[Token] = ()
    notes: list[str] = field(default_factory=list)
    failure: Failure | None = None


async def flow_of(path: Path, install: Install) -> Flow:
    """Replay the recording at ``path`` through its pipeline, which ``install`` edits; raises `UnreadableRecording`."""
    files = {stage: read_recording(file, FILES[stage][1]) for stage, file in recorded_files(path).items()}
    try:
        flow = _replayed(await tell(path, install=install), files)
    except NoReplay as error:
        flow = _as_recorded(files, str(error))
    flow.prompts = files["render"].frames if "render" in files else ()
    flow.failure = next((file.end.failure for file in files.values() if file.end.failure), flow.failure)
    if any(file.end.abandoned for file in files.values()):
        flow.notes.append("Its reader left, or it was cancelled: nobody wanted more of it.")
    return flow


def _replayed(story: Story, files: Mapping[str, Recording]) -> Flow:
    assert story.model is not None
    flow = Flow(story.header, files, story.model, _generated(story, files), placed=story.tokens)
    junctions = {junction.stage: position for position, junction in enumerate(story.junctions)}
    emit = junctions["emit"]
    if emit:
        flow.items = _since(story.junctions, emit - 1, junctions.get(story.read, emit - 1))
    events = _since(story.junctions, len(junctions) - 1, max(0, emit - 1))
    known = bool(flow.items)
    flow.events = [Crossing(e.frame, e.cause if known else None, e.at) for e in events if isinstance(e.frame, Event)]
    if story.note:
        flow.notes.append(f"It was not parsed again: {story.note}.")
    flow.notes.extend(f"{note[0].upper()}{note[1:]}." for note in (story.left_out, story.differs) if note)
    if isinstance(story.error, Exception) and not isinstance(story.error, Abandoned):
        flow.failure = Failure.of(story.error)
    if story.fault:
        flow.notes.append(f"The stage {story.fault[0]} raised {Failure.of(story.fault[1]).error}.")
    return flow


def _generated(story: Story, files: Mapping[str, Recording]) -> Sequence[Crossing]:
    return story.behind(story.read) or _crossings(files, "generate")


def _as_recorded(files: Mapping[str, Recording], problem: str) -> Flow:
    header = next(iter(files.values())).header
    items = _crossings(files, "parse")
    return Flow(
        header, files, model_of(header), _crossings(files, "generate"), items, notes=[f"As recorded: {problem}."]
    )


def _crossings(files: Mapping[str, Recording], stage: str) -> Sequence[Crossing]:
    return [Crossing(timed.frame, None, timed.at) for timed in files[stage].timed] if stage in files else []


def _since(junctions: Sequence[Junction], junction: int, since: int) -> list[Crossing]:
    """Return the frames of a junction with their causes at the earlier junction ``since``, across all in between."""
    crossings = junctions[junction].crossings
    causes = [None if junction == since else each.cause for each in crossings]
    for between in range(junction - 1, since, -1):
        previous = junctions[between].crossings
        causes = [None if cause is None else previous[cause].cause for cause in causes]
    return [Crossing(each.frame, cause, each.at) for each, cause in zip(crossings, causes, strict=True)]
