"""Any response at all: frames drawn by the grammar of `ConversedFrame`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pipeline.frames import (
    AnnotationAdded,
    CallStarted,
    CustomToolCallOpened,
    FinishReason,
    FunctionCallOpened,
    GenerationStarted,
    ItemClosed,
    ItemOpened,
    McpApprovalOpened,
    RawMessages,
    ReasoningOpened,
    RefusalOpened,
    ResponseStarted,
)
from pipeline.protocol.items import Phase
from pipeline.protocol.response import ReasoningOptions
from tests.support.frames import (
    FORMS,
    FOUND,
    HUNG,
    LISTED,
    LOGS,
    NOTE,
    SUMMARISED,
    WRITTEN,
    Frames,
    Piece,
    code_call,
    finished,
    form_call,
    item,
    mcp_call,
    mcp_list,
    message,
    shell_call,
    shell_output,
    spelled,
    started,
    web_call,
)

_names = st.sampled_from(["get_weather", "clock"])
_namespaces = st.sampled_from([None, "home"])
# `checked` takes a frame apart with str.splitlines; what that splits at and SSE does not, test_events looks at.
_characters = st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029")
_text = st.text(_characters, min_size=1, max_size=5)
_texts = st.lists(_text, max_size=3)
_notes = st.builds(lambda end: AnnotationAdded({**NOTE, "end_index": end}), st.integers(0, 9))
_errors = st.none() | _text


def _plain(opening: st.SearchStrategy[ItemOpened]) -> st.SearchStrategy[Frames]:
    return st.builds(lambda opened, texts: item(opened, *texts), opening, _texts)


def _outputs(*one_of: dict[str, Any]) -> st.SearchStrategy[tuple[dict[str, Any], ...]]:
    return st.lists(st.sampled_from(one_of), max_size=3).map(tuple)


@st.composite
def _shells(draw: st.DrawFn) -> Frames:
    """A call of the sandbox's shell, and what came of it."""
    call = shell_call(*draw(st.just(['{"cmd": ["ls"]}']) | st.just(['{"commands": ["ls", "pwd"]}']) | _texts))
    return (*call, *shell_output(*draw(_outputs(WRITTEN, HUNG)), error=draw(_errors)))


@st.composite
def _forms(draw: st.DrawFn) -> Frames:
    form = draw(st.sampled_from(list(FORMS)))
    return form_call(form, *draw(st.just([FORMS[form]]) | _texts))


def _messages(alternatives: int | None) -> st.SearchStrategy[Frames]:
    """Messages; ``alternatives`` is the number of them beside each token, None without logprobs."""
    deltas = _text if alternatives is None else _text.map(lambda text: spelled(text, alternatives))
    phases: st.SearchStrategy[Phase | None] = st.sampled_from(["commentary", "final_answer", None])
    pieces: st.SearchStrategy[list[Piece]] = st.lists(deltas | _notes, max_size=4)
    return st.builds(lambda phase, said: message(*said, phase=phase), phases, pieces)


_listings = st.builds(lambda error, tools: mcp_list(*tools, error=error), _errors, _outputs(LISTED))
_items: st.SearchStrategy[Frames] = st.one_of(
    _plain(st.just(ReasoningOpened()) | st.just(RefusalOpened()) | st.just(McpApprovalOpened("wiki", "ask"))),
    _plain(st.builds(FunctionCallOpened, _names, _namespaces)),
    _plain(st.builds(CustomToolCallOpened, _names, _namespaces)),
    st.builds(lambda texts, error: mcp_call(*texts, error=error), _texts, _errors),
    st.builds(lambda texts, error, out: code_call(*texts, error=error, outputs=out), _texts, _errors, _outputs(LOGS)),
    st.builds(lambda texts, error, found: web_call(*texts, error=error, found=found), _texts, _errors, _outputs(FOUND)),
    _shells(),
    _forms(),
)


def _cut(frames: Frames) -> Frames:
    """An item that was cut where its text ends; of several the first."""
    end = next(at for at, frame in enumerate(frames) if isinstance(frame, CallStarted | ItemClosed))
    return (*frames[:end], ItemClosed(complete=False))


@st.composite
def _turns(draw: st.DrawFn, first: GenerationStarted, alternatives: int | None, reason: FinishReason) -> Frames:
    """One turn; only the last item of one that was cut may be cut."""
    items = draw(st.lists(_items | _messages(alternatives), max_size=3))
    if items and reason != "stop" and draw(st.booleans()):
        items[-1] = _cut(items[-1])
    thought = draw(st.integers(0, 50))
    counts = {"output_tokens": thought + draw(st.integers(0, 50)), "reasoning_tokens": thought}
    cached, duration = draw(st.integers(0, first.prompt_tokens)), draw(st.floats(0, 99))
    end = finished(reason, **counts, cached_tokens=cached, duration=duration, raw_messages=first.raw_messages)
    return (first, *(frame for item in items for frame in item), end)


@st.composite
def turns(draw: st.DrawFn) -> Frames:
    """Whole responses, by the grammar of `ConversedFrame`."""
    reason: FinishReason = draw(st.sampled_from(["stop", "length", "content_filter", "max_tool_calls", "max_turns"]))
    alternatives = draw(st.sampled_from([None, 0, 2]))
    raw: RawMessages | None = draw(st.sampled_from([None, ({"role": "user"},)]))
    reasoning = draw(st.sampled_from([ReasoningOptions(None, None), SUMMARISED]))
    prompts = draw(st.lists(st.integers(1, 99), min_size=1, max_size=3))
    begun = [started("resp_1", size, raw, reasoning=reasoning, top_logprobs=alternatives or 0) for size in prompts]
    listed = draw(st.lists(_listings, max_size=2))
    ahead = (ResponseStarted(begun[0].response, begun[0].input), *(frame for listing in listed for frame in listing))
    told = [draw(_turns(first, alternatives, "stop")) for first in begun[:-1]]
    last = draw(_turns(begun[-1], alternatives, reason))
    return (*(ahead if listed else ()), *(frame for turn in (*told, last) for frame in turn))
