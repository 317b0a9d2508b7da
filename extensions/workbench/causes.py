"""The cause of a difference between a recording and its replay: the operator's stage, and the recorded frame."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.api.cli.replayer import Replay
from penstock.pipeline.core import Pipeline, Step
from penstock.pipeline.frames import TokenChunk
from penstock.pipeline.junction import JunctionError
from penstock.pipeline.recordings.comparison import excerpt
from penstock.pipeline.recordings.format import FILES, Abandoned
from penstock.pipeline.trace import Crossed, traced

IsRecorded: TypeAlias = Callable[[Crossed], bool]
"""True if the frames that crossed a junction are those of the recording."""

SHOWN = 40
"""Characters of the tokens that are shown."""


async def stage_behind(replay: Replay, junction: str, is_recorded: IsRecorded) -> str:
    """Return the operator's stage after which a replay leaves its recording at ``junction``; "" if none is found.

    What each of these stages took goes once more through the server's own stages after it.  If that gives the
    recorded frames, the stages before it are right.  No stage of the operator's runs again.  That finds none if the
    recording was made with a stage that has changed: then it is the only one before the junction, if it has an effect.
    """
    found, own = "", dict[str, Crossed]()
    for at, step in enumerate(replay.ran.steps):
        taken = replay.trace.junctions[at]
        if step.guard and not taken.raised:
            own[step.name] = given = await _given(replay, taken, at, junction)
            found = step.name if is_recorded(given) else found
        if step.name == junction:
            break
    return found or _only_one_with_effect(replay, junction, own)


def _only_one_with_effect(replay: Replay, junction: str, without: Mapping[str, Crossed]) -> str:
    """Return the operator's stage before a junction if it is the only one, and changes what crosses it."""
    crossed = next((each for each in replay.trace.junctions if each.stage == junction), replay.trace.junctions[-1])
    (name, given), *others = without.items() or [("", crossed)]
    return "" if others or given.frames == crossed.frames else name


async def _given(replay: Replay, taken: Crossed, at: int, junction: str) -> Crossed:
    """Return what crosses ``junction`` if the step ``at`` and all later ones are the server's own."""
    rest = tuple(_own(replay.ran.steps[at:], replay.model.pipeline))
    names = [step.name for step in rest]
    ending = rest[: names.index(junction) + 1] if junction in names else rest
    if not ending:
        return taken
    try:
        pipeline = Pipeline[Any, Any](ending)
    except JunctionError:  # the operator's stages give each other frames of their own
        return Crossed(junction)
    return (await traced(pipeline, _again(taken))).junctions[-1]


async def _again(taken: Crossed) -> AsyncGenerator[Any, None]:
    """Yield the frames that crossed a junction, and end as they did."""
    for frame in taken.frames:
        yield frame
    if taken.abandoned:
        raise Abandoned(len(taken.frames))


def _own(steps: Sequence[Step], declared: Pipeline[Any, Any]) -> Iterator[Step]:
    for step in steps:
        if not step.guard:
            yield step
        elif step.name in declared.names():
            yield Step(step.name, declared.stage(step.name))


def recorded_cause(replay: Replay, junction: str, index: int) -> str:
    """Return the line of the recording that a replayed frame comes from, with the text of its tokens; "" without one.

    The frame is the one with that ``index`` at a junction.  Requests are no cause of a single frame.
    """
    crossings = replay.trace.junctions
    source = crossings[0].stage
    at = next((at for at, crossed in enumerate(crossings) if crossed.stage == junction), 0)
    if not at or source in ("normalize", "render") or index >= len(crossings[at].crossings):
        return ""
    cause: int | None = index
    for crossed in reversed(crossings[1 : at + 1]):
        if cause is None:
            return ""
        cause = crossed.crossings[cause].cause
    if cause is None:
        return ""
    timed = replay.recording.timed[cause]
    return f"{FILES[source][0]}:{timed.line}{_spelled(replay, timed.frame)}"


def _spelled(replay: Replay, frame: Any) -> str:
    if not isinstance(frame, TokenChunk) or replay.model.spelling is None:
        return ""
    text = b"".join(map(replay.model.spelling, frame.token_ids)).decode(errors="replace")
    return f" {excerpt(text, '', SHOWN)}"
