"""Parsed frames in the order of their grammar, and the events that the writer makes of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from hypothesis import strategies as st

from pipeline.frames import (
    FinishReason,
    FunctionCallOpened,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    TurnFinished,
)
from pipeline.protocol.events import ResponseEvent, to_sse
from pipeline.protocol.items import InputText, Message, Phase
from stages.emit.emit import ResponseWriter
from tests.stages.persist.samples import response

INPUT = (Message("msg_in", "completed", "user", (InputText("How is Oslo?"),)),)

Opening = ReasoningOpened | MessageOpened | FunctionCallOpened
Frames = tuple[ParsedFrame, ...]


def started(response_id: str = "resp_1", prompt_tokens: int = 7, **fields: Any) -> GenerationStarted:
    """The first frame of a response."""
    begun: dict[str, Any] = {"status": "in_progress", "completed_at": None, "output": ()}
    return GenerationStarted(response(response_id, **(begun | fields)), INPUT, prompt_tokens)


def item(opening: Opening, *texts: str, complete: bool = True) -> Frames:
    """One item, whole."""
    return (opening, *map(ItemDelta, texts), ItemClosed(complete))


def reasoning(*texts: str, complete: bool = True) -> Frames:
    """Some thinking."""
    return item(ReasoningOpened(), *texts, complete=complete)


def message(*texts: str, phase: Phase = "final_answer", complete: bool = True) -> Frames:
    """Some words to the user."""
    return item(MessageOpened(phase), *texts, complete=complete)


def function_call(*texts: str, name: str = "get_weather", complete: bool = True) -> Frames:
    """A call."""
    return item(FunctionCallOpened(name), *texts, complete=complete)


def finished(reason: FinishReason = "stop", **fields: Any) -> TurnFinished:
    """The last frame."""
    counts: dict[str, Any] = {"cached_tokens": 4, "output_tokens": 20, "reasoning_tokens": 8, "duration": 2.0}
    return TurnFinished(reason, **(counts | fields))


def whole_turn() -> Frames:
    """A turn with an item of every kind."""
    items = (*reasoning("Let me ", "think."), *message("Hel", "lo!"), *function_call('{"city":', '"Oslo"}'))
    return (started(), *items, finished())


def written(frames: Iterable[ParsedFrame]) -> list[ResponseEvent]:
    """The events of a turn that ends."""
    writer = ResponseWriter()
    events = [event for frame in frames for event in writer.feed(frame) if not isinstance(event, GenerationStarted)]
    return [*events, *writer.finish()]


def on_the_wire(event: ResponseEvent) -> dict[str, Any]:
    """The JSON of an event, as its SSE frame carries it."""
    name, data, *rest = to_sse(event).decode().split("\n")
    assert rest == ["", ""]
    body: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {body['type']}"
    return body


async def source(
    frames: Iterable[ParsedFrame], error: BaseException | None = None
) -> AsyncGenerator[ParsedFrame, None]:
    """Frames as a stage's source, which breaks at its end if there is an ``error``."""
    for frame in frames:
        yield frame
    if error:
        raise error


_openings: st.SearchStrategy[Opening] = st.one_of(
    st.just(ReasoningOpened()),
    st.builds(MessageOpened, st.sampled_from(["commentary", "final_answer"])),
    st.builds(FunctionCallOpened, st.sampled_from(["get_weather", "clock"])),
)
# `checked` takes a frame apart with str.splitlines; what that splits at and SSE does not, test_events looks at.
_characters = st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029")
_texts = st.lists(st.text(_characters, min_size=1, max_size=5), max_size=3)


@st.composite
def turns(draw: st.DrawFn) -> Frames:
    """Whole turns, by the grammar of `ParsedFrame`; only a turn that was cut may have a cut item, its last."""
    reason: FinishReason = draw(st.sampled_from(["stop", "length"]))
    openings = draw(st.lists(_openings, max_size=4))
    frames: list[ParsedFrame] = [started(prompt_tokens=draw(st.integers(1, 99)))]
    for position, opening in enumerate(openings, start=1):
        is_cut = reason == "length" and position == len(openings) and draw(st.booleans())
        frames += item(opening, *draw(_texts), complete=not is_cut)
    thought = draw(st.integers(0, 50))
    counts = {"output_tokens": thought + draw(st.integers(0, 50)), "reasoning_tokens": thought}
    return (
        *frames,
        finished(reason, **counts, cached_tokens=draw(st.integers(0, 99)), duration=draw(st.floats(0, 99))),
    )
