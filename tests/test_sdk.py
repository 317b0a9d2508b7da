"""What openai-python makes of every stream: its types take each event, and its client puts the response together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import httpx2
import pytest
from hypothesis import given, settings
from openai import OpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from pipeline.errors import EngineFailed
from pipeline.frames import EmittedFrame, FinishReason
from pipeline.protocol.events import (
    DONE,
    OutputItemAdded,
    OutputItemDone,
    ResponseEvent,
    ResponseIncomplete,
    TerminalEvent,
    to_sse,
)
from pipeline.protocol.items import FunctionCall
from pipeline.record import read_frames
from stages.emit.emit import ResponseWriter
from tests.building import (
    FORMS,
    FOUND,
    HUNG,
    LISTED,
    LOGS,
    WRITTEN,
    Frames,
    approval,
    asking_turn,
    code_call,
    custom_tool_call,
    finished,
    form_call,
    function_call,
    mcp_call,
    mcp_list,
    message,
    on_the_wire,
    only_events,
    rare_turn,
    reasoning,
    refusal,
    served_turns,
    shell_call,
    shell_output,
    started,
    summarised_turn,
    types,
    web_call,
    whole_turn,
    written,
)
from tests.drawing import turns
from tests.streams import final, in_sdk_terms

FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDED = ("harmony/*", "chat/qwen3_*", "chat/tiny_qwen_*", "chat/llama3_*")
"""The families of chat models that are left out speak the same events."""
CASES = sorted(
    str(path.parent.relative_to(FIXTURES)) for some in RECORDED for path in FIXTURES.glob(f"{some}/events.jsonl")
)
PREFIXES = {
    "reasoning": "rs_",
    "message": "msg_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "local_shell_call": "lsh_",
    "shell_call": "sh_",
    "shell_call_output": "sho_",
    "apply_patch_call": "apc_",
    "mcp_list_tools": "mcpl_",
    "mcp_call": "mcp_",
    "mcp_approval_request": "mcpr_",
    "code_interpreter_call": "ci_",
    "web_search_call": "ws_",
}

Events = list[ResponseEvent]

_sdk_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_sdk_types = get_args(get_args(ResponseStreamEvent)[0])
_sdk_names = {name for event in _sdk_types for name in get_args(event.__annotations__["type"])}


@cache
def recorded(case: str) -> Events:
    """The events of a fixture."""
    frames = read_frames(FIXTURES / case / "events.jsonl", EmittedFrame)
    return only_events(frames)


def failed(frames: Frames) -> Events:
    """The events of a turn that breaks behind its frames."""
    writer = ResponseWriter()
    events = [event for frame in frames for event in writer.feed(frame)]
    return only_events([*events, *writer.fail(EngineFailed("The engine gave up."))])


CUTS: dict[str, Callable[..., Frames]] = {
    "reasoning": reasoning,
    "message": message,
    "refusal": refusal,
    "function_call": function_call,
    "custom_tool_call": custom_tool_call,
    "mcp_call": mcp_call,
    "approval": approval,
    "code": code_call,
    "search": web_call,
    "shell": shell_call,
    **{form: partial(form_call, form) for form in FORMS},
}
CUT_LADDERS: dict[str, list[str]] = {
    "mcp_call": ["mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done"],
    "approval": ["mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done"],
    "code": [
        "code_interpreter_call.in_progress",
        "code_interpreter_call_code.delta",
        "code_interpreter_call_code.done",
    ],
    "search": ["web_search_call.in_progress"],
}
"""What is told of a call of the server's that was cut before it ran."""

SERVED: dict[str, Frames] = {
    "mcp_list": mcp_list(LISTED),
    "mcp_list failed": mcp_list(error="It is down."),
    "mcp_call": mcp_call('{"q":', '"a"}'),
    "mcp_call failed": mcp_call("{}", error="No."),
    "code": code_call("1 +", " 1", outputs=(LOGS,)),
    "code without outputs": code_call("1 + 1"),
    "code failed": code_call("1 /", error="It hung."),
    "search": web_call("{}", found=(FOUND,)),
    "search failed": web_call("{}", error="It is down."),
    "shell": (*shell_call('{"cmd": ["ls"]}'), *shell_output(WRITTEN, HUNG)),
    "shell failed": (*shell_call('{"cmd": ["ls"]}'), *shell_output(error="It is down.")),
}
"""What the server runs, by how it ends."""

HAND_WRITTEN: dict[str, Events] = {
    "whole": written(whole_turn()),
    "rare": written(rare_turn()),
    "summarised": written(summarised_turn()),
    "nothing": written((started(), finished())),
    "served": written(served_turns()),
    "asked": written(asking_turn()),
    **{f"{name} alone": written((started(), *frames, finished())) for name, frames in SERVED.items()},
    **{
        f"{name} cut": written((started(), *cut("He", complete=False), finished("length")))
        for name, cut in CUTS.items()
    },
    **{f"{name} broken": failed((started(), *cut("He", complete=False)[:-1])) for name, cut in CUTS.items()},
}


def streams() -> list[Events]:
    """Every stream that we know."""
    return [*map(recorded, CASES), *HAND_WRITTEN.values()]


# The SDK's types


def check_types(events: Events) -> None:
    """The SDK's type for each event reads it, and has read all of it."""
    for event in events:
        body = in_sdk_terms(on_the_wire(event))
        parsed = _sdk_event.validate_python(body)
        assert parsed.type == body["type"]
        assert parsed.model_dump(mode="json", by_alias=True, exclude_unset=True) == body


@pytest.mark.parametrize("case", CASES)
def test_row4_events_of_fixtures_are_the_sdks(case: str) -> None:
    """Every event of a recorded stream is one of the SDK's union, with nothing that its type does not know."""
    assert {on_the_wire(event)["type"] for event in recorded(case)} <= _sdk_names
    check_types(recorded(case))


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_row4_events_of_rare_turns_are_the_sdks(name: str) -> None:
    """So is every event of turns that the model was not recorded with."""
    check_types(HAND_WRITTEN[name])


@settings(max_examples=50, deadline=None)
@given(turn=turns())
def test_row4_events_of_any_turn_are_the_sdks(turn: Frames) -> None:
    """So is every event of any turn."""
    check_types(written(turn))


# The SDK's client


class Accumulated:
    """What a client's ``responses.stream()`` makes of a stream."""

    def __init__(self, events: Events) -> None:
        body = b"".join(map(to_sse, events)) + DONE
        headers = {"Content-Type": "text/event-stream"}
        transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=body))
        with (
            httpx2.Client(transport=transport) as http,
            OpenAI(base_url="http://server.test/v1", api_key="none", http_client=http, max_retries=0) as client,
            client.responses.stream(model="m", input="x") as stream,
        ):
            self.events: list[Any] = list(stream)
            completed = types(events)[-1] == "completed"
            self.response = stream.get_final_response() if completed else self.events[-1].response


def check_accumulation(events: Events) -> None:
    """The client sees as many events, its snapshots end with the whole text, and its response is ours."""
    client = Accumulated(events)
    assert [event.type for event in client.events] == [on_the_wire(event)["type"] for event in events]
    response = client.response.model_dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
    assert unparsed(response) == on_the_wire(events[-1])["response"]
    snapshots = {event.output_index: event.snapshot for event in client.events if hasattr(event, "snapshot")}
    for index, snapshot in snapshots.items():
        item = final(events).output[index]
        assert snapshot == (item.arguments if isinstance(item, FunctionCall) else getattr(item, "text", None))


def unparsed(value: Any) -> Any:
    """Without what the client adds of its own."""
    if isinstance(value, dict):
        return {key: unparsed(part) for key, part in value.items() if key not in ("parsed", "parsed_arguments")}
    return [unparsed(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES)
def test_row2_the_client_accumulates_fixtures(case: str) -> None:
    """The client's own accumulation of a recorded stream is the response that we ended it with."""
    check_accumulation(recorded(case))


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_row2_the_client_accumulates_rare_turns(name: str) -> None:
    """So it is for turns that the model was not recorded with."""
    check_accumulation(HAND_WRITTEN[name])


@settings(max_examples=25, deadline=None)
@given(turn=turns())
def test_row2_the_client_accumulates_any_turn(turn: Frames) -> None:
    """So it is for any turn."""
    check_accumulation(written(turn))


# Identities: which event belongs to what


def of_items(events: Events) -> list[list[dict[str, Any]]]:
    """The JSON of the events of each item, by output index."""
    items: dict[int, list[dict[str, Any]]] = {}
    for body in map(on_the_wire, events):
        if "output_index" in body:
            items.setdefault(body["output_index"], []).append(body)
    return [items[index] for index in sorted(items)]


def ladders() -> Iterable[list[dict[str, Any]]]:
    return (ladder for events in streams() for ladder in of_items(events))


def test_b1_b2_row1_every_event_of_an_item_names_it() -> None:
    """From the event that adds an item to the one that it is done with, each has its index and its id.

    In the SDK's types the commands of a shell have the index alone.
    """
    for ladder in ladders():
        first, *between, last = ladder
        assert (first["type"], last["type"]) == ("response.output_item.added", "response.output_item.done")
        assert first["item"]["id"] == last["item"]["id"] != ""
        named = {body["item_id"] for body in between if not body["type"].startswith("response.shell_call_command.")}
        assert named <= {first["item"]["id"]}


def test_b1_b4_output_indexes_count_items_from_0() -> None:
    """The first item has index 0, the next is added with the next index under an id of its own."""
    for events in streams():
        added = [event for event in events if isinstance(event, OutputItemAdded)]
        assert [event.output_index for event in added] == list(range(len(added)))
        assert len({event.item.id for event in added}) == len(added)


def test_b2_b3_row3_the_content_index_is_that_of_the_part() -> None:
    """An item of ours has one part, with index 0 in each of its events, however many items came before."""
    for ladder in ladders():
        indexes = {body["content_index"] for body in ladder if "content_index" in body}
        assert indexes <= {0}
        assert {body["summary_index"] for body in ladder if "summary_index" in body} <= {0}


def test_b5_reasoning_has_a_part_of_its_own_kind() -> None:
    """Thinking is a reasoning_text part, or of a summary, that is added and done; never output_text."""
    seen = set()
    for ladder in ladders():
        if ladder[0]["item"]["type"] == "reasoning":
            kinds = [body["part"]["type"] for body in ladder if "part" in body]
            assert kinds in (["reasoning_text"] * 2, ["summary_text"] * 2)
            seen.add(kinds[0])
    assert seen == {"reasoning_text", "summary_text"}


def test_b6_ids_tell_the_kind_of_item() -> None:
    """Each kind of item has the prefix that OpenAI gives it."""
    seen = set()
    for ladder in ladders():
        kind = ladder[0]["item"]["type"]
        assert ladder[0]["item"]["id"].startswith(PREFIXES[kind])
        seen.add(kind)
    assert seen == set(PREFIXES)


def test_b7_a_call_keeps_both_of_its_ids() -> None:
    """A call is added and done under one id of its own and one call_id, and has nothing besides its fields."""
    fields = {"type", "id", "call_id", "name", "status"}
    for ladder in ladders():
        first, last = ladder[0]["item"], ladder[-1]["item"]
        if first["type"] in ("function_call", "custom_tool_call"):
            assert (first["id"], first["call_id"], first["name"]) == (last["id"], last["call_id"], last["name"])
            assert last["call_id"].startswith("call_")
            text = "arguments" if first["type"] == "function_call" else "input"
            assert set(first) - {"namespace"} == set(last) - {"namespace"} == {*fields, text}


def test_b9_v19_row6_row7_the_final_output_is_what_was_streamed() -> None:
    """The items of the last event are those that were done, to the letter: ids, call ids, statuses and all."""
    for events in streams():
        bodies = [on_the_wire(event) for event in events]
        done = [body["item"] for body in bodies if body["type"] == "response.output_item.done"]
        assert bodies[-1]["response"]["output"] == done


def test_row9_the_deltas_are_the_text() -> None:
    """What the deltas of an item sum to is what its done event, its part and the item say."""
    for ladder in ladders():
        deltas = [body["delta"] for body in ladder if body["type"].endswith(".delta")]
        if ladder[0]["item"]["type"] in TEXTS:
            assert "".join(deltas) == text_of(ladder[-1]["item"])
        elif ladder[0]["item"]["type"] == "shell_call":
            assert deltas == [command for command in ladder[-1]["item"]["action"]["commands"] if command]
        elif ladder[0]["item"]["type"] == "shell_call_output":
            written = [(at["delta"].get("stdout", ""), at["delta"].get("stderr", "")) for at in ladder if "delta" in at]
            assert written == [(at["stdout"], at["stderr"]) for at in ladder[-1]["item"]["output"]]
        else:
            assert deltas == []


TEXTS = {
    "message": "",
    "reasoning": "",
    "function_call": "arguments",
    "custom_tool_call": "input",
    "mcp_call": "arguments",
    "code_interpreter_call": "code",
}
"""The kinds of items whose text grows, and the field that it stands in where that is not a part."""


def text_of(item: dict[str, Any]) -> str:
    """The text of an item, wherever it stands."""
    if field := TEXTS[item["type"]]:
        return str(item[field])
    parts = [*item.get("content", ()), *item.get("summary", ())]
    return "".join(part.get("text", part.get("refusal")) for part in parts)


# Ends


def test_b13_v17_row15_the_last_event_is_the_status() -> None:
    """A stream ends in one terminal event, whose type is the status of its response."""
    for events in streams():
        terminal = [event for event in events if isinstance(event, TerminalEvent)]
        assert terminal == [events[-1]]
        assert types(events)[-1] == final(events).status


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
        ("max_tool_calls", "incomplete", "max_tool_calls"),
        ("max_turns", "incomplete", "max_turns"),
    ],
)
def test_v17_row16_the_status_is_why_it_ended(reason: FinishReason, status: str, details: str | None) -> None:
    """Status and incomplete_details say what ended the response, also where it has said nothing."""
    for items in (message("Hello!"), ()):
        response = final(written((started(), *items, finished(reason))))
        assert response.status == status
        assert (response.incomplete_details and response.incomplete_details.reason) == details


@pytest.mark.parametrize(
    "name", [f"{name} {end}" for name in CUTS if name not in CUT_LADDERS for end in ("cut", "broken")]
)
def test_b34_v20_row5_row14_what_is_cut_climbs_its_whole_ladder(name: str) -> None:
    """The item that a limit or an error cuts has its done events, in the stream and in the response as incomplete."""
    events = HAND_WRITTEN[name]
    whole = written((started(), *CUTS[name.split(maxsplit=1)[0]]("He"), finished()))
    assert types(events)[:-1] == types(whole)[:-1]
    (done,) = [event.item for event in events if isinstance(event, OutputItemDone)]
    assert done.status == "incomplete"
    assert final(events).output == (done,)


@pytest.mark.parametrize("end", ["cut", "broken"])
@pytest.mark.parametrize("name", CUT_LADDERS)
def test_v7_b11_what_is_cut_is_not_said_to_run(name: str, end: str) -> None:
    """A call of the server's that was cut never ran: no event says that it did, and its item has no result."""
    events = HAND_WRITTEN[f"{name} {end}"]
    assert types(events)[2:-1] == ["output_item.added", *CUT_LADDERS[name], "output_item.done"]
    (done,) = [on_the_wire(event)["item"] for event in events if isinstance(event, OutputItemDone)]
    assert done["status"] == "incomplete"
    assert not [done[name] for name in ("output", "outputs", "error") if done.get(name)]


def test_row14_only_the_last_item_is_incomplete() -> None:
    """Where a stream was cut, the items ahead of the cut are complete all the same."""
    for events in streams():
        statuses = [getattr(item, "status", "completed") for item in final(events).output]
        assert set(statuses[:-1]) <= {"completed", "failed"}
        assert isinstance(events[-1], ResponseIncomplete) or statuses[-1:] != ["incomplete"] or final(events).error
