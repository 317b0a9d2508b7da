"""A recording, laid out as a whole: the prompts, each token in its place, and all junctions with causes and times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.api.cli.rerun import Rerun, part, rerun, unedited
from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import (
    Conversation,
    GenerationStarted,
    ItemClosed,
    McpListToolsOpened,
    Prompt,
    ShellOutputOpened,
    TokenChunk,
    TurnFinished,
)
from penstock.pipeline.plugins import Install
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.recordings.difference import Line, parting
from penstock.pipeline.recordings.format import FILES, End, Header, read_recording
from penstock.pipeline.recordings.format import replay as frames_of
from penstock.pipeline.recordings.model import RecordedModel
from penstock.pipeline.recordings.token_places import OPENINGS, Token, placed
from penstock.pipeline.trace import Caused, Crossed, traced

SERVED = (McpListToolsOpened, ShellOutputOpened)
"""What opens an item that no model writes."""

NEAR = 100
"""Frames among which the same one is looked for: of an item that was rewritten none may be there."""


@dataclass(frozen=True)
class Crossing:
    """A frame; the index of the one that caused it, in the junction ahead; and the second at which it came, if known.

    Where a replay gives as many frames as were recorded the times are the recorded ones, elsewhere those of the causes.
    """

    frame: Any
    cause: int | None = None
    at: float | None = None


@dataclass(frozen=True)
class Speed:
    """The second at which the first token came, and how many a second came behind its chunk, if any did."""

    first: float
    rate: float | None


def speed_of(crossings: Iterable[Crossing]) -> Speed | None:
    """How fast the tokens among these came; None where nobody took the time."""
    chunks = [
        (each.at, len(each.frame.token_ids))
        for each in crossings
        if isinstance(each.frame, TokenChunk) and each.at is not None
    ]
    if not chunks:
        return None
    first, last = chunks[0][0], chunks[-1][0]
    behind = sum(count for _, count in chunks[1:])
    return Speed(first, behind / (last - first) if last > first else None)


@dataclass(frozen=True)
class Junction:
    """What crossed the junction behind ``stage``, in order."""

    stage: str
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True)
class Story:
    """A recording, and what a replay made of it.

    ``source`` is the stage whose recorded frames were replayed, and ``end`` how they ended.  ``error`` is what the
    replay ended with, and ``fault`` the stage that raised, with what it raised.  ``junctions`` are in the order of the
    pipeline, and begin where something is known; each frame's cause is in the one before its own.  ``prompts`` are
    written out, and ``tokens`` are in their places, where somebody knows how tokens are spelled; otherwise both are
    empty, and ``note`` says why.  The parser read the tokens behind the stage ``read``.  ``left_out`` says which stages
    of plug-ins did not run, and ``differs`` from where on the events are not those that were recorded.
    """

    path: Path
    header: Header
    source: str
    end: End
    conversation: Conversation | None
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
        """What crossed the junction behind ``stage``; nothing if nothing is known of it."""
        return next((junction.crossings for junction in self.junctions if junction.stage == stage), ())


async def tell(path: Path, since: str | None = None, upto: str | None = None, install: Install = unedited) -> Story:
    """Replay what is recorded at ``path``, and lay it out; raises what `rerun` does."""
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
    """Behind which stage the parser read its tokens, or would have, if the replay went on."""
    stages = [each.stage for each in crossed]
    if "generate" in stages and "parse" not in stages:
        return stages[-1]
    return next((ahead for ahead, stage in pairwise(stages) if stage == "parse"), "generate")


async def _with_turns(replayed: Rerun) -> list[Crossed]:
    """The junctions of a replay, and ahead of those that it began with what is known of the turns."""
    crossed = replayed.trace.junctions
    at = next((at for at, each in enumerate(crossed) if each.stage in ("parse", "converse")), None)
    if at is None or any(each.stage == "generate" for each in crossed):
        return crossed
    tokens = replayed.turns.get("generate") or _recorded(replayed, "generate")
    if not tokens or not replayed.model.spelling:
        return crossed
    through = replayed.pipeline.inner("converse").behind("generate") if replayed.turns else _parser(replayed)
    ahead = (await traced(through, frames_of(tokens), "generate")).junctions
    if crossed[at].stage == "parse":
        return [*crossed[:at], *ahead[:-1], _linked(crossed[at], ahead[-1], via_cause=True), *crossed[at + 1 :]]
    return [*crossed[:at], *ahead, _linked(crossed[at], ahead[-1]), *crossed[at + 1 :]]


def _linked(crossed: Crossed, parsed: Crossed, *, via_cause: bool = False) -> Crossed:
    """The same frames, caused by those that the parser gave, or with ``via_cause`` by what caused these."""
    places = aligned(parsed.frames, crossed.frames)
    causes = [parsed.caused[place].cause if via_cause and place is not None else place for place in places]
    return Crossed(crossed.stage, [Caused(frame, cause) for frame, cause in zip(crossed.frames, causes, strict=True)])


def aligned(ahead: Sequence[Any], behind: Sequence[Any]) -> list[int | None]:
    """For each frame ``behind`` the index of the one ``ahead`` that it is, or of the last one that was met before it.

    Turns and items follow each other in the same order, so that what was changed in one does not matter for the next.
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
    """The next index of a frame, or of a border of its kind, within what it is a part of."""
    rank = _rank(sought)
    for at in range(since, len(ahead) if rank else min(len(ahead), since + NEAR)):
        if _rank(ahead[at]) == rank and (rank or ahead[at] == sought):
            return at
        if _rank(ahead[at]) > rank:
            break
    return otherwise


def _rank(frame: Any) -> int:
    """How much ends where a frame comes: nothing, an item, the ones before it, a turn, or the one before it."""
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
    """When the recorded frames of each junction came."""
    read = {stage: read_recording(path, FILES[stage][1]) for stage, path in replayed.files.items()}
    return {stage: tuple(timed.at for timed in recording.timed) for stage, recording in read.items()}


def _recorded(replayed: Rerun, stage: str) -> tuple[Any, ...]:
    path = replayed.files.get(stage)
    return read_recording(path, FILES[stage][1]).frames if path else ()


def _differing(replayed: Rerun) -> str:
    """From which event on they are not those that were recorded; empty if they are, or none was recorded or given."""
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
    return part(replayed.pipeline, "generate", "parse", "parse").since("parse")


def _written(replayed: Rerun, prompt: Prompt) -> str:
    spelling = replayed.model.spelling
    return b"".join(map(spelling, prompt.token_ids)).decode(errors="replace") if spelling else ""
