"""The timeline of a recording: tokens, the items that they caused, and the events caused by those, all with times.

The causes come from a replay.  A recording that cannot be replayed has a timeline without causes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from penstock.api.cli.recorded_model import RecordedModel, model_of
from penstock.api.cli.replayer import NoReplay, Replay, part, recorded_files, replay_of
from penstock.extensions.workbench.timeline.attribution import OPENINGS, AttributedToken, attributed
from penstock.pipeline import frames
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import StageFault
from penstock.pipeline.plugins import Install
from penstock.pipeline.protocol.events import Event, ResponseFailed
from penstock.pipeline.recordings.comparison import Line, first_difference
from penstock.pipeline.recordings.format import (
    FILES,
    End,
    Failure,
    Header,
    Recording,
    end_of_all,
    in_words,
    read_recording,
)
from penstock.pipeline.trace import Crossed, Crossing, traced

_SERVED = (frames.McpListToolsOpened, *get_args(frames.ServedOutputOpened))

NEAR = 100
"""The number of frames to search for an equal one; a rewritten item may have none."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A recording, and its replay if there is one.

    ``junctions`` are in pipeline order, from the first one known.  The times of a junction are the recorded ones if
    it is the source of the replay, or if the replay yields as many frames as were recorded.  Otherwise each frame
    has the time of its cause.  ``prompts`` has one prompt for each turn.  ``attributed`` has each token with its
    item; it is empty if the vocabulary is not available.  ``error`` ended the replay, and ``fault`` is the stage
    that raised, with its error.  ``end`` is the recorded end of the replayed frames.  ``notes`` explain what is
    missing, ``difference`` is the first event that differs from the recorded one, and ``failures`` give the reason
    why the stream broke off.
    """

    path: Path
    header: Header
    model: RecordedModel
    junctions: tuple[Crossed, ...]
    prompts: tuple[frames.Prompt, ...] = ()
    attributed: tuple[AttributedToken, ...] = ()
    error: BaseException | None = None
    fault: tuple[str, Exception] | None = None
    end: End | None = None
    notes: tuple[str, ...] = ()
    difference: str = ""
    failures: tuple[str, ...] = ()

    def after(self, stage: str) -> Sequence[Crossing]:
        """Return the output of ``stage``; empty if it is not known."""
        return next((junction.crossings for junction in self.junctions if junction.stage == stage), ())

    @cached_property
    def tokens(self) -> list[Crossing]:
        """The frames that the parser read, or that the engine sent."""
        return self._crossings("tokens", "")

    @cached_property
    def items(self) -> list[Crossing]:
        """The frames of items as the client gets them, with their causes among ``tokens``."""
        return self._crossings("items", "tokens")

    @cached_property
    def events(self) -> list[Crossing]:
        """The events that the client gets, with their causes among ``items``."""
        return [crossing for crossing in self._crossings("events", "items") if isinstance(crossing.frame, Event)]

    @property
    def at_fault(self) -> int | None:
        """The index among ``tokens`` of the frame at which a stage raised, or read no further; None if none did."""
        if self.fault is None:
            is_a_stage = self.end is not None and self.end.cause in ("raised", "unread")
            return len(self.tokens) - 1 if is_a_stage else None
        stages = [junction.stage for junction in self.junctions]
        index: int | None = -1
        for junction in reversed(self.junctions[: stages.index(self.fault[0]) if self.fault[0] in stages else None]):
            if _kind(junction) == "tokens" or index is None or not junction.crossings:
                return index if index is None or index >= 0 else len(junction.crossings) - 1
            index = junction.crossings[index].cause
        return None

    @cached_property
    def rewritten(self) -> frozenset[int]:
        """The indexes of the items whose text differs from the text that the parser read from their tokens."""
        read, shown = _texts(self.after("parse")), _texts(self.items)
        return frozenset(at for at, text in enumerate(shown) if text != (read[at] if at < len(read) else None))

    def _crossings(self, kind: str, causing: str) -> list[Crossing]:
        last = {_kind(junction): at for at, junction in enumerate(self.junctions)}
        at = last.get(kind)
        if at is None:
            return []
        since = last.get(causing, at)
        crossings = self.junctions[at].crossings
        causes = [None if since >= at else each.cause for each in crossings]
        for between in range(at - 1, since, -1):
            previous = self.junctions[between].crossings
            causes = [None if cause is None else previous[cause].cause for cause in causes]
        return [Crossing(each.frame, cause, each.at) for each, cause in zip(crossings, causes, strict=True)]


def _kind(crossed: Crossed) -> str:
    """Return the kind of the frames: tokens, items or events; an empty text for conversations and prompts."""
    kinds = {type(frame) for frame in crossed.frames}
    if any(issubclass(kind, Event) for kind in kinds):
        return "events"
    if crossed.stage == "generate" or kinds & {frames.TokenChunk, frames.GenerationFinished}:
        return "tokens"
    return "" if kinds & {frames.ResolvedRequest, frames.Prompt} else "items"


def is_served(frame: Any) -> bool:
    """Return True if a frame opens an item that the server writes, not the model: also a call of a program."""
    return isinstance(frame, _SERVED) or bool(getattr(frame, "caller", ""))


def _texts(crossings: Sequence[Crossing]) -> list[str]:
    """Return the text of each item that the model wrote; calls before its first turn do not count."""
    texts: list[str] = []
    has_begun = is_written = False
    for crossing in crossings:
        frame = crossing.frame
        has_begun = has_begun or isinstance(frame, frames.GenerationStarted)
        if isinstance(frame, get_args(frames.Opened)):
            is_written = has_begun and isinstance(frame, OPENINGS) and not is_served(frame)
            texts += [""] * is_written
        elif is_written and isinstance(frame, frames.ItemDelta):
            texts[-1] += frame.text
    return texts


async def timeline_of(
    path: Path, since: str | None = None, upto: str | None = None, install: Install = nullcontext
) -> Timeline:
    """Replay the recording at ``path`` and return its timeline.  Raise the same errors as `replay_of`."""
    replay = await replay_of(path, since, upto, install)
    files = _recordings(replay.files)
    crossed = await _with_turns(replay, files)
    known = {each.stage: each.frames for each in crossed}
    tokens: tuple[AttributedToken, ...] = ()
    read = _read_by_parser(crossed)
    if replay.model.spelling and read in known:
        tokens = await attributed(known[read], _parser(replay), replay.model)
    junctions = _timed(crossed, files)
    if "generate" in files and not any(_kind(junction) == "tokens" for junction in junctions):
        junctions.insert(0, _as_recorded("generate", files["generate"]))
    return Timeline(
        path=path,
        header=replay.recording.header,
        model=replay.model,
        junctions=tuple(junctions),
        prompts=tuple(known.get("render") or _frames(files, "render")),
        attributed=tokens,
        error=replay.trace.error,
        fault=replay.trace.fault,
        end=replay.recording.end,
        notes=replay.notes,
        difference=_difference(files, replay.trace.junctions[-1].frames),
        failures=_failures(files, replay.trace.fault),
    )


async def replayed_or_recorded(path: Path, install: Install = nullcontext) -> Timeline:
    """Return the timeline of any recording; without causes if it cannot be replayed.  Raise `UnreadableRecording`."""
    try:
        return await timeline_of(path, install=install)
    except NoReplay as error:
        files = _recordings(recorded_files(path))
        header = next(iter(files.values())).header
        junctions = tuple(_as_recorded(stage, recording) for stage, recording in files.items())
        prompts = tuple(_frames(files, "render"))
        return Timeline(
            path=path,
            header=header,
            model=model_of(header),
            junctions=junctions,
            prompts=prompts,
            notes=(f"this is what was recorded: {error}",),
            failures=_failures(files, None),
        )


def _recordings(files: Mapping[str, Path]) -> dict[str, Recording]:
    return {stage: read_recording(path, FILES[stage][1]) for stage, path in files.items()}


def _frames(files: Mapping[str, Recording], stage: str) -> tuple[Any, ...]:
    return files[stage].frames if stage in files else ()


def _as_recorded(stage: str, recording: Recording) -> Crossed:
    return Crossed(stage, tuple(Crossing(timed.frame, at=timed.at) for timed in recording.timed))


def _failures(files: Mapping[str, Recording], fault: tuple[str, Exception] | None) -> tuple[str, ...]:
    end = end_of_all([recording.end for recording in files.values()])
    failures = []
    if fault and isinstance(fault[1], StageFault):
        failures.append(str(fault[1]))
    elif fault:
        raised = Failure.of(fault[1])
        failures.append(f"the stage {fault[0]!r} raised {raised.error}: {raised.message}")
    elif end.failure:
        failures.append(f"the recorded stream failed: {end.failure.error}: {end.failure.message}")
    if end.abandoned:
        message = "" if failures or end.cause != "raised" else _client_message(files)
        failures.append(f"the recorded stream ends early: {in_words(end.cause)}{message}")
    return tuple(failures)


def _client_message(files: Mapping[str, Recording]) -> str:
    """Return the message of the failure to the client, which names the operator's stage; empty if none is recorded."""
    events = (frame for stage in ("persist", "emit") for frame in _frames(files, stage))
    errors = (event.response.error for event in events if isinstance(event, ResponseFailed))
    return next((f": {error.message}" for error in errors if error), "")


def _difference(files: Mapping[str, Recording], replayed: Sequence[Any]) -> str:
    last = _frames(files, "persist" if "persist" in files else "emit")
    recorded, now = ([frame for frame in side if isinstance(frame, Event)] for side in (last, replayed))
    if not recorded or not now or recorded == now:
        return ""
    one, other = (
        [*(Line(event, event.sequence_number) for event in events), Line(End(0), len(events))]
        for events in (recorded, now)
    )
    found = first_difference(one, other, exact=False)
    return (
        f"from number {found.there.line} on, the events differ from the recorded ones: {found.problem}" if found else ""
    )


# Times and causes


def _timed(crossed: Sequence[Crossed], files: Mapping[str, Recording]) -> list[Crossed]:
    junctions = []
    previous: Sequence[float | None] = ()
    for each in crossed:
        times: list[float | None] = [timed.at for timed in files[each.stage].timed] if each.stage in files else []
        if not previous:  # a replay that failed has not read all that was recorded
            times = times[: len(each.crossings)]
        if len(times) != len(each.crossings):
            causes = [crossing.cause for crossing in each.crossings]
            times = [previous[cause] if previous and cause is not None else None for cause in causes]
        crossings = zip(each.crossings, times, strict=True)
        junctions.append(replace(each, crossings=tuple(replace(crossing, at=at) for crossing, at in crossings)))
        previous = times
    return junctions


def _read_by_parser(crossed: Sequence[Crossed]) -> str:
    """Return the stage whose output the parser read, or would have read if the replay had gone on."""
    stages = [each.stage for each in crossed]
    if "generate" in stages and "parse" not in stages:
        return stages[-1]
    return next((before for before, stage in pairwise(stages) if stage == "parse"), "generate")


async def _with_turns(replay: Replay, files: Mapping[str, Recording]) -> list[Crossed]:
    """Return the junctions of a replay, with those of the turns, if known, before the parsed or conversed frames."""
    crossed = replay.trace.junctions
    at = next((at for at, each in enumerate(crossed) if each.stage in ("parse", "converse")), None)
    if at is None or any(each.stage == "generate" for each in crossed):
        return crossed
    tokens = _generated(replay) or _frames(files, "generate")
    if not tokens or not replay.model.spelling:
        return crossed
    through = replay.pipeline.inner("converse").following("generate") if replay.turns else _parser(replay)
    turns = (await traced(through, source_of(tokens), "generate")).junctions
    if crossed[at].stage == "parse":
        return [*crossed[:at], *turns[:-1], _linked(crossed[at], turns[-1], via_cause=True), *crossed[at + 1 :]]
    return [*crossed[:at], *turns, _linked(crossed[at], turns[-1]), *crossed[at + 1 :]]


def _generated(replay: Replay) -> list[Any]:
    return replay.turns["generate"].frames if replay.turns else []


def _parser(replay: Replay) -> Any:
    return part(replay.pipeline, "generate", "parse", "parse").from_stage("parse")


def _linked(crossed: Crossed, parsed: Crossed, *, via_cause: bool = False) -> Crossed:
    places = aligned(parsed.frames, crossed.frames)
    causes = [parsed.crossings[place].cause if via_cause and place is not None else place for place in places]
    return Crossed(crossed.stage, tuple(map(Crossing, crossed.frames, causes)))


def aligned(parsed: Sequence[Any], conversed: Sequence[Any]) -> list[int | None]:
    """Return, for each conversed frame, the index of the same frame in ``parsed``, or of the last match before it."""
    # turns and items have the same order in both and are matched first, so a change in one does not affect the next
    places: list[int | None] = []
    last, is_within = -1, False
    for frame in conversed:
        is_within = is_within or is_served(frame)
        if not is_within:
            last = _next(parsed, last + 1, frame, last)
        is_within = is_within and not isinstance(frame, frames.ItemClosed)
        places.append(last if last >= 0 else None)
    return places


def _next(parsed: Sequence[Any], since: int, sought: Any, otherwise: int) -> int:
    """Return the next index of an equal frame, or of a border of the same rank, before any border of a higher rank."""
    rank = _rank(sought)
    for at in range(since, len(parsed) if rank else min(len(parsed), since + NEAR)):
        if _rank(parsed[at]) == rank and (rank or parsed[at] == sought):
            return at
        if _rank(parsed[at]) > rank:
            break
    return otherwise


def _rank(frame: Any) -> int:
    borders: tuple[Any, ...] = (frames.ItemClosed, OPENINGS, frames.TurnFinished, frames.GenerationStarted)
    return next((rank for rank, kind in enumerate(borders, start=1) if isinstance(frame, kind)), 0)
