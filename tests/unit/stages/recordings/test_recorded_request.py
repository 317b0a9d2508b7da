"""Recorded requests, and the parts of them that count for a match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.frames import GenerationStarted, TokenFrame
from penstock.pipeline.protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    Reasoning,
    ReasoningText,
)
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.recordings.recorded_request import ComparableRequest
from penstock.stages.recordings.recordings import read_recordings
from tests.support.paths import HARMONY
from tests.support.stored_responses import response


def tool(name: str, description: str = "") -> dict[str, Any]:
    return {"type": "function", "name": name, "description": description}


def request(*items: Item, tools: tuple[dict[str, Any], ...] = (), **facts: Any) -> ComparableRequest:
    return ComparableRequest(replace(response("resp_1"), tools=tools, **facts), items)


def message(text: str, item_id: str = "msg_1") -> Message:
    return Message(item_id, "completed", "user", (InputText(text),))


def call(call_id: str, name: str = "f") -> FunctionCall:
    return FunctionCall(f"fc_{call_id}", call_id, name, "{}", "completed")


def output(call_id: str, text: str = "1") -> FunctionCallOutput:
    return FunctionCallOutput(f"fco_{call_id}", call_id, text, "completed")


names = st.text("abc", min_size=1, max_size=3)


@given(st.lists(names, min_size=2, max_size=5, unique=True), st.data())
def test_ids_do_not_count_but_references_do(ids: list[str], data: st.DataObject) -> None:
    others = data.draw(st.lists(names, min_size=len(ids), max_size=len(ids), unique=True))
    order = data.draw(st.permutations(range(len(ids))))

    def talk(names: list[str], order: list[int]) -> ComparableRequest:
        return request(*map(call, names), *(output(names[at]) for at in order))

    assert talk(ids, order).key == talk(others, order).key
    straight = list(range(len(ids)))
    assert (talk(ids, order).key == talk(ids, straight).key) == (order == straight)


def test_dates_and_reasoning_do_not_count() -> None:
    """They differ between runs, or are not sent again."""
    thought = Reasoning("rs_1", content=(ReasoningText("Hm."),))
    first = request(message("Today is 2026-11-22."), thought, message("So?"))
    second = request(message("Today is 2027-01-01.", "msg_2"), message("So?", "msg_3"))
    assert first.key == second.key
    assert first.key != request(message("Today is not 2026-11-22."), message("So?")).key


def test_tools_count_by_name() -> None:
    one, two = tool("one"), tool("two")
    wanted = request(message("Hi"), tools=(one, two))
    assert wanted.key == request(message("Hi"), tools=(two, tool("one", "Another one."))).key
    assert wanted.key != request(message("Hi"), tools=(one,)).key
    assert wanted.likeness(wanted) > wanted.likeness(request(message("Hi"), tools=(two, one)))


def test_history_may_come_from_the_request_or_the_store() -> None:
    whole = request(message("One."), message("Two."))
    continued = ComparableRequest(whole.response, (message("Two."),), (message("One."),))
    assert whole.key == continued.key
    unknown = ComparableRequest(whole.response, (message("Two."),), None)
    assert unknown.key in continued.keys
    assert unknown.key not in whole.keys


@pytest.mark.parametrize(
    ("recorded", "problem"),
    [
        (request(message("Hello.")), "its item 1 is"),
        (request(message("Hi."), message("Hi.")), "it has 2 items, and this request has 1"),
        (request(message("Hi."), tools=(tool("f"),)), "its tools are f, and here they are none"),
    ],
)
def test_difference_of_two_requests_is_described(recorded: ComparableRequest, problem: str) -> None:
    assert problem in request(message("Hi.")).difference(recorded)


@pytest.mark.parametrize(
    ("recorded", "text"),
    [
        (request(message("Hi.")), "Hi."),
        (request(message("Hi."), tools=(tool("f"),)), ""),
        (request(message("Hi."), message("Ho.")), ""),
        (request(message("Hi."), call("1"), output("1")), ""),
        (ComparableRequest(response("resp_1"), (message("Hi."),), None), ""),
        (ComparableRequest(response("resp_1"), (message("Hi."),), (message("Ho."),)), ""),
    ],
)
def test_text_alone_is_an_example_only_if_it_suffices(recorded: ComparableRequest, text: str) -> None:
    assert recorded.text == text


def test_recording_is_found_without_its_conversation(tmp_path: Path) -> None:
    for name in ("function_call", "function_call_result", "greeting"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokens.jsonl").write_bytes((HARMONY / name / "tokens.jsonl").read_bytes())
    whole = {recorded.name: recorded.request for recorded in read_recordings(HARMONY).all}
    for recorded in read_recordings(tmp_path).all:
        assert recorded.request.key == whole[recorded.name].key
        started = next(read_frames(recorded.folder / "tokens.jsonl", TokenFrame))
        assert isinstance(started, GenerationStarted)
