"""What two servers may do differently by chance is no difference; all else is one, and is named once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.workbench.wiretap.comparing import Difference, differences
from penstock.pipeline.recordings.wire import WireBody, WireEvent, WireFrame

Json = dict[str, Any]


def chat(*texts: str, start: str = "c", time: int = 1, **more: Any) -> list[WireFrame]:
    """The chunks of a chat completion with a thought and an answer in pieces."""
    says: list[Json] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "Hm"},
        *({"content": text} for text in texts),
    ]
    choices: list[Json] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in says]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    chunks: list[Json] = [
        {"id": start, "created": time, "model": start, "choices": [choice], **more} for choice in choices
    ]
    usage = {"prompt_tokens": 7, "completion_tokens": len(texts)}
    return [*(WireEvent(data=chunk) for chunk in [*chunks, {**chunks[0], "choices": [], "usage": usage}]), DONE]


DONE = WireEvent(text="[DONE]")


def changed(event: WireFrame, change: Json) -> WireEvent:
    """The event with other fields."""
    assert isinstance(event, WireEvent)
    data: Any = event.data
    return WireEvent(data=data | change)


def found(one: list[WireFrame], other: list[WireFrame], *, with_texts: bool = True) -> list[str]:
    return [f"{each.what}: {each.kind}: {each.problem}" for each in differences(one, other, with_texts=with_texts)]


@given(st.text(min_size=1), st.lists(st.integers(0), max_size=5), st.text(min_size=1), st.integers())
def test_pieces_ids_and_times_are_no_difference(text: str, places: list[int], other_id: str, time: int) -> None:
    at = sorted({place % len(text) for place in places} - {0})
    pieces = [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]
    assert found(chat(text), chat(*pieces, start=other_id, time=time)) == []


def joined(one: WireFrame, other: WireFrame) -> WireEvent:
    """One chunk that says what two say."""
    first, second = data_of(one), data_of(other)
    (choice,), (next_choice,) = first["choices"], second["choices"]
    delta: Json = {**choice["delta"]}
    for name, value in next_choice["delta"].items():
        delta[name] = delta.get(name, "") + value
    return WireEvent(data={**first, "choices": [{**next_choice, "delta": delta}]})


def data_of(event: WireFrame) -> Any:
    assert isinstance(event, WireEvent)
    return event.data


@given(st.sets(st.integers(0, 5)))
def test_what_a_server_says_at_once_is_no_difference(places: set[int]) -> None:
    """The last token may come with the reason for the end, or before it, as the load of the server has it."""
    apart = chat("Hel", "lo", "!")
    together = apart[:1]
    for at, chunk in enumerate(apart[1:-2]):
        together[-1:] = [joined(together[-1], chunk)] if at in places else [together[-1], chunk]
    assert found(apart, [*together, *apart[-2:]]) == []


@given(st.text(min_size=1), st.text(min_size=1))
def test_texts_count_only_if_there_is_no_choice(text: str, other: str) -> None:
    assert found(chat(text), chat(other), with_texts=False) == []
    assert bool(found(chat(text), chat(other))) == (text != other)


def test_text_that_differs_is_shown() -> None:
    assert found(chat("Par", "is"), chat("Pavia")) == [
        "text: chunk content: choices[].delta.content: 'Paris' != 'Pavia'"
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"new": "a"}, "not recorded (a text)"),
        ({"new": None}, None),
        ({"model": 1}, "model: a number != a text"),
        ({"model": None}, "model: not recorded (a text)"),
    ],
)
def test_field_that_differs_is_named(change: Json, expected: str | None) -> None:
    other = chat("a")
    one: list[WireFrame] = [*(changed(each, change) for each in other[:-1]), DONE]
    problems = found(one, other) if "model" in change else found(other, one)
    if expected is None:
        assert problems == []
    else:
        assert problems
        assert all(expected in problem and problem.startswith("field: chunk") for problem in problems)


def test_event_that_is_missing_is_named() -> None:
    events = chat("a")
    assert found(events, events[:1] + events[2:]) == ["order: chunk reasoning: only recorded"]
    assert found(events[:-1], events) == ["order: [DONE]: not recorded"]
    assert found(events, [*events[:1], events[2], events[1], *events[3:]])


def test_prompt_of_another_length_is_a_difference() -> None:
    other = chat("a")
    last = changed(other[-2], {"usage": {"prompt_tokens": 8, "completion_tokens": 5}})
    assert found(other, [*other[:-2], last, DONE]) == ["field: chunk usage: usage.prompt_tokens: 7 != 8"]


def test_events_of_messages_and_responses_have_the_kinds_of_their_parts() -> None:
    block: Json = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    added: Json = {"type": "response.output_item.added", "item": {"type": "message", "id": "msg_1"}}
    ping = WireEvent("ping", data={"type": "ping"})
    assert found([WireEvent(data=block), ping], [WireEvent(data=added)]) == [
        "order: content_block_start text: only recorded",
        "order: response.output_item.added message: not recorded",
    ]


def test_items_of_a_body_are_compared_one_by_one() -> None:
    thought, call = {"type": "reasoning", "id": "rs_1"}, {"type": "function_call", "arguments": '{"a": 1}', "name": "f"}
    one, other = ([WireBody(data={"output": items, "id": "r"})] for items in ([thought, call], [call | {"name": "g"}]))
    assert differences(one, other, with_texts=True) == [
        Difference("order", "output reasoning", "only recorded"),
        Difference("field", "output function_call", "name: 'f' != 'g'"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "type", "item", "usage", "content", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(st.lists(JSON.map(lambda data: WireEvent(data=data)) | JSON.map(lambda data: WireBody(data=data)), max_size=5))
def test_any_answer_equals_itself(frames: list[WireFrame]) -> None:
    assert found(frames, frames) == []
