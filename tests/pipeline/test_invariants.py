from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from pipeline import invariants, lifecycle
from pipeline.invariants import StreamChecker, check
from pipeline.lifecycle import InvariantBroken
from pipeline.protocol.events import (
    ContentPartAdded,
    CustomToolCallInputDelta,
    FunctionCallArgumentsDelta,
    OutputItemDone,
    OutputTextAnnotationAdded,
    ReasoningSummaryTextDelta,
    ReasoningTextDelta,
    ReasoningTextDone,
    RefusalDelta,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseQueued,
)
from pipeline.protocol.items import (
    FunctionCall,
    Logprob,
    OutputItem,
    OutputText,
    ReasoningText,
    Refusal,
    SummaryText,
)
from pipeline.protocol.response import (
    ErrorDetails,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    Usage,
)
from pipeline.record import replay
from tests.building import (
    NOTE,
    Frames,
    custom_tool_call,
    finished,
    function_call,
    message,
    rare_turn,
    reasoning,
    spelled,
    started,
    summarised_turn,
    turns,
    whole_turn,
    written,
)

Events: TypeAlias = list[ResponseEvent]
Change: TypeAlias = Callable[[Events], Events]

CUT_TURN: Frames = (started(), *reasoning("So."), *message("Hel", complete=False), finished("length"))
TWO_CALLS: Frames = (started(), *function_call("{}"), *custom_tool_call("{}"), finished())
RARE, SUMMARY = rare_turn(), summarised_turn()

# In the events of `whole_turn`, reasoning begins at 2, the message at 9, the call at 16, and 21 is the end.
# In those of RARE, the message begins at 2, the refusal at 10, the call at 16, and 20 is the end.
# In those of SUMMARY, reasoning begins at 2, and 8 is the end.


def fed(events: Events) -> None:
    stream = StreamChecker()
    for event in events:
        stream.feed(event)
    stream.finish()


def begun(events: Events) -> Response:
    """The response as its first event has it."""
    first = events[0]
    assert isinstance(first, ResponseCreated)
    return first.response


def outputs(events: Events) -> tuple[OutputItem, ...]:
    return tuple(event.item for event in events if isinstance(event, OutputItemDone))


# Changes


def renumbered(events: Events) -> Events:
    return [replace(event, sequence_number=number) for number, event in enumerate(events)]


def drop(*gone: int) -> Change:
    return lambda events: renumbered([event for at, event in enumerate(events) if at not in gone])


def repeat(at: int) -> Change:
    return copy(at, at)


def copy(at: int, behind: int) -> Change:
    return lambda events: renumbered([*events[: behind + 1], events[at], *events[behind + 1 :]])


def instead(at: int, event: ResponseEvent) -> Change:
    return lambda events: renumbered([*events[:at], event, *events[at + 1 :]])


def put(at: int, /, **fields: Any) -> Change:
    """An event with other fields."""
    return lambda events: [
        replace(event, **fields) if position == at % len(events) else event for position, event in enumerate(events)
    ]


def put_in(at: int, name: str, /, **fields: Any) -> Change:
    """An event whose item or response has other fields."""
    return lambda events: put(at, **{name: replace(getattr(events[at], name), **fields)})(events)


def put_item(at: int, /, **fields: Any) -> Change:
    return put_in(at, "item", **fields)


def put_done_item(at: int, /, **fields: Any) -> Change:
    """The same, with the final output told so too."""

    def change(events: Events) -> Events:
        changed = put_item(at, **fields)(events)
        return put_in(-1, "response", output=outputs(changed))(changed)

    return change


def begin(**fields: Any) -> Change:
    return put_in(0, "response", **fields)


def end(**fields: Any) -> Change:
    return put_in(-1, "response", **fields)


def queued(events: Events) -> Events:
    """The same stream of a response that waits before it begins."""
    waiting = replace(begun(events), status="queued")
    return renumbered([ResponseCreated(0, waiting), ResponseQueued(1, waiting), *events[1:]])


def usage(
    total: int = 27, cached: int = 4, thought: int = 8, turns: int = 1, cached_in_turn: int | None = None
) -> Usage:
    cached_in_turn = cached if cached_in_turn is None else cached_in_turn
    return Usage(
        7,
        InputTokensDetails(cached, 0, (7,), (cached_in_turn,)),
        20,
        OutputTokensDetails(thought, 0, (20,), (0,) * turns),
        total,
    )


def put_part(at: int, /, **fields: Any) -> Change:
    return put_in(at, "part", **fields)


def put_tokens(*logprobs: Logprob) -> Change:
    """Other tokens in the first delta of RARE and in what sums it up."""

    def change(events: Events) -> Events:
        rest = spelled("y", 2).logprobs
        for at, tokens in ((4, logprobs), (7, (*logprobs, *rest))):
            events = put(at, logprobs=tokens)(events)
        return events

    return change


def both(first: Change, second: Change) -> Change:
    return lambda events: second(first(events))


def of(frames: Frames, change: Change) -> Change:
    """A change of another stream."""
    return lambda _: change(written(frames))


IN_A_REFUSAL: Any = {"sequence_number": 12, "item_id": "msg_10001", "output_index": 1}
IN_A_CALL: Any = {"sequence_number": 17, "item_id": "fc_10002", "output_index": 2}
IN_A_MESSAGE: Any = {"sequence_number": 11, "item_id": "msg_10001", "output_index": 1}
A_CALL = FunctionCall("msg_10001", "call_1", "clock", "", "completed")

(Y,) = spelled("y", 2).logprobs
ERROR = ErrorDetails("server_error", "It died.")
DETAILS = IncompleteDetails("content_filter")

BROKEN: dict[str, list[Change]] = {
    # The response
    "sequence numbers count from 0 without gaps": [put(5, sequence_number=6), lambda events: events[1:]],
    "nothing follows the terminal event": [repeat(21), copy(20, behind=21)],
    "a stream ends with a terminal event": [drop(21), lambda events: []],
    "a response is created queued or in progress": [begin(status="completed"), begin(status="cancelled")],
    "a response begins without an outcome": [
        begin(output=(A_CALL,)),
        begin(usage=usage()),
        begin(error=ERROR),
        begin(completed_at=1),
        begin(incomplete_details=DETAILS),
        begin(input_messages=({},)),
        begin(output_messages=({},)),
    ],
    "response.created comes first, and once": [repeat(0)],
    "response.queued comes once": [both(queued, repeat(1))],
    "response.queued says so": [both(queued, put_in(1, "response", status="in_progress"))],
    "response.queued follows response.created and repeats its response": [
        both(queued, drop(0)),
        both(queued, put_in(1, "response", model="other")),
    ],
    "response.in_progress follows response.created and repeats its response": [
        drop(0),
        begin(model="other"),
        both(queued, put_in(2, "response", status="queued")),
    ],
    "a response that is created queued says so": [both(queued, drop(1)), begin(status="queued")],
    "nothing begins a response that is in progress": [
        repeat(1),
        copy(1, behind=8),
        copy(0, behind=8),
        both(queued, copy(1, behind=2)),
    ],
    "a response begins before it ends": [drop(*range(21))],
    "a response is in progress before it ends by itself": [
        drop(*range(1, 21)),
        both(queued, drop(*range(2, 22))),
        of(CUT_TURN, drop(*range(1, 14))),
    ],
    "every item is done before the response ends": [drop(20)],
    "what the response says of its request never changes": [end(id="resp_2"), end(temperature=0.5)],
    "the final output equals the items that were done": [end(output=()), put_item(20, status="incomplete")],
    "the terminal event's type is the status": [end(status=status) for status in ("failed", "cancelled", "queued")],
    "only the last item may be incomplete": [of(CUT_TURN, put_done_item(7, status="incomplete"))],
    "a completed response has completed items only": [put_done_item(20, status="incomplete")],
    "completed_at belongs to completed responses": [end(completed_at=None), of(CUT_TURN, end(completed_at=1))],
    "error belongs to failed responses": [end(error=ERROR), of(CUT_TURN, end(error=ERROR))],
    "incomplete_details belong to incomplete responses": [
        end(incomplete_details=DETAILS),
        of(CUT_TURN, end(incomplete_details=None)),
        of(CUT_TURN, end(status="cancelled")),
    ],
    "raw messages are those of both sides": [end(input_messages=()), end(output_messages=({},))],
    "a response that ended by itself has its usage": [end(usage=None), of(CUT_TURN, end(usage=None))],
    "the total is the sum of its parts": [end(usage=usage(total=28))],
    "cached tokens are input tokens": [end(usage=usage(cached=8))],
    "reasoning tokens are output tokens": [end(usage=usage(thought=21))],
    "each turn has a number in every list": [end(usage=usage(turns=0)), end(usage=usage(turns=2))],
    "the numbers of the turns add up": [end(usage=usage(cached_in_turn=3))],
    # One item after another
    "items come after response.in_progress": [drop(1), drop(0, 1)],
    "an item is done before the next is added": [drop(8), repeat(9)],
    "output indexes count the items": [put(9, output_index=2), drop(*range(2, 9))],
    "item ids are unique": [put_item(9, id="rs_10000")],
    "call ids are unique": [of(TWO_CALLS, put_item(6, call_id="call_10000"))],
    "an item is added empty": [
        put_item(9, content=(OutputText(""),)),
        put_item(16, arguments="{}"),
        put_item(9, status="completed"),
        of(RARE, put_item(16, input="l")),
        of(SUMMARY, put_item(2, summary=(SummaryText("So."),))),
    ],
    "every part is done before its item": [drop(7), drop(14), of(SUMMARY, drop(6)), of(RARE, drop(14))],
    "a message has at least one part": [both(put_done_item(15, content=()), drop(*range(10, 15)))],
    "a done item is completed or incomplete": [put_item(15, status="in_progress"), put_item(8, status=UNSET)],
    "an item keeps its identity": [
        put_item(15, role="user"),
        put_item(15, phase="commentary"),
        put_item(20, call_id="call_2"),
        put_item(20, name="clock"),
        put_item(20, namespace="home"),
        put(15, item=A_CALL),
        of(RARE, put_item(19, namespace="home")),
        of(RARE, put_item(19, call_id="call_2")),
        of(RARE, put(19, item=FunctionCall("ctc_10002", "call_10002", "shell", "ls", "completed"))),
    ],
    "a done item holds what its events built": [
        put_item(15, content=()),
        put_item(8, content=(ReasoningText("So."),)),
        put_item(8, summary=(SummaryText("So."),)),
        put_item(20, arguments="{}"),
        drop(19),
        of(RARE, put_item(9, content=(OutputText("Héy", (NOTE,)),))),
        of(RARE, put_item(15, content=(OutputText("No."),))),
        of(RARE, put_item(19, input="")),
        of(RARE, drop(18)),
        of(SUMMARY, put_item(7, summary=(), content=(ReasoningText("So."),))),
    ],
    "an event of an item comes between its added and its done event": [drop(2), drop(16), repeat(8)],
    "an event carries the output index of the open item": [put(at, output_index=3) for at in (*range(3, 9), 17, 20)],
    "an event carries the id of the open item": [
        *(put(at, item_id="rs_0") for at in (*range(3, 8), 17, 19)),
        put_item(8, id="rs_0"),
    ],
    # Parts and texts
    "a part is of its item's kind": [
        put(10, part=ReasoningText("")),
        put(3, part=OutputText("")),
        put(3, part=Refusal("")),
        of(SUMMARY, put(3, part=OutputText(""))),
        instead(17, ContentPartAdded(**IN_A_CALL, content_index=0, part=OutputText(""))),
    ],
    "a part is done before the next is added": [repeat(10), of(SUMMARY, repeat(3))],
    "content indexes count the parts of an item, summary indexes those of its summary": [
        put(10, content_index=1),
        of(SUMMARY, put(3, summary_index=1)),
    ],
    "a part is added empty": [
        put(10, part=OutputText("Hel")),
        of(RARE, put_part(3, annotations=(NOTE,))),
        of(RARE, put_part(3, logprobs=spelled("H").logprobs)),
        of(RARE, put(11, part=Refusal("No."))),
        of(SUMMARY, put(3, part=SummaryText("So."))),
    ],
    "a part keeps its kind": [
        put(14, part=ReasoningText("Hello!")),
        of(RARE, put(14, part=OutputText("No."))),
        of(RARE, put(8, part=Refusal("Héy"))),
    ],
    "a done part holds its text": [
        put(14, part=OutputText("Hel")),
        drop(13),
        of(RARE, put(14, part=Refusal("No"))),
        of(SUMMARY, drop(5)),
    ],
    "a done part holds its logprobs": [
        put_part(14, logprobs=spelled("Hello!").logprobs),
        of(RARE, put_part(8, logprobs=())),
    ],
    "a done part holds its annotations": [
        put_part(14, annotations=(NOTE,)),
        of(RARE, put_part(8, annotations=())),
        of(RARE, drop(5)),
    ],
    "an event of a part comes between its added and its done event": [
        drop(10),
        copy(11, behind=14),
        repeat(14),
        of(RARE, copy(5, behind=8)),
        of(SUMMARY, copy(4, behind=6)),
    ],
    "an event carries the index of the open part": [
        *(put(at, content_index=1) for at in (11, 13, 14)),
        *(of(RARE, put(at, content_index=1)) for at in (5, 12, 13, 14)),
        *(of(SUMMARY, put(at, summary_index=1)) for at in (4, 5, 6)),
    ],
    "text events are of their part's kind": [
        instead(11, ReasoningTextDelta(**IN_A_MESSAGE, content_index=0, delta="Hel")),
        instead(11, RefusalDelta(**IN_A_MESSAGE, content_index=0, delta="Hel")),
        instead(11, ReasoningSummaryTextDelta(**IN_A_MESSAGE, summary_index=0, delta="Hel")),
        instead(13, ReasoningTextDone(**IN_A_MESSAGE, content_index=0, text="Hello!")),
    ],
    "arguments belong to function calls, input to custom ones": [
        instead(11, FunctionCallArgumentsDelta(**IN_A_MESSAGE, delta="{}")),
        instead(17, CustomToolCallInputDelta(**IN_A_CALL, delta="{}")),
        of(RARE, instead(17, FunctionCallArgumentsDelta(17, "ctc_10002", 2, "ls"))),
    ],
    "annotations belong to text for the user": [
        of(
            RARE,
            instead(12, OutputTextAnnotationAdded(**IN_A_REFUSAL, content_index=0, annotation_index=0, annotation={})),
        )
    ],
    "annotation indexes count the annotations of a part": [of(RARE, put(5, annotation_index=1)), of(RARE, repeat(5))],
    "no annotation follows the done event of its text": [of(RARE, copy(5, behind=7))],
    "deltas are never empty": [put(11, delta=""), put(17, delta=""), of(RARE, put(17, delta=""))],
    "no delta follows the done event of its text": [
        copy(11, behind=13),
        copy(17, behind=19),
        of(RARE, copy(12, behind=13)),
        of(RARE, copy(17, behind=18)),
    ],
    "a text is done once": [repeat(13), repeat(19), of(RARE, repeat(13)), of(RARE, repeat(18)), of(SUMMARY, repeat(5))],
    "the deltas of a text sum to the text that its done event carries": [
        drop(11),
        repeat(4),
        put(13, text="Hello"),
        put(19, arguments="{}"),
        of(RARE, put(13, refusal="No")),
        of(RARE, put(18, input="l")),
        of(SUMMARY, drop(4)),
    ],
    # Logprobs
    "the logprobs of a text are those of its deltas": [
        put(13, logprobs=spelled("Hello!").logprobs),
        of(RARE, put(4, logprobs=())),
        of(RARE, put(7, logprobs=())),
    ],
    "the bytes of a text's tokens spell the text": [
        of(RARE, put_tokens(*spelled("He").logprobs)),
        of(RARE, put_tokens(*spelled("H").logprobs)),
    ],
    "alternatives come likeliest first": [of(RARE, put(6, logprobs=(replace(Y, top_logprobs=Y.top_logprobs[::-1]),)))],
    "there are no more alternatives than were asked for": [
        of((started(top_logprobs=1), *RARE[1:]), lambda events: events)
    ],
}
"""Every rule, with the ways to break it alone in the stream of `whole_turn`."""


@pytest.mark.parametrize(("rule", "change"), [(rule, change) for rule, changes in BROKEN.items() for change in changes])
def test_a_stream_that_breaks_a_rule_is_refused_by_it(rule: str, change: Change) -> None:
    """Each rule, broken alone in a stream that is good otherwise, is the one that is named."""
    with pytest.raises(InvariantBroken) as caught:
        fed(change(written(whole_turn())))
    assert str(caught.value) == rule


def test_the_table_has_every_rule() -> None:
    """A rule that no stream was seen to break might be no rule at all."""
    nodes = [node for module in (invariants, lifecycle) for node in ast.walk(ast.parse(inspect.getsource(module)))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    stated = {
        call.args[-1].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("rule", "InvariantBroken")
        if isinstance(call.args[-1], ast.Constant)
    }
    assert stated == set(BROKEN)


@pytest.mark.parametrize("frames", [whole_turn(), CUT_TURN, TWO_CALLS, RARE, SUMMARY, (started(), finished())])
def test_good_streams_pass(frames: Frames) -> None:
    """What the writer writes of a turn is within the rules, and so is the same after some waiting."""
    fed(written(frames))
    fed(queued(written(frames)))


@pytest.mark.parametrize(("text", "tokens"), [("y", "y STOP"), ("y ST", "y ")])
def test_a_stop_text_may_cut_the_last_token(text: str, tokens: str) -> None:
    """The tokens of a text may go on where the text was cut, and the last may be left out."""
    cut = replace(spelled(text), logprobs=spelled(tokens).logprobs)
    fed(written((started(), *message(spelled("Hé"), cut), finished())))


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_response_may_end_while_it_waits(status: Any) -> None:
    """What fails or is cancelled in the queue was never in progress."""
    events = queued(written(whole_turn()))[:2]
    response = replace(begun(events), status=status, error=ERROR if status == "failed" else None)
    end = ResponseFailed if status == "failed" else ResponseIncomplete
    fed([*events, end(sequence_number=2, response=response)])


def test_a_cancelled_response_ends_as_incomplete() -> None:
    """Clients have no event for cancelled responses: theirs is the one status that is not the event's name."""
    *events, _ = written(CUT_TURN)
    response = replace(begun(events), status="cancelled", output=outputs(events))
    fed([*events, ResponseIncomplete(sequence_number=len(events), response=response)])


def test_a_failed_response_may_end_anywhere_between_items() -> None:
    """A failure needs no usage, and its last item may be incomplete in spite of it."""
    *events, _ = written(CUT_TURN)
    response = replace(begun(events), status="failed", output=outputs(events), error=ERROR)
    fed([*events, ResponseFailed(sequence_number=len(events), response=response)])


# Any stream at all


def commute(first: ResponseEvent, second: ResponseEvent) -> bool:
    """Whether two neighbours say the same in either order: deltas, or a delta and an annotation."""
    if isinstance(first, OutputTextAnnotationAdded) != isinstance(second, OutputTextAnnotationAdded):
        return any(hasattr(event, "delta") for event in (first, second))
    one, other = getattr(first, "delta", None), getattr(second, "delta", None)
    return one is not None and other is not None and one + other == other + one


@settings(max_examples=100, deadline=None)
@given(frames=turns(), data=st.data())
def test_every_event_is_needed(frames: Frames, data: st.DataObject) -> None:
    """A good stream without any one of its events is refused, also when the rest is numbered anew."""
    events = written(frames)
    fed(events)
    at = data.draw(st.integers(0, len(events) - 1))
    for changed in (drop(at)(events), [*events[:at], *events[at + 1 :]]):
        with pytest.raises(InvariantBroken):
            fed(changed)


@settings(max_examples=100, deadline=None)
@given(frames=turns(), data=st.data())
def test_every_order_matters(frames: Frames, data: st.DataObject) -> None:
    """A good stream with two neighbours swapped is refused, unless both are deltas that commute."""
    events = written(frames)
    at = data.draw(st.integers(0, len(events) - 2))
    assume(not commute(*events[at : at + 2]))
    swapped = [*events[:at], events[at + 1], events[at], *events[at + 2 :]]
    for changed in (renumbered(swapped), swapped):
        with pytest.raises(InvariantBroken):
            fed(changed)


# The stage


async def test_check_passes_events_on() -> None:
    """The stage hands on every event as it came."""
    events = written(whole_turn())
    async with aclosing(check(replay(events))) as passed:
        assert all(event is given for event, given in zip([event async for event in passed], events, strict=True))


@pytest.mark.parametrize(("change", "good"), [(repeat(4), 7), (drop(21), 21), (drop(3), 3)])
async def test_check_stops_at_the_broken_rule(change: Change, good: int) -> None:
    """Events pass up to the first that breaks a rule, or to an end that came too early."""
    passed = []
    with pytest.raises(InvariantBroken):
        async for event in check(replay(change(written(whole_turn())))):
            passed.append(event)  # noqa: PERF401 - a comprehension would be lost with the error
    assert len(passed) == good
