"""Helpers for tests of stages: their frames, from recordings or made, and runs that are checked."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from penstock.api.cli.replayer import NoReplay, recorded_files, replay_of
from penstock.pipeline.core import Pipeline, Stage, source_of
from penstock.pipeline.frame_order import ORDERS, OneForOne
from penstock.pipeline.frames import (
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ResolvedRequest,
    TurnFinished,
    replace,
)
from penstock.pipeline.junction import Junction
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.plugins import Edit, Install, Plugin, all_guarded, edited_by
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.recordings.format import FILES, Abandoned, UnreadableRecording, read_recording
from penstock.services.store.database import (
    NullDatabase,
)
from penstock.services.store.store import Store
from penstock.stages.normalize.normalize import normalizing
from penstock.stages.normalize.recall import Recall


def recorded(recording: Path | str, after: str) -> list[Any]:
    """Return the frames that a recording holds of the stage ``after``; raise `UnreadableRecording` if it has none."""
    files = recorded_files(Path(recording))
    if after not in files:
        raise UnreadableRecording(Path(recording), None, f"it has the output of {', '.join(files)}, not of {after}")
    return list(read_recording(files[after], FILES[after][1]).frames)


async def resolved(
    body: str | CreateResponse, models: tuple[str, ...] = ("tiny",), *, owner: str = "", key_name: str = ""
) -> ResolvedRequest:
    """Return a request, or an input, as ``normalize`` gives it.

    ``owner`` and ``key_name`` replace those of the request.
    """
    request = body if isinstance(body, CreateResponse) else CreateResponse(input=body)
    envelope = request.envelope
    envelope = replace(envelope, owner=owner or envelope.owner, key_name=key_name or envelope.key_name)
    request = request.inside(envelope)
    [frame] = await run(normalizing(Recall(store=Store(NullDatabase()), models=models)), [request])
    return frame  # type: ignore[no-any-return]


async def turn(
    *pieces: str, owner: str = "", key_name: str = "", user: str | None = None, tokens: int | None = None
) -> list[ParsedFrame]:
    """Return a turn as ``parse`` gives it: a message that arrives in ``pieces``, each of which is a token.

    ``owner``, ``key_name`` and ``user`` are those of the request.
    ``tokens`` is the count of a turn in which a piece is not one.
    """
    given: tuple[Any, ...] = pieces
    if wrong := [type(piece).__name__ for piece in given if not isinstance(piece, str)]:
        raise TypeError(f'each piece of a turn is a text of its own, turn("a", "b"), and not a {wrong[0]}')
    facts = (await resolved(CreateResponse(input="Hi", user=user), owner=owner, key_name=key_name)).facts
    count = len(pieces) if tokens is None else tokens
    finished = TurnFinished("stop", cached_tokens=0, output_tokens=count, reasoning_tokens=0, duration=0.0)
    deltas = map(ItemDelta, pieces)
    return [GenerationStarted(facts, 1), MessageOpened(), *deltas, ItemClosed(complete=True), finished]


async def run(stage: Stage[Any, Any] | Pipeline[Any, Any], frames: Iterable[Any]) -> list[Any]:
    """Return what a stage, or a pipeline, gives for ``frames``, checked as in a server.

    ``frames`` may be a part of a turn: the order of what the stage gives is then not checked.  Raises `StageFault`.
    """
    source = _listed(frames)
    name = getattr(stage, "__name__", type(stage).__name__)
    pipeline = stage if isinstance(stage, Pipeline) else Pipeline.start(name, stage)
    checked = all_guarded(pipeline, has_order=_are_whole(pipeline.accepts(), source))
    async with checked.open(source_of(source)) as given:
        return [frame async for frame in given]


def _listed(frames: Iterable[Any]) -> list[Any]:
    """Return the frames; raise `TypeError` for what is likely given instead of a list of them."""
    if inspect.iscoroutine(frames):
        frames.close()
        raise TypeError("the frames are a coroutine: await it first, as in run(stage, await turn(...))")
    if isinstance(frames, str | CreateResponse) or not isinstance(frames, Iterable):
        raise TypeError(f"a stage runs with a list of frames, run(stage, [frame]), not with a {type(frames).__name__}")
    return list(frames)


def _are_whole(junction: Junction, source: Sequence[Any]) -> bool:
    """Return True if the frames of a source are in the order of their junction, from its beginning to its end."""
    order = ORDERS.get(junction.frames, OneForOne)()
    if isinstance(order, OneForOne):
        return True
    try:
        for frame in source:
            order.feed(frame)
        order.finish()
    except InvariantBroken:
        return False
    return True


async def replayed(
    recording: Path | str,
    install: Edit | Install = nullcontext,
    since: str | None = None,
    upto: str | None = None,
    *,
    partial: bool = False,
) -> list[Any]:
    """Return the last frames of a replay with the stages of ``install``: without ``upto``, the events.

    The stages are checked as in a server.  The error of a stage is raised.  ``penstock replay`` has the same options.
    A recording that ends early, because a stage raised or the client left, raises `NoReplay`; with ``partial``, the
    frames up to there are returned.
    """
    plugin = Plugin(getattr(install, "__name__", "install"), install)
    replay = await replay_of(Path(recording), since, upto, lambda pipeline: edited_by([plugin], pipeline))
    if replay.trace.fault:
        raise replay.trace.fault[1]
    if isinstance(replay.trace.error, Abandoned) and not partial:
        raise NoReplay(f"{recording}: {replay.trace.error}; partial=True returns what comes until there")
    if replay.trace.error and not isinstance(replay.trace.error, Abandoned):
        raise replay.trace.error
    return replay.trace.junctions[-1].frames
