"""Parsed frames in the order of their grammar, and the events that the writer makes of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.frames import (
    AnnotationAdded,
    CustomToolCallOpened,
    FinishReason,
    FunctionCallOpened,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    MessageOpened,
    ParsedFrame,
    RawMessages,
    ReasoningOpened,
    RefusalOpened,
    TurnFinished,
)
from pipeline.protocol.events import Event, ResponseEvent, to_sse
from pipeline.protocol.items import InputText, Logprob, Message, Phase, TopLogprob
from pipeline.protocol.response import ReasoningOptions
from stages.emit.emit import ResponseWriter
from tests.stages.persist.samples import response

INPUT = (Message("msg_in", "completed", "user", (InputText("How is Oslo?"),)),)

SUMMARISED = ReasoningOptions("medium", "auto")
"""The reasoning options of a request that asks for a summary."""

NOTE = {"type": "url_citation", "url": "https://a.example/", "title": "A", "start_index": 0, "end_index": 2}

Piece = str | ItemDelta | AnnotationAdded
Frames = tuple[ParsedFrame, ...]


def started(
    response_id: str = "resp_1", prompt_tokens: int = 7, raw_messages: RawMessages | None = None, **fields: Any
) -> GenerationStarted:
    """The first frame of a response."""
    begun: dict[str, Any] = {"status": "in_progress", "completed_at": None, "output": ()}
    return GenerationStarted(response(response_id, **(begun | fields)), INPUT, prompt_tokens, raw_messages=raw_messages)


def item(opening: ItemOpened, *pieces: Piece, complete: bool = True) -> Frames:
    """One item, whole."""
    grow = (ItemDelta(piece) if isinstance(piece, str) else piece for piece in pieces)
    return (opening, *grow, ItemClosed(complete))


def reasoning(*texts: str, complete: bool = True) -> Frames:
    """Some thinking."""
    return item(ReasoningOpened(), *texts, complete=complete)


def message(*pieces: Piece, phase: Phase = "final_answer", complete: bool = True) -> Frames:
    """Some words to the user."""
    return item(MessageOpened(phase), *pieces, complete=complete)


def refusal(*texts: str, complete: bool = True) -> Frames:
    """Some words on why there is no answer."""
    return item(RefusalOpened(), *texts, complete=complete)


def function_call(*texts: str, name: str = "get_weather", complete: bool = True) -> Frames:
    """A call."""
    return item(FunctionCallOpened(name), *texts, complete=complete)


def custom_tool_call(*texts: str, name: str = "shell", complete: bool = True) -> Frames:
    """A call of a custom tool."""
    return item(CustomToolCallOpened(name), *texts, complete=complete)


def spelled(text: str, alternatives: int = 0) -> ItemDelta:
    """A delta with logprobs: a token for each character, or two for one of several bytes."""
    tokens = [part for raw in map(str.encode, text) for part in (raw[:1], raw[1:]) if part]
    others = tuple(TopLogprob(chr(97 + rank), (97 + rank,), -1.0 - rank) for rank in range(alternatives))
    return ItemDelta(text, tuple(Logprob(_token_text(raw), tuple(raw), -0.5, others) for raw in tokens))


def _token_text(raw: bytes) -> str:
    return raw.decode() if raw.isascii() else "".join(f"\\x{byte:02x}" for byte in raw)


def finished(reason: FinishReason = "stop", **fields: Any) -> TurnFinished:
    """The last frame."""
    counts: dict[str, Any] = {"cached_tokens": 4, "output_tokens": 20, "reasoning_tokens": 8, "duration": 2.0}
    return TurnFinished(reason, **(counts | fields))


def whole_turn() -> Frames:
    """A turn with the items that a model writes most."""
    items = (*reasoning("Let me ", "think."), *message("Hel", "lo!"), *function_call('{"city":', '"Oslo"}'))
    return (started(), *items, finished())


def rare_turn() -> Frames:
    """A turn with the items that a model writes least, and with all that may stand beside text."""
    text = message(spelled("Hé", 2), AnnotationAdded(NOTE), spelled("y", 2))
    return (started(top_logprobs=2), *text, *refusal("No."), *custom_tool_call("ls"), finished())


def summarised_turn() -> Frames:
    """A turn whose thinking comes out as a summary."""
    return (started(reasoning=SUMMARISED), *reasoning("So."), finished())


def in_background(frames: Frames) -> Frames:
    """The same turn, of a response that waits before it begins."""
    first, *rest = frames
    assert isinstance(first, GenerationStarted)
    return (replace(first, response=replace(first.response, background=True, status="queued")), *rest)


def written(frames: Iterable[ParsedFrame]) -> list[ResponseEvent]:
    """The events of a turn that ends."""
    writer = ResponseWriter()
    events = [event for frame in frames for event in writer.feed(frame) if isinstance(event, Event)]
    return [*events, *writer.finish()]


def types(events: Iterable[Event]) -> list[str]:
    """The names of events, without what all of them begin with."""
    return [str(event.__struct_config__.tag).removeprefix("response.") for event in events]


def on_the_wire(event: Event) -> dict[str, Any]:
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


_names = st.sampled_from(["get_weather", "clock"])
_namespaces = st.sampled_from([None, "home"])
_openings: st.SearchStrategy[ItemOpened] = st.one_of(
    st.just(ReasoningOpened()),
    st.builds(MessageOpened, st.sampled_from(["commentary", "final_answer"])),
    st.just(RefusalOpened()),
    st.builds(FunctionCallOpened, _names, _namespaces),
    st.builds(CustomToolCallOpened, _names, _namespaces),
)
# `checked` takes a frame apart with str.splitlines; what that splits at and SSE does not, test_events looks at.
_characters = st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029")
_texts = st.text(_characters, min_size=1, max_size=5)
_notes = st.builds(lambda end: AnnotationAdded({**NOTE, "end_index": end}), st.integers(0, 9))


def _pieces(opening: ItemOpened, alternatives: int | None) -> st.SearchStrategy[list[Piece]]:
    """What may come in an item; ``alternatives`` is the number of them beside each token, None without logprobs."""
    if not isinstance(opening, MessageOpened):
        return st.lists(_texts, max_size=3)
    deltas = _texts if alternatives is None else _texts.map(lambda text: spelled(text, alternatives))
    return st.lists(deltas | _notes, max_size=4)


@st.composite
def turns(draw: st.DrawFn) -> Frames:
    """Whole turns, by the grammar of `ParsedFrame`; only a turn that was cut may have a cut item, its last."""
    reason: FinishReason = draw(st.sampled_from(["stop", "length", "content_filter"]))
    openings = draw(st.lists(_openings, max_size=4))
    alternatives = draw(st.sampled_from([None, 0, 2]))
    prompt_tokens = draw(st.integers(1, 99))
    raw: RawMessages | None = draw(st.sampled_from([None, ({"role": "user"},)]))
    reasoning = draw(st.sampled_from([ReasoningOptions(None, None), SUMMARISED]))
    first = started("resp_1", prompt_tokens, raw, reasoning=reasoning, top_logprobs=alternatives or 0)
    frames: list[ParsedFrame] = [first]
    for position, opening in enumerate(openings, start=1):
        is_cut = reason != "stop" and position == len(openings) and draw(st.booleans())
        frames += item(opening, *draw(_pieces(opening, alternatives)), complete=not is_cut)
    thought = draw(st.integers(0, 50))
    counts = {"output_tokens": thought + draw(st.integers(0, 50)), "reasoning_tokens": thought}
    cached, duration = draw(st.integers(0, prompt_tokens)), draw(st.floats(0, 99))
    return (*frames, finished(reason, **counts, cached_tokens=cached, duration=duration, raw_messages=raw))
