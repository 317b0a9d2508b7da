"""Stories: a replayed recording with its prompts, the place of each token, and all junctions with causes and times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.api.cli.rerun import Rerun, part, rerun, unedited
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.frames import (
    GenerationStarted,
    ItemClosed,
    McpListToolsOpened,
    Prompt,
    ResolvedRequest,
    ShellOutputOpened,
    TokenChunk,
    TurnFinished,
)
from penstock.pipeline.plugins import Install
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.recordings.difference import Line, parting
from penstock.pipeline.recordings.format import FILES, End, Header, read_recording
from penstock.pipeline.recordings.model import RecordedModel
from penstock.pipeline.recordings.token_places import OPENINGS, Token, placed
from penstock.pipeline.trace import Caused, Crossed, traced

SERVED = (McpListToolsOpened, ShellOutputOpened)
"""The frames that open an item which the server writes, not the model."""

NEAR = 100
"""The number of frames to search for an equal one; a rewritten item may have none."""


@dataclass(frozen=True)
class Crossing:
    """A frame, the index of its cause in the previous junction, and its time in seconds, if known.

    The times of a junction are the recorded ones if the replay yields as many frames as were recorded.  Otherwise each
    frame has the time of its cause.
    """

    frame: Any
    cause: int | None = None
    at: float | None = None


@dataclass(frozen=True)
class Speed:
    """The time of the first token in seconds, and the tokens per second after its chunk, if there are any."""

    first: float
    rate: float | None


def speed_of(crossings: Iterable[Crossing]) -> Speed | None:
    """Return the speed of the tokens among these frames; None if no times were recorded."""
    chunks = [
        (each.at, len(each.frame.token_ids))
        for each in crossings
        if isinstance(each.frame, TokenChunk) and each.at is not None
    ]
    if not chunks:
        return None
    first, last = chunks[0][0], chunks[-1][0]
    later_tokens = sum(count for _, count in chunks[1:])
    return Speed(first, later_tokens / (last - first) if last > first else None)


@dataclass(frozen=True)
class Junction:
    """The output of ``stage``, in order."""

    stage: str
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True)
class Story:
    """A recording and its replay.

    ``source`` is the stage whose recorded frames were replayed, and ``end`` the recorded end of its output.  ``error``
    is the error that ended the replay, and ``fault`` the stage that raised, with its error.  ``junctions`` are in
    pipeline order, from the first one known; the cause of a frame is in the previous junction.

    ``prompts`` has decoded texts, and ``tokens`` the place of each token.  Without the vocabulary the texts and
    ``tokens`` are empty, and ``note`` gives the reason.  ``read`` is the stage whose output the parser read.
    ``left_out`` names the stages of plug-ins that did not run.  ``differs`` describes the first event that differs from
    the recorded one.
    """

    path: Path
    header: Header
    source: str
    end: End
    conversation: ResolvedRequest | None
    prompts: tuple[str, ...]
    tokens: tuple[Token, ...]
    junctions: tuple[Junction, ...]
    error: BaseException | None = None
    fault: tuple[str, Exception] | None = None
    note: str = ""
    model: RecordedModel | None = None
    read: str = "generate"
    left_out: str = ""
    differs: str = ""

    def behind(self, stage: str) -> tuple[Crossing, ...]:
        """Return the output of ``stage``; empty if it is not known."""
        return next((junction.crossings for junction in self.junctions if junction.stage == stage), ())


async def tell(path: Path, since: str | None = None, upto: str | None = None, install: Install = unedited) -> Story:
    """Replay the recording at ``path`` and return its story.  Raise the same errors as `rerun`."""
    replayed = await rerun(path, since, upto, install)
    crossed = await _with_turns(replayed)
    known = {each.stage: each.frames for each in crossed}
    conversations, prompts = (known.get(stage) or _recorded(replayed, stage) for stage in ("normalize", "render"))
    tokens: tuple[Token, ...] = ()
    read = _read(crossed)
    if replayed.model.spelling and read in known:
        tokens = await placed(known[read], _parser(replayed), replayed.model)
    return Story(
        path,
        replayed.recording.header,
        replayed.source,
        replayed.recording.end,
        conversations[0] if conversations else None,
        tuple(_written(replayed, prompt) for prompt in prompts),
        tokens,
        tuple(_timed(crossed, _times(replayed))),
        replayed.trace.error,
        replayed.trace.fault,
        replayed.note,
        replayed.model,
        read,
        replayed.left_out,
        _differing(replayed),
    )


def _read(crossed: Sequence[Crossed]) -> str:
    """Return the stage whose output the parser read, or would have read if the replay had gone on."""
    stages = [each.stage for each in crossed]
    if "generate" in stages and "parse" not in stages:
        return stages[-1]
    return next((ahead for ahead, stage in pairwise(stages) if stage == "parse"), "generate")


async def _with_turns(replayed: Rerun) -> list[Crossed]:
    """Return the junctions of a replay, with those of the turns, if known, before the parsed or conversed frames."""
    crossed = replayed.trace.junctions
    at = next((at for at, each in enumerate(crossed) if each.stage in ("parse", "converse")), None)
    if at is None or any(each.stage == "generate" for each in crossed):
        return crossed
    tokens = replayed.turns.get("generate") or _recorded(replayed, "generate")
    if not tokens or not replayed.model.spelling:
        return crossed
    through = replayed.pipeline.inner("converse").following("generate") if replayed.turns else _parser(replayed)
    ahead = (await traced(through, source_of(tokens), "generate")).junctions
    if crossed[at].stage == "parse":
        return [*crossed[:at], *ahead[:-1], _linked(crossed[at], ahead[-1], via_cause=True), *crossed[at + 1 :]]
    return [*crossed[:at], *ahead, _linked(crossed[at], ahead[-1]), *crossed[at + 1 :]]


def _linked(crossed: Crossed, parsed: Crossed, *, via_cause: bool = False) -> Crossed:
    """Return the same frames with the parser's frames as causes, or with ``via_cause`` the causes of those."""
    places = aligned(parsed.frames, crossed.frames)
    causes = [parsed.caused[place].cause if via_cause and place is not None else place for place in places]
    return Crossed(crossed.stage, [Caused(frame, cause) for frame, cause in zip(crossed.frames, causes, strict=True)])


def aligned(ahead: Sequence[Any], behind: Sequence[Any]) -> list[int | None]:
    """Return, for each frame of ``behind``, the index of the same frame in ``ahead``, or of the last match before it.

    Turns and items have the same order in both and are matched first, so a change in one does not affect the next.
    """
    places: list[int | None] = []
    last, is_served = -1, False
    for frame in behind:
        is_served = is_served or isinstance(frame, SERVED)
        if not is_served:
            last = _next(ahead, last + 1, frame, last)
        is_served = is_served and not isinstance(frame, ItemClosed)
        places.append(last if last >= 0 else None)
    return places


def _next(ahead: Sequence[Any], since: int, sought: Any, otherwise: int) -> int:
    """Return the next index of an equal frame, or of a border of the same rank, before any border of a higher rank."""
    rank = _rank(sought)
    for at in range(since, len(ahead) if rank else min(len(ahead), since + NEAR)):
        if _rank(ahead[at]) == rank and (rank or ahead[at] == sought):
            return at
        if _rank(ahead[at]) > rank:
            break
    return otherwise


def _rank(frame: Any) -> int:
    """Return the rank of a frame as a border between items and turns; 0 if it is none."""
    match frame:
        case ItemClosed():
            return 1
        case _ if isinstance(frame, OPENINGS):
            return 2
        case TurnFinished():
            return 3
        case GenerationStarted():
            return 4
        case _:
            return 0


def _timed(crossed: Sequence[Crossed], recorded: Mapping[str, Sequence[float | None]]) -> Iterator[Junction]:
    ahead: Sequence[float | None] = ()
    for each in crossed:
        times = recorded.get(each.stage, ())
        if len(times) != len(each.caused):
            times = [ahead[caused.cause] if ahead and caused.cause is not None else None for caused in each.caused]
        crossings = zip(each.caused, times, strict=True)
        yield Junction(each.stage, tuple(Crossing(caused.frame, caused.cause, at) for caused, at in crossings))
        ahead = times


def _times(replayed: Rerun) -> dict[str, tuple[float | None, ...]]:
    """Return the times of the recorded frames of each junction."""
    read = {stage: read_recording(path, FILES[stage][1]) for stage, path in replayed.files.items()}
    return {stage: tuple(timed.at for timed in recording.timed) for stage, recording in read.items()}


def _recorded(replayed: Rerun, stage: str) -> tuple[Any, ...]:
    path = replayed.files.get(stage)
    return read_recording(path, FILES[stage][1]).frames if path else ()


def _differing(replayed: Rerun) -> str:
    """Describe the first event that differs from the recorded one; empty if all are equal or either side has none."""
    recorded, now = (
        [frame for frame in frames if isinstance(frame, Event)]
        for frames in (_recorded(replayed, "emit"), replayed.trace.junctions[-1].frames)
    )
    if not recorded or not now or recorded == now:
        return ""
    one, other = (
        [*(Line(event, event.sequence_number) for event in events), Line(End(0), len(events))]
        for events in (recorded, now)
    )
    found = parting(one, other, exact=False)
    return f"from number {found.other_line} on the events are not those recorded: {found.problem}" if found else ""


def _parser(replayed: Rerun) -> Pipeline[Any, Any]:
    return part(replayed.pipeline, "generate", "parse", "parse").from_stage("parse")


def _written(replayed: Rerun, prompt: Prompt) -> str:
    spelling = replayed.model.spelling
    return b"".join(map(spelling, prompt.token_ids)).decode(errors="replace") if spelling else ""
