"""The cause of a difference: the operator's stage that made it, and the recorded tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.api.cli.replayer import Replay, replay_of
from penstock.extensions.workbench.causes import recorded_cause, stage_behind
from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import EmittedFrame, ItemDelta, ParsedFrame
from penstock.pipeline.plugins import Install, guarded
from penstock.pipeline.protocol.events import DELTAS, OutputTextDelta
from tests.support.paths import HARMONY
from tests.support.plugins import install_of

NAMES = ["function_call", "greeting", "stray_markers_in_content", "logprobs"]


@dataclass(frozen=True)
class MarkTexts:
    """Put ``mark`` behind each text that the model writes, between ``parse`` and ``emit``."""

    mark: str

    async def __call__(self, source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
        async for frame in source:
            yield replace(frame, text=frame.text + self.mark) if isinstance(frame, ItemDelta) else frame


@dataclass(frozen=True)
class MarkEvents:
    """The same after ``emit``."""

    mark: str

    async def __call__(self, source: AsyncIterator[EmittedFrame]) -> AsyncGenerator[EmittedFrame, None]:
        async for frame in source:
            delta: Any = frame
            yield replace(delta, delta=delta.delta + self.mark) if type(frame) in DELTAS else frame


class Own(NamedTuple):
    """A stage of the operator's: its place, and the mark that it makes, if it makes any."""

    after: str
    mark: str


def installing(stages: Sequence[Own], numbers: Sequence[int]) -> Install:
    """Return a plug-in that inserts some of the stages, each named by its number."""

    def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        edited = pipeline
        for number in reversed(numbers):
            place, mark = stages[number]
            stage = MarkTexts(mark) if place == "parse" else MarkEvents(mark)
            edited = edited.insert_after(place, str(number), stage)
        return guarded(edited, pipeline)

    return install_of(install)


def junction(replay: Replay, place: str) -> list[Any]:
    """The frames that cross the junction after ``emit``, or that come out last."""
    return replay.trace.after("emit").frames if place == "emit" else replay.trace.junctions[-1].frames


STAGES = st.lists(st.builds(Own, st.sampled_from(["parse", "emit"]), st.sampled_from(["", "~", "+"])), min_size=1)


@given(st.sampled_from(NAMES), STAGES.map(lambda own: sorted(own, key=lambda each: each.after == "emit")), st.data())
@example("greeting", [Own("parse", ""), Own("parse", "~"), Own("parse", "+")], None)
async def test_first_stage_that_changes_the_recorded_frames_is_named(
    name: str, stages: list[Own], data: st.DataObject | None
) -> None:
    """The recording was made with some of the stages, which are therefore not to blame."""
    known = data.draw(st.integers(0, len(stages) - 1)) if data else 1
    changing = [number for number, own in enumerate(stages) if number >= known and own.mark]
    assume(changing)
    numbers = range(len(stages))
    recorded = await replay_of(HARMONY / name, install=installing(stages, numbers[:known]))
    replay = await replay_of(HARMONY / name, install=installing(stages, numbers))
    place = stages[changing[0]].after
    compared = "emit" if place == "parse" else "persist"
    expected = junction(recorded, compared)
    found = await stage_behind(replay, compared, lambda crossed: crossed.frames == expected)
    assert found == str(changing[0])


@pytest.mark.parametrize("name", NAMES[:3])
async def test_text_comes_from_the_recorded_tokens_that_hold_it(name: str) -> None:
    """No character here is made of several tokens: the parser would wait for the last one."""
    replay = await replay_of(HARMONY / name, install=installing([Own("parse", "")], [0]))
    for stage in ("emit", "persist"):
        frames = replay.trace.after(stage).frames
        texts = {at: frame.delta for at, frame in enumerate(frames) if isinstance(frame, OutputTextDelta)}
        causes = {at: recorded_cause(replay, stage, at) for at in texts}
        assert all(causes[at].startswith("tokens.jsonl:") for at in texts)
        assert [at for at, text in texts.items() if repr(text)[1:-1] not in causes[at]] == []
        assert recorded_cause(replay, stage, len(frames)) == "", "the end of a recording comes from no frame"
